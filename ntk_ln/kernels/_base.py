"""The protocol of a kernel: what every way of computing one offers, and all that the posterior needs."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import scipy  # its submodules load at first use: at the top they would cost a third of `import ntk_ln`
from jaxtyping import Array, Float


class KernelPair(NamedTuple):
    """Both kernels of one network from one pass, each (n1, n2)."""

    nngp: Any
    ntk: Any


class AbstractKernel(eqx.Module):
    """A kernel on the rows of arrays of shape (n, d). What comes in goes out: NumPy or JAX, and its dtype."""

    @abstractmethod
    def __call__(self, x1: Any, x2: Any = None) -> Any:
        """The Gram matrix (n1, n2); x2 = None means x1, and gives an exactly symmetric matrix."""

    @abstractmethod
    def diag(self, x: Any) -> Any:
        """The diagonal (n,) of k(x), in O(n)."""

    @abstractmethod
    def pair(self, x1: Any, x2: Any = None) -> KernelPair:
        """NNGP and NTK (n1, n2) from one pass."""


def symmetric_operator(n: int, product: Callable[[Any], Any], dtype: Any) -> "scipy.sparse.linalg.LinearOperator":
    """A symmetric matrix known by its products with (n,) and (n, columns)."""
    operator: Any = scipy.sparse.linalg.LinearOperator
    return operator((n, n), matvec=product, rmatvec=product, matmat=product, dtype=dtype)


Rows = Float[Array, "n d"]
