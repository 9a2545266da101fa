"""tanh, as a mixture of error functions."""

from math import pi

import jax.numpy as jnp
import numpy as np

from ntk_ln._numerics import divide, sqrt, with_value
from ntk_ln.activations import _arcsine as arcsine
from ntk_ln.activations import _logistic as logistic
from ntk_ln.activations._base import AbstractActivation, Dual


class Tanh(AbstractActivation):
    r"""phi(a) = tanh(a).

    With the nodes and weights of `_logistic.py`, tanh(x) = sum_j w_j erf(sqrt2 x/s_j), so that
        E[phi phi] = (2/pi) sum_jk w_j w_k asin(p c),   E[phi' phi'] F F' = (2/pi) sum_jk w_j w_k p / sqrt(1 - p^2 c^2),
    p = a_j a'_k, (a_j, b_j) = (2 F/s_j, e)/hypot(2 F/s_j, e). Far out tanh is the sign function.

    References:
        Williams (1996), "Computing with infinite networks", eq. 11; Andrews & Mallows (1974), "Scale mixtures of normal
        distributions", sec. 3.

    >>> round(Tanh().second_moment(), 6)
    0.394294
    """

    @property
    def name(self) -> str:
        return "tanh"

    @property
    def degree(self) -> float:
        return 0

    @property
    def derivative_growth(self) -> float:
        return -0.5

    @property
    def error(self) -> float:
        return logistic.GUARANTEED

    def __call__(self, x):
        return jnp.tanh(x)

    def second_moment(self) -> float:
        return logistic.gaussian_mean(lambda w: np.tanh(w) ** 2)

    def moments(self, side):
        a, b, alpha, _ = logistic.points(side, 2.0)
        return a * _root(a, b, alpha), None

    def dual(self, z, y, side, pair):
        a, b, alpha, beta = logistic.points(side, 2.0)
        root = _root(a, b, alpha)
        (r1, r2), a12 = pair(root), pair(a)
        swap = z > y  # tanh is odd: y follows from z with the signs exchanged
        m = jnp.where(swap, y, z)

        def term(alpha, beta):
            p = logistic.product(a12, alpha)
            root0, root = logistic.one_minus_squares(p, m, a12, alpha, beta)
            over_root = with_value(
                arcsine.one_over_root(a12[0] * alpha[0], beta[0], a12[1] * alpha[1], beta[1], m), divide(1.0, root)
            )
            scale = alpha[0] * alpha[1]
            return scale * logistic.drop_over(p, m, root0, root)[0], scale * over_root

        drop, dot = logistic.node_sum(term, (alpha, beta), pair, m)
        apart = logistic.sides_apart(_value, _ratio, -55.0, pair, (a, b, root))
        small = (apart + (2 / pi) * drop / (r1 * r2)) / 2
        z_new, y_new = jnp.where(swap, 1 - small, small), jnp.where(swap, small, 1 - small)
        return Dual(z_new, y_new, (2 / pi) * dot / (r1 * r2))

    def gain_dual(self, z, y, side, pair):
        a, b, alpha, beta = logistic.points(side, 2.0)
        (r1, r2), a12 = pair(_root(a, b, alpha)), pair(a)

        def term(alpha, beta):
            _, root = logistic.one_minus_squares(logistic.product(a12, alpha), z, a12, alpha, beta)
            bb = beta[0] * beta[1]
            return (divide(alpha[0] * alpha[1] * (bb * bb), root * root * root),)

        (total,) = logistic.node_sum(term, (alpha, beta), pair, z)
        return (2 / pi) * (y - z) * total / (r1 * r2)


def _root(a, b, alpha):
    """sqrt(E[phi^2])/a."""
    return sqrt((2 / pi) * _product(logistic.both, a, b, alpha))


def _product(pair, a, b, alpha):
    """(pi/2) E[phi phi']/(a a') at c = 1."""
    a12, b12 = pair(a), pair(b)

    def term(alpha, over):
        first = a12[0] * alpha[0]
        # sqrt(1 - p^2). Of one side it is proportional to b: so is, far out, what E[phi^2] lacks to that of the sign function.
        if pair is logistic.both:
            root0 = b * jnp.sqrt(over[0] ** 2 + (first * over[1]) ** 2)
        else:
            root0 = sqrt((b12[0] * over[0]) ** 2 + (first * b12[1] * over[1]) ** 2)
        return (alpha[0] * alpha[1] * logistic.asin_over(root0),)

    over = alpha * jnp.asarray(np.array(logistic.SCALES)[:, None] / 2, a.dtype)  # beta_j/b
    return logistic.node_sum(term, (alpha, over), pair, a12[0] + a12[1])[0]


def _value(w, a, b, root):
    return divide(jnp.tanh(logistic.over(a, b) * w), a, w) / root


def _ratio(pair, a, b, root):
    alpha, _ = logistic.rows(a, b, 2.0)
    r1, r2 = pair(root)
    return (2 / pi) * _product(pair, a, b, alpha) / (r1 * r2)


NAMES = {"tanh": Tanh}
