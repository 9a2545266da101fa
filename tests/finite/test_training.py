"""train: against gradient descent by hand and the infinite network, many seeds, early stops, checkpoints, errors."""

import signal
import subprocess
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ntk_ln as nl
from ntk_ln._dtype import enable_x64

X = np.linspace(-1, 1, 9)[:, None]
Y = np.sin(3 * X[:, 0])
NET = nl.mlp(1, layer_norm="first")
BATCH = nl.Network(nl.Dense(w_std=2**0.5, b_std=0.1), nl.BatchNorm(affine=True), nl.Activation("relu"), nl.Dense(b_std=0.1))
SKIP = nl.Network(nl.Dense(b_std=0.3), nl.Residual(nl.Activation("relu"), nl.Dense(w_std=1.3, b_std=0.2)))
train = partial(nl.train, NET, X, Y, width=16)


def test_gradient_descent_is_what_it_says():
    rate, steps = 0.02, 40
    got = train(seeds=(3, 5), steps=steps, optimizer="gradient_descent", learning_rate=rate, dtype=np.float64)
    with enable_x64(True):
        for i, seed in enumerate((3, 5)):
            params = NET.init(jax.random.key(seed), in_features=1, width=16, dtype=np.float64)

            def loss(params):
                return 0.5 * jnp.sum((NET.apply(params, X)[:, 0] - Y) ** 2)

            losses, step = [], jax.jit(jax.value_and_grad(loss))
            for _ in range(steps):
                value, gradient = step(params)
                losses.append(value)
                params = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
            np.testing.assert_allclose(got.losses[:, i], losses, rtol=1e-10)
            np.testing.assert_allclose(got.apply(X)[i], NET.apply(params, X)[:, 0], atol=1e-10)
            np.testing.assert_allclose(got.apply(X)[i], NET.apply(got.network_params(i), X)[:, 0], atol=1e-12)


@pytest.mark.slow
def test_adam_acts_on_the_standard_parametrisation():
    got = train(steps=5, optimizer="adam", learning_rate=0.01, dtype=np.float64)
    with enable_x64(True):
        start = nl.to_standard(NET, NET.init(jax.random.key(0), in_features=1, width=16, dtype=np.float64)).params

        def loss(params):
            return 0.5 * jnp.sum((NET.apply(nl.from_standard(NET, params), X)[:, 0] - Y) ** 2)

        adam = optax.adam(0.01)
        params, state = start, adam.init(start)
        for _ in range(5):
            updates, state = adam.update(jax.grad(loss)(params), state, params)
            params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(got.apply(X)[0], NET.apply(nl.from_standard(NET, params), X)[:, 0], atol=1e-9)


def test_an_optimizer_of_your_own_and_outputs():
    y = np.stack([Y, -Y], axis=1)
    own = nl.train(NET, X, y, width=16, steps=20, optimizer=optax.sgd(0.01, momentum=0.9))
    named = nl.train(NET, X, y, width=16, steps=20, optimizer="momentum", learning_rate=0.01)
    assert own.apply(X).shape == (1, 9, 2)
    assert own.learning_rate is None
    np.testing.assert_array_equal(own.apply(X), named.apply(X))


@pytest.mark.slow
def test_the_mean_over_wide_networks_is_the_posterior_at_the_same_stop_time():
    # With a large bias the kernel changes little; the start is taken out exactly by f_t - f_0.
    net = nl.mlp(1, b_std=1.0, layer_norm="first")
    got = nl.train(net, X, Y, width=1024, seeds=8, steps=20, optimizer="gradient_descent")
    rate, start = got.learning_rate, got.apply(X, initial=True)
    p = nl.posterior(nl.NTK(net), X, Y[:, None] - start.T, stop_time=20 * rate, step_size=rate)
    points = np.array([[-3.0], [0.1], [2.0]])
    changes, predicted = got.apply(points) - got.apply(points, initial=True), p.mean(points).T
    errors = changes - predicted
    assert np.linalg.norm(errors) < 0.1 * np.linalg.norm(predicted)
    # No bias: within 4 standard errors, and what the O(1/width) correction may leave.
    assert (np.abs(errors.mean(axis=0)) < 4 * errors.std(axis=0, ddof=1) / 8**0.5 + 5 / 1024).all()


@pytest.mark.slow
def test_each_network_stops_by_itself():
    got = train(seeds=3, steps=3000, learning_rate=0.01, stop_loss=0.1)
    assert len(set(got.steps.tolist())) > 1
    assert (got.losses[-1] <= 0.1).all()
    assert len(got.losses) == got.steps.max() + 1
    for i in range(3):
        alone = train(seeds=(i,), steps=3000, learning_rate=0.01, stop_loss=0.1)
        assert abs(alone.steps[0] - got.steps[i]) <= 1  # the loss may round to the other side
        np.testing.assert_allclose(alone.apply(X)[0], got.apply(X)[i], atol=1e-2)


@pytest.mark.slow
def test_batch_norm_keeps_the_last_statistics():
    got = nl.train(BATCH, X, Y, width=16, seeds=2, steps=30)
    losses = 0.5 * ((got.apply(X) - Y) ** 2).sum(axis=1)
    assert (losses < got.losses[0]).all()
    outputs, kept = BATCH.apply_batch(got.network_params(1), jnp.asarray(X, jnp.float32))
    np.testing.assert_allclose(outputs[:, 0], got.apply(X)[1], atol=1e-5)
    np.testing.assert_allclose(kept[1]["var"], got.network_params(1)[1]["var"], rtol=1e-5)
    far = got.apply(np.array([[1e3], [1e6]]))
    np.testing.assert_allclose(far[:, 1] / far[:, 0], 1e3, rtol=1e-2)  # it grows as the plain network does


@pytest.mark.slow
def test_batch_norm_inside_a_skip():
    net = nl.Network(nl.Dense(b_std=0.1), nl.Residual(nl.BatchNorm(), nl.Activation("relu"), nl.Dense()), nl.Dense())
    got = nl.train(net, X, Y, width=16, steps=30)
    assert got.losses[-1] < got.losses[0]
    assert not np.allclose(got.network_params(0)[1][0]["var"], 1)


@pytest.mark.parametrize("kernel", [nl.NTK, nl.NNGP, nl.NeuralTangentsKernel])
def test_batch_norm_has_no_kernel(kernel):
    with pytest.raises(ValueError, match=r"BatchNorm\(affine=True\) has no infinite-width kernel"):
        kernel(BATCH)


def test_batch_norm_with_frozen_statistics_has_an_empirical_kernel():
    params = nl.train(BATCH, X, Y, width=8, steps=3).network_params(0)
    np.testing.assert_allclose(nl.EmpiricalNTK(BATCH, params)(X), nl.EmpiricalNTK(BATCH.apply, params)(X), rtol=2e-5, atol=1e-5)
    assert nl.network_from_config(BATCH.to_config()).to_config() == BATCH.to_config()


@pytest.mark.slow
def test_training_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "training.npz"
    settings = {"seeds": 2, "optimizer": "adam"}
    train(steps=150, checkpoint=path, **settings)
    resumed, whole = train(steps=300, checkpoint=path, **settings), train(steps=300, **settings)
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    np.testing.assert_array_equal(resumed.apply(X), whole.apply(X))
    assert [file.name for file in tmp_path.iterdir()] == ["training.npz"]
    for change, says in (({"seeds": 3}, "seeds was"), ({"learning_rate": 0.1}, "learning_rate was 0.001, is 0.1")):
        with pytest.raises(ValueError, match=f"is a checkpoint of another training: {says}"):
            train(steps=300, checkpoint=path, **(settings | change))
    with pytest.raises(ValueError, match="is a checkpoint of another training: data was"):
        nl.train(NET, X, 2 * Y, width=16, steps=300, checkpoint=path, **settings)
    other = tmp_path / "own.npz"
    nl.train(NET, X, Y, width=16, steps=2, optimizer=optax.sgd(0.01), checkpoint=other)
    with pytest.raises(ValueError, match="is a checkpoint of another training: its optimizer kept other arrays"):
        nl.train(NET, X, Y, width=16, steps=4, optimizer=optax.adam(0.01), checkpoint=other)
    with pytest.raises(ValueError, match=r"has taken 300 steps already\. Got steps=200: ask for 300 or more"):
        train(steps=200, checkpoint=path, **settings)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is no checkpoint of `train`"):
        train(steps=300, checkpoint=path, **settings)
    with open(path, "wb") as file:
        np.save(file, X)
    with pytest.raises(ValueError, match="is no checkpoint of `train`: it holds a single array"):
        train(steps=300, checkpoint=path, **settings)


def test_functions_and_optimizers_of_your_own_are_known_by_their_numbers(tmp_path):
    path = tmp_path / "training.npz"

    def run(scale, optimizer):
        net = nl.Network(nl.Dense(b_std=0.3), nl.Activation(lambda x: scale * jnp.tanh(x)), nl.Dense())
        return nl.train(net, X, Y, width=8, steps=2, optimizer=optimizer, checkpoint=path)

    run(1.0, optax.adam(0.1))
    run(1.0, optax.adam(0.1))
    for change, says in (((2.0, optax.adam(0.1)), "network"), ((1.0, optax.adam(0.1, b1=0.8)), "optimizer")):
        with pytest.raises(ValueError, match=f"is a checkpoint of another training: its {says} gave other numbers"):
            run(*change)
    path.unlink()
    run(1.0, optax.sgd(0.1))
    with pytest.raises(ValueError, match="its optimizer gave other numbers"):
        run(1.0, optax.sgd(0.2))
    path.unlink()
    run(1.0, optax.sgd(optax.cosine_decay_schedule(0.01, 1000)))
    run(1.0, optax.sgd(optax.cosine_decay_schedule(0.01, 1000)))
    with pytest.raises(ValueError, match="its optimizer gave other numbers"):
        run(1.0, optax.sgd(optax.cosine_decay_schedule(0.01, 2000)))


def test_params_of_a_network_that_was_not_trained_are_refused():
    training = train(steps=1, seeds=[5, 7])
    for index in (2, 5, -1, 1.0):
        with pytest.raises(ValueError, match=rf"network_params\(index\)` needs a whole number index from 0 to 1\. Got {index}\."):
            training.network_params(index)


def test_a_gram_matrix_of_zeros_gives_no_learning_rate():
    net = nl.mlp(1, b_std=0.0, b_out=0.0)
    with pytest.raises(ValueError, match="needs a learning_rate here: the infinite network's Gram matrix is 0"):
        nl.train(net, np.zeros((3, 2)), np.ones(3), width=8, steps=2, optimizer="gradient_descent")


def test_an_optimizer_that_keeps_a_random_key(tmp_path):
    path, optimizer = tmp_path / "training.npz", optax.noisy_sgd(0.01, key=jax.random.key(0))
    train(steps=2, seeds=2, optimizer=optimizer, checkpoint=path)
    resumed = train(steps=4, seeds=2, optimizer=optimizer, checkpoint=path)
    np.testing.assert_array_equal(resumed.losses, train(steps=4, seeds=2, optimizer=optimizer).losses)


def test_where_no_checkpoint_can_be_written(tmp_path):
    for path in (tmp_path / "none" / "training.npz", tmp_path):
        with pytest.raises(ValueError, match=r"cannot write the checkpoint '.*: .*Give a path in a folder where you may write"):
            train(steps=1, checkpoint=path)


def test_what_a_killed_process_left_is_removed(tmp_path):
    for name in (".training.npz.abcd_123.tmp", ".other.npz.abcd_123.tmp"):
        (tmp_path / name).touch()
    train(steps=1, checkpoint=tmp_path / "training.npz")
    assert sorted(file.name for file in tmp_path.iterdir()) == [".other.npz.abcd_123.tmp", "training.npz"]


def test_the_last_step_may_diverge_too():
    with pytest.raises(ValueError, match=r"diverged: the loss of seed 0 was .* at first and .* after 1 steps"):
        train(steps=1, optimizer=optax.sgd(1e20))


@pytest.mark.parametrize("scales", [(1e30, 1.0), (1.0, 1e30)])
def test_numbers_too_large_to_square(scales):
    with pytest.raises(ValueError, match=r"loss of seed 0 is inf before the first step: divide `x` and `y` by their scale"):
        nl.train(nl.mlp(1), scales[0] * X, scales[1] * Y, width=8, steps=2)


KILLED = """
import sys, numpy as np, ntk_ln as nl
from ntk_ln.finite import training
training.CHECKPOINT_SECONDS = 0.0
x = np.linspace(-1, 1, 9)[:, None]
nl.train(nl.mlp(1, layer_norm="first"), x, np.sin(3 * x[:, 0]), width=16, steps=10**6, checkpoint=sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_was_written(tmp_path):
    path = tmp_path / "training.npz"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)])
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with np.load(path) as file:
        done = len(file["losses"])
    resumed, whole = train(steps=done + 50, checkpoint=path), train(steps=done + 50)
    np.testing.assert_array_equal(resumed.losses, whole.losses)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"width": 0}, ValueError, r"needs a whole number width >= 1\. Got 0\."),
        ({"steps": 1.5}, ValueError, r"needs a whole number steps >= 1\. Got 1\.5\."),
        ({"seeds": 0}, ValueError, r"needs seeds >= 1, or different whole numbers\. Got 0\."),
        ({"seeds": [2**32]}, ValueError, r"needs seeds from 0 to 2\*\*32 - 1: others repeat those\. Got 4294967296\."),
        ({"seeds": (1, -1)}, ValueError, r"others repeat those\. Got -1\."),
        ({"optimizer": optax.lbfgs()}, ValueError, r"needs an optimizer that takes gradients alone.*'value_fn'\."),
        ({"optimizer": optax.polyak_sgd()}, ValueError, r"needs an optimizer that takes gradients alone"),
        ({"seeds": [1, 1]}, ValueError, r"different whole numbers\. Got \[1, 1\]\."),
        ({"optimizer": "lbfgs"}, ValueError, r"knows the optimizers adam, gradient_descent, momentum\. Got 'lbfgs'\."),
        ({"optimizer": 3}, TypeError, r"needs an optimizer by name or of optax\. Got 3\."),
        ({"optimizer": optax.sgd(0.1), "learning_rate": 0.1}, ValueError, r"an optimizer of your own has its learning rate"),
        ({"learning_rate": -1.0}, ValueError, r"needs a finite learning_rate > 0\. Got -1\.0\."),
        ({"stop_loss": float("nan")}, ValueError, r"needs a finite stop_loss >= 0\. Got nan\."),
        ({"dtype": np.float16}, ValueError, r"needs dtype float32 or float64\. Got float16\."),
        (
            {"optimizer": "gradient_descent", "learning_rate": 50.0, "steps": 200},
            ValueError,
            r"diverged at learning_rate=50: the loss of seed 0 .* lambda_max = .*: gradient descent needs learning_rate < 2/lambda_max",
        ),
    ],
)
def test_bad_settings(change, error, says):
    with pytest.raises(error, match=says):
        train(**({"steps": 3} | change))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: nl.train(3, X, Y), TypeError, r"needs a Network\. Got int\."),
        (lambda: nl.train(NET, X[:, 0], Y), ValueError, r"of shape \(n, d\).* One feature"),
        (lambda: nl.train(NET, X, Y[:-1]), ValueError, r"one row of `y` per row of `x`"),
        (lambda: nl.train(NET, X[:0], Y[:0]), ValueError, r"needs at least one row"),
        (lambda: nl.train(NET, X, np.full(9, np.nan)), ValueError, r"needs finite numbers\. Row 0 of `y`"),
        (lambda: nl.train(NET, X, np.ma.array(Y, mask=Y > 0)), ValueError, r"`y` has masked entries"),
        (
            lambda: nl.train(SKIP, X, Y, width=4),
            ValueError,
            r"as many outputs as `y` has, 1\. Got 4: its last layer is Residual\(.*\)\. End the network in a Dense\.",
        ),
        (lambda: nl.train(BATCH, X, Y, optimizer="gradient_descent"), ValueError, r"needs a learning_rate for 'gradient_descent'"),
        (lambda: train(steps=1).apply(np.ones((2, 3))), ValueError, r"needs x of shape \(n, 1\)\. Got shape \(2, 3\)\."),
    ],
)
def test_bad_data(call, error, says):
    with pytest.raises(error, match=says):
        call()
