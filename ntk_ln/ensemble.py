"""The ensemble of trained networks as a Gaussian process: its mean and covariance, beside the NNGP posterior's."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ntk_ln import _solver
from ntk_ln._dtype import check_rows
from ntk_ln._posterior_inputs import concrete
from ntk_ln.kernels import NNGP, NTK
from ntk_ln.network import Network, check_network
from ntk_ln.posterior import Posterior, posterior

_BLOCK = 2**22  # entries of a kernel between test and training rows at once


def ensemble(
    net: Network, x: Any, y: Any, *, noise: float = 0.0, stop_time: float | None = None, step_size: float | None = None
) -> "Ensemble":
    r"""Infinitely wide networks trained from random starts: the Gaussian process of their outputs.

        mean(x)     = A_x y,      A_x = Theta(x, X) S,   S = (Theta + noise I)^-1 or Theta^-1 (I - exp(-Theta T))
        cov(x, x')  = K(x, x') + A_x K A_x'^T - A_x K(X, x') - K(x, X) A_x'^T

    with K the NNGP and Theta the NTK of the network, S as in `posterior`. A single trained network is a draw of this process, not
    its mean. Trained in the last layer alone networks give the NNGP posterior instead: `nngp_mean` and `nngp_covariance`.

    Args:
        net: a network.
        x: (n, d), n >= 1, finite.
        y: (n,) or (n, k); the k outputs share both kernels.
        noise: as in `posterior`.
        stop_time: as in `posterior`.
        step_size: as in `posterior`.

    Returns:
        `Ensemble`.

    Raises:
        TypeError, ValueError: as `posterior`.

    Accuracy: as `posterior`; covariances are positive semi-definite to the rounding that S magnifies (tests/test_ensemble.py).

    References:
        Lee et al. (2019), "Wide neural networks of any depth evolve as linear models", eqs. 14-16; Rasmussen, Williams (2006),
        eqs. 2.23-2.24 (NNGP).

    >>> import numpy as np
    >>> import ntk_ln as nl
    >>> e = nl.ensemble(nl.mlp(1), np.array([[-1.0], [1.0]]), np.array([0.0, 1.0]))
    >>> e.mean(np.array([[1.0]])).round(9)
    array([1.])
    >>> float(e.variance(np.array([[1.0]]))[0].round(9))
    0.0
    >>> bool(e.variance(np.array([[5.0]]))[0] > 0.1)
    True
    """
    check_network(net, "ensemble(net, x, y)", ", which gives both kernels")
    p = posterior(NTK(net), x, y, noise=noise, stop_time=stop_time, step_size=step_size)
    rows = np.asarray(p.x, np.float64)
    nngp, ntk = (np.asarray(k, np.float64) for k in p.kernel.pair(rows))
    return Ensemble(p, nngp, _learning(p, ntk))


@dataclass(frozen=True, eq=False, repr=False)
class Ensemble:
    """What `ensemble` gives.

    Attributes:
        posterior: of the NTK; its mean is the ensemble's.
    """

    posterior: Posterior
    _nngp: np.ndarray  # K of the training rows
    _learning: np.ndarray  # S

    def __repr__(self) -> str:
        return f"Ensemble({self.posterior!r})"

    def mean(self, x: Any) -> Any:
        """The mean over networks, (m,) or (m, k)."""
        return self.posterior.mean(x)

    def covariance(self, x: Any) -> np.ndarray:
        """The covariance over networks of one output at the rows of x, (m, m), in float64."""
        rows = self._rows(x, "covariance(x)")
        factor, prior, cross = self._parts(rows)
        # [I, -A] times the prior covariance of (x, X) times its transpose.
        inner = factor @ self._nngp - cross
        covariance = prior + factor @ inner.T - cross @ factor.T
        return (covariance + covariance.T) / 2

    def variance(self, x: Any) -> np.ndarray:
        """The diagonal of `covariance(x)`, (m,), without forming it."""
        return self._by_blocks(self._rows(x, "variance(x)"), self._variance)

    def nngp_mean(self, x: Any) -> Any:
        """The NNGP posterior's mean K(x, X) (K + noise I)^-1 y, (m,) or (m, k)."""
        return self._nngp_posterior.mean(x)

    def nngp_covariance(self, x: Any) -> np.ndarray:
        """The NNGP posterior's covariance K(x, x') - K(x, X) (K + noise I)^-1 K(X, x'), (m, m)."""
        rows = self._rows(x, "nngp_covariance(x)")
        cross = np.asarray(self._pair(rows).nngp, np.float64)
        covariance = self._prior(rows) - cross @ self._nngp_posterior.solve(cross.T)
        return (covariance + covariance.T) / 2

    @cached_property
    def _nngp_posterior(self) -> Posterior:
        p = self.posterior
        return posterior(NNGP(p.kernel.network), p.x, p.y, noise=p.noise)

    def _variance(self, rows: np.ndarray) -> np.ndarray:
        pair = self._pair(rows)
        factor = pair.ntk @ self._learning
        prior = np.asarray(NNGP(self.posterior.kernel.network).diag(rows), np.float64)
        variance = prior + ((factor @ self._nngp - 2 * pair.nngp) * factor).sum(axis=1)
        # Rounding of sums of this size may leave less than nothing.
        return np.maximum(variance, 0)

    def _parts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        pair = self._pair(rows)
        return pair.ntk @ self._learning, self._prior(rows), np.asarray(pair.nngp, np.float64)

    def _pair(self, rows: np.ndarray) -> Any:
        return self.posterior.kernel.pair(rows, np.asarray(self.posterior.x, np.float64))

    def _prior(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.posterior.kernel.pair(rows).nngp, np.float64)

    def _rows(self, x: Any, name: str) -> np.ndarray:
        call = f"ensemble(...).{name}"
        rows = np.asarray(check_rows(concrete(x, "x", call), call), np.float64)
        d = np.shape(self.posterior.x)[1]
        if rows.shape[1] != d:
            raise ValueError(f"`{call}` needs `x` of shape (m, {d}), as in training. Got shape {rows.shape}.")
        return rows

    def _by_blocks(self, rows: np.ndarray, compute: Any) -> np.ndarray:
        size = max(1, _BLOCK // len(self._nngp))
        parts = [compute(rows[i : i + size]) for i in range(0, max(1, len(rows)), size)]
        return np.concatenate([np.asarray(part, np.float64) for part in parts])


def _learning(p: Posterior, ntk: np.ndarray) -> np.ndarray:
    """S: what multiplies Theta(x, X) from the right."""
    if p.stop_time is None:
        return p.solve(np.eye(len(ntk)))
    values, vectors = np.linalg.eigh(ntk)
    return (vectors * _solver.learned(np.maximum(values, 0), p.stop_time, p.step_size)) @ vectors.T
