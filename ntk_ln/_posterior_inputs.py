"""What `posterior` accepts: checks, and the Gram matrix in float64."""

import importlib
import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ntk_ln._dtype import check_finite, check_rows, check_unmasked, is_tracer, precision_of, sharding_of, to_host
from ntk_ln._solver import rounded_up
from ntk_ln.kernels import AbstractKernel
from ntk_ln.kernels.store import StoredGram
from ntk_ln.network import Network

CALL = "posterior(kernel, x, y)"
_JAXMG_TILE = 256  # rows of cuSOLVERMp's blocks
_EPS = float(np.finfo(np.float64).eps)
_BLOCK = 2**22  # kernel entries at once


def check_kernel(kernel: Any, call: str = CALL) -> None:
    """Refuses what cannot be called as a kernel."""
    if isinstance(kernel, Network) or not callable(kernel) or not hasattr(kernel, "diag"):
        raise TypeError(f"`{call}` needs a kernel such as `NTK(net)` or `NNGP(net)`. Got {type(kernel).__name__}.")


def concrete(value: Any, name: str, call: str = CALL) -> Any:
    """The value, unless it or a part of it is traced."""
    if any(is_tracer(leaf) for leaf in jax.tree.leaves(value)):
        raise TypeError(
            f"`{call}` solves on the host and cannot be traced. Got a traced `{name}`: under jit and grad use `p.mean(x)` of a "
            f"posterior made outside, or `log_marginal_likelihood(kernel, x, y, noise)`."
        )
    return value


def check_training(x: Any, y: Any) -> tuple[Any, Any, np.ndarray]:
    """x (n, d) and y as arrays, and the labels in float64, (n, k)."""
    x = check_rows(concrete(x, "x"), CALL)
    y = check_labels(concrete(y, "y"), x, CALL)
    if len(x) == 0:
        raise ValueError(f"`{CALL}` needs at least one row. Got x.shape={x.shape}.")
    check_finite(y, CALL, "y")
    return x, y, np.asarray(y, np.float64).reshape(len(x), -1)


def check_labels(y: Any, x: Any, call: str) -> Any:
    """y as an array of shape (n,) or (n, k), k >= 1; NumPy unless it already is a JAX array."""
    check_unmasked(y, call, "y")
    if not isinstance(y, jax.Array):
        try:
            y = np.asarray(y)
        except ValueError as error:
            raise ValueError(f"`{call}` needs a rectangular array of numbers as `y`: {error}") from None
        if y.dtype.kind in "iub":
            y = y.astype(np.float64)
        if not jnp.issubdtype(y.dtype, jnp.floating):
            raise TypeError(f"`{call}` needs real numbers as `y`. Got dtype {y.dtype}.")
    if y.ndim not in (1, 2) or (y.ndim == 2 and y.shape[1] == 0):
        raise ValueError(f"`{call}` needs `y` of shape (n,) or (n, k). Got shape {y.shape}.")
    if len(y) != len(x):
        raise ValueError(f"`{call}` needs one row of `y` per row of `x`. Got x.shape={x.shape}, y.shape={y.shape}.")
    return y


def check_schedule(noise: Any, stop_time: Any, step_size: Any) -> tuple[float, float | None, float | None]:
    """Noise, stop_time and step_size as floats."""
    numbers = {}
    for name, value, least in (("noise", noise, ">= 0"), ("stop_time", stop_time, "> 0"), ("step_size", step_size, "> 0")):
        if value is None and name != "noise":
            continue
        try:
            number = float(concrete(value, name))
        except (TypeError, ValueError) as error:
            if is_tracer(value):
                raise
            raise TypeError(f"`posterior(..., {name}=...)` needs a number. Got {value!r}: {error}.") from None
        if not math.isfinite(number) or number < 0 or (number == 0 and name != "noise"):
            raise ValueError(f"`posterior(..., {name}=...)` needs a finite number {least}. Got {number}.")
        numbers[name] = number
    if "stop_time" in numbers and numbers["noise"]:
        raise ValueError(
            f"`posterior(...)` takes noise or stop_time, not both: each regularises on its own. Got noise={numbers['noise']}, "
            f"stop_time={numbers['stop_time']}."
        )
    if "step_size" in numbers and "stop_time" not in numbers:
        raise ValueError(
            f"`posterior(..., step_size=...)` needs stop_time: the number of steps is stop_time / step_size. "
            f"Got step_size={numbers['step_size']} alone."
        )
    if "step_size" in numbers and numbers["stop_time"] < numbers["step_size"] * (1 - 1e-9):
        raise ValueError(
            f"`posterior(..., stop_time=..., step_size=...)` needs at least one step, stop_time >= step_size. Got "
            f"stop_time={numbers['stop_time']}, step_size={numbers['step_size']}."
        )
    return numbers["noise"], numbers.get("stop_time"), numbers.get("step_size")


def check_solver(solver: str, noise: float, stop_time: float | None, gram: StoredGram | None, x: Any, tolerance: float) -> None:
    """Refuses what conjugate gradients cannot do."""
    if solver not in ("cholesky", "cg", "jaxmg"):
        raise ValueError(f'`posterior(..., solver=...)` knows "cholesky", "cg" and "jaxmg". Got {solver!r}.')
    if solver != "cholesky" and (noise == 0 or stop_time is not None):
        raise ValueError(
            f'`posterior(..., solver="{solver}")` needs noise > 0 and no stop_time: conjugate gradients need a well-conditioned '
            f"matrix. Got noise={noise}, stop_time={stop_time}."
        )
    if solver == "jaxmg":
        if sharding_of(x) is None or gram is not None:
            raise ValueError(
                '`posterior(..., solver="jaxmg")` needs `x` sharded by rows over several GPUs, and no `gram`. Use solver="cg".'
            )
        if importlib.util.find_spec("jaxmg") is None:
            raise ImportError('`posterior(..., solver="jaxmg")` needs JAXMg: pip install "jaxmg[cuda12]" or "jaxmg[cuda13]".')
    if not 1e-15 < tolerance < 1:
        raise ValueError(f"`posterior(..., tolerance=...)` needs a number between 1e-15 and 1. Got {tolerance!r}.")
    if gram is None:
        return
    if solver != "cg":
        raise ValueError('`posterior(..., gram=...)` needs solver="cg": the other one keeps K in memory.')
    if not isinstance(gram, StoredGram):
        raise TypeError(f"`posterior(..., gram=...)` needs what `stream_gram` or `open_gram` gives. Got {type(gram).__name__}.")
    if not np.array_equal(gram.x, to_host(x)):
        raise ValueError("`posterior(kernel, x, y, gram=...)` needs the x that `gram` was computed from. Got another.")


def sharded_products(
    kernel: Any, x: jax.Array, sharding: NamedSharding, noise: float | None = None
) -> tuple[Any, Any, np.ndarray, float, Any]:
    """As `products`, of rows sharded over devices: each keeps its rows of k(x).

    With `noise` a function too that solves with k(x) + noise I by JAXMg (cuSOLVERMp over the same mesh), else None.
    """
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)
    with precision_of(x.dtype):
        gram = kernel(x)
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        multiply = jax.jit(lambda k, b: jnp.matmul(k, b, precision=jax.lax.Precision.HIGHEST), out_shardings=whole)
        take = jax.jit(lambda k, i: k[:, i], out_shardings=whole)
        diagonal = np.asarray(to_host(kernel.diag(x)), np.float64)

    def product(b: np.ndarray) -> np.ndarray:
        with precision_of(x.dtype):
            return np.asarray(multiply(gram, jnp.asarray(b, x.dtype)), np.float64)

    def column(i: int) -> np.ndarray:
        with precision_of(x.dtype):
            return np.asarray(take(gram, i), np.float64)

    def direct(b: np.ndarray) -> np.ndarray:
        potrs = importlib.import_module("jaxmg").potrs

        with precision_of(x.dtype):
            # The solver takes its matrix's memory: a copy each time, K itself stays for products.
            return np.asarray(to_host(potrs(shifted(gram), jnp.asarray(b, x.dtype), tile, sharding.mesh)), np.float64)

    shifted = jax.jit(lambda k: k + (noise or 0.0) * jnp.eye(len(k), dtype=k.dtype), out_shardings=gram.sharding)
    tile = min(_JAXMG_TILE, gram.addressable_shards[0].data.shape[0])
    return product, column, diagonal, float(jnp.finfo(x.dtype).eps), None if noise is None else direct


def products(kernel: Any, x: np.ndarray, gram: StoredGram | None) -> tuple[Any, Any, np.ndarray, float]:
    """Products with k(x), its columns and diagonal, and the eps of their precision."""
    x = x if gram is None else x.astype(gram.dtype)
    eps = float(np.finfo(x.dtype).eps)
    diagonal = np.asarray(kernel.diag(x), np.float64)

    def column(i: int) -> np.ndarray:
        return np.asarray(kernel(x, x[i : i + 1]), np.float64)[:, 0]

    if gram is not None:
        gram.check_kernel(kernel, CALL)
        return gram.__matmul__, column, diagonal, eps
    if hasattr(kernel, "matvec"):
        return lambda b: np.asarray(kernel.matvec(x, b), np.float64), column, diagonal, eps
    rows = max(1, _BLOCK // len(x))

    def product(b: np.ndarray) -> np.ndarray:
        return np.concatenate([np.asarray(kernel(x[i : i + rows], x), np.float64) @ b for i in range(0, len(x), rows)])

    return product, column, diagonal, eps


def merge_equal_rows(kernel: Any, x: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First rows of each set of equal ones, in order, and for each row its place among them; their labels must be equal."""
    n = len(x)
    _, first, group = np.unique(x, axis=0, return_index=True, return_inverse=True)
    if len(first) == n:
        return np.arange(n), np.arange(n)
    distinct = np.sort(first)
    copies = np.searchsorted(distinct, first[group.reshape(n)])
    original = distinct[copies]
    gap = np.abs(labels - labels[original])
    # Labels computed twice may differ in their last digits.
    wrong = np.argwhere(gap > 8 * _EPS * np.abs(labels))
    if len(wrong):
        row, output = wrong[0]
        i = original[row]
        useful = rounded_up(10 * n * _EPS * float(np.sum(kernel.diag(x))))
        raise ValueError(
            f"`{CALL}` with noise=0 needs equal labels at equal rows. Rows {i} and {row} of `x` are equal, y[{i}]="
            f"{labels[i, output]:.17g} and y[{row}]={labels[row, output]:.17g}; the Gram matrix is singular (lambda_min = 0). "
            f"Use noise >= {useful:.0e}, or merge the rows."
        )
    return distinct, copies


def gram_matrix(kernel: Any, x: np.ndarray) -> tuple[np.ndarray, float]:
    """k(x) in float64, C order and writable, and the eps of the precision it was computed in."""
    n = len(x)
    given = np.asarray(kernel(x))
    if given.shape != (n, n):
        raise ValueError(f"`{CALL}` needs kernel(x) of shape (n, n) = {(n, n)}. Got shape {given.shape}.")
    if not np.isfinite(given.min()) or not np.isfinite(given.max()):  # NaN passes through both; no n^2 mask
        i, j = np.argwhere(~np.isfinite(given))[0]
        raise ValueError(
            f"`{CALL}` needs finite kernel values. kernel(x)[{i}, {j}] is {given[i, j]}, of inputs up to "
            f"{np.abs(x).max():.1e}: divide `x` by its scale, or give another kernel."
        )
    eps = float(jnp.finfo(given.dtype).eps)
    # The package's kernels give a new array at each call; another's may be kept somewhere, and ours to solve in it must not be.
    ours = isinstance(kernel, AbstractKernel) and given.dtype == np.float64 and given.flags.c_contiguous and given.flags.writeable
    return given if ours else np.array(given, np.float64, order="C"), eps
