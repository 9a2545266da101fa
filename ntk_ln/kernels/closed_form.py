"""NTK and NNGP of a network in closed form: one pass of the layers' infinite-width rules."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # its submodules load at first use: at the top they would cost a third of `import ntk_ln`
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ntk_ln._dtype import check_finite, check_rows, computing, is_tracer, same_rows, sharding_of
from ntk_ln._numerics import complement, divide, hypot
from ntk_ln.kernels import gram
from ntk_ln.kernels._base import AbstractKernel, KernelPair, symmetric_operator
from ntk_ln.kernels._pass import coordinates, in_dtype, kernels, read_out
from ntk_ln.layers import AbstractLayer, Activation, Dense, Growth, Inputs, Pairing, Residual, Side, State
from ntk_ln.layers._repeat import fold, through
from ntk_ln.layers._state import power_of
from ntk_ln.layers.activation import correlations
from ntk_ln.network import Network, check_network


class AbstractClosedForm(AbstractKernel):
    """What NTK and NNGP share: the pass through the network and the homogeneous coordinates of its inputs."""

    network: Network

    def __check_init__(self):
        check_network(self.network, f"{type(self).__name__}(net)")
        self.network.check_infinite(f"{type(self).__name__}(net)")

    @staticmethod
    def _select(pair: KernelPair) -> Any:
        raise NotImplementedError

    @property
    def growth(self) -> Growth:
        """The exponents of the mean's and the diagonal's growth far out."""
        return self.network.growth

    def __call__(self, x1: Any, x2: Any = None) -> Any:
        return self._blocks(self._select, x1, x2)

    def pair(self, x1: Any, x2: Any = None) -> KernelPair:
        return self._blocks(_both, x1, x2)

    def _blocks(self, select: Callable[[KernelPair], Any], x1: Any, x2: Any) -> Any:
        call = f"{type(self).__name__}(net)(x1, x2)"
        with computing(call, x1, x2, traced=self._traced) as inputs:
            x1, x2 = self.network.check_rows(call, inputs.x1, inputs.x2)
            inputs = inputs._replace(x1=x1, x2=x2)
            if inputs.x1.shape[0] == 0 or (inputs.x2 is not None and inputs.x2.shape[0] == 0):
                empty = jnp.zeros((len(inputs.x1), len(inputs.x1 if inputs.x2 is None else inputs.x2)), inputs.x1.dtype)
                return inputs.give_back(select(KernelPair(empty, empty)))
            sharding = sharding_of(inputs.x1)
            if sharding is not None:
                x2 = inputs.x1 if inputs.x2 is None else inputs.x2
                return _sharded(select, sharding.mesh, sharding.spec[0], self.network.folded, inputs.x1, x2)
            same = inputs.x2 is None or same_rows(inputs.x1, inputs.x2)
            if gram.serves(inputs.x1, inputs.x1 if same else inputs.x2, self):
                host = np.asarray(inputs.x1), None if same else np.asarray(inputs.x2)
                result = gram.gram(select, self.network, *host, call)
                return jax.tree.map(jnp.asarray, result) if inputs.is_jax else result
            result = _gram(select, self.network.folded, inputs.x1, None if same else inputs.x2)
            return inputs.give_back(jax.tree.map(_mirrored, result) if same else result)

    def diag(self, x: Any) -> Any:
        call = f"{type(self).__name__}(net).diag(x)"
        with computing(call, x, traced=self._traced) as inputs:
            (rows,) = self.network.check_rows(call, inputs.x1)
            return inputs.give_back(_diagonal(self._select, self.network.folded, rows))

    def matvec(self, x: Any, v: Any) -> np.ndarray:
        """The product k(x) v, tile by tile: the matrix is never in memory as a whole.

        Args:
            x: (n, d), n >= 1; not traced.
            v: (n,) or (n, columns), finite.

        Returns:
            The shape of v, float64 NumPy; the tiles have the precision of x.

        >>> from ntk_ln import Dense, Network
        >>> NTK(Network(Dense())).matvec([[1.0], [2.0]], [1.0, 1.0])
        array([3., 6.])
        """
        call = f"{type(self).__name__}(net).matvec(x, v)"
        if any(is_tracer(leaf) for leaf in jax.tree.leaves((self, x, v))):
            raise TypeError(f"`{call}` runs on the host and cannot be traced.")
        x, v = np.asarray(check_rows(x, call)), np.asarray(v, np.float64)
        if x.dtype != np.float32:
            x = x.astype(np.float64)
        if len(x) == 0 or v.ndim not in (1, 2) or len(v) != len(x):
            raise ValueError(f"`{call}` needs `v` of shape (n,) or (n, columns), n >= 1. Got x: {x.shape}, v: {v.shape}.")
        check_finite(v, call, "v")
        self.network.check_rows(call, x)
        return gram.multiply(self._select, self.network, x, v.reshape(len(x), -1)).reshape(v.shape)

    def operator(self, x: Any) -> "scipy.sparse.linalg.LinearOperator":
        """k(x) as a `scipy.sparse.linalg.LinearOperator` of `matvec`, for `min_eigenvalue` and SciPy's solvers.

        >>> from ntk_ln import Dense, Network
        >>> NTK(Network(Dense())).operator([[1.0], [2.0]]).shape
        (2, 2)
        """
        x = check_rows(x, f"{type(self).__name__}(net).operator(x)")
        dtype = np.float32 if x.dtype == np.float32 else np.float64
        return symmetric_operator(len(x), lambda v: self.matvec(x, v), dtype)

    def quadrature_error(self, x1: Any, x2: Any = None) -> Any:
        """An estimate of |error| of `k(x1, x2)` from numerical integration, entry by entry; 0 if every activation is closed-form.

        For elu and functions of your own it is thirty times the differences from two coarser rules: an estimate. For tanh, silu,
        softplus and elu it adds their stated relative errors, in units of sqrt(k(x,x) k(x',x')).
        """
        coarse = type(self)(Network(*map(_coarser, self.network.layers)))
        coarsest = type(self)(Network(*map(_coarser, coarse.network.layers)))
        value, spread = self(x1, x2), 0.0
        if coarse.network != self.network:
            spread = abs(value - coarse(x1, x2)) + abs(value - coarsest(x1, x2))
        diagonal1 = self.diag(x1)
        diagonal2 = diagonal1 if x2 is None else self.diag(x2)
        share = sum(_errors(self.network.layers))
        return 30 * spread + share * diagonal1[:, None] ** 0.5 * diagonal2[None, :] ** 0.5

    def profile(self, rho: Any, radius: float = 1.0) -> Any:
        """The kernel on the sphere: k(x, x') for |x|^2/d = |x'|^2/d = radius^2 and the cosine rho of their angle.

        Args:
            rho: cosines in [-1, 1], any shape.
            radius: root mean square of the inputs' features, > 0.

        Raises:
            ValueError: a cosine outside [-1, 1]; a network that starts with a norm, whose kernel is no function of the angle.

        >>> from ntk_ln import Activation, Dense, Network
        >>> NTK(Network(Dense(w_std=2**0.5), Activation("relu"), Dense(w_std=2**0.5))).profile([0.0, 1.0]).round(6)
        array([0.63662, 4.     ])
        """
        call = f"{type(self).__name__}(net).profile(rho, radius)"
        if not isinstance(self.network.layers[0], Dense):
            raise ValueError(f"`{call}` needs a network that starts with a Dense. Got {self.network.layers[0]!r}.")
        if not is_tracer(radius) and not 0 < radius < float("inf"):
            raise ValueError(f"`{call}` needs a finite radius > 0. Got {radius!r}.")
        traced = self._traced or is_tracer(radius)
        with computing(call, correlations(rho, call), traced=traced) as inputs:
            first, *rest = self.network.layers
            value = _profile(self._select, first, fold(rest), inputs.x1[:, 0], jnp.asarray(radius, inputs.x1.dtype))
            return inputs.give_back(value.reshape(np.shape(rho)))

    def homogeneous(
        self, v: Float[Array, "n1 d"], u: Float[Array, " n1"], x2: Float[Array, "n2 d"], power: float = 1.0
    ) -> Float[Array, "n1 n2"]:
        """e^p k(v/e, x2), e = u^power, for points v/e of the half-sphere, right at u = 0, where it is the far field.

        p is `growth.mean`; |v| and u should be of order 1. Differentiable at u = 0 if power * `growth.correction` >= 1.
        """
        return _homogeneous(self._select, self.network.folded, *self._uncut(v, u), x2, power)

    def homogeneous_diag(self, v: Float[Array, "n d"], u: Float[Array, " n"]) -> Float[Array, " n"]:
        """u^(2p) k(v/u, v/u), as `homogeneous`; infinite at u = 0 where the diagonal grows faster than the units."""
        return _homogeneous_diagonal(self._select, self.network.folded, *self._uncut(v, u))

    def _uncut(self, v: Any, u: Any) -> tuple[Any, Any]:
        """Where nothing of x passes any finite point does, and only those keep the constant's scale."""
        return (jnp.ones_like(v), jnp.ones_like(u)) if self.growth.cut else (v, u)

    @property
    def _traced(self) -> bool:
        return any(is_tracer(leaf) for leaf in jax.tree.leaves(self))


class NTK(AbstractClosedForm):
    """The neural tangent kernel of an infinitely wide network.

        Theta(x, x') = t + g s of the recursion through the layers.

    Args:
        network: a `Network`.

    Calling it: `k(x1, x2=None)` -> (n1, n2), `k.diag(x)` -> (n,), `k.pair(x1, x2=None)` -> `KernelPair(nngp, ntk)`, for x of
    shape (n, d), any finite real numbers; NumPy arrays come back as NumPy, JAX arrays as JAX, in their own dtype. Of x sharded by
    rows over a mesh (`jax.sharding.NamedSharding`, several hosts too) the result is sharded by rows.

    Raises:
        ValueError: a wrong shape, NaN or infinity, or a zero input that a norm layer makes 0/0.

    Accuracy: 1e-13 of sqrt(Theta(x,x) Theta(x',x')) in float64, 2e-6 in float32, near-duplicates and |x| from 1e-300 to 1e300
    included (tests/test_reference.py).

    References:
        Jacot, Gabriel, Hongler (2018), theorem 1; Ziomek, Whittle, Osborne (2025), theorem C.1 (LayerNorm).

    >>> import numpy as np
    >>> from ntk_ln import Activation, Dense, Network
    >>> net = Network(Dense(w_std=2**0.5), Activation("relu"), Dense(w_std=2**0.5))
    >>> NTK(net)(np.array([[1.0, 0.0], [1.0, 1.0]])).round(6)
    array([[2.     , 1.81831],
           [1.81831, 4.     ]])
    """

    @staticmethod
    def _select(pair: KernelPair) -> Any:
        return pair.ntk


class NNGP(AbstractClosedForm):
    """The covariance of an infinitely wide random network's outputs.

        K(x, x') = s of the recursion through the layers. Calls, errors and accuracy as `NTK`.

    References:
        Lee et al. (2018), "Deep neural networks as Gaussian processes", eq. 5.

    >>> import numpy as np
    >>> from ntk_ln import Dense, Network
    >>> NNGP(Network(Dense(b_std=1.0)))(np.array([[2.0], [3.0]]))
    array([[ 5.,  7.],
           [ 7., 10.]])
    """

    @staticmethod
    def _select(pair: KernelPair) -> Any:
        return pair.nngp


def _both(pair: KernelPair) -> KernelPair:
    return pair


@partial(jax.jit, static_argnums=0)
def _gram(select, layers, x1, x2):
    x, pair = (x1, Pairing(0)) if x2 is None else (jnp.concatenate([x1, x2]), Pairing(len(x1)))
    return select(kernels(layers, x, pair))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _sharded(select, mesh, axis, layers, x1, x2):
    """Each device the rows it has, against all."""

    def block(layers, own, others):
        return select(kernels(layers, jnp.concatenate([own, others]), Pairing(len(own))))

    specs = PartitionSpec(), PartitionSpec(axis), PartitionSpec()
    return jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(axis), check_vma=False)(layers, x1, x2)


@jax.jit
def _mirrored(k):
    # Fused arithmetic may round the two triangles differently. A call of its own: fused with the kernel, the transpose would
    # compute every entry many times over.
    return jnp.tril(k) + jnp.tril(k, -1).T


@partial(jax.jit, static_argnums=0)
def _diagonal(select, layers, x):
    return select(kernels(layers, x, Pairing(None)))


@partial(jax.jit, static_argnums=(0, 5))
def _homogeneous(select, layers, v, u, x2, power):
    v2, u2 = coordinates(x2)
    u2 = power_of(u2, 1 / power)
    pair = Pairing(len(v))
    state = through(in_dtype(layers, v), Inputs(jnp.concatenate([v, v2]), jnp.concatenate([u, u2]), pair, power))
    (f1, f2), (_, e2) = pair(state.side.scale), pair(state.side.unit)
    return select(read_out(state.cos, state.tangent, f1, f2 / e2))


@partial(jax.jit, static_argnums=0)
def _homogeneous_diagonal(select, layers, v, u):
    state = through(in_dtype(layers, v), Inputs(v, u, Pairing(None)))
    return select(read_out(state.cos, state.tangent, state.side.scale, state.side.scale))


def _coarser(layer: AbstractLayer) -> AbstractLayer:
    if isinstance(layer, Residual):
        return Residual(*map(_coarser, layer.body))
    return Activation(layer.fn.coarser()) if isinstance(layer, Activation) else layer


def _errors(layers: Sequence[AbstractLayer]) -> Iterator[float]:
    for layer in layers:
        if isinstance(layer, Residual):
            yield from _errors(layer.body)
        elif isinstance(layer, Activation):
            yield layer.fn.error


@partial(jax.jit, static_argnums=0)
def _profile(select, first, rest, rho, radius):
    first, rest = in_dtype((first, rest), rho)
    ones = jnp.ones_like(rho)
    weight, bias = first.w_std * radius, first.b_std * ones
    scale = hypot(weight * ones, bias)
    a, b = divide(weight, scale, 1.0), divide(bias, scale)
    z, y = complement(a * a * (1 - rho) / 2, a * a * (1 + rho) / 2 + b * b)
    state = State(Side(scale, ones), ones, Pairing(None), z, y, y - z, 1.0)
    state = through(rest, state)
    return select(read_out(state.cos, state.tangent, state.side.scale, state.side.scale))
