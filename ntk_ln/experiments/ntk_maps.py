"""Figure 2: the empirical NTK at random parameters, with and without LayerNorm, beside its infinite-width limit."""

from typing import Any

import jax
import numpy as np

import ntk_ln as nl
from ntk_ln.experiments import _networks as networks
from ntk_ln.experiments._run import Report, Row, Settings, exact, over_seeds

TITLE = "Figure 2: empirical NTKs at initialisation"
SEEDS, WIDTH = 5, 128
INPUTS = np.linspace(-25, 25, 101)[:, None]


def run(settings: Settings) -> Report:
    """The kernel on [-25, 25], by position of the norm."""
    seeds = settings.seeds(SEEDS)
    rows: list[Row] = []
    maps = {}
    corner = {}
    for position in networks.POSITIONS:
        net = networks.network(position)
        unit = {"network": net.to_config(), "width": WIDTH, "seeds": len(seeds)}
        kernels = settings.kept("ntk_maps", unit, lambda net=net: {"kernels": [_kernel(net, seed) for seed in seeds]})["kernels"]
        limit = nl.NTK(net)(INPUTS)
        where = networks.LABELS[position]
        maps[position] = kernels.mean(axis=0), limit
        corner[position] = kernels[:, -1, -1]
        ratios = kernels[:, -1, -1] / kernels[:, len(INPUTS) // 2, len(INPUTS) // 2]
        rows += [
            over_seeds(f"{where}: largest |Theta(x, x')|", np.abs(kernels).max(axis=(1, 2))),
            exact(f"{where}: largest |Theta(x, x')|, infinitely wide", np.abs(limit).max()),
            over_seeds(
                f"{where}: Theta(25, 25)/Theta(0, 0)",
                ratios,
                published="grows" if position == "none" else "saturates",
                agrees=bool((ratios > 100).all() if position == "none" else (ratios < 10).all()),
            ),
            exact(f"{where}: Theta(25, 25)/Theta(0, 0), infinitely wide", limit[-1, -1] / nl.NTK(net).diag([[0.0]])[0]),
            over_seeds(
                f"{where}: |Theta_128 - Theta|/|Theta|", np.linalg.norm(kernels - limit, axis=(1, 2)) / np.linalg.norm(limit)
            ),
        ]
    for position in networks.POSITIONS[1:]:
        orders = float(np.log10(corner["none"].mean() / corner[position].mean()))
        rows.append(
            exact(
                f"orders of magnitude between no LayerNorm and {networks.LABELS[position]} at x = x' = 25",
                orders,
                published="orders of magnitude",
                agrees=orders >= 1,
            )
        )
    setting = {"inputs": "101 points of [-25, 25]", "hidden": [WIDTH, WIDTH], "seeds": len(seeds)}
    return Report("ntk_maps", TITLE, setting, rows, {"figure_2": _figure(maps)})


def _kernel(net: nl.Network, seed: int) -> np.ndarray:
    params = net.init(jax.random.key(seed), in_features=1, width=WIDTH)
    return np.asarray(nl.EmpiricalNTK(net, params)(INPUTS.astype(np.float32)), np.float64)


def _figure(maps: dict[str, Any]) -> Any:
    from matplotlib.colors import SymLogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(maps), 5.6), layout="constrained")
    axes = figure.subplots(2, len(maps), sharex=True, sharey=True)
    for column, (position, pair) in zip(axes.T, maps.items(), strict=True):
        largest = max(np.abs(kernel).max() for kernel in pair)
        for axis, kernel, title in zip(
            column, pair, (f"{networks.LABELS[position]}, width {WIDTH}", "infinitely wide"), strict=True
        ):
            norm = SymLogNorm(1.0, vmin=-largest, vmax=largest) if position == "none" else None
            limits = {} if norm else {"vmin": min(0.0, kernel.min()), "vmax": largest}
            image = axis.imshow(kernel, extent=(-25, 25, -25, 25), origin="lower", cmap="viridis", norm=norm, **limits)
            axis.set_title(title, fontsize=9)
            axis.tick_params(labelsize=7)
            figure.colorbar(image, ax=axis, shrink=0.8).ax.tick_params(labelsize=7)
    return figure
