"""The positively homogeneous family: alpha max(a, 0)^n + beta max(-a, 0)^n."""

from math import gamma, pi, sqrt
from numbers import Real

import equinox as eqx
import jax.numpy as jnp

from ntk_ln._numerics import J_AT_ZERO, arc_cosine, times
from ntk_ln.activations import _fractional as fractional
from ntk_ln.activations._base import AbstractActivation, Dual

LARGEST = 100  # a degree above loses digits, and E[phi^2] soon leaves the floating-point range


class Homogeneous(AbstractActivation):
    r"""phi(a) = alpha max(a, 0)^n + beta max(-a, 0)^n for a real degree n > 1/2 or n = 0.

    With the arc-cosine kernels J_n and rho = 2 alpha beta/(alpha^2 + beta^2):
        E[phi phi] = (alpha^2 + beta^2) (J_n(theta) + rho J_n(pi - theta)) / (2 pi),
        E[phi' phi'] = n^2 (alpha^2 + beta^2) (J_{n-1}(theta) - rho J_{n-1}(pi - theta)) / (2 pi).
    J_n is elementary for n = 0 ... 3 and made of hypergeometric functions for the others. At n <= 1/2 E[phi' phi'] is infinite;
    but phi' of n = 0 is 0 almost everywhere: only the layers above it train.

    References:
        Cho & Saul (2009), "Kernel methods for deep learning", eqs. 3-8.

    >>> Homogeneous("leaky_relu", 1.0, -0.2, 1, (("slope", 0.2),)).second_moment()
    0.52
    """

    label: str = eqx.field(static=True)
    alpha: float = eqx.field(static=True)
    beta: float = eqx.field(static=True)
    n: float = eqx.field(static=True)
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
        sides = ((self.alpha, x), (self.beta, -x))  # a zero factor is left out: the power may overflow
        power = fractional.power if self._integer is None else pow
        return sum((c * power(jnp.maximum(v, 0), self.n) for c, v in sides if c), jnp.zeros_like(x))

    def second_moment(self) -> float:
        # J_n(0) / pi, an integer for an integer n
        top = 2**self.n * gamma(self.n + 0.5) / sqrt(pi) if self._integer is None else J_AT_ZERO[self._integer] / pi
        return (self.alpha**2 + self.beta**2) * top / 2

    @property
    def non_negative(self) -> bool:
        return self.alpha >= 0 and self.beta >= 0

    @property
    def _integer(self) -> int | None:
        """n where J_n is elementary."""
        return int(self.n) if self.n in (0, 1, 2, 3) else None

    @property
    def _rho(self) -> float:
        return 2 * self.alpha * self.beta / (self.alpha**2 + self.beta**2)

    def moments(self, side):
        root = sqrt(self.second_moment())
        mean = (self.alpha + self.beta) * 2 ** (self.n / 2) * gamma((self.n + 1) / 2) / (2 * sqrt(pi))
        share = None if mean == 0 else jnp.asarray(mean / root, side.scale.dtype)
        if self._integer is None:  # one power of all: root scale^n may be finite where one of the two is not
            return fractional.power(times(side.scale, root ** (1 / self.n)), self.n), share
        scale = side.scale if self.n == 1 else side.scale**self.n
        return times(scale, root), share

    def dual(self, z, y, side, pair):
        rho, n = self._rho, self._integer
        top = 1.0 if n is None else J_AT_ZERO[n]
        j, jc, d, dc = fractional.arc_cosine(self.n, z, y) if n is None else arc_cosine(n, z, y, acute=pair.acute)
        # 1 - ratio as a sum of non-negative terms, whichever the sign of rho; for rho < 0 so is 1 + ratio.
        if rho == 0:
            z_new = d / (2 * top)
            y_new = 1 - z_new
        elif rho < 0:
            z_new = (d - rho * jc) / (2 * top)
            y_new = ((1 + rho) * (top + j) - rho * (dc + j)) / (2 * top)
        else:
            # d - jc is the same at theta and pi - theta: take it at the smaller angle, where both are small.
            near = jnp.where(z > y, dc - j, d - jc)
            near = jnp.where(near < 0, 0, near)  # not `maximum`, which halves the derivative at 0
            z_new = ((1 - rho) * d + rho * near) / (2 * top)
            y_new = 1 - z_new
        if n == 0:
            return Dual(z_new, y_new, jnp.zeros_like(z))
        if n is None:
            j, jc = fractional.slopes(self.n, z, y)
            return Dual(z_new, y_new, j - rho * jc if rho else j)
        j, jc, _, _ = arc_cosine(n - 1, z, y, acute=pair.acute)
        return Dual(z_new, y_new, (n**2 / top) * (j - rho * jc if rho else j))

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
    if not isinstance(degree, Real) or isinstance(degree, bool) or not abs(degree) < float("inf"):
        raise ValueError(f'`Activation("relu_power", degree=...)` needs a finite number. Got {degree!r}.')
    if degree > LARGEST:
        raise ValueError(f'`Activation("relu_power", degree=...)` needs a degree up to {LARGEST}. Got {degree!r}.')
    if degree <= 0.5 or float(degree) <= 0.5:
        raise ValueError(
            "`Activation(\"relu_power\", degree=n)` needs n > 1/2: up to there phi' is not square integrable (E[phi'^2] is "
            f'infinite) and there is no NTK; n = 0 is "step". Got {degree!r}.'
        )
    n = int(degree) if degree == int(degree) else float(degree)
    return Homogeneous("relu_power", 1.0, 0.0, n, (("degree", n),))


NAMES = {
    "relu": relu,
    "leaky_relu": leaky_relu,
    "abs": absolute,
    "identity": identity,
    "step": step,
    "relu_power": relu_power,
}
