"""GELU, in closed form."""

from math import asin, pi
from math import sqrt as float_sqrt

import jax
import jax.numpy as jnp

from ntk_ln._numerics import divide, sqrt
from ntk_ln.activations import _arcsine as arcsine
from ntk_ln.activations._base import AbstractActivation, Dual


class Gelu(AbstractActivation):
    r"""phi(a) = a Phi(a), Phi the standard normal distribution function (not its tanh approximation).

    With c the correlation, (a, b) = (F, e)/hypot(F, e), p = a a', beta = b^2 + b'^2, d = 1 - p^2 c^2 and
    P = 1/4 + asin(p c)/(2 pi), by Stein's lemma:
        E[phi phi]/(F F') = c P + (p (1 - c^2) + p c^2 beta) / (2 pi sqrt d),
        E[phi' phi'] = P + p c beta/(2 pi sqrt d) + p c b^2 b'^2/(2 pi d^(3/2)).
    Far out GELU is ReLU: degree 1.

    References:
        Hendrycks & Gimpel (2016); Tsuchida, Pearce, van der Heide, Roosta, Gallagher (2021), "Avoiding kernel fixed points",
        where the kernel is derived; the form here, stable near equal and antipodal inputs, is docs/numerics.md.

    >>> round(Gelu().second_moment(), 6)
    0.425221
    """

    @property
    def name(self) -> str:
        return "gelu"

    @property
    def degree(self) -> float:
        return 1

    @property
    def derivative_growth(self) -> float:
        return 0

    def __call__(self, x):
        return jax.nn.gelu(x, approximate=False)

    def second_moment(self) -> float:
        return 1 / 4 + asin(1 / 2) / (2 * pi) + 1 / (2 * pi * float_sqrt(3))

    def moments(self, side):
        a, b = side.point(1.0)
        root = _root(a, b)
        return side.scale * root, a / (float_sqrt(2 * pi) * root)

    def dual(self, z, y, one, two):
        a1, b1 = one.point(1.0)
        a2, b2 = two.point(1.0)
        p, beta, bb = a1 * a2, b1 * b1 + b2 * b2, b1 * b2
        d0 = arcsine.one_minus_p2(a1, b1, a2, b2)
        d = d0 + 4 * p * p * z * y
        root0, root = sqrt(d0), sqrt(d)
        r1, r2 = _root(a1, b1), _root(a2, b2)

        # For c >= 0: half E[(phi - phi')^2] = V (the sides' difference at c = 1) + E[phi phi'] at 1 less that at c.
        # For c < 0 GELU is half a line (odd) and half an even function: 1 + ratio takes the same terms at |c|.
        swap = z > y
        m = jnp.where(swap, y, z)
        c, zy = 1 - 2 * m, m * (1 - m)
        drop = arcsine.asin_drop_over_p(p, m, d0, d) * p
        p_mid = 1 / 4 + jnp.arctan2(p * c, root) / (2 * pi)
        curve = divide(p * p * beta, root0 * root * (root + root0)) + divide(beta - 1, root)
        fall = drop / (2 * pi) + 2 * m * p_mid + p * 4 * zy * curve / (2 * pi)
        even = c * (p_mid - 1 / 4) + divide(p * (4 * zy + c * c * beta), 2 * pi * root)
        total = jnp.maximum(_sides_apart(a1, b1, a2, b2, p, d0) + fall - (r1 - r2) ** 2 / 2, 0)
        small = jnp.where(swap, total + 2 * even, total) / (2 * r1 * r2)
        z_new, y_new = jnp.where(swap, 1 - small, small), jnp.where(swap, small, 1 - small)

        cos = p * (y - z)
        prob = 1 / 4 + jnp.arctan2(cos, root) / (2 * pi)
        dot = prob + divide(cos * beta, 2 * pi * root) + divide(cos * bb * bb, 2 * pi * root * d)
        return Dual(z_new, y_new, dot / (r1 * r2))

    def gain_dual(self, z, y, one, two):
        a1, b1 = one.point(1.0)
        a2, b2 = two.point(1.0)
        p, beta = a1 * a2, b1 * b1 + b2 * b2
        d = arcsine.one_minus_p2(a1, b1, a2, b2) + 4 * p * p * z * y
        root, cos = sqrt(d), p * (y - z)
        c2, sq1, sq2 = cos * cos, b1 * b1, b2 * b2
        prob = 1 / 4 + jnp.arctan2(cos, root) / (2 * pi)
        # Both sides carry a factor a a' in the formulas of 1.8 form; it is divided out at the end.
        value = cos * prob + divide(p * p * 4 * z * y + c2 * beta, 2 * pi * root)
        first = (a1 * a1 * sq1 * (a2 * a2 - c2) + c2 * sq1 * sq1) + (a2 * a2 * sq2 * (a1 * a1 - c2) + c2 * sq2 * sq2)
        first = first + divide(c2 * sq1 * sq2 * (sq1 + sq2), d)
        second = sq1 * sq2 * (a1 * a1 - c2) * (a2 * a2 - c2) + 2 * c2 * sq1 * sq1 * sq2 * sq2
        value = value + divide(first, 2 * pi * root) + divide(second, 2 * pi * d * d * root)
        return divide(value, p) / (_root(a1, b1) * _root(a2, b2))


def _root(a, b):
    """sqrt(E[phi^2]) / F."""
    w = jnp.sqrt(1 + a * a)
    return sqrt(1 / 4 + jnp.arctan2(a * a, b * w) / (2 * pi) + a * a * b / (pi * w))


def _sides_apart(a1, b1, a2, b2, p, d0):
    """Half E[w^2 (Phi(w F/e) - Phi(w F'/e'))^2], w ~ N(0, 1): 0 for equal sides, to rounding relative to |a - a'|."""
    asins = arcsine.asin_gap_over_p(a1, b1, a2, b2, d0) + arcsine.asin_gap_over_p(a2, b2, a1, b1, d0)
    w1, w2 = jnp.sqrt(1 + a1 * a1), jnp.sqrt(1 + a2 * a2)
    root0, root1, root2 = sqrt(d0), b1 * w1, b2 * w2
    beta, gap = b1 * b1 + b2 * b2, arcsine.square_gap(a1, b1, a2, b2)

    # What is left is H(a, a) + H(a', a') - 2 H(a, a') for H(a, a') = p beta / sqrt(1 - p^2).
    def slope(a, b, root, a_other):
        # (H(a, a) - H(a, a')) / (a (a - a'))
        bend = a_other * beta * a * a * (a1 + a2)
        return divide(2 * b * b - a_other * (a1 + a2), root) + divide(bend, root * root0 * (root + root0))

    near = divide(gap, a1 + a2) * (a1 * slope(a1, b1, root1, a2) - a2 * slope(a2, b2, root2, a1))
    far = 2 * (a1 * a1 * b1 / w1 + a2 * a2 * b2 / w2 - divide(p * beta, root0))
    close = jnp.abs(gap) < 0.5 * jnp.minimum(b1, b2) ** 2
    return (asins * p + jnp.where(close, near, far)) / (4 * pi)


NAMES = {"gelu": Gelu}
