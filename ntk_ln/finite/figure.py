"""The figure of a width study."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ntk_ln.plots import GREY, LAYER_NORM, PLAIN, SOFT, STYLE

if TYPE_CHECKING:
    from ntk_ln.finite.width_study import Estimate, WidthStudy


def width_figure(study: WidthStudy) -> Figure:
    """Three panels against width: errors before and after training, the kernel's change, and spread and largest output."""
    from ntk_ln.finite.width_study import interval

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.6, 4.3), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08), facecolor="white")
        errors, changes, ratios = figure.subplots(1, 3)
        series = (
            (errors, study.widths, study.kernel_errors, study.kernel_exponent, "random parameters", LAYER_NORM),
            (errors, study.trained_widths, study.change_errors, study.change_exponent, "$f_t - f_0$", PLAIN),
            (changes, study.trained_widths, study.kernel_changes, study.kernel_change_exponent, "", LAYER_NORM),
        )
        for axis, widths, values, exponent, label, colour in series:
            _errors(axis, widths, [interval(row) for row in values], exponent, label, colour)
        errors.set_title("Relative error")
        changes.set_title("Change of the kernel in training")
        for axis in (errors, changes):
            axis.set(xscale="log", yscale="log")
            low, high = axis.get_ylim()
            axis.set_ylim(low / 2, high * 1.5)  # room for the legend and the note
            axis.yaxis.set_major_locator(FixedLocator(_ticks(*axis.get_ylim())))
            axis.yaxis.set_minor_locator(NullLocator())
            axis.legend(frameon=False, fontsize=9, loc="lower left")
            axis.text(0.98, 0.97, "dashed: width$^{-1/2}$", transform=axis.transAxes, ha="right", va="top", color=GREY, fontsize=9)
        ratios.set(xscale="log")
        ratios.axhspan(0.9, 1.1, color=SOFT, zorder=0, lw=0)
        ratios.plot(study.trained_widths, study.spread_ratios, "o-", color=PLAIN, ms=6, lw=1.6, label="spread over seeds")
        ratios.plot(study.trained_widths, study.largest_ratios, "o-", color=LAYER_NORM, ms=6, lw=1.6, label="largest |mean output|")
        ratios.axhline(1, color=GREY, lw=1)
        ratios.set_title("Trained networks over the infinite one")
        ratios.legend(frameon=False, fontsize=9, loc="best")
        ratios.text(0.98, 0.03, "band: within 10%", transform=ratios.transAxes, ha="right", va="bottom", color=GREY, fontsize=9)
        for axis in (errors, changes, ratios):
            percent = 1 if axis is ratios else 100
            axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _, p=percent: f"{v:.3g}" if p == 1 else f"{100 * v:g}%"))
            widths = study.widths if axis is errors else study.trained_widths
            axis.set_xlim(widths[0] / 1.3, widths[-1] * 1.3)
            axis.xaxis.set_major_locator(FixedLocator(widths.tolist()))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.tick_params(axis="x", labelrotation=45)
            axis.grid(axis="y", color=SOFT, lw=1)
            axis.set_axisbelow(True)
            axis.set_xlabel("width")
    return figure


def _errors(axis: Axes, widths: np.ndarray, estimates: list[Estimate], exponent: Estimate, label: str, colour: str) -> None:
    means = np.array([e.mean for e in estimates])
    bars = np.array([[e.mean - e.low, e.high - e.mean] for e in estimates]).T
    constant = np.exp(np.mean(np.log(means * np.sqrt(widths))))
    axis.plot(widths, constant / np.sqrt(widths), color=colour, lw=1, ls=(0, (4, 3)))
    half = (exponent.high - exponent.low) / 2
    fitted = f"power {exponent.mean:.2f} ± {half:.2f}".replace("-", "\N{MINUS SIGN}")
    if np.isnan(exponent.mean):
        fitted = "one width, no power"
    text = f"{label}: {fitted}" if label else fitted
    # An interval that reaches 0 has no lower end on a logarithmic axis.
    bars[0] = np.minimum(bars[0], 0.9 * means)
    axis.errorbar(widths, means, yerr=bars, color=colour, fmt="o", ms=6, mew=0, elinewidth=1.4, label=text)


def _ticks(low: float, high: float) -> list[float]:
    candidates = [m * 10.0**k for k in range(-6, 3) for m in (1, 2, 5)]
    return [c for c in candidates if low <= c <= high]
