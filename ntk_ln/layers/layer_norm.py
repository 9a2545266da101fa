"""LayerNorm: before or after an activation."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ntk_ln._numerics import complement, divide, split, sqrt
from ntk_ln.layers._base import AbstractLayer, is_zero, non_negative
from ntk_ln.layers._state import Growth, Inputs, Side, State


class LayerNorm(AbstractLayer):
    r"""Layer normalisation over the units of a layer, before or after an activation.

        a <- (a - mean(a)) / sqrt(var(a) + eps),   population variance; affine: gain (start 1) and shift (start 0) are trained too.

    Infinite width, with k = q - m^2, D = sqrt(k + eps) sqrt(k' + eps):  s <- (s - m m')/D,  t <- t/D + g m m'/D,
    q <- k/(k + eps),  m <- 0;  affine: t <- t + 1, g <- g + 1. One such layer bounds Theta(x,x) (Theorem 3.2).

    Args:
        eps: added to the variance, >= 0; differentiable.
        affine: whether a gain and a shift are trained.

    Raises:
        ValueError: a negative eps.

    References:
        Ba, Kiros, Hinton (2016), eq. 3; Ziomek, Whittle, Osborne (2025), section 3.

    >>> LayerNorm(eps=1e-5)
    LayerNorm(eps=1e-05, affine=False)
    """

    eps: float | Float[Array, ""]
    affine: bool = eqx.field(static=True)

    def __init__(self, *, eps: float | Float[Array, ""] = 0.0, affine: bool = False):
        self.eps = non_negative(eps, "LayerNorm(eps=...)")
        self.affine = bool(affine)

    # Finite width

    def init(self, key, n_in, n_out, dtype):
        return {"gain": jnp.ones(n_in, dtype), "shift": jnp.zeros(n_in, dtype)} if self.affine else {}

    def apply(self, params, x):
        normalised = self._normalise(x)
        return normalised * params["gain"][None, :] + params["shift"][None, :] if self.affine else normalised

    def _normalise(self, x):
        centred = x - jnp.mean(x, axis=1, keepdims=True)
        root_eps = sqrt(jnp.asarray(self.eps, x.dtype))
        # The size cancels, so it carries no derivative; without it squares over- and underflow.
        size = jax.lax.stop_gradient(jnp.maximum(jnp.max(jnp.abs(centred), axis=1, keepdims=True), root_eps))
        scaled, root = divide(centred, size), divide(root_eps, size)
        return scaled * jax.lax.rsqrt(jnp.mean(scaled * scaled, axis=1, keepdims=True) + root * root)

    def ntk_share(self, params, x1, g1, x2, g2):
        if not self.affine:
            return None
        highest = jax.lax.Precision.HIGHEST
        gains = jnp.matmul(g1 * self._normalise(x1), (g2 * self._normalise(x2)).T, precision=highest)
        return gains + jnp.matmul(g1, g2.T, precision=highest)

    # Infinite width

    def grow(self, growth: Growth) -> Growth:
        if growth.raw:
            raise ValueError("LayerNorm on the raw input is not supported yet: put a Dense before it, or normalise the rows of x")
        return replace(
            growth,
            mean=0.0,
            diag=growth.diag - growth.mean,
            gain=growth.gain + self.affine,
            normalised=True,
            constant=growth.constant or is_zero(self.eps),
        )

    def propagate(self, state: State | Inputs) -> State:
        growth = self.grow(state.growth)
        assert isinstance(state, State)
        z, y, tangent = state.z, state.y, state.tangent
        side, kappa = self._side(state.side)
        if state.side.mean is not None:
            (m1, m2), (kap1, kap2) = state.pair(state.side.mean), state.pair(kappa)
            kappa = kap1 * kap2
            gap = split(kap1, m1, kap2, m2)
            z, y = complement((z - gap) / kappa, (y - m1 * m2 - gap) / kappa)
            tangent = (tangent + state.growth.gain * m1 * m2) / kappa
        if self.affine:
            scale1, scale2 = state.pair(side.scale)
            tangent = tangent + 1 / (scale1 * scale2)
        return State(side, state.pair, z, y, tangent, growth)

    def _side(self, side: Side):
        """The new side, and kappa = sqrt(k/q), the share of the standard deviation in the root mean square."""
        kappa = 1.0 if side.mean is None else sqrt(1 - side.mean * side.mean)
        deviation = side.scale * kappa
        # Both may be tiny (|x| = 1e-300 without biases): their ratio is all that counts.
        size = jax.lax.stop_gradient(jnp.maximum(deviation, side.unit))
        d, e = divide(deviation, size, 1.0), divide(side.unit, size)
        scale = divide(d, sqrt(d * d + self.eps * (e * e)), 1.0)
        if self.affine:  # the shift is 1 whatever the scale: keep 1/(F F') finite
            scale = jnp.maximum(scale, 16 * jnp.finfo(scale.dtype).tiny ** 0.5)
        return Side(scale, jnp.ones_like(side.unit)), kappa

    def to_config(self) -> dict[str, Any]:
        return {"layer": "layer_norm", "eps": float(self.eps), "affine": self.affine}
