"""GELU, in closed form."""

from math import asin, pi
from math import sqrt as float_sqrt

import jax
import jax.numpy as jnp

from ntk_ln._numerics import clipped, divide, sqrt
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

    def dual(self, z, y, side, pair):
        a, b = side.point(1.0)
        (a1, a2), (b1, b2), (r1, r2) = pair(a), pair(b), pair(_root(a, b))
        w1, w2 = pair(b * jnp.sqrt(1 + a * a))  # sqrt(1 - a^4)
        asin1, asin2 = pair(_asin_square(a, b))
        p, beta, bb = a1 * a2, b1 * b1 + b2 * b2, b1 * b2
        swap = z > y
        m = jnp.where(swap, y, z)
        c, zy = 1 - 2 * m, m * (1 - m)
        d0 = arcsine.one_minus_p2(a1, b1, a2, b2)
        d = d0 + 4 * p * p * zy
        root0, root = sqrt(d0), sqrt(d)
        gap = arcsine.square_gap(a1, b1, a2, b2)

        # asin(a^2) + asin(a'^2) - 2 asin(p), of the order of (a - a')^2, and asin(p) - asin(p c), of the order of m.
        sin1, cos1 = divide(gap * a1, a1 * root0 + a2 * w1), w1 * root0 + a1 * a1 * p
        sin2, cos2 = divide(-gap * a2, a2 * root0 + a1 * w2), w2 * root0 + a2 * a2 * p
        bend = jnp.arctan2(sin1 * cos2 + cos1 * sin2, cos1 * cos2 - sin1 * sin2)
        drop = jnp.arctan2(p * (divide(4 * p * p * zy, root + root0) + 2 * m * root0), root0 * root + p * p * c)
        odd = ((asin1 + asin2 - bend) / 2 - drop) / (2 * pi)  # asin(p c)/(2 pi)

        # For c >= 0: half E[(phi - phi')^2] = V (the sides' difference at c = 1) + E[phi phi'] at 1 less that at c.
        # For c < 0 GELU is half a line (odd) and half an even function: 1 + ratio takes the same terms at |c|.
        curve = divide(p * p * beta, root0 * root * (root + root0)) + divide(beta - 1, root)
        apart = (bend + _sides_apart(a1, b1, w1, a2, b2, w2, gap, p, beta, root0)) / (4 * pi)
        fall = drop / (2 * pi) + 2 * m * (1 / 4 + odd) + p * 4 * zy * curve / (2 * pi)
        even = c * odd + divide(p * (4 * zy + c * c * beta), 2 * pi * root)
        total = clipped(apart + fall - (r1 - r2) ** 2 / 2)
        small = jnp.where(swap, total + 2 * even, total) / (2 * r1 * r2)
        z_new, y_new = jnp.where(swap, 1 - small, small), jnp.where(swap, small, 1 - small)

        sign = jnp.where(swap, -1.0, 1.0)
        smooth = odd + divide(p * c * beta, 2 * pi * root) + divide(p * c * bb * bb, 2 * pi * root * d)
        return Dual(z_new, y_new, (1 / 4 + sign * smooth) / (r1 * r2))

    def gain_dual(self, z, y, side, pair):
        a, b = side.point(1.0)
        (a1, a2), (b1, b2), (r1, r2) = pair(a), pair(b), pair(_root(a, b))
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
        return divide(value, p) / (r1 * r2)


def _asin_square(a, b):
    return jnp.arctan2(a * a, b * jnp.sqrt(1 + a * a))


def _root(a, b):
    """sqrt(E[phi^2]) / F."""
    return sqrt(1 / 4 + _asin_square(a, b) / (2 * pi) + a * a * b / (pi * jnp.sqrt(1 + a * a)))


def _sides_apart(a1, b1, w1, a2, b2, w2, gap, p, beta, root0):
    """H(a, a) + H(a', a') - 2 H(a, a') for H(a, a') = p beta/sqrt(1 - p^2), to rounding relative to |a - a'|.

    With the arcsines, 4 pi times half E[w^2 (Phi(w F/e) - Phi(w F'/e'))^2], w ~ N(0, 1).
    """

    def slope(a, b, w, a_other):
        # (H(a, a) - H(a, a')) / (a (a - a'))
        bend = a_other * beta * a * a * (a1 + a2)
        return divide(2 * b * b - a_other * (a1 + a2), w) + divide(bend, w * root0 * (w + root0))

    near = divide(gap, a1 + a2) * (a1 * slope(a1, b1, w1, a2) - a2 * slope(a2, b2, w2, a1))
    far = 2 * (a1 * a1 * b1 / jnp.sqrt(1 + a1 * a1) + a2 * a2 * b2 / jnp.sqrt(1 + a2 * a2) - divide(p * beta, root0))
    return jnp.where(jnp.abs(gap) < 0.5 * jnp.minimum(b1, b2) ** 2, near, far)


NAMES = {"gelu": Gelu}
