"""The smallest eigenvalue of a Gram matrix: a best estimate and a certified lower bound (NumPy and SciPy on the host)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy  # its submodules load at first use: at the top they would cost a third of `import ntk_ln`

from ntk_ln._triangle import largest_entry, mirrored

_EPS = float(np.finfo(np.float64).eps)
_DENSE = 256  # up to here a full eigvalsh costs less than the iteration's overhead
_OPERATOR_STEPS = 1000  # Lanczos basis of a matrix-free operator: 320 MB at n = 40,000


class MinEigenvalue(NamedTuple):
    """The smallest eigenvalue of a symmetric matrix.

    Attributes:
        value: best estimate.
        lower: lower bound of the smallest eigenvalue; certified for matrices, see `min_eigenvalue` for operators.
        method: how `value` was found: "eigvalsh", "inverse_lanczos" or "lanczos"; from a posterior whose Gram matrix is singular
            followed by "_nonzero" (the smallest non-zero eigenvalue), "eigh_nonzero" where `lower` is not certified.
    """

    value: float
    lower: float
    method: str


def min_eigenvalue(gram_or_operator: Any, *, entry_error: float = 0.0) -> MinEigenvalue:
    r"""The smallest eigenvalue of a symmetric matrix, with a certified lower bound.

    `lower` holds for every symmetric matrix whose entries differ from the given ones by at most `entry_error`: such a change
    moves an eigenvalue by at most `n * entry_error` (Weyl), and the rest is proved by a Cholesky factorisation in floating point,

        chol(K - sigma I) runs through  =>  lambda_min(K) >= sigma - 2 gamma_{n+2} trace(K - sigma I),   gamma_k = k u/(1 - k u).

    Args:
        gram_or_operator: symmetric (n, n) array, n >= 1, NumPy or JAX; float32 is widened. More than rounding away from symmetric
            is refused. Or a `scipy.sparse.linalg.LinearOperator`: matrix-free.
        entry_error: absolute error of the entries, >= 0.

    Returns:
        MinEigenvalue(value, lower, method). A singular or indefinite matrix gives a value near or below 0; `lower` stays honest.
        Of an operator only products are known: there `lower` is `value` less the residual and rounding. A residual bounds the
        distance to *some* eigenvalue; the random start makes missing the smallest one unlikely, not impossible.

    Raises:
        ValueError: not square, not symmetric, NaN or infinity, n = 0, negative `entry_error`.
        TypeError: not a real matrix or operator.

    Accuracy: `value` to 1e-8 relative or n eps trace, `lower` within max(1e-6 value, 3 n eps trace) of it
    (tests/test_spectrum.py). One n^2/2 array beside the input; two Cholesky factorisations and some 20 solves.

    References:
        Rump (2006), Verification of positive definiteness, BIT 46, 433-452.
        Higham (2002), Accuracy and Stability of Numerical Algorithms, theorem 10.3.

    >>> import numpy as np
    >>> value, lower, method = min_eigenvalue(np.array([[2.0, 1.0], [1.0, 2.0]]))
    >>> bool(lower <= 1 and abs(value - 1) < 1e-14 and value - lower < 1e-14)
    True
    """
    if not entry_error >= 0 or math.isinf(entry_error):
        raise ValueError(f"`min_eigenvalue(gram, entry_error=...)` needs a finite `entry_error` >= 0. Got {entry_error}.")
    if isinstance(gram_or_operator, scipy.sparse.linalg.LinearOperator):
        return _of_operator(gram_or_operator, float(entry_error))
    gram = _checked(gram_or_operator, entry_error)
    # One triangle is read: a symmetric matrix within entry_error of all entries is within entry_error of this triangle.
    fortran = gram if gram.flags.f_contiguous else np.ascontiguousarray(gram).T
    return of_triangle(fortran, np.diagonal(gram).copy(), float(entry_error))


def of_triangle(upper: np.ndarray, diagonal: np.ndarray, entry_error: float = 0.0) -> MinEigenvalue:
    """`min_eigenvalue` of the matrix with this strict upper triangle (Fortran order, the rest is not read) and diagonal."""
    n = len(diagonal)
    shifted = _Shifted(upper, diagonal, entry_error)
    if n == 1:
        value = float(diagonal[0])
        return MinEigenvalue(value, math.nextafter(value - entry_error, -math.inf), "eigvalsh")
    if shifted.scale == 0:
        return MinEigenvalue(0.0, -n * entry_error, "eigvalsh")
    if n <= _DENSE:
        full = mirrored(upper, diagonal) / shifted.scale
        value, method = float(np.linalg.eigvalsh(full)[0]), "eigvalsh"
        shifted.descend(value, n * _EPS * shifted.trace)
    else:
        value, method = _inverse_lanczos(shifted), "inverse_lanczos"
    return MinEigenvalue(float(value * shifted.scale), float(shifted.lower()), method)


class _Shifted:
    """K - shift I, scaled by a power of two to unit size and factored in LAPACK's half-size (RFP) storage.

    Always holds the factor at the largest shift that a Cholesky factorisation has passed, and that shift.
    """

    def __init__(self, upper: np.ndarray, diagonal: np.ndarray, entry_error: float):
        self.upper, self.n = upper, len(diagonal)
        largest = largest_entry(upper, diagonal)
        self.scale = 2.0 ** min(math.frexp(largest)[1], 1023) if largest else 0.0
        if not self.scale:
            return
        self.diagonal = diagonal / self.scale
        self.entry_error = entry_error / self.scale
        # |d_i| rather than d_i: the unit of rounding must not vanish for indefinite matrices.
        self.trace = float(np.abs(self.diagonal).sum())
        self.shift = -math.inf
        self.factor: np.ndarray | None = None
        # Where LAPACK's DTRTTF('N', 'U') puts the diagonal.
        half, j = self.n // 2, np.arange(self.n)
        rows, columns = np.where(j >= half, j, half + 1 + j), np.where(j >= half, j - half, j)
        self._diagonal_at = rows + (self.n + 1 - self.n % 2) * columns

    def passes(self, shift: float) -> bool:
        """Factors K - shift I; on success keeps factor and shift."""
        self.factor = None  # one half-size array at a time
        packed, _ = scipy.linalg.lapack.dtrttf(self.upper, uplo="U")
        packed /= self.scale
        packed[self._diagonal_at] = self.diagonal - shift
        factor, info = scipy.linalg.lapack.dpftrf(self.n, packed, uplo="U", overwrite_a=1)
        # Pivots near the smallest float would overflow in the solves.
        if info or not np.all(factor[self._diagonal_at] > 1e-100):
            return False
        self.factor, self.shift = factor, shift
        return True

    def descend(self, below: float, step: float) -> bool:
        """Passes at the first of below - step, below - 8 step, ... that works, or at the last that did; whether at the first."""
        known, first = self.shift, below - step
        while (shift := below - step) > known:
            if self.passes(shift):
                return shift == first
            step *= 8
        self.passes(known)
        return False

    def solve(self, b: np.ndarray) -> np.ndarray:
        return scipy.linalg.lapack.dpftrs(self.n, self.factor, b[:, None], uplo="U")[0][:, 0]

    def lower(self) -> float:
        """The bound that the last factorisation proves.

        Theorem 10.3 of Higham: R^T R = A + E with |E| <= gamma_{n+1} |R^T| |R|, in any order of summation, blocked or not. As
        || |R^T| |R| ||_2 <= ||R||_F^2 = trace(A + E), ||E||_2 <= gamma_{n+1} / (1 - gamma_{n+1}) trace(A); and R^T R >= 0, so
        lambda_min(A) >= -||E||_2. gamma_{n+2}, because BLAS multiplies by rounded reciprocals of the pivots. The factor 2 covers
        1 / (1 - gamma) and the roundings of the trace and of this line; 2 u max is the rounding of d - shift; the last term is
        underflow: each of at most n + 1 operations an entry loses less than the smallest normal number, entries are of size <= 1.
        """
        pivots, u = self.diagonal - self.shift, _EPS / 2
        gamma = (self.n + 2) * u / (1 - (self.n + 2) * u)
        loss = 2 * gamma * float(pivots.sum()) + 2 * u * float(np.abs(pivots).max()) + 4 * (self.n + 1) ** 2 * 2.3e-308
        return math.nextafter((self.shift - loss - self.n * self.entry_error * (1 + _EPS)) * self.scale, -math.inf)


def _inverse_lanczos(shifted: _Shifted) -> float:
    """Factors below the spectrum, iterates with the inverse, and moves the shift up to just below the smallest eigenvalue.

    A factorisation that passes a hair below the estimate proves the estimate, so the iteration may stop on a guess: a wrong one
    costs another round. The last factor, so close to the eigenvalue, polishes the estimate in a few solves.
    """
    unit = shifted.n * _EPS * shifted.trace
    if not shifted.passes(0.0):
        shifted.descend(0.0, unit)
    rng = np.random.default_rng(0)
    vector = rng.standard_normal(shifted.n)
    value = math.inf
    for turn in range(20):
        # The first estimate only has to place the second shift.
        estimate, slack, vector = _nearest_above(shifted, vector, 1e-7 if turn == 0 else 1e-9, 0.1 * unit)
        value = min(value, max(estimate, shifted.shift))
        margin = max(5e-7 * abs(value), unit)
        if value - shifted.shift <= 1.01 * margin:
            break
        if not shifted.descend(value, max(margin, slack)):
            vector = rng.standard_normal(shifted.n)  # the last start may have missed the eigenvector
    return value


def _nearest_above(shifted: _Shifted, start: np.ndarray, rtol: float, atol: float) -> tuple[float, float, np.ndarray]:
    """The eigenvalue nearest above the shift, a guess of how far it may still fall, and its vector."""
    values: list[float] = []

    def settled(theta: float, residual: float, _: float) -> bool:
        values.append(shifted.shift + 1 / theta)
        fall = values[max(len(values) - 4, 0)] - values[-1]
        return len(values) >= 3 and fall <= max(rtol * abs(values[-1]), atol) and residual <= 1e-2 * theta

    # Past some 50 solves a new factorisation, nearer to the eigenvalue, is the cheaper way on.
    _, _, vector = _largest(shifted.solve, start, 50, settled)
    slow = len(values) >= 50
    return values[-1], values[len(values) // 2] - values[-1] if slow else 0.0, vector


def _largest(
    apply: Callable[[np.ndarray], np.ndarray], start: np.ndarray, steps: int, stop: Callable[[float, float, float], bool]
) -> tuple[float, float, np.ndarray]:
    """Largest Ritz value, its residual and its vector, by Lanczos with full reorthogonalisation.

    Ends when `stop(value, residual, largest modulus)` says so, the Krylov space is exhausted, or after `steps` products.
    """
    n = len(start)
    steps = min(steps, n)
    basis = np.empty((steps + 1, n))
    basis[0] = start / np.linalg.norm(start)
    alpha, beta = np.empty(steps), np.empty(steps)
    ritz, vectors, residual, known = np.zeros(1), np.ones((1, 1)), np.inf, basis[:1]
    for j in range(steps):
        known = basis[: j + 1]
        w = apply(basis[j])
        alpha[j] = w @ basis[j]
        for _ in range(2):  # twice is enough (Parlett)
            w = w - known.T @ (known @ w)
        beta[j] = scipy.linalg.norm(w, check_finite=False)  # NumPy's squares leave the floats at entries of 1e155
        ritz, vectors = scipy.linalg.eigh_tridiagonal(alpha[: j + 1], beta[:j])
        residual = beta[j] * abs(vectors[-1, -1])
        modulus = max(ritz[-1], -ritz[0])
        if stop(ritz[-1], residual, modulus) or beta[j] <= 4 * _EPS * modulus:
            break
        basis[j + 1] = w / beta[j]
    return ritz[-1], residual, vectors[:, -1] @ known


def largest_eigenvalue(product: Callable[[np.ndarray], np.ndarray], n: int, *, rtol: float = 1e-6) -> float:
    """Largest eigenvalue of a symmetric positive semi-definite matrix of n rows, to `rtol` or better."""
    start = np.random.default_rng(0).standard_normal(n)
    return float(_largest(product, start, 100, lambda theta, residual, _: residual <= rtol * theta)[0])


def _of_operator(operator: Any, entry_error: float) -> MinEigenvalue:
    n = _square(operator.shape)
    dtype: np.dtype[Any] = np.dtype(operator.dtype)
    if dtype.kind not in "fiub":
        raise TypeError(f"`min_eigenvalue(operator)` needs a real operator. Got dtype {dtype}.")
    eps = float(np.finfo(dtype).eps) if dtype.kind == "f" else _EPS

    def negated(v: np.ndarray) -> np.ndarray:
        w = -np.asarray(operator.matvec(v), np.float64).reshape(n)
        if not np.isfinite(w).all():
            raise ValueError("`min_eigenvalue(operator)` needs finite products. `operator.matvec` returned NaN or infinity.")
        return w

    modulus = 0.0

    def settled(_: float, residual: float, largest: float) -> bool:
        nonlocal modulus
        modulus = largest
        return residual <= max(1e-11, eps) * largest

    start = np.random.default_rng(0).standard_normal(n)
    theta, residual, _ = _largest(negated, start, _OPERATOR_STEPS, settled)
    value = -float(theta)
    return MinEigenvalue(value, float(value - residual - n * (eps * modulus + entry_error)), "lanczos")


def _checked(matrix: Any, entry_error: float) -> np.ndarray:
    """The matrix in float64 after the checks of `min_eigenvalue`."""
    if scipy.sparse.issparse(matrix):
        raise TypeError(
            "`min_eigenvalue(gram)` needs a dense array or an operator. Got a sparse matrix: wrap it in "
            "`scipy.sparse.linalg.aslinearoperator`."
        )
    given = np.asarray(matrix)
    if given.dtype.kind not in "fiubV":
        raise TypeError(f"`min_eigenvalue(gram)` needs a real array. Got dtype {given.dtype}.")
    n = _square(given.shape)
    gram = given.astype(np.float64, copy=False)
    eps = _EPS if given.dtype.kind in "iub" else float(np.finfo(given.dtype).eps) if given.dtype.kind == "f" else 2.0**-8
    tile, largest, asymmetry, worst = 1024, 0.0, 0.0, (0, 0)
    for i in range(0, n, tile):
        finite = np.isfinite(gram[i : i + tile])
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise ValueError(f"`min_eigenvalue(gram)` needs finite entries. Row {i + row}, column {column} is not.")
        for j in range(i, n, tile):
            block, mirror = gram[i : i + tile, j : j + tile], gram[j : j + tile, i : i + tile].T
            largest = max(largest, float(block.max()), -float(block.min()))
            if np.array_equal(block, mirror):
                continue
            gap = np.abs(block - mirror)
            if gap.max() > asymmetry:
                asymmetry = float(gap.max())
                r, c = np.unravel_index(gap.argmax(), gap.shape)
                worst = (i + int(r), j + int(c))
    if asymmetry > n * eps * largest + 2 * entry_error:
        raise ValueError(
            f"`min_eigenvalue(gram)` needs a symmetric matrix. Got gram[{worst[0]}, {worst[1]}]={gram[worst]:.17g} and "
            f"gram[{worst[1]}, {worst[0]}]={gram[worst[::-1]]:.17g}. If both are right up to an error, pass it as `entry_error`."
        )
    return gram


def _square(shape: tuple[int, ...]) -> int:
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(f"`min_eigenvalue(gram)` needs a square matrix of shape (n, n), n >= 1. Got shape {tuple(shape)}.")
    return shape[0]
