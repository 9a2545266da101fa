"""The guaranteed error of ELU's quadrature: what Gauss's rule can be wrong by on every panel, added up (docs/numerics.md).

On [-1, 1] the rule of K nodes errs by at most 64/15 M rho^(-2K)/(1 - rho^-2), M the largest |integrand| on the ellipse with foci
-1, 1 and half-axes (rho +- 1/rho)/2 (Rabinowitz 1969). ELU is R + alpha m, R(a) = max(a, 0), m(a) = min(exp(a) - 1, 0). The error of
E[f(h a) g(h' b)], f and g among R, m or their slopes, is bounded relative to the root mean squares of f and g: then alpha does not
matter. Inside (over b given a) and outside (over a) are bounded apart.
"""

import numpy as np
import pytest
from scipy.special import erfcx, ndtr

from ntk_ln.activations._quadrature import NODES, _graded
from ntk_ln.activations.elu import Elu

REACH, STRETCH = 8.5, 1.0  # of the rule in float64, with one kink
RATIOS = np.exp(np.arange(0.6, 2.5, 0.25))  # rho
SIGN = {"m": -1}
RIGHT, LEFT = ("R", "R'", "R2"), ("m", "m'", "m2")
POINTS = np.exp(1j * np.linspace(0, np.pi, 25))  # the lower half of an ellipse is the conjugate of the upper
ELLIPSES = (RATIOS[:, None] * POINTS + 1 / (RATIOS[:, None] * POINTS)) / 2
FACTORS = 32 / 15 * RATIOS ** (-2.0 * NODES) / (1 - RATIOS**-2.0)  # on [0, 1]


def normal(x):
    return np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


def branch(name: str, a):
    """R, m, their slopes or squares where they are not 0, of a complex argument."""
    match name:
        case "1" | "R'":
            return np.ones_like(a)
        case "R":
            return a
        case "R2":
            return a * a
        case "m'":
            return np.exp(a)
        case "m":
            return np.expm1(a)
        case "m2":
            return np.expm1(a) ** 2
    raise ValueError(name)


def tail(mean, spread):
    """E[exp(b); b < 0] for b of this mean and standard deviation."""
    t = mean / spread
    y = t + spread
    with np.errstate(over="ignore", invalid="ignore"):
        outside = normal(t) * np.sqrt(np.pi / 2) * erfcx(np.maximum(y, 0) / np.sqrt(2))
        inside = np.exp(np.minimum(mean + spread * spread / 2, 0)) * ndtr(-y)
    return np.where(y > 0, outside, inside)


def average(name: str, mean, spread):
    """|E[g(b)]| for b of this mean and standard deviation; g never changes its sign."""
    t = mean / spread
    match name:
        case "1":
            return np.ones_like(mean)
        case "R":
            return mean * ndtr(t) + spread * normal(t)
        case "R'":
            return ndtr(t)
        case "R2":
            return (mean**2 + spread**2) * ndtr(t) + mean * spread * normal(t)
        case "m'":
            return tail(mean, spread)
        case "m":
            return np.abs(ndtr(-t) - tail(mean, spread))
        case "m2":
            return np.abs(ndtr(-t) - 2 * tail(mean, spread) + tail(2 * mean, 2 * spread))
    raise ValueError(name)


def root_mean_square(name: str, h):
    """sqrt(E[g(h a)^2]), and E[g(h a)] of a square: what errors are relative to."""
    t = np.linspace(-45, np.log(40), 4000)  # a = -exp(t), or exp(t)
    a, weights = np.exp(t), (t[1] - t[0]) * np.exp(t) * normal(np.exp(t))
    square = name.endswith("2")
    value = branch(name, (a if name in RIGHT else -a) * h[..., None])
    mean = np.sum(weights * np.abs(value) ** (1 if square else 2), axis=-1)
    return mean if square else np.sqrt(mean)


def gauss_bounds(starts, steps, sizes):
    """Bounds of the rule's error for each of the integrands whose sizes on the ellipses `sizes(x)` lists."""
    u = (ELLIPSES + 1) / 2
    x, slope = np.sinh(STRETCH * u) / np.sinh(STRETCH), STRETCH * np.cosh(STRETCH * u) / np.sinh(STRETCH)
    x = starts[..., None, None] + steps[..., None, None] * x
    weight = np.abs(slope) * np.abs(steps)[..., None, None] * np.exp((x.imag**2 - x.real**2) / 2) / np.sqrt(2 * np.pi)
    found = [np.max(weight * size, axis=-1) * FACTORS for size in sizes(x)]
    return [np.min(np.where(np.isfinite(bounds), bounds, np.inf), axis=-1) for bounds in found]


def panels(edge, marks, sign):
    """Starts and steps of the panels on one side of an edge, as `_Rule._panels` cuts them; the last axis runs over panels."""
    edge = np.clip(edge, -REACH, REACH)
    length, ends = REACH - sign * edge, []
    for k, end in enumerate(marks, 1):
        ends.append((ends[-1] + length) / 2 if end is None else np.minimum(end, length * k / (len(marks) + 1)))
    ends = np.stack([np.zeros_like(length), *ends, length], axis=-1)
    return edge[..., None] + sign * ends[..., :-1], sign * np.diff(ends, axis=-1)


def entire(name: str, mean, spread):
    """Entire functions of the mean that come close to E[g(b)] somewhere."""
    rise = np.exp(mean + spread**2 / 2)
    match name:
        case "1" | "R'":
            return [np.ones_like(mean)]
        case "R":
            return [mean]
        case "R2":
            return [mean**2 + spread**2]
        case "m'":
            return [rise]
        case "m":
            return [-np.ones_like(mean), rise - 1]
        case "m2":
            return [np.ones_like(mean), np.exp(2 * (mean + spread**2)) - 2 * rise + 1]
    raise ValueError(name)


def panel_bound(starts, steps, exact, options):
    """The least bound of the rule's errors on the panels.

    Every option is the values of an entire function at real x and a bound of its size at complex x. What it leaves of the exact
    values, monotone between nodes, counts for the integral and for the rule.
    """
    nodes, weights = _graded(NODES, STRETCH)
    at = starts[..., None] + steps[..., None] * np.concatenate([[0], nodes, [1]])

    def mass(values):
        sizes = np.abs(values) * normal(at)
        integral = np.sum(np.maximum(sizes[..., 1:], sizes[..., :-1]) * np.abs(np.diff(at, axis=-1)), axis=-1)
        return integral + np.abs(steps) * np.sum(weights * sizes[..., 1:-1], axis=-1)

    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        values = exact(at)
        best = mass(values)
        bounds = gauss_bounds(starts, steps, lambda x: [size for _, size in options(x)])
        for (value, _), gauss in zip(options(at), bounds, strict=True):
            best = np.fmin(best, mass(values - value) + gauss)
    return best.sum(axis=-1)


def outside(first: str, second: str, h1, h2, cos, sigma):
    """The error of the outer rule for E[f(h a) G(a)], G(a) = E[g(h' b) | a]."""
    steep = 1 / np.maximum(np.abs(cos), 1e-30)
    marks = np.sort([5 / h1, 25 / h1, 5 * steep / h2, 25 * steep / h2, 7 * sigma * steep], axis=0)
    total = 0.0
    for sign in (1, -1):
        if first in (LEFT if sign == 1 else RIGHT):
            continue

        def exact(a):
            h, mean, spread = (v.reshape(-1, *[1] * (a.ndim - 1)) for v in (h1, h2 * cos, h2 * sigma))
            return branch(first, h * a) * SIGN.get(second, 1) * average(second, *np.broadcast_arrays(mean * a, spread))

        def options(a):
            h, mean, spread = (v.reshape(-1, *[1] * (a.ndim - 1)) for v in (h1, h2 * cos, h2 * sigma))
            mean = mean * a
            entire_second = [(g, np.abs(g)) for g in entire(second, mean, spread)]
            if second != "1":
                smeared = SIGN.get(second, 1) * average(second, *np.broadcast_arrays(mean.real, spread))
                entire_second.append((smeared, np.abs(smeared) * np.exp((mean.imag / spread) ** 2 / 2)))
            return [(f * g, np.abs(f) * size) for f in constants(first, branch(first, h * a)) for g, size in entire_second]

        total = total + panel_bound(*panels(np.zeros_like(h1), list(marks), sign), exact, options)
    return total


def constants(name: str, value):
    """The values, and where they tend to a constant far out that."""
    return [value] + ([np.full_like(value, -1.0 if name == "m" else 1.0)] if name in ("m", "m2") else [])


def inside(second: str, mean, spread):
    """The error of the inner rule for E[g(mean + spread x)], of equal shapes."""

    def exact(x):
        m, s = (v.reshape(*v.shape, *[1] * (x.ndim - v.ndim)) for v in (mean, spread))
        b = m + s * x
        return branch(second, np.minimum(b, 0) if second in LEFT and not np.iscomplexobj(x) else b)

    def options(x):
        return [(value, np.abs(value)) for value in constants(second, exact(x))]

    return panel_bound(*panels(-mean / spread, [5 / spread, 25 / spread, None], 1 if second in RIGHT else -1), exact, options)


AT = np.linspace(-REACH, REACH, 35)  # of the outer variable: the inner error is smooth in it
TRUNCATED = 1e-13  # what lies beyond REACH, relative


def relative_errors(h1, h2, z):
    """Bounds for z_new and dot, dot relative to h h'/(F_new F_new') and max(1, alpha)^2, whatever alpha."""
    cos, sigma = 1 - 2 * z, 2 * np.sqrt(z * (1 - z))
    norms = [
        {name: root_mean_square(name, h) for name in ("R", "m", "R2", "m2")} | {"R'": 1.0, "m'": 1.0, "1": 1.0} for h in (h1, h2)
    ]
    weight = normal(AT) * (AT[1] - AT[0])

    def inner(g):
        error = inside(g, (h2 * cos)[:, None] * AT, np.broadcast_to((h2 * sigma)[:, None], (len(z), len(AT))))
        return ((error * weight).sum(axis=-1) if g.endswith("2") else np.sqrt((error**2 * weight).sum(axis=-1))) / norms[1][g]

    def error(f, g):
        return outside(f, g, h1, h2, cos, sigma) / (norms[0][f] * norms[1][g]) + (inner(g) if g != "1" else 0)

    def moment(side, h, name):
        return inside(name, np.zeros_like(h), h) / norms[side][name]

    # phi^2 = R^2 + alpha^2 m^2: the worse of both. Of products the matrix's norm bounds every alpha.
    squares = np.maximum(error("R2", "1"), error("m2", "1")) + np.maximum(error("1", "R2"), error("1", "m2"))
    product = np.sqrt(sum(error(f, g) ** 2 for f in ("R", "m") for g in ("R", "m")))
    scales = sum(np.maximum(moment(side, h, "R2"), moment(side, h, "m2")) for side, h in ((0, h1), (1, h2))) / 2
    slopes = sum(error(f, g) for f in ("R'", "m'") for g in ("R'", "m'"))
    return squares / 4 + product / 2 + scales + TRUNCATED, slopes + scales + TRUNCATED


@pytest.mark.slow
def test_the_guaranteed_error_of_elu():
    h, small = 10.0 ** np.arange(-3, 12.5), 10.0 ** np.array([-15, -11, -8, -5, -3, -2, -0.5])
    grid = np.meshgrid(h, h, np.concatenate([small, 1 - small]))
    h1, h2, z = (v.ravel() for v in grid)
    assert len(Elu().kinks) == 1
    worst = np.max(
        [np.max(relative_errors(h1[i : i + 256], h2[i : i + 256], z[i : i + 256]), axis=1) for i in range(0, len(z), 256)], axis=0
    )
    assert worst.max() <= Elu().error
    assert worst.max() >= Elu().error / 10  # not a bound of something else
