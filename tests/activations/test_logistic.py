"""tanh, SiLU and softplus against mpmath, in their limits, and the nodes of the mixture they are made of."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from helpers import slow
from mpmath import mpf
from scipy import special

from ntk_ln._dtype import enable_x64
from ntk_ln._numerics import HALVES
from ntk_ln.activations import _logistic as logistic
from ntk_ln.activations.homogeneous import relu
from ntk_ln.activations.silu import Silu
from ntk_ln.activations.softplus import Softplus
from ntk_ln.activations.tanh import Tanh
from ntk_ln.layers._state import Pairing, Side

sys.path.insert(0, str(Path(__file__).parent.parent / "reference"))
import make

EPS = np.finfo(np.float64).eps
ACTIVATIONS = [Tanh(), Silu(), Softplus()]
each = pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda act: act.name)
one = pytest.mark.parametrize("act", [Tanh(), slow(Silu()), slow(Softplus())], ids=lambda act: act.name)
# The deviations h and h' and z = (1 - cos)/2, y = (1 + cos)/2.
POINTS = [
    (1.0, 1.0, 0.25, 0.75),
    (0.6, 1.7, 0.9, 0.1),
    (1.0, 1.0001, 0.0, 1.0),
    (1.0, 1.000001, 1e-9, 1 - 1e-9),
    (0.01, 0.02, 0.4, 0.6),
    (0.3, 0.31, 1.0, 0.0),
]


@jax.jit
def averages(act, z, y, scale, unit):
    n = len(z)

    def pair(a):
        return a[:n], a[n:]

    side = Side(scale, unit)
    return *act.moments(side), *act.dual(z, y, side, pair), act.gain_dual(z, y, side, pair)


def evaluate(act, points, units=None, dtype=np.float64):
    h1, h2, z, y = np.array(points, dtype).T
    scale = np.concatenate([h1, h2])
    unit = np.ones_like(scale) if units is None else np.asarray(units, dtype)
    names = ("F", "mean", "z", "y", "dot", "gain")
    return dict(zip(names, averages(act, *map(jnp.asarray, (z, y, scale, unit))), strict=True))


@pytest.fixture(scope="module")
def reference():
    """Per activation and point: F, F', mean, z, y, dot, gain, and the diagonals' root of dot and gain."""
    digits, make.QUADRATURE_DIGITS = make.QUADRATURE_DIGITS, 22
    tables = {}
    for act in ACTIVATIONS:
        dual, rows = make.dual({"name": act.name}), []
        for h1, h2, z, y in POINTS:
            with mp.workdps(40):
                h1, h2, cos = mpf(h1), mpf(h2), 1 - 2 * mpf(z) if z < y else 2 * mpf(y) - 1
                q1, q2, s = h1 * h1, h2 * h2, h1 * h2 * cos
                n1, n2 = dual.product(q1, q1, q1), dual.product(q2, q2, q2)
                root = mp.sqrt(n1 * n2)
                ratio = dual.product(q1, q2, s) / root
                dots = dual.tangent(q1, q1, q1) * q1 / n1 * dual.tangent(q2, q2, q2) * q2 / n2
                gains = dual.gain(q1, q1, q1) / n1 * dual.gain(q2, q2, q2) / n2
                row = {"F": mp.sqrt(n1), "mean": dual.mean(q1) / mp.sqrt(n1), "z": (1 - ratio) / 2, "y": (1 + ratio) / 2}
                row |= {"dot": dual.tangent(q1, q2, s) * h1 * h2 / root, "gain": dual.gain(q1, q2, s) / root}
                rows.append(row | {"dots": mp.sqrt(dots), "gains": mp.sqrt(gains)})
        tables[act.name] = rows
    make.QUADRATURE_DIGITS = digits
    return tables


@pytest.mark.slow
@each
def test_averages_against_mpmath(act, reference):
    with enable_x64(True):
        got = evaluate(act, POINTS)
    for i, (point, want) in enumerate(zip(POINTS, reference[act.name], strict=True)):
        scales = {"F": want["F"], "mean": 1, "z": 1, "y": 1, "dot": want["dots"], "gain": want["gains"]}
        for name, scale in scales.items():
            if got[name] is not None:
                tolerance = 2 * logistic.ERROR if name == "gain" else logistic.ERROR
                assert abs(mpf(float(got[name][i])) - want[name]) <= tolerance * scale, (name, point)
        # An angle keeps its digits however small: z relative to its own size, but for what the sides' difference loses.
        for name in ("z", "y") if act.name == "tanh" else ("z",):
            assert abs(mp.sqrt(mpf(float(got[name][i]))) - mp.sqrt(abs(want[name]))) <= logistic.ERROR, (name, point)


@one
def test_float32(act):
    with enable_x64(True):
        want = evaluate(act, POINTS)
    want = {name: None if v is None else np.asarray(v) for name, v in want.items()}
    got = evaluate(act, POINTS, dtype=np.float32)
    for name, value in got.items():
        if value is not None:
            assert value.dtype == np.float32
            np.testing.assert_allclose(value, want[name], rtol=0, atol=20 * np.finfo(np.float32).eps * np.abs(want[name]).max())


@each
def test_far_limit(act):
    z = np.array([1e-20, 1e-9, 0.1, 0.5, 0.7, 0.9])
    points = [(1.0, 1.0, v, 1 - v) for v in z]
    with enable_x64(True):
        got, near = evaluate(act, points, np.zeros(12)), evaluate(act, points, np.full(12, 1e-15))
        if act.name == "tanh":  # the sign function
            want, dot = 2 / np.pi * np.arcsin(np.sqrt(z)), 1 / (np.pi * np.sqrt(z * (1 - z)))
        else:
            want, _, dot = relu().dual(jnp.asarray(z), jnp.asarray(1 - z), None, Pairing(None))
        np.testing.assert_allclose(np.sqrt(got["z"]), np.sqrt(want), rtol=1e-13, atol=EPS)  # angles
        np.testing.assert_allclose(got["dot"], dot, rtol=1e-13)
        np.testing.assert_allclose(near["z"][1:], want[1:], rtol=1e-9)
        assert all(np.isfinite(v).all() for v in got.values() if v is not None)


@partial(jax.jit, static_argnums=0)
def slopes(name, weights, z, scale, unit):
    """The derivatives of a weighted sum of z_new and dot by z, F and e."""
    act = {act.name: act for act in ACTIVATIONS}[name]

    def total(z, scale, unit):
        dual = act.dual(z, 1 - z, Side(scale, unit), Pairing(HALVES))
        return jnp.sum(weights[0] * dual.z + weights[1] * dual.dot)

    return jax.grad(total, (0, 1, 2))(z, scale, unit)


@pytest.mark.parametrize("act", [Tanh(), *(pytest.param(act, marks=pytest.mark.slow) for act in ACTIVATIONS[1:])])
def test_derivative_by_the_unit_at_infinity(act):
    """What the far field's next term is made of: also where the sides differ only at w of the order of e."""
    z = [0.0, 0.2, 0.2, 0.7, 0.99, 1.0]
    points = [(1.0, 1.0, v, 1 - v) for v in z]
    with enable_x64(True):

        def new_z(e):
            return evaluate(act, points, [e] * 6 + [0.5] * 6)["z"]

        weights = jnp.stack([jnp.ones(6), jnp.zeros(6)])
        slope = slopes(act.name, weights, jnp.array(z), jnp.ones(12), jnp.array([0.0] * 6 + [0.5] * 6))[2][:6]
        steps = [(new_z(step) - new_z(0.0)) / step for step in (1e-4, 5e-5)]
        np.testing.assert_allclose(slope, 2 * steps[1] - steps[0], rtol=1e-5, atol=1e-6)


@one
def test_from_1e_300_to_1e300(act):
    base = [(1e-300, 1.0), (1.0, 1e-300), (1.0, 0.0), (1e300, 1.0), (1e-3, 1.0), (2e3, 1.0)]
    cases = np.array([(*a, *b, z) for a in base for b in base for z in (0.0, 1e-20, 0.5, 1.0)])
    with enable_x64(True):
        for f1, e1, f2, e2, z in (c.T for c in np.split(cases, len(cases) // 6)):
            z, scale, unit = (jnp.asarray(v) for v in (z, np.concatenate([f1, f2]), np.concatenate([e1, e2])))
            got = averages(act, z, 1 - z, scale, unit)
            assert (got[2][(f1 == f2) & (e1 == e2) & (np.asarray(z) == 0)] == 0).all()
            assert all(v is None or np.isfinite(v).all() for v in got)
            assert all(np.isfinite(v).all() for v in slopes(act.name, jnp.ones((2, 6)), z, scale, unit))


def nodes(count):
    """Lanczos on a fine grid in log S, S = 2 K, from either series of the Kolmogorov density."""
    j = np.arange(1, 200)[:, None]
    t = np.linspace(np.log(0.1), np.log(15.0), 3001)
    k = np.exp(t) / 2
    c = (2 * j - 1) ** 2 * np.pi**2 / 8
    small = np.sqrt(2 * np.pi) * np.sum(np.exp(-c / k**2) * (2 * c / k**4 - 1 / k**2), axis=0)
    large = 8 * np.sum((-1.0) ** (j + 1) * j**2 * k * np.exp(-2 * j**2 * k * k), axis=0)
    weights = np.where(k < 1, small, large) * k
    basis, alpha, beta = [np.sqrt(weights / weights.sum())], [], []
    for _ in range(count):
        v = t * basis[-1]
        alpha.append(v @ basis[-1])
        for _ in range(2):
            for u in basis:
                v = v - (u @ v) * u
        beta.append(np.linalg.norm(v))
        basis.append(v / beta[-1])
    values, vectors = np.linalg.eigh(np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1))
    return np.exp(values), vectors[0] ** 2


def test_nodes_are_the_gauss_rule():
    scales, weights = nodes(len(logistic.SCALES))
    np.testing.assert_allclose(logistic.SCALES, scales, rtol=1e-9)
    np.testing.assert_allclose(logistic.WEIGHTS, weights, rtol=1e-7)


def test_mixture_is_the_logistic_function():
    x = np.concatenate([np.linspace(0, 3, 600), np.linspace(3, 80, 1500)])[:, None]
    mixture = special.ndtr(x / np.array(logistic.SCALES)) @ np.array(logistic.WEIGHTS)
    assert np.abs(mixture - special.expit(x[:, 0])).max() < logistic.UNIFORM


@pytest.mark.slow
@each
def test_more_nodes_change_nothing(act, monkeypatch):
    h = [1e-3, 0.1, 0.3, 0.6, 1.0, 1.7, 3.0, 10.0, 50.0, 1e6]
    points = [(h1, h2, z, 1 - z) for h1 in h for h2 in h for z in (0.0, 1e-9, 0.05, 0.3, 0.5, 0.8, 0.99, 1.0)]
    h1, h2, z, y = np.array(points).T
    n = len(z)

    def run():
        side, twice = Side(jnp.concatenate([h1, h2]), jnp.ones(2 * n)), jnp.zeros(2 * n)

        def pair(a):
            return a[:n], a[n:]

        def both(a):
            return a, a

        dual, own = act.dual(jnp.asarray(z), jnp.asarray(y), side, pair), act.dual(twice, twice + 1, side, both)
        gain, own_gain = act.gain_dual(jnp.asarray(z), jnp.asarray(y), side, pair), act.gain_dual(twice, twice + 1, side, both)
        scales = (jnp.sqrt(v[:n] * v[n:]) for v in (own.dot, own_gain))
        return jnp.log(act.moments(side)[0]), dual.z, dual.y, *(v / s for v, s in zip((dual.dot, gain), scales, strict=True))

    with enable_x64(True):
        few = run()
        scales, weights = nodes(24)
        monkeypatch.setattr(logistic, "SCALES", tuple(scales))
        monkeypatch.setattr(logistic, "WEIGHTS", tuple(weights))
        for got, want in zip(few, run(), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=logistic.ERROR)


@each
def test_second_moment(act):
    side = Side(jnp.ones(1), jnp.ones(1))
    with enable_x64(True):
        scale, _ = act.moments(Side(*(v.astype(jnp.float64) for v in side[:2])))
    np.testing.assert_allclose(float(scale[0]) ** 2, act.second_moment(), rtol=2 * logistic.ERROR)
    x = jnp.linspace(-3, 3, 7)
    f = {"tanh": np.tanh, "silu": lambda x: x * special.expit(x), "softplus": lambda x: np.logaddexp(0, x)}[act.name]
    np.testing.assert_allclose(act(x), f(np.asarray(x)), atol=2e-6)


def test_the_guaranteed_error_follows_from_the_functions_themselves():
    # |E[f f'] - E[m m']| <= (2 r + r^2) |f| |f'| for functions f and their mixtures m with |f - m| <= r |f| in mean square.
    s, weights = np.array(logistic.SCALES), np.array(logistic.WEIGHTS)
    w = np.exp(np.linspace(-40, np.log(12), 6001))
    mass = w * np.exp(-w * w / 2)
    w, mass = np.r_[-w[::-1], w], np.r_[mass[::-1], mass]

    def pairs(x):
        def mixture(x):
            u = x[:, None] / s
            density = np.exp(-u * u / 2) / np.sqrt(2 * np.pi)
            return special.ndtr(u) @ weights, (density / s) @ weights, (density * s) @ weights

        sigma, slope, smooth = mixture(x)
        sigma2, slope2, _ = mixture(2 * x)
        logistic_ = special.expit(x)
        yield np.tanh(x), 2 * sigma2 - 1
        yield 4 * special.expit(2 * x) * special.expit(-2 * x), 4 * slope2
        yield x * logistic_, x * sigma
        yield logistic_ + x * logistic_ * special.expit(-x), sigma + x * slope
        yield np.logaddexp(0, x), x * sigma + smooth
        yield logistic_, sigma

    for h in np.geomspace(1e-3, 1e8, 34):
        for f, m in pairs(h * w):
            r = np.sqrt((mass @ (f - m) ** 2) / (mass @ f**2))
            assert 2 * r + r * r <= logistic.GUARANTEED, h
    assert all(act.error == logistic.GUARANTEED for act in ACTIVATIONS)
