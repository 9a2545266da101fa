"""SiLU (swish), as a mixture of GELUs."""

from math import pi
from math import sqrt as float_sqrt

import jax
import jax.numpy as jnp
import scipy

from ntk_ln._numerics import clipped, divide, sqrt
from ntk_ln.activations import _logistic as logistic
from ntk_ln.activations._base import AbstractActivation, Dual


class Silu(AbstractActivation):
    r"""phi(a) = a/(1 + exp(-a)).

    With the nodes and weights of `_logistic.py`, phi(x) = sum_j w_j x Phi(x/s_j): GELUs of other widths, and every average is
    the sum over pairs of nodes of GELU's (gelu.py), with the sides (a_j, b_j) = (F/s_j, e)/hypot(F/s_j, e). Far out SiLU is ReLU.

    References:
        Elfwing, Uchibe & Doya (2018), "Sigmoid-weighted linear units"; Andrews & Mallows (1974), "Scale mixtures of normal
        distributions", sec. 3; Tsuchida et al. (2021), "Avoiding kernel fixed points", for GELU.

    >>> round(Silu().second_moment(), 6)
    0.355776
    """

    @property
    def name(self) -> str:
        return "silu"

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
        return jax.nn.silu(x)

    def second_moment(self) -> float:
        return logistic.gaussian_mean(lambda w: (w * scipy.special.expit(w)) ** 2)

    def moments(self, side):
        a, _, alpha, beta = logistic.points(side, 1.0)
        root = _root(a, alpha, beta)
        return side.scale * root, logistic.weighted(alpha) * a / (float_sqrt(2 * pi) * root)

    def dual(self, z, y, side, pair):
        a, b, alpha, beta = logistic.points(side, 1.0)
        root = _root(a, alpha, beta)
        (r1, r2), a12 = pair(root), pair(a)
        swap = z > y
        m = jnp.where(swap, y, z)
        sign, c, zy4 = jnp.where(swap, -1.0, 1.0), 1 - 2 * m, 4 * m * (1 - m)
        twice = jnp.where(swap, 2.0, 0.0)

        def term(alpha, beta):
            p = logistic.product(a12, alpha)
            root0, root = logistic.one_minus_squares(p, m, a12, alpha, beta)
            squares = beta[0] * beta[0] + beta[1] * beta[1]
            asin = p * c * logistic.asin_over(root)
            drop, _, _ = logistic.drop_over(p, m, root0, root)
            # E[phi phi] at 1 less that at c >= 0; for c < 0, 1 + ratio has twice the even half of SiLU besides (gelu.py).
            over = divide(1.0, root)
            curve = p * p * squares * divide(1.0, root + root0) * divide(1.0, root0) + squares - 1
            fall = p * drop + m * (pi + 2 * asin) + p * zy4 * curve * over
            even = c * asin + p * (zy4 + c * c * squares) * over
            bb = beta[0] * beta[1] * over
            return fall + twice * even, asin + p * c * over * (squares + bb * bb)

        total, smooth = logistic.node_sum(term, (alpha, beta), pair, m)
        line = (1 / r1 - 1 / r2) ** 2 / 8  # SiLU is half a line and an even function
        apart = logistic.sides_apart(_value, _ratio, -20.0, pair, (a, b, root)) + line
        small = (apart + clipped(total) / (2 * pi) / (r1 * r2)) / 2
        z_new, y_new = jnp.where(swap, 1 - small, small), jnp.where(swap, small, 1 - small)
        return Dual(z_new, y_new, (1 / 4 + sign * smooth / (2 * pi)) / (r1 * r2))

    def gain_dual(self, z, y, side, pair):
        a, _, alpha, beta = logistic.points(side, 1.0)
        (r1, r2), a12 = pair(_root(a, alpha, beta)), pair(a)
        c, zy4 = y - z, 4 * z * y
        c2 = c * c

        def term(alpha, beta):
            p = logistic.product(a12, alpha)
            _, root = logistic.one_minus_squares(p, z, a12, alpha, beta)
            sq1, sq2 = beta[0] * beta[0], beta[1] * beta[1]
            both, d, rest1, rest2 = sq1 * sq2, root * root, zy4 + c2 * sq1, zy4 + c2 * sq2
            first = sq1 * (rest1 + c2 * sq1) + sq2 * (rest2 + c2 * sq2) + divide(c2 * both * (sq1 + sq2), d)
            second = both * (rest1 * rest2 + 2 * c2 * both)
            density = divide(first, root) + divide(second, d * d * root)
            return (logistic.silu_product(p, c, zy4, beta, root) + p * density / (2 * pi),)

        return logistic.node_sum(term, (alpha, beta), pair, z)[0] / (r1 * r2)


def _root(a, alpha, beta):
    """sqrt(E[phi^2])/F."""
    return sqrt(_product(logistic.both, a, alpha, beta))


def _product(pair, a, alpha, beta):
    """E[phi phi']/(F F') at c = 1."""
    a12 = pair(a)

    def term(alpha, beta):
        p = logistic.product(a12, alpha)
        root0, _ = logistic.one_minus_squares(p, 0.0, a12, alpha, beta)
        return (logistic.silu_product(p, 1.0, 0.0, beta, root0),)

    return logistic.node_sum(term, (alpha, beta), pair, a12[0] + a12[1])[0]


def _value(w, a, b, root):
    return w * jnp.tanh(logistic.over(a, b) * (w / 2)) / (2 * root)


def _ratio(pair, a, b, root):
    alpha, beta = logistic.rows(a, b, 1.0)
    r1, r2 = pair(root)
    return _product(pair, a, alpha, beta) / (r1 * r2) + (1 / r1 - 1 / r2) ** 2 / 8


NAMES = {"silu": Silu}
