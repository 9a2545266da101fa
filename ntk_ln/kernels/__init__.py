"""Kernels: closed form, neural-tangents, finite width; one protocol."""

from ntk_ln.kernels._base import AbstractKernel, KernelPair
from ntk_ln.kernels.closed_form import NNGP, NTK
from ntk_ln.kernels.empirical import EmpiricalNTK, from_equinox, from_nnx
from ntk_ln.kernels.neural_tangents import NeuralTangentsKernel
from ntk_ln.kernels.store import StoredGram, open_gram, stream_gram

__all__ = [
    "NNGP",
    "NTK",
    "AbstractKernel",
    "EmpiricalNTK",
    "KernelPair",
    "NeuralTangentsKernel",
    "StoredGram",
    "from_equinox",
    "from_nnx",
    "open_gram",
    "stream_gram",
]
