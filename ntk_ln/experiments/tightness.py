"""How tight the bound of Theorem 3.3 is: the largest prediction on [-10^4, 10^4] beside it, for growing numbers of points."""

from typing import Any

import numpy as np

import ntk_ln as nl
from ntk_ln.experiments import _networks as networks
from ntk_ln.experiments._run import Report, Row, Settings, exact, over_seeds

TITLE = "Tightness of the bound"
SEEDS, STEPS = 5, 3000
POINTS = (4, 5, 10, 20, 50, 100)  # of three, the sine is zero at each
FAR = np.concatenate([np.linspace(0.1, 30, 300), np.geomspace(31, 1e4, 200)])
NOISES = (0.0, 1e-2)
FEW = 5  # points: a small data set


def run(settings: Settings) -> Report:
    """The sine with LayerNorm first, and the plain network that exceeds the bound."""
    seeds, steps = settings.seeds(SEEDS), settings.steps(STEPS)
    points = POINTS[1:4] if settings.quick else POINTS
    rows: list[Row] = []
    shares: list[float] = []
    table: dict[str, list[float]] = {name: [] for name in ("layer norm", "plain", "infinite", "rkhs", "spectral", "dataset")}
    for n in points:
        finite = {}
        for position in ("first", "none"):
            net = networks.network(position)
            runs = networks.trained(settings, "tightness", net, "sine", position=position, seeds=seeds, steps=steps, n=n, far=FAR)
            finite[position] = np.abs(runs["far"]).max(axis=(1, 2))
        kernel = nl.NTK(networks.network("first"))
        for noise in NOISES:
            p = nl.posterior(kernel, *networks.data("sine", n), noise=noise)
            bound, found = nl.sup_norm_bound(p), nl.sup_norm(p).value
            where = f"{n} points, noise {noise:g}"
            rows.append(exact(f"{where}: sup |mean|", found, agrees=bool(found <= bound.rkhs), note="at most the bounds"))
            rows.append(exact(f"{where}: rkhs bound over it", bound.rkhs / found))
            rows.append(exact(f"{where}: spectral bound over it", bound.spectral / found))
            rows.append(exact(f"{where}: dataset bound over it", bound.dataset / found))
            if noise == 0:
                for name, value in zip(
                    ("infinite", "rkhs", "spectral", "dataset"), (found, bound.rkhs, bound.spectral, bound.dataset), strict=True
                ):
                    table[name].append(value)
                few, share = n <= FEW, finite["first"].mean() / bound.dataset
                shares.append(share)
                rows.append(
                    over_seeds(
                        f"{n} points: largest |f|, LayerNorm first, width 128",
                        finite["first"],
                        published="of the order of the bound" if few else "the bound loosens",
                        # One network is a draw of the ensemble, whose mean the theorem bounds.
                        agrees=bool(share > 0.1 if few else share < shares[0]),
                        note=f"dataset bound {bound.dataset:.4g}, rkhs bound {bound.rkhs:.4g}",
                    )
                )
                rows.append(
                    over_seeds(
                        f"{n} points: largest |f|, no LayerNorm, width 128",
                        finite["none"],
                        published="exceeds the bound",
                        agrees=bool(finite["none"].mean() > bound.rkhs),
                        note=f"rkhs bound {bound.rkhs:.4g}, dataset bound {bound.dataset:.4g}",
                    )
                )
        table["layer norm"].append(float(finite["first"].mean()))
        table["plain"].append(float(finite["none"].mean()))
    setting = {"function": "sine", "points": list(points), "domain": "[-1e4, 1e4]", "steps": steps, "seeds": len(seeds)}
    return Report("tightness", TITLE, setting, rows, {"tightness": _figure(points, table)})


def _figure(points: Any, table: dict[str, list[float]]) -> Any:
    from matplotlib.figure import Figure

    styles = {
        "layer norm": ("LayerNorm first, width 128", networks.COLORS["first"], "o-"),
        "plain": ("no LayerNorm, width 128", networks.COLORS["none"], "o-"),
        "infinite": ("LayerNorm first, infinitely wide", "black", "s--"),
        "rkhs": ("rkhs bound", "0.45", ":"),
        "spectral": ("spectral bound", "0.6", "-."),
        "dataset": ("dataset bound", "0.75", "--"),
    }
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axis = figure.subplots()
    for name, (label, color, line) in styles.items():
        axis.loglog(points, table[name], line, color=color, label=label, markersize=4)
    axis.set(xlabel="points", ylabel="largest |f| on [-10^4, 10^4]")
    axis.set_xticks(points, [str(n) for n in points])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=7, loc="outside lower center", ncols=2)
    return figure
