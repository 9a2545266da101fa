"""Solving with a Gram matrix that is never in memory: conjugate gradients, preconditioned by a pivoted Cholesky factor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # its submodules load at first use: at the top they would cost a third of `import ntk_ln`

from ntk_ln._solver import rounded_up
from ntk_ln.spectrum import largest_eigenvalue

RANK = 200  # columns of the preconditioner: n RANK numbers
STEPS = 1000


@dataclass(frozen=True, eq=False)
class Iterated:
    """What the posterior needs of K + noise I, from products with K alone.

    Attributes:
        product: K b for b of shape (n, k).
        precondition: P^-1 b of an approximation P of K + noise I.
        diagonal: (n,), of K.
        alpha: (n, k); the mean is k_x^T alpha.
        noise, tolerance: as given.
        iterations: of conjugate gradients, the most over outputs.
        residual: |y - (K + noise I) alpha| / |y|, the largest over outputs, computed anew.
        eps: of the precision K is computed in.
        condition: of K + noise I, an upper estimate.
    """

    product: Callable[[np.ndarray], np.ndarray]
    precondition: Callable[[np.ndarray], np.ndarray]
    diagonal: np.ndarray
    alpha: np.ndarray
    noise: float
    tolerance: float
    iterations: int
    residual: float
    eps: float
    condition: float
    direct: bool = False  # `precondition` is exact but for rounding
    factored: bool = False
    singular: bool = False

    def norm(self) -> float:
        """sqrt(alpha^T K alpha), the largest over outputs."""
        size = float(np.abs(self.alpha).max()) or 1.0  # its square may leave the floats
        alpha = self.alpha / size
        squares = (alpha * self.product(alpha)).sum(axis=0)
        return size * float(np.sqrt(max(squares.max(), 0.0)))

    def solve(self, b: np.ndarray) -> np.ndarray:
        """(K + noise I)^-1 b for b of shape (n, m)."""
        return _solve(
            self.product, self.precondition, b, self.noise, self.tolerance, self.eps * self.condition, started=self.direct
        )[0]

    def reduction(self, cross: np.ndarray) -> np.ndarray:
        """k^T (K + noise I)^-1 k of each column k."""
        return (cross * self.solve(cross)).sum(axis=0)


def iterate(
    product: Callable[[np.ndarray], np.ndarray],
    column: Callable[[int], np.ndarray],
    diagonal: np.ndarray,
    y: np.ndarray,
    noise: float,
    tolerance: float,
    eps: float,
    direct: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Iterated:
    """alpha = (K + noise I)^-1 y to a relative residual of `tolerance`.

    Args:
        product: K b for b of shape (n, k).
        column: the i-th column of K.
        diagonal: (n,), of K.
        y: (n, k).
        noise: variance, >= n eps lambda_max.
        tolerance: of |y - (K + noise I) alpha| / |y|.
        eps: of the precision K is computed in.
        direct: (K + noise I)^-1 b for b of shape (n, k) by another solver, to start from and to precondition with.
    """
    n = len(diagonal)
    largest = largest_eigenvalue(lambda v: product(v[:, None])[:, 0], n, rtol=1e-2)
    if noise < n * eps * largest:
        raise ValueError(
            f'`posterior(..., solver="cg", noise={noise:.3g})` needs noise of at least n eps lambda_max = {n * eps * largest:.1e}, '
            f"or conjugate gradients may not converge. Use noise >= {rounded_up(n * eps * largest):.0e}."
        )
    precondition = direct or _preconditioner(column, diagonal, noise)
    condition, exact = (largest + noise) / noise, direct is not None
    alpha, iterations, residual = _solve(product, precondition, y, noise, tolerance, eps * condition, started=exact)
    return Iterated(product, precondition, diagonal, alpha, noise, tolerance, iterations, residual, eps, condition, exact)


def _solve(
    product, precondition, b: np.ndarray, noise: float, tolerance: float, rounding: float, *, started: bool
) -> tuple[np.ndarray, int, float]:
    n = len(b)
    linear: Any = scipy.sparse.linalg.LinearOperator
    operator = linear((n, n), matvec=lambda v: product(v.reshape(n, 1))[:, 0] + noise * v.ravel(), dtype=np.float64)
    inverse = linear((n, n), matvec=lambda v: precondition(v.reshape(n, 1))[:, 0], dtype=np.float64)
    out, most, worst = np.zeros(b.shape), 0, 0.0
    for k in range(b.shape[1]):
        # In units of the labels: their squares may leave the floats.
        size = float(np.abs(b[:, k]).max(initial=0.0))
        if size == 0:
            continue
        target = b[:, k] / size
        length = float(np.linalg.norm(target))
        solution = precondition(target[:, None])[:, 0] if started else np.zeros(n)
        count, residual = [0], np.inf

        def counted(_: np.ndarray, count: list[int] = count) -> None:
            count[0] += 1

        # The residual that the iteration keeps drifts from the true one: it is started again from there.
        while True:
            rest = target - operator.matvec(solution)
            before, residual = residual, float(np.linalg.norm(rest)) / length
            if residual <= tolerance:
                break
            if residual > before / 2 or count[0] >= STEPS:
                raise ValueError(
                    f'`posterior(..., solver="cg")` stopped after {count[0]} steps with a residual of {residual:.1e}, more than '
                    f"tolerance={tolerance:.1e}; rounding alone leaves about eps lambda_max/noise = {rounding:.1e}. Use a larger "
                    'noise, a larger tolerance, or solver="cholesky".'
                )
            goal = max(tolerance / (2 * residual), 1e-12)
            scale = residual * length
            step, _ = scipy.sparse.linalg.cg(
                operator, rest / scale, rtol=goal, atol=0.0, maxiter=STEPS - count[0], M=inverse, callback=counted
            )
            solution = solution + scale * step
        out[:, k], most, worst = size * solution, max(most, count[0]), max(worst, residual)
    return out, most, worst


def _preconditioner(column, diagonal: np.ndarray, noise: float) -> Callable[[np.ndarray], np.ndarray]:
    """b -> (L L^T + noise I)^-1 b, L the pivoted Cholesky factor of K's first columns (Harbrecht, Peters, Schneider 2012)."""
    n = len(diagonal)
    factor, left = np.zeros((n, min(RANK, n))), diagonal.astype(np.float64)
    for m in range(factor.shape[1]):
        pivot = int(left.argmax())
        # Below the noise a column no longer counts.
        if left[pivot] <= 1e-3 * noise:
            factor = factor[:, :m]
            break
        entry = column(pivot) - factor[:, :m] @ factor[pivot, :m]
        factor[:, m] = entry / left[pivot] ** 0.5
        left = np.maximum(left - factor[:, m] ** 2, 0)
        left[pivot] = 0
    inner = scipy.linalg.cho_factor(noise * np.eye(factor.shape[1]) + factor.T @ factor)

    def inverse(b: np.ndarray) -> np.ndarray:
        return (b - factor @ scipy.linalg.cho_solve(inner, factor.T @ b)) / noise

    return inverse
