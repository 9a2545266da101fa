"""BatchNorm: of finite networks only."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ntk_ln._numerics import sqrt
from ntk_ln.layers._base import AbstractLayer, Units, non_negative
from ntk_ln.layers._state import Growth, Inputs, State


class BatchNorm(AbstractLayer):
    r"""Batch normalisation over the rows, unit by unit.

        a <- (a - mean)/sqrt(var + eps),   in training the batch's mean and variance, else the ones kept from it.

    It bounds nothing: with its statistics frozen it is an affine map of each unit, and |x| passes through. It couples the rows
    of a batch, so that it has no infinite-width kernel here: `train`, `net.apply` and `EmpiricalNTK` (with frozen statistics) take
    it, `NTK` and `NNGP` refuse it. Before training the kept mean is 0 and the kept variance 1.

    Args:
        eps: added to the variance, >= 0.
        affine: whether a gain (start 1) and a shift (start 0) are trained.

    Raises:
        ValueError: a negative eps.

    References:
        Ioffe & Szegedy (2015), "Batch normalization", algorithm 1; Ziomek, Whittle, Osborne (2025), figure 6.

    >>> BatchNorm(affine=True)
    BatchNorm(affine=True)
    """

    eps: float | Float[Array, ""] = 1e-5
    affine: bool = eqx.field(static=True, default=False)

    def __init__(self, *, eps: float | Float[Array, ""] = 1e-5, affine: bool = False):
        self.eps = non_negative(eps, "BatchNorm(eps=...)")
        self.affine = bool(affine)

    def init(self, key, n_in, n_out, dtype):
        kept = {"mean": jnp.zeros(n_in, dtype), "var": jnp.ones(n_in, dtype)}
        return kept | ({"gain": jnp.ones(n_in, dtype), "shift": jnp.zeros(n_in, dtype)} if self.affine else {})

    def apply(self, params, x):
        kept = jax.lax.stop_gradient(params["mean"]), jax.lax.stop_gradient(params["var"])
        normalised = self._normalise(x, *kept)
        return normalised * params["gain"][None, :] + params["shift"][None, :] if self.affine else normalised

    @property
    def kept(self) -> tuple[str, ...]:
        return ("mean", "var")

    def apply_batch(self, params, x):
        mean, var = jnp.mean(x, axis=0), jnp.var(x, axis=0)
        y = self._normalise(x, mean, var)
        y = y * params["gain"][None, :] + params["shift"][None, :] if self.affine else y
        return y, params | jax.lax.stop_gradient({"mean": mean, "var": var})

    def _normalise(self, x, mean, var):
        root = sqrt(var + jnp.asarray(self.eps, x.dtype))
        return (x - mean[None, :]) / jnp.where(root == 0, 1, root)[None, :]

    def ntk_share(self, params, x1, g1, x2, g2):
        if not self.affine:
            return None
        highest = jax.lax.Precision.HIGHEST
        normalised1, normalised2 = (self._normalise(x, params["mean"], params["var"]) for x in (x1, x2))
        return jnp.matmul(g1 * normalised1, (g2 * normalised2).T, precision=highest) + jnp.matmul(g1, g2.T, precision=highest)

    def grow(self, growth: Growth) -> Growth:
        return replace(growth, finite_only=growth.finite_only or repr(self))

    def at_zero(self, units: Units) -> Units:
        return Units.RANDOM

    def propagate(self, state: State | Inputs) -> State:
        raise NotImplementedError("BatchNorm couples the rows of a batch: it has no infinite-width kernel here.")

    def to_config(self) -> dict[str, Any]:
        return {"layer": "batch_norm", "eps": float(self.eps), "affine": self.affine}
