"""Kernels: closed form, neural-tangents, finite width; one protocol."""

from ntk_ln.kernels._base import AbstractKernel, KernelPair
from ntk_ln.kernels.closed_form import NNGP, NTK

__all__ = ["NNGP", "NTK", "AbstractKernel", "KernelPair"]
