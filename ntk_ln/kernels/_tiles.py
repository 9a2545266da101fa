"""Matrices made tile by tile inside one compiled function."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def tiled(tile: Callable[[Any, Any], Any], n1: int, n2: int, most: int, *, same: bool) -> Any:
    """tile(cut1, cut2) -> (rows, columns, ...) for all tiles, each cut taking an array's rows; only the lower ones if `same`."""
    (starts1, size1), (starts2, size2) = _starts(n1, most), _starts(n2, most)
    starts = np.array([(s1, s2) for s1 in starts1 for s2 in starts2 if not same or s2 <= s1])

    def at(start1, start2):
        cut1 = partial(jax.lax.dynamic_slice_in_dim, start_index=start1, slice_size=size1)
        return tile(cut1, partial(jax.lax.dynamic_slice_in_dim, start_index=start2, slice_size=size2))

    if len(starts) == 1:
        return at(0, 0)
    value = jax.eval_shape(at, 0, 0)
    result = jnp.zeros((n1, n2, *value.shape[2:]), value.dtype)
    if not len(starts):
        return result

    def put(step, result):
        start = jnp.asarray(starts)[step]
        return jax.lax.dynamic_update_slice(result, at(*start), (*start, *[0] * (result.ndim - 2)))

    return jax.lax.fori_loop(0, len(starts), put, result)


def _starts(n: int, most: int) -> tuple[Any, int]:
    """First rows of the fewest equal tiles that cover n rows, and their size; the last ones may overlap."""
    size = -(-n // max(1, -(-n // most)))
    return np.minimum(np.arange(0, n, max(1, size)), n - size), size


def mirrored(gram: Any) -> Any:
    """The lower triangle of (n, n) or (n, n, k, k), mirrored: exactly symmetric."""
    if gram.ndim == 4:
        n, _, k, _ = gram.shape
        rows = mirrored(gram.transpose(0, 2, 1, 3).reshape(n * k, n * k))
        return rows.reshape(n, k, n, k).transpose(0, 2, 1, 3)
    # A sum with zeros, which is exact. A select between `gram` and its transpose would take XLA's CPU compiler minutes.
    return jnp.tril(gram) + jnp.tril(gram, -1).T
