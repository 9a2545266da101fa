"""The NTK of finite networks: two independent routes to every number, layouts, blocks, dtypes and errors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ntk_ln as nl
from ntk_ln._dtype import enable_x64
from ntk_ln.kernels import empirical
from ntk_ln.kernels._neural_tangents_shim import import_neural_tangents
from ntk_ln.kernels.empirical import EmpiricalNTK

EPS = np.finfo(np.float64).eps
RNG = np.random.default_rng(3)
X1, X2 = RNG.normal(size=(5, 3)), RNG.normal(size=(4, 3))

NETWORKS = {
    "relu": nl.mlp(2),
    "norm": nl.mlp(2, activation="erf", layer_norm="every", eps=0.1),
    "affine": nl.mlp(2, activation="gelu", layer_norm="first", affine=True),
    "affine after": nl.mlp(2, layer_norm="every", affine=True, after_activation=True, eps=0.01),
}


def parameters(net, *, width=6, outputs=1, features=3, dtype=np.float64, seed=0):
    with enable_x64(True):
        params = net.init(jax.random.key(seed), in_features=features, width=width, out_features=outputs, dtype=dtype)
        return jax.tree.map(lambda leaf: 0.9 * leaf + 0.1, params)  # gains off 1, shifts off 0


def by_jacobians(apply_fn, params, x1, x2):
    """(n1, n2, k, k), by reverse-mode differentiation of all outputs at all points."""
    with enable_x64(True), jax.disable_jit():  # eager operations compile once for all networks
        jac1, jac2 = (jax.tree.leaves(jax.jacrev(apply_fn)(params, jnp.asarray(x))) for x in (x1, x2))
        flat = [[np.asarray(leaf).reshape(*leaf.shape[:2], -1) for leaf in jac] for jac in (jac1, jac2)]
    return sum(np.einsum("iap,jbp->ijab", a, b) for a, b in zip(*flat, strict=True))


def trace(full):
    return np.einsum("...aa", full) / full.shape[-1]


def assert_close(got, wanted, eps=EPS, ulps=64):
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=ulps * eps * np.abs(wanted).max())


@pytest.mark.parametrize("name", NETWORKS)
def test_layer_by_layer_is_the_contraction_of_jacobians(name):
    net = NETWORKS[name]
    params = parameters(net, outputs=2)
    wanted = by_jacobians(net.apply, params, X1, X2)
    with jax.disable_jit():
        assert_close(EmpiricalNTK(net, params, output="full")(X1, X2), wanted)
        assert_close(EmpiricalNTK(net, params)(X1, X2), trace(wanted))
        assert_close(EmpiricalNTK(net.apply, params, output="full")(X1, X2), wanted)


@pytest.mark.parametrize("output", ["trace", "full"])
@pytest.mark.parametrize("kind", ["network", "function"])
def test_symmetric_gram_and_diagonal(kind, output):
    net = NETWORKS["affine"]
    params = parameters(net, outputs=2)
    k = EmpiricalNTK(net if kind == "network" else net.apply, params, output=output)
    wanted = by_jacobians(net.apply, params, X1, X1)
    gram = k(X1)
    assert_close(gram, trace(wanted) if output == "trace" else wanted)
    np.testing.assert_array_equal(gram, gram.T if output == "trace" else gram.transpose(1, 0, 3, 2))
    np.testing.assert_array_equal(gram, k(X1, X1.copy()))
    assert_close(k.diag(X1), np.einsum("ii...->i...", gram))


@pytest.mark.parametrize("output", ["trace", "full"])
def test_agrees_with_neural_tangents(output):
    net = NETWORKS["affine after"]
    params = parameters(net, outputs=2)
    nt = import_neural_tangents()
    axes = {"trace": (-1,), "full": ()}[output]
    ntk_fn = nt.empirical_ntk_fn(net.apply, trace_axes=axes, implementation=nt.NtkImplementation.JACOBIAN_CONTRACTION)
    with enable_x64(True):
        wanted = np.asarray(ntk_fn(jnp.asarray(X1), jnp.asarray(X2), params))
    assert_close(EmpiricalNTK(net, params, output=output)(X1, X2), wanted)


@pytest.mark.parametrize("n_or_k", ["function (n,)", "function (n, k)", "network"])
def test_a_linear_map(n_or_k):
    x, y, weights = np.array([[1.0, 2.0]]), np.array([[3.0, -1.0]]), RNG.normal(size=(2, 2))
    if n_or_k == "function (n,)":
        k = EmpiricalNTK(lambda w, x: x @ w, weights[0], output="full")
        np.testing.assert_array_equal(k(x, y), np.ones((1, 1, 1, 1)))
        return
    net = nl.Network(nl.Dense(w_std=2**0.5))  # undoes the 1/sqrt(n_in)
    given = (lambda w, x: x @ w.T, weights) if n_or_k == "function (n, k)" else (net, ({"w": weights.T, "b": np.zeros(2)},))
    np.testing.assert_allclose(EmpiricalNTK(*given, output="full")(x, y), np.eye(2)[None, None], rtol=4 * EPS)
    np.testing.assert_allclose(EmpiricalNTK(*given)(x, y), [[1.0]], rtol=4 * EPS)


def test_any_function_and_pytree():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    params = {"model": model, "scale": np.float32(1.5), "step": 7}

    def apply_fn(params, x):
        return params["scale"] * jax.vmap(params["model"])(x) / params["step"]

    def flat_fn(arrays, x):
        return arrays["scale"] * jax.vmap(eqx.combine(arrays["model"], model))(x) / 7

    arrays = {"model": eqx.filter(model, eqx.is_array), "scale": params["scale"]}
    gram = EmpiricalNTK(apply_fn, params)(X1)
    assert gram.dtype == np.float32
    assert_close(gram, trace(by_jacobians(flat_fn, arrays, X1, X1)), eps=np.finfo(np.float32).eps)


@pytest.mark.parametrize("kind", ["network", "function"])
def test_blocks_do_not_show(kind, monkeypatch):
    net = NETWORKS["affine"]
    params = parameters(net)
    k = EmpiricalNTK(net if kind == "network" else net.apply, params)
    x, z = RNG.normal(size=(11, 3)), RNG.normal(size=(7, 3))
    with jax.disable_jit():  # so that the block size is read anew
        gram, cross, diagonal = k(x), k(x, z), k.diag(x)
        monkeypatch.setattr(empirical, "TILE", 4)
        assert_close(k(x, z), cross, ulps=4)
        assert_close(k.diag(x), diagonal, ulps=4)
        blocked = k(x)
        assert_close(blocked, gram, ulps=4)
        np.testing.assert_array_equal(blocked, blocked.T)
    for empty in (k(x[:0]), k(x[:0], z), k.diag(x[:0])):
        assert empty.size == 0


@pytest.mark.parametrize("width", [3, 32])
def test_positive_semi_definite(width):
    net = nl.mlp(1, layer_norm="first", affine=True)
    x = np.array([1.0, 2.0, 3.0]) + 1e-3 * RNG.normal(size=(60, 3))  # width 3: fewer parameters than points
    values = np.linalg.eigvalsh(EmpiricalNTK(net, parameters(net, width=width))(x))
    assert values[0] >= -len(x) * EPS * values[-1]


def test_products_keep_all_digits():
    # TF32 would return 2.0 (x.x = 2.00048834); 256 rows reach the matrix-product path.
    x = np.tile(np.array([[1 + 2**-12, 1]], np.float32), (256, 1))
    net = nl.Network(nl.Dense(w_std=2**0.5))
    for k in (EmpiricalNTK(net, parameters(net, features=2, dtype=np.float32)), EmpiricalNTK(jnp.matmul, x[0])):
        np.testing.assert_allclose(k(x), 2.000488340854645, rtol=1e-6)


def test_the_pair_has_the_last_layers_share():
    net = nl.mlp(2, w_out=1.3, b_out=0.4, layer_norm="first")
    params = parameters(net, outputs=2)
    with enable_x64(True):
        hidden = nl.Network(*net.layers[:-1], nl.Dense(w_std=6**0.5))  # reads the last hidden units out one by one
        units = [np.asarray(hidden.apply((*params[:-1], {"w": np.eye(6), "b": np.zeros(6)}), x)) for x in (X1, X2)]
    wanted = 1.3**2 / 6 * units[0] @ units[1].T + 0.4**2
    pair = EmpiricalNTK(net, params).pair(X1, X2)
    assert_close(pair.nngp, wanted)
    assert_close(pair.ntk, EmpiricalNTK(net, params)(X1, X2))
    full = EmpiricalNTK(net, params, output="full").pair(X1)
    assert_close(full.nngp, EmpiricalNTK(net, params).pair(X1).nngp[:, :, None, None] * np.eye(2))
    np.testing.assert_array_equal(full.nngp, full.nngp.transpose(1, 0, 3, 2))


def test_dtype_is_the_parameters_and_the_kind_of_array_the_inputs():
    net = NETWORKS["relu"]
    wide = EmpiricalNTK(net, parameters(net))
    narrow = EmpiricalNTK(net, parameters(net, dtype=np.float32))
    jax32 = jnp.asarray(X1, jnp.float32)
    for k, x, dtype, kind in (
        (wide, X1.tolist(), np.float64, np.ndarray),
        (wide, jax32, np.float64, jax.Array),
        (narrow, X1, np.float32, np.ndarray),
        (narrow, jax32, np.float32, jax.Array),
    ):
        for value in (k(x), k.diag(x), k.pair(x).nngp):
            assert value.dtype == dtype
            assert isinstance(value, kind)
    assert_close(narrow(X1), wide(X1), eps=np.finfo(np.float32).eps)
    assert_close(EmpiricalNTK(net, jax.tree.map(np.asarray, wide.params))(X1), wide(X1))


def test_traced_parameters_and_one_compilation_a_shape():
    net, x, traces = NETWORKS["relu"], jnp.asarray(X1, jnp.float32), []

    def kernel(key):
        return EmpiricalNTK(net, net.init(key, in_features=3, width=6))

    keys = jax.random.split(jax.random.key(1), 2)
    many = jax.vmap(lambda key: kernel(key)(x))(keys)
    one = kernel(keys[1])
    assert_close(many[1], one(x), eps=np.finfo(np.float32).eps)
    assert_close(jax.jit(lambda k, x: k(x))(one, x), one(x), eps=np.finfo(np.float32).eps)

    def apply_fn(params, x):
        traces.append(x.shape)
        return net.apply(params, x)

    k = EmpiricalNTK(apply_fn, one.params)
    first = k(x)
    count = len(traces)
    np.testing.assert_array_equal(EmpiricalNTK(apply_fn, one.params)(x), first)
    assert len(traces) == count


def test_memory_is_below_three_results():
    net = nl.mlp(2)
    params = parameters(net, dtype=np.float32, width=16)
    x = jnp.zeros((3000, 3))
    memory = empirical._layerwise_gram.lower(net, params, x, None, "trace").compile().memory_analysis()
    result = 4 * len(x) ** 2
    activations = 4 * len(x) * 16 * 3 * len(net.layers)
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 3 * result + activations


NET = NETWORKS["affine"]
PARAMS = parameters(NET)
SPOILT = (*PARAMS[:-1], {**PARAMS[-1], "w": np.full((6, 1), np.nan)})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: EmpiricalNTK(3, PARAMS), TypeError, r"needs a Network or a function .* Got int\."),
        (lambda: EmpiricalNTK(nl.NTK(NET), PARAMS), TypeError, r"needs a Network or a function .* Got NTK\."),
        (lambda: EmpiricalNTK(NET, PARAMS, output="sum"), ValueError, r"needs output=\"trace\" or \"full\"\. Got 'sum'\."),
        (lambda: EmpiricalNTK(NET, PARAMS[:-1]), ValueError, r"needs one entry a layer, 6, .* Got 5 entries\."),
        (lambda: EmpiricalNTK(NET, PARAMS[0]), ValueError, r"needs one entry a layer, 6, .* Got dict\."),
        (lambda: EmpiricalNTK(nl.mlp(1), parameters(nl.mlp(1))[::-1]), ValueError, r"layer 1, Activation\('relu'\)"),
        (
            lambda: EmpiricalNTK(NET, (*PARAMS[:-1], {"w": np.ones((5, 1)), "b": np.ones(1)})),
            ValueError,
            r"'w': \(6, 1\).* layer 5",
        ),
        (lambda: EmpiricalNTK(NET, SPOILT), ValueError, r"6 entries of `params\[5\]\['w'\]` are not finite"),
        (lambda: EmpiricalNTK(jnp.matmul, {"w": 3}), TypeError, r"floating-point arrays as parameters\. Got none\."),
        (lambda: EmpiricalNTK(jnp.matmul, np.ones(3)).pair(X1), TypeError, r"needs a Network: only there is the last layer known"),
        (lambda: EmpiricalNTK(lambda w, x: jnp.sum(x @ w), np.ones(3))(X1), ValueError, r"\(n,\) or \(n, k\)\. Got shape \(\)"),
        (lambda: EmpiricalNTK(NET, PARAMS)(X1[:, :2]), ValueError, r"needs `x` of shape \(n, 3\), .* Got shape \(5, 2\)\."),
        (lambda: EmpiricalNTK(NET, PARAMS)(X1, X2[0]), ValueError, r"needs `x2` of shape \(n, d\)"),
        (lambda: EmpiricalNTK(NET, PARAMS)(np.full((2, 3), np.inf)), ValueError, r"needs finite numbers\. Row 0"),
    ],
)
def test_errors_name_the_call_the_rule_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_zero_input_that_a_norm_makes_0_over_0():
    net = nl.mlp(1, layer_norm="first", b_std=0.0)
    with pytest.raises(ValueError, match=r"makes 0/0 of a zero input\. Row 1 of `x` is zero"):
        EmpiricalNTK(net, parameters(net))([[1, 2, 3], [0, 0, 0]])
