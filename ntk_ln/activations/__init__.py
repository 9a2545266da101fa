"""Activations: each file a family with its Gaussian integrals. A new one is a new file and its `NAMES` here."""

from collections.abc import Callable

from ntk_ln.activations import erf, gelu, homogeneous
from ntk_ln.activations._base import AbstractActivation, Dual
from ntk_ln.activations.erf import Erf
from ntk_ln.activations.gelu import Gelu
from ntk_ln.activations.homogeneous import Homogeneous

NAMES: dict[str, Callable[..., AbstractActivation]] = {**homogeneous.NAMES, **erf.NAMES, **gelu.NAMES}


def activation_by_name(name: str, **params: float) -> AbstractActivation:
    """The activation of a configuration; raises `ValueError` on an unknown name or parameter."""
    if name not in NAMES:
        raise ValueError(f"`Activation(name)` knows {', '.join(NAMES)}. Got {name!r}.")
    try:
        return NAMES[name](**params)
    except TypeError:
        raise ValueError(f"`Activation({name!r}, ...)` does not take these parameters. Got {params}.") from None


__all__ = ["NAMES", "AbstractActivation", "Dual", "Erf", "Gelu", "Homogeneous", "activation_by_name"]
