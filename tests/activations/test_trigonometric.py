"""sin and cos against mpmath, near their limits and between inputs of different sizes."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from helpers import slow
from mpmath import mpf

from ntk_ln._dtype import enable_x64
from ntk_ln.activations.trigonometric import Cos, Sin
from ntk_ln.layers._state import Side

sys.path.insert(0, str(Path(__file__).parent.parent / "reference"))
import make

EPS = np.finfo(np.float64).eps
each = pytest.mark.parametrize("act", [Sin(), slow(Cos())], ids=lambda act: act.name)
SIZES = [1e-300, 1e-20, 0.01, 0.3, 0.8, 1.1, 30.0]
FACTORS = [1.0, 1 + 1e-8, 1.1, 1e6]
ZS = [0.0, 1e-20, 1e-3, 0.5, 0.9, 1.0]
PAIRS = [(h, h * f) for h in SIZES for f in FACTORS] + [(1e-300, 3.0), (1e-160, 1e-5), (1e-5, 0.95), (0.49, 0.84)]
POINTS = [(h1, h2, z) for h1, h2 in PAIRS for z in ZS]


@jax.jit
def averages(act, z, y, scale, unit):
    n = len(z)

    def pair(a):
        return a[:n], a[n:]

    side = Side(scale, unit)
    return *act.moments(side), *act.dual(z, y, side, pair), act.gain_dual(z, y, side, pair)


@each
def test_averages_against_mpmath(act):
    h1, h2, z = np.array(POINTS).T
    with enable_x64(True):
        got = averages(act, *map(jnp.asarray, (z, 1 - z, np.concatenate([h1, h2]), np.ones(2 * len(z)))))
    size, mean, z_new, y_new, dot, gain = (None if v is None else [mpf(float(x)) for x in v] for v in got)
    dual = make.dual({"name": act.name})
    with mp.workdps(700):
        for i, (a, b, zz) in enumerate(zip(*(map(mpf, map(float, v)) for v in (h1, h2, z)), strict=True)):
            q1, q2, s, tolerance = a * a, b * b, a * b * (1 - 2 * zz), 8 * EPS * (1 + a + b)
            n1, n2 = dual.product(q1, q1, q1), dual.product(q2, q2, q2)
            root = mp.sqrt(n1 * n2)
            ratio = dual.product(q1, q2, s) / root
            assert abs(size[i] / mp.sqrt(n1) - 1) <= 8 * EPS
            assert abs(mp.sqrt(z_new[i]) - mp.sqrt(abs(1 - ratio) / 2)) <= tolerance, POINTS[i]
            assert abs(y_new[i] - (1 + ratio) / 2) <= tolerance, POINTS[i]
            if act.name == "sin":  # odd
                assert abs(mp.sqrt(y_new[i]) - mp.sqrt(abs(1 + ratio) / 2)) <= tolerance, POINTS[i]
            else:
                assert abs(mean[i] - dual.mean(q1) / mp.sqrt(n1)) <= tolerance
            for value, f, weight, power in ((dot, dual.tangent, a * b, 1), (gain, dual.gain, 1, 2)):
                own = f(q1, q1, q1) * (q1 if power == 1 else 1) / n1, f(q2, q2, q2) * (q2 if power == 1 else 1) / n2
                scale = mp.sqrt(own[0] * own[1])
                if scale > mpf("1e-250"):
                    assert abs(value[i] - f(q1, q2, s) * weight / root) <= tolerance * (1 + a + b) ** (power - 1) * scale, POINTS[i]


def test_cos_is_accurate_near_the_constant():
    with enable_x64(True), mp.workdps(80):
        for h1, h2, z in ((1e-5, 2e-5, 0.3), (1e-8, 1e-8, 1e-3), (1e-6, 3e-6, 0.0)):
            got = averages(Cos(), *(jnp.array([v]) for v in (z, 1 - z)), jnp.array([h1, h2]), jnp.ones(2))[2][0]
            q1, q2, s = mpf(h1) ** 2, mpf(h2) ** 2, mpf(h1) * mpf(h2) * (1 - 2 * mpf(z))
            k = make.dual({"name": "cos"}).product
            want = (1 - k(q1, q2, s) / mp.sqrt(k(q1, q1, q1) * k(q2, q2, q2))) / 2
            assert abs(mpf(float(got)) / want - 1) < 16 * EPS


@each
def test_float32(act):
    h1, h2, z = np.array([p for p in POINTS if 1e-10 < p[0] <= p[1] < 2]).T

    def run(dtype):
        return averages(act, *(jnp.asarray(v, dtype) for v in (z, 1 - z, np.concatenate([h1, h2]), np.ones(2 * len(z)))))

    got = run(np.float32)
    with enable_x64(True):
        want = run(np.float64)
    for value, exact in zip(got, want, strict=True):
        if value is not None:
            assert value.dtype == np.float32
            np.testing.assert_allclose(value, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@each
def test_extremes_are_finite(act):
    base = [(1e-300, 1.0), (1.0, 1.0), (1e-3, 1.0), (2e3, 1.0), (1e60, 1.0), (1.0, 0.0)]
    cases = [(*a, *b, z) for a in base for b in base for z in (0.0, 1e-20, 0.3, 1.0) if a != b or a[1] or z not in (0.0, 1.0)]
    f1, e1, f2, e2, z = np.array(cases).T
    scale, unit = np.concatenate([f1, f2]), np.concatenate([e1, e2])
    with enable_x64(True):
        got = averages(act, *map(jnp.asarray, (z, 1 - z, scale, unit)))
        assert all(v is None or np.isfinite(v).all() for v in got)
        assert (got[2][(f1 == f2) & (e1 == e2) & (z == 0)] == 0).all()
        apart = (e1 == 0) & (z == 0.3)  # infinitely far out the units of different inputs are independent
        np.testing.assert_allclose(got[2][apart], 0.5)

        def total(z, scale, unit):
            return sum(jnp.sum(v) for v in averages(act, z, 1 - z, scale, unit)[2:])

        slopes = jax.jit(jax.grad(total, (0, 1, 2)))(*map(jnp.asarray, (z, scale, unit)))
        assert all(np.isfinite(v).all() for v in slopes)


@each
def test_derivatives_are_those_of_the_values(act):
    with enable_x64(True):

        def value(x):
            return jnp.stack([v[0] for v in averages(act, x[:1], 1 - x[:1], x[1:3], x[3:])[2:]])

        @jax.jit
        def slopes(x, d):
            return jax.jvp(lambda x: jax.jvp(value, (x,), (d,)), (x,), (d,))

        x = jnp.array([0.3, 0.7, 1.1, 0.9, 1.2])
        for d in 1e-3 * jnp.eye(5):
            (middle, slope), (_, bend) = slopes(x, d)
            (above, _), _ = slopes(x + d, d)
            (below, _), _ = slopes(x - d, d)
            np.testing.assert_allclose(slope, (above - below) / 2, atol=1e-7)
            np.testing.assert_allclose(bend, above - 2 * middle + below, atol=1e-9)


@each
def test_the_function_and_its_second_moment(act):
    with enable_x64(True):
        x = jnp.linspace(-3, 3, 7)
        np.testing.assert_allclose(act(x), getattr(np, act.name)(np.asarray(x)), rtol=4 * EPS, atol=EPS)
        scale, _ = act.moments(Side(jnp.ones(1), jnp.ones(1)))
        np.testing.assert_allclose(scale[0] ** 2, act.second_moment(), rtol=4 * EPS)
        assert act.degree == 0
        assert act.derivative_growth == 0
        assert not act.far_limit
