"""A symmetric matrix kept as a diagonal and the strict upper triangle of a Fortran-ordered array.

The lower triangle is then free for a Cholesky factor: a matrix and its factor in the memory of one.
"""

from collections.abc import Iterator

import numpy as np

_TILE = 512


def largest_entry(upper: np.ndarray, diagonal: np.ndarray) -> float:
    """The largest |k_ij|."""
    largest = float(np.abs(diagonal).max())
    for _, corner, strip in _row_blocks(upper):
        for block in (corner, strip):
            if block.size:
                largest = max(largest, float(block.max()), -float(block.min()))
    return largest


def product(upper: np.ndarray, diagonal: np.ndarray, b: np.ndarray) -> np.ndarray:
    """K b for b of shape (n, k)."""
    out = diagonal[:, None] * b
    for i, corner, strip in _row_blocks(upper):
        rows, after = slice(i, i + _TILE), slice(i + _TILE, None)
        out[rows] += corner @ b[rows] + corner.T @ b[rows] + strip @ b[after]
        out[after] += strip.T @ b[rows]
    return out


def mirrored(upper: np.ndarray, diagonal: np.ndarray) -> np.ndarray:
    """K as a full, exactly symmetric array."""
    full = np.empty(upper.shape)
    for i, corner, strip in _row_blocks(upper):
        rows, after = slice(i, i + _TILE), slice(i + _TILE, None)
        full[rows, rows] = corner + corner.T
        full[rows, after] = strip
        full[after, rows] = strip.T
    np.fill_diagonal(full, diagonal)
    return full


def _row_blocks(upper: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """First row, strictly upper corner and the strip to its right, of each block of rows."""
    for i in range(0, len(upper), _TILE):
        rows = upper[i : i + _TILE]
        yield i, np.triu(rows[:, i : i + _TILE], 1), rows[:, i + _TILE :]
