"""Bounds of the posterior mean over all of R^d (Theorems 3.2 and 3.3), and the largest value it takes there."""

from math import inf, isinf, isnan, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from ntk_ln._dtype import enable_x64
from ntk_ln.far_field import check_far, closed_form, homogeneous_kernel
from ntk_ln.kernels.closed_form import NTK, AbstractClosedForm
from ntk_ln.posterior import Posterior


class KernelSup(NamedTuple):
    """C = sup over x of k(x, x); inf where unbounded; `exact` is False where it was maximised numerically."""

    value: float
    exact: bool


class SupNormBound(NamedTuple):
    """The chain |f(x)| <= rkhs <= spectral <= dataset for every x, and what it is made of; inf where unbounded."""

    kernel_sup: float
    effective_eigenvalue: float
    rkhs_norm: float
    rkhs: float
    spectral: float
    dataset: float


class SupNorm(NamedTuple):
    """The largest |f| found: at `point`, or at infinity in `direction` where `point` is None."""

    value: float
    point: np.ndarray | None
    direction: np.ndarray | None


def kernel_sup(kernel: AbstractClosedForm) -> KernelSup:
    r"""C = sup_x k(x, x), the constant of Theorem 3.2.

    k(x, x) depends on |x|^2/d alone: C is a supremum over the half-circle from x = 0 to infinity. It is finite if and only if a
    norm layer sits somewhere and every activation before the first one has degree n > 1/2 (with erf before it Theta(x,x) grows
    as |x|), or nothing grows at all (step). Where the recursion makes a Moebius function of |x|^2 it is the larger of the values
    at 0 and at infinity, exactly; elsewhere it is maximised numerically.

    Args:
        kernel: `NTK(net)` or `NNGP(net)`.

    Raises:
        TypeError: a kernel without a closed form.

    Accuracy: rounding where exact, else 1e-10 relative on a one-dimensional maximisation (tests/test_bounds.py).

    References:
        Ziomek, Whittle, Osborne (2025), theorems 3.2 and C.2.

    >>> import ntk_ln as nl
    >>> nl.kernel_sup(nl.NTK(nl.mlp(2)))
    KernelSup(value=inf, exact=True)
    >>> round(nl.kernel_sup(nl.NTK(nl.mlp(2, layer_norm="first"))).value, 6)
    1.52
    """
    growth = closed_form(kernel, "kernel_sup(kernel)").growth
    if isnan(growth.diag):
        check_far(kernel, "kernel_sup(kernel)")
    if (growth.diag if isinstance(kernel, NTK) else growth.mean) > 0:
        return KernelSup(inf, True)
    if growth.monotone:
        return KernelSup(float(_diagonal(kernel, np.array([0.0, inf])).max()), True)
    # Features of the diagonal are a decade of |x| wide: grids of 20 points a decade, then finer ones around the largest value.
    low, high = varying_decades(kernel)
    best, grid = 0.0, np.zeros(GRID)
    for start in range(low, high, 30):
        piece = np.minimum(np.linspace(start, start + 30, GRID), 300.0)
        values = _diagonal(kernel, 10.0**piece)
        if values.max() > best:
            best, grid = float(values.max()), _around(piece, values)
    for _ in range(3):
        values = _diagonal(kernel, 10.0**grid)
        best, grid = max(best, float(values.max())), _around(grid, values)
    radii = np.full(GRID, inf)
    radii[0] = 0.0
    return KernelSup(max(best, float(_diagonal(kernel, radii).max())), False)


GRID = 601  # radii at once: one shape, one compilation


def _around(grid: np.ndarray, values: np.ndarray) -> np.ndarray:
    top = int(np.argmax(values))
    return np.linspace(grid[max(top - 1, 0)], grid[min(top + 1, GRID - 1)], GRID)


def varying_decades(kernel: AbstractClosedForm) -> tuple[int, int]:
    """The powers of ten between which k(x, x) changes with |x|: they move with w_std and b_std."""
    decades = np.arange(-300, 301)
    values = _diagonal(kernel, 10.0**decades)
    changes = np.flatnonzero(np.abs(np.diff(values)) > 1e-14 * np.abs(values[1:]))
    if not changes.size:
        return -1, 1
    return int(decades[max(changes[0] - 1, 0)]), int(decades[min(changes[-1] + 2, len(decades) - 1)])


def _diagonal(kernel: AbstractClosedForm, radii: np.ndarray) -> np.ndarray:
    """k(x, x) at |x|^2/d = radius^2, infinity included."""
    with enable_x64(True):
        small = radii <= 1
        # Two opposite features, so that a LayerNorm on the raw input has something to normalise.
        v = jnp.asarray(np.where(small, radii, 1.0))[:, None] * jnp.array([1.0, -1.0])
        u = jnp.asarray(np.where(small, 1.0, 1.0 / np.where(small, 1.0, radii)))
        return np.asarray(kernel.homogeneous_diag(v, u))


def sup_norm_bound(p: Posterior) -> SupNormBound:
    r"""Upper bounds of |f(x)| that hold for every x in R^d.

        |f(x)| <= sqrt(C) |f|_H                   rkhs
               <= sqrt(C / lambda_eff) |y|_2      spectral
               <= sqrt(C n / lambda_eff) max|y|   dataset

    C = sup Theta(x,x); lambda_eff is the smallest effective eigenvalue of the training Gram matrix (with noise or early
    stopping), a property of the training set: it does not fall as x moves away. With several outputs, the largest over them.

    Args:
        p: a posterior of a closed-form kernel.

    Returns:
        `SupNormBound(kernel_sup, effective_eigenvalue, rkhs_norm, rkhs, spectral, dataset)`, floats; every bound is inf where
        C is.

    Raises:
        TypeError: a kernel without a closed form.

    References:
        Ziomek, Whittle, Osborne (2025), theorems 3.3 and C.3; the dataset form is ours (docs/theory.md).

    >>> import numpy as np
    >>> import ntk_ln as nl
    >>> net = nl.mlp(2, layer_norm="first")
    >>> p = nl.posterior(nl.NTK(net), np.array([[1.0], [2.0]]), np.array([0.0, 1.0]))
    >>> b = nl.sup_norm_bound(p)
    >>> b.rkhs <= b.spectral <= b.dataset < np.inf
    True
    """
    value = kernel_sup(p.kernel).value
    eigenvalue, norm = float(p.effective_eigenvalue), float(p.rkhs_norm)
    y = np.asarray(p.y, dtype=np.float64).reshape(len(p.y), -1)
    if isinf(value):
        return SupNormBound(inf, eigenvalue, norm, inf, inf, inf)
    scale = sqrt(value / eigenvalue) if eigenvalue > 0 else inf
    largest = float(np.abs(y).max())
    # Squares of labels below 1e-154 or above 1e154 leave the floats.
    length = largest * float(np.sqrt(((y / largest) ** 2).sum(axis=0)).max()) if largest else 0.0
    return SupNormBound(value, eigenvalue, norm, sqrt(value) * norm, scale * length, scale * sqrt(len(y)) * largest)


STARTS = 24  # climbs, from the best of the candidates


def sup_norm(p: Posterior, *, seed: int = 0) -> SupNorm:
    """The largest |f(x)| found over all of R^d, infinity included.

    A multi-start ascent on the half-sphere x = v/u, u >= 0: from training points, directions at infinity and random points, by
    L-BFGS-B. A lower bound of the supremum by construction; `sup_norm_bound` gives upper ones.

    Args:
        p: a posterior of a closed-form kernel.
        seed: of the random starts.

    Returns:
        `SupNorm(value, point, direction)`: value is inf where the mean grows along `direction`; `point` is None at infinity.
        With several outputs, the largest over them.

    Raises:
        TypeError: a kernel without a closed form.

    >>> import numpy as np
    >>> import ntk_ln as nl
    >>> x, y = np.array([[1.0], [2.0]]), np.array([0.0, 1.0])
    >>> nl.sup_norm(nl.posterior(nl.NTK(nl.mlp(2)), x, y)).value
    inf
    >>> round(nl.sup_norm(nl.posterior(nl.NTK(nl.mlp(2, layer_norm="first")), x, y)).value, 3)
    1.038
    """
    growth = closed_form(p.kernel, "sup_norm(p)").growth
    check_far(p.kernel, "sup_norm(p)")
    x = np.asarray(p.x, dtype=np.float64)
    rng = np.random.default_rng(seed)
    if not np.any(np.asarray(p.alpha)):
        return SupNorm(0.0, x[0], None)
    directions = _directions(x, rng)
    if growth.mean > 0:
        far = np.abs(_values(p, np.c_[directions, np.zeros(len(directions))], 1.0)).max(axis=1)
        return SupNorm(inf, None, directions[np.argmax(far)])
    radius = float(np.median(lengths_of(x))) or 1.0
    candidates = _candidates(x / radius, directions, rng, p.kernel.network.undefined_at_zero)
    values = _values(p, candidates, radius)
    best, best_value = candidates[0], -1.0
    for output in range(values.shape[1]):
        order = np.argsort(-np.abs(values[:, output]))[:STARTS]
        for start in order:
            point, value = _climb(p, candidates[start], radius, output, float(values[start, output]))
            if value > best_value:
                best, best_value = point, value
    length = float(np.linalg.norm(best[:-1]))
    direction = best[:-1] / length if length > 0 else None
    if best[-1] <= 1e-15 * length:
        return SupNorm(best_value, None, direction)
    with np.errstate(over="ignore"):
        point = best[:-1] / best[-1] * radius
    return SupNorm(best_value, point if np.isfinite(point).all() else None, direction)


def lengths_of(rows: np.ndarray) -> np.ndarray:
    """|x| of every row, without over- or underflow of the squares."""
    size = np.abs(rows).max(axis=1)
    return size * np.linalg.norm(rows / np.where(size > 0, size, 1)[:, None], axis=1)


def _directions(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Unit directions worth a look: to and from training rows, the axes, and random ones."""
    rows = x[rng.permutation(len(x))[:128]]
    axes = np.eye(min(64, x.shape[1]), x.shape[1])
    candidates = np.concatenate([rows, -rows, axes, -axes, rng.normal(size=(64, x.shape[1]))])
    lengths = lengths_of(candidates)
    return candidates[lengths > 0] / lengths[lengths > 0, None]


def _candidates(x: np.ndarray, directions: np.ndarray, rng: np.random.Generator, undefined: bool) -> np.ndarray:
    """Points (v, u) of the half-sphere, rows of (m, d + 1), for inputs of typical length 1."""
    rows = x[rng.permutation(len(x))[:512]]
    points = [np.c_[rows, np.ones(len(rows))], np.r_[np.zeros(x.shape[1]), 1.0][None, :]]
    points += [np.c_[directions, np.full(len(directions), u)] for u in (0.0, 0.03, 0.3, 1.0, 3.0, 30.0)]
    points = np.concatenate(points)
    if undefined:  # what is 0/0 at x = 0 has no value there
        points = points[points[:, :-1].any(axis=1)]
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def _values(p: Posterior, points: np.ndarray, radius: float) -> np.ndarray:
    """f at points of the half-sphere, (m, k)."""
    v, u = points[:, :-1] * radius, points[:, -1]
    size = np.maximum(np.abs(v).max(axis=1), u)  # only v/u counts: bring it to order 1
    k = homogeneous_kernel(p, v / size[:, None], u / size)
    return (k @ np.asarray(p.alpha, np.float64)).reshape(len(points), -1)


DIFFERENCES = 50  # up to so many coordinates
STEP = np.finfo(np.float64).eps ** (1 / 3)  # of central differences: truncation and rounding are both about STEP^2


def _climb(p: Posterior, start: np.ndarray, radius: float, output: int, height: float) -> tuple[np.ndarray, float]:
    """The best point of one ascent of |f| from where f is `height`, and |f| there.

    All points of a gradient go through the compiled kernel at once: compiling its derivative takes longer than the ascent. Of many
    coordinates differences would take the square of their number.
    """
    if height == 0:
        return start, 0.0
    size = len(start)
    bounds = [(None, None)] * (size - 1) + [(0.0, None)]

    def climbed(fun):
        found = scipy.optimize.minimize(fun, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 60})
        return found.x, -float(found.fun) * abs(height)

    if size > DIFFERENCES:
        with enable_x64(True):
            x, alpha = (
                jnp.asarray(np.asarray(p.x, np.float64)),
                jnp.asarray(np.asarray(p.alpha, np.float64).reshape(len(p.x), -1)[:, output]),
            )
            return climbed(
                lambda point: tuple(np.asarray(v) / -height for v in _slope(p.kernel, x, alpha, jnp.asarray(point), radius))
            )
    shifts = STEP * np.concatenate([np.zeros((1, size)), np.eye(size), -np.eye(size)])

    def fun(point):
        around = point + shifts
        edge = point[-1] < STEP  # u >= 0: at infinity the difference is one-sided
        if edge:
            around[-1, -1] = point[-1] + 2 * STEP
        # In units of the start: the optimiser's tolerances are those of numbers of order 1.
        values = -_values(p, around, radius)[:, output] / height
        forward, backward = values[1 : size + 1], values[size + 1 :]
        gradient = (forward - backward) / (2 * STEP)
        if edge:
            gradient[-1] = (4 * forward[-1] - 3 * values[0] - backward[-1]) / (2 * STEP)
        return values[0], gradient

    return climbed(fun)


@jax.jit
def _slope(kernel, x, alpha, point, radius):
    """f at a point of the half-sphere, and its gradient."""

    def mean(point):
        v, u = point[:-1] * radius, point[-1]
        size = jax.lax.stop_gradient(jnp.maximum(jnp.abs(v).max(), u))
        k = kernel.homogeneous(v[None, :] / size, u[None] / size, x)[0]
        return jnp.matmul(k, alpha, precision=jax.lax.Precision.HIGHEST)

    return jax.value_and_grad(mean)(point)
