"""The empirical NTK of a network, layer by layer: inputs and signals of every layer, and their products."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ntk_ln.kernels._base import KernelPair
from ntk_ln.kernels._tiles import mirrored, tiled
from ntk_ln.layers import AbstractLayer, Dense, Residual
from ntk_ln.network import Network


class _Pass(NamedTuple):
    """The inputs of all layers (a list within the list for the body of a Residual), and what carries signals back through them."""

    inputs: list[Any]
    pull: Callable[[Any], tuple[Any, list[Any]]]
    outputs: Any

    def signals(self, output: Any) -> list[Any]:
        """df_output/d(layer's output), for every layer."""
        return self.pull(jnp.zeros_like(self.outputs).at[:, output].set(1))[1]


def _forward(layers: Sequence[AbstractLayer], params: Any, x: Any) -> _Pass:
    inputs, pulls = [], []
    for layer, layer_params in zip(layers, params, strict=True):
        if isinstance(layer, Residual):
            body = _forward(layer.body, layer_params, x)
            inputs.append(body.inputs)
            pulls.append(partial(_pull_residual, body.pull))
            x = x + body.outputs
        else:
            inputs.append(x)
            x, pullback = jax.vjp(partial(layer.apply, layer_params), x)
            pulls.append(partial(_pull_layer, pullback))

    def pull(signal):
        signals = []
        for one in reversed(pulls):
            signal, here = one(signal)
            signals.append(here)
        return signal, signals[::-1]

    return _Pass(inputs, pull, x)


def _pull_layer(pullback: Callable[[Any], Any], signal: Any) -> tuple[Any, Any]:
    return pullback(signal)[0], signal


def _pull_residual(pull_body: Callable[[Any], Any], signal: Any) -> tuple[Any, Any]:
    through, signals = pull_body(signal)
    return signal + through, signals


def _shares(layers: Sequence[AbstractLayer], params: Any, inputs1: Any, signals1: Any, inputs2: Any, signals2: Any) -> Any:
    total: Any = 0
    for layer, *arguments in zip(layers, params, inputs1, signals1, inputs2, signals2, strict=True):
        share = _shares(layer.body, *arguments) if isinstance(layer, Residual) else layer.ntk_share(*arguments)
        total = total if share is None else total + share
    return total


def _over_outputs(entry: Callable[[Any, Any], Any], one: _Pass, two: _Pass, output: str) -> Any:
    """entry(signals1, signals2) over pairs of outputs: the mean over equal ones, the mean signal's, or all pairs as last axes."""
    k = one.outputs.shape[1]
    if output == "sum_of_logits":
        return entry(*(each.pull(jnp.full_like(each.outputs, k**-0.5))[1] for each in (one, two)))
    if output == "trace":
        # One output's signals at a time: their memory is that of the activations, however many outputs.
        total = entry(one.signals(0), two.signals(0))
        total = jax.lax.fori_loop(1, k, lambda o, total: total + entry(one.signals(o), two.signals(o)), total)
        return total / k
    outputs = jnp.arange(k)
    all1 = jax.vmap(one.signals)(outputs)
    all2 = all1 if two is one else jax.vmap(two.signals)(outputs)
    pairs = jax.lax.map(lambda g1: jax.lax.map(lambda g2: entry(g1, g2), all2), all1)
    return jnp.moveaxis(pairs, (0, 1), (-2, -1))


def _passes(network: Network, params: Any, x1: Any, x2: Any) -> tuple[_Pass, _Pass]:
    one = _forward(network.layers, params, x1)
    return one, one if x2 is None else _forward(network.layers, params, x2)


def _ntk(network: Network, params: Any, one: _Pass, two: _Pass, output: str, block: int, dtype: Any) -> Any:
    wide = partial(jax.tree.map, lambda a: a.astype(dtype))

    def entry(signals1, signals2):
        def tile(cut1, cut2):
            side1, side2 = (
                wide(jax.tree.map(cut, sides)) for cut, sides in ((cut1, (one.inputs, signals1)), (cut2, (two.inputs, signals2)))
            )
            return _shares(network.layers, wide(params), *side1, *side2)

        return tiled(tile, len(one.outputs), len(two.outputs), block, same=one is two)

    gram = _over_outputs(entry, one, two, output)
    return mirrored(gram) if one is two else gram


@partial(jax.jit, static_argnames=("output", "block", "dtype"))
def layerwise_gram(network: Network, params: Any, x1: Any, x2: Any, *, output: str, block: int, dtype: Any) -> Any:
    """The kernel of the rows x1 and x2 (None: x1 again), products between rows in `dtype`, `block` rows at once."""
    return _ntk(network, params, *_passes(network, params, x1, x2), output, block, dtype)


@partial(jax.jit, static_argnames=("output", "block", "dtype"))
def layerwise_pair(network: Network, params: Any, x1: Any, x2: Any, *, output: str, block: int, dtype: Any) -> KernelPair:
    """The last Dense's share of the kernel, and the kernel."""
    if not isinstance(network.layers[-1], Dense):
        last = network.layers[-1]
        raise ValueError(f"`EmpiricalNTK(net, params).pair` needs a network whose last layer is a Dense. Got {last!r}.")
    one, two = _passes(network, params, x1, x2)

    def tile(cut1, cut2):
        a1, a2 = cut1(one.inputs[-1]).astype(dtype), cut2(two.inputs[-1]).astype(dtype)
        return network.layers[-1].ntk_share(params[-1], a1, jnp.ones_like(a1[:, :1]), a2, jnp.ones_like(a2[:, :1]))

    nngp = tiled(tile, len(one.outputs), len(two.outputs), block, same=one is two)
    nngp = mirrored(nngp) if one is two else nngp
    if output == "full":
        nngp = nngp[:, :, None, None] * jnp.eye(one.outputs.shape[1], dtype=nngp.dtype)[None, None]
    return KernelPair(nngp, _ntk(network, params, one, two, output, block, dtype))


@partial(jax.jit, static_argnames=("output", "dtype"))
def layerwise_diag(network: Network, params: Any, x: Any, *, output: str, dtype: Any) -> Any:
    """The kernel of every row of x with itself."""
    one = _forward(network.layers, params, x)

    def row(inputs, signals1, signals2):
        sides = jax.tree.map(lambda a: a[None].astype(dtype), (inputs, signals1, inputs, signals2))
        return _shares(network.layers, jax.tree.map(lambda a: a.astype(dtype), params), *sides)[0, 0]

    return _over_outputs(lambda g1, g2: jax.vmap(row)(one.inputs, g1, g2), one, one, output)
