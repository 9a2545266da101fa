"""Finite networks by Monte Carlo against the closed forms: the mean of their NTK and of their outputs' products.

A finite network's mean kernel is off by O(1/width), so 2 k(2 w) - k(w) is compared with the limit, within 4 of its own standard
errors.
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ntk_ln as nl
from ntk_ln.kernels.empirical import EmpiricalNTK

X = np.array([[0.5, -1.0, 0.3], [1.2, 0.4, -0.7], [-0.9, 0.8, 0.6]])
WIDTH, SEEDS = 64, 1000

ACTIVATIONS = {
    "relu": nl.Activation("relu"),
    "leaky_relu": nl.Activation("leaky_relu", slope=0.3),
    "abs": nl.Activation("abs"),
    "relu_power": nl.Activation("relu_power", degree=2),
    "erf": nl.Activation("erf"),
    "gelu": nl.Activation("gelu"),
    "step": nl.Activation("step"),
}


def network(activation, position="none", depth=2, **norm):
    """`depth` hidden layers, each with a norm "before" or "after" its activation, or with "none"."""
    block = [nl.Dense(w_std=1.3, b_std=0.3), ACTIVATIONS[activation]]
    if position != "none":
        block.insert({"before": 1, "after": 2}[position], nl.LayerNorm(**norm))
    return nl.Network(*block * depth, nl.Dense(w_std=0.9, b_std=0.2))


DEFAULT = {
    "relu": network("relu"),
    "relu, affine before": network("relu", "before", affine=True),
    "leaky_relu, affine before, eps": network("leaky_relu", "before", depth=1, affine=True, eps=0.2),
    "abs, after": network("abs", "after"),
    "relu_power, affine before": network("relu_power", "before", depth=1, affine=True),
    "relu_power, after, eps": network("relu_power", "after", depth=1, eps=0.5),
    "erf, affine before, eps": network("erf", "before", affine=True, eps=0.2),
    "erf, affine after": network("erf", "after", depth=1, affine=True),
    "gelu, affine before": network("gelu", "before", depth=1, affine=True),
    "gelu, affine after, eps": network("gelu", "after", affine=True, eps=0.1),
    "step, affine before": network("step", "before", affine=True),
    "gains wait for each other": nl.Network(
        nl.Dense(w_std=1.3, b_std=0.3),
        nl.LayerNorm(affine=True),
        nl.LayerNorm(affine=True, eps=0.5),
        nl.Activation("relu"),
        nl.LayerNorm(affine=True),
        nl.LayerNorm(eps=0.5, affine=True),
        nl.Dense(b_std=0.2),
    ),
}
POSITIONS = [("none", {})] + [
    (position, {"affine": affine, "eps": eps}) for position, affine, eps in product(["before", "after"], [False, True], [0.0, 0.3])
]
MATRIX = {f"{a}, {p}, {norm}": network(a, p, **norm) for a, (p, norm) in product(ACTIVATIONS, POSITIONS)}


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

    return [np.asarray(value, np.float64) for value in jax.jit(jax.vmap(one))(draws(net, width, rng))]


def largest_score(small, large, limit):
    """The largest distance of 2 mean(large) - mean(small) from the limit, in standard errors."""
    error = np.sqrt((4 * large.var(axis=0, ddof=1) + small.var(axis=0, ddof=1)) / SEEDS)
    error = error + 1e-6 * np.abs(limit).max()  # float32: a norm without eps makes some of these products constant
    return np.max(np.abs(2 * large.mean(axis=0) - small.mean(axis=0) - limit) / error)


def check(net, seed):
    rng = np.random.default_rng(seed)
    small, large = samples(net, WIDTH, rng), samples(net, 2 * WIDTH, rng)
    limit = nl.NTK(net).pair(X)
    scores = [largest_score(*each) for each in zip(small, large, (limit.ntk, limit.nngp, limit.nngp), strict=True)]
    assert max(scores) < 4, f"standard errors off: NTK {scores[0]:.1f}, NNGP {scores[1]:.1f}, outputs {scores[2]:.1f}"
    return small[0], large[0], limit


@pytest.mark.parametrize("name", DEFAULT)
def test_finite_networks_tend_to_the_closed_form(name):
    check(DEFAULT[name], seed=list(DEFAULT).index(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_every_activation_with_every_norm(name):
    check(MATRIX[name], seed=100 + list(MATRIX).index(name))


def test_a_wrong_rule_for_the_gain_is_seen():
    # A trained gain must stay inside the next activation's expectation: E[phi' phi' a b], not s E[phi' phi'].
    net = network("relu", "before", depth=1, affine=True)
    small, large, limit = check(net, seed=50)
    units = nl.NNGP(nl.Network(net.layers[0]))(X)
    cos = np.clip(units / np.sqrt(np.outer(np.diag(units), np.diag(units))), -1, 1)
    right, wrong = (limit.nngp - 0.2**2) / 0.9**2, cos * (np.pi - np.arccos(cos)) / (2 * np.pi)
    assert largest_score(small, large, limit.ntk + 0.9**2 * (wrong - right)) > 8
