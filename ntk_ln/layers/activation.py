"""Activation: an elementwise function; its integrals live in ntk_ln.activations."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import isnan
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ntk_ln._dtype import computing, is_tracer
from ntk_ln.activations import NAMES, AbstractActivation, AbstractQuadrature, Numeric, activation_by_name
from ntk_ln.layers._base import AbstractLayer, Units
from ntk_ln.layers._state import Growth, Inputs, Pairing, Side, State, power_of


class Activation(AbstractLayer):
    """An elementwise activation phi.

        t <- t E[phi'(a) phi'(b)] + g E[phi'(a) phi'(b) a b],   s <- E[phi(a) phi(b)],   (a, b) Gaussian with moments (q, q', s).

    Args:
        fn: a name, one of relu, leaky_relu(slope), abs, identity, step, relu_power(degree), erf, gelu, silu, tanh, softplus,
            elu(alpha), sin, cos; any elementwise function that JAX can differentiate, whose integrals are then computed by
            quadrature; or an object of an `AbstractActivation` class.
        degree: of a function: n with fn(c w)/c^n -> a homogeneous function of w as c -> infinity. Without it all that lies
            infinitely far (`far_field`, `sup_norm`, `kernel_sup`) needs a norm layer before the activation.
        kinks: of a function: where it is not smooth; the quadrature is piecewise between them.
        limit: of a function: (alpha, beta) with fn(x) ~ alpha x^n for x -> inf and beta |x|^n for x -> -inf; estimated by default.
        **params: the named activation's parameters, for example `Activation("leaky_relu", slope=0.2)`.

    Raises:
        TypeError: a function that is not elementwise, real and differentiable by JAX.
        ValueError: an unknown name, or parameters it does not take; a degree the function does not have.

    Accuracy: closed forms to rounding; tanh, silu and softplus by a mixture of closed forms and elu by quadrature, whose
    errors are bounded (`Activation("tanh").fn.error`); functions by quadrature, about 1e-10, see `NTK(net).quadrature_error`.

    References:
        Cho & Saul (2009), "Kernel methods for deep learning", eq. 5 (homogeneous family); Williams (1996) (erf).

    >>> Activation("leaky_relu", slope=0.2)
    Activation('leaky_relu', slope=0.2)
    >>> import jax.numpy as jnp
    >>> Activation(lambda x: x * jnp.tanh(x), degree=1)  # |x| far out
    Activation('<lambda>')
    """

    fn: AbstractActivation = eqx.field(static=True)

    def __init__(
        self,
        fn: str | AbstractActivation | Callable[[Any], Any],
        *,
        degree: float | None = None,
        kinks: Sequence[float] = (),
        limit: tuple[float, float] | None = None,
        **params: float,
    ):
        if isinstance(fn, str):
            if degree is not None:
                params["degree"] = degree
            if kinks != () or limit is not None:
                raise TypeError(f"`Activation(name)` knows the kinks and the limit of {fn!r}. Got kinks={kinks}, limit={limit}.")
            self.fn = activation_by_name(fn, **params)
            return
        if params:
            raise TypeError(f"`Activation(fn)` takes degree, kinks and limit beside a function. Got {', '.join(params)}.")
        if isinstance(fn, AbstractActivation):
            if degree is not None or kinks != () or limit is not None:
                raise TypeError("`Activation(fn)` takes nothing beside an AbstractActivation, which knows its degree and kinks.")
            self.fn = fn
        elif callable(fn):
            self.fn = Numeric(fn, degree, kinks, limit)
        else:
            raise TypeError(f"`Activation(fn)` needs a name, a function or an AbstractActivation. Got {fn!r}.")

    def kappa(self, rho: Any, q: float = 1.0) -> Any:
        """E[phi(a) phi(b)] for Gaussian (a, b) of variance q and correlation rho: the layer's profile.

        By Price's theorem its derivative by rho is q * kappa_dot(rho, q).

        Args:
            rho: correlations in [-1, 1], any shape.
            q: the variance, > 0.

        >>> Activation("relu").kappa(1.0)  # E[max(a, 0)^2]
        array(0.5)
        """
        return self._profile("kappa", rho, q)

    def kappa_dot(self, rho: Any, q: float = 1.0) -> Any:
        """E[phi'(a) phi'(b)], as `kappa`.

        >>> Activation("relu").kappa_dot(0.0)
        array(0.25)
        """
        return self._profile("kappa_dot", rho, q)

    def _profile(self, name: str, rho: Any, q: float) -> Any:
        call = f"Activation(...).{name}(rho, q)"
        if not is_tracer(q) and not 0 < q < float("inf"):
            raise ValueError(f"`{call}` needs a finite variance q > 0. Got {q!r}.")
        with computing(call, correlations(rho, call), traced=is_tracer(rho) or is_tracer(q)) as inputs:
            value = _kappas(self.fn, inputs.x1[:, 0], jnp.asarray(q, inputs.x1.dtype))[name].reshape(np.shape(rho))
            return inputs.give_back(value)

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
        p, reached = growth.mean, growth.mean > 0
        return replace(
            growth,
            mean=self.fn.degree * p if reached else p,
            diag=growth.diag + self.fn.derivative_growth * p if reached else growth.diag,
            gaussian=False,
            gain=0,
            monotone=growth.monotone and (growth.constant or (self.fn.homogeneous and self.fn.degree == 1)),
            assumption=growth.assumption and (growth.normalised or self.fn.degree > 0.5),
            numeric=growth.numeric or (reached and isinstance(self.fn, AbstractQuadrature)),
            no_limit=growth.no_limit or (self.fn.name if reached and not self.fn.far_limit else None),
        )

    def at_zero(self, units: Units) -> Units:
        return Units.EQUAL if units is Units.ZERO and self.fn.value_at_zero != 0 else units

    def propagate(self, state: State | Inputs) -> State:
        assert isinstance(state, State)
        gain = state.gain
        scale, mean = self.fn.moments(state.side)
        pair = Pairing(state.pair.split, state.acute)
        dual = self.fn.dual(state.z, state.y, state.side, pair)
        tangent = state.tangent * dual.dot
        if gain:
            tangent = tangent + gain * self.fn.gain_dual(state.z, state.y, state.side, pair)
        # An activation of unknown degree is taken as it is, without a scale.
        power = 0.0 if isnan(self.fn.degree) else self.fn.degree * state.power
        side = Side(scale, power_of(state.u, power), mean)
        return State(side, state.u, state.pair, dual.z, dual.y, tangent, power, acute=self.fn.non_negative)

    def to_config(self) -> dict[str, Any]:
        if self.fn.name not in NAMES:
            raise ValueError(f"`net.to_config()`: {self!r} is a function of your own, which plain values cannot describe.")
        return {"layer": "activation", "name": self.fn.name, **self.fn.params}


def correlations(rho: Any, call: str) -> Any:
    """Correlations as a column, of whatever shape they come in."""
    column = (rho if isinstance(rho, jax.Array) else np.asarray(rho)).reshape(-1, 1)
    if not is_tracer(column) and bool(((column < -1) | (column > 1)).any()):
        raise ValueError(f"`{call}` needs correlations in [-1, 1]. Got {rho!r}.")
    return column


@partial(jax.jit, static_argnums=0)
def _kappas(phi: AbstractActivation, rho, q):
    std = jnp.full_like(rho, jnp.sqrt(q))
    side, pair = Side(std, jnp.ones_like(rho)), Pairing(None)
    scale, _ = phi.moments(side)
    dual = phi.dual((1 - rho) / 2, (1 + rho) / 2, side, pair)
    return {"kappa": scale**2 * (dual.y - dual.z), "kappa_dot": dual.dot * (scale / std) ** 2}
