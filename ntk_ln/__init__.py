"""Analytic neural tangent kernels with and without LayerNorm, and what their predictions do far from the data."""

from ntk_ln.kernels import NNGP, NTK, AbstractKernel, KernelPair
from ntk_ln.layers import Activation, Dense, LayerNorm
from ntk_ln.network import Network, mlp, network_from_config, paper_mlp

__all__ = [
    "NNGP",
    "NTK",
    "AbstractKernel",
    "Activation",
    "Dense",
    "KernelPair",
    "LayerNorm",
    "Network",
    "mlp",
    "network_from_config",
    "paper_mlp",
]
