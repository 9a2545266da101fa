"""The same kernels computed by neural-tangents: a second, independent route to the numbers of `NTK` and `NNGP`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from ntk_ln._dtype import computing, is_tracer
from ntk_ln.activations import Cos, Erf, Gelu, Homogeneous, Sin
from ntk_ln.kernels._base import AbstractKernel, KernelPair
from ntk_ln.kernels._neural_tangents_shim import import_neural_tangents
from ntk_ln.layers import AbstractLayer, Activation, Dense, LayerNorm, Residual
from ntk_ln.network import Network


class NeuralTangentsKernel(AbstractKernel):
    """A kernel computed by neural-tangents 0.6.5, which is imported (without TensorFlow) when the first one is built.

    Args:
        network: a `Network`, translated layer by layer to `neural_tangents.stax`; or any neural-tangents
            `kernel_fn(x1, x2, get)` of inputs of shape (n, d).
        get: which kernel calling it gives, "ntk" or "nngp".

    Calling it: as `NTK`. `k.pair(x1, x2)` takes both kernels from one pass.

    Raises:
        ImportError: neural-tangents is not installed; the message has the command that installs it.
        NotImplementedError: a layer which neural-tangents does not have: a LayerNorm after an activation or with a trained
            gain and shift, relu_power, every activation without a closed form there.
        TypeError: neither a network nor a kernel_fn.
        ValueError: another `get`; and as `NTK` when called.

    Accuracy: neural-tangents' own. float64: rounding on the diagonal of k(x), 1e-10 between inputs well apart, but 1e-8 between
    near-duplicates, k(x, copy of x) included. From |x| = 1e77 (float32: 1e10) its products overflow, to NaN or, after a
    LayerNorm, to wrong numbers (tests/kernels/test_neural_tangents.py).

    References:
        Novak et al. (2020), "Neural Tangents: fast and easy infinite neural networks in Python".

    >>> import numpy as np
    >>> from ntk_ln import Activation, Dense, Network
    >>> net = Network(Dense(w_std=2**0.5), Activation("relu"), Dense(w_std=2**0.5))
    >>> NeuralTangentsKernel(net)(np.array([[1.0, 0.0], [1.0, 1.0]])).round(6)
    array([[2.     , 1.81831],
           [1.81831, 4.     ]])
    """

    network: Network | None
    kernel_fn: Callable[..., Any] | None = eqx.field(static=True)
    get: Literal["ntk", "nngp"] = eqx.field(static=True)

    def __init__(self, network: Network | Callable[..., Any], get: Literal["ntk", "nngp"] = "ntk"):
        if get not in ("ntk", "nngp"):
            raise ValueError(f'`NeuralTangentsKernel(network, get=...)` needs get="ntk" or "nngp". Got {get!r}.')
        is_network = isinstance(network, Network)
        if not is_network and (not callable(network) or isinstance(network, AbstractKernel)):
            raise TypeError(
                "`NeuralTangentsKernel(network)` needs a Network or a neural-tangents kernel_fn, the last of the three functions "
                f"`stax.serial(...)` gives. Got {type(network).__name__}."
            )
        if is_network:
            network.check_infinite("NeuralTangentsKernel(network)")
        self.network, self.kernel_fn = (network, None) if is_network else (None, network)
        self.get = get
        self._function()  # what neural-tangents does not have is refused here, not at the first call

    def __call__(self, x1: Any, x2: Any = None) -> Any:
        return self._compute("NeuralTangentsKernel(network)(x1, x2)", (self.get,), x1, x2)[0]

    def pair(self, x1: Any, x2: Any = None) -> KernelPair:
        return KernelPair(*self._compute("NeuralTangentsKernel(network).pair(x1, x2)", ("nngp", "ntk"), x1, x2))

    def diag(self, x: Any) -> Any:
        with self._computing("NeuralTangentsKernel(network).diag(x)", x) as inputs:
            return inputs.give_back(self._diagonals((self.get,), inputs.x1)[0])

    def _compute(self, call: str, names: tuple[str, ...], x1: Any, x2: Any) -> list[Any]:
        x2 = None if x2 is x1 else x2
        with self._computing(call, x1, x2) as inputs:
            kernels = self._kernels(names, inputs.x1, inputs.x2)
            if inputs.x2 is None and len(inputs.x1):
                diagonals = self._diagonals(names, inputs.x1)
                kernels = [jnp.fill_diagonal(k, d, inplace=False) for k, d in zip(kernels, diagonals, strict=True)]
            return inputs.give_back(kernels)

    def _kernels(self, names: tuple[str, ...], x1: Any, x2: Any) -> list[Any]:
        found = self._function()(x1, x2, names)
        return [getattr(found, name).astype(x1.dtype) for name in names]

    def _diagonals(self, names: tuple[str, ...], x: Any) -> list[Any]:
        """Each row with itself, in O(n).

        neural-tangents takes angles from |x|^2 and x.x, which a matrix product rounds differently: 1e-8 even without x2. Row by
        row the two round alike.
        """

        def of_row(row):
            return [k[0, 0] for k in self._kernels(names, row[None, :], None)]

        return jax.vmap(of_row)(x) if len(x) else [x[:, 0] for _ in names]

    @contextmanager
    def _computing(self, call: str, x1: Any, x2: Any = None) -> Iterator[Any]:
        traced = any(is_tracer(leaf) for leaf in jax.tree.leaves(self))
        # TF32 products make Gram matrices indefinite.
        with computing(call, x1, x2, traced=traced) as inputs, jax.default_matmul_precision("highest"):
            if self.network is not None:
                self.network.check_rows(call, inputs.x1, inputs.x2)
            yield inputs

    def _function(self) -> Callable[..., Any]:
        # Built anew from the network's leaves, so that derivatives reach them; it costs microseconds.
        if self.kernel_fn is not None:
            return self.kernel_fn
        assert self.network is not None
        return _kernel_fn(self.network)


def _kernel_fn(network: Network) -> Callable[..., Any]:
    """The kernel_fn of a network's translation to `neural_tangents.stax`."""
    stax = import_neural_tangents().stax
    return stax.serial(*_translated(stax, network.layers, gaussian=False))[2]


def _translated(stax: Any, layers: Sequence[AbstractLayer], *, gaussian: bool) -> list[Any]:
    translated = []
    for position, layer in enumerate(layers):
        part = layer.fn if isinstance(layer, Activation) else layer
        try:
            if not (gaussian or isinstance(layer, Dense)):
                raise NotImplementedError("it takes one only after a Dense, or after a norm straight after a Dense")
            if isinstance(layer, Residual):
                body = stax.serial(*_translated(stax, layer.body, gaussian=True))
                translated += [stax.FanOut(2), stax.parallel(stax.Identity(), body), stax.FanInSum()]
            else:
                translated.append(_FORMS.get(type(part), _no_form)(stax, part))
        except NotImplementedError as error:
            if isinstance(layer, Residual):
                raise
            raise NotImplementedError(
                f"`NeuralTangentsKernel(network)`: neural-tangents does not have layer {position}, {layer!r}: {error}. "
                "Use `NTK(network)` or `NNGP(network)`, which have it."
            ) from None
        gaussian = not isinstance(layer, Activation)
    return translated


def _layer_norm(stax: Any, layer: LayerNorm) -> Any:
    if layer.affine:
        raise NotImplementedError("its LayerNorm has no trained gain and shift")
    return stax.LayerNorm(eps=layer.eps)


def _homogeneous(stax: Any, phi: Homogeneous) -> Any:
    if phi.n == 1:
        return stax.ABRelu(-phi.beta, phi.alpha)
    if phi.n == 0:  # alpha 1(a > 0) + beta 1(a < 0) = slope sign(a) + level
        slope, level = (phi.alpha - phi.beta) / 2, (phi.alpha + phi.beta) / 2
        affine = (lambda _, shape: (shape, ())), (lambda _, x, **__: slope * x + level), (lambda k, **_: slope * k + level)
        return stax.serial(stax.Sign(), affine)
    raise NotImplementedError("its RectifiedMonomial is NaN between an input and itself")


def _no_form(stax: Any, part: Any) -> Any:
    raise NotImplementedError("it has no closed form for it")


# What neural-tangents computes exactly, by the type of a layer or of an activation.
_FORMS: dict[type, Callable[[Any, Any], Any]] = {
    Dense: lambda stax, layer: stax.Dense(1, layer.w_std, layer.b_std, parameterization="ntk"),
    LayerNorm: _layer_norm,
    Homogeneous: _homogeneous,
    Erf: lambda stax, phi: stax.Erf(),
    Gelu: lambda stax, phi: stax.Gelu(),
    Sin: lambda stax, phi: stax.Sin(),
    Cos: lambda stax, phi: stax.Cos(),
}
