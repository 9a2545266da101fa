"""The paper's networks by where their LayerNorm sits, trained and infinitely wide, on one-dimensional data."""

from typing import Any

import numpy as np
import scipy.stats

import ntk_ln as nl
from ntk_ln.experiments._run import Settings

POSITIONS = ("none", "first", "last", "every")
LABELS = {
    "none": "no LayerNorm",
    "first": "LayerNorm first",
    "last": "LayerNorm last",
    "every": "LayerNorm every",
    "batch_norm": "BatchNorm first",
}
COLORS = {"none": "#c0392b", "first": "#1f7a8c", "last": "#3d5a98", "every": "#6a4c93", "batch_norm": "#b8860b"}
POINTS = 100
FAR = 8 * np.pi  # figures show [-FAR, FAR]
GRID = np.linspace(-FAR, FAR, 401)[:, None]
RADII = np.array([2.0**k for k in range(6, 15)])  # where growth is measured, both directions
FUNCTIONS = {"sine": np.sin, "linear": lambda x: x, "quadratic": lambda x: x**2 / np.pi}


def network(position: str, activation: str = "relu", depth: int = 2) -> nl.Network:
    """The paper's network: Kaiming weights, biases of standard deviation 0.1, ReLU unless said."""
    if position != "batch_norm":
        return nl.paper_mlp(depth, layer_norm=position, activation=activation)
    first, *rest = nl.paper_mlp(depth, activation=activation).layers
    return nl.Network(first, nl.BatchNorm(), *rest)


def data(function: str, n: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """n points of the function, x evenly on [-pi, pi]."""
    x = np.linspace(-np.pi, np.pi, n)[:, None]
    return x, FUNCTIONS[function](x[:, 0])


def trained(
    settings: Settings,
    name: str,
    net: nl.Network,
    function: str,
    *,
    position: str,
    seeds: tuple[int, ...],
    steps: int,
    width: int = 128,
    n: int = POINTS,
    far: np.ndarray = RADII,
) -> dict[str, np.ndarray]:
    """Outputs of trained networks: `grid` (seeds, 401) on [-FAR, FAR], `far` (seeds, 2, radii), `fit` (seeds, n), the last `loss`.

    Adam at 1e-3 on the full batch, as in the paper.
    """
    x, y = data(function, n)
    unit = {
        "function": function,
        "norm": position,
        "points": n,
        "width": width,
        "steps": steps,
        "seeds": len(seeds),
        "radii": list(far),
        "network": net.to_config(),
    }

    def compute() -> dict[str, Any]:
        training = nl.train(net, x, y, width=width, seeds=seeds, steps=steps)
        both = np.concatenate([-far, far])[:, None]
        return {
            "grid": training.apply(GRID),
            "far": training.apply(both).reshape(len(seeds), 2, len(far)),
            "fit": training.apply(x),
            "loss": training.losses[-1],
        }

    return settings.kept(name, unit, compute)


def exponent(far: np.ndarray, radii: np.ndarray = RADII) -> np.ndarray:
    """The power with which |f| grows over the last two octaves, the larger of the two directions: (seeds,)."""
    outputs = np.abs(far)
    return (np.log2(outputs[..., -1] / outputs[..., -3]) / np.log2(radii[-1] / radii[-3])).max(axis=-1)


def band(axis: Any, x: np.ndarray, values: np.ndarray, position: str, label: str) -> None:
    """Draws the mean over seeds of `values` (seeds, points) and its 95% interval."""
    mean = values.mean(axis=0)
    half = interval(values)
    axis.fill_between(x, mean - half, mean + half, color=COLORS[position], alpha=0.25, lw=0)
    axis.plot(x, mean, color=COLORS[position], label=label)


def interval(values: np.ndarray) -> np.ndarray:
    """Half the 95% interval of the mean over seeds, the first axis; 0 of one seed."""
    n = len(values)
    return scipy.stats.t.ppf(0.975, n - 1) * values.std(axis=0, ddof=1) / n**0.5 if n > 1 else np.zeros(values.shape[1:])
