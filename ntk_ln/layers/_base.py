"""The protocol of a layer: its finite form beside its infinite-width rule."""

from abc import abstractmethod
from enum import Enum
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray

from ntk_ln._dtype import is_tracer
from ntk_ln.layers._state import Growth, Inputs, State

Params = Any  # a dictionary of arrays; of a Residual a tuple of its body's


class Units(Enum):
    """What an input of zeros makes of a layer's units."""

    ZERO = "all 0"
    EQUAL = "all the same"
    RANDOM = "different from each other"
    UNDEFINED = "0/0"


class AbstractLayer(eqx.Module):
    """One layer of a network. A new layer is one new file with one subclass.

    Finite width: `init`, `apply`, `ntk_share`, and `apply_batch` where rows are coupled in training. Infinite width: `grow` (what
    is known without numbers: exponents, Gaussianity; raises `ValueError` where the layer may not stand), `at_zero` and `propagate`
    (the state of a pair).
    """

    @abstractmethod
    def init(self, key: PRNGKeyArray, n_in: int, n_out: int, dtype: Any) -> Params:
        """Random parameters; {} for a layer without any."""

    @abstractmethod
    def apply(self, params: Params, x: Float[Array, "n n_in"]) -> Float[Array, "n n_out"]:
        """The layer of a finite network, row by row."""

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the parameters that are not trained but kept of the batch."""
        return ()

    def apply_batch(self, params: Params, x: Float[Array, "n n_in"]) -> tuple[Float[Array, "n n_out"], Params]:
        """The layer in training, and its parameters with what it keeps of the batch: nothing, unless it couples the rows."""
        return self.apply(params, x), params

    def ntk_share(
        self,
        params: Params,
        x1: Float[Array, "n1 n_in"],
        g1: Float[Array, "n1 n_out"],
        x2: Float[Array, "n2 n_in"],
        g2: Float[Array, "n2 n_out"],
    ) -> Float[Array, "n1 n2"] | None:
        """This layer's share of the empirical NTK, from its inputs x and the signals g at its outputs; None without parameters."""
        return None

    @abstractmethod
    def grow(self, growth: Growth) -> Growth:
        """Exponents and Gaussianity after this layer."""

    @abstractmethod
    def at_zero(self, units: Units) -> Units:
        """The units after this layer for an input of zeros."""

    @abstractmethod
    def propagate(self, state: State | Inputs) -> State | Inputs:
        """The state of a pair after this layer."""

    @abstractmethod
    def to_config(self) -> dict[str, Any]:
        """Plain values from which `network_from_config` builds the layer again."""


def is_zero(value: Any) -> bool:
    """Whether a scale is known to be 0 (a traced one is not)."""
    return not is_tracer(value) and float(value) == 0.0


def non_negative(value: Any, call: str) -> Any:
    """A scale as it was given; a concrete one must be a finite number >= 0."""
    if is_tracer(value):
        return value
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except OverflowError:
        raise ValueError(f"`{call}` needs a finite number >= 0. Got one beyond the floats.") from None
    except (TypeError, ValueError):
        # Pytree transformations rebuild modules with placeholders for leaves; only numbers can be judged.
        if isinstance(value, str | bytes | list | tuple | dict) or value is None:
            raise TypeError(f"`{call}` needs a number. Got {value!r}.") from None
        return value
    if not 0 <= number < float("inf"):
        raise ValueError(f"`{call}` needs a finite number >= 0. Got {value!r}.")
    return value
