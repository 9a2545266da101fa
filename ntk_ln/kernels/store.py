"""Gram matrices on disk: tiles in a Zarr store, which may be interrupted at any moment and gone on with."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy  # its submodules load at first use: at the top they would cost a third of `import ntk_ln`

from ntk_ln._dtype import check_rows, is_tracer
from ntk_ln._progress import announced
from ntk_ln.kernels import gram
from ntk_ln.kernels._base import AbstractKernel, symmetric_operator
from ntk_ln.kernels.closed_form import NNGP, NTK, AbstractClosedForm
from ntk_ln.network import network_from_config

TILE = 1008  # 8 MB in float64
CALL = "stream_gram(kernel, x, store)"
KERNELS = {"NTK": NTK, "NNGP": NNGP}


def stream_gram(kernel: AbstractKernel, x: Any, store: str | Path, *, tile: int | None = None) -> "StoredGram":
    """Computes k(x, x) tile by tile into a folder, and goes on where an earlier call, however it ended, has stopped.

    The folder is a Zarr (v3) group with the arrays `gram` (n, n), in chunks of `tile` rows and columns with checksums, and `x`.
    Each pair of mirrored tiles is computed once; a tile is there whole or not at all. Memory: a few tiles.

    Args:
        kernel: `NTK(net)`, `NNGP(net)` or any other kernel.
        x: (n, d), finite, n >= 1; float32 stays float32 in the store, all else is float64.
        store: the folder; new, empty, or of an earlier call with the same kernel, x and tile.
        tile: rows and columns of a tile, 1008 by default.

    Returns:
        StoredGram, complete.

    Raises:
        ImportError: zarr is not installed: `pip install "ntk_ln[store]"`.
        ValueError: a store of another kernel, other inputs or another tile; something else in the folder; not enough disk.
        TypeError: not a kernel, or traced inputs.

    >>> import tempfile, numpy as np
    >>> from ntk_ln import NTK, mlp
    >>> x = np.random.default_rng(0).normal(size=(30, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stored = stream_gram(NTK(mlp(1)), x, folder, tile=16)
    ...     bool(abs(stored[:] - NTK(mlp(1))(x)).max() < 1e-15)
    True
    """
    if not isinstance(kernel, AbstractKernel):
        raise TypeError(f"`{CALL}` needs a kernel such as `NTK(net)`. Got {type(kernel).__name__}.")
    if is_tracer(x):
        raise TypeError(f"`{CALL}` writes to disk and cannot be traced.")
    rows = np.asarray(check_rows(x, CALL))
    rows = rows if rows.dtype == np.float32 else rows.astype(np.float64)
    if len(rows) == 0:
        raise ValueError(f"`{CALL}` needs at least one row. Got x.shape={rows.shape}.")
    if tile is None:
        tile = min(TILE, len(rows))
    if not isinstance(tile, int | np.integer) or isinstance(tile, bool) or tile < 1:
        raise ValueError(f"`stream_gram(..., tile=...)` needs a whole number >= 1. Got {tile!r}.")
    stored = StoredGram(_opened(kernel, rows, Path(store), int(tile)), kernel)
    missing = stored._missing()
    _check_disk(Path(store), len(missing), tile, rows)
    for (i, j), block in zip(missing, announced(_tiles(kernel, rows, missing, int(tile)), len(missing), "tiles"), strict=True):
        # The mirror first: the tile itself says that both are there.
        if i != j:
            stored._write(j, i, block.T)
        stored._write(i, j, block)
    return stored


def open_gram(store: str | Path) -> "StoredGram":
    """The Gram matrix that `stream_gram` wrote, or has begun to write.

    Raises:
        ImportError: zarr is not installed.
        ValueError: not such a folder.
    """
    path = Path(store)
    try:
        group = _zarr().open_group(path, mode="r+")
        if group.attrs["format"] != 1:
            raise KeyError("format")
        missing = {"gram", "x"} - set(group)
        if missing:
            raise KeyError(*missing)
    except (KeyError, ValueError, OSError, TypeError) as error:
        raise ValueError(f"`open_gram(store)` needs a folder of `stream_gram`. Got {str(path)!r}: {error!r}.") from None
    return StoredGram(group, None)


class StoredGram:
    """A symmetric matrix on disk.

    Index it as an array: `g[:100, 5:9]` reads the tiles it needs, `g[:]` all. `g @ v`, `g.operator()` and `min_eigenvalue` read it
    once a product, tile by tile. `g.array` is the `zarr.Array`, for dask and others.

    Attributes:
        x: the inputs (n, d).
        kernel: `NTK(net)` or `NNGP(net)`, from the configuration in the store; None for another kernel.
    """

    def __init__(self, group: Any, kernel: AbstractKernel | None):
        self._group, self.array = group, group["gram"]
        self._kernel = kernel
        self._folder = Path(str(group.store.root)) / group.path / "gram" / "c"
        self._complete = False

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    tile = property(lambda self: self.array.chunks[0])

    def __repr__(self) -> str:
        return f"StoredGram({str(self._group.store.root)!r}, {self.shape}, {self.dtype}, tile={self.tile})"

    def __len__(self) -> int:
        return self.shape[0]

    @cached_property
    def x(self) -> np.ndarray:
        return self._group["x"][:]

    @property
    def kernel(self) -> AbstractKernel | None:
        config = self._group.attrs["network"]
        if self._kernel is None and config is not None:
            self._kernel = KERNELS[self._group.attrs["kernel"]](network_from_config(config))
        return self._kernel

    @property
    def complete(self) -> bool:
        """Whether all tiles are there."""
        return not self._missing()

    def __getitem__(self, index: Any) -> np.ndarray:
        self._check_complete()
        return self.array[index]

    def __matmul__(self, v: np.ndarray) -> np.ndarray:
        self._check_complete()
        v = np.asarray(v)
        if len(v) != len(self):
            raise ValueError(f"`gram @ v` needs v of {len(self)} rows. Got shape {v.shape}.")
        out = np.zeros(v.shape, np.float64)
        for i, j in _pairs(len(self), self.tile):
            block = self.array[i : i + self.tile, j : j + self.tile].astype(np.float64, copy=False)
            out[i : i + self.tile] += block @ v[j : j + self.tile]
            if i != j:
                out[j : j + self.tile] += block.T @ v[i : i + self.tile]
        return out

    def diag(self) -> np.ndarray:
        """The diagonal (n,)."""
        self._check_complete()
        starts = range(0, len(self), self.tile)
        return np.concatenate([np.diagonal(self.array[i : i + self.tile, i : i + self.tile]) for i in starts])

    def operator(self) -> "scipy.sparse.linalg.LinearOperator":
        """The matrix as a `scipy.sparse.linalg.LinearOperator`, for `min_eigenvalue` and SciPy's solvers."""
        return symmetric_operator(len(self), self.__matmul__, self.dtype)

    def _check_complete(self) -> None:
        if not self._complete:
            missing = len(self._missing())
            self._complete = not missing
            if missing:
                raise ValueError(
                    f"{self!r} lacks {missing} of its {len(list(_pairs(len(self), self.tile)))} tiles. Call `stream_gram` with the "
                    f"same kernel and inputs again to go on."
                )

    def _missing(self) -> list[tuple[int, int]]:
        """The tiles, by first row and column, that are not there yet."""
        there = self._folder
        return [(i, j) for i, j in _pairs(len(self), self.tile) if not (there / f"{i // self.tile}/{j // self.tile}").is_file()]

    def _write(self, i: int, j: int, block: np.ndarray) -> None:
        self.array[i : i + self.tile, j : j + self.tile] = block


def _check_disk(path: Path, missing: int, tile: int, x: np.ndarray) -> None:
    needed, free = 2 * missing * tile**2 * x.dtype.itemsize, shutil.disk_usage(path).free
    if needed > free:
        raise ValueError(
            f"`{CALL}` needs {needed / 1e9:.3g} GB on disk, {path} has {free / 1e9:.3g} GB free. float32 x takes half."
        )


def _pairs(n: int, tile: int) -> Iterator[tuple[int, int]]:
    for i in range(0, n, tile):
        for j in range(i, n, tile):
            yield i, j


def _tiles(kernel: AbstractKernel, x: np.ndarray, starts: list[tuple[int, int]], tile: int) -> Iterator[np.ndarray]:
    n = len(x)
    if isinstance(kernel, AbstractClosedForm):
        call = f"{type(kernel).__name__}(net)(x)"
        kernel.network.check_rows(call, x)
        for (i, j), block in zip(starts, gram.compute(kernel._select, kernel.network, x, None, starts, (tile, tile)), strict=True):
            yield block[: n - i, : n - j]
        return
    for i, j in starts:
        rows = x[i : i + tile]
        yield np.asarray(kernel(rows) if i == j else kernel(rows, x[j : j + tile]))


def _opened(kernel: AbstractKernel, x: np.ndarray, path: Path, tile: int) -> Any:
    try:
        config = kernel.network.to_config() if isinstance(kernel, AbstractClosedForm) else None
    except ValueError:  # a function of the user's own
        config = None
    at = np.unique(np.linspace(0, len(x) - 1, 3).astype(int))
    wanted = {
        "format": 1,
        "kernel": type(kernel).__name__,
        "network": None if config is None else json.loads(json.dumps(config)),
        "inputs": hashlib.sha256(str((x.dtype, x.shape)).encode() + np.ascontiguousarray(x).tobytes()).hexdigest(),
        "tile": tile,
        "sample": [float(v) for v in np.asarray(kernel(x[at])).ravel()],
    }
    zarr = _zarr()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not (path / "zarr.json").is_file():
            raise ValueError(f"`{CALL}` needs a new folder, an empty one or an earlier store. Got {str(path)!r}.")
        group = zarr.open_group(path, mode="r+")
        found = dict(group.attrs)
        for key, value in wanted.items():
            same = key in found and (np.allclose(found[key], value, rtol=1e-4, atol=0) if key == "sample" else found[key] == value)
            if not same:
                raise ValueError(
                    f"`{CALL}` goes on only with what it has begun: the store {str(path)!r} has other {key}. "
                    f"Use another folder, or the same kernel, x and tile."
                )
        if {"gram", "x"} <= set(group):
            return group
    else:
        group = zarr.create_group(path, attributes=wanted)
    n = len(x)
    settings = {"compressors": zarr.codecs.Crc32cCodec(), "fill_value": float("nan"), "overwrite": True}
    group.create_array("x", shape=x.shape, chunks=x.shape, dtype=x.dtype, **settings)[:] = x
    group.create_array("gram", shape=(n, n), chunks=(tile, tile), dtype=x.dtype, **settings)
    return group


def _zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise ImportError('Stored Gram matrices need zarr: pip install "ntk_ln[store]".') from None
    return zarr
