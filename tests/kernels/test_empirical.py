"""The NTK of finite networks: two independent routes to every number, layouts, blocks, dtypes and errors."""

from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow

import ntk_ln as nl
from ntk_ln._dtype import enable_x64
from ntk_ln.kernels import _layerwise
from ntk_ln.kernels._neural_tangents_shim import import_neural_tangents
from ntk_ln.kernels.empirical import EmpiricalNTK

EPS, EPS32 = np.finfo(np.float64).eps, np.finfo(np.float32).eps
RNG = np.random.default_rng(3)
X1, X2 = RNG.normal(size=(11, 3)), RNG.normal(size=(7, 3))

NETWORKS = {
    "relu": nl.mlp(2),
    "norm": nl.mlp(1, activation="gelu", layer_norm="every", eps=0.1),
    "affine": nl.mlp(2, activation="erf", layer_norm="first", affine=True),
    "affine after": nl.mlp(2, layer_norm="every", affine=True, after_activation=True, eps=0.01),
}


@cache
def parameters(name, *, outputs=2, width=6, features=3, dtype=np.float64):
    net = NETWORKS.get(name, name)
    with enable_x64(True):
        params = net.init(jax.random.key(0), in_features=features, width=width, out_features=outputs)
        return jax.tree.map(lambda leaf: (0.9 * leaf + 0.1).astype(dtype), params)  # gains off 1, shifts off 0


def by_jacobians(apply_fn, params):
    """(n, n, k, k) at all points of X1 and X2, by reverse-mode differentiation of all outputs at all points."""
    with enable_x64(True):
        jac = jax.jit(jax.jacrev(apply_fn))(params, jnp.concatenate([X1, X2]))
        flat = [np.asarray(leaf, np.float64).reshape(*leaf.shape[:2], -1) for leaf in jax.tree.leaves(jac)]
    return sum(np.einsum("iap,jbp->ijab", leaf, leaf) for leaf in flat)


@cache
def reference(name):
    return by_jacobians(NETWORKS[name].apply, parameters(name))


SQUARE, CROSS = np.s_[:11, :11], np.s_[:11, 11:]


def trace(full):
    return np.einsum("...aa", full) / full.shape[-1]


def assert_close(got, wanted, eps=EPS, ulps=64):
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=ulps * eps * np.abs(wanted).max())


@pytest.mark.parametrize("name", [slow("relu"), slow("norm"), slow("affine"), "affine after"])
def test_layer_by_layer_is_the_contraction_of_jacobians(name):
    k = EmpiricalNTK(NETWORKS[name], parameters(name), output="full")
    assert_close(k(X1, X2), reference(name)[CROSS])


@pytest.mark.parametrize("output", ["trace", "full"])
@pytest.mark.parametrize("kind", ["network", slow("function")])
def test_symmetric_gram_and_diagonal(kind, output):
    net = NETWORKS["affine"]
    k = EmpiricalNTK(net if kind == "network" else net.apply, parameters("affine"), output=output)
    wanted = reference("affine")[SQUARE]
    gram = k(X1)
    assert_close(gram, trace(wanted) if output == "trace" else wanted)
    np.testing.assert_array_equal(gram, gram.T if output == "trace" else gram.transpose(1, 0, 3, 2))
    np.testing.assert_array_equal(gram, k(X1, X1.copy()))
    assert_close(k.diag(X1), np.einsum("ii...->i...", gram))


@pytest.mark.parametrize("kind", [slow("network"), "function"])
def test_blocks_do_not_show(kind):
    net, params = NETWORKS["affine"], parameters("affine")
    network = net if kind == "network" else net.apply
    gram, blocked = EmpiricalNTK(network, params)(X1), EmpiricalNTK(network, params, block=4)
    assert_close(blocked(X1), gram, ulps=2)
    np.testing.assert_array_equal(blocked(X1), blocked(X1).T)
    assert_close(blocked(X1, X2), trace(reference("affine")[CROSS]))
    assert blocked(X1[:0]).shape == (0, 0)


@pytest.mark.parametrize("kind", ["network", "function"])
def test_the_sum_of_logits_is_the_mean_over_all_pairs(kind):
    net, full = NETWORKS["affine"], reference("affine")
    k = EmpiricalNTK(net if kind == "network" else net.apply, parameters("affine"), output="sum_of_logits")
    wanted = full.sum(axis=(-2, -1)) / 2
    assert_close(k(X1, X2), wanted[CROSS])
    assert_close(k.diag(X1), np.diagonal(wanted[SQUARE]))


@pytest.mark.parametrize("kind", [slow("network"), "function"])
def test_projections_are_unbiased_and_within_their_stated_error(kind):
    net, params, seeds, m = NETWORKS["norm"], parameters("norm"), 30, 16
    network = net if kind == "network" else net.apply
    exact = trace(reference("norm")[SQUARE])[:4, :4]
    grams = np.array(
        [EmpiricalNTK(network, params, output="projected", projections=m, seed=s, block=3)(X1[:4]) for s in range(seeds)]
    )
    scale = np.sqrt(np.diagonal(exact)[:, None] * np.diagonal(exact))
    error = grams.std(axis=0, ddof=1)
    assert (
        error <= np.sqrt(2 / m) * scale * 1.4
    ).all()  # 1.4: four standard errors of a standard deviation from 30 draws, 1 + 4/sqrt(60)
    assert (np.abs(grams.mean(axis=0) - exact) <= 4 * error / np.sqrt(seeds) + 64 * EPS * scale).all()
    k = EmpiricalNTK(network, params, output="projected", projections=m)
    assert_close(k.diag(X1[:4]), np.diagonal(grams[0]))
    assert_close(k(X1[:4], X1[1:4]), grams[0][:, 1:])


@pytest.mark.parametrize("output", ["trace", slow("full"), slow("sum_of_logits"), "projected"])
def test_without_the_matrix(output):
    net, params = NETWORKS["affine"], parameters("affine")
    k = EmpiricalNTK(net, params, output=output, projections=64, block=4)
    gram = k(X1)
    shape = (11, 2) if output == "full" else (11,)
    flat = gram.transpose(0, 2, 1, 3).reshape(22, 22) if output == "full" else gram
    v = RNG.normal(size=(*shape, 3))
    wanted = (flat @ v.reshape(-1, 3)).reshape(v.shape)
    assert_close(k.matvec(X1, v), wanted)
    assert_close(k.matvec(X1, v[..., 0]), wanted[..., 0])
    np.testing.assert_allclose(k.trace(X1), np.trace(flat), rtol=64 * EPS)
    operator = k.operator(X1)
    assert_close(operator @ v.reshape(-1, 3), wanted.reshape(-1, 3))
    found, values = nl.min_eigenvalue(operator), np.linalg.eigvalsh(flat)
    assert abs(found.value - values[0]) <= len(flat) * 64 * EPS * values[-1]
    assert found.lower <= values[0] + len(flat) * EPS * values[-1]


def test_without_the_matrix_of_a_function_of_shape_n():
    w = RNG.normal(size=3)
    k = EmpiricalNTK(lambda w, x: jnp.tanh(x @ w), w)
    v = RNG.normal(size=11)
    assert_close(k.matvec(X1, v), k(X1) @ v)
    assert k.matvec(X1[:0], v[:0]).shape == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["network", "function"])
def test_float64_sums_of_float32_gradients(kind):
    net, params = nl.mlp(1, layer_norm="first", affine=True), parameters("affine", dtype=np.float32)
    params = parameters(net, width=3, dtype=np.float32)
    x = (np.array([1.0, 2.0, 3.0]) + 1e-3 * RNG.normal(size=(60, 3))).astype(np.float32)
    k = EmpiricalNTK(net if kind == "network" else net.apply, params, accumulate="float64", block=50)
    gram = k(x)
    assert gram.dtype == k.diag(x).dtype == np.float64
    assert_close(gram, EmpiricalNTK(net, jax.tree.map(partial(np.asarray, dtype=np.float64), params))(x), eps=EPS32)
    assert_close(k.diag(x), np.diagonal(gram), eps=EPS32)  # the gradients themselves are float32
    values = np.linalg.eigvalsh(gram)
    assert values[0] >= -len(x) * EPS * values[-1]


def test_modules_of_other_libraries():
    flax = pytest.importorskip("flax.nnx")
    x = X1.astype(np.float32)
    module = flax.Linear(3, 2, rngs=flax.Rngs(0))
    wanted = (x @ x.T + 1)[:, :, None, None] * np.eye(2)
    assert_close(EmpiricalNTK(*nl.from_nnx(module), output="full")(x), wanted, eps=EPS32)
    linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    assert_close(EmpiricalNTK(*nl.from_equinox(linear), output="full")(x), wanted, eps=EPS32)
    with pytest.raises(TypeError, match=r"`from_nnx\(module\)` needs a Flax NNX module\. Got Linear"):
        nl.from_nnx(linear)
    with pytest.raises(TypeError, match=r"`from_equinox\(module\)` needs a module that can be called on one row\. Got int"):
        nl.from_equinox(3)


def test_the_module_may_go_on_training():
    flax = pytest.importorskip("flax.nnx")
    x = X1.astype(np.float32)
    module = flax.Linear(3, 2, rngs=flax.Rngs(0))
    apply_fn, params = nl.from_nnx(module)
    before = np.asarray(apply_fn(params, x))
    module.kernel[...] = 2 * module.kernel[...]
    np.testing.assert_array_equal(apply_fn(params, x), before)
    for layer in (flax.BatchNorm(2, rngs=flax.Rngs(0)), flax.Dropout(0.5, rngs=flax.Rngs(0))):
        whole = flax.Sequential(module, layer)
        with pytest.raises(ValueError, match=rf"Got a {type(layer).__name__} in training: call `module\.eval\(\)` first"):
            nl.from_nnx(whole)
        whole.eval()
        assert EmpiricalNTK(*nl.from_nnx(whole))(x).shape == (11, 11)


class Scaled:
    scale = 1.0

    def __call__(self, params, x):
        return self.scale * x @ params


@pytest.mark.parametrize("function", [lambda scaled: scaled, lambda scaled: scaled.__call__], ids=["object", "method"])
def test_a_kernel_is_of_its_own_time(function):
    scaled, params = Scaled(), np.ones(3)
    k = EmpiricalNTK(function(scaled), params)
    params[:] = 5
    np.testing.assert_array_equal(k.params, np.ones(3))
    once = k(X1)
    scaled.scale = 2.0
    np.testing.assert_array_equal(k(X1), once)
    assert_close(EmpiricalNTK(function(scaled), params)(X1), 4 * once)


def test_agrees_with_neural_tangents():
    nt = import_neural_tangents()
    net, params = NETWORKS["affine after"], parameters("affine after")
    ntk_fn = nt.empirical_ntk_fn(net.apply, trace_axes=(), implementation=nt.NtkImplementation.JACOBIAN_CONTRACTION)
    with enable_x64(True):
        wanted = np.asarray(jax.jit(ntk_fn)(jnp.asarray(X1), jnp.asarray(X2), params))
    assert_close(EmpiricalNTK(net, params, output="full")(X1, X2), wanted)


def test_a_linear_map():
    x, y, weights = np.array([[1.0, 2.0]]), np.array([[3.0, -1.0]]), RNG.normal(size=(2, 2))
    net = nl.Network(nl.Dense(w_std=2**0.5))  # undoes the 1/sqrt(n_in)
    for given in ((net, ({"w": weights.T, "b": np.zeros(2)},)), (lambda w, x: x @ w.T, weights)):
        np.testing.assert_allclose(EmpiricalNTK(*given, output="full")(x, y), np.eye(2)[None, None], rtol=4 * EPS)
        np.testing.assert_allclose(EmpiricalNTK(*given)(x, y), [[1.0]], rtol=4 * EPS)
    one_output = EmpiricalNTK(lambda w, x: x @ w, weights[0], output="full")  # values of shape (n,)
    np.testing.assert_array_equal(one_output(x, y), np.ones((1, 1, 1, 1)))


def test_any_function_and_pytree():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    params = {"model": model, "scale": np.float32(1.5), "step": 7}

    def apply_fn(params, x):
        return params["scale"] * jax.vmap(params["model"])(x) / params["step"]

    arrays, fixed = eqx.partition(params, lambda leaf: eqx.is_array(leaf) or isinstance(leaf, np.float32))
    gram = EmpiricalNTK(apply_fn, params)(X1)
    assert gram.dtype == np.float32
    wanted = by_jacobians(lambda arrays, x: apply_fn(eqx.combine(arrays, fixed), x.astype(jnp.float32)), arrays)
    assert_close(gram, trace(wanted[SQUARE]), eps=EPS32)


def test_positive_semi_definite():
    net = nl.mlp(1, layer_norm="first", affine=True)
    x = np.array([1.0, 2.0, 3.0]) + 1e-3 * RNG.normal(size=(60, 3))
    values = np.linalg.eigvalsh(EmpiricalNTK(net, parameters(net, width=3))(x))  # fewer parameters than points: singular
    assert values[0] >= -len(x) * EPS * values[-1]


def test_products_keep_all_digits():
    # TF32 would return 2.0 (x.x = 2.00048834); 256 rows reach the matrix-product path.
    x = np.tile(np.array([[1 + 2**-12, 1]], np.float32), (256, 1))
    net = nl.Network(nl.Dense(w_std=2**0.5))
    params = parameters(net, features=2, dtype=np.float32)
    for k in (EmpiricalNTK(net, params), EmpiricalNTK(lambda w, x: x @ w, x[0])):
        np.testing.assert_allclose(k(x), 2.000488340854645, rtol=1e-6)


def test_the_pair_has_the_last_layers_share():
    net = nl.mlp(2, w_out=1.3, b_out=0.4, layer_norm="first")
    params = parameters(net)
    hidden = nl.Network(*net.layers[:-1], nl.Dense(w_std=6**0.5))  # reads the last hidden units out one by one
    with enable_x64(True):
        units = np.asarray(hidden.apply((*params[:-1], {"w": np.eye(6), "b": np.zeros(6)}), X1))
    wanted = 1.3**2 / 6 * units @ units.T + 0.4**2
    pair, full = (EmpiricalNTK(net, params, output=output).pair(X1) for output in ("trace", "full"))
    assert_close(pair.nngp, wanted)
    assert_close(full.nngp, wanted[:, :, None, None] * np.eye(2))
    assert_close(pair.ntk, trace(full.ntk))
    np.testing.assert_array_equal(pair.nngp, pair.nngp.T)


def test_dtype_is_the_parameters_and_the_kind_of_array_the_inputs():
    net = NETWORKS["relu"]
    wide, narrow = (EmpiricalNTK(net, parameters("relu", dtype=dtype)) for dtype in (np.float64, np.float32))
    for k, dtype in ((wide, np.float64), (narrow, np.float32)):
        for x, kind in ((X1.tolist(), np.ndarray), (X1.astype(np.float32), np.ndarray), (jnp.asarray(X1, jnp.float32), jax.Array)):
            assert k(x).dtype == dtype
            assert isinstance(k(x), kind)
    assert_close(narrow(X1), wide(X1), eps=EPS32)
    assert_close(EmpiricalNTK(net, jax.tree.map(np.asarray, wide.params))(X1), wide(X1), ulps=0)


def test_traced_parameters_and_one_compilation_a_shape():
    net, x, traces = NETWORKS["relu"], jnp.asarray(X1, jnp.float32), []
    params = parameters("relu", dtype=np.float32)
    wanted = trace(reference("relu")[SQUARE])
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    assert_close(jax.vmap(lambda params: EmpiricalNTK(net, params)(x))(both)[0], wanted, eps=EPS32)
    assert_close(jax.jit(lambda k, x: k(x))(EmpiricalNTK(net, params), x), wanted, eps=EPS32)

    def apply_fn(params, x):
        traces.append(x.shape)
        return net.apply(params, x)

    first = EmpiricalNTK(apply_fn, params)(x)
    count = len(traces)
    np.testing.assert_array_equal(EmpiricalNTK(apply_fn, params)(x), first)
    assert len(traces) == count


def test_memory_is_below_three_results():
    net = nl.mlp(2)
    params = parameters(net, outputs=1, width=16, dtype=np.float32)
    x = jnp.zeros((3000, 3))
    settings = {"output": "trace", "block": 1024, "dtype": np.dtype(np.float32)}
    memory = _layerwise.layerwise_gram.lower(net, params, x, None, **settings).compile().memory_analysis()
    result = 4 * len(x) ** 2
    activations = 4 * len(x) * 16 * 3 * len(net.layers)
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 3 * result + activations


NET = NETWORKS["affine"]
PARAMS = parameters("affine")
SPOILT = (*PARAMS[:-1], {**PARAMS[-1], "w": np.full((6, 2), np.nan)})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: EmpiricalNTK(3, PARAMS), TypeError, r"needs a Network or a function .* Got int\."),
        (lambda: EmpiricalNTK(nl.NTK(NET), PARAMS), TypeError, r"needs a Network or a function .* Got NTK\."),
        (lambda: EmpiricalNTK(NET, PARAMS, output="sum"), ValueError, r"needs output='trace' or 'full' or .*\. Got 'sum'\."),
        (lambda: EmpiricalNTK(NET, PARAMS, block=0), ValueError, r"needs a whole number block >= 1\. Got 0\."),
        (lambda: EmpiricalNTK(NET, PARAMS, projections=2.5), ValueError, r"needs a whole number projections >= 1\. Got 2\.5\."),
        (
            lambda: EmpiricalNTK(NET, PARAMS, accumulate="float32"),
            ValueError,
            r'needs accumulate="float64" or None\. Got \'float32\'',
        ),
        (lambda: EmpiricalNTK(NET, PARAMS, output="projected").pair(X1), TypeError, r"needs a layout other than"),
        (
            lambda: EmpiricalNTK(NET, PARAMS).matvec(X1, X1[:5]),
            ValueError,
            r"needs `v` of shape \(11,\) or .* Got shape \(5, 3\)\.",
        ),
        (lambda: EmpiricalNTK(NET, PARAMS, output="full").matvec(X1, X1[:, 0]), ValueError, r"needs `v` of shape \(11, 2\) or"),
        (lambda: EmpiricalNTK(NET, PARAMS[:-1]), ValueError, r"needs one entry a layer, 6, .* Got 5 entries\."),
        (lambda: EmpiricalNTK(NET, PARAMS[0]), ValueError, r"needs one entry a layer, 6, .* Got dict\."),
        (lambda: EmpiricalNTK(NET, (*PARAMS[:2], {"w": 1}, *PARAMS[3:])), ValueError, r"layer 2, Activation\('erf'\)"),
        (
            lambda: EmpiricalNTK(NET, (*PARAMS[:-1], {"w": np.ones((5, 1)), "b": np.ones(1)})),
            ValueError,
            r"'w': \(6, 1\).* layer 5, Dense.* Got .*\(5, 1\)",
        ),
        (lambda: EmpiricalNTK(NET, SPOILT), ValueError, r"12 entries of `params\[5\]\['w'\]` are not finite"),
        (lambda: EmpiricalNTK(jnp.matmul, {"w": 3}), TypeError, r"floating-point arrays as parameters\. Got none\."),
        (lambda: EmpiricalNTK(jnp.matmul, np.ones(3)).pair(X1), TypeError, r"needs a Network: only there is the last layer known"),
        (
            lambda: EmpiricalNTK(lambda w, x: jnp.sum(x @ w), np.ones(3))(X1),
            ValueError,
            r"\(n,\) or \(n, k\), k >= 1\. Got shape \(\)",
        ),
        (lambda: EmpiricalNTK(lambda w, x: x[:, :0] * w[0], np.ones(3))(X1), ValueError, r"k >= 1\. Got shape \(1, 0\)"),
        (
            lambda: EmpiricalNTK(lambda w, x: jnp.tanh(w @ x.T), np.ones((2, 3)))(X1),  # (k, n)
            ValueError,
            r"k >= 1\. Got shape \(2, 1\) for n = 1 rows\.",
        ),
        (lambda: EmpiricalNTK(lambda w, x: (x @ w).astype(int), np.ones(3))(X1), TypeError, r"of real numbers\. Got dtype int"),
        (
            lambda: EmpiricalNTK(lambda w, x: jnp.tanh(x @ w - (x @ w).mean(0)), np.ones(3)).matvec(X1, X1[:, 0]),
            ValueError,
            r"outputs that depend on their own row of x alone",
        ),
        (
            lambda: EmpiricalNTK(lambda w, x: x @ w, np.ones(3, np.float16))(1e3 * X1),
            ValueError,
            r"not finite: its derivatives leave the range of float16",
        ),
        (
            lambda: EmpiricalNTK(NET, PARAMS).matvec(X1, 1j * X1[:, 0]),
            TypeError,
            r"needs real numbers as `v`\. Got dtype complex128",
        ),
        (lambda: EmpiricalNTK(NET, PARAMS).matvec(X1, jnp.ones(11, complex)), TypeError, r"needs real numbers as `v`"),
        (
            lambda: EmpiricalNTK(NET, PARAMS).matvec(X1, np.full(11, np.nan)),
            ValueError,
            r"matvec\(x, v\)` needs finite numbers\. Row 0 of `v`",
        ),
        (
            lambda: EmpiricalNTK(NET, PARAMS).matvec(X1, np.ma.array(X1[:, 0], mask=X1[:, 0] > 0)),
            ValueError,
            r"`v` has masked entries",
        ),
        (lambda: EmpiricalNTK(NET, PARAMS).operator(np.ma.array(X1, mask=X1 > 0)), ValueError, r"`x` has masked entries"),
        (lambda: EmpiricalNTK(NET, PARAMS).operator(X1[0]), ValueError, r"operator\(x\)` needs `x` of shape \(n, d\)"),
        (lambda: EmpiricalNTK(NET, PARAMS).operator(X1[:, :2]), ValueError, r"operator\(x\)` needs `x` of shape \(n, 3\)"),
        (lambda: EmpiricalNTK(NET, PARAMS)(X1[:, :2]), ValueError, r"needs `x` of shape \(n, 3\), .* Got shape \(11, 2\)\."),
        (lambda: EmpiricalNTK(NET, PARAMS)(X1, X2[0]), ValueError, r"needs `x2` of shape \(n, d\)"),
        (lambda: EmpiricalNTK(NET, PARAMS)(np.full((2, 3), np.inf)), ValueError, r"needs finite numbers\. Row 0"),
    ],
)
def test_errors_name_the_call_the_rule_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_zero_input_that_a_norm_makes_0_over_0():
    net = nl.mlp(1, layer_norm="first", b_std=0.0)
    with pytest.raises(ValueError, match=r"makes 0/0 of a zero input\. Row 1 is one"):
        EmpiricalNTK(net, parameters(net))([[1, 2, 3], [0, 0, 0]])
