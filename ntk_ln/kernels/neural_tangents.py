"""The same kernels computed by neural-tangents: a second, independent route to the numbers of `NTK` and `NNGP`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import equinox as eqx
import jax

from ntk_ln._dtype import computing, is_tracer
from ntk_ln.activations import Erf, Gelu, Homogeneous
from ntk_ln.kernels._base import AbstractKernel, KernelPair
from ntk_ln.kernels._neural_tangents_shim import import_neural_tangents
from ntk_ln.layers import Activation, Dense, LayerNorm
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

    Accuracy: neural-tangents', 1e-10 in float64 between inputs well apart and rounding on the diagonal of k(x), but 1e-8 between
    near-duplicates, in k(x, copy of x) included; huge inputs (|x| from 1e77, float32: 1e10) overflow there, mostly without a
    word. A zero input is NaN where a norm layer makes 0/0 of it (tests/kernels/test_neural_tangents.py).

    References:
        Novak et al. (2020), "Neural Tangents: fast and easy infinite neural networks in Python".

    >>> import numpy as np
    >>> from ntk_ln import Activation, Dense, Network
    >>> net = Network(Dense(w_std=2**0.5), Activation("relu"), Dense(w_std=2**0.5))
    >>> NeuralTangentsKernel(net)(np.array([[1.0, 0.0], [1.0, 1.0]])).round(6)
    array([[1.      , 1.06831 ],
           [1.06831 , 2.      ]])
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
        self.network, self.kernel_fn = (network, None) if is_network else (None, network)
        self.get = get
        self._function()  # what neural-tangents does not have is refused here, not at the first call

    def __call__(self, x1: Any, x2: Any = None) -> Any:
        return self._compute("NeuralTangentsKernel(network)(x1, x2)", self.get, x1, x2)

    def pair(self, x1: Any, x2: Any = None) -> KernelPair:
        return self._compute("NeuralTangentsKernel(network).pair(x1, x2)", ("nngp", "ntk"), x1, x2)

    def diag(self, x: Any) -> Any:
        function = self._function()

        def of_row(row):
            return function(row[None, :], None, self.get)[0, 0]

        with self._computing("NeuralTangentsKernel(network).diag(x)", x) as inputs:
            values = jax.vmap(of_row)(inputs.x1) if len(inputs.x1) else inputs.x1[:, 0]
            return inputs.give_back(values.astype(inputs.x1.dtype))

    def _compute(self, call: str, get: Any, x1: Any, x2: Any) -> Any:
        # Only without x2 does neural-tangents know that the diagonal pairs each input with itself.
        x2 = None if x2 is x1 else x2
        with self._computing(call, x1, x2) as inputs:
            found = self._function()(inputs.x1, inputs.x2, get)
            if not isinstance(get, str):
                found = KernelPair(found.nngp, found.ntk)
            return inputs.give_back(jax.tree.map(lambda k: k.astype(inputs.x1.dtype), found))

    @contextmanager
    def _computing(self, call: str, x1: Any, x2: Any = None) -> Iterator[Any]:
        traced = any(is_tracer(leaf) for leaf in jax.tree.leaves(self))
        # TF32 products make Gram matrices indefinite.
        with computing(call, x1, x2, traced=traced) as inputs, jax.default_matmul_precision("highest"):
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
    translated, gaussian = [], False
    for position, layer in enumerate(network.layers):
        part = layer.fn if isinstance(layer, Activation) else layer
        try:
            if not (gaussian or isinstance(layer, Dense)):
                raise NotImplementedError("it takes one only after a Dense, or after a norm straight after a Dense")
            translated.append(_FORMS.get(type(part), _no_form)(stax, part))
        except NotImplementedError as error:
            raise NotImplementedError(
                f"`NeuralTangentsKernel(network)`: neural-tangents does not have layer {position}, {layer!r}: {error}. "
                "Use `NTK(network)` or `NNGP(network)`, which have it."
            ) from None
        gaussian = not isinstance(layer, Activation)
    return stax.serial(*translated)[2]


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
}
