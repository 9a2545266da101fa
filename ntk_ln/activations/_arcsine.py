"""Differences of arcsines of products, shared by erf and GELU; each exact to rounding relative to its own size.

Sides are points (a, b) of the unit circle, p = a a', and a pair has m = (1 - c)/2 with c = |cos| of its units. Then
1 - p^2 = b^2 + a^2 b'^2 and 1 - p^2 c^2 = (1 - p^2) + 4 p^2 m (1 - m) are sums of non-negative terms.
"""

import jax.numpy as jnp

from ntk_ln._numerics import atan2_ratio, divide, inverse_size, sqrt


def one_minus_p2(a1, b1, a2, b2):
    """1 - a1^2 a2^2."""
    del a2
    return b1 * b1 + a1 * a1 * (b2 * b2)


def one_over_root(a1, b1, a2, b2, m):
    """1/sqrt(1 - p^2 c^2), far out too, where the squares of b underflow; 0 where it is infinite."""
    inverse = inverse_size(b1, b2, m)
    over1, over2, p = b1 * inverse, a1 * (b2 * inverse), a1 * a2
    return divide(inverse, sqrt(over1 * over1 + over2 * over2 + 4 * p * p * ((m * inverse) * inverse) * (1 - m)))


def asin_square_ratio(a, b):
    """asin(a^2) / a^2."""
    return atan2_ratio(a * a, b * jnp.sqrt(1 + a * a))


def square_gap(a1, b1, a2, b2):
    """a1^2 - a2^2, from whichever of a and b is small."""
    return jnp.where(a1 + a2 < b1 + b2, (a1 - a2) * (a1 + a2), (b2 - b1) * (b2 + b1))


def asin_gap_over_p(a1, b1, a2, b2, d0):
    """(asin(a1^2) - asin(a1 a2)) / (a1 a2), with d0 = 1 - (a1 a2)^2."""
    w, root = b1 * jnp.sqrt(1 + a1 * a1), sqrt(d0)
    over_p = divide(square_gap(a1, b1, a2, b2), a2 * (a1 * root + a2 * w))
    return over_p * atan2_ratio(over_p * (a1 * a2), w * root + a1 * a1 * (a1 * a2))


def asin_drop_over_p(p, m, d0, d):
    """(asin(p) - asin(p c)) / p for c = 1 - 2 m >= 0, d0 = 1 - p^2, d = 1 - p^2 c^2."""
    root0, root = sqrt(d0), sqrt(d)
    w = divide(4 * p * p * m * (1 - m), root + root0) + 2 * m * root0
    return w * atan2_ratio(p * w, root0 * root + p * p * (1 - 2 * m))
