"""RMSNorm, Residual, norms on the raw input, repeated layers, functions of one's own, profiles and the standard parametrisation."""

from math import inf, pi

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_accurate, slow

import ntk_ln as nl
from ntk_ln._dtype import enable_x64
from ntk_ln.kernels import closed_form
from ntk_ln.layers._repeat import Repeat, fold

EPS = np.finfo(np.float64).eps
RNG = np.random.default_rng(5)
X = RNG.normal(size=(4, 3))
RELU = nl.Activation("relu")


def dense(w_std=1.3, b_std=0.3):
    return nl.Dense(w_std=w_std, b_std=b_std)


INSIDE = nl.Network(dense(), nl.Residual(nl.LayerNorm(), RELU, dense()), RELU, dense())
TRUNK = nl.Network(dense(), nl.Residual(nl.LayerNorm(), RELU, dense()), nl.LayerNorm(), RELU, dense())


# --- RMSNorm and norms on the raw input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_rms_norm_by_hand(eps):
    x = np.array([[1.0, 2.0, 3.0, 6.0]], np.float32)
    layer = nl.RMSNorm(eps=eps, affine=True)
    params = {"gain": jnp.full(4, 2.0)}
    assert jax.tree.map(jnp.shape, layer.init(jax.random.key(0), 4, 4, jnp.float32)) == {"gain": (4,)}
    np.testing.assert_allclose(layer.apply(params, jnp.asarray(x)), 2 * x / np.sqrt(12.5 + eps), rtol=1e-6)


def test_a_norm_on_the_raw_input_normalises_the_rows():
    plain = nl.NTK(nl.mlp(2))
    for norm, rows in (
        (nl.LayerNorm(eps=0.2), (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 0.2)),
        (nl.RMSNorm(), X / np.sqrt((X**2).mean(1, keepdims=True))),
    ):
        net = nl.Network(norm, *nl.mlp(2).layers)
        assert_accurate(nl.NTK(net)(X), plain(rows), scale=np.abs(plain(rows)), tol=64 * EPS, what=repr(norm))
        params = net.init(jax.random.key(0), in_features=3, width=8)
        np.testing.assert_allclose(
            net.apply(params, jnp.asarray(X, jnp.float32)), nl.mlp(2).apply(params[1:], jnp.asarray(rows, jnp.float32)), atol=1e-5
        )


def test_a_large_mean_is_taken_away_without_loss():
    rows = np.array([[1.0, 2.0, 4.0], [1.0, 2.5, 4.0]])
    net = nl.Network(nl.LayerNorm(), *nl.mlp(1).layers)
    np.testing.assert_allclose(nl.NTK(net)(rows + 2.0**40), nl.NTK(net)(rows), rtol=64 * EPS)


@pytest.mark.parametrize("power", [-990, -100, 100, 500, 1000])  # of 2: the inputs are scaled exactly
def test_a_norm_on_the_raw_input_takes_every_scale(power):
    for norm in (nl.LayerNorm(), nl.RMSNorm()):
        net = nl.Network(norm, *nl.mlp(1).layers)
        np.testing.assert_allclose(nl.NTK(net)(2.0**power * X), nl.NTK(net)(X), rtol=64 * EPS)


@pytest.mark.slow
def test_a_norm_on_the_raw_input_has_a_far_field_and_a_supremum():
    for norm in (nl.LayerNorm(eps=0.3), nl.RMSNorm(eps=0.3), nl.LayerNorm()):
        net = nl.Network(norm, *nl.mlp(1).layers)
        c = nl.kernel_sup(nl.NTK(net))
        assert c.exact
        diagonal = nl.NTK(net).diag(np.array([1.0, -1.0, 0.5]) * 10.0 ** np.arange(-6, 9)[:, None])
        assert diagonal.max() <= c.value * (1 + 32 * EPS)
        assert diagonal.max() > c.value * (1 - 1e-6)
        p = nl.posterior(nl.NTK(net), X, X[:, 0])
        limit = nl.far_field(p, [1.0, -2.0, 0.5])
        v = np.array([[1.0, -2.0, 0.5]]) / np.sqrt(5.25)
        assert abs(p.mean(1e9 * v)[0] - limit.coefficient) < 1e-8 * np.abs(p.alpha).sum()


def test_what_a_norm_on_the_raw_input_refuses():
    net = nl.Network(nl.LayerNorm(), dense())
    with pytest.raises(ValueError, match=r"layer 0, LayerNorm\(affine=True\): a trained gain on the raw input"):
        nl.Network(nl.LayerNorm(affine=True), dense())
    with pytest.raises(ValueError, match=r"makes 0 of every row with one feature"):
        nl.NTK(net)([[1.0]])
    with pytest.raises(ValueError, match=r"0/0 of a row of equal features. Row 1 is one"):
        nl.NTK(net)([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
    with pytest.raises(ValueError, match=r"0/0 of a zero input. Row 0 is one"):
        nl.NNGP(nl.Network(nl.RMSNorm(), dense()))([[0.0, 0.0]])
    with pytest.warns(UserWarning, match=r"makes \(1, -1\) or \(-1, 1\) of rows with two features"):
        nl.NTK(net)([[1.0, 2.0]])
    assert np.isfinite(nl.NTK(nl.Network(nl.LayerNorm(eps=0.1), dense()))([[2.0, 2.0, 2.0]])).all()


def test_units_that_are_all_equal_at_zero():
    # softplus(0) = log 2 for every unit: a LayerNorm after it makes 0/0 of them, an RMSNorm does not.
    def net(norm, b_std):
        return nl.Network(nl.Dense(b_std=b_std), nl.Activation("cos"), norm, dense())

    with pytest.raises(ValueError, match=r"0/0 of a zero input. Row 0 is one"):
        nl.NTK(net(nl.LayerNorm(), 0.0))([[0.0]])
    for allowed in (net(nl.RMSNorm(), 0.0), net(nl.LayerNorm(eps=0.1), 0.0), net(nl.LayerNorm(), 0.3)):
        assert np.isfinite(nl.NTK(allowed)([[0.0], [1.0]])).all()


# --- Residual ------------------------------------------------------------------------------------------------------------


def test_a_skip_adds_two_kernels():
    body = (RELU, dense())
    net, inner = nl.Network(dense(), nl.Residual(*body)), nl.Network(dense(), *body)
    trunk = nl.Network(dense())
    for kernel in (nl.NTK, nl.NNGP):
        wanted = kernel(trunk)(X) + kernel(inner)(X)
        assert_accurate(kernel(net)(X), wanted, scale=np.abs(wanted).max(), tol=8 * EPS, what="trunk + body")


@pytest.mark.slow
def test_only_a_norm_on_the_trunk_bounds_the_network():
    assert nl.kernel_sup(nl.NTK(INSIDE)) == nl.KernelSup(inf, True)
    bounded = nl.kernel_sup(nl.NTK(TRUNK))
    assert bounded.value < inf
    assert not bounded.exact
    assert INSIDE.has_norm
    check = nl.check_theorem_3_2(INSIDE)
    assert not check.applies
    assert "no norm layer on its trunk" in check.evidence["reason"]
    assert nl.check_theorem_3_2(TRUNK).holds
    y = np.array([0.5, -1.0, 2.0, 0.3])
    assert nl.check_theorem_3_3(TRUNK, X, y).holds
    assert not nl.check_theorem_3_1(INSIDE, X, y).applies


@pytest.mark.parametrize("net", [INSIDE, slow(TRUNK)])
def test_the_far_field_of_a_skip(net):
    p = nl.posterior(nl.NTK(net), X, np.array([0.5, -1.0, 2.0, 0.3]))
    v = np.array([0.6, 0.8, 0.0])
    f = nl.far_field(p, v)
    assert f.power == (0 if net is TRUNK else 1)
    for r in (1e3, 1e4):
        mean = p.mean(r * v[None, :])[0] / r**f.power
        assert abs((mean - f.coefficient) * r**f.correction_power - f.correction) < 20 / r * np.abs(p.alpha).sum()


def test_a_skip_whose_body_grows_faster():
    # The trunk grows as r, the body as r^2: brought to one exponent, right at infinity too.
    net = nl.Network(dense(), nl.Residual(nl.Activation("relu_power", degree=2), dense()))
    p = nl.posterior(nl.NTK(net), X, np.array([0.5, -1.0, 2.0, 0.3]))
    f = nl.far_field(p, [1.0, 1.0, 0.0])
    assert (f.power, f.correction_power) == (2, 1)
    r, v = 1e4, np.array([[1.0, 1.0, 0.0]]) / 2**0.5
    assert abs((p.mean(r * v)[0] / r**2 - f.coefficient) * r - f.correction) < 1e-2 * np.abs(p.alpha).sum()
    assert nl.kernel_sup(nl.NTK(net)).value == inf


@pytest.mark.slow
def test_empirical_kernels_pass_through_skips():
    net = nl.Network(dense(), nl.Residual(nl.RMSNorm(affine=True), RELU, nl.Residual(RELU_FREE, dense())), RELU, dense())
    params = net.init(jax.random.key(1), in_features=3, width=6)
    x = jnp.asarray(X, jnp.float32)

    def apply(params, x):
        return net.apply(params, x)

    layerwise, jacobian = nl.EmpiricalNTK(net, params), nl.EmpiricalNTK(apply, params)
    np.testing.assert_allclose(layerwise(x), jacobian(x), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(layerwise.diag(x), jacobian.diag(x), rtol=2e-5)


RELU_FREE = nl.Dense(w_std=0.7)


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        (lambda: [nl.Residual(RELU, dense()), dense()], r"layer 0, Residual\(.*a skip around the raw input"),
        (
            lambda: [dense(), nl.LayerNorm(affine=True), nl.Residual(RELU, dense())],
            r"layer 2, Residual.*a trained gain right before a skip has no rule: put a Dense between",
        ),
        (
            lambda: [dense(), RELU, nl.Residual(RELU, dense())],
            r"layer 2, Residual.*layer 0 of its body, Activation\('relu'\): an act",
        ),
        (lambda: [dense(), RELU, nl.Residual(dense()), RELU, dense()], r"layer 3, Activation.*needs Gaussian units"),
        (
            lambda: [nl.Residual(RELU)],
            r"`Residual\(\*body\)` needs a Dense as the last layer of its body. Got Activation\('relu'\)",
        ),
        (lambda: [nl.Residual()], r"`Residual\(\*body\)` needs a Dense as the last layer of its body. Got nothing"),
        (lambda: [dense(), RELU, nl.RMSNorm()], r"needs a Dense, or a Residual that ends in one, as its last layer.*Got RMSNorm"),
    ],
)
def test_where_a_layer_may_not_stand(layers, match):
    with pytest.raises(ValueError, match=match):
        nl.Network(*layers())


def test_a_body_of_something_else_is_refused():
    with pytest.raises(TypeError, match=r"`Residual\(\*body\)` needs layers. Argument 0 is 'relu'"):
        nl.Residual("relu")


def test_configurations_of_the_new_layers():
    for net in (INSIDE, TRUNK, nl.Network(nl.RMSNorm(eps=0.1), dense(), nl.RMSNorm(affine=True), nl.Activation("elu"), dense())):
        assert nl.network_from_config(net.to_config()) == net
    with pytest.raises(ValueError, match=r"`net.to_config\(\)`: Activation\('<lambda>'\) is a function of your own"):
        nl.Network(dense(), nl.Activation(lambda x: x), dense()).to_config()


# --- Repeated layers -----------------------------------------------------------------------------------------------------


def test_runs_are_folded():
    folded = nl.mlp(30, layer_norm="every").folded
    assert [type(part) for part in folded] == [Repeat, nl.Dense]
    assert (len(folded[0].block), folded[0].times) == (3, 30)
    assert [type(part) for part in nl.mlp(3).folded] == [nl.Dense, nl.Activation] * 3 + [nl.Dense]


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["every", (2, 7)])
def test_a_folded_network_is_the_unrolled_one(norm, monkeypatch):
    net = nl.mlp(9, layer_norm=norm, eps=0.1)
    leaves, form = jax.tree.flatten(net)
    net = jax.tree.unflatten(form, list(leaves * RNG.uniform(0.5, 1.5, size=len(leaves))))
    folded = nl.NTK(net).pair(X)
    monkeypatch.setattr(nl.Network, "folded", property(lambda self: self.layers))
    with jax.disable_jit():
        unrolled = nl.NTK(net).pair(X)
    for name in ("ntk", "nngp"):
        wanted = getattr(unrolled, name)
        assert_accurate(getattr(folded, name), wanted, scale=np.abs(wanted).max(), tol=32 * EPS, what=name)


def test_exponents_that_grow_layer_by_layer_are_not_looped():
    square = nl.Activation("relu_power", degree=2)
    layers = [layer for _ in range(5) for layer in (dense(0.5), square)]
    net = nl.Network(*layers, dense())
    assert isinstance(net.folded[0], Repeat)
    value = nl.NTK(net).diag(X)
    q = 0.25 * (X**2).mean(1) + 0.09
    t, s = q, q  # by hand: E[phi^2] = 3/2 q^2, E[phi'^2] = 2 q
    for w, b in [(0.25, 0.09)] * 4 + [(1.69, 0.09)]:
        t, s = t * 2 * s, 1.5 * s**2
        t, s = w * t + w * s + b, w * s + b
    np.testing.assert_allclose(value, t, rtol=1e-13)


def test_depth_1000_compiles_once():
    net = nl.paper_mlp(1000, b_std=0.0, w_in=3**0.5)
    kernel, x = nl.NTK(net), RNG.normal(size=(10, 3))
    compiled = closed_form._gram._cache_size()
    np.testing.assert_allclose(np.diag(kernel(x)), 1001 * (x**2).sum(1), rtol=1e-12)
    kernel(x + 1)
    assert closed_form._gram._cache_size() == compiled + 1


@pytest.mark.slow
def test_derivatives_pass_through_folded_layers():
    def value(b_std, x):
        return nl.NTK(nl.mlp(6, b_std=b_std))(x)[0, 1]

    with enable_x64(True):
        x = jnp.asarray(X)
        slope = jax.grad(value)(0.3, x)
        step = 1e-6
        difference = (value(0.3 + step, x) - value(0.3 - step, x)) / (2 * step)
        assert abs(slope - difference) < 1e-7


# --- Functions of one's own ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_function_is_the_named_activation():
    for function, name, arguments in (
        (lambda x: jnp.maximum(x, 0.1 * x), nl.Activation("leaky_relu", slope=0.1), {"degree": 1, "kinks": (0,)}),
        (jax.nn.silu, nl.Activation("silu"), {"degree": 1}),
    ):
        nets = [
            nl.Network(dense(), act, dense(), nl.LayerNorm(), act, dense()) for act in (nl.Activation(function, **arguments), name)
        ]
        got, wanted = (nl.NTK(net)(np.concatenate([X, 1e4 * X])) for net in nets)
        error = nl.NTK(nets[0]).quadrature_error(np.concatenate([X, 1e4 * X]))
        scale = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))
        assert_accurate(got, wanted, scale=scale, tol=1e-10, what=repr(function))
        assert (np.abs(got - wanted) <= error + 64 * EPS * scale).all()
        assert error.max() < 1e-4 * scale.max()
        assert (nl.NTK(nl.mlp(1)).quadrature_error(X) == 0).all()


@pytest.mark.slow
def test_a_kink_that_is_not_declared_shows_in_the_estimate():
    def net(kinks):
        return nl.Network(dense(), nl.Activation(lambda x: jnp.clip(x, -0.5, 1.0), degree=0, kinks=kinks), dense())

    declared, hidden = nl.NTK(net((-0.5, 1.0))), nl.NTK(net(()))
    error = np.abs(hidden(X) - declared(X))
    assert error.max() > 1e-9
    assert (hidden.quadrature_error(X) >= error).all()


@pytest.mark.slow
def test_what_is_infinitely_far_needs_a_degree():
    def net(*norm):
        return nl.Network(dense(), *norm, nl.Activation(lambda x: x * jnp.tanh(x)), dense())

    x, y = X, X[:, 0]
    for act, kernel in (("<lambda>", nl.NTK(net())), ("sin", nl.NTK(nl.mlp(1, activation="sin")))):
        p = nl.posterior(kernel, x, y)
        for call in (lambda p=p: nl.far_field(p, [1.0, 0.0, 0.0]), lambda p=p: nl.sup_norm(p)):
            with pytest.raises(ValueError, match=f"the activation {act} has no known limit far out"):
                call()
    with pytest.raises(ValueError, match=r"`kernel_sup\(kernel\)`: the activation <lambda> has no known limit"):
        nl.kernel_sup(nl.NTK(net()))
    assert nl.kernel_sup(nl.NTK(nl.mlp(1, activation="sin"))).value == inf
    bounded = nl.kernel_sup(nl.NTK(net(nl.LayerNorm())))
    assert bounded.value < inf
    assert bounded.exact


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: nl.Activation(3), TypeError, r"needs a name, a function or an AbstractActivation. Got 3"),
        (lambda: nl.Activation("relu", kinks=(0,)), TypeError, r"knows the kinks and the limit of 'relu'"),
        (lambda: nl.Activation(jnp.tanh, slope=1.0), TypeError, r"takes degree, kinks and limit beside a function. Got slope"),
        (lambda: nl.Activation(nl.Activation("relu").fn, degree=1), TypeError, r"takes nothing beside an AbstractActivation"),
        (lambda: nl.Activation("relu_power", degree=0.5), ValueError, r"not square integrable"),
        (lambda: nl.Activation("silu", degree=1), ValueError, r"does not take these parameters. Got \{'degree': 1\}"),
    ],
)
def test_activations_that_are_none(make, error, match):
    with pytest.raises(error, match=match):
        make()


# --- Profiles ------------------------------------------------------------------------------------------------------------


def test_profiles_of_relu():
    rho = np.array([-1.0, -0.4, 0.0, 0.3, 1.0])
    theta = np.arccos(rho)
    np.testing.assert_allclose(RELU.kappa(rho, 4.0), 4 * (np.sin(theta) + (pi - theta) * rho) / (2 * pi), atol=8 * EPS)
    np.testing.assert_allclose(RELU.kappa_dot(rho), (pi - theta) / (2 * pi), atol=8 * EPS)


@pytest.mark.parametrize("name", ["relu", *map(slow, ("erf", "gelu", "tanh")), "sin"])
def test_prices_theorem(name):
    phi, q = nl.Activation(name), 1.7
    with enable_x64(True):
        slope = float(jax.grad(lambda rho: phi.kappa(rho, q))(0.3))
    assert abs(slope - q * phi.kappa_dot(0.3, q)) < 1e-9


def test_known_integrals():
    for name, kappa, kappa_dot in (
        ("tanh", 0.2252221535268837, 0.3935877980947682),
        ("erf", 0.2619797608689092, 0.4630727453619044),
    ):
        assert abs(nl.Activation(name).kappa(0.6) - kappa) < 1e-11
        assert abs(nl.Activation(name).kappa_dot(0.6) - kappa_dot) < 1e-11


@pytest.mark.parametrize("net", [nl.mlp(2), slow(TRUNK)])
def test_the_profile_of_a_kernel(net):
    x = np.array([[2.0, 0.0], [2 * 0.6, 2 * 0.8], [0.0, -2.0]])
    for kernel in (nl.NTK(net), nl.NNGP(net)):
        wanted = kernel(x)[0]
        np.testing.assert_allclose(kernel.profile([1.0, 0.6, 0.0], radius=2**0.5), wanted, rtol=32 * EPS)
    assert nl.NTK(net).profile(jnp.float32(0.5)).dtype == jnp.float32


def test_what_a_profile_refuses():
    with pytest.raises(ValueError, match=r"`NTK\(net\).profile\(rho, radius\)` needs correlations in \[-1, 1\]. Got 1.5"):
        nl.NTK(nl.mlp(1)).profile(1.5)
    with pytest.raises(ValueError, match=r"needs a finite radius > 0. Got 0"):
        nl.NTK(nl.mlp(1)).profile(0.5, 0)
    with pytest.raises(ValueError, match=r"needs a finite variance q > 0. Got -1"):
        RELU.kappa(0.5, -1)
    with pytest.raises(ValueError, match=r"needs a network that starts with a Dense"):
        nl.NTK(nl.Network(nl.RMSNorm(), dense())).profile(0.5)


# --- The standard parametrisation ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_parametrisations_have_one_function_and_one_ntk():
    net = nl.Network(
        dense(), nl.LayerNorm(affine=True, eps=0.1), RELU, dense(), nl.Residual(RELU, dense(0.7, 0.0)), RELU, dense(0.9)
    )
    params = net.init(jax.random.key(3), in_features=3, width=5)
    standard = nl.to_standard(net, params)
    x = jnp.asarray(X, jnp.float32)

    def apply(standard_params, x):
        return net.apply(nl.from_standard(net, standard_params), x)

    jacobian = jax.jacrev(apply_standard)(standard.params, x)
    products = jax.tree.map(
        lambda j, rate: rate * jnp.einsum("ap,bp->ab", *[j.reshape(len(x), -1)] * 2), jacobian, standard.learning_rates
    )
    np.testing.assert_allclose(sum(jax.tree.leaves(products)), nl.EmpiricalNTK(net, params)(x), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(apply_standard(standard.params, x), net.apply(params, x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(apply(standard.params, x), net.apply(params, x), rtol=1e-5, atol=1e-5)


def apply_standard(params, x):
    """The network of the test above, written as another library would."""
    d1, norm, _, d2, (_, body), _, d3 = params
    z = x @ d1["w"] + d1["b"]
    z = (z - z.mean(1, keepdims=True)) / jnp.sqrt(z.var(1, keepdims=True) + 0.1) * norm["gain"] + norm["shift"]
    z = jax.nn.relu(z) @ d2["w"] + d2["b"]
    z = z + jax.nn.relu(z) @ body["w"] + body["b"]
    return jax.nn.relu(z) @ d3["w"] + d3["b"]


def test_standard_parameters_that_nothing_stands_for_are_refused():
    net = nl.Network(nl.Dense(b_std=0.0))
    with pytest.raises(ValueError, match=r"b_std = 0, so no parameter stands for the non-zero entries of \"b\""):
        nl.from_standard(net, ({"w": jnp.ones((2, 1)), "b": jnp.ones(1)},))
    with pytest.raises(ValueError, match=r"`to_standard\(net, params\)` needs one entry a layer, 1. Got 2 entries"):
        nl.to_standard(net, ({}, {}))
    with pytest.raises(ValueError, match=r'The parameters of Dense\(.*\) need a matrix "w" and "b"'):
        nl.to_standard(net, ({},))


def test_float64_comes_back_from_the_standard_parametrisation():
    net = nl.mlp(1)
    params = net.init(jax.random.key(0), in_features=3, width=8, dtype=np.float64)
    standard = nl.to_standard(net, params).params
    back = nl.from_standard(net, standard)
    assert standard[0]["w"].dtype == back[0]["w"].dtype == np.float64
    np.testing.assert_allclose(back[0]["w"], params[0]["w"], rtol=4 * np.finfo(float).eps)


def test_fold_keeps_the_order():
    layers = nl.mlp(5).layers + nl.mlp(2).layers
    assert sum(part.times * len(part.block) if isinstance(part, Repeat) else 1 for part in fold(layers)) == len(layers)


@pytest.mark.slow
def test_biases_after_a_degree_below_one_decide_the_next_term():
    power, relu = nl.Activation("relu_power", degree=0.75), RELU
    for net, exponents in (
        (nl.Network(dense(), power, dense(), power, dense()), (0.75**2, 0.75**2)),
        (nl.Network(dense(), nl.Residual(power, dense()), dense(), relu, dense()), (1, 0.25)),
        (nl.Network(dense(), power, nl.LayerNorm(eps=0.1), dense()), (0, 1)),
    ):
        p = nl.posterior(nl.NTK(net), X, np.array([0.5, -1.0, 2.0, 0.3]))
        v = np.array([0.6, 0.8, 0.0])
        f = nl.far_field(p, v)
        assert (f.power, f.correction_power) == exponents
        r = 1e8
        rest = (p.mean(r * v[None, :])[0] / r**f.power - f.coefficient) * r**f.correction_power
        assert abs(rest - f.correction) < 0.05 * np.abs(p.alpha).sum()


@pytest.mark.slow
def test_the_next_term_through_a_quadrature():
    net = nl.Network(dense(), nl.Activation("elu"), dense())
    p = nl.posterior(nl.NTK(net), X, np.array([0.5, -1.0, 2.0, 0.3]))
    v = np.array([0.6, 0.8, 0.0])
    f = nl.far_field(p, v)
    r = 1e4
    assert abs((p.mean(r * v[None, :])[0] / r - f.coefficient) * r - f.correction) < 1e-3 * np.abs(p.alpha).sum()


@pytest.mark.slow
def test_second_derivatives_through_folded_layers_are_finite_at_equal_inputs():
    x = jnp.asarray(X[:1], jnp.float32)
    gradient = jax.grad(lambda a: nl.NTK(nl.mlp(5))(a, x)[0, 0])
    assert np.isfinite(jax.jvp(gradient, (x,), (jnp.ones_like(x),))[1]).all()


@pytest.mark.parametrize("name", ["erf", "tanh"])
@pytest.mark.parametrize(("dtype", "radii"), [(np.float64, (1e100, 1e155, 1e300)), (np.float32, (1e10, 1e19, 1e30))])
def test_theta_of_bounded_activations_grows_as_the_length_at_every_length(name, dtype, radii):
    kernel = nl.NTK(nl.Network(dense(), nl.Activation(name), dense(w_std=1.0, b_std=0.0)))
    rows = np.array([[0.3, -1.0]])
    growth = [kernel.diag((r * rows).astype(dtype))[0] / dtype(r) for r in radii]
    np.testing.assert_allclose(growth, growth[0], rtol=20 * np.finfo(dtype).eps)
    assert growth[0] > 0.1


@pytest.mark.parametrize("net", [nl.mlp(2), nl.mlp(2, layer_norm="first"), nl.Network(nl.RMSNorm(), dense(), RELU, dense())])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so_under_jit(net, value):
    k, x = nl.NTK(net), jnp.array([[value, 1.0], [1.0, 2.0]])
    np.testing.assert_array_equal(np.isnan(jax.jit(k)(x)), [[True, True], [True, False]])
    np.testing.assert_array_equal(np.isnan(jax.jit(k.diag)(x)), [True, False])


def test_what_a_norm_makes_0_over_0_is_nan_under_jit():
    k = nl.NTK(nl.Network(nl.Dense(), nl.LayerNorm(), RELU, nl.Dense()))
    np.testing.assert_array_equal(np.isnan(jax.jit(k)(jnp.array([[0.0, 0.0], [1.0, 2.0]]))), [[True, True], [True, False]])
