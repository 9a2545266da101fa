"""Activations: each file a family with its Gaussian integrals. A new one is a new file and its `NAMES` here."""

from collections.abc import Callable

from ntk_ln.activations import elu, erf, gelu, homogeneous, silu, softplus, tanh, trigonometric
from ntk_ln.activations._base import AbstractActivation, Dual
from ntk_ln.activations._quadrature import AbstractQuadrature
from ntk_ln.activations.elu import Elu
from ntk_ln.activations.erf import Erf
from ntk_ln.activations.gelu import Gelu
from ntk_ln.activations.homogeneous import Homogeneous
from ntk_ln.activations.numeric import Numeric
from ntk_ln.activations.silu import Silu
from ntk_ln.activations.softplus import Softplus
from ntk_ln.activations.tanh import Tanh
from ntk_ln.activations.trigonometric import Cos, Sin

NAMES: dict[str, Callable[..., AbstractActivation]] = {
    name: make
    for family in (homogeneous, erf, gelu, silu, tanh, softplus, elu, trigonometric)
    for name, make in family.NAMES.items()
}


def activation_by_name(name: str, **params: float) -> AbstractActivation:
    """The activation of a configuration; raises `ValueError` on an unknown name or parameter."""
    if name not in NAMES:
        raise ValueError(f"`Activation(name)` knows {', '.join(NAMES)}. Got {name!r}.")
    try:
        return NAMES[name](**params)
    except TypeError:
        raise ValueError(f"`Activation({name!r}, ...)` does not take these parameters. Got {params}.") from None


__all__ = [
    "NAMES",
    "AbstractActivation",
    "AbstractQuadrature",
    "Cos",
    "Dual",
    "Elu",
    "Erf",
    "Gelu",
    "Homogeneous",
    "Numeric",
    "Silu",
    "Sin",
    "Softplus",
    "Tanh",
    "activation_by_name",
]
