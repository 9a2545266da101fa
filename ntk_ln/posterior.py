"""The posterior of a kernel: what an infinitely wide network predicts after training on x, y."""

import json
import math
import os
import warnings
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln import _conjugate, _solver
from ntk_ln import _posterior_inputs as inputs
from ntk_ln._dtype import check_rows, enable_x64, sharding_of, to_host
from ntk_ln.kernels import NNGP, NTK
from ntk_ln.kernels._base import symmetric_operator
from ntk_ln.kernels.store import StoredGram
from ntk_ln.network import network_from_config
from ntk_ln.spectrum import MinEigenvalue, min_eigenvalue, of_triangle

_BLOCK = 2**22  # kernel entries computed at once for test rows: 32 MB in float64
_EPS = float(np.finfo(np.float64).eps)
_SAVED = {"NTK": NTK, "NNGP": NNGP}


def posterior(
    kernel: Any,
    x: Any,
    y: Any,
    *,
    noise: float = 0.0,
    stop_time: float | None = None,
    step_size: float | None = None,
    solver: Literal["cholesky", "cg", "jaxmg"] = "cholesky",
    gram: StoredGram | None = None,
    tolerance: float = 1e-10,
) -> "Posterior":
    r"""The posterior of a kernel given data: for an NTK, the mean of the networks trained on them.

        mean(x) = k_x^T alpha,   alpha = (K + noise I)^-1 y                             trained to convergence, or with noise
                                 alpha = K^-1 (I - exp(-K T)) y                         gradient flow on 1/2 sum (f - y)^2 up to T
                                 alpha = K^-1 (I - (I - eta K)^(T/eta)) y               T/eta steps of gradient descent

    Args:
        kernel: `NTK(net)`, `NNGP(net)` or any other kernel: k(x1, x2=None) -> (n1, n2) and k.diag(x) -> (n,).
        x: (n, d), n >= 1, finite.
        y: (n,) or (n, k), finite; the k outputs share the kernel.
        noise: variance s^2 of observation noise, 0 or at least n eps lambda_max. Nothing is ever added in secret.
        stop_time: T > 0; None trains to convergence. Not together with noise.
        step_size: eta > 0 with eta lambda_max <= 1; needs `stop_time`. T/eta may be any number >= 1.
        solver: "cholesky" keeps K and its factor in the memory of one matrix; "cg", for noise > 0, never has K in memory: conjugate
            gradients with a pivoted Cholesky preconditioner; `p.iterations` and `p.residual` say how they went. Of x sharded by
            rows over devices each keeps its rows of K. "jaxmg", for such x on several GPUs, solves by JAXMg's distributed Cholesky,
            with conjugate gradients to refine; it has not been run on GPUs yet.
        gram: with "cg", k(x) on disk (`stream_gram`); without it each product computes k(x) anew.
        tolerance: with "cg" and "jaxmg", of the residual |y - (K + noise I) alpha| / |y|.

    Returns:
        Posterior. Where K is singular and noise 0 (equal rows with equal labels, 1-D data without biases) its mean is the
        interpolant of least RKHS norm, and its eigenvalues are the non-zero ones.

    Raises:
        TypeError: not a kernel, not numbers, traced values (use `log_marginal_likelihood` under jit and grad).
        ValueError: shapes, NaN or infinity (with the row), noise below rounding (with the smallest useful one), a step too large
            (with the largest allowed), a Gram matrix that is singular against the labels (with the rows and a noise that works).

    Accuracy: K and alpha are computed in float64 on the host whatever the dtype of x (K in that of `gram`, or of x sharded over
    devices); the mean carries an error of the order of eps times the condition number of K + noise I (tests/test_posterior.py).
    Residuals come down to about eps lambda_max/noise: "cg" refuses where that is above `tolerance`.

    References:
        Lee et al. (2019), "Wide neural networks of any depth evolve as linear models", eqs. 8-9 and 14; Rasmussen, Williams (2006),
        "Gaussian processes for machine learning", algorithm 2.1.

    >>> import numpy as np
    >>> from ntk_ln import NTK, mlp
    >>> p = posterior(NTK(mlp(2)), np.array([[1.0], [2.0]]), np.array([0.0, 1.0]))
    >>> p.mean(np.array([[1.0], [2.0]])).round(12) + 0.0
    array([0., 1.])
    """
    inputs.check_kernel(kernel)
    inputs.concrete(kernel, "kernel")
    x, y, labels = inputs.check_training(x, y)
    noise, stop_time, step_size = inputs.check_schedule(noise, stop_time, step_size)
    inputs.check_solver(solver, noise, stop_time, gram, x, tolerance)
    host = to_host(x).astype(np.float64)
    if solver != "cholesky":
        sharding, direct = sharding_of(x), None
        if sharding is not None and gram is None:
            given = inputs.sharded_products(kernel, x, sharding, noise if solver == "jaxmg" else None)
            product, column, diagonal, eps, direct = given
        else:
            product, column, diagonal, eps = inputs.products(kernel, host, gram)
        iterated = _conjugate.iterate(product, column, diagonal, labels, noise, tolerance, eps, direct)
        every = np.arange(len(host))
        return Posterior(kernel, x, y, noise, None, None, iterated.norm(), iterated, every, every)
    # Equal rows would make K singular; the interpolant on the distinct ones is the one of least norm.
    distinct = copies = np.arange(len(host))
    if noise == 0 and stop_time is None:
        distinct, copies = inputs.merge_equal_rows(kernel, host, labels)
    matrix, eps = inputs.gram_matrix(kernel, host[distinct])
    if stop_time is None:
        solution = _solver.solve(matrix, labels[distinct], noise, eps)
    else:
        solution = _solver.solve_stopped(matrix, labels[distinct], stop_time, step_size, eps)
    return Posterior(kernel, x, y, noise, stop_time, step_size, solution.norm(), solution, distinct, copies)


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """What `posterior` gives.

    Attributes:
        kernel, x, y, noise, stop_time, step_size: as given.
        rkhs_norm: |f|_H = sqrt(alpha^T K alpha) of the mean; of several outputs the largest, so that bounds hold for each.
    """

    kernel: Any
    x: Any
    y: Any
    noise: float
    stop_time: float | None
    step_size: float | None
    rkhs_norm: float
    _solution: Any  # _solver.Solution or _conjugate.Iterated
    _distinct: np.ndarray  # rows of x that K is made of
    _copies: np.ndarray  # for each row of x, its place among them

    def __repr__(self) -> str:
        schedule = f"noise={self.noise}" if self.stop_time is None else f"stop_time={self.stop_time}, step_size={self.step_size}"
        return f"Posterior({type(self.kernel).__name__}, x: {self.x.shape}, y: {self.y.shape}, {schedule})"

    def mean(self, x: Any) -> Any:
        """The posterior mean k_x^T alpha.

        Args:
            x: (m, d). NumPy is computed in float64 and returned in its own dtype. JAX stays JAX in its dtype, can be traced and
                differentiated. Memory stays bounded for any m.

        Returns:
            (m,) for y of shape (n,), (m, k) for y of shape (n, k).

        >>> import numpy as np
        >>> from ntk_ln import NTK, mlp
        >>> posterior(NTK(mlp(1)), np.eye(2), np.eye(2)).mean(np.ones((5, 2))).shape
        (5, 2)
        """
        return self._by_blocks("mean(x)", x, self._mean)

    def variance(self, x: Any) -> Any:
        """The variance k(x, x) - k_x^T (K + noise I)^-1 k_x of the Gaussian process with this kernel as its prior covariance.

        Args:
            x: (m, d); not traced.

        Returns:
            (m,), the same for all outputs, within [0, k(x, x)]; a warning says where more than rounding had to be cut for that.

        Raises:
            ValueError: with `stop_time`: that is not the posterior of a Gaussian process.

        >>> import numpy as np
        >>> from ntk_ln import NNGP, mlp
        >>> p = posterior(NNGP(mlp(1)), np.eye(2), np.eye(2)[0], noise=1e-6)
        >>> bool((p.variance(np.eye(2)) <= 1e-6).all())
        True
        """
        if self.stop_time is not None:
            raise ValueError(
                "`p.variance(x)` needs a posterior without `stop_time`: training stopped early is not the posterior of a Gaussian "
                f"process. Got stop_time={self.stop_time}."
            )
        given = check_rows(inputs.concrete(x, "x", "p.variance(x)"), "p.variance(x)")
        result = self._by_blocks("variance(x)", np.asarray(given, np.float64), self._variance)
        return _to_jax(result, _float_dtype(given)) if isinstance(given, jax.Array) else result.astype(given.dtype)

    def solve(self, b: np.ndarray) -> np.ndarray:
        """(K + noise I)^-1 b, or the pseudo-inverse where K is singular, for b of shape (n, m); not with `stop_time`."""
        copies = np.bincount(self._copies)
        merged = np.zeros((len(copies), b.shape[1]))
        np.add.at(merged, self._copies, np.asarray(b, np.float64))
        return (self._solution.solve(merged / copies[:, None]) / copies[:, None])[self._copies]

    def log_marginal_likelihood(self) -> float:
        """The log density of the labels under the prior, a sum over the rows and outputs; divide by n for a figure per row.

            -1/2 y^T (K + noise I)^-1 y - 1/2 log det(K + noise I) - n/2 log(2 pi)

        Raises:
            ValueError: with `stop_time`, or where K is singular and noise 0: there is no density.
        """
        self._check_in_memory("log_marginal_likelihood()")
        if self.stop_time is not None or self._singular:
            cause = "a singular K and noise=0" if self.stop_time is None else f"stop_time={self.stop_time}"
            raise ValueError(f"`p.log_marginal_likelihood()` needs K + noise I invertible and no `stop_time`. Got {cause}.")
        labels = np.asarray(self.y, np.float64).reshape(len(self.y), -1)
        constant = self._solution.log_determinant() + len(labels) * math.log(2 * math.pi)
        return -0.5 * float((labels * self._solution.alpha).sum()) - 0.5 * labels.shape[1] * constant

    @property
    def alpha(self) -> Any:
        """The coefficients of the mean: float64 NumPy of the shape of y, or JAX in the dtype of x where x is JAX."""
        alpha = self._solution.alpha[self._copies] / np.bincount(self._copies)[self._copies, None]
        return self._as_given(alpha.reshape(np.shape(self.y)))

    @property
    def gram(self) -> Any:
        """K = k(x, x), (n, n), without the noise; in float64, or JAX in the dtype of x where x is JAX."""
        self._check_in_memory("gram")
        gram = self._solution.gram()
        merged = len(self._distinct) < len(self._copies)
        return self._as_given(gram[np.ix_(self._copies, self._copies)] if merged else gram)

    @cached_property
    def min_eigenvalue(self) -> MinEigenvalue:
        """The smallest eigenvalue of K without noise; where K is singular and noise 0, the smallest non-zero one."""
        solution, counts = self._solution, np.sqrt(np.bincount(self._copies))
        if isinstance(solution, _conjugate.Iterated):
            dtype = np.float64 if solution.eps <= _EPS else np.float32
            return min_eigenvalue(symmetric_operator(len(counts), _vectors(solution.product), dtype))
        merged = len(self._distinct) < len(self._copies)
        if not self._singular:
            return of_triangle(solution.square, solution.diagonal)
        # K = P K_d P^T with P repeating rows has the non-zero eigenvalues of C K_d C, C^2 = P^T P the numbers of copies.
        gram = np.asfortranarray(solution.gram() * counts[:, None] * counts) if merged else solution.square
        if not solution.singular:
            value, lower, method = of_triangle(gram, np.diagonal(gram).copy(), 2 * _EPS * float(np.abs(gram).max()))
            return MinEigenvalue(value, lower, method + "_nonzero")
        values = np.linalg.eigvalsh(gram) if merged else solution.values
        values = values[values > solution.rounding]
        value = float(values[0]) if len(values) else 0.0
        return MinEigenvalue(value, max(value - 2 * solution.rounding, 0.0), "eigh_nonzero")

    @property
    def effective_eigenvalue(self) -> float:
        """What `min_eigenvalue.value` becomes with noise or an early stop: |f|_H^2 <= |y|^2 / effective_eigenvalue.

        lambda + noise;  lambda / (1 - exp(-lambda T));  lambda / (1 - (1 - eta lambda)^(T/eta));  1/T at lambda = 0.
        """
        value = self.min_eigenvalue.value
        if self.stop_time is None:
            return value + self.noise
        return 1 / float(_solver.learned(max(value, 0.0), self.stop_time, self.step_size))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the posterior to one .npz file, exactly at `path`, that `load_posterior` reads back bit by bit; no pickle.

        Raises:
            TypeError: a kernel other than `NTK(net)` or `NNGP(net)`.
            ValueError: a network without a plain configuration (a function of your own as an activation).
        """
        self._check_in_memory("save(path)")
        name = type(self.kernel).__name__
        if _SAVED.get(name) is not type(self.kernel):
            raise TypeError(f"`p.save(path)` writes kernels that have a configuration, {' and '.join(_SAVED)}. Got {name}.")
        state = {
            "kernel": name,
            "network": self.kernel.network.to_config(),
            "jax": [isinstance(self.x, jax.Array), isinstance(self.y, jax.Array)],
            "dtypes": [np.asarray(self.x).dtype.name, np.asarray(self.y).dtype.name],
            **{key: getattr(self, key) for key in ("noise", "stop_time", "step_size", "rkhs_norm")},
            **{key: getattr(self._solution, key) for key in ("eps", "rounding", "condition", "factored")},
        }
        try:
            text = json.dumps({"format": 1, **state})
        except TypeError as error:
            raise TypeError(f"`p.save(path)` needs a network whose `to_config()` is plain JSON: {error}.") from None
        arrays = {key: getattr(self._solution, key) for key in ("square", "diagonal", "alpha", "values", "vectors")}
        with open(path, "wb") as file:
            np.savez(
                file,
                state=np.array(text),
                **{key: _storable(np.asarray(getattr(self, key))) for key in ("x", "y")},
                distinct=self._distinct,
                copies=self._copies,
                **arrays,
            )

    @property
    def iterations(self) -> int | None:
        """Of conjugate gradients, the most over outputs; None with another solver."""
        return getattr(self._solution, "iterations", None)

    @property
    def residual(self) -> float | None:
        """|y - (K + noise I) alpha| / |y| of conjugate gradients, the largest over outputs; None with another solver."""
        return getattr(self._solution, "residual", None)

    def _check_in_memory(self, name: str) -> None:
        if isinstance(self._solution, _conjugate.Iterated):
            raise ValueError(f'`p.{name}` needs K in memory, which only solver="cholesky" has. Got a posterior of another solver.')

    @property
    def _singular(self) -> bool:
        return self._solution.singular or len(self._distinct) < len(self._copies)

    def _as_given(self, value: np.ndarray) -> Any:
        if not isinstance(self.x, jax.Array):
            return value
        return _to_jax(value, _float_dtype(self.x))

    def _by_blocks(self, name: str, x: Any, compute: Callable[[Any], Any]) -> Any:
        x = check_rows(x, f"p.{name}")
        d = self.x.shape[1]
        if x.shape[1] != d:
            raise ValueError(f"`p.{name}` needs `x` of shape (m, {d}), as in training. Got shape {x.shape}.")
        m, block = len(x), max(1, _BLOCK // len(self._distinct))
        if m <= block:
            return compute(x)
        short = -m % block  # the last block is filled up: one shape, one compilation
        if isinstance(x, jax.Array):
            with enable_x64(True) if x.dtype == np.float64 else nullcontext():
                padded = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (short, d))]).reshape(-1, block, d)
                result = jax.lax.map(compute, padded)
                return result.reshape(m + short, *result.shape[2:])[:m]
        padded = np.concatenate([x, np.broadcast_to(x[-1:], (short, d))])
        return np.concatenate([compute(padded[i : i + block]) for i in range(0, m, block)])[:m]

    def _mean(self, x: Any) -> Any:
        rows = to_host(self.x).astype(np.float64)[self._distinct]
        alpha = self._solution.alpha if np.ndim(self.y) == 2 else self._solution.alpha[:, 0]
        if not isinstance(x, jax.Array):
            return (_wide(self.kernel(x.astype(np.float64), rows)) @ alpha).astype(x.dtype)
        dtype = _float_dtype(x)
        with enable_x64(True) if dtype == np.float64 else nullcontext():
            return jnp.matmul(self.kernel(x, rows), jnp.asarray(alpha, dtype), precision=jax.lax.Precision.HIGHEST)

    def _variance(self, x: np.ndarray) -> np.ndarray:
        solution, rows = self._solution, to_host(self.x).astype(np.float64)[self._distinct]
        prior = _wide(self.kernel.diag(x))
        cross = _wide(self.kernel(rows, x))
        variance = prior - solution.reduction(cross)
        # A perturbation E of K changes it by w^T E w, |w|^2 = |K^-1 k_x|^2 <= prior / lambda_min.
        error = -(variance + (4 * len(rows) * solution.eps * (1 + solution.condition)) * prior)
        if np.any(error > 0):
            row = int(np.argmax(error))
            warnings.warn(
                f"`p.variance(x)` got {variance[row]:.3g} at row {row}, below 0 by more than rounding: `kernel` is not positive "
                f"semi-definite to its precision. Set to 0.",
                RuntimeWarning,
                stacklevel=4,
            )
        return np.clip(variance, 0, np.maximum(prior, 0))


def load_posterior(path: str | os.PathLike) -> Posterior:
    """The posterior that `p.save(path)` wrote, with the same bits.

    Raises:
        ValueError: not such a file.

    >>> import tempfile, os, numpy as np
    >>> from ntk_ln import NTK, mlp
    >>> p = posterior(NTK(mlp(1)), np.eye(2), np.eye(2)[0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "p.npz")
    ...     p.save(path)
    ...     load_posterior(path).alpha.tolist() == p.alpha.tolist()
    True
    """
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        state = json.loads(str(arrays.pop("state")))
        known = state["format"] == 1
        if known:
            return _restored(arrays, state)
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"`load_posterior(path)` needs a file of `p.save(path)`. Got {os.fspath(path)}: {error}.") from None
    raise ValueError(f"`load_posterior(path)` reads format 1. Got format {state['format']}: use a newer version of ntk_ln.")


def _restored(arrays: dict[str, np.ndarray], state: dict[str, Any]) -> Posterior:
    x, y = (
        _to_jax(arrays[key], jnp.dtype(name)) if of_jax else arrays[key].astype(jnp.dtype(name), copy=False)
        for key, of_jax, name in zip("xy", state["jax"], state["dtypes"], strict=True)
    )
    solution = _solver.Solution(
        **{key: arrays[key] for key in ("square", "diagonal", "alpha", "values", "vectors")},
        **{key: state[key] for key in ("eps", "rounding", "condition", "factored")},
    )
    kernel = _SAVED[state["kernel"]](network_from_config(state["network"]))
    numbers = {key: state[key] for key in ("noise", "stop_time", "step_size", "rkhs_norm")}
    return Posterior(kernel, x, y, **numbers, _solution=solution, _distinct=arrays["distinct"], _copies=arrays["copies"])


def _vectors(product: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """A product with (n, k) as one with (n,) too."""
    return lambda v: product(v.reshape(len(v), -1)).reshape(v.shape)


def _storable(array: np.ndarray) -> np.ndarray:
    """bfloat16 and its like, which a file would give back as raw bytes, widened without loss."""
    return array.astype(np.float32) if array.dtype.kind not in "fiub" else array


def _wide(value: Any) -> np.ndarray:
    return np.asarray(value, np.float64)


def _float_dtype(x: jax.Array) -> Any:
    return x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.result_type(float)


def _to_jax(value: np.ndarray, dtype: Any) -> jax.Array:
    with enable_x64(True) if dtype == np.float64 else nullcontext():
        return jnp.asarray(value, dtype)
