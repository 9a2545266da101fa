"""Arc-cosine kernels J_n of a real degree n > 1/2, over J_n(0), in z = (1 - cos theta)/2 and y = 1 - z.

E[max(a,0)^n max(b,0)^n] = J_n(theta)/(2 pi) at unit variances. With F the hypergeometric function 2F1 and z <= 1/2,
    J_n(pi - theta) / J_n(0) = z^(n + 1/2) C(z),    C(z) = Gamma(n + 1)^2 / (Gamma(n + 1/2) Gamma(n + 3/2)) F(1/2, 1/2; n + 3/2; z),
    J_n(theta) / J_n(0) = F(-n, -n; 1/2 - n; z) - z^(n + 1/2) C(z) / cos(pi n).
At a half-integer n both terms of the last line are infinite. With m the integer nearest to n + 1/2 and eps = n + 1/2 - m, their
common part moves to the first: z^(n + 1/2) = z^m + eps W, W = z^m (z^eps - 1)/eps, and cos(pi n)/eps is finite.
"""

from functools import lru_cache, partial, reduce
from itertools import zip_longest
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ntk_ln._numerics import power

DIGITS = 80  # of the tables' own arithmetic
NUDGE = "1e-25"  # a half-integer n is moved by this: with 80 digits both the move and the cancellation are far below 1e-16


class Table(NamedTuple):
    """What D = 1 - J_n(theta)/J_n(0) = z drop(z) + kappa W tail(z) and half its derivative, `slopes`, are made of.

    Polynomials by their coefficients in t = 4 z - 1.
    """

    m: int
    eps: float
    kappa: float
    drop: tuple[float, ...]
    tail: tuple[float, ...]
    slope_drop: tuple[float, ...]
    slope_tail: tuple[float, ...]


@lru_cache(maxsize=256)
def table(n: float) -> Table:
    """The constants of degree n: power series summed by mpmath, then made polynomials that are exact to rounding."""
    import mpmath as mp  # only here: no other activation needs it

    m = round(n + 0.5)
    eps = n - (m - 0.5)
    with mp.workdps(DIGITS):
        shift = mp.mpf(eps) or mp.mpf(NUDGE)
        degree, half = m - mp.mpf(1) / 2 + shift, mp.mpf(1) / 2
        cos = (-1) ** m * mp.sin(mp.pi * shift)  # cos(pi n)
        count = 100 + m  # z <= 1/2: what is left of the series is below 1e-25

        def series(a, c, first):
            """The coefficients of first F(a, a; c; z)."""
            terms = [first]
            for k in range(count):
                terms.append(terms[-1] * (a + k) ** 2 / ((c + k) * (k + 1)))
            return terms

        # Price's theorem: half the derivative of D is n^2 J_{n-1}(theta) / J_n(0), the same formulas with n - 1 for n.
        top = mp.gamma(degree + 1) ** 2 / (mp.gamma(degree + half) * mp.gamma(degree + 3 * half))
        tail = series(half, degree + 3 * half, top)
        slope_tail = series(half, degree + half, top * (degree + half) / 2)
        drop = [-p for p in series(-degree, half - degree, mp.mpf(1))]
        slope_drop = series(1 - degree, 3 * half - degree, degree**2 / (2 * degree - 1))
        drop[0] = mp.mpf(0)
        for k in range(m, count + 1):
            drop[k] += tail[k - m] / cos
        for k in range(m - 1, count + 1):
            slope_drop[k] += slope_tail[k + 1 - m] / cos
        polynomials = (_polynomial(v, 32 + m // 2, mp) for v in (drop[1:], tail, slope_drop, slope_tail))
        return Table(m, eps, float(shift / cos), *polynomials)


def _polynomial(series, count: int, mp) -> tuple[float, ...]:
    """A power series in z on [0, 1/2] as a polynomial in t = 4 z - 1: its Chebyshev interpolant as far as float64 sees it."""
    cosines = [mp.cos(mp.pi * j / (2 * count)) for j in range(4 * count)]
    values = [reduce(lambda value, c, z=(1 + cosines[j]) / 4: c + z * value, series[::-1]) for j in range(1, 2 * count, 2)]
    chebyshev = [2 * mp.fdot(values, [cosines[k * j % (4 * count)] for j in range(1, 2 * count, 2)]) / count for k in range(count)]
    chebyshev[0] /= 2
    while abs(chebyshev[-1]) < mp.mpf(2) ** -55 * max(map(abs, values)):
        chebyshev.pop()
    total = [mp.mpf(0)] * len(chebyshev)
    before, now = [], [mp.mpf(1)]  # T_1 = t T_0, then T_{k+1} = 2 t T_k - T_{k-1}
    for k, coefficient in enumerate(chebyshev):
        total = [a + coefficient * b for a, b in zip_longest(total, now, fillvalue=0)]
        after = [0, *((2 if k else 1) * v for v in now)]
        before, now = now, [a - b for a, b in zip_longest(after, before, fillvalue=0)]
    return tuple(map(float, total))


def _horner(coefficients, z):
    t, value = 4 * z - 1, coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = coefficient + t * value
    return value


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _power(m: int, eps: float, z):
    """W = z^m (z^eps - 1)/eps, at eps = 0 z^m log z."""
    tiny = jnp.finfo(z.dtype).tiny
    log = jnp.log(jnp.where(z > tiny, z, tiny))
    value = jnp.expm1(eps * log) / eps if eps else log
    # m = 0 comes with eps > 0 only; above, any finite number will do at 0.
    return z**m * jnp.where(z == 0, -1 / eps if eps > 0 else 0, value)


@_power.defjvp
def _power_jvp(m, eps, primals, tangents):
    (z,), (dz,) = primals, tangents
    if m == 0:
        return _power(0, eps, z), power(z, eps - 1) * dz
    return _power(m, eps, z), ((m + eps) * _power(m - 1, eps, z) + z ** (m - 1)) * dz


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _values(n: float, z):
    """1 - J_n(theta)/J_n(0) and J_n(pi - theta)/J_n(0), for z <= 1/2."""
    c = table(n)
    w, tail = _power(c.m, c.eps, z), _horner(c.tail, z)
    return z * _horner(c.drop, z) + c.kappa * w * tail, (z**c.m + c.eps * w) * tail


@_values.defjvp
def _values_jvp(n, primals, tangents):
    slope, coslope = _slopes(n, primals[0])
    return _values(n, primals[0]), (2 * slope * tangents[0], 2 * coslope * tangents[0])


def _slopes(n: float, z):
    """n^2 J_{n-1}/J_n(0) at theta and at pi - theta, for z <= 1/2."""
    c = table(n)
    if n <= 1.5:  # an infinite derivative at theta = 0, taken as 0
        z = jnp.where(z == 0, 0, z)
    w, tail = _power(c.m - 1, c.eps, z), _horner(c.slope_tail, z)
    return _horner(c.slope_drop, z) + c.kappa * w * tail, (z ** (c.m - 1) + c.eps * w) * tail


def arc_cosine(n: float, z, y):
    """J_n(theta), J_n(pi - theta), J_n(0) - J_n(theta) and J_n(0) - J_n(pi - theta), all over J_n(0)."""
    swap = z > y
    d, jc = _values(n, jnp.where(swap, y, z))
    j, dc = 1 - d, 1 - jc
    return jnp.where(swap, jc, j), jnp.where(swap, j, jc), jnp.where(swap, dc, d), jnp.where(swap, d, dc)


def slopes(n: float, z, y):
    """n^2 J_{n-1}(theta) / J_n(0), and the same at pi - theta."""
    swap = z > y
    j, jc = _slopes(n, jnp.where(swap, y, z))
    return jnp.where(swap, jc, j), jnp.where(swap, j, jc)
