"""The positively homogeneous family: alpha max(a, 0)^n + beta max(-a, 0)^n."""

from math import gamma, pi, sqrt

import equinox as eqx
import jax.numpy as jnp

from ntk_ln._numerics import J_AT_ZERO, arc_cosine, times
from ntk_ln.activations._base import AbstractActivation, Dual


class Homogeneous(AbstractActivation):
    r"""phi(a) = alpha max(a, 0)^n + beta max(-a, 0)^n for an integer degree n = 0 ... 3.

    With the arc-cosine kernels J_n and rho = 2 alpha beta/(alpha^2 + beta^2):
        E[phi phi] = (alpha^2 + beta^2) (J_n(theta) + rho J_n(pi - theta)) / (2 pi),
        E[phi' phi'] = n^2 (alpha^2 + beta^2) (J_{n-1}(theta) - rho J_{n-1}(pi - theta)) / (2 pi).
    phi' of n = 0 is 0 almost everywhere: only the layers above it train.

    References:
        Cho & Saul (2009), "Kernel methods for deep learning", eqs. 3-8.

    >>> Homogeneous("leaky_relu", 1.0, -0.2, 1, (("slope", 0.2),)).second_moment()
    0.52
    """

    label: str = eqx.field(static=True)
    alpha: float = eqx.field(static=True)
    beta: float = eqx.field(static=True)
    n: int = eqx.field(static=True)
    given: tuple[tuple[str, float], ...] = eqx.field(static=True, default=())

    @property
    def name(self) -> str:
        return self.label

    @property
    def params(self) -> dict[str, float]:
        return dict(self.given)

    @property
    def degree(self) -> float:
        return self.n

    @property
    def derivative_growth(self) -> float:
        return self.n - 1

    @property
    def homogeneous(self) -> bool:
        return True

    def __call__(self, x):
        if self.n == 0:
            return self.alpha * (x > 0).astype(x.dtype) + self.beta * (x < 0).astype(x.dtype)
        return self.alpha * jnp.maximum(x, 0) ** self.n + self.beta * jnp.maximum(-x, 0) ** self.n

    def second_moment(self) -> float:
        return (self.alpha**2 + self.beta**2) * (J_AT_ZERO[self.n] / pi) / 2

    @property
    def _rho(self) -> float:
        return 2 * self.alpha * self.beta / (self.alpha**2 + self.beta**2)

    def moments(self, side):
        root = sqrt(self.second_moment())
        mean = (self.alpha + self.beta) * 2 ** (self.n / 2) * gamma((self.n + 1) / 2) / (2 * sqrt(pi))
        scale = side.scale if self.n == 1 else side.scale**self.n
        return times(scale, root), None if mean == 0 else jnp.asarray(mean / root, scale.dtype)

    def dual(self, z, y, side, pair):
        rho, top = self._rho, J_AT_ZERO[self.n]
        j, jc, d, dc = arc_cosine(self.n, z, y)
        # 1 - ratio as a sum of non-negative terms, whichever the sign of rho; for rho < 0 so is 1 + ratio.
        if rho <= 0:
            z_new = (d - rho * jc) / (2 * top)
            y_new = ((1 + rho) * (top + j) - rho * (dc + j)) / (2 * top)
        else:
            # d - jc is the same at theta and pi - theta: take it at the smaller angle, where both are small.
            near = jnp.maximum(jnp.where(z > y, dc - j, d - jc), 0)
            z_new = ((1 - rho) * d + rho * near) / (2 * top)
            y_new = 1 - z_new
        if self.n == 0:
            return Dual(z_new, y_new, jnp.zeros_like(z))
        j, jc, _, _ = arc_cosine(self.n - 1, z, y)
        return Dual(z_new, y_new, (self.n**2 / top) * (j - rho * jc))

    def gain_dual(self, z, y, side, pair):
        dual = self.dual(z, y, side, pair)  # Euler: a phi'(a) = n phi(a)
        return self.n**2 * (dual.y - dual.z)


def relu():
    return Homogeneous("relu", 1.0, 0.0, 1)


def leaky_relu(slope: float = 0.01):
    if not (isinstance(slope, int | float) and abs(slope) < float("inf")):
        raise ValueError(f'`Activation("leaky_relu", slope=...)` needs a finite number. Got {slope!r}.')
    return Homogeneous("leaky_relu", 1.0, -float(slope), 1, (("slope", float(slope)),))


def absolute():
    return Homogeneous("abs", 1.0, 1.0, 1)


def identity():
    return Homogeneous("identity", 1.0, -1.0, 1)


def step():
    return Homogeneous("step", 1.0, 0.0, 0)


def relu_power(degree: float):
    if degree not in (1, 2, 3):
        raise ValueError(f'`Activation("relu_power", degree=...)` needs an integer degree 1, 2 or 3 (0 is "step"). Got {degree!r}.')
    return Homogeneous("relu_power", 1.0, 0.0, int(degree), (("degree", int(degree)),))


NAMES = {
    "relu": relu,
    "leaky_relu": leaky_relu,
    "abs": absolute,
    "identity": identity,
    "step": step,
    "relu_power": relu_power,
}
