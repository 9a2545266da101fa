"""Finite networks by Monte Carlo against the closed forms: the mean of their NTK and of their outputs' products.

A finite network's mean kernel is off by O(1/width), so 2 k(2 w) - k(w) is compared with the limit, within 4 of its own standard
errors.
"""

from contextlib import nullcontext
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ntk_ln as nl
from ntk_ln.activations import AbstractQuadrature
from ntk_ln.kernels.empirical import EmpiricalNTK

X = np.array([[0.5, -1.0, 0.3], [1.2, 0.4, -0.7], [-0.9, 0.8, 0.6]])
WIDTH, SEEDS = 48, 500

ACTIVATIONS = {
    "relu": nl.Activation("relu"),
    "leaky_relu": nl.Activation("leaky_relu", slope=0.3),
    "abs": nl.Activation("abs"),
    "identity": nl.Activation("identity"),
    "step": nl.Activation("step"),
    "relu^0.75": nl.Activation("relu_power", degree=0.75),
    "relu^1.5": nl.Activation("relu_power", degree=1.5),
    "erf": nl.Activation("erf"),
    "gelu": nl.Activation("gelu"),
    "silu": nl.Activation("silu"),
    "tanh": nl.Activation("tanh"),
    "softplus": nl.Activation("softplus"),
    "elu": nl.Activation("elu"),
    "sin": nl.Activation("sin"),
    "cos": nl.Activation("cos"),
    "a function": nl.Activation(lambda x: jnp.clip(x, -1, 1), degree=0, kinks=(-1, 1)),
}
NORMS = [{"affine": affine, "eps": eps} for affine, eps in product([False, True], [0.0, 0.3])]


def dense():
    return nl.Dense(w_std=1.3, b_std=0.3)


# What a hidden layer may be, from Gaussian units to Gaussian units.
POSITIONS = {
    "none": lambda phi, norm: [phi, dense()],
    "LN before": lambda phi, norm: [nl.LayerNorm(**norm), phi, dense()],
    "LN after": lambda phi, norm: [phi, nl.LayerNorm(**norm), dense()],
    "RMS before": lambda phi, norm: [nl.RMSNorm(**norm), phi, dense()],
    "RMS after": lambda phi, norm: [phi, nl.RMSNorm(**norm), dense()],
    "residual": lambda phi, norm: [nl.Residual(phi, dense())],
    "norm in the branch": lambda phi, norm: [nl.Residual(nl.LayerNorm(**norm), phi, dense())],
    "norm on the trunk": lambda phi, norm: [nl.Residual(phi, dense()), nl.LayerNorm(**norm), dense()],
    "skip from an activation": lambda phi, norm: [phi, nl.Residual(dense()), dense()],
}
STARTS = {
    "raw LN": [nl.LayerNorm(), dense()],
    "raw RMS": [nl.RMSNorm(), dense()],
    "raw LN, eps": [nl.LayerNorm(eps=0.3), dense()],
    "raw RMS, eps": [nl.RMSNorm(eps=0.3), dense()],
}


def network(*hidden, start=None):
    """(activation, position, norm) of each hidden layer."""
    layers = [layer for name, position, norm in hidden for layer in POSITIONS[position](ACTIVATIONS[name], norm)]
    return nl.Network(*(start or [dense()]), *layers, nl.Dense(w_std=0.9, b_std=0.2))


def cover():
    """Networks of three hidden layers in which every activation meets every position, every norm and every start."""
    pairs = list(product(POSITIONS, ACTIVATIONS))
    hidden = [(name, position, NORMS[(i + i // 4) % 4]) for i, (position, name) in enumerate(pairs)]
    # Three different positions and activations meet in a network.
    third = len(hidden) // 3
    first, second, last = (hidden[i * third + 5 * i : (i + 1) * third] + hidden[i * third : i * third + 5 * i] for i in range(3))
    starts = [None, *STARTS]
    return {
        f"{start or 'Dense'}; " + "; ".join(f"{name}, {position}" for name, position, _ in blocks): network(
            *blocks, start=STARTS.get(start)
        )
        for i, blocks in enumerate(zip(first, second, last, strict=True))
        for start in [starts[i % len(starts)]]
    }


DEFAULT = {
    **cover(),
    "relu^2": nl.Network(dense(), nl.LayerNorm(affine=True), nl.Activation("relu_power", degree=2), nl.Dense(b_std=0.2)),
    "gains wait for each other": nl.Network(
        dense(),
        nl.LayerNorm(affine=True),
        nl.LayerNorm(affine=True, eps=0.5),
        nl.Activation("relu"),
        nl.LayerNorm(affine=True),
        nl.RMSNorm(eps=0.5, affine=True),
        nl.Dense(b_std=0.2),
    ),
}
MATRIX = {
    f"{a}, {p}, {norm}": network((a, p, norm))
    for a, p, norm in product(ACTIVATIONS, POSITIONS, NORMS)
    if norm is NORMS[0] or "LN" in p or "RMS" in p or "norm" in p
}
MATRIX |= {f"{start}; {a}": network((a, "none", {}), start=layers) for a, (start, layers) in product(ACTIVATIONS, STARTS.items())}


def draws(net, width, rng):
    """`SEEDS` times what `net.init` draws, by NumPy: compiling JAX's random numbers would take longer than the test."""
    shapes = jax.eval_shape(lambda: net.init(jax.random.key(0), in_features=X.shape[1], width=width))
    start = {"gain": np.ones, "shift": np.zeros}

    def draw(path, leaf):
        return start.get(path[-1].key, rng.standard_normal)((SEEDS, *leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def samples(net, width, rng):
    """NTK, covariance given the hidden layers, and products of outputs, of every draw."""
    x = jnp.asarray(X, jnp.float32)

    def one(params):
        pair, outputs = EmpiricalNTK(net, params).pair(x), net.apply(params, x)
        return pair.ntk, pair.nngp, outputs @ outputs.T

    with jax.disable_jit():  # op by op: the networks share their compiled operations
        return [np.asarray(value, np.float64) for value in jax.vmap(one)(draws(net, width, rng))]


def loops_over_nodes(layers):
    """Whether integrals are sums over nodes, whose loops are slow op by op."""
    return any(
        loops_over_nodes(layer.body)
        if isinstance(layer, nl.Residual)
        else isinstance(layer, nl.Activation) and (layer.fn.error > 0 or isinstance(layer.fn, AbstractQuadrature))
        for layer in layers
    )


def largest_score(small, large, limit):
    """The largest distance of 2 mean(large) - mean(small) from the limit, in standard errors."""
    error = np.sqrt((4 * large.var(axis=0, ddof=1) + small.var(axis=0, ddof=1)) / SEEDS)
    error = error + 1e-6 * np.abs(limit).max()  # float32: a norm without eps makes some of these products constant
    return np.max(np.abs(2 * large.mean(axis=0) - small.mean(axis=0) - limit) / error)


def check(net, seed):
    rng = np.random.default_rng(seed)
    small, large = samples(net, WIDTH, rng), samples(net, 2 * WIDTH, rng)
    with nullcontext() if loops_over_nodes(net.layers) else jax.disable_jit():
        limit = nl.NTK(net).pair(X)
    scores = [largest_score(*each) for each in zip(small, large, (limit.ntk, limit.nngp, limit.nngp), strict=True)]
    assert max(scores) < 4, f"standard errors off: NTK {scores[0]:.1f}, NNGP {scores[1]:.1f}, outputs {scores[2]:.1f}"
    return small[0], large[0], limit


# CI runs all of them; seconds each.
QUICK = ()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in DEFAULT])
def test_finite_networks_tend_to_the_closed_form(name):
    check(DEFAULT[name], seed=list(DEFAULT).index(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_every_activation_with_every_norm(name):
    check(MATRIX[name], seed=100 + list(MATRIX).index(name))


def test_a_wrong_rule_for_the_gain_is_seen():
    # A trained gain must stay inside the next activation's expectation: E[phi' phi' a b], not s E[phi' phi'].
    net = network(("relu", "LN before", NORMS[2]))
    small, large, limit = check(net, seed=50)
    units = nl.NNGP(nl.Network(net.layers[0]))(X)
    cos = np.clip(units / np.sqrt(np.outer(np.diag(units), np.diag(units))), -1, 1)
    right, wrong = (limit.nngp - 0.2**2) / 0.9**2, cos * (np.pi - np.arccos(cos)) / (2 * np.pi)
    assert largest_score(small, large, limit.ntk + 0.9**2 * (wrong - right)) > 8
