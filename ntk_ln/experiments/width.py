"""The discussion's claim on width: the trained network's largest prediction is near that of the NTK posterior above width 512."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import ntk_ln as nl
from ntk_ln.experiments import _networks as networks
from ntk_ln.experiments._run import Report, Row, Settings, exact, over_seeds

TITLE = "Width: finite networks beside the NTK posterior"
SEEDS, STEPS = 5, 3000
WIDTHS = (32, 64, 128, 256, 512, 1024)
CLAIMED_FROM, CLAIMED = 512, 0.1
NOISE = 1e-6
DESCENT_WIDTHS, DESCENT_STEPS = (512, 1024), 30


def run(settings: Settings) -> Report:
    """Widths from 32 on, the sine, without a norm and with LayerNorm first."""
    widths = WIDTHS[:-2] if settings.quick else WIDTHS
    rows, curves = compare(settings, widths)
    rows += at_the_same_time(settings)
    setting = {
        "function": "sine",
        "widths": list(widths),
        "optimizer": "Adam, 1e-3, full batch, standard parametrisation",
        "steps": settings.steps(STEPS),
        "seeds": len(settings.seeds(SEEDS)),
        "noise of the posterior": NOISE,
    }
    return Report("width", TITLE, setting, rows, {"width": _figure(widths, curves)})


def compare(settings: Settings, widths: Sequence[int]) -> tuple[list[Row], dict[str, np.ndarray]]:
    """Largest predictions over that of the posterior: rows, and (widths, seeds) by position of the norm."""
    rows: list[Row] = []
    curves = {}
    seeds, steps = settings.seeds(SEEDS), settings.steps(STEPS)
    for position in ("none", "first"):
        net, where = networks.network(position), networks.LABELS[position]
        p = nl.posterior(nl.NTK(net), *networks.data("sine"), noise=NOISE)
        limit = float(np.abs(p.mean(networks.GRID)).max())
        rows.append(exact(f"{where}: largest |mean| of the NTK posterior on [-8 pi, 8 pi]", limit))
        found = []
        for width in widths:
            runs = networks.trained(settings, "width", net, "sine", position=position, seeds=seeds, steps=steps, width=width)
            ratios = np.abs(runs["grid"]).max(axis=1) / limit
            mean_ratio = float(np.abs(runs["grid"].mean(axis=0)).max() / limit)
            claimed = width >= CLAIMED_FROM
            rows.append(
                over_seeds(
                    f"{where}, width {width}: largest |f| over that of the posterior",
                    ratios,
                    published="within 10% of 1" if claimed else "",
                    agrees=bool(abs(ratios.mean() - 1) <= CLAIMED) if claimed else None,
                    note=f"of the mean over seeds: {mean_ratio:.3g}",
                )
            )
            found.append(ratios)
        curves[position] = np.array(found)
    return rows, curves


def at_the_same_time(settings: Settings) -> list[Row]:
    """The claim where the theory makes it: gradient descent in the NTK parametrisation, the posterior stopped when it stops."""
    x, y = networks.data("sine")
    seeds, rows = len(settings.seeds(SEEDS)), []
    widths = DESCENT_WIDTHS[:1] if settings.quick else DESCENT_WIDTHS
    for position in ("none", "first"):
        net = networks.network(position)

        def compute(net: nl.Network = net) -> dict[str, Any]:
            study = nl.width_study(
                net, x, y, widths=(8, 16), trained_widths=widths, seeds=seeds, steps=DESCENT_STEPS, points=networks.GRID
            )
            return {"outputs": study.outputs, "mean": study.mean, "deviation": study.deviation}

        unit = {"descent": position, "widths": list(widths), "seeds": seeds, "steps": DESCENT_STEPS, "network": net.to_config()}
        found = settings.kept("width", unit, compute)
        limit = np.abs(found["mean"]).max()
        at = np.abs(found["mean"]).argmax()
        for width, outputs in zip(widths, found["outputs"], strict=True):
            ratio = float(np.abs(outputs.mean(axis=0)).max() / limit)
            half = float(1.96 * found["deviation"][at] / limit / seeds**0.5)
            single = np.abs(outputs).max(axis=1).mean() / limit
            rows.append(
                Row(
                    f"{networks.LABELS[position]}, width {width}, {DESCENT_STEPS} steps of gradient descent:"
                    " largest |mean over seeds| over that of the posterior at the same time",
                    ratio,
                    ratio - half,
                    ratio + half,
                    seeds,
                    published="within 10% of 1",
                    agrees=bool(abs(ratio - 1) - half <= CLAIMED),
                    note=f"interval by the ensemble's covariance; single networks: {single:.3g}",
                )
            )
    return rows


def _figure(widths: Any, curves: dict[str, np.ndarray]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.axhspan(1 - CLAIMED, 1 + CLAIMED, color="0.92", label="within 10%")
    for position, ratios in curves.items():
        half, color, label = networks.interval(ratios.T), networks.COLORS[position], networks.LABELS[position]
        axis.errorbar(widths, ratios.mean(axis=1), half, fmt="o-", capsize=3, color=color, label=label)
    axis.set(xscale="log", yscale="log", xlabel="width", ylabel="largest |f| over the posterior's")
    axis.set_xticks(widths, [str(w) for w in widths])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    return figure
