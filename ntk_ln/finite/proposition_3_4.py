"""Proposition 3.4: without training dynamics a LayerNorm bounds nothing."""

from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._dtype import check_finite, check_rows, check_whole, enable_x64
from ntk_ln._posterior_inputs import check_labels
from ntk_ln.layers import Activation, Dense, LayerNorm
from ntk_ln.network import Network, check_network
from ntk_ln.theorems import TheoremCheck

CALL = "check_proposition_3_4(net, x, y)"
STATEMENT = (
    "Among networks of minimum training loss, with a LayerNorm inside, there are some whose outputs exceed any bound: only "
    "training chooses the bounded ones."
)
CONDITION = 1e13  # least squares with a matrix worse than this does not interpolate


def check_proposition_3_4(
    net: Network, x: Any, y: Any, *, eps: float = 1e-4, width: int | None = None, seed: int = 0
) -> TheoremCheck:
    r"""Proposition 3.4 on your data: the proof's network has a LayerNorm and minimum training loss, and still runs away.

    An unbounded network g interpolates the data (random hidden layers of `net`, the last Dense by least squares). After it stand a
    Dense with the outputs (eps g, -eps g, 1, -1), a LayerNorm, a ReLU and a Dense that undoes them:

        f(x) = g(x)/sqrt(1 + eps^2 g(x)^2)

    so that f follows g up to |g| ~ 1/eps and saturates at 1/eps. With g interpolating y_i/sqrt(1 - eps^2 y_i^2) the training
    loss of f is 0 exactly. Labels are divided by max|y| first. It holds if, for eps and eps/10, the training outputs agree to
    1e-6, f follows g to 1% where |g| <= 0.1/eps, and |f| comes within 1% of 1/eps far out, ten times larger for the smaller eps.

    Args:
        net: a network without a norm layer, one output, whose outputs grow.
        x: (n, d), not all 0: f is followed along the longest row.
        y: (n,).
        eps: of the construction, in (0, 1).
        width: of g's hidden layers; by default at least 4 n.
        seed: of its random layers.

    Returns:
        `TheoremCheck`; `applies` is False for a network with a norm layer, without a hidden Dense or one that does not grow, and
        for y = 0. Its evidence is of y/max|y|.

    Raises:
        ValueError: shapes, NaN or infinity, eps or seed out of range, rows that random layers cannot interpolate (equal ones).

    References:
        Ziomek, Whittle, Osborne (2025), proposition 3.4.

    >>> import numpy as np
    >>> import ntk_ln as nl
    >>> x = np.linspace(-1, 1, 5)[:, None]
    >>> check = nl.check_proposition_3_4(nl.mlp(1), x, np.sin(3 * x[:, 0]))
    >>> check.applies, check.holds
    (True, True)
    """
    check_network(net, CALL)
    x = np.asarray(check_rows(x, CALL), np.float64)
    y = np.asarray(check_labels(y, x, CALL), np.float64)
    if y.ndim != 1 or len(x) == 0:
        raise ValueError(f"`{CALL}` needs `y` of shape (n,) and n >= 1. Got x.shape={x.shape}, y.shape={y.shape}.")
    check_finite(y, CALL, "y")
    if not (isinstance(eps, Real) and 0 < eps < 1):
        raise ValueError(f"`{CALL}` needs eps in (0, 1). Got {eps!r}.")
    check_whole(seed, CALL, "seed", 0, 2**32 - 1)
    if width is not None:
        check_whole(width, CALL, "width", 1)
    if not x.any():
        raise ValueError(f"`{CALL}` needs an input that is not 0: the outputs are followed along it. Got zeros alone.")
    reason = _why_it_does_not_apply(net, y)
    if reason:
        return TheoremCheck("3.4", False, None, STATEMENT, {"reason": reason})
    y = y / np.abs(y).max()
    width = max(64, 4 * len(x)) if width is None else width
    found = [_Construction.build(net, x, y, e, width, seed).measure(x, y) for e in (eps, eps / 10)]
    holds = all(
        one["training_error"] <= 1e-6 and one["follows"] <= 0.01 and abs(one["saturation_times_eps"] - 1) <= 0.01 for one in found
    )
    ratio = found[1]["largest"] / found[0]["largest"]
    return TheoremCheck("3.4", True, bool(holds and abs(ratio - 10) < 0.2), STATEMENT, {"eps": found[0], "eps/10": found[1]})


def _why_it_does_not_apply(net: Network, y: np.ndarray) -> str | None:
    growth = net.growth
    if growth.has_norm:
        return "the network has a norm layer"
    if growth.finite_only or not growth.mean > 0 or not isinstance(net.layers[-1], Dense):
        return "the network's outputs do not grow, or it ends in no Dense"
    if not any(isinstance(layer, Dense) for layer in net.layers[:-1]):
        return "the network has no hidden Dense, whose random units could interpolate any data"
    return None if y.any() else "all targets are 0, and so is the interpolant"


class _Construction:
    """The proof's network with its parameters, and the interpolant inside it."""

    def __init__(self, inner: Network, inner_params: Any, network: Network, params: Any, eps: float):
        self.inner, self.inner_params, self.network, self.params, self.eps = inner, inner_params, network, params, eps

    @classmethod
    def build(cls, net: Network, x: np.ndarray, y: np.ndarray, eps: float, width: int, seed: int) -> "_Construction":
        target = y / np.sqrt(1 - (eps * y) ** 2)
        with enable_x64(True):
            params = net.init(jax.random.key(seed), in_features=x.shape[1], width=width, dtype=np.float64)
            last = net.layers[-1]
            assert isinstance(last, Dense)
            # The last Dense reads out one unit at a time: its columns are the hidden units.
            reader = Network(*net.layers[:-1], Dense(w_std=width**0.5))
            identity = {"w": np.eye(width), "b": np.zeros(width)}
            units = np.asarray(reader.apply((*params[:-1], identity), jnp.asarray(x)))
        design = np.concatenate([units * (float(last.w_std) / width**0.5), np.full((len(x), 1), float(last.b_std))], axis=1)
        solution, _, _, singular = np.linalg.lstsq(design, target, rcond=1 / CONDITION)
        # One step of refinement: the loss is to be 0 to rounding.
        solution += np.linalg.lstsq(design, target - design @ solution, rcond=1 / CONDITION)[0]
        if np.abs(design @ solution - target).max() > 1e-7 * max(np.abs(target).max(), 1e-300):
            raise ValueError(
                f"`{CALL}`: random layers of width {width} do not interpolate these {len(x)} rows (condition "
                f"{singular[0] / max(singular[-1], 1e-300):.1e}). Merge equal rows, scale `x`, or give a larger width."
            )
        inner_params = (*params[:-1], {"w": solution[:-1, None], "b": solution[-1:]})
        network = Network(*net.layers, Dense(b_std=1.0), LayerNorm(), Activation("relu"), Dense())
        # Means 0 and variance (eps^2 g^2 + 1)/2 over these four; 1/sqrt(n_in) of the NTK parametrisation is 1 and 1/2.
        lift = {"w": np.array([[eps, -eps, 0.0, 0.0]]), "b": np.array([0.0, 0.0, 1.0, -1.0])}
        undo = {"w": np.array([[1.0], [-1.0], [0.0], [0.0]]) * (2 / (eps * 2**0.5)), "b": np.zeros(1)}
        return cls(net, inner_params, network, (*inner_params, lift, {}, {}, undo), eps)

    def measure(self, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
        direction = x[np.argmax(np.linalg.norm(x, axis=1))]
        radii = 10.0 ** np.linspace(0, 12, 481)
        line = np.concatenate([radii[:, None] * direction, -radii[:, None] * direction])
        with enable_x64(True):
            training = np.asarray(self.network.apply(self.params, jnp.asarray(x)))[:, 0]
            f = np.asarray(self.network.apply(self.params, jnp.asarray(line)))[:, 0]
            g = np.asarray(self.inner.apply(self.inner_params, jnp.asarray(line)))[:, 0]
        near = np.abs(g) <= 0.1 / self.eps
        largest = float(np.abs(f).max())
        # Beyond |g| = 1/eps the outputs have left it.
        leaves = np.abs(g) >= 1 / self.eps
        radius = np.concatenate([radii, radii]) * np.linalg.norm(direction)
        return {
            "eps": self.eps,
            "training_error": float(np.abs(training - y).max()),
            "follows": float(np.max(np.abs(f - g)[near] / np.maximum(np.abs(g)[near], 1e-12), initial=0.0)),
            "largest": largest,
            "saturation_times_eps": largest * self.eps,
            "radius_of_saturation": float(radius[leaves].min()) if leaves.any() else float("inf"),
        }
