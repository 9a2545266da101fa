"""Gaussian integrals of any activation by nested, piecewise Gauss-Legendre quadrature.

Of a pair a ~ N(0, 1) is integrated outside and b = c a + sigma x, x ~ N(0, 1), inside. Both integrals are cut where phi is not
smooth, and at 0; what is left and right of a cut is cut again at a multiple of the width that phi has there, so that fixed
nodes resolve phi of width 1 and the Gaussian at any standard deviation h, and near-duplicates (sigma -> 0) too.
"""

from functools import lru_cache
from itertools import pairwise
from math import pi

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._dtype import enable_x64
from ntk_ln._numerics import Num, divide, hypot, sqrt
from ntk_ln.activations._base import AbstractActivation, Dual
from ntk_ln.activations.homogeneous import Homogeneous

NODES = 18  # a panel
FAR = 1e12  # standard deviations above are the homogeneous limit
LIVE = 2**20  # node values at once
SAFETY = 30.0  # where phi has kinks that were not declared the errors of two rules may be alike

UNRESOLVED = 0.1  # an error of z_new from here on says only that phi is not resolved


class AbstractQuadrature(AbstractActivation):
    """An activation known by its values alone, with its kinks, its degree and its limit far out."""

    kinks: eqx.AbstractVar[tuple[float, ...]]  # where phi is not smooth
    limit: eqx.AbstractVar[tuple[float, float] | None]  # phi ~ alpha x^n for x -> inf, beta |x|^n for x -> -inf, if n is known
    odd: eqx.AbstractVar[bool]  # phi(-x) = -phi(x)
    delta: eqx.AbstractVar[tuple[float, float]]  # of a bounded phi: the integrals of phi' and of phi'^2 over the line
    nodes: eqx.AbstractVar[int]  # of a panel in float64

    @property
    def far_limit(self) -> bool:
        return self.limit is not None

    @property
    def derivative_growth(self) -> float:
        return -0.5 if self.degree == 0 else self.degree - 1

    @property
    def _far(self) -> Homogeneous | None:
        return None if self.limit is None else Homogeneous(self.name, *self.limit, self.degree)

    @property
    def _cuts(self) -> tuple[float, ...]:
        """The kinks, and 0 unless it lies among them."""
        inside = self.kinks and min(self.kinks) < 0 < max(self.kinks)
        return self.kinks if inside else tuple(sorted({0.0, *self.kinks}))

    def second_moment(self) -> float:
        with jax.ensure_compile_time_eval(), enable_x64(True):
            return float(self._moments(jnp.ones(()), self.nodes)[0]) ** 2

    def moments(self, side):
        far, h = self._far, _deviation(side, self.far_limit)
        root, mean = self._moments(h, self.nodes)
        if far is None:
            return root, mean
        scale = root * side.unit**self.degree
        far_scale, far_mean = far.moments(side)
        scale = jnp.where(_is_far(side), far_scale, scale)
        if mean is not None:
            mean = jnp.where(_is_far(side), 0 if far_mean is None else far_mean, mean)
        return scale, mean

    def _moments(self, h, nodes: int):
        """sqrt(E[phi^2]) and E[phi]/sqrt(E[phi^2])."""
        rule, inverse = _Rule.of(h, nodes), 1 / jnp.maximum(h, _small(h.dtype))
        x, w = rule.single(_ordered([inverse * cut for cut in self._cuts]), inverse)
        x, w = (v.reshape(*h.shape, -1) for v in (x, w))
        values = self(h[..., None] * x)
        # A power of the scale cancels: squares of values near 1e-300 underflow.
        top = jax.lax.stop_gradient(jnp.max(jnp.abs(values), axis=-1))
        values = divide(values, top[..., None])
        root = sqrt(jnp.sum(w * values * values, axis=-1))
        return top * root, None if self.odd else divide(jnp.sum(w * values, axis=-1), root)

    def dual(self, z, y, side, pair):
        small, dot = self._half(z, y, side, pair, self.nodes)
        small, swap = jnp.clip(small, 0, 1), self._swap(z, y)
        z_new, y_new = jnp.where(swap, 1 - small, small), jnp.where(swap, small, 1 - small)
        if self._far is not None:
            limit = self._far.dual(z, y, side, pair)
            both = jnp.logical_and(*pair(_is_far(side)))
            slope = self._far_dot(z, y, side, pair) if self.degree == 0 else limit.dot
            z_new, y_new = jnp.where(both, limit.z, z_new), jnp.where(both, limit.y, y_new)
            dot = jnp.where(both, slope, dot)
        return Dual(z_new, y_new, dot)

    def quadrature_error(self, z, y, side, pair) -> tuple[Num, Num]:
        """An estimate of the errors of z_new and of dot, where dual integrates: what two coarser rules change, and rounding.

        The larger change is multiplied by 30, for kinks that were not declared. An estimate, no bound: where phi oscillates
        faster than the nodes lie three rules may still agree by chance.
        """
        (z_new, dot), *others = (self._half(z, y, side, pair, self.nodes * k // 8) for k in (8, 6, 5))
        floor = jnp.finfo(z.dtype).eps * (5e4 if z.dtype == jnp.float64 else 50)
        error_z, error_dot = (
            SAFETY * jnp.maximum(*(jnp.abs(other[k] - value) for other in others)) for k, value in enumerate((z_new, dot))
        )
        # Rules this far apart, in z_new or in dot, have not begun to converge and may agree by chance in the other: all that is
        # known of z_new is then that it lies between 0 and 1.
        resolved = (error_z < UNRESOLVED) & (error_dot < 1 + 3 * jnp.abs(dot))
        error_z = jnp.where(resolved, error_z, 1)
        return error_z + floor, error_dot + floor * (1 + jnp.abs(dot))

    def _swap(self, z, y):
        """Whether y_new is integrated: for an odd phi it follows from z with the signs exchanged."""
        return z > y if self.odd else jnp.zeros_like(z, bool)

    def _half(self, z, y, side, pair, nodes: int):
        """z_new, or y_new where `_swap`, and dot."""
        swap = self._swap(z, y)
        near, far = jnp.where(swap, y, z), jnp.where(swap, z, y)
        return self._pairs(near, far, side, pair, nodes)

    def gain_dual(self, z, y, side, pair):
        (value,) = self._pairs(z, y, side, pair, self.nodes, gain=True)
        if self._far is None:
            return value
        return jnp.where(jnp.logical_and(*pair(_is_far(side))), self._far.gain_dual(z, y, side, pair), value)

    def _far_dot(self, z, y, side, pair):
        """phi' of a bounded phi is far out jump * delta; its width counts only for near-duplicates (erf's formula)."""
        (jump, square), (alpha, beta) = self.delta, self.limit or (1.0, 1.0)
        inverse = divide(side.unit, jnp.where(_is_far(side), side.scale, 1))
        e1, e2 = pair(jnp.where(inverse > 0, jnp.maximum(inverse, _least(z.dtype)), 0))
        width = jump**4 / (4 * pi * square**2)
        second = (alpha**2 + beta**2) / 2
        return divide(jump**2 / (2 * pi * second), hypot(2 * sqrt(z * y), width**0.5 * hypot(e1, e2)))

    def _pairs(self, z, y, side, pair, nodes: int, *, gain: bool = False):
        """(z_new, dot), or the gain's integral, over chunks of the pairs."""
        # So near 0 nothing changes any more, and derivatives divide by powers of h.
        h = jnp.maximum(_deviation(side, self.far_limit), _least(z.dtype))
        root, _ = self._moments(h, nodes)
        (h1, h2), (r1, r2) = pair(h), pair(root)
        # A loop's second derivative would forget the guard of sqrt at 0: sigma is taken outside.
        sigma = 2 * sqrt(z * y)
        arrays = [jnp.broadcast_to(v, z.shape).reshape(-1) for v in (z, y, sigma, h1, h2, r1, r2)]
        rule = _Rule.of(h, nodes)
        size = max(1, LIVE // rule.count(self._cuts))
        count = arrays[0].size

        @jax.checkpoint
        def body(args):
            return self._chunk(rule, *args, gain=gain)

        if count <= size:
            out = body(tuple(arrays))
        else:
            steps = -(-count // size)
            size = -(-count // steps)
            chunks = tuple(jnp.pad(v, (0, steps * size - count), mode="edge").reshape(steps, size) for v in arrays)
            out = tuple(v.reshape(-1)[:count] for v in jax.lax.map(body, chunks))
        return tuple(v.reshape(z.shape) for v in out)

    def _chunk(self, rule, z, y, sigma, h1, h2, r1, r2, *, gain: bool):
        # Equal sides: equal to the last digit, or z_new would not be 0 at z = 0. Added, not replaced: derivatives stay.
        r2 = r2 + jax.lax.stop_gradient(jnp.where(h1 == h2, r1 - r2, 0))
        cos, least = y - z, _small(z.dtype)
        inv1, inv2 = 1 / jnp.maximum(h1, least), 1 / jnp.maximum(h2, least)
        # Outside: phi(h a) of width 1/h, and phi(h' b) smeared out by sigma.
        steep = divide(1.0, jnp.abs(cos), 1 / least)
        width = jnp.minimum(inv2 * steep, 1 / least)
        positions = [inv1 * cut for cut in self._cuts]
        positions += [jnp.sign(cos) * width * cut for cut in self._cuts if cut]
        a, wa = rule.outer(_ordered(positions), (inv1, width), sigma * steep)
        a, wa = (v.reshape(len(z), -1) for v in (a, wa))

        column, grid = (slice(None), None), (slice(None), None, None, None)
        p = h1[column] * a
        phi_p, slope_p = self._value_and_slope(p)
        slope_p = slope_p * divide(h1, r1)[column]

        spread = 1 / jnp.maximum(sigma, least)
        edges = [((inv2 * cut)[column] - cos[column] * a) * spread[column] for cut in self._cuts]
        x, wx = rule.single(jnp.stack(edges, axis=-1), (inv2 * spread)[column])
        a_, p_ = a[..., None, None], p[..., None, None]
        b = cos[grid] * a_ + sigma[grid] * x
        phi_q, slope_q = self._value_and_slope(h2[grid] * b)
        slope_q = slope_q * divide(h2, r2)[grid]
        if gain:
            return (jnp.sum(wa * a * slope_p * jnp.sum(wx * slope_q * b, axis=(-2, -1)), axis=-1),)
        dot = jnp.sum(wa * slope_p * jnp.sum(wx * slope_q, axis=(-2, -1)), axis=-1)

        # t = phi(p)/r1 - phi(q)/r2: where p - q is too small for the difference of the values, from the slopes.
        phi_p, phi_q = (phi_p / r1[column])[..., None, None], phi_q / r2[grid]
        own_p, own_q = (slope_p / h1[column])[..., None, None], slope_q * (divide(r2, h2) / r1)[grid]
        step = (h1 - h2)[grid] * a_ + h2[grid] * ((2 * z)[grid] * a_ - sigma[grid] * x)
        apart = phi_p - phi_q
        steps = step * (own_p + own_q) / 2 + phi_q * divide(r2 - r1, r1)[grid]
        noise = jnp.abs(phi_p) + jnp.abs(phi_q) + jnp.abs(p_) * (jnp.abs(own_p) + jnp.abs(own_q))
        t = jnp.where(jnp.abs(apart - steps) <= 4 * jnp.finfo(z.dtype).eps * noise, steps, apart)
        return jnp.sum(wa * jnp.sum(wx * t * t, axis=(-2, -1)), axis=-1) / 4, dot

    def _value_and_slope(self, x):
        return jax.jvp(self, (x,), (jnp.ones_like(x),))


def _small(dtype) -> float:
    """Widths and standard deviations below are as good as 0 beside the Gaussian's; derivatives divide by their cubes."""
    return 1e-30 if dtype == jnp.float64 else 1e-12


def _least(dtype) -> float:
    return 1e-60 if dtype == jnp.float64 else 1e-10


def _deviation(side, limited: bool):
    """h = F/e, up to the far limit."""
    h = divide(side.scale, side.unit, FAR)
    return jnp.minimum(h, FAR) if limited else h


def _is_far(side):
    return side.scale > FAR * side.unit


def _ordered(positions):
    edges = jnp.stack(positions, axis=-1)
    return jnp.sort(edges, axis=-1) if len(positions) > 2 else edges


@lru_cache
def _graded(nodes: int, stretch: float):
    """Gauss-Legendre on [0, 1], the first nodes denser by cosh(stretch) than the last."""
    t, w = np.polynomial.legendre.leggauss(nodes)
    t, w = (t + 1) / 2, w / 2
    if stretch == 0:
        return t, w
    return np.sinh(stretch * t) / np.sinh(stretch), w * stretch * np.cosh(stretch * t) / np.sinh(stretch)


class _Rule(eqx.Module):
    """Where the panels lie, for one dtype."""

    nodes: int = eqx.field(static=True)
    reach: float = eqx.field(static=True)  # the Gaussian's tails end here

    @classmethod
    def of(cls, a, nodes: int):
        return cls(nodes, 8.5) if a.dtype == jnp.float64 else cls(max(4, 2 * nodes // 3), 5.5)

    def count(self, cuts) -> int:
        outer, inner = 2 * len(cuts) - (0.0 in cuts), len(cuts)
        return self.nodes**2 * (12 + 4 * (outer - 1)) * (8 + 2 * (inner - 1))

    def outer(self, edges, widths, smear):
        """Nodes for features of these widths at the edges, and for some smeared out by a Gaussian."""
        marks = [k * width for width in widths for k in (5, 25)]
        marks = jnp.sort(jnp.stack([*marks, 7 * smear], axis=-1), axis=-1)
        return self._panels(edges, [marks[..., k] for k in range(marks.shape[-1])], 7 * smear)

    def single(self, edges, width):
        """Nodes for features of one width, wherever the edges."""
        return self._panels(edges, [5 * width, 25 * width, None], None)

    def _panels(self, edges, marks, mark):
        """Nodes and weights (..., panels, nodes).

        From each end edge outwards cut at these distances (None: half of what is left), so far as there is room for all; between
        two edges cut half-way, and at a distance `mark` from each.
        """
        edges = jnp.clip(edges, -self.reach, self.reach)
        panels = []

        def cut(start, sign, ends, stretch):
            for lo, hi in pairwise([0, *ends]):
                panels.append((start + sign * lo, sign * (hi - lo), _graded(self.nodes, stretch)))

        for edge, sign in ((edges[..., 0], -1), (edges[..., -1], 1)):
            length, ends = self.reach - sign * edge, []
            for k, end in enumerate(marks, 1):
                ends.append((ends[-1] + length) / 2 if end is None else jnp.minimum(end, length * (k / (len(marks) + 1))))
            cut(edge, sign, [*ends, length], 1.0)
        for i in range(edges.shape[-1] - 1):
            half = (edges[..., i + 1] - edges[..., i]) / 2
            ends, stretch = ([half], 0.0) if mark is None else ([jnp.minimum(mark, half / 2), half], 0.5)
            cut(edges[..., i], 1, ends, stretch)
            cut(edges[..., i + 1], -1, ends, stretch)
        starts, lengths = (jnp.stack([panel[k] for panel in panels], axis=-1)[..., None] for k in (0, 1))
        t, w = (np.stack([panel[2][k] for panel in panels]).astype(edges.dtype) for k in (0, 1))
        x = starts + lengths * t
        return x, jnp.abs(lengths) * w * jnp.exp(-x * x / 2) / (2 * pi) ** 0.5
