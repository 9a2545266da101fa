"""LayerNorm: before or after an activation, or on the raw input."""

from typing import Any

import jax
import jax.numpy as jnp

from ntk_ln._numerics import complement, divide, split, sqrt
from ntk_ln.layers._base import Units, is_zero
from ntk_ln.layers._norm import AbstractNorm, normalised_rows, normalised_side
from ntk_ln.layers._state import Inputs, State


class LayerNorm(AbstractNorm):
    r"""Layer normalisation over the units of a layer, before or after an activation, or over the features of x.

        a <- (a - mean(a)) / sqrt(var(a) + eps),   population variance; affine: gain (start 1) and shift (start 0) are trained too.

    Infinite width, with k = q - m^2, D = sqrt(k + eps) sqrt(k' + eps):  s <- (s - m m')/D,  t <- t/D + g m m'/D,
    q <- k/(k + eps),  m <- 0;  affine: t <- t + 1, g <- g + 1. One such layer bounds Theta(x,x) (Theorem 3.2).
    On the raw input there is no limit: the d >= 2 features of each row are normalised exactly.

    Args:
        eps: added to the variance, >= 0; differentiable.
        affine: whether a gain and a shift are trained; not on the raw input.

    Raises:
        ValueError: a negative eps.

    References:
        Ba, Kiros, Hinton (2016), eq. 3; Ziomek, Whittle, Osborne (2025), section 3.

    >>> LayerNorm(eps=1e-5)
    LayerNorm(eps=1e-05)
    """

    # Finite width

    def init(self, key, n_in, n_out, dtype):
        return {"gain": jnp.ones(n_in, dtype), "shift": jnp.zeros(n_in, dtype)} if self.affine else {}

    def apply(self, params, x):
        normalised = self._normalise(x)
        return normalised * params["gain"][None, :] + params["shift"][None, :] if self.affine else normalised

    def _normalise(self, x):
        return normalised_rows(centred(x), self.eps)

    def ntk_share(self, params, x1, g1, x2, g2):
        if not self.affine:
            return None
        highest = jax.lax.Precision.HIGHEST
        gains = jnp.matmul(g1 * self._normalise(x1), (g2 * self._normalise(x2)).T, precision=highest)
        return gains + jnp.matmul(g1, g2.T, precision=highest)

    # Infinite width

    def at_zero(self, units: Units) -> Units:
        if units in (Units.ZERO, Units.EQUAL):
            return Units.UNDEFINED if is_zero(self.eps) else Units.ZERO
        return units

    def propagate(self, state: State | Inputs) -> State | Inputs:
        if isinstance(state, Inputs):
            rows = normalised_rows(centred(state.v), self.eps, state.unit[:, None])
            return Inputs(rows, jnp.ones_like(state.u), state.pair, 0.0)
        z, y, tangent = state.z, state.y, state.tangent
        mean, deviation = state.side.mean, state.side.scale
        if mean is not None:
            kappa = sqrt(1 - mean * mean)  # sqrt(k/q)
            deviation = deviation * kappa
            (m1, m2), (kap1, kap2) = state.pair(mean), state.pair(kappa)
            gap, both = split(kap1, m1, kap2, m2), kap1 * kap2  # 0 where all units are equal: with an eps they become 0
            z, y = complement(divide(z - gap, both), divide(y - m1 * m2 - gap, both))
            tangent = divide(tangent + state.gain * m1 * m2, both)
        side = normalised_side(state.side, deviation, self.eps, None)
        if self.affine:  # the shift is 1 whatever the scale: keep 1/(F F') finite
            side = side._replace(scale=jnp.maximum(side.scale, 16 * jnp.finfo(side.scale.dtype).tiny ** 0.5))
            scale1, scale2 = state.pair(side.scale)
            tangent = tangent + 1 / (scale1 * scale2)
        acute = state.acute and mean is None  # without their mean units are negative as often as positive
        return State(side, state.u, state.pair, z, y, tangent, 0.0, state.gain + self.affine, acute)

    def to_config(self) -> dict[str, Any]:
        return {"layer": "layer_norm", "eps": float(self.eps), "affine": self.affine}


def centred(x):
    """Rows less their mean."""
    # Less one feature first: no large common part is left for the mean to round.
    x = x - x[:, :1]
    return x - jnp.mean(x, axis=1, keepdims=True)
