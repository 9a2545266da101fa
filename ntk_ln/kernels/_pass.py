"""One pass of pairs of inputs through all layers of an infinitely wide network."""

import jax
import jax.numpy as jnp

from ntk_ln.kernels._base import KernelPair
from ntk_ln.layers import First, Inputs, Pairing
from ntk_ln.layers._repeat import through


def coordinates(x):
    """x = v/u with |v_i| < 8 and u <= 1, a power of two: it scales without rounding."""
    # The kernel depends on v/u alone, so the choice of u carries no derivative.
    exponent = jnp.frexp(jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=1))[1] - 1
    u = jnp.ldexp(jnp.ones_like(x[:, 0]), -jnp.clip(exponent, 0, jnp.finfo(x.dtype).maxexp - 3))
    return x * u[:, None], u


def read_out(cos, tangent, f1, f2) -> KernelPair:
    """Both kernels of units of scales f1 and f2."""
    # One factor at a time: their product may over- or underflow where the result does not.
    return KernelPair(f1 * (cos * f2), f1 * (tangent * f2))


def in_dtype(layers, x):
    """The layers' numbers, which stay as they were given until they meet the inputs."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, x.dtype), layers)


def kernels(layers, x, pair: Pairing) -> KernelPair:
    """NNGP and NTK of the pairs of rows."""
    state = through(in_dtype(layers, x), Inputs(*coordinates(x), pair))
    return read_out(state.cos, state.tangent, *pair(state.side.scale / state.side.unit))


@jax.jit
def first(layers, x) -> First:
    """The rows after `layers`, norms and the first Dense."""
    *norms, dense = in_dtype(layers, x)
    inputs = through(norms, Inputs(*coordinates(x), Pairing(None)))
    return inputs.first(dense.w_std, dense.b_std)


@jax.jit
def scales(layers, rows: First):
    """F/e of single rows after `layers`."""
    side = through(in_dtype(layers, rows.u), rows.state(Pairing(None))).side
    return side.scale / side.unit
