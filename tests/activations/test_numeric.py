"""Activations by quadrature, against the closed forms and mpmath."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from helpers import REFERENCE

from ntk_ln._dtype import enable_x64
from ntk_ln._numerics import HALVES
from ntk_ln.activations.elu import NAMES, Elu
from ntk_ln.activations.erf import Erf
from ntk_ln.activations.gelu import Gelu
from ntk_ln.activations.homogeneous import Homogeneous, absolute, relu
from ntk_ln.activations.numeric import Numeric
from ntk_ln.layers._state import Pairing, Side

sys.path.insert(0, str(REFERENCE))
import make

EPS = np.finfo(np.float64).eps
SCALES = np.array([1e-8, 1e-3, 0.3, 1, 5, 100, 1e5, 1e10])
ANGLES = np.array([1e-20, 1e-8, 1e-3, 0.2, 0.5, 0.8, 1 - 1e-3, 1])
INPUTS = 96  # pairs a call: every test compiles for one shape


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


def hard_tanh(x):
    return jnp.clip(x, -1, 1)


def sin3(x):
    return jnp.sin(3 * x)


@pytest.fixture(autouse=True)
def double():
    with enable_x64(True):
        yield


halves = Pairing(HALVES)


@eqx.filter_jit
def evaluate(act, z, y, scale, unit):
    side = Side(scale, unit)
    return act.dual(z, y, side, halves), act.moments(side)


@eqx.filter_jit
def evaluate_gain(act, z, y, scale, unit):
    return act.gain_dual(z, y, Side(scale, unit), halves)


@eqx.filter_jit
def error(act, z, y, scale, unit):
    return act.quadrature_error(z, y, Side(scale, unit), halves)


def points():
    """Pairs of scales and angles: every scale with itself and some with others."""
    pairs = [(h, h) for h in SCALES] + [(1, 5), (1e10, 0.3), (1e-8, 100), (1 + 1e-6, 1)]
    h1, h2, z = (np.array(v) for v in zip(*[(*p, z) for p in pairs for z in ANGLES], strict=True))
    assert len(z) == INPUTS
    return arguments(h1, h2, z)


def arguments(h1, h2, z):
    """z and y = 1 - z of INPUTS pairs, and scales and units of both sides, the last pair repeated."""
    h1, h2, z = (np.concatenate([v, np.full(INPUTS - len(v), v[-1])]) for v in (np.asarray(v, float) for v in (h1, h2, z)))
    scale = jnp.asarray(np.concatenate([h1, h2]))
    return jnp.asarray(z), jnp.asarray(1 - z), scale, jnp.ones_like(scale)


def dot_scale(act, scale):
    """sqrt(dot(x, x) dot(x', x'))."""
    n = len(scale)
    own = act.dual(jnp.zeros(n), jnp.ones(n), Side(scale, jnp.ones(n)), Pairing(None)).dot
    return np.sqrt(own[: n // 2] * own[n // 2 :])


@pytest.mark.parametrize(
    ("numeric", "closed"),
    [
        pytest.param(Numeric(jax.nn.relu, 1, (0,)), relu(), marks=pytest.mark.slow),
        pytest.param(Numeric(jnp.abs, 1, (0,)), absolute(), marks=pytest.mark.slow),
        (Numeric(gelu, 1), Gelu()),
        pytest.param(Numeric(jax.scipy.special.erf, 0), Erf(), marks=pytest.mark.slow),
    ],
    ids=["relu", "abs", "gelu", "erf"],
)
def test_agrees_with_the_closed_form(numeric, closed):
    args = points()
    (got, (scale, mean)), (want, (scale0, mean0)) = evaluate(numeric, *args), evaluate(closed, *args)
    tol = 1e-10
    np.testing.assert_allclose(got.z, want.z, rtol=0, atol=tol)
    np.testing.assert_allclose(got.y, want.y, rtol=0, atol=tol)
    np.testing.assert_allclose((got.dot - want.dot) / dot_scale(closed, args[2]), 0, atol=tol)
    np.testing.assert_allclose(scale, scale0, rtol=tol)
    if mean0 is None:
        assert mean is None
    else:
        np.testing.assert_allclose(mean, np.broadcast_to(mean0, mean.shape), rtol=0, atol=tol)
    assert numeric.second_moment() == pytest.approx(closed.second_moment(), rel=tol)


@pytest.mark.slow
@pytest.mark.parametrize(("numeric", "closed"), [(Numeric(jax.nn.relu, 1, (0,)), relu()), (Numeric(gelu, 1), Gelu())])
def test_gain_agrees_with_the_closed_form(numeric, closed):
    args = points()
    np.testing.assert_allclose(evaluate_gain(numeric, *args), evaluate_gain(closed, *args), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "fn",
    [jnp.tanh, *(pytest.param(fn, marks=pytest.mark.slow) for fn in (jax.nn.silu, jax.nn.softplus))],
    ids=lambda fn: fn.__name__,
)
def test_agrees_with_mpmath(fn):
    act, layer = Numeric(fn, 0 if fn is jnp.tanh else 1), {"name": fn.__name__}
    h1, h2, z = np.array([1, 2, 0.01]), np.array([1, 0.7, 0.01]), np.array([1e-3, 0.8, 0.45])
    (dual, (scale, mean)), gain = (f(act, *arguments(h1, h2, z)) for f in (evaluate, evaluate_gain))
    phi = make.dual(layer)
    for i, (a, b, zi) in enumerate(zip(h1, h2, z, strict=True)):
        q1, q2 = mp.mpf(a) ** 2, mp.mpf(b) ** 2
        s = mp.mpf(a) * mp.mpf(b) * (1 - 2 * mp.mpf(zi))
        nu1, nu2 = (mp.sqrt(phi.product(q, q, q)) for q in (q1, q2))
        nu = nu1 * nu2
        assert float(dual.z[i]) == pytest.approx(float((1 - phi.product(q1, q2, s) / nu) / 2), abs=1e-10)
        assert float(dual.dot[i]) == pytest.approx(float(a * b * phi.tangent(q1, q2, s) / nu), abs=1e-10)
        assert float(gain[i]) == pytest.approx(float(phi.gain(q1, q2, s) / nu), abs=1e-10)
        assert float(scale[i]) == pytest.approx(float(nu1), rel=1e-10)
        assert mean is None or float(mean[i]) == pytest.approx(float(phi.mean(q1) / nu1), abs=1e-10)


def test_known_values():
    dual, (nu, _) = evaluate(Numeric(jnp.tanh, 0), *arguments([1], [1], [0.2]))
    assert float((dual.y - dual.z)[0] * nu[0] ** 2) == pytest.approx(0.2252221535268837, abs=1e-13)
    assert float(dual.dot[0] * nu[0] ** 2) == pytest.approx(0.3935877980947682, abs=1e-13)


@pytest.mark.parametrize(
    "act",
    [Numeric(jnp.tanh, 0), Elu(), pytest.param(Numeric(hard_tanh, 0, (-1, 1)), marks=pytest.mark.slow)],
    ids=["tanh", "elu", "hard_tanh"],
)
def test_near_duplicates(act):
    # dz_new/dz = dot (Price): relative accuracy at any z, and exactly 0 at 0.
    h = np.array([0.0, 1e-3, 1, 5, 100])
    z, y, scale, unit = arguments(*(v.ravel() for v in np.broadcast_arrays(h[:, None], h[:, None], [0.0, 1e-20, 1e-16])))
    dual, _ = evaluate(act, z, y, scale, unit)
    assert not np.any(np.asarray(dual.z)[np.asarray(z) == 0])
    near = (np.asarray(z) == 1e-20) & (np.asarray(scale)[:INPUTS] > 0)
    np.testing.assert_allclose(dual.z[near], (z * dual.dot)[near], rtol=1e-8)


@pytest.mark.parametrize(
    ("act", "better"),
    [
        pytest.param(Numeric(jax.nn.relu, 1, (0,)), relu(), marks=pytest.mark.slow),
        pytest.param(Numeric(jax.nn.relu, 1), relu(), marks=pytest.mark.slow),
        pytest.param(Numeric(hard_tanh, 0), Numeric(hard_tanh, 0, (-1, 1), nodes=24), marks=pytest.mark.slow),
        pytest.param(Numeric(jnp.tanh, 0), Numeric(jnp.tanh, 0, nodes=28), marks=pytest.mark.slow),
    ],
    ids=["relu", "relu undeclared", "hard-tanh undeclared", "tanh"],
)
def test_error_estimate_covers_the_error(act, better):
    rng = np.random.default_rng(0)
    h1, h2 = 10 ** rng.uniform(-1, 2, (2, INPUTS))
    h2 = np.where(np.arange(INPUTS) % 2, h1, h2)
    z = np.where(np.arange(INPUTS) % 3, rng.uniform(0, 1, INPUTS), 10 ** rng.uniform(-8, -1, INPUTS))
    args = arguments(h1, h2, z)
    got, want, (error_z, error_dot) = evaluate(act, *args)[0], evaluate(better, *args)[0], error(act, *args)
    assert np.all(np.abs(got.z - want.z) <= error_z)
    assert np.all(np.abs(got.dot - want.dot) <= error_dot)


@pytest.mark.slow
def test_error_estimate_of_an_oscillation():
    rng = np.random.default_rng(1)
    h1, h2 = 10 ** rng.uniform(-1, 2, (2, INPUTS))
    z = rng.uniform(0, 1, INPUTS)
    args = arguments(h1, h2, z)
    got, (error_z, error_dot) = evaluate(Numeric(sin3), *args)[0], error(Numeric(sin3), *args)
    minus, plus = (np.exp(-4.5 * (h1 - h2) ** 2 - 18 * h1 * h2 * v) / 2 for v in (z, 1 - z))
    nu = np.prod([np.sqrt(-np.expm1(-18 * h**2) / 2) for h in (h1, h2)], axis=0)
    assert np.all(np.abs(got.z - (1 - (minus - plus) / nu) / 2) <= error_z)
    assert np.all(np.abs(got.dot - 9 * h1 * h2 * (minus + plus) / nu) <= error_dot)
    settled = np.maximum(h1, h2) < 2
    assert np.max(np.asarray(error_z)[settled]) < 1e-2


def test_coarser_is_the_same_with_fewer_nodes():
    act = Numeric(jnp.tanh, 0)
    assert act.coarser().nodes < act.nodes
    assert act.coarser().limit == act.limit
    assert act.coarser().fn is act.fn
    assert Elu(2.0).coarser().alpha == 2.0


def test_elu():
    act = NAMES["elu"](0.5)
    assert (act.name, act.params, act.degree, act.far_limit) == ("elu", {"alpha": 0.5}, 1, True)
    x = jnp.asarray([-800.0, -1.0, 0.0, 2.0, 800.0])
    np.testing.assert_allclose(act(x), np.where(x > 0, x, 0.5 * np.expm1(np.minimum(x, 0))), rtol=4 * EPS)
    assert np.isfinite(jax.vmap(jax.grad(jax.grad(act)))(x)).all()
    # E[phi^2] at h = 1: 1/2 + alpha^2 E[(e^a - 1)^2; a < 0]
    below = mp.exp(2) * mp.ncdf(-2) - 2 * mp.exp(0.5) * mp.ncdf(-1) + 0.5
    assert act.second_moment() == pytest.approx(float(0.5 + below / 4), rel=1e-11)
    # alpha = 0 is ReLU
    args = points()
    np.testing.assert_allclose(evaluate(Elu(0.0), *args)[0].z, evaluate(relu(), *args)[0].z, rtol=0, atol=1e-11)
    for alpha in (-1.0, float("inf"), "a", True):
        with pytest.raises(ValueError, match="finite number, at least 0"):
            Elu(alpha)


FAR = np.array([1e-300, 1e-8, 1, 1e11, 1e13, 1e300])


def far_points():
    return arguments(np.repeat(FAR, 16), np.tile(np.repeat(FAR[[0, 2, 4, 5]], 4), 6), np.tile([0, 1e-20, 0.3, 1], 24))


@pytest.mark.parametrize("act", [Elu(), Numeric(jnp.tanh, 0)], ids=["elu", "tanh"])
def test_far_out(act):
    z, y, scale, unit = far_points()
    unit = jnp.where(scale == 1e300, 0, unit)
    dual, (nu, mean) = evaluate(act, z, y, scale, unit)
    assert all(np.isfinite(v).all() for v in jax.tree.leaves((dual, nu, mean)))
    limit = Homogeneous("limit", *act.limit, act.degree)
    want, (nu0, mean0) = evaluate(limit, z, y, scale, unit)
    both = np.logical_and(*halves(np.asarray(scale) >= 1e11))
    np.testing.assert_allclose(dual.z[both], want.z[both], rtol=0, atol=1e-11)
    np.testing.assert_allclose(nu[scale >= 1e11], nu0[scale >= 1e11], rtol=1e-11)
    if act.degree == 0:  # a bounded phi jumps: dot -> jump^2 E[delta(a) delta(b)]
        apart = both & (np.asarray(z) == 0.3)
        np.testing.assert_allclose(dual.dot[apart], 4 / (2 * np.pi * np.sqrt(4 * 0.3 * 0.7)), rtol=1e-10)
    else:
        apart = both & (np.asarray(z) >= 0.3)
        np.testing.assert_allclose(dual.dot[apart], want.dot[apart], rtol=0, atol=1e-10)
        np.testing.assert_allclose(mean[scale >= 1e11], mean0, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("act", [Elu(), Numeric(jnp.tanh, 0)], ids=["elu", "tanh"])
def test_derivatives_are_finite(act):
    z, _, scale, unit = far_points()

    def total(z, scale, unit):
        dual, (_, mean) = evaluate(act, z, 1 - z, scale, unit)
        return jnp.sum(dual.z) + jnp.sum(dual.y * dual.y) + (0 if mean is None else jnp.sum(mean))

    def slope(z, scale, unit):
        return jax.jvp(lambda z, scale: jax.grad(total, argnums=(0, 1, 2))(z, scale, unit), (z, scale), (z, scale))

    assert all(np.isfinite(v).all() for v in jax.tree.leaves(jax.jit(slope)(z, scale, unit)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "act", [Elu(), pytest.param(Numeric(hard_tanh, 0, (-1, 1)), marks=pytest.mark.slow)], ids=["elu", "hard_tanh"]
)
def test_slope_in_z_is_dot(act):
    z, y, scale, unit = arguments([1, 2, 0.3, 20, 1], [1, 1, 0.3, 20, 5], [0.3, 0.1, 1e-3, 0.7, 0.9])

    def new(z):
        return jnp.sum(act.dual(z, 1 - z, Side(scale, unit), halves).z)

    np.testing.assert_allclose(jax.jit(jax.grad(new))(z), evaluate(act, z, y, scale, unit)[0].dot, rtol=1e-7)


@pytest.mark.slow
def test_elus_error():
    h, z = 10.0 ** np.arange(-3, 7.0), np.array([0, 1e-12, 1e-6, 1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999, 1 - 1e-6, 1.0])
    h1, h2, z = (v.ravel() for v in np.meshgrid(h, h, z))
    z, scale = jnp.asarray(z), jnp.asarray(np.concatenate([h1, h2]))
    unit = jnp.ones_like(scale)
    (got, (nu, mean)), (want, (nu0, mean0)) = (evaluate(act, z, 1 - z, scale, unit) for act in (Elu(), Elu(nodes=28)))
    bound = 1e-11  # guaranteed are 1e-9
    np.testing.assert_allclose(got.z, want.z, rtol=0, atol=bound)
    np.testing.assert_allclose((got.dot - want.dot) / dot_scale(Elu(nodes=28), scale), 0, atol=bound)
    np.testing.assert_allclose(nu, nu0, rtol=bound)
    np.testing.assert_allclose(mean, mean0, rtol=0, atol=bound)


@pytest.mark.slow
def test_float32():
    z, y, scale, unit = points()
    single = [v.astype(jnp.float32) for v in (z, y, scale, unit)]
    exact = [v.astype(jnp.float64) for v in single]
    for act in (Numeric(jnp.tanh, 0),):
        (got, (nu, _)), (want, (nu0, _)) = evaluate(act, *single), evaluate(act, *exact)
        assert got.z.dtype == got.dot.dtype == nu.dtype == jnp.float32
        np.testing.assert_allclose(got.z, want.z, rtol=0, atol=5e-6)
        np.testing.assert_allclose((got.dot - want.dot) / dot_scale(act, exact[2]), 0, atol=2e-5)
        np.testing.assert_allclose(nu, nu0, rtol=5e-6)


def test_limits_are_estimated():
    assert Numeric(jnp.tanh, 0).limit == (1, -1)
    assert Numeric(jax.nn.softplus, 1).limit == (1, 0)
    assert Numeric(lambda x: jax.nn.leaky_relu(x, 0.2), 1).limit == pytest.approx((1, -0.2), abs=1e-12)
    assert Numeric(lambda x: x + 3, 1).limit == (1, -1)
    assert Numeric(jnp.tanh, 0, limit=(1, -1)) == Numeric(jnp.tanh, 0)
    assert np.isnan(Numeric(jnp.tanh).degree)
    assert np.isnan(Numeric(jnp.tanh).derivative_growth)
    assert not Numeric(jnp.tanh).far_limit
    assert Numeric(jnp.tanh, 0).derivative_growth == -0.5
    with pytest.raises(ValueError, match=r"needs `limit=\(alpha, beta\)`"):
        Numeric(jnp.sin, 1)
    with pytest.raises(ValueError, match=r"needs `limit=\(alpha, beta\)`"):
        Numeric(jax.nn.relu, 0)


def test_it_is_hashable_and_named():
    act = Numeric(gelu, 1)
    assert act.name == "gelu"
    assert act.params == {}
    assert act == Numeric(gelu, 1)
    assert hash(act) == hash(Numeric(gelu, 1))
    assert Numeric(lambda x: x * 1.0, 1) != Numeric(lambda x: x * 1.0, 1)
    assert Numeric(jax.tree_util.Partial(jnp.tanh)).name == "callable"


def test_what_it_refuses():
    for fn, kind, match in (
        (3, TypeError, "an elementwise JAX function"),
        (np.vectorize(abs), TypeError, "`jax.jvp` can differentiate"),
        (lambda x: jnp.sum(x), ValueError, r"Got shape \(\)"),
        (lambda x: jnp.log(x), ValueError, "finite values"),
        (lambda x: x.astype(int), (TypeError, ValueError), "real floating-point values|`jax.jvp` can differentiate"),
        (lambda x: x + 1j, ValueError, "real floating-point values"),
    ):
        with pytest.raises(kind, match=match):
            Numeric(fn)
    for degree in (-1, 0.5, float("nan"), "1", True):
        with pytest.raises(ValueError, match="needs 0, a number above 1/2, or None"):
            Numeric(jnp.tanh, degree)
    with pytest.raises(ValueError, match=r"kinks=\.\.\.\)` needs finite numbers"):
        Numeric(jnp.tanh, 0, kinks=(0, float("inf")))
    with pytest.raises(ValueError, match="two finite numbers, not both 0"):
        Numeric(jnp.tanh, 0, limit=(0, 0))
    with pytest.raises(ValueError, match="needs `degree` too"):
        Numeric(jnp.tanh, limit=(1, -1))
