"""Any callable as an activation, by quadrature."""

from collections.abc import Callable, Sequence
from math import isfinite
from numbers import Real
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._dtype import enable_x64
from ntk_ln.activations._quadrature import NODES, AbstractQuadrature


class Numeric(AbstractQuadrature):
    r"""phi = fn, any elementwise function that JAX can differentiate, by nested Gauss-Legendre quadrature.

        E[phi phi'] = int int phi(h a) phi(h' (c a + sigma x)) dN(x) dN(a),   sigma^2 = 1 - c^2,

    to about 1e-10 in float64 where fn is smooth on the scale 1 between its kinks. Far out (h > 1e12) the limit takes over.

    Args:
        fn: phi, elementwise.
        degree: n with phi(c w)/c^n -> a homogeneous function of w as c -> infinity; None where there is none or it is not
            known, which leaves out all that lies infinitely far.
        kinks: where phi is not smooth. At jumps phi' is what it is almost everywhere.
        limit: (alpha, beta), phi(x) ~ alpha x^n for x -> +inf and beta |x|^n for x -> -inf; estimated where not given.

    Raises:
        TypeError: fn is not a callable of the kind described.
        ValueError: the limit cannot be estimated, or the numbers make no sense.

    References:
        Cho & Saul (2009), "Kernel methods for deep learning", eq. 1 for the integral.

    >>> round(Numeric(jnp.tanh, degree=0).second_moment(), 6)
    0.394294
    """

    fn: Callable[[Any], Any] = eqx.field(static=True)
    given_degree: float | None = eqx.field(static=True)
    kinks: tuple[float, ...] = eqx.field(static=True)
    limit: tuple[float, float] | None = eqx.field(static=True)
    odd: bool = eqx.field(static=True)
    delta: tuple[float, float] = eqx.field(static=True)
    nodes: int = eqx.field(static=True)

    def __init__(
        self,
        fn: Callable[[Any], Any],
        degree: float | None = None,
        kinks: Sequence[float] = (),
        limit: tuple[float, float] | None = None,
        *,
        nodes: int = NODES,
    ):
        _check_function(fn)
        self.fn, self.nodes = fn, nodes
        self.kinks = _check_kinks(kinks)
        self.given_degree = _check_degree(degree)
        if limit is not None and degree is None:
            raise ValueError(f"`Activation(fn, limit=...)` needs `degree` too. Got limit={limit!r} and degree=None.")
        with jax.ensure_compile_time_eval(), enable_x64(True):
            self.odd = _is_odd(fn)
            self.limit = None if degree is None else _estimate(fn, self.given_degree) if limit is None else _check_limit(limit)
            self.delta = _delta(fn, self.limit, self.kinks) if self.limit is not None and degree == 0 else (0.0, 1.0)

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", "callable")

    @property
    def degree(self) -> float:
        return float("nan") if self.given_degree is None else self.given_degree

    def __call__(self, x):
        return jnp.asarray(self.fn(x), x.dtype)

    def coarser(self) -> "Numeric":
        """The same activation with 5/6 of the nodes."""
        return Numeric(self.fn, self.given_degree, self.kinks, self.limit, nodes=5 * self.nodes // 6)


def _call(fn, x):
    return np.asarray(fn(jnp.asarray(x, jnp.float64)), np.float64)


def _check_function(fn) -> None:
    need = "`Activation(fn, ...)` needs"
    if not callable(fn):
        raise TypeError(f"{need} a name or an elementwise JAX function. Got {fn!r}.")
    try:
        hash(fn)
    except TypeError:
        raise TypeError(f"{need} a hashable function: it is told apart by identity. Got {fn!r}.") from None
    with jax.ensure_compile_time_eval():
        x = jnp.asarray([-1.3, 0.4, 2.1])
        try:
            value, slope = jax.jvp(fn, (x,), (jnp.ones_like(x),))
        except Exception as error:
            raise TypeError(f"{need} a function of a JAX array that `jax.jvp` can differentiate. Got {fn!r}: {error}") from error
        if getattr(value, "shape", None) != x.shape:
            raise ValueError(
                f"{need} an elementwise function. Got shape {getattr(value, 'shape', None)} from an input of shape (3,)."
            )
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"{need} real floating-point values. Got {value.dtype}.")
        if not (np.isfinite(np.asarray(value)).all() and np.isfinite(np.asarray(slope)).all()):
            raise ValueError(f"{need} finite values and derivatives. Got {np.asarray(value)} and {np.asarray(slope)}.")


def _check_kinks(kinks) -> tuple[float, ...]:
    try:
        values = tuple(sorted({float(k) for k in kinks}))
    except (TypeError, ValueError):
        values = (float("nan"),)
    if not all(isfinite(k) for k in values):
        raise ValueError(f"`Activation(fn, kinks=...)` needs finite numbers. Got {kinks!r}.")
    return values


def _check_degree(degree) -> float | None:
    if degree is None:
        return None
    if not isinstance(degree, Real) or isinstance(degree, bool) or not isfinite(degree) or (degree != 0 and degree <= 0.5):
        raise ValueError(f"`Activation(fn, degree=...)` needs 0, a number above 1/2, or None. Got {degree!r}.")
    n = float(degree)
    return int(n) if n.is_integer() else n


def _check_limit(limit) -> tuple[float, float]:
    try:
        alpha, beta = (float(v) for v in limit)
    except (TypeError, ValueError):
        alpha = beta = float("nan")
    if not (isfinite(alpha) and isfinite(beta)) or alpha == beta == 0:
        raise ValueError(f"`Activation(fn, limit=...)` needs two finite numbers, not both 0. Got {limit!r}.")
    return alpha, beta


def _estimate(fn, degree) -> tuple[float, float]:
    """(alpha, beta) from values far out."""
    x = np.array([1e6, -1e6, 1e8, -1e8])
    near, far = (_call(fn, x) / np.abs(x) ** degree).reshape(2, 2)
    top = np.max(np.abs(far))
    if top == 0 or np.max(np.abs(near)) > 1e3 * top > 0:
        raise ValueError(
            f"`Activation(fn, degree={degree}, ...)`: phi(x)/|x|^{degree} vanishes far out. Use a smaller degree, or none: kernels "
            "need none, and all that lies infinitely far then needs a norm layer before the activation."
        )
    if not (np.isfinite(top) and top > 0 and np.max(np.abs(near - far)) <= 1e-5 * top):
        raise ValueError(
            f"`Activation(fn, degree={degree}, ...)` needs `limit=(alpha, beta)`: phi(x)/|x|^{degree} does not settle far out. "
            f"Got {near[0]:g}, {far[0]:g} at x = 1e6, 1e8 and {near[1]:g}, {far[1]:g} at -1e6, -1e8."
        )
    # Less the next term, and without what rounding and the terms after it leave of 0, of an integer and of +-the other side.
    values = far + (far - near) / 99
    values = [float(round(v)) if abs(v - round(v)) < 1e-6 * top else float(v) for v in values]
    alpha, beta = values
    if abs(abs(alpha) - abs(beta)) < 1e-6 * top:
        beta = abs(alpha) if beta > 0 else -abs(alpha)
    return alpha, beta


def _is_odd(fn) -> bool:
    x = np.array([1e-3, 0.1, 0.37, 1.0, 2.3, 5.7, 17.0, 1e3])
    right, left = _call(fn, x), _call(fn, -x)
    return bool(np.all(np.abs(right + left) <= 4e-16 * np.abs(right))) and float(_call(fn, np.zeros(()))) == 0


def _delta(fn, limit, kinks) -> tuple[float, float]:
    """The integrals of phi' and of phi'^2 over the line."""
    near = 1e-9 * np.maximum(1, np.abs(np.array(kinks)))
    jumps = float(np.sum(_call(fn, np.array(kinks) + near) - _call(fn, np.array(kinks) - near))) if kinks else 0.0
    jump = limit[0] - limit[1] - (jumps if abs(jumps) > 1e-6 else 0.0)
    t, w = np.polynomial.legendre.leggauss(100)
    cuts = sorted({-300.0, -30.0, -5.0, 0.0, 5.0, 30.0, 300.0, *kinks})
    lo, half = np.array(cuts[:-1])[:, None], np.diff(cuts)[:, None] / 2
    x, w = (lo + half * (1 + t)).ravel(), (half * w).ravel()
    slope = np.asarray(jax.jvp(fn, (jnp.asarray(x),), (jnp.ones(x.shape),))[1])
    square = float(np.sum(w * slope**2))
    return (float(jump), square) if square > 0 else (0.0, 1.0)
