"""Solving with a Gram matrix on the host in float64: Cholesky, the minimum-norm solution, gradient flow stopped early."""

from dataclasses import dataclass
from math import ceil, log10

import numpy as np
import scipy  # its submodules load at first use: at the top they would cost a third of `import ntk_ln`

from ntk_ln import _cholesky
from ntk_ln._triangle import mirrored, product
from ntk_ln.spectrum import largest_eigenvalue, of_triangle

_EPS = float(np.finfo(np.float64).eps)
_EIGH_ROWS = 32_766  # beyond, the 2 n^2 workspace of LAPACK's DSYEVD overflows its 32-bit size


@dataclass(frozen=True, eq=False)
class Solution:
    """K in one triangle of `square`, its factor in the other, and the coefficients of the mean.

    Attributes:
        square: (n, n), Fortran order: the strict upper triangle of K and, where `factored`, L below: K + noise I = L L^T.
        diagonal: (n,), of K.
        alpha: (n, k); the mean is k_x^T alpha.
        eps: of the precision K was computed in.
        rounding: n eps lambda_max, what the rounding of K does to its eigenvalues.
        condition: of K + noise I on its range, estimated.
        factored: whether by Cholesky.
        values, vectors: otherwise the eigenvalues that count as non-zero, ascending, and their vectors (empty if stopped early).
    """

    square: np.ndarray
    diagonal: np.ndarray
    alpha: np.ndarray
    eps: float
    rounding: float
    condition: float
    factored: bool
    values: np.ndarray
    vectors: np.ndarray

    @property
    def singular(self) -> bool:
        return not self.factored and len(self.values) < len(self.diagonal)

    def gram(self) -> np.ndarray:
        return mirrored(self.square, self.diagonal)

    def norm(self) -> float:
        """sqrt(alpha^T K alpha), the largest over outputs."""
        size = float(np.abs(self.alpha).max()) or 1.0  # its square may leave the floats
        alpha = self.alpha / size
        squares = (alpha * product(self.square, self.diagonal, alpha)).sum(axis=0)
        return size * float(np.sqrt(max(squares.max(), 0.0)))

    def reduction(self, cross: np.ndarray) -> np.ndarray:
        """k^T (K + noise I)^-1 k, or with the pseudo-inverse, of each column k."""
        if self.factored:
            white = _cholesky.forward(self.square, cross)
        else:
            white = (self.vectors.T @ cross) / np.sqrt(self.values)[:, None]
        return np.square(white).sum(axis=0)

    def solve(self, b: np.ndarray) -> np.ndarray:
        """(K + noise I)^-1 b, or the pseudo-inverse, for b of shape (n, m)."""
        if self.factored:
            return _cholesky.solve(self.square, b)
        return self.vectors @ ((self.vectors.T @ b) / self.values[:, None])

    def log_determinant(self) -> float:
        """Of K + noise I."""
        if self.factored:
            return 2 * float(np.log(np.diagonal(self.square)).sum())
        return float(np.log(self.values).sum())


def solve(gram: np.ndarray, y: np.ndarray, noise: float, eps: float) -> Solution:
    """alpha = (K + noise I)^-1 y; where K is singular and noise 0 the one of least norm, if the labels allow one.

    Args:
        gram: K, (n, n), C order; overwritten.
        y: (n, k).
        noise: variance, >= 0.
        eps: of the precision K was computed in.
    """
    n, square, diagonal = len(gram), gram.T, np.diagonal(gram).copy()
    largest = largest_eigenvalue(lambda v: gram @ v, n, rtol=1e-3)
    rounding = n * eps * largest
    if 0 < noise < rounding:
        raise ValueError(
            f"`posterior(..., noise={noise:.3g})` is lost in the rounding of the Gram matrix (n eps lambda_max = {rounding:.1e}). "
            f"Use noise=0 or noise >= {rounded_up(rounding):.0e}."
        )
    np.fill_diagonal(square, diagonal + noise)
    if _cholesky.factor(square):
        # Pivots of a singular matrix may round to positive numbers: ask for the eigenvalue.
        smallest = noise or 1 / largest_eigenvalue(lambda v: _cholesky.solve(square, v[:, None])[:, 0], n, rtol=0.01)
        if smallest > rounding or noise:
            alpha = _cholesky.solve(square, y)
            empty = np.empty((n, 0))
            return Solution(square, diagonal, alpha, eps, rounding, (largest + noise) / smallest, True, empty[0], empty)
    if noise:
        raise _indefinite(square, diagonal, rounding, noise)
    return _least_norm(square, diagonal, y, eps)


def solve_stopped(gram: np.ndarray, y: np.ndarray, stop_time: float, step_size: float | None, eps: float) -> Solution:
    """alpha = K^-1 (I - exp(-K T)) y, or K^-1 (I - (1 - eta K)^(T/eta)) y; arguments as `solve`."""
    square, diagonal = gram.T, np.diagonal(gram).copy()
    values, vectors, rounding = _eigh(square, diagonal, eps)
    largest = values[-1]
    if step_size is not None and step_size * largest > 1 + len(values) * _EPS:
        raise ValueError(
            f"`posterior(..., step_size={step_size:.6g})` needs step_size * lambda_max <= 1, or gradient descent may overshoot. "
            f"Got lambda_max={largest:.6g}: use step_size <= {np.nextafter(1 / largest, 0):.17g}."
        )
    values = np.maximum(values, 0)
    alpha = vectors @ (learned(values, stop_time, step_size)[:, None] * (vectors.T @ y))
    return Solution(square, diagonal, alpha, eps, rounding, 1.0, False, values, vectors[:, :0])


def learned(value: np.ndarray | float, stop_time: float, step_size: float | None) -> np.ndarray:
    """(1 - exp(-lambda T)) / lambda, or (1 - (1 - eta lambda)^(T/eta)) / lambda; T at lambda = 0."""
    value = np.asarray(value, np.float64)
    with np.errstate(divide="ignore"):
        if step_size is None:
            exponent = -value * stop_time
        else:
            exponent = stop_time / step_size * np.log1p(np.maximum(-step_size * value, -1))
    zero = value == 0
    return np.where(zero, stop_time, -np.expm1(exponent) / np.where(zero, 1, value))


def _least_norm(square: np.ndarray, diagonal: np.ndarray, y: np.ndarray, eps: float) -> Solution:
    n = len(diagonal)
    values, vectors, rounding = _eigh(square, diagonal, eps)
    kept = values > rounding
    range_values, range_vectors, null_vectors = values[kept], vectors[:, kept], vectors[:, ~kept]
    alpha = range_vectors @ ((range_vectors.T @ y) / range_values[:, None])
    missed = np.linalg.norm(null_vectors.T @ y, axis=0)
    size = np.linalg.norm(y, axis=0)
    # Rounding of K turns its null space by rounding / lambda, so that labels in its range miss it by rounding |alpha|, and a few
    # times that where eigenvalues fall through the cut without a gap. Past sqrt(eps) of the labels it is no interpolant any more.
    allowed = np.minimum(10 * rounding * np.linalg.norm(alpha, axis=0) + n * _EPS * size, np.sqrt(_EPS) * size)
    if np.any(missed > allowed):
        raise _contradiction(square, diagonal, y, len(range_values), values[0], rounding)
    condition = range_values[-1] / range_values[0] if len(range_values) else 1.0
    return Solution(square, diagonal, alpha, eps, rounding, condition, False, range_values, range_vectors)


def _eigh(square: np.ndarray, diagonal: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray, float]:
    n = len(diagonal)
    if n > _EIGH_ROWS:
        raise ValueError(
            f"`posterior(kernel, x, y)` needs all eigenvalues of the Gram matrix here (it is singular to rounding, or stop_time is "
            f"given), which LAPACK does up to n={_EIGH_ROWS}. Got n={n}: use noise > 0 and no stop_time, or fewer rows."
        )
    values, vectors = scipy.linalg.eigh(mirrored(square, diagonal), driver="evd", overwrite_a=True, check_finite=False)
    rounding = n * eps * float(max(values[-1], -values[0]))
    if values[0] < -2 * rounding:
        raise _indefinite(square, diagonal, rounding)
    return values, vectors, rounding


def _indefinite(square: np.ndarray, diagonal: np.ndarray, rounding: float, noise: float = 0.0) -> ValueError:
    value = of_triangle(square, diagonal).value
    useful = rounded_up(max(-2 * value, 10 * rounding))
    return ValueError(
        f"`posterior(kernel, x, y)` needs a positive semi-definite Gram matrix. Got lambda_min={value:.3g}, beyond rounding "
        f"(n eps lambda_max = {rounding:.1e}), with noise={noise:.3g}. Use noise >= {useful:.0e}, or a kernel computed in higher "
        f"precision."
    )


def _contradiction(
    square: np.ndarray, diagonal: np.ndarray, y: np.ndarray, rank: int, smallest: float, rounding: float
) -> ValueError:
    """Labels that no function of the kernel takes; names the pair of rows that shows it best, where one does."""
    n = len(diagonal)
    length = np.sqrt(np.maximum(diagonal, 0))[:, None]
    positive = length > 0
    # |f(x_i)/|k_i| - f(x_j)/|k_j|| <= |f|_H |k_i/|k_i| - k_j/|k_j||: at equal directions k_i the labels, so scaled, must agree.
    scaled = np.where(positive, y, 0) / np.where(positive, length, 1)
    same = mirrored(square, diagonal) >= (1 - 64 * _EPS) * (length * length.T)
    gap = np.where(np.triu(same, 1), np.max([np.abs(column[:, None] - column) for column in scaled.T], axis=0), 0)
    i, j = np.unravel_index(gap.argmax(), gap.shape)
    forced = np.flatnonzero(~positive[:, 0] & y.any(axis=1))
    if len(forced):
        cause = f"Row {forced[0]} of `x` has k(x, x) = 0, so every function of the kernel is 0 there, but y[{forced[0]}] is not"
    elif gap[i, j] > np.sqrt(_EPS) * np.abs(scaled).max():
        cause = f"Rows {i} and {j} of `x` are equal to the kernel but for a factor, y[{i}]={y[i]} and y[{j}]={y[j]} are not"
    else:
        cause = "Features or biases are too few for so many rows (1-D data without biases has rank 2), or rows nearly coincide"
    return ValueError(
        f"`posterior(kernel, x, y)` with noise=0 needs labels that a function of the kernel can take: the Gram matrix has rank "
        f"{rank} < n={n} to rounding (lambda_min={smallest:.1e}). {cause}. Use noise >= {rounded_up(10 * rounding):.0e}, or "
        f"biases, or other rows."
    )


def rounded_up(value: float) -> float:
    """The next power of ten."""
    return 10.0 ** ceil(log10(max(value, 1e-300)))
