"""Far fields against the mean itself, against 50 digits, and where they are refused."""

import numpy as np
import pytest

import ntk_ln as nl

X = np.array([[1.0, 0.5], [-0.7, 1.1], [0.3, -1.4], [2.0, 0.1]])
Y = np.array([0.5, -1.0, 2.0, 0.3])
NETWORKS = {
    "relu": nl.mlp(2),
    "leaky LN last": nl.mlp(2, activation="leaky_relu", layer_norm="last"),
    "relu LN first": nl.mlp(2, layer_norm="first"),
    "relu post-LN eps": nl.mlp(2, layer_norm="first", after_activation=True, eps=0.1),
    "gelu": nl.mlp(2, activation="gelu"),
    "gelu LN": nl.mlp(2, activation="gelu", layer_norm="last"),
    "erf": nl.mlp(2, activation="erf"),
    "relu_power": nl.Network(
        nl.Dense(b_std=0.3), nl.Activation("relu_power", degree=2), nl.Dense(b_std=0.3), nl.Activation("relu"), nl.Dense()
    ),
}
QUICK = ("relu", "relu LN first", "relu_power")
POWERS = {"relu": 1, "gelu": 1, "relu_power": 2}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in NETWORKS])
def test_far_field_is_the_limit_of_the_mean_and_the_correction_the_next_term(name):
    p = nl.posterior(nl.NTK(NETWORKS[name]), X, Y)
    v = np.array([0.6, -0.8])
    power, c0, c1, k = nl.far_field(p, 5 * v)  # any length
    assert power == POWERS.get(name, 0)
    assert k == 1
    r = 1e3
    mean = p.mean(r * v[None, :])[0] / r**power
    np.testing.assert_allclose(r * (mean - c0), c1, rtol=2e-3, atol=1e-3 * abs(c0))
    # From 1e14 on the mean is the far field to the solve's rounding.
    far = p.mean(1e14 * v[None, :])[0] / 1e14**power
    np.testing.assert_allclose(far, c0, rtol=1e-9, atol=1e-11)


def test_the_mean_reaches_its_far_field_from_1e16_on_without_overflow():
    p = nl.posterior(nl.NTK(nl.mlp(2, layer_norm="first")), X, Y)
    limit = nl.far_field(p, [1.0, 1.0]).coefficient
    radii = np.array([1e16, 1e100, 1e300])
    np.testing.assert_allclose(p.mean(radii[:, None] * np.full((1, 2), 0.5**0.5)), limit, rtol=1e-12)


def test_outputs_share_the_kernel():
    p = nl.posterior(nl.NTK(nl.mlp(1)), X, np.stack([Y, -2 * Y], axis=1))
    both = nl.far_field(p, [1.0, 0.0])
    assert both.coefficient.shape == both.correction.shape == (2,)
    np.testing.assert_allclose(both.coefficient[1], -2 * both.coefficient[0], rtol=1e-12)
    assert nl.far_field(nl.posterior(nl.NTK(nl.mlp(1)), X, Y), [1.0, 0.0]).coefficient.shape == ()


@pytest.mark.parametrize("direction", [[0.0, 0.0], [1.0], [np.nan, 1.0], [np.inf, 1.0], 1.0])
def test_a_direction_that_is_none_is_refused(direction):
    p = nl.posterior(nl.NTK(nl.mlp(1)), X, Y)
    with pytest.raises(ValueError, match=r"needs a finite, non-zero direction of shape \(2,\)"):
        nl.far_field(p, direction)


def test_a_kernel_without_a_closed_form_is_refused():
    p = nl.posterior(nl.NeuralTangentsKernel(nl.mlp(1)), X, Y)
    with pytest.raises(TypeError, match="needs a closed-form kernel"):
        nl.far_field(p, [1.0, 0.0])


@pytest.mark.parametrize("size", [1e-320, 1e300])
def test_the_length_of_a_direction_does_not_count(size):
    p = nl.posterior(nl.NTK(nl.mlp(1)), np.eye(2), np.array([1.0, -0.5]))
    np.testing.assert_allclose(nl.far_field(p, [size, size]).coefficient, nl.far_field(p, [1.0, 1.0]).coefficient, rtol=1e-14)
