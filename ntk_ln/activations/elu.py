"""ELU, by quadrature."""

from math import isfinite
from numbers import Real

import equinox as eqx
import jax.numpy as jnp

from ntk_ln.activations._quadrature import NODES, AbstractQuadrature


class Elu(AbstractQuadrature):
    r"""phi(a) = a for a > 0, alpha (exp(a) - 1) for a <= 0.

    Its integrals are by quadrature, cut at 0; far out ELU is ReLU: degree 1.

    References:
        Clevert, Unterthiner, Hochreiter (2016), "Fast and accurate deep network learning by ELUs", eq. 15.

    >>> round(Elu().second_moment(), 6)
    0.644945
    """

    alpha: float = eqx.field(static=True)
    kinks: tuple[float, ...] = eqx.field(static=True)
    limit: tuple[float, float] | None = eqx.field(static=True)
    odd: bool = eqx.field(static=True)
    delta: tuple[float, float] = eqx.field(static=True)
    nodes: int = eqx.field(static=True)

    def __init__(self, alpha: float = 1.0, *, nodes: int = NODES):
        if not isinstance(alpha, Real) or isinstance(alpha, bool) or not (isfinite(alpha) and alpha >= 0):
            raise ValueError(f'`Activation("elu", alpha=...)` needs a finite number, at least 0. Got {alpha!r}.')
        self.alpha, self.nodes = float(alpha), nodes
        self.kinks, self.limit, self.odd, self.delta = (0.0,), (1.0, 0.0), False, (0.0, 1.0)

    @property
    def name(self) -> str:
        return "elu"

    @property
    def params(self) -> dict[str, float]:
        return {"alpha": self.alpha}

    @property
    def degree(self) -> float:
        return 1

    @property
    def error(self) -> float:
        # Gauss's rule errs by no more on its panels, the sum is 5e-10 at most: tests/activations/test_elu_bound.py. Found: 4.5e-12.
        return 1e-9

    def __call__(self, x):
        positive = x > 0
        return jnp.where(positive, x, self.alpha * jnp.expm1(jnp.where(positive, 0, x)))

    def coarser(self) -> "Elu":
        """The same activation with 5/6 of the nodes."""
        return Elu(self.alpha, nodes=5 * self.nodes // 6)


NAMES = {"elu": Elu}
