"""The empirical NTK of any function: Jacobians of a few rows at a time, products with J J^T, random projections of J."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._dtype import is_tracer
from ntk_ln.kernels._tiles import mirrored, tiled

COUPLED = 0.01  # outputs that differ by less are rounded differently (bfloat16)
JACOBIAN_ENTRIES = 2**29  # of the Jacobian of one tile's rows (2 GB in float32): each further tile computes Jacobians anew


def is_trained(leaf: Any) -> bool:
    """Whether a leaf of the parameters is a floating-point array."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _outputs(apply_fn: Callable[[Any, Any], Any], params: Any) -> tuple[Callable[[Any, Any], Any], Any]:
    """f(trained, x) of shape (n, k), and the trained leaves."""
    trained, fixed = eqx.partition(params, is_trained)
    return lambda trained, x: apply_fn(eqx.combine(trained, fixed), x).reshape(len(x), -1), trained


def _jacobian(apply_fn: Callable[[Any, Any], Any], params: Any, x: Any, output: str, dtype: Any) -> list[Any]:
    """df/d(parameter) at the rows of x: one array (n, k, entries) a trained leaf; of the sum of the outputs k = 1."""
    outputs, trained = _outputs(apply_fn, params)

    def of_row(trained, row):
        values = outputs(trained, row[None, :])[0]
        return values.sum(keepdims=True) * len(values) ** -0.5 if output == "sum_of_logits" else values

    with jax.default_matmul_precision("highest"):  # TF32 makes Gram matrices indefinite
        leaves = jax.tree.leaves(jax.vmap(jax.jacrev(of_row), (None, 0))(trained, x))
    return [leaf.reshape(*leaf.shape[:2], prod(leaf.shape[2:])).astype(dtype) for leaf in leaves]


def _contract(jacobian1: list[Any], jacobian2: list[Any], output: str) -> Any:
    k = jacobian1[0].shape[1]
    if output == "full":
        product = partial(jnp.einsum, "iap,jbp->ijab", precision=jax.lax.Precision.HIGHEST)
        return sum(map(product, jacobian1, jacobian2))
    rows1, rows2 = ([leaf.reshape(len(leaf), prod(leaf.shape[1:])) for leaf in jacobian] for jacobian in (jacobian1, jacobian2))
    return sum(jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST) for a, b in zip(rows1, rows2, strict=True)) / k


def check_outputs(apply_fn: Callable[[Any, Any], Any], params: Any, x: Any) -> int:
    """The number of outputs; raises unless apply_fn gives (n,) or (n, k), k >= 1."""
    outputs: dict[int, Any] = {}
    for n in (1, 2, 3):  # one n alone could be k
        values = eqx.filter_eval_shape(apply_fn, params, jax.ShapeDtypeStruct((n, x.shape[1]), x.dtype))
        shape = getattr(values, "shape", None)
        if shape is None or len(shape) not in (1, 2) or shape[0] != n or 0 in shape or outputs.get(1, shape[1:]) != shape[1:]:
            got = type(values).__name__ if shape is None else f"shape {shape}"
            raise ValueError(
                f"`EmpiricalNTK(apply_fn, params)` needs apply_fn(params, x) of shape (n,) or (n, k), k >= 1. "
                f"Got {got} for n = {n} rows."
            )
        if not jnp.issubdtype(values.dtype, jnp.floating):
            raise TypeError(
                f"`EmpiricalNTK(apply_fn, params)` needs apply_fn(params, x) of real numbers. Got dtype {values.dtype}."
            )
        outputs[n] = shape[1:]
    return outputs[1][0] if outputs[1] else 1


def check_rows_apart(apply_fn: Callable[[Any, Any], Any], params: Any, x: Any) -> None:
    """Raises where the first two rows change each other's outputs; nothing is known of traced ones."""
    if len(x) < 2 or any(map(is_tracer, jax.tree.leaves((apply_fn, params, x)))):
        return
    together, apart = _two_rows(apply_fn, params, x[:2])
    scale = jnp.abs(together).max() + jnp.abs(apart).max()
    if jnp.isfinite(scale) and not jnp.abs(together - apart).max() <= COUPLED * scale:
        raise ValueError(
            "`EmpiricalNTK(apply_fn, params)` needs outputs that depend on their own row of x alone. Got other outputs "
            "for the first row without the second, as batch statistics give them: fix these as parameters that are not trained."
        )


@eqx.filter_jit
def _two_rows(apply_fn: Any, params: Any, x: Any) -> tuple[Any, Any]:
    check_outputs(apply_fn, params, x)
    with jax.default_matmul_precision("highest"):
        return apply_fn(params, x), jnp.concatenate([apply_fn(params, x[:1]), apply_fn(params, x[1:])])


def _rows_at_once(apply_fn: Callable[[Any, Any], Any], params: Any, x: Any, output: str, block: int) -> int:
    k = check_outputs(apply_fn, params, x)
    entries = sum(leaf.size for leaf in jax.tree.leaves(params) if is_trained(leaf)) * (1 if output == "sum_of_logits" else k)
    return min(block, max(1, JACOBIAN_ENTRIES // max(1, entries)))


@eqx.filter_jit
def jacobian_gram(apply_fn: Any, params: Any, x1: Any, x2: Any, *, output: str, block: int, dtype: Any) -> Any:
    """The kernel of the rows x1 and x2 (None: x1 again), products between rows in `dtype`, at most `block` rows at once."""
    same = x2 is None
    x2 = x1 if same else x2
    most = _rows_at_once(apply_fn, params, x1, output, block)
    jacobian = partial(_jacobian, apply_fn, params, output=output, dtype=dtype)

    def tile(cut1, cut2):
        if not same:
            return _contract(jacobian(cut1(x1)), jacobian(cut2(x2)), output)
        if len(x1) <= most:
            # Computed once and kept: fused into the product it would be computed inside it. Half of the product would do, but in
            # three smaller ones it takes longer.
            one = jax.lax.optimization_barrier(jacobian(x1))
            return _contract(one, one, output)
        # Both sides by the same code: rounded differently, they would make the matrix indefinite.
        both = jax.lax.map(jacobian, jnp.stack([cut1(x1), cut2(x1)]))
        return _contract([leaf[0] for leaf in both], [leaf[1] for leaf in both], output)

    gram = tiled(tile, len(x1), len(x2), most, same=same)
    return mirrored(gram) if same else gram


@eqx.filter_jit
def jacobian_diag(apply_fn: Any, params: Any, x: Any, *, output: str, block: int, dtype: Any) -> Any:
    """The kernel of every row of x with itself."""

    def row(x):
        jacobian = _jacobian(apply_fn, params, x[None, :], output, dtype)
        return _contract(jacobian, jacobian, output)[0, 0]

    return jax.lax.map(row, x, batch_size=_rows_at_once(apply_fn, params, x, output, block))


@eqx.filter_jit
def product(apply_fn: Any, params: Any, x: Any, v: Any, *, output: str, block: int) -> Any:
    """Theta(x, x) v = J (J^T v) for v (n, columns), of "full" (n, k, columns): one vector of all parameters, no matrix."""
    outputs, trained = _outputs(apply_fn, params)
    n, k = len(x), check_outputs(apply_fn, params, x)
    rows = _in_blocks(x, block, x[-1:])

    def both(cotangents):
        def pull(total, at):
            x, u = at
            share = jax.vjp(lambda trained: outputs(trained, x), trained)[1](u)[0]
            return jax.tree.map(jnp.add, total, share), None

        direction = jax.lax.scan(
            pull, jax.tree.map(jnp.zeros_like, trained), (rows, _in_blocks(cotangents, block, jnp.zeros_like(cotangents[:1])))
        )[0]
        values = jax.lax.map(lambda x: jax.jvp(lambda trained: outputs(trained, x), (trained,), (direction,))[1], rows)
        return values.reshape(-1, k)[:n]

    def column(v):
        if output == "full":
            return both(v)
        if output == "sum_of_logits":
            return both(jnp.broadcast_to(v[:, None] * k**-0.5, (n, k))).sum(axis=1) * k**-0.5
        units = jnp.eye(k, dtype=v.dtype)
        return jax.lax.map(lambda unit: both(v[:, None] * unit[None, :]) @ unit, units).sum(axis=0) / k

    with jax.default_matmul_precision("highest"):
        return jnp.moveaxis(jax.lax.map(column, jnp.moveaxis(v, -1, 0)), 0, -1)


@eqx.filter_jit
def projected_features(apply_fn: Any, params: Any, x: Any, seed: Any, *, projections: int, block: int) -> Any:
    """J R / sqrt(projections k) for R with independent signs, (n, projections k): one forward derivative a column of R."""
    outputs, trained = _outputs(apply_fn, params)
    n, k = len(x), check_outputs(apply_fn, params, x)
    leaves, structure = jax.tree.flatten(trained)

    def signs(index):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), index), len(leaves))
        return jax.tree.unflatten(
            structure, [jax.random.rademacher(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
        )

    def of_rows(x):
        _, derivative = jax.linearize(lambda trained: outputs(trained, x), trained)
        return jnp.moveaxis(jax.lax.map(lambda index: derivative(signs(index)), jnp.arange(projections)), 0, 1)

    with jax.default_matmul_precision("highest"):
        return jax.lax.map(of_rows, _in_blocks(x, block, x[-1:])).reshape(-1, projections * k)[:n] * (projections * k) ** -0.5


def _in_blocks(rows: Any, block: int, filler: Any) -> Any:
    """(blocks, rows of one block, ...), the last block filled up."""
    size = max(1, min(len(rows), block))
    short = -len(rows) % size
    return jnp.concatenate([rows, jnp.repeat(filler, short, axis=0)]).reshape(-1, size, *rows.shape[1:])
