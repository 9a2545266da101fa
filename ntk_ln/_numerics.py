"""Safe elementary functions: the only home of clipping and of guards at 0.

Angles are carried as z = (1 - cos)/2 and y = (1 + cos)/2, so that both ends keep their digits; every function here has the
derivative of its formula off the singular point and the symmetric value (0) on it.
"""

from functools import partial, reduce
from math import pi

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Num = Float[Array, "..."]


def sqrt(x):
    """sqrt(max(x, 0)), with derivatives 0 at 0."""
    # Guarded twice rather than by a rule: second derivatives through a loop forget the rule. NaN passes.
    guarded = x <= 0
    return jnp.where(guarded, 0, jnp.sqrt(jnp.where(guarded, 1, x)))


def divide(x, y, otherwise=0.0):
    """x / y, and `otherwise` where y is 0; both branches stay finite under differentiation."""
    zero = y == 0
    return jnp.where(zero, otherwise, x) / jnp.where(zero, 1, y)


def clipped(x):
    """max(x, 0) with the derivatives of x at 0, where `maximum` halves them: what is 0 between equal inputs has a curvature."""
    return jnp.where(x < 0, 0, x)


@jax.custom_jvp
def hypot(x, y):
    """sqrt(x^2 + y^2) for x, y >= 0 without overflow or underflow, with derivative 0 at (0, 0)."""
    large, small = jnp.maximum(x, y), jnp.minimum(x, y)
    ratio = divide(small, large)
    return large * jnp.sqrt(1 + ratio * ratio)


@hypot.defjvp
def _hypot_jvp(primals, tangents):
    x, y = primals
    h = hypot(x, y)
    return h, divide(x, h) * tangents[0] + divide(y, h) * tangents[1]


def with_value(value, formula):
    """`value`, with the derivatives of `formula`, which is the same number but for over- and underflow on its way."""
    return formula + jax.lax.stop_gradient(value - formula)


def inverse_size(b1, b2, m):
    """1/max(b1, b2, sqrt(m)), large but finite at 0 and without derivative: in units of it b1^2 + b2^2 + m does not underflow."""
    b1, b2, m = map(jax.lax.stop_gradient, (b1, b2, m))
    return 1 / jnp.maximum(jnp.maximum(jnp.maximum(b1, b2), jnp.sqrt(m)), jnp.finfo(m.dtype).tiny)


def atan2_ratio(x, k):
    """atan2(x, k) / x for k > 0 or x != 0, and its limit 1/k at x = 0."""
    small = x == 0
    return jnp.where(small, divide(1.0, k), jnp.arctan2(jnp.where(small, 1, x), k) / jnp.where(small, 1, x))


def split(a1, b1, a2, b2):
    """(1 - a1 a2 - b1 b2)/2 for points (a, b) on the unit circle, a >= 0: exactly 0 for equal points, never negative."""
    # The squared sine of half the angle between them, from half the angle of each: no quotient of a pair.
    (c1, s1), (c2, s2) = _half_point(a1, b1), _half_point(a2, b2)
    # s1 c2 - c1 s2, exactly 0 for equal points, fused or not.
    cross = c1 * (s2 - s1) - s1 * (c2 - c1)
    return cross * cross


def _half_point(a, b):
    c = jnp.sqrt((1 + a) / 2)
    return c, b / (2 * c)


def times(x, constant: float):
    """x * constant, the constant not rounded to the dtype of x: in float32 layer after layer would lose the same part."""
    high = float(np.asarray(constant, x.dtype))
    return x * high if high == constant else x * high + x * (constant - high)


def power(x, n: float):
    """x^n for x >= 0, n not rounded to the dtype of x (in float32 1e13^2.7 would be off by 1e-6); its derivative at 0 is 0."""
    high, base = float(np.asarray(n, x.dtype)), jnp.where(x == 0, 1, x)
    value = base**high if high == n else base**high * base ** (n - high)
    return jnp.where(x == 0, 0, value)


def complement(z, y, *, acute=False):
    """The pair (z, y) with z + y = 1: the smaller one, clipped at 0, decides. `acute`: 0 <= z <= y is known."""
    if acute:
        return z, 1 - z
    swap = z > y
    small = clipped(jnp.where(swap, y, z))
    return jnp.where(swap, 1 - small, small), jnp.where(swap, small, 1 - small)


def unit_rows(a):
    """Rows scaled to length 1 and their lengths; a zero row stays 0 with length 0."""
    # The power of the scale cancels, so it carries no derivative; without it squares over- and underflow.
    scale = jax.lax.stop_gradient(jnp.max(jnp.abs(a), axis=1, keepdims=True))
    scaled = divide(a, scale)
    length = sqrt(jnp.sum(scaled * scaled, axis=1, keepdims=True))
    return divide(scaled, length), (scale * length)[:, 0]


NEAR = 1e-4  # below this z a product of unit vectors has lost too many digits: eps/sqrt(z) > 100 eps in the angle
HALVES = -1
FEW = 16  # up to this many columns differences cost no more than a product


def half_angles(a, split: int, inputs, product=None):
    """z = |a - a'|^2/4 and y = |a + a'|^2/4 between unit rows, each to a few eps in the angle.

    Between the first `split` rows and the others, with split = 0 among all, with `HALVES` of the first half to the second, one by
    one. Well-apart pairs come from one matrix product at the highest precision, close and antipodal pairs from differences; where
    the `product` is given all come from it, and those that `is_near` names are for the caller to mend. Equal rows of `inputs`,
    from which a was computed, are at angle 0 exactly: fused arithmetic may round them differently. So is each row to itself.
    """
    if split == HALVES:
        (a1, a2), (in1, in2) = jnp.split(a, 2), jnp.split(inputs, 2)
        return _without_equals(*complement(*_by_differences(a1, a2)), in1, in2)
    a1, a2, in1, in2 = a[: split or None], a[split:], inputs[: split or None], inputs[split:]
    diagonal = jnp.eye(len(a), dtype=bool) if split == 0 else jnp.zeros((len(a1), 1), dtype=bool)

    def exact(a1, in1):
        columns = [_columns(v1, v2) for v1, v2 in ((a1, a2), (in1, in2))]
        return _without_equals(*complement(*_by_differences(*columns[0])), *columns[1])

    if product is not None:
        return clipped((1 - product) / 2), clipped((1 + product) / 2)
    if a.shape[1] <= FEW:
        return exact(a1, in1)
    cos = jnp.matmul(a1, a2.T, precision=jax.lax.Precision.HIGHEST)
    z, y = complement((1 - cos) / 2, (1 + cos) / 2)
    near = jnp.any(is_near(cos) & ~diagonal, axis=1)

    def row(args):
        a1, in1, z, y, near = args
        return jax.lax.cond(near, lambda: tuple(v[0] for v in exact(a1[None], in1[None])), lambda: (z, y))

    z, y = jax.lax.map(row, (a1, in1, z, y, near))
    return jnp.where(diagonal, 0, z), jnp.where(diagonal, 1, y)


def is_near(cos):
    """Whether a product of unit vectors has lost too many digits of the angle between them."""
    return abs(cos) > 1 - 2 * NEAR


def _columns(a1, a2):
    """The columns of both sides, last axis last, as they broadcast over the pairs."""
    return a1[:, None, :], a2[None, :, :]


def _without_equals(z, y, in1, in2):
    # Taken away rather than replaced: the derivatives stay.
    off = jax.lax.stop_gradient(jnp.where(_over_columns(jnp.logical_and, lambda v1, v2: v1 == v2, in1, in2), z, 0))
    return z - off, y + off


def _by_differences(a1, a2):
    minus = _over_columns(jnp.add, lambda v1, v2: (v1 - v2) * (v1 - v2), a1, a2)
    plus = _over_columns(jnp.add, lambda v1, v2: (v1 + v2) * (v1 + v2), a1, a2)
    return minus / 4, plus / 4


def _over_columns(join, term, v1, v2):
    """join over the last axis of term(v1, v2): column by column where there are few, which runs in vectors of pairs."""
    if v1.shape[-1] <= FEW:
        return reduce(join, (term(v1[..., k], v2[..., k]) for k in range(v1.shape[-1])))
    values = term(v1, v2)
    return jnp.all(values, axis=-1) if values.dtype == bool else jnp.sum(values, axis=-1)


# --- arc-cosine kernels (Cho & Saul 2009): E[max(a,0)^n max(b,0)^n] = J_n(theta)/(2 pi) ---------------------------------

# 2 phi/sin phi from k = cos phi in [sqrt(1/2), 1], in powers of k - CENTRE: the interpolant of degree 11 at Chebyshev's nodes,
# taken at 50 digits (tests/test_numerics.py recomputes it). The nearest singularity is k = -1, 12.7 times as far from the centre
# as the ends: the error falls as 25^-degree, 1e-17 here. (In sin^2 phi it takes degree 20.)
_TWICE_ANGLE_RATIO = (
    2.103734146354505,
    -0.7528205525163649,
    0.324219450398183,
    -0.14975081027439655,
    0.07176012288213598,
    -0.035176991313706336,
    0.017511596585026722,
    -0.008815172178617384,
    0.004474544291966457,
    -0.002286552108963433,
    0.0011952327383324675,
    -0.0006167894596611741,
)
CENTRE = 0.8535533905932737


def twice_angle_ratio(u):
    """2 phi/sin phi for cos phi = u + CENTRE, 0 <= phi <= pi/4."""
    terms = _TWICE_ANGLE_RATIO if u.dtype == jnp.float64 else _TWICE_ANGLE_RATIO[:7]
    # Pairs of pairs (Estrin): in a row, each step would wait for the one before.
    while len(terms) > 1:
        whole = len(terms) // 2 * 2
        terms = [low + u * high for low, high in zip(terms[:whole:2], terms[1:whole:2], strict=True)] + list(terms[whole:])
        u = u * u
    return terms[0]


J_AT_ZERO = (pi, pi, 3 * pi, 15 * pi)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _jc(n: int, m):
    """J_n(pi - theta) for the angle theta <= pi/2 with m = (1 - cos theta)/2."""
    # XLA fuses a root into one use only: that is the guard. The shift is exact, there and back.
    root, shifted = sqrt(m), sqrt(1 - m) - CENTRE
    theta = root * twice_angle_ratio(shifted)
    if n == 0:
        return theta
    s, c = 2 * root * (shifted + CENTRE), 1 - 2 * m
    if n == 1:
        value = s - theta * c
    elif n == 2:
        value = 3 * (theta - s * c) - 2 * theta * s * s
    else:
        value = 15 * (s - theta * c) - 11 * s**3 + 6 * theta * c * s * s
    return clipped(value)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _d(n: int, m):
    """J_n(0) - J_n(theta), same argument as `_jc`."""
    jc = _jc(n, m)
    if n == 0:
        return jc
    if n == 1:
        value = 2 * pi * m - jc
    else:
        c, ss = 1 - 2 * m, 4 * m * (1 - m)
        value = 2 * pi * ss + jc if n == 2 else 30 * pi * m + 6 * pi * c * ss - jc
    return clipped(value)


# Price's theorem, dE[phi phi]/dcos = E[phi' phi'], is dJ_n/dcos = n^2 J_{n-1}: no cancellation, unlike the formulas above.
@_jc.defjvp
def _jc_jvp(n, primals, tangents):
    (m,), (dm,) = primals, tangents
    slope = divide(1.0, sqrt(m * (1 - m))) if n == 0 else 2 * n * n * _jc(n - 1, m)
    return _jc(n, m), slope * dm


@_d.defjvp
def _d_jvp(n, primals, tangents):
    (m,), (dm,) = primals, tangents
    slope = divide(1.0, sqrt(m * (1 - m))) if n == 0 else 2 * n * n * (J_AT_ZERO[n - 1] - _d(n - 1, m))
    return _d(n, m), slope * dm


def arc_cosine(n: int, z, y, *, acute=False):
    """J_n(theta), J_n(pi - theta), J_n(0) - J_n(theta), J_n(0) - J_n(pi - theta) at z = (1 - cos theta)/2, y = 1 - z.

    `acute`: theta <= pi/2 is known.
    """
    if acute:
        jc, d = _jc(n, z), _d(n, z)
        return J_AT_ZERO[n] - d, jc, d, J_AT_ZERO[n] - jc
    swap = z > y
    m = jnp.where(swap, y, z)
    jc, d = _jc(n, m), _d(n, m)
    j, dc = J_AT_ZERO[n] - d, J_AT_ZERO[n] - jc
    return jnp.where(swap, jc, j), jnp.where(swap, j, jc), jnp.where(swap, dc, d), jnp.where(swap, d, dc)
