"""Dense: a fully connected layer in NTK parametrisation."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ntk_ln._numerics import complement, divide, hypot, split
from ntk_ln.layers._base import AbstractLayer, Units, is_zero, non_negative
from ntk_ln.layers._state import Growth, Inputs, Side, State


class Dense(AbstractLayer):
    r"""Fully connected layer in NTK parametrisation.

        z = w_std / sqrt(n_in) * W a + b_std * b,   entries of W, b ~ N(0, 1), W and b trained.

    Infinite width, with W = w_std^2, B = b_std^2:  t <- W (t + g s) + W s + B,  s <- W s + B,  q <- W q + B.

    Args:
        w_std: standard deviation of the weights before the 1/sqrt(n_in), >= 0; differentiable.
        b_std: standard deviation of the biases, >= 0; differentiable.

    Raises:
        ValueError: a negative or non-finite scale.

    References:
        Jacot, Gabriel, Hongler (2018), "Neural Tangent Kernel", section 4 (parametrisation); Lee et al. (2019), eq. 1.

    >>> Dense(w_std=2**0.5, b_std=0.1)
    Dense(w_std=1.4142135623730951, b_std=0.1)
    """

    w_std: float | Float[Array, ""]
    b_std: float | Float[Array, ""]

    def __init__(self, *, w_std: float | Float[Array, ""] = 1.0, b_std: float | Float[Array, ""] = 0.0):
        self.w_std = non_negative(w_std, "Dense(w_std=...)")
        self.b_std = non_negative(b_std, "Dense(b_std=...)")

    # Finite width

    def init(self, key, n_in, n_out, dtype):
        w_key, b_key = jax.random.split(key)
        return {"w": jax.random.normal(w_key, (n_in, n_out), dtype), "b": jax.random.normal(b_key, (n_out,), dtype)}

    def apply(self, params, x):
        weights = jnp.asarray(self.w_std / x.shape[1] ** 0.5, x.dtype)
        product = jnp.matmul(x, params["w"], precision=jax.lax.Precision.HIGHEST)
        return weights * product + (jnp.asarray(self.b_std, x.dtype) * params["b"])[None, :]

    def ntk_share(self, params, x1, g1, x2, g2):
        # sum over weights of df/dW df'/dW: one product of inputs times one of signals, never a Jacobian.
        # Rows are brought to order 1 first: far from the data inputs are huge and, under a norm, signals as tiny.
        highest = jax.lax.Precision.HIGHEST
        (a1, g1, size1), (a2, g2, size2) = self._rows(x1, g1), self._rows(x2, g2)
        product = jnp.matmul(a1, a2.T, precision=highest) * jnp.matmul(g1, g2.T, precision=highest)
        return size1[:, None] * (product * size2[None, :])

    def _rows(self, x, g):
        weight, bias = jnp.asarray(self.w_std / x.shape[1] ** 0.5, x.dtype), jnp.asarray(self.b_std, x.dtype)
        rows = jnp.concatenate([x * weight, jnp.broadcast_to(bias, (len(x), 1))], axis=1)
        row_size, signal_size = jnp.max(jnp.abs(rows), axis=1), jnp.max(jnp.abs(g), axis=1)
        return divide(rows, row_size[:, None]), divide(g, signal_size[:, None]), row_size * signal_size

    # Infinite width

    def grow(self, growth: Growth) -> Growth:
        return growth.after_dense(has_bias=not is_zero(self.b_std), has_weights=not is_zero(self.w_std))

    def at_zero(self, units: Units) -> Units:
        return Units.ZERO if units is Units.ZERO and is_zero(self.b_std) else Units.RANDOM

    def propagate(self, state: State | Inputs) -> State:
        if isinstance(state, Inputs):
            return state.dense(self.w_std, self.b_std)
        side, a, b = self._side(state.side)
        (a1, a2), (b1, b2) = state.pair(a), state.pair(b)
        gap = split(a1, b1, a2, b2)
        z, y = complement(a1 * a2 * state.z + gap, a1 * a2 * state.y + b1 * b2 + gap, acute=state.acute)
        tangent = a1 * a2 * (state.tangent + (state.gain + 1) * state.cos) + b1 * b2
        return State(side, state.u, state.pair, z, y, tangent, state.power, acute=state.acute)

    def _side(self, side: Side):
        """The new side, and the shares a^2 + b^2 = 1 of weights and biases in its second moment."""
        scale = hypot(self.w_std * side.scale, self.b_std * side.unit)
        return (
            Side(scale, side.unit),
            divide(self.w_std * side.scale, scale, 1.0),
            divide(self.b_std * side.unit, scale, 0.0),
        )

    def to_config(self) -> dict[str, Any]:
        return {"layer": "dense", "w_std": float(self.w_std), "b_std": float(self.b_std)}
