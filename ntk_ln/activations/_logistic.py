r"""The logistic function as a mixture of normal distribution functions, and the Gaussian integrals that follow.

    sigma(x) = 1/(1 + exp(-x)) = E_S[Phi(x/S)],   S = 2 K, K of the Kolmogorov distribution (Andrews & Mallows 1974).

tanh, SiLU and softplus are then mixtures of erf, of GELU and of smoothed ReLUs, each with closed forms. The average over S is a
Gauss rule in log S (Golub & Welsch 1969): its nodes and weights are below, tests/activations/test_logistic.py recomputes
them. As a function the mixture is off by at most UNIFORM (on a grid; sigma' by 2e-10, x sigma by 6e-10). Its Gaussian integrals
are much closer: Phi(x/S) grows where |Im log S| > pi/4, they are analytic for |Im log S| < pi/2 whatever h, and the Gauss rule
converges twice as quickly: 4e-9, 6e-11, 1e-12, 3e-14 with 8, 10, 12, 14 nodes, measured against 24 nodes over h, h' in
[1e-3, 1e6] and all angles (the slow test does it again). ERROR bounds what was measured, it is not proved.

Sides are points (a, b) = (F, e)/hypot(F, e); under node j a side is (a alpha_j, beta_j), again on the unit circle.
"""

from functools import partial
from math import pi

import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._numerics import CENTRE, divide, sqrt, twice_angle_ratio

SCALES = (
    0.5160069216854286,
    0.6186880097279801,
    0.7359676231265241,
    0.8778326379373863,
    1.0539449055858878,
    1.2753185367241906,
    1.554062532943231,
    1.9015900319288743,
    2.3257007211070486,
    2.830171347647569,
    3.41932372752463,
    4.103846743726033,
    4.910809372266222,
    5.9219916364899,
)
WEIGHTS = (
    6.077562610404821e-07,
    8.83218117465247e-05,
    0.0022546957763316246,
    0.01999636656279346,
    0.08239507072423326,
    0.18642697624914553,
    0.25860690022766325,
    0.2358294428105473,
    0.14417290208627007,
    0.05630047166203417,
    0.01254167517624519,
    0.0013357624113994491,
    5.0466588562658436e-05,
    3.401567663966649e-07,
)
UNIFORM = 7e-11  # max |sigma - mixture|
ERROR = 1e-13  # of the averages below, relative, rounding included: measured
GUARANTEED = 2.5e-9  # what follows from the functions' own distance: 2 r + r^2, r = |phi - mixture|/|phi| in mean square, any h

# Gaussian averages of even functions over w > 0, w = log(1 + e^t): geometric steps near 0, equal ones in the tail. Functions
# of h w are analytic for |Im t| < pi/2, so that the trapezoid rule with this step is off by exp(-pi^2/STEP) = 5e-16.
STEP, HIGHEST = 0.28, 9.0


def points(side, factor: float):
    """The side's point (a, b) and, under the nodes of erf(factor x/(S sqrt 2)) or Phi(factor x/S), alpha and beta (M, n)."""
    a, b = side.point(1.0)
    return a, b, *rows(a, b, factor)


def rows(a, b, factor: float):
    """alpha and beta of the points (a, b)."""
    width = jnp.asarray(factor / np.array(SCALES)[:, None], a.dtype)
    length = jnp.sqrt((width * a) ** 2 + b * b)
    return width / length, b / length


def weighted(rows):
    """The average over the nodes of an array (M, n)."""
    return jnp.sum(jnp.asarray(np.array(WEIGHTS)[:, None], rows.dtype) * rows, axis=0)


def node_sum(term, nodes, pair, like):
    """The sums over pairs of nodes of w_j w_k term(...), each of the shape of `like`; positive terms keep their digits.

    Of every array (M, n) in `nodes` term takes the two sides' rows at nodes j and k. One pair of nodes at a time: neither the
    compiled code nor the memory, in reverse-mode differentiation too, grows with their number.
    """
    sides = [jax.vmap(pair)(x) for x in nodes]
    count = len(WEIGHTS)
    j, k = np.divmod(np.arange(count * count), count)
    weights = jnp.asarray(np.outer(WEIGHTS, WEIGHTS).ravel(), like.dtype)

    @jax.checkpoint
    def step(totals, at):
        j, k, weight = at
        terms = term(*((first[j], second[k]) for first, second in sides))
        return tuple(total + weight * value for total, value in zip(totals, terms, strict=True)), None

    row = tuple((x[0][0], x[1][0]) for x in sides)
    shapes = jax.eval_shape(lambda: tuple(value + jnp.zeros_like(like) for value in term(*row)))
    return jax.lax.scan(step, tuple(jnp.zeros(s.shape, s.dtype) for s in shapes), (j, k, weights))[0]


def both(x):
    """The pairing of each input with itself."""
    return x, x


def product(a, alpha):
    """p = a a' alpha_j alpha'_k, the smaller factors last: it underflows only where p does."""
    (a1, a2), (alpha1, alpha2) = a, alpha
    return (alpha1 * a1) * (alpha2 * a2)


def asin_over(root):
    """asin(x)/x for root = sqrt(1 - x^2), 0 <= x <= 1."""
    cos = jnp.sqrt((1 + root) / 2)  # of half the angle
    return twice_angle_ratio(cos - CENTRE) / (2 * cos)


def drop_over(p, m, root0, root):
    """(asin(p) - asin(p c))/p, the angle's sine/p, and (1 - its cosine)/(2 p^2), for c = 1 - 2 m >= 0.

    root0 = sqrt(1 - p^2), root = sqrt(1 - p^2 c^2). The angle is at most pi/2, so that half of it has a polynomial.
    """
    square = p * p
    sine = 4 * square * m * (1 - m) * divide(1.0, root + root0) + 2 * m * root0
    cos2 = (1 + root * root0 + square * (1 - 2 * m)) / 2  # cos of half the angle, squared
    cos = jnp.sqrt(cos2)
    return sine / (2 * cos) * twice_angle_ratio(cos - CENTRE), sine, sine * sine / (4 * cos2)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def sides_apart(value, ratio, lowest: float, pair, args):
    """Half E[(f - f')^2] for an even or odd f(w) = value(w, *args) of w ~ N(0, 1), one of each side.

    A sum of squares, exactly 0 for equal sides. `lowest` is the t at which w = e^t no longer counts. The derivative is that of
    minus ratio(pair, *args), which is E[f f'] less what (E[f^2] + E[f'^2])/2 has beside a constant: at e = 0 the nodes would miss
    what happens at w of the order of e.
    """
    t = np.arange(lowest, HIGHEST, STEP)
    w = np.logaddexp(0, t)
    weights = STEP * np.exp(t - w) * np.exp(-w * w / 2) / np.sqrt(2 * pi)
    weights[0] /= 1 - np.exp(-STEP)  # the geometric tail below, where f is constant
    dtype = args[0].dtype

    def step(total, at):
        w, weight = at
        first, second = pair(value(w, *args))
        return total + weight * (first - second) ** 2, None

    first, second = pair(args[0])
    zero = jnp.zeros(jnp.broadcast_shapes(first.shape, second.shape), dtype)
    return jax.lax.scan(step, zero, (jnp.asarray(w, dtype), jnp.asarray(weights, dtype)))[0]


@sides_apart.defjvp
def _sides_apart_jvp(value, ratio, lowest, pair, primals, tangents):
    _, slope = jax.jvp(lambda *args: ratio(pair, *args), primals[0], tangents[0])
    return sides_apart(value, ratio, lowest, pair, primals[0]), -slope


def over(a, b):
    """a/b for a point of the unit circle, large but finite at b = 0."""
    return a / jnp.maximum(b, 4 * jnp.finfo(a.dtype).tiny)


def gaussian_mean(f) -> float:
    """E[f(w)] for w ~ N(0, 1) and f analytic for |Im w| < pi/2, to rounding."""
    w = np.arange(-160, 161) / 16
    return float(np.sum(f(w) * np.exp(-w * w / 2)) / (16 * np.sqrt(2 * pi)))


def one_minus_squares(p, m, a, alpha, beta):
    """sqrt(1 - p^2) and sqrt(1 - p^2 c^2)."""
    first = a[0] * alpha[0]
    d0 = beta[0] * beta[0] + first * first * (beta[1] * beta[1])
    d = d0 + 4 * p * p * m * (1 - m)
    return sqrt(d0), sqrt(d)


# --- SiLU's average, which is also what a gain before softplus takes ---------------------------------------------------


def silu_product(p, c, zy4, beta, root):
    """E[w Phi w' Phi']/(F F') of a pair of nodes, zy4 = 1 - c^2 and root = sqrt(1 - p^2 c^2)."""
    prob = 1 / 4 + p * c * asin_over(root) / (2 * pi)
    squares = beta[0] * beta[0] + beta[1] * beta[1]
    return c * prob + divide(p * (zy4 + c * c * squares), 2 * pi * root)
