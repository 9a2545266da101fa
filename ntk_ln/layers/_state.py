"""What the layers pass on: the state of inputs and their pairs in homogeneous coordinates.

An input x = v/u is a point of a half-sphere, u = 0 the point at infinity in direction v. It carries the scale
F = sqrt(E[unit^2]) and the unit e = u^p of its growth exponent p; the value a network sees is F/e. Each pair carries the
half-angle coordinates z = (1 - cos)/2 and y = (1 + cos)/2 of its units' correlation and the tangent T, all free of scale:
NNGP = F F' (y - z) and NTK = F F' T, over e e' for finite points. Nothing over- or underflows, and both ends of the angle keep
their digits.
"""

from dataclasses import dataclass
from math import inf, nan
from math import sqrt as float_sqrt
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ntk_ln._numerics import HALVES, divide, half_angles, hypot, unit_rows
from ntk_ln._numerics import power as fractional_power


@dataclass(frozen=True)
class Growth:
    """How a network's units and kernel grow far out, and what its layers may follow: all that is known without numbers.

    `mean`: units grow as r^mean (the p of the posterior mean). `diag`: sqrt(Theta(x,x)) grows as r^diag. Both exact exponents;
    not a number where an activation's degree is not given.
    """

    mean: float = 1.0
    diag: float = 0.0
    gaussian: bool = False  # units are jointly Gaussian (a Dense since the last activation)
    raw: bool = True  # still the input itself: d fixed features, no width yet
    gain: int = 0  # trained gains waiting for the next Dense or activation
    has_norm: bool = False  # a norm layer sits somewhere, in the body of a Residual perhaps
    normalised: bool = False  # a norm layer has been passed, and nothing passes it by
    constant: bool = False  # so has one with eps = 0: E[unit^2] no longer depends on |x|
    monotone: bool = True  # sup of Theta(x,x) is at |x| = 0 or infinity
    assumption: bool = True  # every activation so far, up to the first norm, has n > 1/2
    correction: float = inf  # the next term of the far field is smaller by r^-correction
    no_limit: str | None = None  # an activation without a far limit that |x| reaches
    numeric: bool = False  # an activation that |x| reaches is integrated numerically
    finite_only: str | None = None  # a layer that has no infinite-width kernel
    cut: bool = False  # a Dense whose weights are 0 has been passed: nothing of x is left

    def after_dense(self, has_bias: bool, has_weights: bool = True) -> "Growth":
        """Growth after a Dense; a bias counts as much as u^mean."""
        return Growth(
            mean=self.mean,
            diag=larger(self.diag, self.mean),
            gaussian=True,
            raw=False,
            has_norm=self.has_norm,
            normalised=self.normalised,
            constant=self.constant,
            monotone=self.monotone,
            assumption=self.assumption,
            correction=min(self.correction, self.mean) if has_bias and self.mean > 0 else self.correction,
            no_limit=self.no_limit,
            numeric=self.numeric,
            finite_only=self.finite_only,
            cut=self.cut or not has_weights,
        )

    def after_norm(self, gains: int, has_eps: bool) -> "Growth":
        """Growth after a norm layer with so many trained gains; its eps counts as much as u^(2 mean)."""
        return Growth(
            mean=0.0,
            diag=self.diag - self.mean,
            gaussian=self.gaussian,
            raw=self.raw,
            gain=self.gain + gains,
            has_norm=True,
            normalised=True,
            constant=self.constant or not has_eps,
            monotone=self.monotone,
            assumption=self.assumption,
            correction=min(self.correction, 2 * self.mean) if has_eps and self.mean > 0 else self.correction,
            no_limit=self.no_limit,
            numeric=self.numeric,
            finite_only=self.finite_only,
            cut=self.cut,
        )


def larger(a: float, b: float) -> float:
    """The larger exponent, not a number where one is not known."""
    return max(a, b) if a == a and b == b else nan


class Side(NamedTuple):
    """The inputs' side of the state: scale F, unit e, mean over units (None where it is 0), one entry an input."""

    scale: Float[Array, " n"]
    unit: Float[Array, " n"]
    mean: Float[Array, "..."] | None = None

    def point(self, weight: float):
        """(weight F, e) on the unit circle: all that a function of e/F needs."""
        h = hypot(weight * self.scale, self.unit)
        return divide(weight * self.scale, h), divide(self.unit, h, 1.0)


class Pairing(eqx.Module):
    """Which inputs meet: with `split` None each itself, with 0 all of them all, with k > 0 the first k the others.

    With `HALVES` the first half meets the second, one by one. To an activation it says, too, whether angles are
    known to be `acute`.
    """

    split: int | None = eqx.field(static=True)
    acute: bool = eqx.field(static=True, default=False)

    def __call__(self, a):
        """Both sides of a quantity of the inputs, as they broadcast over the pairs."""
        if self.split is None or a.ndim == 0:
            return a, a
        if self.split == HALVES:
            return a[: len(a) // 2], a[len(a) // 2 :]
        return a[: self.split or None, None], a[None, self.split :]


def power_of(u, power: float):
    """u^power: the unit e of growth exponent `power`."""
    # Products of exponents such as (1/0.75^2) * 0.75 * 0.75 are whole numbers but for their rounding.
    whole = round(power)
    if abs(power - whole) < 1e-12 * abs(power):
        power = whole
    return jnp.ones_like(u) if power == 0 else u if power == 1 else u**power if power == whole else fractional_power(u, power)


class State(eqx.Module):
    """Inputs and their pairs after some layers (see the module's docstring)."""

    side: Side
    u: Float[Array, " n"]
    pair: Pairing
    z: Float[Array, "..."]
    y: Float[Array, "..."]
    tangent: Float[Array, "..."]
    power: float = eqx.field(static=True)  # e = u^power
    gain: int = eqx.field(static=True, default=0)  # trained gains waiting for the next Dense or activation
    acute: bool = eqx.field(static=True, default=False)  # no cosine is negative, as after an activation that never is

    @property
    def cos(self):
        return self.y - self.z


class Inputs(eqx.Module):
    """Before the first layer: rows v and units u of the inputs x = v/u^power."""

    v: Float[Array, "n d"]
    u: Float[Array, " n"]
    pair: Pairing
    power: float = eqx.field(static=True, default=1.0)

    @property
    def unit(self):
        return power_of(self.u, self.power)

    def first(self, w_std, b_std) -> "First":
        """What the first Dense makes of the rows: (w_std v/sqrt d, b_std e), as unit rows and their lengths."""
        weight, unit = w_std / float_sqrt(self.v.shape[1]), self.unit
        rows, scale = unit_rows(jnp.concatenate([self.v * weight, (b_std * unit)[:, None]], axis=1))
        given = jnp.concatenate([self.v, self.u[:, None]], axis=1)
        return First(rows, given, Side(scale, unit), self.u, self.power)

    def dense(self, w_std, b_std) -> State:
        """The state after the first Dense."""
        return self.first(w_std, b_std).state(self.pair)


class First(eqx.Module):
    """Inputs as the first Dense sees them: angles between the augmented rows keep a zero input smooth when there is a bias."""

    rows: Float[Array, "n k"]
    given: Float[Array, "n k"]  # what the rows were computed from
    side: Side
    u: Float[Array, " n"]
    power: float = eqx.field(static=True)

    def state(self, pair: Pairing, product: Float[Array, "n1 n2"] | None = None) -> State:
        """The state of these pairs; `product` of the unit rows, where it is known, see `half_angles`."""
        if pair.split is None:
            z, y = jnp.zeros_like(self.side.scale), jnp.ones_like(self.side.scale)
        else:
            z, y = half_angles(self.rows, pair.split, self.given, product)
        return State(self.side, self.u, pair, z, y, y - z, self.power)
