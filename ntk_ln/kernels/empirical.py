"""The NTK of a finite network: inner products of its outputs' derivatives with respect to all parameters."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from types import FunctionType
from typing import Any, Literal, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy  # its submodules load at first use: at the top they would cost a third of `import ntk_ln`

from ntk_ln._dtype import Inputs, check_finite, check_numbers, check_rows, check_whole, computing, enable_x64, is_tracer, same_rows
from ntk_ln.kernels import _jacobians, _layerwise
from ntk_ln.kernels._base import AbstractKernel, KernelPair, symmetric_operator
from ntk_ln.kernels._jacobians import is_trained
from ntk_ln.layers import Dense
from ntk_ln.network import Network

BLOCK = 1024  # rows and columns computed at once: a few 8 MB matrices beside the result
Output = Literal["trace", "full", "sum_of_logits", "projected"]


class EmpiricalNTK(AbstractKernel):
    r"""The neural tangent kernel of a finite network at its parameters.

        Theta_ab(x, x') = sum over parameters p of df_a(x)/dp df_b(x')/dp

    A network is differentiated layer by layer: a Dense with inputs A and backward signals D has the share
    (w_std^2/n A A'^T + b_std^2) * (D D'^T), elementwise, so no Jacobian is ever formed. Any other function has its Jacobian
    contracted in blocks of rows. Of n points, k outputs, P parameters and width w the layouts cost:

    | output | value | network | function |
    |---|---|---|---|
    | "trace" | (n, n): the mean over outputs of Theta_aa, what `NTK` is the limit of | k n^2 w | k n^2 P |
    | "full" | (n, n, k, k): all pairs of outputs | k^2 n^2 w | k^2 n^2 P |
    | "sum_of_logits" | (n, n): the kernel of (f_1 + ... + f_k)/sqrt(k); tends to "trace" | n^2 w | n^2 P |
    | "projected" | (n, n): "trace" from m random projections of the gradients | m n P + k m n^2 | the same |

    The projections are J R with R of independent signs. An entry is unbiased over seeds, with a standard error of at most
    sqrt(2/m) sqrt(Theta(x,x) Theta(x',x')).

    Args:
        network: a `Network`; or a function apply_fn(params, x) of x (n, d) with values (n,) or (n, k), each row of which
            depends on the same row of x alone. It is compiled as under `jax.jit`: what it reads beside its arguments is read once,
            by a function for all kernels of it, by a method or another object anew for each `EmpiricalNTK`. For an Equinox or Flax
            NNX module: `EmpiricalNTK(*from_equinox(module))`, `EmpiricalNTK(*from_nnx(module))`.
        params: for a network what `net.init` gives; for a function any pytree. All its floating-point arrays are trained, all
            other leaves are handed on as they are. Arrays of NumPy are copied.
        output: the layout, by name.
        projections: m, of output="projected".
        seed: of the projections.
        block: rows computed at once, 1024 by default; bounds the memory beside the result, and changes only its rounding.
        accumulate: "float64" takes the products between rows of float32 gradients in float64, and returns that.

    Calling it: as `NTK`, in the dtype of the parameters (the widest); float64 needs no global flag. `k.diag(x)` is (n,) or
    (n, k, k). `k.pair(x1, x2).nngp` is the share of the last Dense, w_std^2/n A A'^T + b_std^2: the covariance of the outputs over
    redraws of that layer alone, which tends to `NNGP` with the width. Without the matrix: `k.trace(x)`, `k.matvec(x, v)`, and
    `min_eigenvalue(k.operator(x))`.

    Raises:
        TypeError: neither a network nor a function; parameters that are not floating-point arrays; `pair` of a function.
        ValueError: parameters that do not fit the network or are not finite; outputs of another shape; and as `NTK` when called.

    Accuracy: rounding, against automatic differentiation and neural-tangents (tests/kernels/test_empirical.py).

    References:
        Jacot, Gabriel, Hongler (2018), eq. 4; Novak, Sohl-Dickstein, Schoenholz (2022), "Fast finite width neural tangent
        kernel", section 3; Mohamadi, Bae, Sutherland (2023), "A fast, well-founded approximation to the empirical neural tangent
        kernel", eq. 2 (sum of logits); Engel et al. (2023), "Faithful and efficient explanations for neural networks via neural
        tangent kernel surrogate models", section 3 (projections).

    >>> import jax
    >>> from ntk_ln import Dense, Network
    >>> net = Network(Dense(b_std=1.0))
    >>> params = net.init(jax.random.key(0), in_features=2, width=1)
    >>> EmpiricalNTK(net, params)([[1, 2], [3, -1]]).round(3)
    array([[3.5, 1.5],
           [1.5, 6. ]], dtype=float32)
    """

    network: Network | None
    params: Any
    apply_fn: Callable[[Any, Any], Any] | None = eqx.field(static=True)
    output: Output = eqx.field(static=True)
    projections: int = eqx.field(static=True)
    seed: int = eqx.field(static=True)
    block: int = eqx.field(static=True)
    accumulate: Literal["float64"] | None = eqx.field(static=True)

    def __init__(
        self,
        network: Network | Callable[[Any, Any], Any],
        params: Any,
        *,
        output: Output = "trace",
        projections: int = 1024,
        seed: int = 0,
        block: int = BLOCK,
        accumulate: Literal["float64"] | None = None,
    ):
        call = "EmpiricalNTK(network, params, ...)"
        is_network = isinstance(network, Network)
        if not is_network and (not callable(network) or isinstance(network, AbstractKernel)):
            raise TypeError(
                f"`EmpiricalNTK(network, params)` needs a Network or a function apply_fn(params, x). Got {type(network).__name__}."
            )
        if output not in get_args(Output):
            raise ValueError(f"`{call}` needs output={' or '.join(map(repr, get_args(Output)))}. Got {output!r}.")
        check_whole(projections, call, "projections", 1)
        check_whole(block, call, "block", 1)
        check_whole(seed, call, "seed", 0, 2**32 - 1)
        if accumulate not in (None, "float64"):
            raise ValueError(f'`{call}` needs accumulate="float64" or None. Got {accumulate!r}.')
        if is_network:
            _check_fits(network, params)
        _check_values(params)
        self.network, self.apply_fn = (network, None) if is_network else (None, _compiled_apart(network))
        self.params = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, params)
        self.output, self.projections, self.seed = output, projections, seed
        self.block, self.accumulate = block, accumulate

    @property
    def dtype(self) -> Any:
        """That of the results: the widest of the parameters', or float64 where sums are accumulated in it."""
        return np.dtype(np.float64) if self.accumulate else self._own_dtype

    def __call__(self, x1: Any, x2: Any = None) -> Any:
        with self._computing(f"{self._name}(x1, x2)", x1, x2) as (inputs, params):
            if self.output == "projected":
                one = self._features(params, inputs.x1)
                two = one if inputs.x2 is None else self._features(params, inputs.x2)
                return self._finished(inputs, jnp.matmul(one, two.T, precision=jax.lax.Precision.HIGHEST))
            settings = {"output": self.output, "block": self.block, "dtype": self.dtype}
            if self.network is None:
                return self._finished(inputs, _jacobians.jacobian_gram(self.apply_fn, params, inputs.x1, inputs.x2, **settings))
            return self._finished(inputs, _layerwise.layerwise_gram(self.network, params, inputs.x1, inputs.x2, **settings))

    def pair(self, x1: Any, x2: Any = None) -> KernelPair:
        call = f"{self._name}.pair(x1, x2)"
        if self.network is None:
            raise TypeError(f"`{call}` needs a Network: only there is the last layer known. Use `{self._name}(x1, x2)`.")
        if self.output == "projected":
            raise TypeError(f'`{call}` needs a layout other than output="projected". Use `{self._name}(x1, x2)`.')
        with self._computing(call, x1, x2) as (inputs, params):
            settings = {"output": self.output, "block": self.block, "dtype": self.dtype}
            return self._finished(inputs, _layerwise.layerwise_pair(self.network, params, inputs.x1, inputs.x2, **settings))

    def diag(self, x: Any) -> Any:
        with self._computing(f"{self._name}.diag(x)", x) as (inputs, params):
            if self.output == "projected":
                return self._finished(inputs, (self._features(params, inputs.x1) ** 2).sum(axis=1))
            settings = {"output": self.output, "dtype": self.dtype}
            if self.network is None:
                diagonal = _jacobians.jacobian_diag(self.apply_fn, params, inputs.x1, block=self.block, **settings)
            else:
                diagonal = _layerwise.layerwise_diag(self.network, params, inputs.x1, **settings)
            return self._finished(inputs, diagonal)

    def trace(self, x: Any) -> Any:
        """The trace of the matrix k(x) (of "full": of the n k by n k matrix), in O(n).

        >>> import numpy as np
        >>> EmpiricalNTK(lambda w, x: x @ w, np.ones(2)).trace([[1.0, 2.0], [3.0, 0.0]])
        array(14.)
        """
        diagonal = self.diag(x)
        total = diagonal.sum(axis=0) if self.output != "full" else diagonal.trace(axis1=1, axis2=2).sum(axis=0)
        return total if isinstance(total, jax.Array) else np.asarray(total)

    def matvec(self, x: Any, v: Any) -> Any:
        """The product k(x) v without the matrix: J (J^T v), by one reverse and one forward derivative an output ("trace").

        Args:
            x: (n, d).
            v: (n,) or (n, columns); of output="full" (n, k) or (n, k, columns).

        Returns:
            The shape of v, in the parameters' dtype: derivatives have it, whatever `accumulate`. Memory: one vector of all
            parameters, and the activations of a block of rows.

        >>> import numpy as np
        >>> EmpiricalNTK(lambda w, x: x @ w, np.ones(2)).matvec([[1.0, 2.0], [3.0, 0.0]], [1.0, -1.0])
        array([ 2., -6.])
        """
        call = f"{self._name}.matvec(x, v)"
        with self._computing(call, x) as (inputs, params):
            x1 = inputs.x1
            v = jnp.asarray(check_numbers(v, call, "v"), self._own_dtype)
            rows: tuple[int, ...] = (len(x1),)
            if self.output == "full":
                rows = (len(x1), _jacobians.check_outputs(self._function, params, x1))
            if v.shape[: len(rows)] != rows or v.ndim > len(rows) + 1:
                raise ValueError(f"`{call}` needs `v` of shape {rows} or {(*rows, 'columns')}. Got shape {v.shape}.")
            check_finite(v, call, "v")
            columns = v if v.ndim > len(rows) else v[..., None]
            if self.output == "projected":
                features = self._features(params, x1).astype(v.dtype)
                product = jnp.matmul(features, jnp.matmul(features.T, columns, precision="highest"), precision="highest")
            else:
                product = _jacobians.product(self._function, params, x1, columns, output=self.output, block=self.block)
            return self._finished(inputs, product.reshape(v.shape))

    def operator(self, x: Any) -> "scipy.sparse.linalg.LinearOperator":
        """k(x) as a `scipy.sparse.linalg.LinearOperator` of `matvec`, for `min_eigenvalue` and SciPy's solvers.

        >>> import numpy as np
        >>> EmpiricalNTK(lambda w, x: x @ w, np.ones(2)).operator([[1.0, 2.0], [3.0, 0.0]]).shape
        (2, 2)
        """
        call = f"{self._name}.operator(x)"
        x = np.asarray(check_rows(x, call))
        self._check_input(x, call, "x")
        shape: tuple[int, ...] = (len(x),)
        if self.output == "full":
            with self._computing(call, x) as (inputs, params):
                shape = (len(x), _jacobians.check_outputs(self._function, params, inputs.x1))
        n = int(np.prod(shape))

        def product(v):
            columns = np.asarray(v).reshape(*shape, -1)
            return np.asarray(self.matvec(x, columns), np.float64).reshape(n, -1)

        return symmetric_operator(n, product, self._own_dtype)

    @property
    def _own_dtype(self) -> Any:
        return reduce(jnp.promote_types, [leaf.dtype for leaf in jax.tree.leaves(self.params) if is_trained(leaf)])

    @property
    def _function(self) -> Callable[[Any, Any], Any]:
        return self.apply_fn if self.network is None else self.network.apply  # pyright: ignore[reportReturnType]

    def _features(self, params: Any, x: Any) -> Any:
        features = _jacobians.projected_features(
            self._function, params, x, np.uint32(self.seed), projections=self.projections, block=self.block
        )
        return features.astype(self.dtype)

    @property
    def _name(self) -> str:
        return "EmpiricalNTK(apply_fn, params)" if self.network is None else "EmpiricalNTK(net, params)"

    @contextmanager
    def _computing(self, call: str, x1: Any, x2: Any = None) -> Iterator[tuple[Inputs, Any]]:
        """Inputs and parameters in the parameters' dtype, and in the precision of the results; equal x1 and x2 become one."""
        dtype = self._own_dtype
        scope = partial(enable_x64, True) if self.dtype == np.float64 else nullcontext

        def cast(x, name):
            x = check_rows(x, call, name)
            self._check_input(x, call, name)
            with scope():  # elsewhere JAX would silently narrow to float32
                return x.astype(dtype)

        x1 = cast(x1, "x" if x2 is None else "x1")
        x2 = None if x2 is None else cast(x2, "x2")
        with computing(call, x1, x2, traced=any(is_tracer(leaf) for leaf in jax.tree.leaves(self))) as inputs, scope():
            if x2 is not None and same_rows(x1, x2):
                inputs = inputs._replace(x2=None)
            params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype) if is_trained(leaf) else leaf, self.params)
            if self.network is None:
                _jacobians.check_rows_apart(self._function, params, inputs.x1)
            yield inputs, params

    def _finished(self, inputs: Inputs, result: Any) -> Any:
        """The result in the caller's kind of array; raises unless it is finite."""
        for values in jax.tree.leaves(result):
            if (
                not is_tracer(values)
                and values.size
                and not (np.isfinite(float(values.max())) and np.isfinite(float(values.min())))
            ):
                raise ValueError(
                    f"`{self._name}` gave entries that are not finite: its derivatives leave the range of {self._own_dtype}, or "
                    'are not finite. Scale `x`, give parameters of a wider dtype, or try accumulate="float64".'
                )
        return inputs.give_back(result)

    def _check_input(self, x: Any, call: str, name: str) -> None:
        if self.network is None:
            return
        first = next(i for i, layer in enumerate(self.network.layers) if isinstance(layer, Dense))
        features = self.params[first]["w"].shape[0]
        if x.shape[1] != features:
            raise ValueError(f"`{call}` needs `{name}` of shape (n, {features}), as the parameters have it. Got shape {x.shape}.")
        self.network.check_rows(call, x)


def from_equinox(module: Any) -> tuple[Callable[[Any, Any], Any], Any]:
    """apply_fn and parameters of an Equinox module of one row: `EmpiricalNTK(*from_equinox(module))`.

    Args:
        module: called on one row (d,), with a scalar or (k,) as its value. All its floating-point arrays are trained.

    >>> import equinox as eqx, jax, numpy as np
    >>> EmpiricalNTK(*from_equinox(eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))))(np.ones((4, 3))).shape
    (4, 4)
    """
    if not callable(module):
        raise TypeError(f"`from_equinox(module)` needs a module that can be called on one row. Got {type(module).__name__}.")
    return _apply_rows, module


def _apply_rows(module: Any, x: Any) -> Any:
    return jax.vmap(module)(x)


def from_nnx(module: Any) -> tuple[Callable[[Any, Any], Any], Any]:
    """apply_fn and parameters of a Flax NNX module of many rows: `EmpiricalNTK(*from_nnx(module))`.

    Args:
        module: called on rows (n, d), with values (n,) or (n, k), in the state it is in (`module.eval()` before), of which a
            copy is taken. Its `nnx.Param` variables are trained, all others are held fixed.

    Raises:
        ImportError: Flax is not installed.
        TypeError: not an NNX module.
        ValueError: a BatchNorm or a Dropout that is in training.
    """
    try:
        from flax import nnx
    except ImportError:
        raise ImportError("`from_nnx(module)` needs Flax: `pip install flax`.") from None
    if not isinstance(module, nnx.Module):
        raise TypeError(f"`from_nnx(module)` needs a Flax NNX module. Got {type(module).__name__}.")
    walk = getattr(nnx, "iter_modules", None) or nnx.Module.iter_modules  # a method before Flax 0.12
    for _, part in walk(module):
        dropout = isinstance(part, nnx.Dropout) and part.rate > 0 and part.deterministic is False
        if dropout or (isinstance(part, nnx.BatchNorm) and part.use_running_average is False):
            raise ValueError(
                f"`from_nnx(module)` needs outputs that depend on their own row alone. Got a {type(part).__name__} in training: "
                "call `module.eval()` first."
            )
    # The variables of the module change in place; rebuilt ones do not.
    graph, params, rest = jax.tree.map(lambda leaf: leaf, nnx.split(module, nnx.Param, ...))

    def apply_fn(params, x):
        return nnx.merge(graph, params, rest)(x)

    return apply_fn, params


# --- What comes in -------------------------------------------------------------------------------------------------------


def _compiled_apart(apply_fn: Any) -> Any:
    """A callable that shares no compilation where equality says nothing of what it computes: an object's attributes may change."""
    inner = apply_fn.func if isinstance(apply_fn, partial) else apply_fn
    return apply_fn if isinstance(inner, FunctionType | eqx.Module | jax.stages.Wrapped) else partial(apply_fn)


def _check_fits(network: Network, params: Any) -> None:
    """Raises unless `params` is what `network.init` gives, for any widths."""
    layers = network.layers
    if not isinstance(params, Sequence) or len(params) != len(layers):
        got = f"{len(params)} entries" if isinstance(params, Sequence) else type(params).__name__
        raise ValueError(f"`EmpiricalNTK(net, params)` needs one entry a layer, {len(layers)}, as `net.init` gives. Got {got}.")
    shape_of = partial(jax.tree.map, np.shape)
    n_in: Any = None
    for position, (layer, given) in enumerate(zip(layers, params, strict=True)):
        n_out = n_in
        if isinstance(layer, Dense):
            weights = np.shape(given["w"]) if isinstance(given, dict) and "w" in given else ()
            rows, n_out = weights if len(weights) == 2 else (1, 1)
            n_in = rows if n_in is None else n_in
        wanted = shape_of(jax.eval_shape(partial(layer.init, n_in=n_in, n_out=n_out, dtype=jnp.float32), jax.random.key(0)))
        if shape_of(given) != wanted:
            raise ValueError(
                f"`EmpiricalNTK(net, params)` needs parameters of the shapes {wanted} for layer {position}, {layer!r}. "
                f"Got {shape_of(given)}."
            )
        n_in = n_out


def _check_values(params: Any) -> None:
    leaves = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_trained(leaf)]
    if not leaves:
        raise TypeError("`EmpiricalNTK(network, params)` needs floating-point arrays as parameters. Got none.")
    for path, leaf in leaves:
        if is_tracer(leaf):
            continue
        bad = int((~np.isfinite(np.asarray(leaf))).sum())
        if bad:
            name = f"params{jax.tree_util.keystr(path)}"
            raise ValueError(f"`EmpiricalNTK(network, params)` needs finite parameters. {bad} entries of `{name}` are not finite.")
