"""The NTK of a finite network: inner products of its outputs' derivatives with respect to all parameters."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from math import prod
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._dtype import Inputs, check_rows, computing, enable_x64, is_tracer, same_rows
from ntk_ln.kernels._base import AbstractKernel, KernelPair
from ntk_ln.layers import AbstractLayer, Dense, Residual
from ntk_ln.network import Network

TILE = 1024  # rows and columns computed at once: a few 8 MB matrices beside the result
JACOBIAN_ENTRIES = 2**24  # of the Jacobian of one tile's rows (128 MB in float64)


class EmpiricalNTK(AbstractKernel):
    r"""The neural tangent kernel of a finite network at its parameters.

        Theta_ab(x, x') = sum over parameters p of df_a(x)/dp df_b(x')/dp,   "trace": the mean over outputs of Theta_aa.

    A network is differentiated layer by layer: a Dense with inputs A and backward signals D has the share
    (w_std^2/n A A'^T + b_std^2) * (D D'^T), elementwise, so no Jacobian is ever formed. Any other function has its Jacobian
    contracted in blocks of rows. Memory: the result and its mirror image, the activations of all rows, and a few tiles.

    Args:
        network: a `Network`; or a function apply_fn(params, x) of x (n, d) with values (n,) or (n, k), each row of which
            depends on the same row of x alone.
        params: for a network what `net.init` gives; for a function any pytree. All its floating-point arrays are trained, all
            other leaves are handed on as they are.
        output: "trace" for the mean over outputs, which is what `NTK` is the limit of; "full" for all pairs of outputs.

    Calling it: as `NTK`, in the dtype of the parameters (the widest); float64 needs no global flag. With output="full"
    `k(x1, x2)` is (n1, n2, k, k) and `k.diag(x)` (n, k, k). `k.pair(x1, x2).nngp` is the share of the last Dense, w_std^2/n A A'^T
    + b_std^2: the covariance of the outputs over redraws of that layer alone, which tends to `NNGP` with the width.

    Raises:
        TypeError: neither a network nor a function; parameters that are not floating-point arrays; `pair` of a function.
        ValueError: parameters that do not fit the network or are not finite; outputs of another shape; and as `NTK` when called.

    Accuracy: rounding, against automatic differentiation and neural-tangents (tests/kernels/test_empirical.py).

    References:
        Jacot, Gabriel, Hongler (2018), eq. 4; Novak, Sohl-Dickstein, Schoenholz (2022), "Fast finite width neural tangent
        kernel", section 3.

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
    output: Literal["trace", "full"] = eqx.field(static=True)

    def __init__(self, network: Network | Callable[[Any, Any], Any], params: Any, *, output: Literal["trace", "full"] = "trace"):
        is_network = isinstance(network, Network)
        if not is_network and (not callable(network) or isinstance(network, AbstractKernel)):
            raise TypeError(
                f"`EmpiricalNTK(network, params)` needs a Network or a function apply_fn(params, x). Got {type(network).__name__}."
            )
        if output not in ("trace", "full"):
            raise ValueError(f'`EmpiricalNTK(network, params, output=...)` needs output="trace" or "full". Got {output!r}.')
        if is_network:
            _check_fits(network, params)
        _check_values(params)
        self.network, self.apply_fn = (network, None) if is_network else (None, network)
        self.params, self.output = params, output

    @property
    def dtype(self) -> Any:
        """The widest of the parameters' dtypes: that of all results."""
        return reduce(jnp.promote_types, [leaf.dtype for leaf in jax.tree.leaves(self.params) if _is_trained(leaf)])

    def __call__(self, x1: Any, x2: Any = None) -> Any:
        with self._computing(f"{self._name}(x1, x2)", x1, x2) as (inputs, params):
            if self.network is None:
                return inputs.give_back(_jacobian_gram(self.apply_fn, params, inputs.x1, inputs.x2, self.output))
            return inputs.give_back(_layerwise_gram(self.network, params, inputs.x1, inputs.x2, self.output))

    def pair(self, x1: Any, x2: Any = None) -> KernelPair:
        call = f"{self._name}.pair(x1, x2)"
        if self.network is None:
            raise TypeError(f"`{call}` needs a Network: only there is the last layer known. Use `{self._name}(x1, x2)`.")
        with self._computing(call, x1, x2) as (inputs, params):
            return inputs.give_back(_layerwise_pair(self.network, params, inputs.x1, inputs.x2, self.output))

    def diag(self, x: Any) -> Any:
        with self._computing(f"{self._name}.diag(x)", x) as (inputs, params):
            if self.network is None:
                return inputs.give_back(_jacobian_diag(self.apply_fn, params, inputs.x1, self.output))
            return inputs.give_back(_layerwise_diag(self.network, params, inputs.x1, self.output))

    @property
    def _name(self) -> str:
        return "EmpiricalNTK(apply_fn, params)" if self.network is None else "EmpiricalNTK(net, params)"

    @contextmanager
    def _computing(self, call: str, x1: Any, x2: Any = None) -> Iterator[tuple[Inputs, Any]]:
        """Inputs and parameters in the parameters' dtype, and in its precision; equal x1 and x2 become one."""
        dtype = self.dtype
        scope = partial(enable_x64, True) if dtype == np.float64 else nullcontext

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
            yield inputs, jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype) if _is_trained(leaf) else leaf, self.params)

    def _check_input(self, x: Any, call: str, name: str) -> None:
        if self.network is None:
            return
        first = next(i for i, layer in enumerate(self.network.layers) if isinstance(layer, Dense))
        features = self.params[first]["w"].shape[0]
        if x.shape[1] != features:
            raise ValueError(f"`{call}` needs `{name}` of shape (n, {features}), as the parameters have it. Got shape {x.shape}.")
        self.network.check_rows(call, x)


# --- What comes in -------------------------------------------------------------------------------------------------------


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(leaf.dtype, jnp.floating)


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
    leaves = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params) if _is_trained(leaf)]
    if not leaves:
        raise TypeError("`EmpiricalNTK(network, params)` needs floating-point arrays as parameters. Got none.")
    for path, leaf in leaves:
        if is_tracer(leaf):
            continue
        bad = int((~np.isfinite(np.asarray(leaf))).sum())
        if bad:
            name = f"params{jax.tree_util.keystr(path)}"
            raise ValueError(f"`EmpiricalNTK(network, params)` needs finite parameters. {bad} entries of `{name}` are not finite.")


# --- A network: layer by layer -------------------------------------------------------------------------------------------


class _Pass(NamedTuple):
    """The inputs of all layers (a list within the list for the body of a Residual), and what carries signals back through them."""

    inputs: list[Any]
    pull: Callable[[Any], tuple[Any, list[Any]]]
    outputs: Any

    def signals(self, output: Any) -> list[Any]:
        """df_output/d(layer's output), for every layer."""
        return self.pull(jnp.zeros_like(self.outputs).at[:, output].set(1))[1]


def _forward(layers: Sequence[AbstractLayer], params: Any, x: Any) -> _Pass:
    inputs, pulls = [], []
    for layer, layer_params in zip(layers, params, strict=True):
        if isinstance(layer, Residual):
            body = _forward(layer.body, layer_params, x)
            inputs.append(body.inputs)
            pulls.append(partial(_pull_residual, body.pull))
            x = x + body.outputs
        else:
            inputs.append(x)
            x, pullback = jax.vjp(partial(layer.apply, layer_params), x)
            pulls.append(partial(_pull_layer, pullback))

    def pull(signal):
        signals = []
        for one in reversed(pulls):
            signal, here = one(signal)
            signals.append(here)
        return signal, signals[::-1]

    return _Pass(inputs, pull, x)


def _pull_layer(pullback: Callable[[Any], Any], signal: Any) -> tuple[Any, Any]:
    return pullback(signal)[0], signal


def _pull_residual(pull_body: Callable[[Any], Any], signal: Any) -> tuple[Any, Any]:
    through, signals = pull_body(signal)
    return signal + through, signals


def _shares(layers: Sequence[AbstractLayer], params: Any, inputs1: Any, signals1: Any, inputs2: Any, signals2: Any) -> Any:
    total: Any = 0
    for layer, *arguments in zip(layers, params, inputs1, signals1, inputs2, signals2, strict=True):
        share = _shares(layer.body, *arguments) if isinstance(layer, Residual) else layer.ntk_share(*arguments)
        total = total if share is None else total + share
    return total


def _over_outputs(entry: Callable[[Any, Any], Any], one: _Pass, two: _Pass, output: str) -> Any:
    """entry(signals1, signals2) of one pair of outputs: its mean over equal ones, or all pairs as two last axes."""
    k = one.outputs.shape[1]
    if output == "trace":
        # One output's signals at a time: their memory is that of the activations, however many outputs.
        total = entry(one.signals(0), two.signals(0))
        total = jax.lax.fori_loop(1, k, lambda o, total: total + entry(one.signals(o), two.signals(o)), total)
        return total / k
    outputs = jnp.arange(k)
    all1 = jax.vmap(one.signals)(outputs)
    all2 = all1 if two is one else jax.vmap(two.signals)(outputs)
    pairs = jax.lax.map(lambda g1: jax.lax.map(lambda g2: entry(g1, g2), all2), all1)
    return jnp.moveaxis(pairs, (0, 1), (-2, -1))


def _passes(network: Network, params: Any, x1: Any, x2: Any) -> tuple[_Pass, _Pass]:
    one = _forward(network.layers, params, x1)
    return one, one if x2 is None else _forward(network.layers, params, x2)


def _ntk(network: Network, params: Any, one: _Pass, two: _Pass, output: str) -> Any:
    def entry(signals1, signals2):
        def tile(cut1, cut2):
            side1, side2 = jax.tree.map(cut1, (one.inputs, signals1)), jax.tree.map(cut2, (two.inputs, signals2))
            return _shares(network.layers, params, *side1, *side2)

        return _tiled(tile, len(one.outputs), len(two.outputs), TILE, same=one is two)

    gram = _over_outputs(entry, one, two, output)
    return _mirrored(gram) if one is two else gram


@partial(jax.jit, static_argnames="output")
def _layerwise_gram(network: Network, params: Any, x1: Any, x2: Any, output: str) -> Any:
    return _ntk(network, params, *_passes(network, params, x1, x2), output)


@partial(jax.jit, static_argnames="output")
def _layerwise_pair(network: Network, params: Any, x1: Any, x2: Any, output: str) -> KernelPair:
    if not isinstance(network.layers[-1], Dense):
        last = network.layers[-1]
        raise ValueError(f"`EmpiricalNTK(net, params).pair` needs a network whose last layer is a Dense. Got {last!r}.")
    one, two = _passes(network, params, x1, x2)

    def tile(cut1, cut2):
        a1, a2 = cut1(one.inputs[-1]), cut2(two.inputs[-1])
        return network.layers[-1].ntk_share(params[-1], a1, jnp.ones_like(a1[:, :1]), a2, jnp.ones_like(a2[:, :1]))

    nngp = _tiled(tile, len(one.outputs), len(two.outputs), TILE, same=one is two)
    nngp = _mirrored(nngp) if one is two else nngp
    if output == "full":
        nngp = nngp[:, :, None, None] * jnp.eye(one.outputs.shape[1], dtype=nngp.dtype)[None, None]
    return KernelPair(nngp, _ntk(network, params, one, two, output))


@partial(jax.jit, static_argnames="output")
def _layerwise_diag(network: Network, params: Any, x: Any, output: str) -> Any:
    one = _forward(network.layers, params, x)

    def row(inputs, signals1, signals2):
        inputs, signals1, signals2 = jax.tree.map(lambda a: a[None], (inputs, signals1, signals2))
        return _shares(network.layers, params, inputs, signals1, inputs, signals2)[0, 0]

    return _over_outputs(lambda g1, g2: jax.vmap(row)(one.inputs, g1, g2), one, one, output)


# --- Any function: Jacobians of a few rows at a time ---------------------------------------------------------------------


def _jacobian(apply_fn: Callable[[Any, Any], Any], params: Any, x: Any) -> list[Any]:
    """df/d(parameter) at the rows of x: one array (n, k, entries) a trained leaf."""
    trained, fixed = eqx.partition(params, _is_trained)

    def outputs(trained, row):
        return apply_fn(eqx.combine(trained, fixed), row[None, :]).reshape(-1)

    with jax.default_matmul_precision("highest"):  # TF32 makes Gram matrices indefinite
        leaves = jax.tree.leaves(jax.vmap(jax.jacrev(outputs), (None, 0))(trained, x))
    return [leaf.reshape(*leaf.shape[:2], prod(leaf.shape[2:])) for leaf in leaves]


def _contract(jacobian1: list[Any], jacobian2: list[Any], output: str) -> Any:
    equation, k = ("iap,jap->ij", jacobian1[0].shape[1]) if output == "trace" else ("iap,jbp->ijab", 1)
    product = partial(jnp.einsum, equation, precision=jax.lax.Precision.HIGHEST)
    return sum(map(product, jacobian1, jacobian2)) / k


def _rows_at_once(apply_fn: Callable[[Any, Any], Any], params: Any, x: Any) -> int:
    values = eqx.filter_eval_shape(apply_fn, params, jax.ShapeDtypeStruct((2, x.shape[1]), x.dtype))
    shape = getattr(values, "shape", None)
    if shape is None or len(shape) not in (1, 2) or shape[0] != 2:
        got = type(values).__name__ if shape is None else f"shape {shape}"
        raise ValueError(
            f"`EmpiricalNTK(apply_fn, params)` needs apply_fn(params, x) of shape (n,) or (n, k). Got {got} for n = 2 rows."
        )
    entries = sum(leaf.size for leaf in jax.tree.leaves(params) if _is_trained(leaf)) * (shape[1] if len(shape) == 2 else 1)
    return min(TILE, max(1, JACOBIAN_ENTRIES // max(1, entries)))


@eqx.filter_jit
def _jacobian_gram(apply_fn: Any, params: Any, x1: Any, x2: Any, output: str) -> Any:
    same = x2 is None
    x2 = x1 if same else x2

    def tile(cut1, cut2):
        return _contract(_jacobian(apply_fn, params, cut1(x1)), _jacobian(apply_fn, params, cut2(x2)), output)

    gram = _tiled(tile, len(x1), len(x2), _rows_at_once(apply_fn, params, x1), same=same)
    return _mirrored(gram) if same else gram


@eqx.filter_jit
def _jacobian_diag(apply_fn: Any, params: Any, x: Any, output: str) -> Any:
    def row(x):
        jacobian = _jacobian(apply_fn, params, x[None, :])
        return _contract(jacobian, jacobian, output)[0, 0]

    return jax.lax.map(row, x, batch_size=_rows_at_once(apply_fn, params, x))


# --- Tiles ---------------------------------------------------------------------------------------------------------------


def _tiled(tile: Callable[[Any, Any], Any], n1: int, n2: int, most: int, *, same: bool) -> Any:
    """tile(cut1, cut2) -> (rows, columns, ...) for all tiles, each cut taking an array's rows; only the lower ones if `same`."""
    (starts1, size1), (starts2, size2) = _starts(n1, most), _starts(n2, most)
    starts = np.array([(s1, s2) for s1 in starts1 for s2 in starts2 if not same or s2 <= s1])

    def at(start1, start2):
        cut1 = partial(jax.lax.dynamic_slice_in_dim, start_index=start1, slice_size=size1)
        return tile(cut1, partial(jax.lax.dynamic_slice_in_dim, start_index=start2, slice_size=size2))

    if len(starts) == 1:
        return at(0, 0)
    value = jax.eval_shape(at, 0, 0)
    result = jnp.zeros((n1, n2, *value.shape[2:]), value.dtype)
    if not len(starts):
        return result

    def put(step, result):
        start = jnp.asarray(starts)[step]
        return jax.lax.dynamic_update_slice(result, at(*start), (*start, *[0] * (result.ndim - 2)))

    return jax.lax.fori_loop(0, len(starts), put, result)


def _starts(n: int, most: int) -> tuple[Any, int]:
    """First rows of the fewest equal tiles that cover n rows, and their size; the last ones may overlap."""
    size = -(-n // max(1, -(-n // most)))
    return np.minimum(np.arange(0, n, max(1, size)), n - size), size


def _mirrored(gram: Any) -> Any:
    """The lower triangle of (n, n) or (n, n, k, k), mirrored: exactly symmetric."""
    if gram.ndim == 4:
        n, _, k, _ = gram.shape
        rows = _mirrored(gram.transpose(0, 2, 1, 3).reshape(n * k, n * k))
        return rows.reshape(n, k, n, k).transpose(0, 2, 1, 3)
    # A sum with zeros, which is exact. A select between `gram` and its transpose would take XLA's CPU compiler minutes.
    return jnp.tril(gram) + jnp.tril(gram, -1).T
