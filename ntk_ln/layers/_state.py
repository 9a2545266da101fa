"""What the layers pass on: the state of a pair of inputs in homogeneous coordinates.

An input x = v/u is a point of a half-sphere, u = 0 the point at infinity in direction v. Each side carries the scale
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
    """One side of a pair: scale F, unit e, mean over units (None where it is 0), broadcast against the pair's arrays."""

    scale: Float[Array, "..."]
    unit: Float[Array, "..."]
    mean: Float[Array, "..."] | None = None

    def point(self, weight: float):
        """(weight F, e) on the unit circle: all that a function of e/F needs."""
        h = hypot(weight * self.scale, self.unit)
        return divide(weight * self.scale, h), divide(self.unit, h, 1.0)


class State(eqx.Module):
    """A pair of inputs after some layers (see the module's docstring)."""

    one: Side
    two: Side
    z: Float[Array, "..."]
    y: Float[Array, "..."]
    tangent: Float[Array, "..."]
    growth: Growth = eqx.field(static=True)

    @property
    def cos(self):
        return self.y - self.z


class Inputs(eqx.Module):
    """The pair before the first layer: rows v and units u of each side; `two` is None for the diagonal Theta(x, x)."""

    one: tuple[Float[Array, "n1 d"], Float[Array, " n1"]]
    two: tuple[Float[Array, "n2 d"], Float[Array, " n2"]] | None
    same: bool = eqx.field(static=True, default=False)
    growth: Growth = eqx.field(static=True, default=Growth())

    def dense(self, w_std, b_std, growth: Growth) -> State:
        """The state after the first Dense: angles between the augmented rows (w_std v/sqrt d, b_std u).

        Taking them from the augmented vectors keeps a zero input smooth when there is a bias.
        """

        def augmented(v, u):
            rows = jnp.concatenate([v * (w_std / float_sqrt(v.shape[1])), (b_std * u)[:, None]], axis=1)
            return unit_rows(rows)

        a1, f1 = augmented(*self.one)
        u1 = self.one[1]
        if self.two is None:
            one = two = Side(f1, u1)
            z, y = jnp.zeros_like(f1), jnp.ones_like(f1)
        else:
            a2, f2 = augmented(*self.two)
            u2 = self.two[1]
            one, two = Side(f1[:, None], u1[:, None]), Side(f2[None, :], u2[None, :])
            z, y = half_angles(a1, None if self.same else a2)
        return State(one, two, z, y, y - z, growth)
