"""Layers, networks and their builders: by hand, as pytrees and configurations, their derivatives, dtypes and errors."""

import json
from math import pi

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow

import ntk_ln as nl
from ntk_ln._dtype import enable_x64

EPS, EPS32 = np.finfo(np.float64).eps, np.finfo(np.float32).eps
RNG = np.random.default_rng(11)
X = RNG.normal(size=(4, 3))

RICH = nl.Network(
    nl.Dense(w_std=1.2, b_std=0.4),
    nl.LayerNorm(eps=0.3, affine=True),
    nl.Activation("leaky_relu", slope=0.2),
    nl.LayerNorm(eps=0.1),
    nl.Dense(w_std=0.7, b_std=0.1),
    nl.Activation("gelu"),
    nl.Dense(w_std=1.1, b_std=0.5),
)


def kinds(net):
    return [type(layer).__name__ for layer in net.layers]


# --- Finite layers -------------------------------------------------------------------------------------------------------


def test_dense_by_hand():
    layer = nl.Dense(w_std=2.0, b_std=3.0)
    params = {"w": jnp.array([[1.0], [2.0], [0.0], [-1.0]]), "b": jnp.array([0.5])}
    np.testing.assert_allclose(layer.apply(params, jnp.array([[1.0, 1.0, 5.0, 2.0]])), [[2.0 / 2 * 1 + 3.0 * 0.5]])


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_layer_norm_by_hand(eps):
    layer, x = nl.LayerNorm(eps=eps), np.array([[1.0, 2.0, 3.0, 6.0]], np.float32)
    np.testing.assert_allclose(layer.apply({}, jnp.asarray(x)), (x - 3) / np.sqrt(3.5 + eps), rtol=1e-6)
    affine = nl.LayerNorm(eps=eps, affine=True)
    params = {"gain": jnp.full(4, 2.0), "shift": jnp.arange(4.0)}
    np.testing.assert_allclose(
        affine.apply(params, jnp.asarray(x)), 2 * (x - 3) / np.sqrt(3.5 + eps) + np.arange(4), atol=8 * EPS32
    )  # sums of terms up to 6


def test_init_draws_standard_normals():
    net = nl.mlp(2, layer_norm="first", affine=True)
    params = net.init(jax.random.key(0), in_features=3, width=64, out_features=2)
    shapes = jax.tree.map(jnp.shape, params)
    norm, hidden = {"gain": (64,), "shift": (64,)}, {"w": (64, 64), "b": (64,)}
    assert shapes == ({"w": (3, 64), "b": (64,)}, norm, {}, hidden, {}, {"w": (64, 2), "b": (2,)})
    np.testing.assert_array_equal(params[1]["gain"], 1)
    np.testing.assert_array_equal(params[1]["shift"], 0)
    drawn = [np.ravel(params[i][name]) for i in (0, 3, 5) for name in ("w", "b")]
    entries = np.concatenate(drawn)
    assert len(np.unique(entries)) > 0.99 * len(entries)  # no key is used twice
    assert abs(entries.mean()) < 4 / len(entries) ** 0.5
    assert abs(entries.var() - 1) < 4 * (2 / len(entries)) ** 0.5
    assert net.apply(params, X).shape == (4, 2)


def test_a_layer_may_stand_twice():
    layer = nl.Dense()
    params = nl.Network(layer, nl.Activation("relu"), layer).init(jax.random.key(0), in_features=3, width=8)
    assert params[0]["w"].shape == (3, 8)


# --- Builders, configurations, pytrees -----------------------------------------------------------------------------------


def test_builders():
    dense, norm, phi = "Dense", "LayerNorm", "Activation"
    assert kinds(nl.mlp(0)) == [dense]
    assert kinds(nl.mlp(2, layer_norm="first")) == [dense, norm, phi, dense, phi, dense]
    assert kinds(nl.mlp(2, layer_norm="last", after_activation=True)) == [dense, phi, dense, phi, norm, dense]
    assert kinds(nl.mlp(3, layer_norm=(1, 3))) == [dense, norm, phi, dense, phi, dense, norm, phi, dense]
    assert kinds(nl.paper_mlp(1, layer_norm="every")) == [dense, norm, phi, dense]
    net = nl.mlp(1, activation="erf", layer_norm=[1], eps=0.1, affine=True, w_std=1.5, b_std=0.2, w_out=0.7, b_out=0.3)
    assert net.to_config() == [
        {"layer": "dense", "w_std": 1.5, "b_std": 0.2},
        {"layer": "layer_norm", "eps": 0.1, "affine": True},
        {"layer": "activation", "name": "erf"},
        {"layer": "dense", "w_std": 0.7, "b_std": 0.3},
    ]
    stds = [(layer.w_std, layer.b_std) for layer in nl.paper_mlp(2, b_std=0.5, w_in=3.0).layers if isinstance(layer, nl.Dense)]
    np.testing.assert_allclose(stds, [(3, 0.5), (2**0.5, 0.5), (2**0.5, 0.5)])


@pytest.mark.parametrize("net", [RICH, nl.mlp(2, layer_norm="every"), nl.paper_mlp(1, activation="erf")])
def test_configuration_round_trip(net):
    again = nl.network_from_config(json.loads(json.dumps(net.to_config())))
    assert again.to_config() == net.to_config()
    assert again == net


def test_networks_are_pytrees():
    assert jax.tree.map(lambda leaf: leaf, RICH) == RICH
    assert len(jax.tree.leaves(RICH)) == 8  # six standard deviations, two eps
    changed = eqx.tree_at(lambda net: net.layers[0].w_std, RICH, 2.0)
    assert changed.layers[0] == nl.Dense(w_std=2.0, b_std=0.4)
    assert changed.layers[1:] == RICH.layers[1:]
    kernel = nl.NTK(RICH)
    assert jax.tree.map(lambda leaf: leaf, kernel) == kernel
    assert RICH.has_norm
    assert not nl.mlp(1).has_norm


@pytest.mark.slow
def test_derivatives_by_every_scale():
    weights = RNG.normal(size=(4, 4))
    leaves, structure = jax.tree.flatten(nl.mlp(1, layer_norm="first", eps=0.3, affine=True))

    def value(leaves):
        return jnp.sum(weights * nl.NTK(structure.unflatten(leaves))(X))

    with enable_x64(True):
        gradient = jax.grad(value)(leaves)
        for i, h in enumerate(np.full(len(leaves), 1e-5)):
            up, down = (value([*leaves[:i], leaves[i] + step, *leaves[i + 1 :]]) for step in (h, -h))
            np.testing.assert_allclose(gradient[i], (up - down) / (2 * h), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_derivatives_at_zero_scales_are_finite(eps):
    net = nl.mlp(1, layer_norm="every", eps=eps, affine=True, b_std=0.0, b_out=0.0)
    gradient = jax.grad(lambda net: jnp.sum(nl.NTK(net)(np.float32(X))))(net)
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(gradient))


# --- dtype ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [nl.NTK, slow(nl.NNGP)])
def test_what_comes_in_goes_out(kernel):
    k, whole = kernel(nl.mlp(1, layer_norm="first", affine=True, eps=0.1)), np.array([[1, -2, 0], [3, 1, 1]])
    wanted = k(whole.astype(np.float64))
    for x, dtype, kind in (
        (whole.astype(np.float64), np.float64, np.ndarray),
        (whole.astype(np.float32), np.float32, np.ndarray),
        (whole, np.float64, np.ndarray),
        (whole.tolist(), np.float64, np.ndarray),
        (jnp.asarray(whole, jnp.float32), np.float32, jax.Array),
        (jnp.asarray(whole), np.float32, jax.Array),
    ):
        for value in (k(x), k(x, x), k.diag(x), *k.pair(x)):
            assert value.dtype == dtype
            assert isinstance(value, kind)
        np.testing.assert_allclose(k(x), wanted, rtol=1e-13 if dtype == np.float64 else 2e-6)
    with enable_x64(True):
        assert k(jnp.asarray(whole, jnp.float64)).dtype == np.float64


# --- Values by hand ------------------------------------------------------------------------------------------------------


def canonical(depth, **norm):
    """ReLU, w_std = sqrt 2, no biases, for d = 2: the first Gram matrix is x.y."""
    return nl.mlp(depth, b_std=0.0, w_out=2**0.5, b_out=0.0, **norm)


def pair_of(cos):
    return np.array([[1.0, 0.0], [cos, np.sqrt(1 - cos**2)]])


@pytest.mark.parametrize("x", [0.3, *map(slow, (-2.0, 50.0))])
@pytest.mark.parametrize("b_std", [0.1, slow(1.0)])
def test_depth_two_of_the_paper(x, b_std):
    s = b_std**2
    wanted = {
        "none": 3 * x**2 + 6 * s,
        "first": 3 + 3 * s,
        "last": (x**2 + s) / (x**2 + 2 * s) + 2 + s,
        "every": 1 / (1 + s) + 2 + s,
    }
    for layer_norm, value in wanted.items():
        k = nl.NTK(nl.paper_mlp(2, layer_norm=layer_norm, b_std=b_std))
        np.testing.assert_allclose(k.diag([[x]]), [value], rtol=8 * EPS)
        np.testing.assert_allclose(k([[x]]), [[value]], rtol=8 * EPS)


@pytest.mark.parametrize(
    ("depth", "cos", "wanted"),
    [
        (2, 0.0, 0.6857086362829425),
        (2, -1.0, 1 / pi),
        (1, 0.6, 1.100447226585993),
        (3, 0.6, 1.952286685184652),
        (3, 0.0, 1.060388106802583),
        pytest.param(100, 0.0, 27.52212572337832, marks=pytest.mark.slow),
    ],
)
def test_values_of_the_relu_recursion(depth, cos, wanted):
    with jax.disable_jit(depth > 10):
        gram = nl.NTK(canonical(depth))(pair_of(cos))
    np.testing.assert_allclose(gram, [[depth + 1, wanted], [wanted, depth + 1]], rtol=(8 + depth) * EPS)


def test_a_value_between_inputs_of_different_norms():
    gram = nl.NTK(canonical(2))([[1, 1]], [[1, 0]])
    np.testing.assert_allclose(gram, [[2.525059991593995]], rtol=8 * EPS)


@pytest.mark.parametrize(
    ("depth", "t", "gap", "tol"),
    [(2, 1e-4, 9.550627638e-5, 1e-9)]
    + [(depth, 1e-6, slope * 1e-6, 2e-5) for depth, slope in [(1, 0.31831), (2, 0.95493), (3, 1.90986), (5, 4.77465)]],
)
def test_near_duplicates(depth, t, gap, tol):
    gram = nl.NTK(canonical(depth))(np.array([[1, 0], [np.cos(t), np.sin(t)]]))
    assert abs((gram[0, 0] - gram[0, 1]) / gap - 1) < tol
    assert abs(np.linalg.eigvalsh(gram)[0] / gap - 1) < tol


def test_diagonal_and_symmetry_in_every_path():
    x = RNG.normal(size=(11, 2))
    k = nl.NTK(canonical(1))
    for gram in (k(x), k(x, x), k(x, x.copy()), k(x.tolist())):
        np.testing.assert_array_equal(gram, gram.T)
        np.testing.assert_allclose(np.diag(gram), 2 * np.sum(x**2, axis=1), rtol=8 * EPS)
    np.testing.assert_allclose(k.diag(x), 2 * np.sum(x**2, axis=1), rtol=8 * EPS)
    blocks = [k(x[i : i + 4], x[:7]) for i in (0, 4, 8)]
    np.testing.assert_array_max_ulp(np.concatenate(blocks), k(x, x[:7]), maxulp=1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_fifty_points_in_one_spot(dtype):
    x = (np.array([1.0, 2.0, 3.0]) + 1e-3 * RNG.normal(size=(50, 3))).astype(dtype)
    gram = nl.NTK(canonical(2))(x)
    values = np.linalg.eigvalsh(gram.astype(np.float64))
    assert values[0] >= -50 * np.finfo(dtype).eps * values[-1]
    assert nl.min_eigenvalue(gram).value >= -50 * np.finfo(dtype).eps * values[-1]


def test_products_keep_all_digits():
    x = jnp.tile(jnp.array([[1 + 2.0**-12, 1.0]], jnp.float32), (256, 10))
    k = nl.NNGP(nl.Network(nl.Dense(w_std=2**0.5)))
    np.testing.assert_allclose(k(x), 2.000488340854645, rtol=2**-22)
    # Where products are rounded to fewer digits unless told otherwise, they are told.
    products = [line for line in jax.jit(lambda x: k(x, -x)).lower(x).as_text().splitlines() if "dot_general" in line]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.parametrize("c", [1e-12, 1e10, 1e15])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_without_biases_scales_come_out_squared(c, dtype):
    x, k = X[:, :2], nl.NTK(canonical(2))
    gram = k((c * x).astype(dtype))
    np.testing.assert_allclose(gram / c**2, k(x), rtol=0, atol=64 * np.finfo(dtype).eps * np.sum(x**2, axis=1).max())


@pytest.mark.parametrize(("dtype", "largest"), [(np.float64, 300), (np.float32, 30)])
@pytest.mark.parametrize("position", ["before", "after"])
def test_a_norm_takes_every_scale(dtype, largest, position):
    x, k = X[:, :2].astype(dtype), nl.NTK(canonical(2, layer_norm="first", after_activation=position == "after"))
    wanted = k(x)
    for c in 10.0 ** np.linspace(-largest, largest, 5):
        np.testing.assert_allclose(k(dtype(c) * x), wanted, rtol=64 * np.finfo(dtype).eps)


@pytest.mark.parametrize("position", ["before", "after"])
def test_a_finite_norm_takes_every_scale(position):
    net = canonical(1, layer_norm="first", after_activation=position == "after")
    x, params = jnp.asarray(X[:, :2], jnp.float32), net.init(jax.random.key(0), in_features=2, width=8)
    k = nl.EmpiricalNTK(net, params)
    for c in 10.0 ** np.linspace(-30, 30, 9):
        np.testing.assert_allclose(net.apply(params, c * x), net.apply(params, x), rtol=1e-4)
        np.testing.assert_allclose(k(c * x), k(x), rtol=1e-4)


@pytest.mark.parametrize("net", [canonical(1), nl.mlp(1, layer_norm="first"), canonical(1, layer_norm="first", eps=0.1)])
def test_a_zero_input(net):
    x, zero, k = np.float32(X[:, :2]), jnp.zeros((1, 2), jnp.float32), nl.NTK(net)
    numbers = [
        *jax.jit(jax.value_and_grad(lambda zero: jnp.sum(k(zero, x))))(zero),
        *jax.jit(jax.value_and_grad(lambda zero: jnp.sum(k.diag(zero))))(zero),
    ]
    assert all(np.isfinite(number).all() for number in numbers)
    if net.layers[0].b_std == 0:
        np.testing.assert_array_equal(k(zero, x), np.zeros((1, 4)))


@pytest.mark.slow
def test_huge_weights():
    layers = [layer for w_std in range(1, 16) for layer in (nl.Dense(w_std=float(w_std)), nl.Activation("relu"))]
    k = nl.NTK(nl.Network(*layers, nl.Dense()))
    x = 2**0.5 * pair_of(0.6)  # q = 1 after the first Dense
    wanted = np.array([[8.34966920275e20, 3.06412036684e20], [3.06412036684e20, 8.34966920275e20]])
    with jax.disable_jit():  # single operations compile faster than 31 layers
        np.testing.assert_allclose(k(x), wanted, rtol=1e-11)
        np.testing.assert_allclose(k(x.astype(np.float32)), wanted, rtol=4e-6)


# --- Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nl.Dense(w_std=-1.0), ValueError, r"`Dense\(w_std=\.\.\.\)` needs a finite number >= 0\. Got -1\.0"),
        (lambda: nl.Dense(b_std=float("nan")), ValueError, r"`Dense\(b_std=\.\.\.\)` .* Got nan"),
        (lambda: nl.Dense(w_std="2"), TypeError, r"`Dense\(w_std=\.\.\.\)` needs a number\. Got '2'"),
        (lambda: nl.Dense(2.0), TypeError, r"positional"),
        (lambda: nl.LayerNorm(eps=-1e-5), ValueError, r"`LayerNorm\(eps=\.\.\.\)` .* Got -1e-05"),
        (lambda: nl.Activation("swoosh"), ValueError, r"knows relu, .* Got 'swoosh'"),
        (lambda: nl.Activation("relu", slope=1.0), ValueError, r"does not take these parameters\. Got \{'slope': 1\.0\}"),
        (lambda: nl.Activation("relu_power", degree=0.5), ValueError, r"n > 1/2.* Got 0\.5"),
        (lambda: nl.Activation("leaky_relu", slope=float("inf")), ValueError, r"needs a finite number\. Got inf"),
        (lambda: nl.Activation(3), TypeError, r"needs a name, a function or an AbstractActivation\. Got 3"),
        (
            lambda: nl.Network(),
            ValueError,
            r"needs a Dense, or a Residual that ends in one, as its last layer, the read-out\. Got nothing",
        ),
        (lambda: nl.Network(nl.Dense(), nl.Activation("relu")), ValueError, r"last layer.* Got Activation\('relu'\)"),
        (lambda: nl.Network(nl.Dense(), "relu", nl.Dense()), TypeError, r"needs layers\. Argument 1 is 'relu'"),
        (
            lambda: nl.Network(nl.LayerNorm(affine=True), nl.Dense()),
            ValueError,
            r"layer 0, LayerNorm.* a trained gain on the raw input",
        ),
        (
            lambda: nl.Network(nl.Dense(), nl.Activation("relu"), nl.Activation("erf"), nl.Dense()),
            ValueError,
            r"layer 2, Activation\('erf'\): .*put a Dense between",
        ),
        (
            lambda: nl.Network(nl.Dense(), nl.Activation("relu"), nl.LayerNorm(), nl.Activation("relu"), nl.Dense()),
            ValueError,
            r"layer 3, .*put a Dense between",
        ),
        (lambda: nl.mlp(-1), ValueError, r"`mlp\(depth, \.\.\.\)` needs a whole number .* Got -1"),
        (lambda: nl.paper_mlp(1.0), ValueError, r"`paper_mlp\(depth, \.\.\.\)` needs a whole number .* Got 1\.0"),
        (lambda: nl.mlp(2, layer_norm=(0,)), ValueError, r"counts hidden layers from 1 to depth=2\. Got \(0,\)"),
        (lambda: nl.mlp(2, layer_norm=[1, 3]), ValueError, r"counts hidden layers from 1 to depth=2\. Got \[1, 3\]"),
        (lambda: nl.mlp(2, layer_norm="second"), ValueError, r"knows none, first, last, every or layer numbers .* Got 'second'"),
        (lambda: nl.mlp(2, layer_norm=1), (TypeError, ValueError), r"`mlp\(layer_norm=\.\.\.\)` .* Got 1"),
        (lambda: nl.mlp(1, activation="swoosh"), ValueError, r"Got 'swoosh'"),
        (lambda: nl.network_from_config("dense"), TypeError, r"needs a list of dictionaries, one a layer\. Got str"),
        (lambda: nl.network_from_config([{"name": "relu"}]), TypeError, r"at position 0\. Got \{'name': 'relu'\}"),
        (lambda: nl.network_from_config([{"layer": "conv"}]), ValueError, r"knows the layers dense, .* Position 0 has 'conv'"),
        (lambda: nl.network_from_config([{"layer": "dense", "width": 3}]), ValueError, r"layer 0, 'dense', does not take"),
        (lambda: nl.NTK(RICH.layers), TypeError, r"`NTK\(net\)` needs a Network\. Got tuple"),
        (lambda: RICH.init(jax.random.key(0), in_features=3, width=0), ValueError, r"needs width >= 1\. Got 0"),
        (lambda: RICH.apply((), X), ValueError, r"needs one entry a layer, 7\. Got 0"),
        (lambda: nl.NTK(canonical(1, layer_norm="first"))([[1, 2], [0, 0]]), ValueError, r"0/0 of a zero input\. Row 1 is one"),
    ],
)
def test_errors_name_the_call_the_rule_and_what_came(call, error, message):
    with pytest.raises(error, match=message):
        call()
