"""What comes in goes out: validation of inputs and the scoped precision they are computed in."""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

if hasattr(jax, "enable_x64"):
    _enable_x64: Any = jax.enable_x64
else:  # before JAX 0.8
    _enable_x64: Any = getattr(importlib.import_module("jax.experimental"), "enable_x64")  # noqa: B009


def enable_x64(on: bool) -> AbstractContextManager[Any]:
    """JAX's scoped switch to float64, wherever this JAX keeps it."""
    return _enable_x64(on)


def precision_of(dtype: Any) -> AbstractContextManager[Any]:
    """The scope in which JAX keeps this dtype: it narrows float64 silently unless told not to."""
    return enable_x64(True) if dtype == np.float64 else nullcontext()


class Inputs(NamedTuple):
    """Validated inputs: JAX arrays of one float dtype, and whether the caller gets JAX arrays back."""

    x1: Any
    x2: Any
    is_jax: bool

    def give_back(self, value: Any) -> Any:
        """The result in the caller's kind of array (NumPy in, NumPy out)."""
        if self.is_jax:
            return value
        return jax.tree.map(np.asarray, value)


def is_tracer(value: Any) -> bool:
    return isinstance(value, Tracer)


def to_host(x: Any) -> np.ndarray:
    """The whole array as NumPy, on every process, however it is sharded."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable and isinstance(x.sharding, NamedSharding):
        x = jax.jit(lambda a: a, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
    return np.asarray(x)


def sharding_of(x: Any) -> NamedSharding | None:
    """How the rows of x are sharded over several devices; None if they are not."""
    if is_tracer(x) or not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return None
    sharded = len(x.sharding.device_set) > 1 and len(x.sharding.spec) and x.sharding.spec[0] is not None
    return x.sharding if sharded else None


def same_rows(x1: Any, x2: Any) -> bool:
    """Whether two inputs are the same rows: their Gram is then computed as one, exactly symmetric."""
    if x1 is x2:
        return True
    if is_tracer(x1) or is_tracer(x2) or x1.shape != x2.shape:
        return False
    return bool(np.array_equal(to_host(x1), to_host(x2)))


def check_rows(x: Any, call: str, name: str = "x") -> Any:
    """An array of shape (n, d), d >= 1, finite; NumPy unless it already is a JAX array."""
    array = check_numbers(x, call, name)
    if array.ndim != 2:
        hint = f" One feature: `{name}[:, None]`; one point: `{name}[None, :]`." if array.ndim == 1 else ""
        raise ValueError(f"`{call}` needs `{name}` of shape (n, d), one row per point. Got shape {array.shape}.{hint}")
    if array.shape[1] == 0:
        raise ValueError(f"`{call}` needs at least one feature per row. Got `{name}` of shape {array.shape}.")
    check_finite(array, call, name)
    return array


def check_numbers(x: Any, call: str, name: str) -> Any:
    """An array of real numbers, none of them masked; NumPy unless it already is a JAX array."""
    check_unmasked(x, call, name)
    if not isinstance(x, jax.Array):
        return _to_numpy(x, call, name)
    if jnp.iscomplexobj(x):
        raise TypeError(f"`{call}` needs real numbers as `{name}`. Got dtype {x.dtype}.")
    return x


def check_whole(value: Any, call: str, name: str, least: int, most: int | None = None) -> None:
    """Raises unless `value` is a whole number from `least` on (to `most`)."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (whole and value >= least and (most is None or value <= most)):
        asked = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"`{call}` needs a whole number {name} {asked}. Got {value!r}.")


def check_unmasked(x: Any, call: str, name: str) -> None:
    if np.ma.is_masked(x):
        raise ValueError(f"`{call}` needs numbers everywhere. `{name}` has masked entries: drop or fill those rows.")


def check_finite(array: Any, call: str, name: str) -> None:
    """Raises on NaN or infinity, naming the first row; traced values cannot be looked at."""
    if is_tracer(array):
        return
    host = to_host(array)
    if host.dtype.kind not in "fiub":  # bfloat16 and other extension floats
        host = host.astype(np.float32)
    bad = ~np.isfinite(host)
    if bad.any():
        row = int(np.argwhere(bad)[0][0])
        raise ValueError(
            f"`{call}` needs finite numbers. Row {row} of `{name}` has {host[row]!s}; {int(bad.sum())} entries are not "
            f"finite. Drop or fill those rows."
        )


def _to_numpy(x: Any, call: str, name: str) -> np.ndarray:
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise ValueError(f"`{call}` needs a rectangular array of numbers as `{name}`: {error}") from None
    if array.dtype.kind in "iub" or array.dtype == np.longdouble:
        return array.astype(np.float64)
    if array.size == 0 and array.dtype == object:
        return array.astype(np.float64)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"`{call}` needs real numbers as `{name}`. Got dtype {array.dtype}.")
    return array


@contextmanager
def computing(call: str, x1: Any, x2: Any = None, *, traced: bool = False) -> Iterator[Inputs]:
    """Inputs ready to compute with, inside the precision they came in.

    NumPy arrays and lists are computed in their own precision under a scoped `enable_x64`; JAX arrays keep their dtype;
    where the two meet, the JAX array decides. With `traced` (a traced network) NumPy inputs follow the ambient JAX precision,
    as they would in any traced JAX function.
    """
    x1 = check_rows(x1, call, "x" if x2 is None else "x1")
    if x2 is not None:
        x2 = check_rows(x2, call, "x2")
        if x1.shape[1] != x2.shape[1]:
            raise ValueError(f"`{call}` needs as many features in `x2` as in `x1`. Got shapes {x1.shape} and {x2.shape}.")
    given = [x for x in (x1, x2) if x is not None]
    of_jax = [x for x in given if isinstance(x, jax.Array)]
    # Not result_type: it would round the wide dtypes to the ambient precision.
    dtype = reduce(jnp.promote_types, [x.dtype for x in of_jax or given])
    if not jnp.issubdtype(dtype, jnp.floating):  # integer JAX arrays
        dtype = jnp.result_type(float)
    wide = dtype == np.float64 and not traced
    with enable_x64(True) if wide else nullcontext():
        x1, x2 = (None if x is None else jnp.asarray(x, dtype) for x in (x1, x2))
        yield Inputs(x1, x2, bool(of_jax) or traced)
