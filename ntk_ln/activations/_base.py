"""The protocol of an activation: the function and its Gaussian integrals, free of scale."""

from abc import abstractmethod
from functools import cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ntk_ln._numerics import Num


class Dual(NamedTuple):
    """Half-angle coordinates of (phi(a), phi(b)) and E[phi'(a) phi'(b)] F F'/(F_new F_new')."""

    z: Num
    y: Num
    dot: Num


class AbstractActivation(eqx.Module):
    """An activation phi and its integrals against Gaussian pairs.

    Of each input `side` has scale F and unit e: the Gaussian has standard deviation F in hat coordinates, in which the
    activation is phi_e(w) = e^n phi(w/e), n its degree; e = 0 is the far limit. All but F itself depend on e/F alone. A pair
    has z = (1 - cos)/2 and y = (1 + cos)/2 of the correlation cos, and `pair(a)` gives both sides of a quantity a of the inputs;
    `pair.acute` says that cos >= 0 is known.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in configurations."""

    @property
    def params(self) -> dict[str, float]:
        """The parameters in configurations."""
        return {}

    @property
    @abstractmethod
    def degree(self) -> float:
        """n with phi(c w)/c^n -> a homogeneous function of w as c -> infinity."""

    @property
    @abstractmethod
    def derivative_growth(self) -> float:
        """E[phi'(a)^2] grows as F^(2 * this)."""

    @property
    def homogeneous(self) -> bool:
        """Whether phi is positively homogeneous itself, not only far out."""
        return False

    @property
    def non_negative(self) -> bool:
        """Whether phi >= 0 everywhere: then so is every E[phi phi]."""
        return False

    @property
    def error(self) -> float:
        """A bound of the relative error of its integrals beyond rounding; 0 for closed forms."""
        return 0.0

    def coarser(self) -> "AbstractActivation":
        """The same activation with fewer quadrature nodes; itself where there is no quadrature."""
        return self

    @property
    def value_at_zero(self) -> float:
        """phi(0)."""
        return _value_at_zero(self)

    @property
    def far_limit(self) -> bool:
        """Whether phi(c w)/c^n tends to a homogeneous function of w as c -> infinity."""
        return True

    @abstractmethod
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """phi, elementwise."""

    @abstractmethod
    def moments(self, side: Any) -> tuple[Num, Num | None]:
        """F_new = sqrt(E[phi_e(a)^2]) and the mean E[phi_e(a)]/F_new (None where it is 0)."""

    @abstractmethod
    def dual(self, z: Num, y: Num, side: Any, pair: Any) -> Dual:
        """The new half-angle coordinates and E[phi'_e(a) phi'_e(b)] F F'/(F_new F_new')."""

    @abstractmethod
    def gain_dual(self, z: Num, y: Num, side: Any, pair: Any) -> Num:
        """E[phi'_e(a) phi'_e(b) a b]/(F_new F_new'): what a trained gain before the activation contributes."""

    @abstractmethod
    def second_moment(self) -> float:
        """E[phi(a)^2] for a ~ N(0, 1): 1/c_phi of the paper."""


@cache
def _value_at_zero(phi: AbstractActivation) -> float:
    with jax.ensure_compile_time_eval():
        return float(phi(jnp.zeros(())))
