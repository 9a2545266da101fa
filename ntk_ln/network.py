"""Networks: layers in a row, the builders of the usual ones, and their plain configuration."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ntk_ln._dtype import is_tracer, precision_of, to_host
from ntk_ln.activations import activation_by_name
from ntk_ln.layers import AbstractLayer, Activation, BatchNorm, Dense, Growth, LayerNorm, Residual, RMSNorm
from ntk_ln.layers._base import Params, Units
from ntk_ln.layers._repeat import fold
from ntk_ln.layers.residual import ends_in_dense


class Network(eqx.Module):
    """Layers in a row, from an input x in R^d to the last Dense.

    The same object is the finite network (`init`, `apply`) and the infinitely wide one (`NTK(net)`, `NNGP(net)`), and a pytree:
    w_std, b_std and eps are its leaves.

    Args:
        *layers: at least one; the last is a Dense, or a Residual that ends in one.

    Raises:
        TypeError: something that is not a layer.
        ValueError: a layer where it may not stand; the message names it, its position (from 0) and the way out.

    >>> net = Network(Dense(w_std=2**0.5), Activation("relu"), Dense())
    >>> [type(layer).__name__ for layer in net.layers]
    ['Dense', 'Activation', 'Dense']
    """

    layers: tuple[AbstractLayer, ...]

    def __init__(self, *layers: AbstractLayer):
        for position, layer in enumerate(layers):
            if not isinstance(layer, AbstractLayer):
                raise TypeError(f"`Network(*layers)` needs layers. Argument {position} is {layer!r}.")
        if not ends_in_dense(layers):
            last = repr(layers[-1]) if layers else "nothing"
            raise ValueError(
                f"`Network(*layers)` needs a Dense, or a Residual that ends in one, as its last layer, the read-out. Got {last}."
            )
        self.layers = tuple(layers)
        self.growth  # noqa: B018 - raises where a layer may not stand

    @property
    def growth(self) -> Growth:
        """Growth exponents at the output, from the layers' rules alone."""
        growth = Growth()
        for position, layer in enumerate(self.layers):
            try:
                growth = layer.grow(growth)
            except ValueError as error:
                raise ValueError(f"`Network(*layers)`: layer {position}, {layer!r}: {error}.") from None
        if growth.cut:  # the kernel is a constant
            return replace(growth, mean=0.0, diag=0.0, monotone=True, correction=inf, no_limit=None, numeric=False)
        return growth

    @property
    def has_norm(self) -> bool:
        """Whether a norm layer sits somewhere, in the body of a Residual perhaps."""
        return self.growth.has_norm

    def check_infinite(self, call: str) -> None:
        """Raises where a layer has no infinite-width kernel."""
        layer = self.growth.finite_only
        if layer:
            raise ValueError(
                f"`{call}`: {layer} has no infinite-width kernel, it couples the rows of a batch. Use `train` and `EmpiricalNTK`, "
                "or a LayerNorm or RMSNorm in its place."
            )

    def check_rows(self, call: str, *inputs: Any) -> tuple[Any, ...]:
        """The inputs; raises where a norm layer makes 0/0 of a row, and makes that row NaN where values are traced."""
        centring = isinstance(self.layers[0], LayerNorm)
        undefined = self.undefined_at_zero
        checked = []
        for x in inputs:
            checked.append(x)
            if x is None:
                continue
            if centring:
                _check_features(call, x.shape[1])
            if not undefined:
                continue
            traced = is_tracer(x)
            values: Any = x if traced else to_host(x)
            zero = (values == values[:, :1]).all(axis=1) if centring else ~values.any(axis=1)
            if traced:
                checked[-1] = jnp.where(zero[:, None], jnp.nan, x)
            elif zero.any():
                rows = np.flatnonzero(zero)
                what = "a row of equal features" if centring else "a zero input"
                raise ValueError(
                    f"`{call}`: a norm layer without eps after layers without biases makes 0/0 of {what}. Row {rows[0]} is one. "
                    f"Give a Dense before the norm a b_std > 0, or the norm an eps > 0."
                )
        return tuple(checked)

    @property
    def undefined_at_zero(self) -> bool:
        """Whether x = 0 (equal features before a LayerNorm) reaches a norm layer without eps as units without spread: 0/0."""
        units = Units.ZERO
        for layer in self.layers:
            units = type(layer).at_zero(layer, units)  # a bound method of an Equinox module is slow to make
            if units in (Units.UNDEFINED, Units.RANDOM):
                break
        return units is Units.UNDEFINED

    @property
    def folded(self) -> tuple[Any, ...]:
        """The layers in order, runs of equal ones as one loop: what the kernels pass through."""
        return fold(self.layers)

    def init(
        self, key: PRNGKeyArray, *, in_features: int, width: int, out_features: int = 1, dtype: Any = None
    ) -> tuple[Params, ...]:
        """Random parameters of a finite network: entries N(0, 1), gains 1, shifts 0.

        Args:
            key: a JAX random key.
            in_features: d, the number of features of x.
            width: units of every hidden layer.
            out_features: outputs of the last Dense; a network that ends in a Residual has `width` of them.
            dtype: of the parameters; JAX's default float if not given.

        Returns:
            One dictionary a layer, empty for a layer without parameters.

        >>> import jax
        >>> params = mlp(1).init(jax.random.key(0), in_features=3, width=8)
        >>> params[0]["w"].shape
        (3, 8)
        """
        for name, value in (("in_features", in_features), ("width", width), ("out_features", out_features)):
            if value < 1:
                raise ValueError(f"`net.init(key, ...)` needs {name} >= 1. Got {value}.")
        dtype = jnp.result_type(float) if dtype is None else np.dtype(dtype)
        n_in, params = in_features, []
        last = len(self.layers) - 1
        with precision_of(dtype):
            for position, (layer, layer_key) in enumerate(zip(self.layers, jax.random.split(key, last + 1), strict=True)):
                n_out = n_in if not isinstance(layer, Dense) else out_features if position == last else width
                params.append(layer.init(layer_key, n_in, n_out, dtype))
                n_in = n_out
        return tuple(params)

    def apply(self, params: Sequence[Params], x: Float[Array, "n d"]) -> Float[Array, "n k"]:
        """The finite network's outputs (n, out_features) at x (n, d), in the parameters' dtype.

        >>> import jax, jax.numpy as jnp
        >>> net = mlp(1)
        >>> net.apply(net.init(jax.random.key(0), in_features=3, width=8), jnp.ones((5, 3))).shape
        (5, 1)
        """
        with self._rows("net.apply(params, x)", params, x) as rows:
            for layer, layer_params in zip(self.layers, params, strict=True):
                rows = layer.apply(layer_params, rows)
        return rows

    def apply_batch(self, params: Sequence[Params], x: Float[Array, "n d"]) -> tuple[Float[Array, "n k"], tuple[Params, ...]]:
        """The outputs in training, and the parameters with what layers keep of the batch (the statistics of a BatchNorm).

        >>> import jax, jax.numpy as jnp
        >>> net = Network(Dense(), BatchNorm(), Activation("relu"), Dense())
        >>> params = net.init(jax.random.key(0), in_features=3, width=8)
        >>> outputs, params = net.apply_batch(params, jnp.eye(3))
        >>> bool(jnp.allclose(outputs, net.apply(params, jnp.eye(3)), atol=1e-6))
        True
        """
        kept = []
        with self._rows("net.apply_batch(params, x)", params, x) as rows:
            for layer, layer_params in zip(self.layers, params, strict=True):
                rows, layer_params = layer.apply_batch(layer_params, rows)
                kept.append(layer_params)
        return rows, tuple(kept)

    @contextmanager
    def _rows(self, call: str, params: Sequence[Params], x: Any) -> Iterator[Any]:
        """x in the dtype of the parameters, and its precision."""
        if len(params) != len(self.layers):
            raise ValueError(f"`{call}` needs one entry a layer, {len(self.layers)}. Got {len(params)}.")
        weights = next(params[i]["w"] for i, layer in enumerate(self.layers) if isinstance(layer, Dense))
        dtype, features = weights.dtype, weights.shape[0]
        with precision_of(dtype):
            x = jnp.asarray(x, dtype)
            if x.ndim != 2 or x.shape[1] != features:
                raise ValueError(f"`{call}` needs x of shape (n, {features}). Got shape {x.shape}.")
            yield x

    def to_config(self) -> list[dict[str, Any]]:
        """Plain values, one dictionary a layer, from which `network_from_config` builds the network again.

        >>> Network(Dense()).to_config()
        [{'layer': 'dense', 'w_std': 1.0, 'b_std': 0.0}]
        """
        return [layer.to_config() for layer in self.layers]


def check_network(net: Any, call: str, why: str = "") -> None:
    """Raises unless `net` is a Network."""
    if not isinstance(net, Network):
        raise TypeError(f"`{call}` needs a Network{why}. Got {type(net).__name__}.")


def _check_features(call: str, d: int) -> None:
    if d == 1:
        raise ValueError(f"`{call}`: LayerNorm on the raw input makes 0 of every row with one feature. Put a Dense before it.")
    if d == 2:
        warnings.warn(f"`{call}`: LayerNorm on the raw input makes (1, -1) or (-1, 1) of rows with two features.", stacklevel=5)


LAYERS: dict[str, Callable[..., AbstractLayer]] = {
    "dense": Dense,
    "activation": lambda name, **params: Activation(name, **params),
    "layer_norm": LayerNorm,
    "rms_norm": RMSNorm,
    "batch_norm": BatchNorm,
    "residual": lambda body: Residual(*_layers_from_config(body)),
}


def network_from_config(config: Sequence[dict[str, Any]]) -> Network:
    """The network of a list of plain dictionaries, such as `net.to_config()` gives.

    Args:
        config: one dictionary a layer: {"layer": NAME, ...} with the layer's own arguments, NAME one of dense, activation,
            layer_norm, rms_norm, batch_norm, residual; a residual has its layers as "body".

    Raises:
        TypeError: not a list of dictionaries.
        ValueError: an unknown layer or argument, or a layer where it may not stand.

    >>> network_from_config([{"layer": "dense", "w_std": 2.0}]).layers
    (Dense(w_std=2.0, b_std=0.0),)
    """
    return Network(*_layers_from_config(config))


def _layers_from_config(config: Any) -> list[AbstractLayer]:
    if not isinstance(config, Sequence) or isinstance(config, str | bytes):
        raise TypeError(f"`network_from_config(config)` needs a list of dictionaries, one a layer. Got {type(config).__name__}.")
    layers = []
    for position, entry in enumerate(config):
        if not isinstance(entry, dict) or "layer" not in entry:
            raise TypeError(f'`network_from_config(config)` needs {{"layer": ...}} at position {position}. Got {entry!r}.')
        kind, arguments = entry["layer"], {key: value for key, value in entry.items() if key != "layer"}
        if not isinstance(kind, str) or kind not in LAYERS:
            raise ValueError(
                f"`network_from_config(config)` knows the layers {', '.join(LAYERS)}. Position {position} has {kind!r}."
            )
        needed = {"activation": "name", "residual": "body"}.get(kind)
        if needed is not None and needed not in arguments:
            raise ValueError(f'`network_from_config(config)`: layer {position}, {kind!r}, needs "{needed}".')
        try:
            layers.append(LAYERS[kind](**arguments))
        except TypeError as error:
            raise ValueError(
                f"`network_from_config(config)`: layer {position}, {kind!r}, does not take {arguments}: {str(error).rstrip('.')}."
            ) from None
    return layers


def mlp(
    depth: int,
    *,
    activation: str = "relu",
    layer_norm: str | Sequence[int] = "none",
    after_activation: bool = False,
    eps: float = 0.0,
    affine: bool = False,
    w_std: float = 2**0.5,
    b_std: float = 0.1,
    w_out: float = 1.0,
    b_out: float = 0.1,
) -> Network:
    """A multilayer perceptron: `depth` times (Dense, activation), then a Dense.

    Args:
        depth: hidden layers, >= 0.
        activation: a name of `Activation`.
        layer_norm: the hidden layers with a LayerNorm: "none", "first", "last", "every", or numbers counted from 1.
        after_activation: the norm after the activation instead of before it.
        eps: of the norms.
        affine: of the norms.
        w_std: of the hidden Dense layers.
        b_std: of the hidden Dense layers.
        w_out: w_std of the last Dense.
        b_out: b_std of the last Dense.

    Raises:
        ValueError: a negative depth, or a layer number out of range.

    >>> [type(layer).__name__ for layer in mlp(1, layer_norm="first").layers]
    ['Dense', 'LayerNorm', 'Activation', 'Dense']
    """
    normed = _normed_layers("mlp", depth, layer_norm)
    layers: list[AbstractLayer] = []
    for hidden in range(1, depth + 1):
        norm = [LayerNorm(eps=eps, affine=affine)] if hidden in normed else []
        phi: list[AbstractLayer] = [Activation(activation)]
        layers += [Dense(w_std=w_std, b_std=b_std), *(phi + norm if after_activation else norm + phi)]
    return Network(*layers, Dense(w_std=w_out, b_std=b_out))


def paper_mlp(
    depth: int,
    *,
    layer_norm: str | Sequence[int] = "none",
    activation: str = "relu",
    b_std: float = 0.1,
    w_in: float = 1.0,
) -> Network:
    """The paper's network: w_std = sqrt(c_phi) after the first Dense, the last one included, with c_phi = 1/E[phi(u)^2].

    Args:
        depth: hidden layers L, >= 0.
        layer_norm: as in `mlp`; before the activation.
        activation: a name of `Activation`.
        b_std: sigma_b of every Dense.
        w_in: w_std of the first Dense; w_in = sqrt(d) and b_std = 1 give the variance h + |x|^2 of the paper's discussion.

    Raises:
        ValueError: a negative depth, or a layer number out of range.

    References:
        Ziomek, Whittle, Osborne (2025), appendix A.

    >>> [layer.w_std for layer in paper_mlp(1).layers if isinstance(layer, Dense)]
    [1.0, 1.4142135623730951]
    """
    normed = _normed_layers("paper_mlp", depth, layer_norm)
    w_std = activation_by_name(activation).second_moment() ** -0.5
    layers: list[AbstractLayer] = [Dense(w_std=w_in, b_std=b_std)]
    for hidden in range(1, depth + 1):
        norm = [LayerNorm()] if hidden in normed else []
        layers += [*norm, Activation(activation), Dense(w_std=w_std, b_std=b_std)]
    return Network(*layers)


def _normed_layers(call: str, depth: int, layer_norm: str | Sequence[int]) -> set[int]:
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 0:
        raise ValueError(f"`{call}(depth, ...)` needs a whole number of hidden layers >= 0. Got {depth!r}.")
    named = {"none": set(), "first": {1}, "last": {depth}, "every": set(range(1, depth + 1))}
    if isinstance(layer_norm, str):
        if layer_norm not in named:
            raise ValueError(f"`{call}(layer_norm=...)` knows {', '.join(named)} or layer numbers from 1. Got {layer_norm!r}.")
        normed = named[layer_norm]
    elif isinstance(layer_norm, Sequence | set | frozenset):
        normed = set(layer_norm)
    else:
        raise TypeError(f"`{call}(layer_norm=...)` needs a name or a sequence of layer numbers, such as (1,). Got {layer_norm!r}.")
    if not normed <= set(range(1, depth + 1)):
        raise ValueError(f"`{call}(depth, layer_norm=...)` counts hidden layers from 1 to depth={depth}. Got {layer_norm!r}.")
    return normed
