"""Reads a table of numbers into inputs and a target, and makes the sine set."""

import csv
import difflib
import gzip
import lzma
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

SUFFIXES = (".csv", ".csv.gz", ".csv.xz", ".npz", ".parquet")
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Dataset:
    """Inputs `x` (n, d) and the target `y` (n,), with where they came from."""

    x: np.ndarray
    y: np.ndarray
    features: tuple[str, ...]
    target: str
    source: str
    rows_in_file: int
    standardized: bool = False

    def standardize(self) -> "Dataset":
        """Each feature centred and divided by its standard deviation, a constant one only centred; the target stays raw."""
        # A power of two scales exactly; the squares of the raw values may overflow.
        x = np.ldexp(self.x, -np.frexp(np.max(np.abs(self.x), axis=0))[1])
        constant = np.ptp(x, axis=0) == 0
        centred = x - x.mean(axis=0)
        centred = np.where(constant, 0.0, centred - centred.mean(axis=0))  # twice: the first mean is rounded
        std = np.where(constant, 1.0, centred.std(axis=0))
        return replace(self, x=centred / std, standardized=True)


def sine(n: int = 100) -> Dataset:
    """The sine set: `n` points, x evenly on [-pi, pi], y = sin x.

    >>> sine(5).y.round(3).tolist()
    [-0.0, -1.0, 0.0, 1.0, 0.0]
    """
    x = np.linspace(-np.pi, np.pi, n)
    return Dataset(x[:, None], np.sin(x), ("x",), "sin x", "sine", n)


def load_features(path: str | Path, target: str | None, rows: int | None, seed: int, standardize: bool) -> np.ndarray:
    """The features of `load_table` alone; without a target every column is one."""
    dataset = load_table(path, target, rows, seed, unsupervised=True)
    return dataset.standardize().x if standardize else dataset.x


def load_table(
    path: str | Path, target: str | None = None, rows: int | None = None, seed: int = 0, *, unsupervised: bool = False
) -> Dataset:
    """Read one target column, and every other column as a feature.

    Args:
        path: `.csv` (also `.csv.gz`, `.csv.xz`) with a header line, `.parquet` of numeric columns, or `.npz` of 1-d columns. A
            `.npz` may also hold a matrix `x` (n, d) and `y` (n,); then `target` is not needed.
        target: name of the target column.
        rows: draw this many rows (>= 1) at random without replacement and keep them in file order; all if not given.
        seed: of that draw.
        unsupervised: without a target take every column as a feature; `y` is then the first.

    Raises:
        ValueError: a file missing or unreadable, a column unknown or not numeric, a value in use that is not finite.
        ImportError: a `.parquet` file without pyarrow.
    """
    path = Path(path)
    if rows is not None and rows < 1:
        raise ValueError(f"`rows` must be at least 1. Got {rows}.")
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"The data file {str(path)!r} {what}. Give a file that ends in {', '.join(SUFFIXES)}.")
    suffix = next((s for s in SUFFIXES if path.name.lower().endswith(s)), None)
    if suffix is None:
        raise ValueError(f"The data file {path.name!r} has no known ending. Use one of {', '.join(SUFFIXES)}.")
    try:
        if suffix == ".npz":
            columns = _read_npz(path)
        elif suffix == ".parquet":
            columns = _read_parquet(path)
        else:
            columns = _read_csv(path, suffix)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, lzma.LZMAError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"The data file {path.name!r} is not a readable {suffix} file: {error}.") from error

    if "x" in columns and columns["x"].ndim == 2 and "y" in columns and target in (None, "y"):
        names, features, label = _matrix(columns, path)
    elif unsupervised and target is None and columns:
        first = next(iter(columns))
        names, features, label = _named({"": columns[first], **columns}, "", path)
    else:
        names, features, label = _named(columns, target, path)
    target = target or "y"
    total = len(label)
    if total == 0:
        raise ValueError(f"The data file {path.name!r} has no rows. It needs at least one below the column names.")
    kept = np.arange(total)
    if rows is not None and rows < total:
        kept = np.sort(np.random.default_rng(seed).choice(total, size=rows, replace=False))
    y = _numbers(label, target, kept, path)
    x = np.stack([_numbers(column, name, kept, path) for name, column in zip(names, features, strict=True)], axis=1)
    return Dataset(x, y, names, target, path.name, total)


def _matrix(columns: Columns, path: Path) -> tuple[tuple[str, ...], list[np.ndarray], np.ndarray]:
    x, y = columns["x"], columns["y"]
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.shape != (len(x),):
        raise ValueError(f"{path.name!r} needs one number of `y` per row of `x`. Got x.shape={x.shape}, y.shape={y.shape}.")
    if x.shape[1] == 0:
        raise ValueError(f"{path.name!r} has no features: x.shape={x.shape}. `x` needs at least one column.")
    return tuple(f"x{j}" for j in range(x.shape[1])), list(x.T), y


def _named(columns: Columns, target: str | None, path: Path) -> tuple[tuple[str, ...], list[np.ndarray], np.ndarray]:
    listed = ", ".join(list(columns)[:12]) + (", ..." if len(columns) > 12 else "")
    if target is None:
        raise ValueError(f"{path.name!r} needs the name of its target column. Pass --target with one of: {listed}.")
    if target not in columns:
        close = difflib.get_close_matches(target, columns, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{path.name!r} has no column {target!r}.{hint} Its columns: {listed}.")
    for name, column in columns.items():
        if column.shape != columns[target].shape or column.ndim != 1:
            raise ValueError(
                f"{path.name!r} needs columns of equal length, or a matrix `x` (n, d) with `y` (n,). "
                f"Got {name}.shape={column.shape}, {target}.shape={columns[target].shape}."
            )
    names = tuple(name for name in columns if name != target)
    if not names:
        raise ValueError(f"{path.name!r} has only the target column {target!r}. It needs at least one feature.")
    return names, [columns[name] for name in names], columns[target]


def _numbers(column: np.ndarray, name: str, kept: np.ndarray, path: Path) -> np.ndarray:
    """The kept rows of a column as finite floats, or an error that names the first bad row (counted from 1)."""
    column = column[kept]
    if column.dtype.kind not in "biufUT":
        raise ValueError(f"Column {name!r} of {path.name!r} is not numeric: {column.dtype}. Drop or encode it.")
    try:
        values = column.astype(float)
    except ValueError:
        values = np.array([_float(cell) for cell in column])
    if not np.all(np.isfinite(values)):
        i = int(np.argmin(np.isfinite(values)))
        cell = str(column[i])
        what = repr(cell) if cell.strip() else "an empty cell"
        raise ValueError(
            f"Column {name!r} of {path.name!r} needs finite numbers. Got {what} in row {kept[i] + 1}. Drop, fill or encode it."
        )
    return values


def _float(cell: Any) -> float:
    try:
        return float(cell)
    except ValueError:
        return np.nan


def _read_csv(path: Path, suffix: str) -> Columns:
    opener = {".csv": open, ".csv.gz": gzip.open, ".csv.xz": lzma.open}[suffix]
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        lines = [row for row in csv.reader(file, skipinitialspace=True) if row]
    if not lines:
        raise ValueError(f"The data file {path.name!r} is empty. It needs a line of column names and rows of numbers.")
    header, *body = lines
    header = [name.strip() for name in header]
    if all(np.isfinite(_float(name)) for name in header):
        raise ValueError(f"{path.name!r} starts with numbers. Its first line must name the columns.")
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise ValueError(f"{path.name!r} names the column {twice!r} twice. Column names must differ.")
    for i, row in enumerate(body):
        if len(row) != len(header):
            raise ValueError(f"{path.name!r} needs {len(header)} comma-separated cells in each row. Got {len(row)} in row {i + 1}.")
    cells = np.array(body, dtype=str).reshape(len(body), len(header))
    return dict(zip(header, cells.T, strict=True))


def _read_npz(path: Path) -> Columns:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, TypeError) as error:  # pickled objects, or a bare .npy under this name
        raise ValueError(f"The data file {path.name!r} is not an .npz of plain arrays: {error}.") from error


def _read_parquet(path: Path) -> Columns:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(
            f"Reading {path.name!r} needs pyarrow, which is not installed. Run: pip install 'ntk_ln[parquet]'"
        ) from error
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise ValueError(f"The data file {path.name!r} is not a readable .parquet file: {error}.") from error
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        if pa.types.is_decimal(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
            column = column.cast(pa.float64())
        columns[name] = column.to_numpy()  # a null becomes NaN
    return columns
