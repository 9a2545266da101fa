"""The same finite network in the standard parametrisation, and back."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._dtype import precision_of
from ntk_ln.layers import Dense, Residual
from ntk_ln.layers._base import AbstractLayer, is_zero
from ntk_ln.network import Network, check_network


class Standard(NamedTuple):
    """A network's parameters in the standard parametrisation, and the factor of the learning rate of each of them."""

    params: Any
    learning_rates: Any


def to_standard(net: Network, params: Any) -> Standard:
    r"""The same function in the standard parametrisation, z = W a + b, as most libraries have it.

        W_standard = w_std/sqrt(n_in) W,   b_standard = b_std b.

    Gradient descent in the NTK parametrisation with learning rate eta is gradient descent in the standard one with
    eta w_std^2/n_in for weights and eta b_std^2 for biases: with these factors both have the same empirical NTK,
    sum of learning_rate * df/dtheta df'/dtheta.

    Args:
        net: a network.
        params: from `net.init`.

    Returns:
        `Standard(params, learning_rates)`, both of the structure of `params`; the factors are scalars, 1 for gains and shifts.

    References:
        Sohl-Dickstein, Novak, Schoenholz, Lee (2020), "On the infinite width limit of neural networks with a standard
        parameterization", section 2.

    >>> import jax
    >>> import ntk_ln as nl
    >>> net = nl.Network(nl.Dense(w_std=2.0, b_std=0.5))
    >>> standard = nl.to_standard(net, net.init(jax.random.key(0), in_features=4, width=1))
    >>> standard.learning_rates
    ({'w': 1.0, 'b': 0.25},)
    """
    _check("to_standard(net, params)", net, params)
    with _precision(params):
        pairs = [_layer_to_standard(layer, given) for layer, given in zip(net.layers, params, strict=True)]
    return Standard(tuple(p for p, _ in pairs), tuple(rate for _, rate in pairs))


def from_standard(net: Network, params: Any) -> Any:
    """Parameters of the NTK parametrisation, as `net.apply` takes them, from those of the standard one.

    Args:
        net: a network.
        params: of the structure that `to_standard` gives.

    Raises:
        ValueError: non-zero weights or biases where the network's w_std or b_std is 0: no parameter stands for them.

    >>> import jax
    >>> import ntk_ln as nl
    >>> net = nl.mlp(1)
    >>> params = net.init(jax.random.key(0), in_features=2, width=3)
    >>> back = nl.from_standard(net, nl.to_standard(net, params).params)
    >>> bool(abs(back[0]["w"] - params[0]["w"]).max() < 1e-6)
    True
    """
    _check("from_standard(net, params)", net, params)
    with _precision(params):
        return tuple(_layer_from_standard(layer, given) for layer, given in zip(net.layers, params, strict=True))


def _precision(params: Any) -> AbstractContextManager[Any]:
    """float64 where a parameter has it: without the global flag JAX would narrow it."""
    wide = any(getattr(leaf, "dtype", None) == np.float64 for leaf in jax.tree.leaves(params))
    return precision_of(np.float64 if wide else np.float32)


def _check(call: str, net: Network, params: Any) -> None:
    check_network(net, call)
    if not isinstance(params, tuple | list) or len(params) != len(net.layers):
        got = f"{len(params)} entries" if isinstance(params, tuple | list) else type(params).__name__
        raise ValueError(f"`{call}` needs one entry a layer, {len(net.layers)}. Got {got}.")


def _scales(layer: Dense, params: Any) -> dict[str, Any]:
    if not isinstance(params, dict) or params.keys() != {"w", "b"} or np.ndim(params["w"]) != 2:
        raise ValueError(
            f'The parameters of {layer!r} need a matrix "w" and "b", as `net.init` gives. Got {jax.tree.map(np.shape, params)}.'
        )
    return {"w": layer.w_std / params["w"].shape[0] ** 0.5, "b": layer.b_std}


def _layer_to_standard(layer: AbstractLayer, params: Any) -> tuple[Any, Any]:
    if isinstance(layer, Residual):
        pairs = [_layer_to_standard(inner, given) for inner, given in zip(layer.body, params, strict=True)]
        return tuple(p for p, _ in pairs), tuple(rate for _, rate in pairs)
    if not isinstance(layer, Dense):
        return params, jax.tree.map(lambda _: 1.0, params)
    scales = _scales(layer, params)
    return {name: params[name] * jnp.asarray(scale, params[name].dtype) for name, scale in scales.items()}, {
        name: scale**2 for name, scale in scales.items()
    }


def _layer_from_standard(layer: AbstractLayer, params: Any) -> Any:
    if isinstance(layer, Residual):
        return tuple(_layer_from_standard(inner, given) for inner, given in zip(layer.body, params, strict=True))
    if not isinstance(layer, Dense):
        return params
    back = {}
    for name, scale in _scales(layer, params).items():
        value = params[name]
        if is_zero(scale):
            if np.asarray(value).any():
                raise ValueError(
                    f"`from_standard(net, params)`: {layer!r} has {name}_std = 0, so no parameter stands for the non-zero "
                    f'entries of "{name}". Give it a positive {name}_std.'
                )
            back[name] = jnp.zeros_like(value)
        else:
            back[name] = value / jnp.asarray(scale, value.dtype)
    return back
