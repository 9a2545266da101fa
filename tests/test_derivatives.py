"""Derivatives of kernels by their inputs: finite everywhere, right off the kinks, the symmetric value on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ntk_ln as nl
from ntk_ln._dtype import enable_x64

POINT = np.array([0.8, -0.5])
PARTNERS = {
    "itself": POINT,
    "its antipode": -POINT,
    "zero": 0 * POINT,
    "its double": 2 * POINT,
    "orthogonal": np.array([0.5, 0.8]),
    "elsewhere": np.array([0.3, 1.4]),
    "far": np.array([3e6, -1e6]),
}
NETWORKS = {
    "relu": nl.mlp(2),
    "relu, no bias": nl.mlp(2, b_std=0.0, b_out=0.0),
    "relu, LN": nl.mlp(2, layer_norm="first", eps=0.1),
    "abs, RMS after": nl.Network(nl.Dense(b_std=0.3), nl.Activation("abs"), nl.RMSNorm(eps=0.1), nl.Dense()),
    "erf": nl.mlp(1, activation="erf"),
    "gelu": nl.mlp(1, activation="gelu"),
    "tanh": nl.mlp(1, activation="tanh"),
    "silu, LN": nl.mlp(1, activation="silu", layer_norm="first"),
    "softplus": nl.mlp(1, activation="softplus"),
    "sin": nl.mlp(1, activation="sin"),
    "elu": nl.mlp(1, activation="elu"),
    "relu^1.5": nl.Network(nl.Dense(b_std=0.3), nl.Activation("relu_power", degree=1.5), nl.Dense()),
    "residual": nl.Network(nl.Dense(b_std=0.3), nl.Residual(nl.Activation("relu"), nl.Dense()), nl.LayerNorm(), nl.Dense()),
    "raw RMS": nl.Network(nl.RMSNorm(eps=0.2), nl.Dense(b_std=0.3), nl.Activation("relu"), nl.Dense()),
}
SMOOTH = np.array([partner in ("orthogonal", "elsewhere", "far") for partner in PARTNERS])
ANALYTIC = ("erf", "gelu", "tanh", "silu, LN", "softplus", "sin")  # no kinks: right between equal and opposite inputs too


def functions(net):
    def value(x, other):
        return nl.NTK(net)(x[None, :], other[None, :])[0, 0]

    gradient = jax.grad(value)

    def curvature(x, other, along):
        return jax.jvp(lambda x: gradient(x, other), (x,), (along,))[1]

    return [jax.jit(jax.vmap(f, axes)) for f, axes in ((value, (0, 0)), (gradient, (0, 0)), (curvature, (0, 0, None)))]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_derivatives_by_the_input(name):
    value, gradient, curvature = functions(NETWORKS[name])
    others = np.stack(list(PARTNERS.values()))
    points = np.tile(POINT, (len(others), 1))
    along = np.array([0.6, 0.8])
    small = jnp.asarray(points, jnp.float32), jnp.asarray(others, jnp.float32)
    assert np.isfinite(gradient(*small)).all()
    assert np.isfinite(curvature(*small, jnp.asarray(along, jnp.float32))).all()
    with enable_x64(True):
        first = np.asarray(gradient(points, others))
        second = np.asarray(curvature(points, others, along))
        assert np.isfinite(first).all()
        assert np.isfinite(second).all()
        step = 1e-5
        scale = np.maximum(1, np.abs(others).max(axis=1))
        # On a kink a central difference tends to the symmetric value too, but only as fast as its step.
        for axis in range(2):
            shift = step * np.eye(2)[axis]
            difference = (value(points + shift, others) - value(points - shift, others)) / (2 * step)
            assert (np.abs(first[:, axis] - difference) / scale < np.where(SMOOTH, 2e-8, step)).all()
        where = np.ones(len(others), bool) if name in ANALYTIC else SMOOTH
        p, o, scale = points[where], others[where], scale[where, None]
        difference = (np.asarray(gradient(p + step * along, o)) - np.asarray(gradient(p - step * along, o))) / (2 * step)
        np.testing.assert_allclose(second[where] / scale, difference / scale, atol=5e-8)


def test_derivatives_at_huge_and_tiny_inputs():
    net = nl.mlp(2, layer_norm="first")
    with enable_x64(True):
        gradient = jax.jit(jax.vmap(jax.grad(lambda x, other: nl.NTK(net)(x[None, :], other[None, :])[0, 0])))
        for size in (1e-300, 1e-30, 1e30, 1e150, 1e300):
            assert np.isfinite(gradient(size * POINT[None], np.array([[0.3, 1.4]]))).all()
            assert np.isfinite(gradient(size * POINT[None], size * POINT[None])).all()


@pytest.mark.slow
def test_a_symmetric_grid_without_a_bias_has_finite_derivatives():
    x = np.linspace(-1, 1, 9)[:, None]
    net = nl.mlp(2, b_std=0.0, b_out=0.0)
    assert np.isfinite(
        jax.grad(lambda w: jnp.sum(nl.NTK(nl.mlp(2, w_std=w, b_std=0.0, b_out=0.0))(jnp.asarray(x, jnp.float32))))(1.4)
    )
    assert np.isfinite(jax.grad(lambda x: jnp.sum(nl.NTK(net)(x)))(jnp.asarray(x, jnp.float32))).all()
