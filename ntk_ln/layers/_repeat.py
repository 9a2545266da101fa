"""Runs of equal layers, folded: what is compiled does not grow with the depth."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln.layers._base import AbstractLayer
from ntk_ln.layers._state import Inputs, State

AT_LEAST = 4  # repetitions worth a loop: fewer run faster in one fused pass


class Repeat(eqx.Module):
    """A block of layers, `times` in a row; each leaf holds its values of all repetitions."""

    block: tuple[AbstractLayer, ...]
    times: int = eqx.field(static=True)

    def propagate(self, state: State | Inputs) -> State | Inputs:
        def at(index):
            return jax.tree.map(lambda leaf: leaf[index], self.block)

        def step(state, block):
            return through(block, state), None

        # The first one brings the state into the form it keeps, if it keeps one (not with exponents that grow layer by layer).
        state = through(at(0), state)
        after, _ = jax.eval_shape(step, state, at(1))
        if _form(after) != _form(state):
            for index in range(1, self.times):
                state = through(at(index), state)
            return state
        return jax.lax.scan(step, state, at(slice(1, None)))[0]


def through(layers: Sequence[Any], state: State | Inputs) -> Any:
    """The state after layers and repeated blocks of them."""
    for layer in layers:
        state = layer.propagate(state)
    return state


def fold(layers: Sequence[AbstractLayer]) -> tuple[AbstractLayer | Repeat, ...]:
    """The layers with every run of at least `AT_LEAST` equal blocks as one `Repeat`; their numbers may differ."""
    kinds: dict[Any, int] = {}
    keys = [kinds.setdefault(jax.tree.structure(layer), len(kinds)) for layer in layers]
    folded: list[AbstractLayer | Repeat] = []
    start = 0
    while start < len(layers):
        period, times = _run(keys[start:])
        if times > 1:
            blocks = [tuple(layers[i : i + period]) for i in range(start, start + period * times, period)]
            folded.append(Repeat(jax.tree.map(lambda *leaves: _stack(leaves), *blocks), times))
        else:
            folded.append(layers[start])
        start += period * times
    return tuple(folded)


def _run(keys: list[int]) -> tuple[int, int]:
    """The shortest block that the keys begin with at least `AT_LEAST` times, and how often; (1, 1) if there is none."""
    for period in range(1, len(keys) // AT_LEAST + 1):
        block, times = keys[:period], 1
        while keys[times * period : (times + 1) * period] == block:
            times += 1
        if times >= AT_LEAST:
            return period, times
    return 1, 1


def _stack(leaves: Sequence[Any]) -> Any:
    if any(isinstance(leaf, jax.Array) for leaf in leaves):
        return jnp.stack([jnp.asarray(leaf) for leaf in leaves])
    return np.stack([np.asarray(leaf) for leaf in leaves])


def _form(state: State | Inputs) -> Any:
    return jax.tree.structure(state), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
