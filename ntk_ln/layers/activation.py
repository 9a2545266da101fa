"""Activation: an elementwise function; its integrals live in ntk_ln.activations."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from ntk_ln.activations import AbstractActivation, activation_by_name
from ntk_ln.layers._base import AbstractLayer
from ntk_ln.layers._state import Growth, Inputs, Side, State


class Activation(AbstractLayer):
    """An elementwise activation phi.

        t <- t E[phi'(a) phi'(b)] + g E[phi'(a) phi'(b) a b],   s <- E[phi(a) phi(b)],   (a, b) Gaussian with moments (q, q', s).

    Args:
        fn: a name, one of relu, leaky_relu(slope), abs, identity, step, relu_power(degree), erf, gelu; or an object of an
            `AbstractActivation` class.
        **params: the named activation's parameters, for example `Activation("leaky_relu", slope=0.2)`.

    Raises:
        ValueError: an unknown name, or parameters it does not take.

    References:
        Cho & Saul (2009), "Kernel methods for deep learning", eq. 5 (homogeneous family); Williams (1996) (erf).

    >>> Activation("leaky_relu", slope=0.2)
    Activation('leaky_relu', slope=0.2)
    """

    fn: AbstractActivation = eqx.field(static=True)

    def __init__(self, fn: str | AbstractActivation, **params: float):
        if isinstance(fn, str):
            self.fn = activation_by_name(fn, **params)
        elif isinstance(fn, AbstractActivation) and not params:
            self.fn = fn
        else:
            raise TypeError(
                f"`Activation(fn, **params)` needs a name, or an AbstractActivation and no parameters. Got {fn!r}, {params}."
            )

    def __repr__(self) -> str:
        return f"Activation({', '.join([repr(self.fn.name), *(f'{k}={v}' for k, v in self.fn.params.items())])})"

    def init(self, key, n_in, n_out, dtype):
        return {}

    def apply(self, params, x: Float[Array, "n n_in"]) -> Float[Array, "n n_in"]:
        return self.fn(x)

    def grow(self, growth: Growth) -> Growth:
        if not growth.gaussian:
            where = "the raw input" if growth.raw else "an activation, or a norm or skip after one"
            raise ValueError(
                f"an activation (here {self.fn.name}) needs Gaussian units, so it may not follow {where}: put a Dense between"
            )
        p = growth.mean
        return Growth(
            mean=self.fn.degree * p,
            diag=growth.diag + self.fn.derivative_growth * p,
            gaussian=False,
            raw=False,
            normalised=growth.normalised,
            constant=growth.constant,
            monotone=growth.monotone and (growth.constant or (self.fn.homogeneous and self.fn.degree == 1)),
            assumption=growth.assumption and (growth.normalised or self.fn.degree > 0.5),
        )

    def propagate(self, state: State | Inputs) -> State:
        growth = self.grow(state.growth)
        assert isinstance(state, State)
        gain = state.growth.gain
        scale, mean = self.fn.moments(state.side)
        dual = self.fn.dual(state.z, state.y, state.side, state.pair)
        tangent = state.tangent * dual.dot
        if gain:
            tangent = tangent + gain * self.fn.gain_dual(state.z, state.y, state.side, state.pair)
        unit = state.side.unit if self.fn.degree == 1 else state.side.unit**self.fn.degree
        return State(Side(scale, unit, mean), state.pair, dual.z, dual.y, tangent, growth)

    def to_config(self) -> dict[str, Any]:
        return {"layer": "activation", "name": self.fn.name, **self.fn.params}
