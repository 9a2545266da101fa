"""The homogeneous family of real degree: against mpmath, against the integer degrees, and its derivatives."""

import sys
from fractions import Fraction
from functools import lru_cache

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from helpers import REFERENCE, assert_accurate, slow
from mpmath import mpf

from ntk_ln import _numerics as nm
from ntk_ln._dtype import enable_x64
from ntk_ln.activations import _fractional as fractional
from ntk_ln.activations.homogeneous import Homogeneous, absolute, relu_power
from ntk_ln.layers._state import Pairing, Side

sys.path.insert(0, str(REFERENCE))
import make  # the tables' script

EPS = np.finfo(np.float64).eps
EPS32 = np.finfo(np.float32).eps
DEGREES = [0.51, 0.6, 0.75, 0.999999, 1.0000001, 1.25, 1.4999999, 1.5, 1.5000001, 2.5, 2.7, 4, 7.3]
MIXES = [(1.0, -0.2), (1.0, 1.0), (1.0, 0.0), (1.0, -1.0), (0.5, 2.0)]
SMALL = np.array([1e-30, 1e-20, 1e-12, 1e-6, 1e-3, 0.02, 0.1, 0.25, 0.4, 0.499, 0.5])
PAIR = Pairing(None)


def digits(z):
    """1 - 2 z and what is left of 1 - E[phi phi] at small z need as many."""
    return int(45 - 1.2 * np.log10(z))


def product(degree, cos, alpha=1, beta=0):
    """E[phi(a) phi(b)] at unit variances; mpmath takes a minute at a half-integer degree exactly."""
    nudged = mpf(degree) + (mpf("1e-40") if degree % 0.5 == 0 else 0)
    return make.homogeneous(alpha, beta, nudged).product(mpf(1), mpf(1), cos)


@lru_cache
def reference(degree, z):
    """E[phi phi] and E[phi' phi'] of max(a, 0)^n at cos = 1, 1 - 2z and 2z - 1."""
    with mp.workdps(digits(z)):
        points = (mpf(1), 1 - 2 * mpf(z), 2 * mpf(z) - 1)
        return tuple(tuple(f * product(n, c) for c in points) for n, f in ((degree, 1), (degree - 1, mpf(degree) ** 2)))


def expected(degree, alpha, beta, z, *, opposite):
    """z_new, y_new, dot and dot at z = 0; at an angle near pi if `opposite`, z then being small too."""
    (top, p, pc), (slope, t, tc) = reference(degree, z)
    if opposite:
        p, pc, t, tc = pc, p, tc, t
    with mp.workdps(digits(z)):
        squares, cross = mpf(alpha) ** 2 + mpf(beta) ** 2, 2 * mpf(alpha) * mpf(beta)
        ratio = (squares * p + cross * pc) / (squares * top)
        dot = (squares * t - cross * tc) / (squares * top)
        return [float(v) for v in ((1 - ratio) / 2, (1 + ratio) / 2, dot, slope / top)]


def side(n, dtype=np.float64):
    return Side(jnp.ones(n, dtype), jnp.ones(n, dtype))


def both_ends(small, dtype=np.float64):
    """z and y from 0 to 1, either accurate where small."""
    return (jnp.asarray(np.concatenate(v), dtype) for v in ([small, 1 - small], [1 - small, small]))


def check_dual(phi, degree, small, dtype, tol):
    z, y = both_ends(small, dtype)
    small = np.asarray(small, dtype).astype(float)
    got = phi.dual(z, y, side(len(z), dtype), PAIR)
    assert all(v.dtype == dtype for v in got)
    rows = [expected(degree, phi.alpha, phi.beta, float(v), opposite=o) for o in (False, True) for v in small]
    z_new, y_new, dot, top = np.array(rows).T
    odd = phi.alpha == -phi.beta
    what = [f"{phi.alpha}, {phi.beta}, degree {degree}, {end} = {v}" for end in "zy" for v in small]
    # relative to itself; y_new only where phi is odd
    assert_accurate(got.z, z_new, scale=z_new, tol=tol, what=what)
    assert_accurate(got.y, y_new, scale=y_new if odd else 1, tol=tol, what=what)
    assert_accurate(got.dot, dot, scale=(1 + abs(phi._rho)) * top, tol=tol, what=what)
    gain = phi.gain_dual(z, y, side(len(z), dtype), PAIR)
    assert_accurate(gain, degree**2 * (y_new - z_new), scale=degree**2, tol=tol, what=what)


@pytest.mark.parametrize("degree", DEGREES)
def test_dual_against_mpmath(degree):
    with enable_x64(True):
        for alpha, beta in MIXES:
            check_dual(Homogeneous("", alpha, beta, degree), degree, SMALL, np.float64, 8 * EPS)


@pytest.mark.parametrize("degree", [0.51, 1.5000001, 2.7])
def test_dual_in_float32(degree):
    small = SMALL[1:].astype(np.float32)
    for alpha, beta in MIXES:
        check_dual(Homogeneous("", alpha, beta, degree), degree, small, np.float32, 8 * EPS32)


def test_dual_of_the_smallest_angles():
    with enable_x64(True):
        for degree in (0.51, 0.75, 1.25):
            for alpha, beta in MIXES:
                check_dual(Homogeneous("", alpha, beta, degree), degree, np.array([1e-300]), np.float64, 8 * EPS)


@pytest.mark.parametrize("degree", [20.2, 99.5])
def test_large_degrees(degree):
    with enable_x64(True):
        check_dual(relu_power(degree), degree, SMALL[3:], np.float64, 16 * EPS)
    check_dual(relu_power(degree), degree, SMALL[3:].astype(np.float32), np.float32, 16 * EPS32)


def test_reference_of_mixtures():
    # `expected` puts the mixtures together itself
    for alpha, beta in MIXES:
        with mp.workdps(50):
            phi, one = make.homogeneous(alpha, beta, 2.7), mpf(1)
            q = phi.product(one, one, one)
            want = [phi.product(one, one, mpf("0.4")) / q, phi.tangent(one, one, mpf("0.4")) / q]
        z_new, y_new, dot, _ = expected(2.7, alpha, beta, 0.3, opposite=False)
        np.testing.assert_allclose([y_new - z_new, dot], np.array(want, float), rtol=8 * EPS)


@pytest.mark.parametrize("degree", [0.51, 1.25, 1.5, 1.6])
def test_exact_ends(degree):
    with enable_x64(True):
        ends, opposite = jnp.array([0.0, 1.0]), jnp.array([1.0, 0.0])
        for alpha, beta in MIXES:
            got = Homogeneous("", alpha, beta, degree).dual(ends, opposite, side(2), PAIR)
            rho = 2 * alpha * beta / (alpha**2 + beta**2)
            slope = degree**2 / (2 * degree - 1)
            assert got.z[0] == 0
            np.testing.assert_allclose(got.z[1], (1 - rho) / 2, rtol=2 * EPS)
            np.testing.assert_allclose(got.y, [1, (1 + rho) / 2], rtol=2 * EPS)
            np.testing.assert_allclose(got.dot, [slope, -rho * slope], rtol=4 * EPS)
            if rho == -1:
                assert got.y[1] == 0


@pytest.mark.parametrize("n", [1, 2, 3])
def test_integer_degrees_by_either_path(n):
    with enable_x64(True):
        z, y = both_ends(SMALL)
        for got, want in zip(fractional.arc_cosine(n, z, y), nm.arc_cosine(n, z, y), strict=True):
            np.testing.assert_allclose(got, np.asarray(want) / nm.J_AT_ZERO[n], atol=16 * EPS)
        for got, want in zip(fractional.slopes(n, z, y), nm.arc_cosine(n - 1, z, y)[:2], strict=True):
            np.testing.assert_allclose(got, n * n * np.asarray(want) / nm.J_AT_ZERO[n], atol=16 * EPS * n)
        for form in (relu_power(n), relu_power(float(n)), Homogeneous("", 1.0, 0.0, float(n))):
            np.testing.assert_array_equal(form.dual(z, y, side(len(z)), PAIR), relu_power(n).dual(z, y, side(len(z)), PAIR))
            assert form.second_moment() == relu_power(n).second_moment()


@pytest.mark.parametrize("degree", [slow(0.51), 1.25, *map(slow, (1.5, 1.6))])
def test_derivatives_are_prices_theorem(degree):
    with enable_x64(True):
        small = np.concatenate([[0, 1e-300], SMALL[:-1]])
        z, y = both_ends(small)
        for alpha, beta in MIXES[:2]:
            phi = Homogeneous("", alpha, beta, degree)

            def dual(z, y, phi=phi):
                return tuple(phi.dual(z, y, side(len(z)), PAIR))

            def slope(z, y):
                return jax.jvp(dual, (z, y), (jnp.ones_like(z), -jnp.ones_like(z)))

            value, first = slope(z, y)
            dz, dy = jax.grad(lambda z, y: dual(z, y)[0].sum(), (0, 1))(z, y)
            reverse = dz - dy
            dz, dy = jax.grad(lambda z, y: slope(z, y)[1][0].sum(), (0, 1))(z, y)
            second = dz - dy
            for got in (first[0], -first[1], reverse):
                np.testing.assert_allclose(got, value[2], atol=1e-14 * float(jnp.max(jnp.abs(value[2]))), rtol=1e-13)
            np.testing.assert_allclose(second, first[2], rtol=1e-12, atol=1e-12)
            assert np.isfinite(second).all()
            if degree <= 1.5:  # infinite at 0
                assert second[0] == 0


@pytest.mark.parametrize("degree", [0.51, 0.75, 1.5, 1.6, 4])
def test_second_derivatives_against_mpmath(degree):
    with enable_x64(True):
        z, y = both_ends(SMALL[:-1])
        ones = jnp.ones_like(z)
        _, got = jax.jvp(lambda z, y: fractional.slopes(degree, z, y)[0], (z, y), (ones, -ones))
        want = []
        for opposite in (False, True):
            for v in SMALL[:-1]:
                with mp.workdps(digits(v)):
                    cos = (-1 if opposite else 1) * (1 - 2 * mpf(v))
                    n = mpf(degree)
                    want.append(float(-2 * (n * (n - 1)) ** 2 * product(degree - 2, cos) / product(degree, mpf(1))))
        assert_accurate(got, want, scale=np.abs(want) + degree**2, tol=64 * EPS, what=[f"z = {v}" for v in z])


def test_derivative_at_equal_inputs_is_not_halved():
    with enable_x64(True):
        for phi in (absolute(), Homogeneous("", 1.0, 0.5, 2), Homogeneous("", 1.0, 0.5, 1.25)):
            slope = jax.grad(lambda z, phi=phi: phi.dual(z, 1 - z, side(1), PAIR).z.sum())(jnp.zeros(1))
            np.testing.assert_allclose(slope, phi.n**2 / (2 * phi.n - 1), rtol=4 * EPS)


def test_close_degrees_are_continuous():
    with enable_x64(True):
        z, y = both_ends(SMALL)
        for n in (1.5, 2):
            below, at, above = (fractional.arc_cosine(n + step, z, y) for step in (-1e-9, 0, 1e-9))
            for b, v, a in zip(below, at, above, strict=True):
                np.testing.assert_allclose((np.asarray(a) + b) / 2, v, atol=16 * EPS)


@pytest.mark.parametrize("degree", [0.51, 0.999999, 1.5, 2.7, 7.3])
def test_moments(degree):
    with mp.workdps(40):
        phi = make.homogeneous(1, -0.2, degree)
        second, mean = phi.product(mpf(1), mpf(1), mpf(1)), phi.mean(mpf(1))
    activation = Homogeneous("", 1.0, -0.2, degree)
    np.testing.assert_allclose(activation.second_moment(), float(second), rtol=8 * EPS)
    for dtype, eps, largest in ((np.float64, EPS, 300), (np.float32, EPS32, 34)):
        with enable_x64(dtype == np.float64):
            scale = 10 ** (np.linspace(-largest, largest, 21) / max(degree, 1))
            scale = np.append(scale, 0).astype(dtype)
            new, share = activation.moments(Side(jnp.asarray(scale), jnp.ones(len(scale), dtype)))
            slope = np.asarray(jax.grad(lambda s: activation.moments(Side(s, s))[0].sum())(jnp.asarray(scale)))
        assert new.dtype == share.dtype == dtype
        with mp.workdps(40):
            want = np.array([float(mp.sqrt(second) * mpf(float(s)) ** mpf(degree)) for s in scale])
        assert_accurate(new, want, scale=want, tol=4 * max(degree, 1) * eps, what=f"scale of {degree}")
        np.testing.assert_allclose(share, float(mean / mp.sqrt(second)), rtol=8 * eps)
        assert np.isfinite(slope[10:]).all()
        assert slope[-1] == 0


def test_scales_do_not_overflow_on_the_way():
    with enable_x64(True):
        new, _ = Homogeneous("", 1e-10, 0.0, 1.5).moments(Side(jnp.array([1e206]), jnp.ones(1)))
        np.testing.assert_allclose(new, 1e299 * np.sqrt(2**1.5 / np.sqrt(np.pi) / 2), rtol=1e-13)
    new, _ = relu_power(100).moments(side(1, np.float32)._replace(scale=jnp.array([0.125], np.float32)))
    np.testing.assert_allclose(new, np.sqrt(relu_power(100).second_moment()) * 0.125**100, rtol=200 * EPS32)


def test_function():
    x = np.array([-3.0, -0.5, 0.0, 0.25, 2.0])
    for dtype in (np.float64, np.float32):
        with enable_x64(dtype == np.float64):
            for degree in (0.6, 1.5, 4):
                phi = Homogeneous("", 1.0, -0.2, degree)
                got = phi(jnp.asarray(x, dtype))
                assert got.dtype == dtype
                want = np.where(x > 0, 1, -0.2) * np.abs(x) ** degree
                np.testing.assert_allclose(got, want, rtol=4 * np.finfo(dtype).eps)
                slope = jax.grad(lambda x, phi=phi: phi(x).sum())(jnp.asarray(x, dtype))
                want = np.where(x > 0, 1, 0.2) * degree * np.where(x == 0, 0, np.abs(x) + (x == 0)) ** degree / np.abs(x + (x == 0))
                np.testing.assert_allclose(slope, want, rtol=8 * np.finfo(dtype).eps)
    for degree in (2, 3, 7.3):  # x^n overflows where its factor is 0
        assert relu_power(degree)(jnp.array([-1e30], np.float32)) == 0


@pytest.mark.parametrize("degree", [0.51, 1.5, 4, np.float32(2.5), np.int64(5), Fraction(7, 2)])
def test_relu_power_takes_any_degree_above_one_half(degree):
    phi = relu_power(degree)
    assert phi.degree == degree
    assert type(phi.params["degree"]) is (int if degree == int(degree) else float)
    assert phi.derivative_growth == degree - 1
    assert phi == relu_power(degree)
    assert hash(phi) == hash(relu_power(degree))


@pytest.mark.parametrize("degree", [0.5, 0.3, 0, -1, -2.5, -(10**400), Fraction(1, 2) + Fraction(1, 10**30)])
def test_relu_power_refuses_half_and_below(degree):
    with pytest.raises(ValueError, match=r"n > 1/2.*phi' is not square integrable \(E\[phi'\^2\] is infinite\).*Got"):
        relu_power(degree)


@pytest.mark.parametrize("degree", [True, np.bool_(True), "1.5", None, 1j, [2], np.nan, np.inf, -np.inf])
def test_relu_power_refuses_what_is_not_a_finite_number(degree):
    with pytest.raises(ValueError, match=r"needs a finite number\. Got"):
        relu_power(degree)


@pytest.mark.parametrize("degree", [100.5, 101, 10**400])
def test_relu_power_refuses_degrees_out_of_range(degree):
    with pytest.raises(ValueError, match=r"needs a degree up to 100\. Got"):
        relu_power(degree)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.0, 0.3), (1.0, 1.0)])
@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_known_acute_angles_change_nothing(alpha, beta, degree):
    with enable_x64(True):
        z = jnp.concatenate([jnp.linspace(0, 0.5, 50), 10.0 ** -jnp.arange(2.0, 30.0)])
        phi = Homogeneous("", alpha, beta, degree)
        known, unknown = (phi.dual(z, 1 - z, side(len(z)), Pairing(None, acute)) for acute in (True, False))
        np.testing.assert_allclose(known, unknown, rtol=8 * np.finfo(float).eps)
        assert phi.non_negative
    assert not Homogeneous("leaky_relu", 1.0, -0.2, 1).non_negative
