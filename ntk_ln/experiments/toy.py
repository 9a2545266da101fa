"""Figure 1: a sine, a line and a parabola, learnt without LayerNorm and with one in different places."""

from typing import Any

import numpy as np

import ntk_ln as nl
from ntk_ln.experiments import _networks as networks
from ntk_ln.experiments._run import Report, Row, Settings, exact, over_seeds

TITLE = "Figure 1: extrapolation of toy functions"
SEEDS, STEPS = 5, 3000
NOISE = 1e-6  # of the infinite networks: a line is no function of a bounded kernel without it, to rounding
FLAT, GROWING = 0.1, 0.9  # exponents below and above which a network saturates or grows


def run(settings: Settings) -> Report:
    """Four networks on each function, finite and infinitely wide."""
    return compare(settings, "toy", TITLE, networks.FUNCTIONS, networks.POSITIONS, "figure_1")


def compare(
    settings: Settings, name: str, title: str, functions: Any, positions: tuple[str, ...], figure: str, activation: str = "relu"
) -> Report:
    """Networks by position of their norm on each function: growth far out, finite and infinite, and the figure."""
    seeds, steps = settings.seeds(SEEDS), settings.steps(STEPS)
    rows: list[Row] = []
    panels = {}
    for function in functions:
        for position in positions:
            net = networks.network(position, activation)
            runs = networks.trained(settings, name, net, function, position=position, seeds=seeds, steps=steps)
            rows += _finite(function, position, activation, runs)
            limit = None
            if position != "batch_norm":
                limit, infinite = _infinite(function, position, activation, net)
                rows += infinite
            panels[function, position] = runs["grid"], limit
    setting = {
        "functions": list(functions),
        "activation": activation,
        "points": networks.POINTS,
        "interval": "[-pi, pi]",
        "quadratic": "x^2/pi",
        "hidden": [128, 128],
        "optimizer": "Adam, 1e-3, full batch",
        "steps": steps,
        "seeds": len(seeds),
        "noise of the infinite networks": NOISE,
    }
    return Report(name, title, setting, rows, {figure: _figure(panels, functions, positions)})


def _finite(function: str, position: str, activation: str, runs: dict[str, np.ndarray]) -> list[Row]:
    where = f"{function}, {activation}, {networks.LABELS[position]}"
    grows = position in ("none", "batch_norm")
    powers = networks.exponent(runs["far"])
    return [
        over_seeds(
            f"{where}: growth exponent",
            powers,
            published="grows without bound" if grows else "saturates",
            agrees=bool((powers > GROWING).all() if grows else (powers < FLAT).all()),
        ),
        over_seeds(f"{where}: largest |f| on [-8 pi, 8 pi]", np.abs(runs["grid"]).max(axis=1)),
        over_seeds(f"{where}: root mean square error on the data", np.sqrt(2 * runs["loss"] / runs["fit"].shape[1])),
    ]


def _infinite(function: str, position: str, activation: str, net: nl.Network) -> tuple[np.ndarray, list[Row]]:
    where = f"{function}, {activation}, {networks.LABELS[position]}, infinitely wide"
    p = nl.posterior(nl.NTK(net), *networks.data(function), noise=NOISE)
    fields = [nl.far_field(p, [sign]) for sign in (-1.0, 1.0)]
    mean = p.mean(networks.GRID)
    rows = [
        exact(f"{where}: growth exponent", fields[0].power, note="exact: n^depth without a norm, 0 with one"),
        exact(f"{where}: slope or limit, largest of both directions", max(abs(float(f.coefficient)) for f in fields)),
        exact(f"{where}: largest |f| on [-8 pi, 8 pi]", float(np.abs(mean).max())),
    ]
    if position != "none":
        found, bound = nl.sup_norm(p).value, nl.sup_norm_bound(p)
        rows.append(exact(f"{where}: sup |f| over all x", found, agrees=bool(found <= bound.rkhs), note="at most the bound"))
        rows.append(exact(f"{where}: bound of sup |f| (rkhs)", bound.rkhs))
    return mean, rows


def _figure(panels: Any, functions: Any, positions: tuple[str, ...]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(positions), 2.7 * len(functions)), layout="constrained")
    axes = figure.subplots(len(functions), len(positions), squeeze=False, sharex=True)
    x = networks.GRID[:, 0]
    for row, function in zip(axes, functions, strict=True):
        inputs, labels = networks.data(function)
        for axis, position in zip(row, positions, strict=True):
            grid, limit = panels[function, position]
            axis.axvspan(-np.pi, np.pi, color="0.94", zorder=0)
            networks.band(axis, x, grid, position, "width 128, mean over seeds")
            if limit is not None:
                axis.plot(x, limit, color="black", lw=1, ls="--", label="infinitely wide")
            axis.plot(inputs[:, 0], labels, color="0.35", lw=2.5, alpha=0.6, label="data")
            axis.set_title(f"{function}, {networks.LABELS[position]}", fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
        row[0].legend(frameon=False, fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("x", fontsize=8)
    return figure
