"""Cholesky factorisation in place, block by block: K in the strict upper triangle, its factor below, in one array.

LAPACK's own crashes on matrices of 13 GB in builds with 32-bit sizes; here every call is on blocks or through NumPy's product, and
all but a few percent of the work is that product.
"""

from collections.abc import Iterator

import numpy as np
import scipy  # its submodules load at first use: at the top they would cost a third of `import ntk_ln`

BLOCK = 1024
ROWS = 4096  # rows of a product at once: its result is 32 MB


def factor(square: np.ndarray) -> bool:
    """Overwrites the lower triangle of a symmetric Fortran-ordered matrix with L, K = L L^T; False if K is not positive definite.

    The strict upper triangle is not read and stays as it is.
    """
    n = len(square)
    for k in range(0, n, BLOCK):
        block, left = slice(k, k + BLOCK), square[k : k + BLOCK, :k]
        corner = square[block, block]
        lower, info = scipy.linalg.lapack.dpotrf(corner - left @ left.T, lower=1, clean=1)
        if info:
            return False
        corner[:] = lower + np.triu(corner, 1)
        for rows in _blocks(k + BLOCK, n, ROWS):
            panel = square[rows, block] - square[rows, :k] @ left.T
            square[rows, block] = scipy.linalg.solve_triangular(lower, panel.T, lower=True, check_finite=False).T
    return True


def forward(square: np.ndarray, b: np.ndarray) -> np.ndarray:
    """L^-1 b for b of shape (n, m), L in the lower triangle."""
    out = np.array(b, np.float64)
    for rows in _blocks(0, len(square), BLOCK):
        right = out[rows] - square[rows, : rows.start] @ out[: rows.start]
        out[rows] = scipy.linalg.solve_triangular(square[rows, rows], right, lower=True, check_finite=False)
    return out


def solve(square: np.ndarray, b: np.ndarray) -> np.ndarray:
    """K^-1 b for b of shape (n, m)."""
    n, out = len(square), forward(square, b)
    for rows in reversed(list(_blocks(0, n, BLOCK))):
        right = out[rows] - square[rows.stop :, rows].T @ out[rows.stop :]
        out[rows] = scipy.linalg.solve_triangular(square[rows, rows], right, lower=True, trans=1, check_finite=False)
    return out


def _blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    for k in range(start, stop, size):
        yield slice(k, min(k + size, stop))
