"""Where only the angle is left to vary, what the remaining layers do is a table of one variable.

After a norm layer without eps every input has the same E[unit^2], and a homogeneous network without biases never asks for it.
The layers above then take a pair's angle theta and tangent T to cos_new = C(theta) and T_new = A(theta) T + B(theta), analytic
in theta where the activations' integrals are (arc-cosine kernels are): Chebyshev series in v = sin(theta/2) - cos(theta/2), which
needs no arcsine; theta is analytic in v up to |v| = sqrt 2.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from math import pi
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._dtype import enable_x64
from ntk_ln._numerics import sqrt
from ntk_ln.layers import AbstractLayer, Activation, Dense, Growth, Inputs, Pairing, Residual, Side, State
from ntk_ln.layers._base import is_zero
from ntk_ln.layers._norm import AbstractNorm
from ntk_ln.layers._repeat import fold, through

WORTH = 3  # activations left: with fewer the layers themselves are as fast
TERMS = (32, 64, 128, 256)
EPS = 2.0**-52


class Table(NamedTuple):
    """The series of the layers from `start` on, as `_blocks`; `slope` is None where T is the cosine itself."""

    start: int
    cos: Any
    slope: Any
    tangent: Any

    def __call__(self, state: State) -> tuple[Any, Any]:
        """The cosine and the tangent at the output."""
        v = sqrt(state.z) - sqrt(state.y)
        tangent = _series(self.tangent, v)
        if self.slope is not None:
            tangent = tangent + _series(self.slope, v) * state.tangent
        return _series(self.cos, v), tangent

    def rounded(self, dtype: Any) -> "Table":
        """Without the terms that this dtype does not see."""
        share = float(jnp.finfo(dtype).eps) / 2
        return Table(self.start, *(None if c is None else _blocks(_trimmed(c, share)).astype(dtype) for c in self[1:]))


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

        def values(v: np.ndarray) -> tuple[Any, Any, Any]:
            z, y = ((np.sqrt(2 - v * v) + sign * v) ** 2 / 4 for sign in (1, -1))
            cos, one = after(z, y, y - z if plain else np.ones_like(z))
            return (cos, None, one) if plain else (cos, one - (zero := after(z, y, np.zeros_like(z))[1]), zero)

        check = np.cos(np.linspace(0.01, 3.13, TERMS[-1]))
        wanted = values(check)
        for terms in TERMS:
            nodes = np.cos(pi * (np.arange(TERMS[-1]) % terms + 0.5) / terms)  # one shape, one compilation
            series: list[Any] = [None if v is None else _trimmed(_coefficients(v[:terms]), EPS) for v in values(nodes)]
            if all(
                c is None or np.abs(_series(_blocks(c), check) - v).max() <= 64 * EPS * max(1.0, np.abs(v).max())
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


def _blocks(coefficients: np.ndarray) -> np.ndarray:
    """Row j: the polynomial A_j, in ascending powers of w = T_m(x), of sum_k c_k T_k(x) = sum_{j < m} T_j(x) A_j(w).

    T_j T_mk = (T_{mk+j} + T_{mk-j})/2. The A_j fall so fast in w that their powers lose no digits, and there are m short chains
    of single steps to evaluate instead of a long one of double steps.
    """
    m = 4 if len(coefficients) <= 96 else 8
    c = np.concatenate([coefficients, np.zeros(-len(coefficients) % m)]).reshape(-1, m)
    for k in range(len(c) - 1, 0, -1):
        c[k - 1, 1:] -= c[k, :0:-1]
        c[k, 1:] *= 2
    return np.stack([np.resize(np.append(np.polynomial.chebyshev.cheb2poly(a), np.zeros(len(c))), len(c)) for a in c.T])


def _series(blocks: np.ndarray, x):
    """The sum of `_blocks` at x."""
    basis = [1.0, x]
    while len(basis) <= len(blocks):
        basis.append(2 * x * basis[-1] - basis[-2])
    w = basis.pop()
    return sum(t * reduce(lambda value, c: value * w + c, a[-2::-1], a[-1]) for t, a in zip(basis, blocks, strict=True))
