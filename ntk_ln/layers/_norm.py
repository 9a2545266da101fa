"""What LayerNorm and RMSNorm share: the division by the root mean square, of rows and of infinitely many units."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ntk_ln._numerics import divide, sqrt
from ntk_ln.layers._base import AbstractLayer, is_zero, non_negative
from ntk_ln.layers._state import Growth, Side


class AbstractNorm(AbstractLayer):
    """A norm layer: eps is added to the mean square; with `affine` a gain (and a shift where there is one) is trained."""

    eps: float | Float[Array, ""] = 0.0
    affine: bool = eqx.field(static=True, default=False)

    def __init__(self, *, eps: float | Float[Array, ""] = 0.0, affine: bool = False):
        self.eps = non_negative(eps, f"{type(self).__name__}(eps=...)")
        self.affine = bool(affine)

    def grow(self, growth: Growth) -> Growth:
        if growth.raw and self.affine:
            raise ValueError(
                "a trained gain on the raw input has no deterministic limit (d features, not a width): use affine=False there"
            )
        return growth.after_norm(gains=int(self.affine), has_eps=not is_zero(self.eps))


def normalised_rows(x, eps, unit: Any = 1.0):
    """x / sqrt(mean(x^2) + eps unit^2), row by row, without over- or underflow; 0 where that is 0/0."""
    root_eps = sqrt(jnp.asarray(eps, x.dtype)) * jnp.asarray(unit, x.dtype)
    # The size cancels, so it carries no derivative; without it squares over- and underflow.
    size = jax.lax.stop_gradient(jnp.maximum(jnp.max(jnp.abs(x), axis=1, keepdims=True), root_eps))
    scaled, root = divide(x, size), divide(root_eps, size)
    return divide(scaled, sqrt(jnp.mean(scaled * scaled, axis=1, keepdims=True) + root * root))


def normalised_scale(scale, unit, eps):
    """F / sqrt(F^2 + eps e^2), and 1 where both are 0."""
    # Both may be tiny (|x| = 1e-300 without biases): their ratio is all that counts.
    size = jax.lax.stop_gradient(jnp.maximum(scale, unit))
    f, e = divide(scale, size, 1.0), divide(unit, size)
    return divide(f, sqrt(f * f + eps * (e * e)), 1.0)


def normalised_side(side: Side, deviation, eps, mean) -> Side:
    """The side after a norm whose units have root mean square `deviation` before it; e is 1 from here on."""
    return Side(normalised_scale(deviation, side.unit, eps), jnp.ones_like(side.unit), mean)
