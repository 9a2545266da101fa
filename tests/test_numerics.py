"""The safe elementary functions against mpmath, and their derivatives at the singular points."""

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from ntk_ln import _numerics as nm
from ntk_ln._dtype import enable_x64

EPS = np.finfo(np.float64).eps
POINTS = np.concatenate([np.linspace(0, 0.5, 201)[1:], 10.0 ** np.arange(-30.0, -2)])


def test_twice_angle_ratio_is_the_interpolant_it_says():
    with mp.workdps(50):
        n, half = len(nm._TWICE_ANGLE_RATIO), (1 - 1 / mp.sqrt(2)) / 2
        for j in range(n):
            u = half * mp.cos(mp.pi * (j + mp.mpf(1) / 2) / n)
            k = nm.CENTRE + u
            got = mp.fsum(mp.mpf(c) * u**i for i, c in enumerate(nm._TWICE_ANGLE_RATIO))
            assert abs(got / (2 * mp.acos(k) / mp.sqrt(1 - k * k)) - 1) < EPS / 2


@pytest.mark.parametrize(("dtype", "eps"), [(jnp.float64, EPS), (jnp.float32, np.finfo(np.float32).eps)])
def test_twice_angle_ratio_against_mpmath(dtype, eps):
    with enable_x64(True):
        phi = np.linspace(0, np.pi / 4, 500)[1:]
        got = np.asarray(nm.twice_angle_ratio(jnp.asarray(np.cos(phi) - nm.CENTRE, dtype)), np.float64)
        np.testing.assert_allclose(got, 2 * phi / np.sin(phi), rtol=2 * eps)
        assert abs(nm.twice_angle_ratio(jnp.asarray(1.0 - nm.CENTRE, dtype)) - 2) <= 2 * eps


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_arc_cosine_against_mpmath(n):
    def exact(theta):
        s, c, rest = mp.sin(theta), mp.cos(theta), mp.pi - theta
        return (
            rest,
            s + rest * c,
            3 * s * c + rest * (1 + 2 * c * c),
            4 * s**3 + 15 * s * c * c + rest * (9 * s * s * c + 15 * c**3),
        )[n]

    with enable_x64(True), mp.workdps(60):
        z = np.concatenate([POINTS, 1 - POINTS])
        got = np.array(nm.arc_cosine(n, jnp.asarray(z), jnp.asarray(1 - z)))
        top = float(exact(mp.mpf(0)))
        for column, m in zip(got.T, z, strict=True):
            theta = 2 * mp.asin(mp.sqrt(mp.mpf(m)))
            j, jc = exact(theta), exact(mp.pi - theta)
            want = [j, jc, exact(mp.mpf(0)) - j, exact(mp.mpf(0)) - jc]
            # The angle carries a few eps, and J_n moves by at most n^2 J_{n-1}(0) sin(theta) with it.
            tolerance = 8 * EPS * (float(mp.sin(theta)) * top * max(n, 1) + min(float(theta), 1.0))
            for g, w in zip(column, want, strict=True):
                assert abs(mp.mpf(float(g)) - w) <= tolerance + EPS * abs(w) * 4


@pytest.mark.parametrize("n", [1, 2, 3])
def test_arc_cosine_derivatives_are_prices_theorem(n):
    with enable_x64(True):
        for m in (1e-9, 1e-3, 0.3, 0.7, 1 - 1e-3):
            j = jax.grad(lambda z: nm.arc_cosine(n, z, 1 - z)[0])(m)
            below = nm.arc_cosine(n - 1, jnp.asarray(m), jnp.asarray(1 - m))[0]
            np.testing.assert_allclose(j, -2 * n * n * below, rtol=1e-12)
        assert np.isfinite(jax.grad(lambda z: nm.arc_cosine(n, z, 1 - z)[0])(0.0))


@pytest.mark.parametrize(
    "function", [nm.sqrt, lambda x: nm.hypot(x, x), lambda x: nm.divide(x, x), lambda x: nm.arc_cosine(0, x, 1 - x)[0]]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_derivatives_are_finite_at_the_singular_point(function, dtype):
    with enable_x64(dtype == np.float64):
        zero = jnp.zeros((), dtype)
        assert np.isfinite(jax.grad(function)(zero))
        assert np.isfinite(jax.grad(jax.grad(function))(zero))


def test_hypot_neither_over_nor_underflows():
    with enable_x64(True):
        for x, y in ((1e300, 1e300), (1e-300, 1e-300), (0.0, 2.0), (3.0, 0.0)):
            np.testing.assert_allclose(nm.hypot(jnp.asarray(x), jnp.asarray(y)), np.hypot(x, y), rtol=2 * EPS)


@pytest.mark.parametrize("columns", [3, 40])
@pytest.mark.parametrize("gap", [1e-2, 1e-6, 1e-12])
def test_half_angles_keep_near_and_antipodal_pairs(columns, gap, rng):
    a = rng.normal(size=(4, columns))
    a /= np.linalg.norm(a, axis=1, keepdims=True)
    across = rng.normal(size=a.shape)
    across -= (across * a).sum(1, keepdims=True) * a
    b = a + gap * across / np.linalg.norm(across, axis=1, keepdims=True)
    b /= np.linalg.norm(b, axis=1, keepdims=True)
    with enable_x64(True):
        for sign in (1, -1):
            rows = jnp.asarray(np.concatenate([a, sign * b]))
            z, y = (np.asarray(v) for v in nm.half_angles(rows, len(a), rows))
            near = np.diag(z if sign > 0 else y)
            # sqrt(z) = sin(theta/2), tan(theta) = gap, to a few eps of the unit rows
            np.testing.assert_allclose(np.sqrt(near), np.sin(np.arctan(gap) / 2), atol=8 * EPS, rtol=100 * EPS)
            np.testing.assert_array_equal(z + y, 1)
        z, y = nm.half_angles(jnp.asarray(a), 0, jnp.asarray(a))
        assert not np.diag(z).any()


def test_split_is_exactly_zero_for_equal_points(rng):
    t = jnp.asarray(rng.uniform(0, np.pi / 2, 1000).astype(np.float32))
    a, b = jnp.cos(t), jnp.sin(t)
    assert not np.asarray(jax.jit(nm.split)(a, b, a, b)).any()
