"""RMSNorm: before or after an activation, or on the raw input."""

from typing import Any

import jax
import jax.numpy as jnp

from ntk_ln.layers._base import Units, is_zero
from ntk_ln.layers._norm import AbstractNorm, normalised_rows, normalised_side
from ntk_ln.layers._state import Inputs, State


class RMSNorm(AbstractNorm):
    r"""Division by the root mean square over the units of a layer, before or after an activation, or over the features of x.

        a <- a / sqrt(mean(a^2) + eps);   affine: a gain (start 1) is trained too.

    Infinite width:  s <- s/D,  t <- t/D,  m <- m/sqrt(q + eps),  q <- q/(q + eps),  D = sqrt(q + eps) sqrt(q' + eps);
    affine: g <- g + 1. It bounds Theta(x,x) as LayerNorm does.
    On the raw input there is no limit: the d features of each row are normalised exactly.

    Args:
        eps: added to the mean square, >= 0; differentiable.
        affine: whether a gain is trained; not on the raw input.

    Raises:
        ValueError: a negative eps.

    References:
        Zhang & Sennrich (2019), "Root mean square layer normalization", eq. 4.

    >>> RMSNorm(eps=1e-5)
    RMSNorm(eps=1e-05)
    """

    # Finite width

    def init(self, key, n_in, n_out, dtype):
        return {"gain": jnp.ones(n_in, dtype)} if self.affine else {}

    def apply(self, params, x):
        normalised = normalised_rows(x, self.eps)
        return normalised * params["gain"][None, :] if self.affine else normalised

    def ntk_share(self, params, x1, g1, x2, g2):
        if not self.affine:
            return None
        rows1, rows2 = g1 * normalised_rows(x1, self.eps), g2 * normalised_rows(x2, self.eps)
        return jnp.matmul(rows1, rows2.T, precision=jax.lax.Precision.HIGHEST)

    # Infinite width

    def at_zero(self, units: Units) -> Units:
        return Units.UNDEFINED if units is Units.ZERO and is_zero(self.eps) else units

    def propagate(self, state: State | Inputs) -> State | Inputs:
        if isinstance(state, Inputs):
            rows = normalised_rows(state.v, self.eps, state.unit[:, None])
            return Inputs(rows, jnp.ones_like(state.u), state.pair, 0.0)
        side = normalised_side(state.side, state.side.scale, self.eps, state.side.mean)
        gain = state.gain + self.affine
        return State(side, state.u, state.pair, state.z, state.y, state.tangent, 0.0, gain, state.acute)

    def to_config(self) -> dict[str, Any]:
        return {"layer": "rms_norm", "eps": float(self.eps), "affine": self.affine}
