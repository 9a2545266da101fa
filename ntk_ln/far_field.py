"""The posterior mean far from the data: its power, its coefficient, its next term."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._dtype import enable_x64
from ntk_ln._numerics import unit_rows
from ntk_ln.kernels.closed_form import AbstractClosedForm
from ntk_ln.posterior import Posterior


class FarField(NamedTuple):
    """f(r v) = r^power (coefficient + correction r^-correction_power + ...) for large r."""

    power: float
    coefficient: np.ndarray
    correction: np.ndarray
    correction_power: float


def far_field(p: Posterior, direction: Any) -> FarField:
    r"""How the posterior mean behaves along a ray to infinity.

        f(r v) = r^p (c0 + c1 / r^k + ...),   c0 = sum_i alpha_i Theta_hat((v, 0), x_i),   c1 = d/d(u^k) at u = 0, |v| = 1.

    k is 1, and smaller where a bias enters after an activation of degree n < 1 (as u^n). Without a norm layer p is the product
    of the activations' degrees and c0 != 0 for almost every dataset (Theorem 3.1); after one, p = 0 and c0 is a finite limit.

    Args:
        p: a posterior of a closed-form kernel (`NTK` or `NNGP`).
        direction: (d,), not zero; it is normalised.

    Returns:
        `FarField(power, coefficient, correction, correction_power)`; the arrays have shape () for y (n,) and (k,) for y (n, k).

    Raises:
        TypeError: a kernel without a closed form.
        ValueError: a zero, non-finite or mis-shaped direction; a network without a far limit (sin, cos before any norm layer, or
            an activation whose degree is not given).

    Accuracy: c1 matches r (f(r v) - c0) to 1e-3 at r = 1e3 (tests/test_far_field.py).

    References:
        Ziomek, Whittle, Osborne (2025), theorem 3.1 and proposition E.2.

    >>> import numpy as np
    >>> import ntk_ln as nl
    >>> p = nl.posterior(nl.NTK(nl.mlp(2)), np.array([[1.0], [2.0]]), np.array([0.0, 1.0]))
    >>> limit = nl.far_field(p, [1.0])
    >>> limit.power, round(float(limit.coefficient), 3)
    (1.0, 0.537)
    """
    closed_form(p.kernel, "far_field(p, direction)")
    d = np.shape(p.x)[1]
    vector = np.asarray(direction, dtype=np.float64)
    if vector.shape != (d,) or not np.isfinite(vector).all() or not vector.any():
        raise ValueError(f"`far_field(p, direction)` needs a finite, non-zero direction of shape ({d},). Got {direction!r}.")
    check_far(p.kernel, "far_field(p, direction)")
    growth = p.kernel.growth
    step = min(1.0, growth.correction)
    if growth.cut:  # under the transformation below the weights are traced, and not known to be 0
        constant = np.asarray(p.mean(np.asarray(p.x, np.float64)[:1]))[0]
        return FarField(0.0, constant, np.zeros_like(constant), step)
    with enable_x64(True):
        v, _ = unit_rows(jnp.asarray(vector[None, :] / np.abs(vector).max()))
        x, alpha = (jnp.asarray(np.asarray(array, np.float64)) for array in (p.x, p.alpha))
        coefficient, correction = (np.asarray(value)[0] for value in _expansion(p.kernel, x, alpha, v, 1 / step))
    return FarField(growth.mean, coefficient, correction, step)


STENCIL = (-25 / 12, 4.0, -3.0, 4 / 3, -1 / 4)  # of a one-sided derivative, exact up to degree 4
STEP = 1e-3  # its error and that of the quadrature over it are both about 1e-9


@partial(jax.jit, static_argnums=4)
def _expansion(kernel, x, alpha, v, power):
    """The mean at infinity in direction v, and its derivative by u there where x = v/u^power."""

    def mean(u):
        return jnp.matmul(kernel.homogeneous(v, u, x, power), alpha, precision=jax.lax.Precision.HIGHEST)

    u = jnp.zeros(len(v), v.dtype)
    if not kernel.network.growth.numeric:
        return jax.jvp(mean, (u,), (jnp.ones_like(u),))
    # A quadrature takes the limit itself at u = 0, and knows no derivative there.
    values = [mean(u + i * STEP) for i in range(len(STENCIL))]
    return values[0], sum(weight * value for weight, value in zip(STENCIL, values, strict=True)) / STEP


_BLOCKS = 32, 256  # points at once, when they are few and many: two shapes, two compilations


def homogeneous_kernel(p: Posterior, v: np.ndarray, u: np.ndarray) -> np.ndarray:
    """u^p k(v/u, x_i) between points of the half-sphere, v (m, d) and u (m,), and the training rows: (m, n) in float64."""
    m, block = len(v), _BLOCKS[len(v) > _BLOCKS[0]]
    v, u = np.concatenate([v, np.repeat(v[-1:], -m % block, 0)]), np.concatenate([u, np.repeat(u[-1:], -m % block)])
    with enable_x64(True):
        x = jnp.asarray(np.asarray(p.x, np.float64))
        blocks = [slice(i, i + block) for i in range(0, len(v), block)]
        return np.concatenate([np.asarray(p.kernel.homogeneous(jnp.asarray(v[b]), jnp.asarray(u[b]), x)) for b in blocks])[:m]


def closed_form(kernel: Any, call: str) -> AbstractClosedForm:
    """The kernel, which the call needs in closed form."""
    if not isinstance(kernel, AbstractClosedForm):
        raise TypeError(
            f"`{call}` needs a closed-form kernel, `NTK(net)` or `NNGP(net)`: only there the point at infinity exists. "
            f"Got {type(kernel).__name__}."
        )
    return kernel


def check_far(kernel: AbstractClosedForm, call: str) -> None:
    """Raises where the kernel has no limit at infinity, or none that is known."""
    name = kernel.growth.no_limit
    if name is not None:
        raise ValueError(
            f"`{call}`: the activation {name} has no known limit far out, and no norm layer comes before it. Put a norm layer "
            f"there, or give the degree of an activation of your own, `Activation(fn, degree=...)`."
        )
