"""Gram matrices on disk: tiles in a Zarr store, which may be interrupted at any moment and gone on with."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy  # its submodules load at first use: at the top they would cost a third of `import ntk_ln`

from ntk_ln import _memory
from ntk_ln._dtype import check_rows, check_whole, is_tracer
from ntk_ln._progress import announced
from ntk_ln.kernels import gram
from ntk_ln.kernels._base import AbstractKernel, symmetric_operator
from ntk_ln.kernels.closed_form import NNGP, NTK, AbstractClosedForm
from ntk_ln.network import network_from_config

TILE = 1008  # 8 MB in float64
CALL = "stream_gram(kernel, x, store)"
KERNELS = {"NTK": NTK, "NNGP": NNGP}
CHECKSUM = 4  # bytes after a tile's own
LOCK = ".lock"


def stream_gram(kernel: AbstractKernel, x: Any, store: str | Path, *, tile: int | None = None) -> "StoredGram":
    """Computes k(x, x) tile by tile into a folder, and goes on where an earlier call, however it ended, has stopped.

    The folder is a Zarr (v3) group with the arrays `gram` (n, n), in chunks of `tile` rows and columns with checksums, and `x`.
    Each pair of mirrored tiles is computed once; a tile is there whole or not at all. Memory: a few tiles. Processes that fill the
    same folder at once do each other no harm, and no good: they compute the same tiles.

    Args:
        kernel: `NTK(net)`, `NNGP(net)` or any other kernel.
        x: (n, d), finite, n >= 1; float32 stays float32 in the store, all else is float64.
        store: the folder; new, empty, or of an earlier call with the same kernel, x and tile.
        tile: rows and columns of a tile, 1008 by default, at most n.

    Returns:
        StoredGram, complete.

    Raises:
        ImportError: zarr is not installed: `pip install "ntk_ln[store]"`.
        MemoryError: tiles too large for the memory.
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
    if tile is not None:
        check_whole(tile, "stream_gram(..., tile=...)", "tile", 1)
    tile = min(TILE if tile is None else int(tile), len(rows))
    held = (2 * (os.cpu_count() or 1) + 1) * tile**2 * rows.dtype.itemsize
    _memory.check(held, CALL, "Give a smaller tile.")
    stored = StoredGram(_opened(kernel, rows, Path(store), tile), kernel)
    missing = stored._missing()
    _check_disk(Path(store), len(missing), tile, rows)
    for (i, j), block in zip(missing, announced(_tiles(kernel, rows, missing, tile), len(missing), "tiles"), strict=True):
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
        for name in ("gram", "x"):
            group[name]
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
            make = KERNELS.get(self._group.attrs["kernel"])
            self._kernel = None if make is None else make(network_from_config(config))
        return self._kernel

    def check_kernel(self, kernel: AbstractKernel, call: str) -> None:
        """Raises unless the matrix was computed with this kernel."""
        found, other = dict(self._group.attrs), _identity(kernel, self.x)
        for key, value in other.items():
            if not _agrees(key, found.get(key), value, self.dtype):
                raise ValueError(f"`{call}` needs the kernel that `gram` was computed with: other {key}.")

    @property
    def complete(self) -> bool:
        """Whether all tiles are there."""
        return not self._missing()

    def __getitem__(self, index: Any) -> np.ndarray:
        self._check_complete()
        return self._read(index)

    def __matmul__(self, v: np.ndarray) -> np.ndarray:
        self._check_complete()
        v = np.asarray(v)
        if len(v) != len(self):
            raise ValueError(f"`gram @ v` needs v of {len(self)} rows. Got shape {v.shape}.")
        out = np.zeros(v.shape, np.float64)
        for i, j in _pairs(len(self), self.tile):
            block = self._read(self._at(i, j)).astype(np.float64, copy=False)
            out[i : i + self.tile] += block @ v[j : j + self.tile]
            if i != j:
                out[j : j + self.tile] += block.T @ v[i : i + self.tile]
        return out

    def diag(self) -> np.ndarray:
        """The diagonal (n,)."""
        self._check_complete()
        starts = range(0, len(self), self.tile)
        return np.concatenate([np.diagonal(self._read(self._at(i, i))) for i in starts])

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
        """The tiles, by first row and column, that are not there yet, or not whole."""
        whole = self.tile**2 * self.dtype.itemsize + CHECKSUM

        def there(i: int, j: int) -> bool:
            path = self._path(i, j)
            return path.is_file() and path.stat().st_size == whole

        return [(i, j) for i, j in _pairs(len(self), self.tile) if not (there(i, j) and there(j, i))]

    def _read(self, index: Any) -> np.ndarray:
        try:
            return self.array[index]
        except ValueError as error:
            damaged = [str(self._path(i, j)) for i, j in _squares(len(self), self.tile) if not self._readable(i, j)]
            if not damaged:
                raise
            raise ValueError(
                f"{self!r} has damaged tiles ({error}). Delete {', '.join(damaged)} and call `stream_gram` with the same kernel "
                "and inputs to compute them again."
            ) from None

    def _readable(self, i: int, j: int) -> bool:
        try:
            self.array[self._at(i, j)]
        except ValueError:
            return False
        return True

    def _at(self, i: int, j: int) -> tuple[slice, slice]:
        return slice(i, i + self.tile), slice(j, j + self.tile)

    def _path(self, i: int, j: int) -> Path:
        return self._folder / f"{i // self.tile}/{j // self.tile}"

    def _write(self, i: int, j: int, block: np.ndarray) -> None:
        self.array[self._at(i, j)] = block


def _check_disk(path: Path, missing: int, tile: int, x: np.ndarray) -> None:
    needed, free = 2 * missing * tile**2 * x.dtype.itemsize, shutil.disk_usage(path).free
    if needed > free:
        raise ValueError(
            f"`{CALL}` needs {needed / 1e9:.3g} GB on disk, {path} has {free / 1e9:.3g} GB free. float32 x takes half."
        )


def _squares(n: int, tile: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for i in range(0, n, tile) for j in range(0, n, tile))


def _pairs(n: int, tile: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for i, j in _squares(n, tile) if i <= j)


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


def _identity(kernel: AbstractKernel, x: np.ndarray) -> dict[str, Any]:
    """What tells kernels apart: their names, their networks, and entries at a few rows, for functions of the user's own."""
    try:
        config = kernel.network.to_config() if isinstance(kernel, AbstractClosedForm) else None
    except ValueError:  # a function of the user's own
        config = None
    at = np.unique(np.linspace(0, len(x) - 1, 8).astype(int))
    return {
        "kernel": type(kernel).__name__,
        "network": None if config is None else json.loads(json.dumps(config)),
        "sample": [float(v) for v in np.asarray(kernel(x[at])).ravel()],
    }


def _agrees(key: str, found: Any, wanted: Any, dtype: Any) -> bool:
    if key != "sample":
        return found == wanted
    # One machine rounds as another up to a few digits.
    rtol = np.sqrt(np.finfo(dtype).eps) / 10
    return (
        found is not None and np.shape(found) == np.shape(wanted) and np.allclose(found, wanted, rtol, rtol * np.abs(wanted).max())
    )


def _opened(kernel: AbstractKernel, x: np.ndarray, path: Path, tile: int) -> Any:
    inputs = hashlib.sha256(str((x.dtype, x.shape)).encode() + np.ascontiguousarray(x).tobytes()).hexdigest()
    wanted = {"format": 1, "inputs": inputs, "tile": tile, **_identity(kernel, x)}
    zarr = _zarr()
    if path.exists() and (not path.is_dir() or any(not _is_ours(entry) for entry in path.iterdir())):
        raise ValueError(f"`{CALL}` needs a new folder, an empty one or an earlier store. Got {str(path)!r}.")
    path.mkdir(parents=True, exist_ok=True)
    with _creating(path):
        if (path / "zarr.json").is_file():
            group = zarr.open_group(path, mode="r+")
            found = dict(group.attrs)
            for key, value in wanted.items():
                if not _agrees(key, found.get(key), value, x.dtype):
                    raise ValueError(
                        f"`{CALL}` goes on only with what it has begun: the store {str(path)!r} has other {key}. "
                        f"Use another folder, or the same kernel, x and tile."
                    )
            if "gram" in group and "x" in group:
                return group
        else:
            group = zarr.create_group(path, attributes=wanted)
        n = len(x)
        # What is there of an array was left by a killed process before it wrote a tile: `gram` comes last.
        settings = {"compressors": zarr.codecs.Crc32cCodec(), "fill_value": float("nan"), "overwrite": True}
        group.create_array("x", shape=x.shape, chunks=x.shape, dtype=x.dtype, **settings)[:] = x
        group.create_array("gram", shape=(n, n), chunks=(tile, tile), dtype=x.dtype, **settings)
        return group


def _is_ours(entry: Path) -> bool:
    """What a store has in its folder, whole or begun."""
    return entry.name in {"zarr.json", "gram", "x", LOCK} or (entry.name.startswith("zarr.") and entry.suffix == ".partial")


@contextmanager
def _creating(path: Path) -> Iterator[None]:
    """Of several processes one creates the store; a killed one lets go of the lock."""
    try:
        from filelock import FileLock
    except ImportError:
        raise ImportError('Stored Gram matrices need filelock: pip install "ntk_ln[store]".') from None
    with FileLock(path / LOCK):
        yield
        with suppress(OSError):  # whoever gets it from here on finds a store
            (path / LOCK).unlink()


def _zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise ImportError('Stored Gram matrices need zarr: pip install "ntk_ln[store]".') from None
    return zarr
