"""Residual: a skip connection around a body of layers."""

from dataclasses import replace
from math import inf
from typing import Any

import jax
import jax.numpy as jnp

from ntk_ln._numerics import complement, divide, hypot, split
from ntk_ln.layers._base import AbstractLayer, Units
from ntk_ln.layers._state import Growth, Inputs, Side, State, larger, power_of
from ntk_ln.layers.dense import Dense


class Residual(AbstractLayer):
    r"""A skip connection: y = a + body(a).

    Infinite width: q, s and t are those before it plus the body's, which is independent of them (its last Dense is); the mean is
    the trunk's. A norm inside the body does not bound the network, the trunk passes it by; one on the trunk does.

    Args:
        *body: layers, the last a Dense (or a Residual that ends in one).

    Raises:
        TypeError: something that is not a layer.
        ValueError: a body that does not end in a Dense.

    References:
        He et al. (2016), eq. 1; Huang, Wang, Tao, Zhao (2020), "Why do deep residual networks generalize better than deep
        feedforward networks?", section 3.

    >>> from ntk_ln import Activation
    >>> Residual(Activation("relu"), Dense(w_std=2**0.5))
    Residual(Activation('relu'), Dense(w_std=1.4142135623730951, b_std=0.0))
    """

    body: tuple[AbstractLayer, ...]

    def __init__(self, *body: AbstractLayer):
        for position, layer in enumerate(body):
            if not isinstance(layer, AbstractLayer):
                raise TypeError(f"`Residual(*body)` needs layers. Argument {position} is {layer!r}.")
        if not ends_in_dense(body):
            last = repr(body[-1]) if body else "nothing"
            raise ValueError(f"`Residual(*body)` needs a Dense as the last layer of its body. Got {last}.")
        self.body = tuple(body)

    def __repr__(self) -> str:
        return f"Residual({', '.join(map(repr, self.body))})"

    # Finite width

    def init(self, key, n_in, n_out, dtype):
        keys = jax.random.split(key, len(self.body))
        return tuple(layer.init(layer_key, n_in, n_in, dtype) for layer, layer_key in zip(self.body, keys, strict=True))

    def apply(self, params, x):
        y = x
        for layer, layer_params in zip(self.body, params, strict=True):
            y = layer.apply(layer_params, y)
        return x + y

    def apply_batch(self, params, x):
        y, kept = x, []
        for layer, layer_params in zip(self.body, params, strict=True):
            y, layer_params = layer.apply_batch(layer_params, y)
            kept.append(layer_params)
        return x + y, tuple(kept)

    # Infinite width

    def grow(self, growth: Growth) -> Growth:
        if growth.raw:
            raise ValueError("a skip around the raw input joins its d features to infinitely many units: put a Dense before it")
        if growth.gain:
            raise ValueError("a trained gain right before a skip has no rule: put a Dense between, or affine=False")
        inside = growth
        for position, layer in enumerate(self.body):
            try:
                inside = layer.grow(inside)
            except ValueError as error:
                raise ValueError(f"layer {position} of its body, {layer!r}: {error}") from None
        lag = abs(growth.mean - inside.mean)
        return replace(
            inside,
            mean=larger(growth.mean, inside.mean),
            diag=larger(growth.diag, inside.diag),
            gaussian=growth.gaussian,
            normalised=growth.normalised,
            constant=growth.constant,
            cut=growth.cut,
            monotone=inside.monotone and growth.constant,
            assumption=growth.assumption and inside.assumption,
            correction=min(inside.correction, lag or inf),
        )

    def at_zero(self, units: Units) -> Units:
        inside = units
        for layer in self.body:
            inside = layer.at_zero(inside)
        return units if inside is Units.ZERO else inside

    def propagate(self, state: State | Inputs) -> State:
        assert isinstance(state, State)
        inside: Any = state
        for layer in self.body:
            inside = layer.propagate(inside)
        # Both in the larger exponent: the other's scale is smaller by a power of u, which vanishes at infinity.
        power = max(state.power, inside.power)
        trunk = state.side.scale * power_of(state.u, power - state.power)
        body = inside.side.scale * power_of(state.u, power - inside.power)
        scale = hypot(trunk, body)
        a, b = divide(trunk, scale, 1.0), divide(body, scale)
        (a1, a2), (b1, b2) = state.pair(a), state.pair(b)
        aa, bb, gap = a1 * a2, b1 * b2, split(a1, b1, a2, b2)
        acute = state.acute and inside.acute
        z, y = complement(aa * state.z + bb * inside.z + gap, aa * state.y + bb * inside.y + gap, acute=acute)
        tangent = aa * state.tangent + bb * inside.tangent
        mean = None if state.side.mean is None else jnp.broadcast_to(a * state.side.mean, a.shape)
        side = Side(scale, power_of(state.u, power), mean)
        return State(side, state.u, state.pair, z, y, tangent, power, acute=acute)

    def to_config(self) -> dict[str, Any]:
        return {"layer": "residual", "body": [layer.to_config() for layer in self.body]}


def ends_in_dense(layers: tuple[AbstractLayer, ...]) -> bool:
    """Whether the last layer is a Dense, or a Residual that ends in one."""
    return bool(layers) and isinstance(layers[-1], Dense | Residual)
