"""Closed-form Gram matrices on the host: tile by tile into one array, each pair of tiles once, on all cores.

A tile goes through all layers in one fused pass. Its angles come from a matrix product; the few pairs that are so close or so
nearly opposite that a product has lost their angle are computed again, from differences.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln import _memory
from ntk_ln._dtype import is_tracer, precision_of
from ntk_ln._numerics import FEW, HALVES, NEAR, is_near
from ntk_ln._progress import announced
from ntk_ln.kernels._base import KernelPair
from ntk_ln.kernels._pass import first, in_dtype, read_out, scales
from ntk_ln.kernels._profile import Table, table
from ntk_ln.layers import AbstractLayer, Dense, First, Pairing
from ntk_ln.layers._repeat import fold, through
from ntk_ln.network import Network

AT_LEAST = 2**20  # pairs: below, one pass over all of them
SIDES = (336, 400, 432, 464, 500, 528)  # of a tile: 1 to 2 MB in float64, rows no power of two apart
UNFOLDED = 40  # layers up to which a tile is one fused pass; a loop's state goes through memory at every layer
STRIP = 32
MANY = 16  # one near pair in so many, and the whole tile is computed from differences


class Plan(NamedTuple):
    """How to compute a network's Gram matrix in tiles."""

    first: tuple[AbstractLayer, ...]  # norms on the raw input and the first Dense, row by row
    layers: tuple[Any, ...]  # from there on, pair by pair, up to the table
    rest: tuple[Any, ...]  # from there on to the end, row by row
    table: Table | None

    @classmethod
    def of(cls, network: Network, dtype: Any) -> "Plan":
        """The plan for a network and the precision of its inputs."""
        layers = network.layers
        start = 1 + next(i for i, layer in enumerate(layers) if isinstance(layer, Dense))
        rest, series = fold(layers[start:]), table(layers)
        if series is not None:
            return cls(layers[:start], layers[start : series.start], rest, series.rounded(dtype))
        return cls(layers[:start], layers[start:] if len(layers) <= UNFOLDED else rest, rest, None)


def serves(x1: Any, x2: Any, kernel: Any) -> bool:
    """Whether the Gram matrix of these arrays is better made in tiles: many pairs, on one CPU, nothing traced."""
    if len(x1) * len(x2) < AT_LEAST or any(is_tracer(leaf) for leaf in jax.tree.leaves((x1, x2, kernel))):
        return False
    devices = x1.devices() | x2.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def gram(select: Callable[[Any], Any], network: Network, x1: np.ndarray, x2: np.ndarray | None, call: str) -> Any:
    """select(pair of kernels) between all rows, as NumPy arrays in the dtype of x1; exactly symmetric if x2 is None.

    Memory: the result and a few tiles.
    """
    n1, n2 = len(x1), len(x1 if x2 is None else x2)
    results = select(KernelPair(0, 0))
    needed = len(jax.tree.leaves(results)) * n1 * n2 * x1.dtype.itemsize
    _memory.check(needed, call, "Use `stream_gram`, which keeps it on disk, or fewer rows.")
    out = jax.tree.map(lambda _: np.empty((n1, n2), x1.dtype), results)
    starts = list(_starts(n1, n2, same=x2 is None))
    size = side(n1), side(n2)

    def place(tile: Any, i: int, j: int) -> None:
        jax.tree.map(partial(_place, i=i, j=j, same=x2 is None), out, tile)

    for _ in announced(compute(select, network, x1, x2, starts, size, place), len(starts), "Gram matrix"):
        pass
    return out


def multiply(select: Callable[[Any], Any], network: Network, x: np.ndarray, b: np.ndarray) -> np.ndarray:
    """select(pair of kernels)(x, x) b for b of shape (n, k), in float64; the matrix is never there as a whole."""
    n, out = len(x), np.zeros(b.shape)
    tile = side(n)
    starts = list(_starts(n, n, same=True))

    def products(block: np.ndarray, i: int, j: int) -> tuple[np.ndarray, np.ndarray]:
        block = block[: n - i, : n - j]
        return block @ b[j : j + tile], block.T @ b[i : i + tile]

    for (i, j), (rows, columns) in zip(starts, compute(select, network, x, None, starts, (tile, tile), products), strict=True):
        out[i : i + tile] += rows
        if i != j:
            out[j : j + tile] += columns
    return out


def compute(
    select: Callable[[Any], Any],
    network: Network,
    x1: np.ndarray,
    x2: np.ndarray | None,
    starts: Sequence[tuple[int, int]],
    size: tuple[int, int],
    then: Callable[[Any, int, int], Any] = lambda tile, i, j: tile,
) -> Iterator[Any]:
    """`then` of the tiles that begin at these rows and columns, in this order.

    `then(tile, i, j)` runs in the thread that made the tile; at the ends of the matrix a tile is larger than what is left.
    """
    plan = Plan.of(network, x1.dtype)
    with precision_of(x1.dtype):
        rows1 = Rows.of(plan, x1, size[0])
        rows2 = rows1 if x2 is None and size[0] == size[1] else Rows.of(plan, x1 if x2 is None else x2, size[1])

    def one(start: tuple[int, int]) -> Any:
        same = x2 is None and start[0] == start[1]
        with precision_of(x1.dtype):
            tile = _host(_tile(select, plan, rows1, rows2, start, same=same))
            if same:
                diagonal = _host(_diagonal(select, plan.rest, rows1.block(start[0])[0]))
                tile = jax.tree.map(_mirrored, tile, diagonal)
        return then(tile, *start)

    workers = 2 * (os.cpu_count() or 1)  # half of them wait for XLA's own threads
    with ThreadPoolExecutor(workers) as pool:
        waiting: list[Any] = []
        try:
            for start in starts:
                waiting.append(pool.submit(one, start))
                if len(waiting) > workers:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()


class Rows(NamedTuple):
    """All rows after the first Dense, cut into the sides of tiles; filled up to whole ones: one shape, one compilation."""

    blocks: list[tuple[First, Any]]  # with F/e at the output, None without a table
    side: int
    length: int  # before they were filled up

    @classmethod
    def of(cls, plan: Plan, x: np.ndarray, side: int) -> "Rows":
        """The rows of x for tiles of so many."""
        filled = np.concatenate([x, np.broadcast_to(x[-1:], (-len(x) % side, x.shape[1]))])
        rows = first(plan.first, filled)
        rows = rows, None if plan.table is None else scales(plan.rest, rows)
        return cls([_cut(rows, start, side) for start in range(0, len(filled), side)], side, len(x))

    def block(self, start: int) -> tuple[First, Any]:
        return self.blocks[start // self.side]


def side(n: int) -> int:
    """The rows of a tile: of a few shapes, so that few are compiled, the one that computes the least in vain."""
    return min(n, min(SIDES, key=lambda side: (lambda k: k * (k + 1) * side**2 + 40 * k**2 * side)(-(-n // side))))


def _starts(n1: int, n2: int, *, same: bool) -> Iterator[tuple[int, int]]:
    for i in range(0, n1, side(n1)):
        for j in range(i if same else 0, n2, side(n2)):
            yield i, j


def _place(out: np.ndarray, tile: np.ndarray, i: int, j: int, *, same: bool) -> None:
    rows, columns = min(len(tile), len(out) - i), min(tile.shape[1], out.shape[1] - j)
    tile = tile[:rows, :columns]
    out[i : i + rows, j : j + columns] = tile
    if same and i != j:
        out[j : j + columns, i : i + rows] = tile.T


def _mirrored(tile: Any, diagonal: np.ndarray) -> np.ndarray:
    """A tile on the diagonal: exactly symmetric (fused arithmetic may round the two triangles differently)."""
    tile = np.array(tile)
    for k in range(0, len(tile), STRIP):
        tile[k : k + STRIP, k + STRIP :] = tile[k + STRIP :, k : k + STRIP].T
        corner = np.tril(tile[k : k + STRIP, k : k + STRIP], -1)
        tile[k : k + STRIP, k : k + STRIP] = corner + corner.T
    np.fill_diagonal(tile, diagonal)
    return tile


def _tile(select, plan: Plan, rows1: Rows, rows2: Rows, start: tuple[int, int], *, same: bool) -> Any:
    given = select, plan.layers, plan.table, rows1.block(start[0]), rows2.block(start[1])
    if rows1.blocks[0][0].rows.shape[1] <= FEW:  # differences are as fast as a product
        return _exact(*given)
    tile, product = _fast(*given)
    product = np.asarray(product)
    if not same and max(product.max(), -product.min()) <= 1 - 2 * NEAR:
        return tile
    near = np.asarray(is_near(product))
    ends = (max(rows.length - at, 0) for rows, at in ((rows1, start[0]), (rows2, start[1])))
    near[next(ends) :] = near[:, next(ends) :] = False  # what is filled up
    if same:
        np.fill_diagonal(near, False)
    if not near.any():
        return tile
    if np.count_nonzero(near) > near.size // MANY:
        return _exact(*given)
    i, j = np.nonzero(near)
    count = 2 ** max(8, int(len(i) - 1).bit_length())  # few different shapes
    return jax.tree.map(partial(_replaced, i=i, j=j), tile, _some(*given, np.resize(i, count), np.resize(j, count)))


def _host(tile: Any) -> Any:
    return jax.tree.map(np.asarray, tile)


def _replaced(tile: Any, values: Any, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    tile = np.array(tile)
    tile[i, j] = np.asarray(values)[: len(i)]
    return tile


@partial(jax.jit, static_argnums=0)
def _diagonal(select, layers, rows):
    state = through(in_dtype(layers, rows.u), rows.state(Pairing(None)))
    return select(read_out(state.cos, state.tangent, *(state.side.scale / state.side.unit,) * 2))


@partial(jax.jit, static_argnums=0)
def _exact(select, layers, series, one, two):
    return _pass(select, layers, series, one, two, None, len(one[0].u))


@partial(jax.jit, static_argnums=0)
def _fast(select, layers, series, one, two):
    """The tile from products alone, and the products."""
    product = jnp.matmul(one[0].rows, two[0].rows.T, precision=jax.lax.Precision.HIGHEST)
    return _pass(select, layers, series, one, two, product, len(one[0].u)), product


@partial(jax.jit, static_argnums=0)
def _some(select, layers, series, one, two, i, j):
    one, two = (jax.tree.map(lambda a, at=at: a[at], rows) for rows, at in ((one, i), (two, j)))
    return _pass(select, layers, series, one, two, None, HALVES)


@partial(jax.jit, static_argnums=2)
def _cut(rows, start, size):
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size), rows)


def _pass(select, layers, series, one, two, product, split):
    (rows, scale), pair = jax.tree.map(lambda *v: jnp.concatenate(v), one, two), Pairing(split)
    state = through(in_dtype(layers, rows.u), rows.state(pair, product))
    if series is None:
        cos, tangent, scale = state.cos, state.tangent, state.side.scale / state.side.unit
    else:
        cos, tangent = series(state)
    return select(read_out(cos, tangent, *pair(scale)))
