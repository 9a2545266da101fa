"""Where only the angle is left to vary, what the remaining layers do is a table of one variable.

After a norm layer without eps every input has the same E[unit^2], and a homogeneous network without biases never asks for it.
The layers above then take a pair's angle theta and tangent T to cos_new = C(theta) and T_new = A(theta) T + B(theta): Chebyshev
series in theta, in which these functions are analytic where the activations' integrals are (arc-cosine kernels are).
"""

from collections.abc import Sequence
from functools import lru_cache
from math import pi
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._dtype import enable_x64
from ntk_ln._numerics import asin_ratio, sqrt
from ntk_ln.layers import AbstractLayer, Activation, Dense, Growth, Inputs, Pairing, Residual, Side, State
from ntk_ln.layers._base import is_zero
from ntk_ln.layers._norm import AbstractNorm
from ntk_ln.layers._repeat import fold, through

WORTH = 3  # activations left: with fewer the layers themselves are as fast
TERMS = (32, 64, 128, 256)
EPS = 2.0**-52


class Table(NamedTuple):
    """Chebyshev coefficients in 2 theta/pi - 1 of the layers from `start` on; `slope` is None where T is the cosine itself."""

    start: int
    cos: Any
    slope: Any
    tangent: Any

    def __call__(self, state: State) -> tuple[Any, Any]:
        """The cosine and the tangent at the output."""
        x = 2 / pi * _angle(state.z, state.y) - 1
        tangent = _series(self.tangent, x)
        if self.slope is not None:
            tangent = tangent + _series(self.slope, x) * state.tangent
        return _series(self.cos, x), tangent

    def rounded(self, dtype: Any) -> "Table":
        """Without the terms that this dtype does not see."""
        eps = float(jnp.finfo(dtype).eps)
        cos, tangent = (_trimmed(c, eps / 2).astype(dtype) for c in (self.cos, self.tangent))
        slope = None if self.slope is None else _trimmed(self.slope, eps / 2).astype(dtype)
        return Table(self.start, cos, slope, tangent)


@lru_cache(maxsize=64)
def _table(layers: tuple[AbstractLayer, ...], start: int, numbers: tuple[float, ...]) -> Table | None:
    del numbers  # the layers' own, which their equality may not look at
    head, rest = layers[:start], fold(layers[start:])
    with jax.ensure_compile_time_eval(), enable_x64(True):
        row = jnp.ones((1, 2)) * jnp.array([1.0, 0.5])
        sample = through(_wide(head), Inputs(row, jnp.ones(1), Pairing(None)))
        if sample.side.mean is not None:
            return None
        after = _after(_wide(rest), sample)
        plain = all(isinstance(layer, AbstractNorm) and not layer.affine for layer in head[1:]) and isinstance(head[0], Dense)

        def values(x: np.ndarray) -> tuple[Any, Any, Any]:
            theta = pi * (np.asarray(x) + 1) / 2
            z, y = np.sin(theta / 2) ** 2, np.cos(theta / 2) ** 2
            cos, one = after(z, y, y - z if plain else np.ones_like(z))
            return (cos, None, one) if plain else (cos, one - (zero := after(z, y, np.zeros_like(z))[1]), zero)

        check = np.cos(np.linspace(0.01, 3.13, TERMS[-1]))
        wanted = values(check)
        for terms in TERMS:
            nodes = np.cos(pi * (np.arange(TERMS[-1]) % terms + 0.5) / terms)  # one shape, one compilation
            series: list[Any] = [None if v is None else _trimmed(_coefficients(v[:terms]), EPS) for v in values(nodes)]
            if all(
                c is None or np.abs(np.polynomial.chebyshev.chebval(check, c) - v).max() <= 64 * EPS * max(1.0, np.abs(v).max())
                for c, v in zip(series, wanted, strict=True)
            ):
                return Table(start, *series)
    return None


def table(layers: Sequence[AbstractLayer]) -> Table | None:
    """The table of the last layers, as many as it can stand for; None where that is not worth it or not accurate."""
    start = _start(layers)
    if start is None or sum(isinstance(layer, Activation) for layer in layers[start:]) < WORTH:
        return None
    return _table(tuple(layers), start, tuple(float(leaf) for leaf in jax.tree.leaves(tuple(layers))))


def _start(layers: Sequence[AbstractLayer]) -> int | None:
    """The first layer from which on the angle is all that varies."""
    growth = Growth()
    for index, layer in enumerate(layers):
        growth = layer.grow(growth)
        if not growth.raw and (growth.constant or _homogeneous(layers[index + 1 :])) and not growth.gain:
            return index + 1
    return None


def _homogeneous(layers: Sequence[AbstractLayer]) -> bool:
    return all(
        (isinstance(layer, Dense) and is_zero(layer.b_std))
        or (isinstance(layer, Activation) and layer.fn.homogeneous)
        or (isinstance(layer, AbstractNorm) and is_zero(layer.eps) and not layer.affine)
        for layer in layers
        if not isinstance(layer, Residual)
    ) and not any(isinstance(layer, Residual) for layer in layers)


def _after(layers: Any, sample: State):
    @jax.jit
    def run(z, y, tangent):
        one = jnp.ones_like(z)
        side = Side(sample.side.scale * one, sample.side.unit * one)
        state = State(side, one, Pairing(None), z, y, tangent, sample.power, sample.gain)
        state = through(layers, state)
        return state.cos, state.tangent

    return lambda *given: tuple(np.asarray(value) for value in run(*map(jnp.asarray, given)))


def _wide(layers: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), layers)


def _coefficients(values: np.ndarray) -> np.ndarray:
    """Of the Chebyshev interpolant through cos(pi (k + 1/2)/n)."""
    n = len(values)
    k = np.arange(n)
    # Whole multiples of pi/2n, brought to one period before they are rounded.
    basis = np.cos(np.outer(k, 2 * k + 1) % (4 * n) * (pi / (2 * n)))
    coefficients = 2 / n * basis @ values
    coefficients[0] /= 2
    return coefficients


def _trimmed(coefficients: Any, share: float) -> Any:
    """Up to the last coefficient that counts: the others are rounding."""
    counts = np.flatnonzero(np.abs(coefficients) > share * max(1.0, np.abs(coefficients).max()))
    return coefficients[: 1 + (int(counts[-1]) if len(counts) else 0)]


def _angle(z, y):
    swap = z > y
    m = jnp.where(swap, y, z)
    theta = 2 * sqrt(m) * asin_ratio(m)
    return jnp.where(swap, pi - theta, theta)


def _series(coefficients: np.ndarray, x):
    """sum_k c_k T_k(x) by Clenshaw's recurrence, even and odd terms apart: two short chains instead of a long one."""
    even, odd = coefficients[::2], coefficients[1::2]
    t = 2 * x * x - 1  # T_2k(x) = T_k(t), T_2k+1(x) = x V_k(t)
    total, _ = _clenshaw(even, t)
    if not len(odd):
        return total
    first, second = _chain(odd, t)
    return total + x * (first - second)


def _clenshaw(c, t):
    first, second = _chain(c, t)
    return first - t * second, second


def _chain(c, t):
    """b_0 and b_1 of b_k = c_k + 2 t b_{k+1} - b_{k+2}."""
    first, second = jnp.full_like(t, c[-1]), jnp.zeros_like(t)
    for k in range(len(c) - 2, -1, -1):
        first, second = c[k] + 2 * t * first - second, first
    return first, second
