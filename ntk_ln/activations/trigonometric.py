"""sin and cos, in closed form."""

from functools import cache
from math import exp

import jax
import jax.numpy as jnp
import scipy

from ntk_ln._numerics import clipped, divide, sqrt
from ntk_ln.activations._base import AbstractActivation, Dual


class _Trigonometric(AbstractActivation):
    """What sin and cos share: bounded, without a limit far out, each the other's derivative."""

    @property
    def degree(self) -> float:
        return 0

    @property
    def derivative_growth(self) -> float:
        return 0

    @property
    def far_limit(self) -> bool:
        return False


class Sin(_Trigonometric):
    r"""phi(a) = sin(a).

    With z = (1 - c)/2, y = (1 + c)/2 and the standard deviations s, s' of a and b,
        E[phi phi] = 1/2 exp(-(s - s')^2/2) (exp(-2 s s' z) - exp(-2 s s' y)),
        E[phi' phi'] = 1/2 exp(-(s - s')^2/2) (exp(-2 s s' z) + exp(-2 s s' y)).
    There is no limit far out: units of different inputs lose all correlation.

    References:
        Rahimi & Recht (2007), "Random features for large-scale kernel machines"; Pearce, Tsuchida, Zaki, Brintrup & Neely
        (2020), "Expressive priors in Bayesian neural networks: kernel combinations and periodic functions".

    >>> round(Sin().second_moment(), 6)
    0.432332
    """

    @property
    def name(self) -> str:
        return "sin"

    def __call__(self, x):
        return jnp.sin(x)

    def second_moment(self) -> float:
        return (1 - exp(-2)) / 2

    def _sizes(self, side):
        """s = F/e, a and r with E[phi^2] = a^2 r^2."""
        s, (a, b) = _deviation(side), side.point(1.0)
        near = _cap(s, 1)
        # E[sin^2] = (1 - exp(-2 s^2))/2, over a^2 = s^2 b^2 where s is small.
        small = sqrt(_expm1_ratio(2 * near * near)) / jnp.maximum(b, 0.5)
        return s, a, jnp.where(s < 1, small, sqrt(_rise(s, s) / 2) / jnp.where(s < 1, 1, a))

    def moments(self, side):
        _, a, root = self._sizes(side)
        return a * root, None

    def dual(self, z, y, side, pair):
        s, a, root = self._sizes(side)
        (s1, s2), (r1, r2), a12, b12 = pair(s), pair(root), pair(a), pair(side.point(1.0)[1])
        swap = z > y  # sin is odd: y follows from z with the signs exchanged
        m = jnp.where(swap, y, z)
        far, size = _far(s1, s2), 2 * r1 * r2

        def rise(z):  # (1 - exp(-2 s s' z))/(a a')
            linear = _exponent(s1, s2, 1.0) < jnp.finfo(a.dtype).tiny ** 0.25
            over = jnp.where(linear | (far == 0), 1, a12[0] * a12[1])
            first = divide(2 * z, jnp.where(linear, b12[0] * b12[1], 1))
            return jnp.where(linear, first, divide(-jnp.expm1(-_exponent(s1, s2, z)), over))

        # 1 - ratio = [1 - ratio at c = 1] + [E[phi phi] at 1 less that at c], both non-negative.
        fall = far * rise(m) * (1 + jnp.exp(-_exponent(s1, s2, 1 - m))) / size
        small = (_sin_apart(s1, s2, far * rise(1.0) / size) + fall) / 2
        even = far / 2 * (jnp.exp(-_exponent(s1, s2, z)) + jnp.exp(-_exponent(s1, s2, y)))
        dot = _times(even, pair(_slope(s, a * root)))
        return Dual(jnp.where(swap, 1 - small, small), jnp.where(swap, small, 1 - small), dot)

    def gain_dual(self, z, y, side, pair):
        s, a, root = self._sizes(side)
        s1, s2 = pair(s)
        tz, ty = _exponent(s1, s2, z), _exponent(s1, s2, y)
        one, two, far = jnp.exp(-tz), jnp.exp(-ty), _far(s1, s2)
        value = (y - z) * (1 - _gap(s1, s2) ** 2) * (one + two) + 2 * (z * tz * one - y * ty * two)
        return _times(far / 2 * value, pair(_slope(s, a * root)))


class Cos(_Trigonometric):
    r"""phi(a) = cos(a).

    E[phi phi] and E[phi' phi'] are those of sin, exchanged; its mean is exp(-s^2/2).

    References:
        Rahimi & Recht (2007), "Random features for large-scale kernel machines"; Pearce, Tsuchida, Zaki, Brintrup & Neely
        (2020), "Expressive priors in Bayesian neural networks: kernel combinations and periodic functions".

    >>> round(Cos().second_moment(), 6)
    0.567668
    """

    @property
    def name(self) -> str:
        return "cos"

    def __call__(self, x):
        return jnp.cos(x)

    def second_moment(self) -> float:
        return (1 + exp(-2)) / 2

    def _sizes(self, side):
        """s = F/e, a and r with E[phi^2] = a^2 r^2."""
        s = _deviation(side)
        return s, jnp.ones_like(s), jnp.sqrt((1 + jnp.exp(-_exponent(s, s, 1.0))) / 2)

    def moments(self, side):
        s, _, root = self._sizes(side)
        near = _cap(s, FAR)
        return root, jnp.exp(-near * near / 2) / root

    def dual(self, z, y, side, pair):
        s, _, root = self._sizes(side)
        (s1, s2), (r1, r2) = pair(s), pair(root)
        tz, ty, far = _exponent(s1, s2, z), _exponent(s1, s2, y), _far(s1, s2)
        ratio = far * (2 - _rise(s1, s2)) / (2 * r1 * r2)  # at c = 1
        z_new = (_cos_apart(s1, s2, ratio) + far * jnp.expm1(-tz) * jnp.expm1(-ty) / (2 * r1 * r2)) / 2
        return Dual(z_new, 1 - z_new, _times(far / 2 * _odd(tz, ty), pair(s / root)))

    def gain_dual(self, z, y, side, pair):
        s, _, root = self._sizes(side)
        s1, s2 = pair(s)
        tz, ty = _exponent(s1, s2, z), _exponent(s1, s2, y)
        # E[a b cos(a - b)] less that of a + b, the terms of the order of (s - s')^2 taken together.
        value = (y - z) * (1 - _gap(s1, s2) ** 2) * _odd(tz, ty) + 2 * (z * tz * jnp.exp(-tz) + y * ty * jnp.exp(-ty))
        return _times(_far(s1, s2) / 2 * value, pair(s / root))


FAR = 60.0  # exp(-FAR^2/2) underflows


def _cap(x, top):
    """min(x, top), without a derivative where it is top."""
    return jnp.where(x < top, x, top)


def _deviation(side):
    """F/e, finite at e = 0; without a derivative where that would overflow."""
    scale, unit = side.scale, side.unit
    top = jnp.finfo(scale.dtype).max / 8
    value = jax.lax.stop_gradient(_cap(divide(scale, unit, jnp.inf), top))
    usual = value < top**0.5
    return jnp.where(usual, scale / jnp.where(usual, unit, 1), value)


def _exponent(s1, s2, z):
    """2 s s' z, up to where its exponential has long underflowed; the larger deviation first, so that none gets lost."""
    first = s1 >= s2  # not `maximum`, whose derivative at equal deviations is a mean: the second of the product is then wrong
    return _cap(2 * (jnp.where(first, s1, s2) * z) * jnp.where(first, s2, s1), FAR * FAR)


def _gap(s1, s2):
    return jnp.where(s1 < s2, -_cap(s2 - s1, FAR), _cap(s1 - s2, FAR))


def _times(x, q):
    """x q q'; 0 where x is, however large q q'."""
    zero = x == 0
    return (x * jnp.where(zero, 1, q[0])) * jnp.where(zero, 1, q[1])


def _slope(s, size):
    """s/sqrt(E[phi^2]) of sin, 1 at s = 0."""
    near = s < jnp.finfo(s.dtype).tiny ** 0.25
    return jnp.where(near, 1, s / jnp.where(near, 1, size))


def _far(s1, s2):
    return jnp.exp(-(_gap(s1, s2) ** 2) / 2)


def _rise(s1, s2):
    """1 - exp(-2 s s')."""
    return -jnp.expm1(-_exponent(s1, s2, 1.0))


def _expm1_ratio(x):
    """(1 - exp(-x))/x."""
    return divide(-jnp.expm1(-x), x, 1.0)


def _odd(tz, ty):
    """exp(-tz) - exp(-ty)."""
    near = tz < ty
    return jnp.exp(-ty) * jnp.expm1(jnp.where(near, 0, ty - tz)) - jnp.exp(-tz) * jnp.expm1(jnp.where(near, tz - ty, 0))


def _products(s1, s2):
    """sinh(S^2/2) sinh(D^2/2) and sinh(S D/2)^2 for S, D = s + s', s - s', over exp(s^2 + s'^2)/4."""
    total, gap = _cap(s1 + s2, FAR), _gap(s1, s2)
    n1, n2 = _cap(s1, FAR), _cap(s2, FAR)
    half = (n1 + n2) * (n1 - n2) / 2
    near = jnp.abs(half) < 1
    bend = 2 * jnp.exp(-(n1 * n1 + n2 * n2) / 2) * jnp.sinh(jnp.where(near, half, 0))
    bend = jnp.where(near, bend, jnp.exp(-n2 * n2) - jnp.exp(-n1 * n1))
    return jnp.expm1(-total * total) * jnp.expm1(-gap * gap), bend * bend


def _cos_apart(s1, s2, ratio):
    """1 - ratio, ratio = cosh(s s')/sqrt(cosh(s^2) cosh(s'^2)): E[phi phi'] at c = 1."""
    first, second = _products(s1, s2)
    return (first + second) / ((2 - _rise(s1, s1)) * (2 - _rise(s2, s2)) * (1 + ratio))


@cache
def _log_sinh() -> list[float]:
    """Coefficients of log(sinh(x)/x) in x^(2n), for |x| < pi: at x < 0.7 the twelfth term is below 1e-17."""
    bernoulli, factorial = scipy.special.bernoulli, scipy.special.factorial
    return [float(4.0**n * bernoulli(2 * n)[-1] / (2 * n * factorial(2 * n))) for n in range(1, 12)]


def _sin_apart(s1, s2, ratio):
    """1 - ratio, ratio = sinh(s s')/sqrt(sinh(s^2) sinh(s'^2)): E[phi phi'] at c = 1."""
    first, second = _products(s1, s2)
    wide = jnp.minimum(s1, s2) > 0.5  # else the two products are too close, but their ratio is not
    direct = clipped(first - second) / (jnp.where(wide, _rise(s1, s1) * _rise(s2, s2), 1) * (1 + ratio))
    # log(sinh(x)/x) less its value at the geometric mean: half a square for every power of the series.
    n1, n2 = _cap(s1, 1), _cap(s2, 1)
    x1, x2 = n1 * n1, n2 * n2
    power, chain, total = 1.0, 1.0, 0.0  # x2^(n-1), (x1^n - x2^n)/(x1 - x2)
    for coefficient in _log_sinh():
        total = total + coefficient * chain * chain
        power = power * x2
        chain = x1 * chain + power
    series = -jnp.expm1(-(((n1 - n2) * (n1 + n2)) ** 2) * total / 2)
    return jnp.where(jnp.maximum(s1, s2) < 0.7**0.5, series, jnp.where(wide, direct, 1 - ratio))


NAMES = {"sin": Sin, "cos": Cos}
