"""erf, in closed form."""

from math import asin, pi

import jax
import jax.numpy as jnp

from ntk_ln._numerics import clipped, divide, sqrt, with_value
from ntk_ln.activations import _arcsine as arcsine
from ntk_ln.activations._base import AbstractActivation, Dual


class Erf(AbstractActivation):
    r"""phi(a) = erf(a).

        E[phi phi] = (2/pi) asin(2 s / sqrt((1 + 2q)(1 + 2q'))),   E[phi' phi'] = (4/pi) / sqrt((1 + 2q)(1 + 2q') - 4 s^2).

    Far out erf is the sign function: degree 0, and its derivative's jump makes E[phi'^2] fall only as 1/F.

    References:
        Williams (1996), "Computing with infinite networks", eq. 11.

    >>> round(Erf().second_moment(), 6)
    0.464559
    """

    @property
    def name(self) -> str:
        return "erf"

    @property
    def degree(self) -> float:
        return 0

    @property
    def derivative_growth(self) -> float:
        return -0.5

    def __call__(self, x):
        return jax.scipy.special.erf(x)

    def second_moment(self) -> float:
        return 2 / pi * asin(2 / 3)

    def moments(self, side):
        a, b = side.point(2**0.5)
        return a * _root(a, b), None

    def dual(self, z, y, side, pair):
        a, b = side.point(2**0.5)
        (a1, a2), (b1, b2), (r1, r2) = pair(a), pair(b), pair(_root(a, b))
        p, d0 = a1 * a2, arcsine.one_minus_p2(a1, b1, a2, b2)
        swap = z > y  # erf is odd: y follows from z with the signs exchanged
        m = jnp.where(swap, y, z)
        d = d0 + 4 * p * p * m * (1 - m)
        scale = (pi / 2) * r1 * r2  # sqrt(asin(a1^2) asin(a2^2)) / p
        # 1 - ratio = [sqrt(asin asin') - asin p] + [asin p - asin(p c)], over sqrt(asin asin').
        total = _first(a1, b1, r1, a2, b2, r2, p, d0, scale) + arcsine.asin_drop_over_p(p, m, d0, d)
        small = clipped(total) / (2 * scale)
        z_new, y_new = jnp.where(swap, 1 - small, small), jnp.where(swap, small, 1 - small)
        over_root = with_value(arcsine.one_over_root(a1, b1, a2, b2, m), divide(1.0, sqrt(d)))
        return Dual(z_new, y_new, (2 / pi) * over_root / (r1 * r2))

    def gain_dual(self, z, y, side, pair):
        a, b = side.point(2**0.5)
        (a1, a2), (b1, b2), (r1, r2) = pair(a), pair(b), pair(_root(a, b))
        p = a1 * a2
        d = arcsine.one_minus_p2(a1, b1, a2, b2) + 4 * p * p * z * y
        bb = b1 * b2
        return divide((2 / pi) * (y - z) * bb * bb, d * sqrt(d) * (r1 * r2))


def _root(a, b):
    """sqrt(E[phi^2]) / a."""
    return sqrt((2 / pi) * arcsine.asin_square_ratio(a, b))


def _first(a1, b1, r1, a2, b2, r2, p, d0, scale):
    """(sqrt(asin(a1^2) asin(a2^2)) - asin p) / p, to rounding relative to |a1 - a2| where the sides are close."""
    gap = arcsine.square_gap(a1, b1, a2, b2)
    close = jnp.abs(gap) < 0.5 * jnp.minimum(a1, a2) ** 2
    # Half the sum of two first differences that nearly cancel, less the gap between the arithmetic and geometric means.
    steps = arcsine.asin_gap_over_p(a1, b1, a2, b2, d0) + arcsine.asin_gap_over_p(a2, b2, a1, b1, d0)
    ratio = sqrt(divide(a1, a2, 1.0))
    means = (pi / 2) * (r1 * ratio - divide(r2, ratio)) ** 2
    apart = scale - jnp.where(p == 0, 1, divide(jnp.arctan2(p, sqrt(d0)), p))
    return clipped(jnp.where(close, (steps - means) / 2, apart))


NAMES = {"erf": Erf}
