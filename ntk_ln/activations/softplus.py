"""Softplus, as a mixture of ReLUs smoothed by normal noise."""

from math import pi
from math import sqrt as float_sqrt

import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._numerics import clipped, hypot, sqrt
from ntk_ln.activations import _logistic as logistic
from ntk_ln.activations._base import AbstractActivation, Dual


class Softplus(AbstractActivation):
    r"""phi(a) = log(1 + exp(a)).

    phi(x) = E[max(x + logistic noise, 0)]. With the nodes and weights of `_logistic.py` that noise is a mixture of N(0, s_j^2):
        E[phi phi] = sum_jk w_j w_k rho_j rho'_k J_1(acos(p c))/(2 pi),
        E[phi' phi'] = sum_jk w_j w_k (1/4 + asin(p c)/(2 pi)),
    rho_j = hypot(F, s_j e), p = (F/rho_j)(F'/rho'_k), J_1 the arc-cosine kernel of degree 1. Far out softplus is ReLU; near the
    origin it is the constant log 2.

    References:
        Dugas et al. (2001), "Incorporating second-order functional knowledge"; Cho & Saul (2009), "Kernel methods for deep
        learning", eq. 6; Andrews & Mallows (1974), "Scale mixtures of normal distributions", sec. 3.

    >>> round(Softplus().second_moment(), 6)
    0.921246
    """

    @property
    def name(self) -> str:
        return "softplus"

    @property
    def degree(self) -> float:
        return 1

    @property
    def derivative_growth(self) -> float:
        return 0

    @property
    def error(self) -> float:
        return logistic.GUARANTEED

    def __call__(self, x):
        return jax.nn.softplus(x)

    def second_moment(self) -> float:
        return logistic.gaussian_mean(lambda w: np.logaddexp(0, w) ** 2)

    def moments(self, side):
        a, _, alpha, beta = logistic.points(side, 1.0)
        root = _root(a, alpha, beta)
        mean = logistic.weighted(1 / alpha) / (float_sqrt(2 * pi) * root)
        return hypot(side.scale, side.unit) * root, jnp.minimum(mean, 1)

    def dual(self, z, y, side, pair):
        a, b, alpha, beta = logistic.points(side, 1.0)
        root = _root(a, alpha, beta)
        (s1, s2), a12 = pair(a / root), pair(a)  # F/F_new
        swap = z > y
        m = jnp.where(swap, y, z)
        c = 1 - 2 * m

        def term(alpha, beta):
            p = logistic.product(a12, alpha)
            root0, root = logistic.one_minus_squares(p, m, a12, alpha, beta)
            asin = p * c * logistic.asin_over(root)
            drop, sine, half = logistic.drop_over(p, m, root0, root)
            # J_1(t) - J_1(t + s) = (pi - t - s)(cos t - cos(t + s)) + (s - sin s) cos t + (1 - cos s) sin t, over p.
            return (pi / 2 + asin) * 2 * m + p * clipped(drop - sine) + 2 * p * half * root0, asin

        total, asin = logistic.node_sum(term, (alpha, beta), pair, m)
        # Softplus is half a line and an even function: for c < 0 the line falls by another |c|/2.
        total = total / (2 * pi) + jnp.where(swap, c / 2, 0)
        line = (s1 - s2) ** 2 / 8
        apart = logistic.sides_apart(_value, _ratio, -30.0, pair, (a, b, root)) + line
        z_new = (apart + total * s1 * s2) / 2
        return Dual(z_new, 1 - z_new, (1 / 4 + jnp.where(swap, -1.0, 1.0) * asin / (2 * pi)) * s1 * s2)

    def gain_dual(self, z, y, side, pair):
        a, _, alpha, beta = logistic.points(side, 1.0)
        (s1, s2), a12 = pair(a / _root(a, alpha, beta)), pair(a)
        c, zy4 = y - z, 4 * z * y

        def term(alpha, beta):
            p = logistic.product(a12, alpha)
            _, root = logistic.one_minus_squares(p, z, a12, alpha, beta)
            return (logistic.silu_product(p, c, zy4, beta, root),)

        return logistic.node_sum(term, (alpha, beta), pair, z)[0] * s1 * s2


def _root(a, alpha, beta):
    """sqrt(E[phi^2])/hypot(F, e)."""
    return sqrt(_product(logistic.both, a, alpha, beta))


def _product(pair, a, alpha, beta):
    """E[phi phi']/(hypot(F, e) hypot(F', e')) at c = 1."""
    a12 = pair(a)

    def term(alpha, beta):
        p = logistic.product(a12, alpha)
        root0, _ = logistic.one_minus_squares(p, 0.0, a12, alpha, beta)
        return ((root0 + p * (pi / 2 + p * logistic.asin_over(root0))) / (alpha[0] * alpha[1]),)

    return logistic.node_sum(term, (alpha, beta), pair, a12[0] + a12[1])[0] / (2 * pi)


def _value(w, a, b, root):
    x = a * w
    return (x / 2 + b * jnp.log1p(jnp.exp(-logistic.over(x, b)))) / root


def _ratio(pair, a, b, root):
    alpha, beta = logistic.rows(a, b, 1.0)
    (r1, r2), (a1, a2) = pair(root), pair(a)
    return _product(pair, a, alpha, beta) / (r1 * r2) + (a1 / r1 - a2 / r2) ** 2 / 8


NAMES = {"softplus": Softplus}
