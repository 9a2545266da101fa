"""What the layers pass on: the state of inputs and their pairs in homogeneous coordinates.

An input x = v/u is a point of a half-sphere, u = 0 the point at infinity in direction v. It carries the scale
F = sqrt(E[unit^2]) and the unit e = u^p of its growth exponent p; the value a network sees is F/e. Each pair carries the
half-angle coordinates z = (1 - cos)/2 and y = (1 + cos)/2 of its units' correlation and the tangent T, all free of scale:
NNGP = F F' (y - z) and NTK = F F' T, over e e' for finite points. Nothing over- or underflows, and both ends of the angle keep
their digits.
"""

from dataclasses import dataclass
from math import sqrt as float_sqrt
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ntk_ln._numerics import divide, half_angles, hypot, unit_rows


@dataclass(frozen=True)
class Growth:
    """How a network's units and kernel grow far out, and what its layers may follow.

    `mean`: units grow as r^mean (the p of the posterior mean). `diag`: sqrt(Theta(x,x)) grows as r^diag. Both exact exponents,
    known without computing a kernel.
    """

    mean: float = 1.0
    diag: float = 0.0
    gaussian: bool = False  # units are jointly Gaussian (a Dense since the last activation)
    raw: bool = True  # still the input itself: d fixed features, no width yet
    gain: int = 0  # trained gains waiting for the next Dense or activation
    normalised: bool = False  # a norm layer has been passed
    constant: bool = False  # so has one with eps = 0: E[unit^2] no longer depends on |x|
    monotone: bool = True  # sup of Theta(x,x) is at |x| = 0 or infinity
    assumption: bool = True  # every activation so far, up to the first norm, has n > 1/2


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
    """Which inputs meet: with `split` None each itself, with 0 all of them all, with k > 0 the first k the others."""

    split: int | None = eqx.field(static=True)

    def __call__(self, a):
        """Both sides of a quantity of the inputs, as they broadcast over the pairs."""
        if self.split is None or a.ndim == 0:
            return a, a
        return a[: self.split or None, None], a[None, self.split :]


class State(eqx.Module):
    """Inputs and their pairs after some layers (see the module's docstring)."""

    side: Side
    pair: Pairing
    z: Float[Array, "..."]
    y: Float[Array, "..."]
    tangent: Float[Array, "..."]
    growth: Growth = eqx.field(static=True)

    @property
    def cos(self):
        return self.y - self.z


class Inputs(eqx.Module):
    """Before the first layer: rows v and units u of the inputs x = v/u."""

    v: Float[Array, "n d"]
    u: Float[Array, " n"]
    pair: Pairing
    growth: Growth = eqx.field(static=True, default=Growth())

    def dense(self, w_std, b_std, growth: Growth) -> State:
        """The state after the first Dense: angles between the augmented rows (w_std v/sqrt d, b_std u).

        Taking them from the augmented vectors keeps a zero input smooth when there is a bias.
        """
        weight = w_std / float_sqrt(self.v.shape[1])
        rows, scale = unit_rows(jnp.concatenate([self.v * weight, (b_std * self.u)[:, None]], axis=1))
        if self.pair.split is None:
            z, y = jnp.zeros_like(scale), jnp.ones_like(scale)
        else:
            z, y = half_angles(rows, self.pair.split, jnp.concatenate([self.v, self.u[:, None]], axis=1))
        return State(Side(scale, self.u), self.pair, z, y, y - z, growth)
