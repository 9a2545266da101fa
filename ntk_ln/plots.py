"""The figures of a check: what both networks do near the data and far from it.

Each function takes a `ntk_ln.check.CheckResult` and returns a `matplotlib.figure.Figure`; pyplot and its global state stay unused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

if TYPE_CHECKING:
    from ntk_ln.check import CheckResult, NetworkCheck

PLAIN, LAYER_NORM, INK, GREY, SOFT = "#c8453b", "#11698e", "#1f2933", "#7b8794", "#eef1f4"
COLOUR = {"plain": PLAIN, "layer_norm": LAYER_NORM}
TITLE = {"plain": "Plain", "layer_norm": "With LayerNorm"}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 9,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
    "mathtext.fontset": "dejavusans",
}


def two_worlds(result: CheckResult) -> Figure:
    """One panel a network, same axes: the mean far along a line, its predicted far field, and the bound where there is one."""
    figure = _figure(9.6, 4.5)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, network in zip(axes, result.networks, strict=True):
        _far_mean(axis, result, network)
        axis.set_title(f"{TITLE[network.name]}: {_fate(network)}", color=COLOUR[network.name])
        axis.set_xlabel(_position_label(result))
        _label_bound(axis, result, network)
        _label_far_line(axis, result, network)
        _note(axis, _middle(result), 0.07, "data", ha="center", x_is_data=True)
    axes[0].set_ylabel("posterior mean")
    _far_axes(axes[0], result)
    return figure


def posterior_mean(result: CheckResult) -> Figure:
    """Both means near the data, and far from it with the bound and the predicted far field."""
    figure = _figure(9.6, 4.4)
    near, far = figure.subplots(1, 2, width_ratios=(1, 1.15))
    ray = result.ray
    near.plot(ray.rows, result.data.y, "o", ms=5, mew=0, color=GREY, alpha=0.6 if len(result.data.y) < 200 else 0.25, zorder=1)
    for network in result.networks:
        near.plot(ray.near, network.curves.near, color=COLOUR[network.name], lw=1.8)
    rows = "dots: training rows" if result.data.x.shape[1] == 1 else "dots: training rows, projected on the line"
    near.set_title("Near the data")
    near.set_xlabel(_position_label(result))
    near.set_ylabel("posterior mean")
    near.margins(x=0)
    _pad_y(near, 0.16)
    _note(near, 0.03, 0.97, rows, ha="left")
    _label_ends(near, [(TITLE[n.name], n.curves.near[-1], COLOUR[n.name]) for n in result.networks])
    for network in result.networks:
        _far_mean(far, result, network)
    far.set_title("Far from it (dashed: predicted)")
    far.set_xlabel(_position_label(result))
    for network in result.networks:
        _label_bound(far, result, network)
    _note(far, _middle(result), 0.07, "data", ha="center", x_is_data=True)
    _far_axes(far, result)
    return figure


def diagonal(result: CheckResult) -> Figure:
    """Theta(x, x) against the distance from the origin, log-log."""
    figure = _figure(6.6, 4.3)
    axis = figure.subplots()
    axis.set(xscale="log", yscale="log")
    r = result.ray.radii
    ends = []
    for network in result.networks:
        values, colour = network.curves.diagonal, COLOUR[network.name]
        axis.plot(r, values, color=colour)
        if np.isfinite(network.kernel_sup.value):
            sign = "=" if network.kernel_sup.exact else "≈"
            axis.axhline(network.kernel_sup.value, color=colour, lw=1, ls=(0, (4, 3)))
            says = f"bounded: C {sign} {_number(network.kernel_sup.value)}"
        else:
            slope = np.log(values[-1] / values[-9]) / np.log(r[-1] / r[-9])
            says = f"unbounded: ∝{_times_power(float(_number(slope, 2)))}"
        ends.append((f"{TITLE[network.name]}\n{says}", values[-1], colour))
    axis.set_xlim(r[0], r[-1])
    _decades(axis.xaxis, r[0], r[-1])
    low, high = axis.get_ylim()
    axis.set_ylim(low / 1.5, high * 1.5)
    _decades(axis.yaxis, *axis.get_ylim())
    axis.axvspan(r[0], result.ray.reach, color=SOFT, zorder=0, lw=0)
    _note(axis, result.ray.reach, 0.985, "reach of the data ", ha="right", x_is_data=True)
    axis.set_xlabel("$|x|$")
    axis.set_title(r"Tangent kernel $\Theta(x, x)$")
    _label_ends(axis, ends)
    return figure


def kernels(result: CheckResult) -> Figure:
    """The tangent kernel of both networks along the line, each on its own colour scale."""
    figure = _figure(9.2, 4.5)
    t = result.ray.grid
    for axis, network in zip(figure.subplots(1, 2, sharey=True), result.networks, strict=True):
        gram = network.curves.gram
        image = axis.pcolormesh(t, t, gram, norm=_colour_scale(gram), cmap="magma", shading="nearest", rasterized=True)
        axis.set_aspect("equal")
        span = f"{_number(np.min(gram), 2)} to {_number(np.max(gram), 2)}"
        axis.set_title(f"{TITLE[network.name]}: {span}", color=COLOUR[network.name])
        axis.set_xlabel("position of $x$")
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
        bar = figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, which="both")
        if np.min(gram) > 0:
            ticks = _log_ticks(np.min(gram), np.max(gram))
            bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
            bar.ax.yaxis.set_minor_locator(NullLocator())
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel("position of $x'$")
    figure.suptitle(r"$\Theta(x, x')$ on a log colour scale", x=0.01, ha="left", fontsize=10.5)
    return figure


def widths(result: CheckResult) -> Figure:
    """Relative error of the empirical kernel of finite networks against the infinite-width one."""
    figure = _figure(6.6, 4.3)
    axis = figure.subplots()
    axis.set(xscale="log", yscale="log")
    ends = []
    width = np.array([e.width for e in result.networks[0].empirical])
    for network in result.networks:
        error = np.array([e.relative_error for e in network.empirical])
        bar = np.array([e.standard_error for e in network.empirical])
        colour = COLOUR[network.name]
        constant = np.exp(np.mean(np.log(error * np.sqrt(width))))
        axis.plot(width, constant / np.sqrt(width), color=colour, lw=1, ls=(0, (4, 3)))
        axis.errorbar(width, error, yerr=2 * bar, color=colour, fmt="o", ms=6.5, mew=0, elinewidth=1.4)
        ends.append((TITLE[network.name], constant / np.sqrt(width[-1]), colour))
    axis.set_xlim(width[0] / 1.25, width[-1] * 1.25)
    axis.xaxis.set_major_locator(FixedLocator(width.tolist()))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(FixedLocator(_log_ticks(low, high)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_ylim(low, high)
    axis.grid(axis="y", color=SOFT, lw=1)
    axis.set_axisbelow(True)
    axis.set_xlabel("width")
    axis.set_title("Finite networks reach the kernel: relative error")
    _note(axis, 0.98, 0.97, "dashed: $1/\\sqrt{\\mathrm{width}}$\nbars: 2 standard errors", ha="right")
    _label_ends(axis, ends)
    return figure


FIGURES: dict[str, tuple[Callable[[CheckResult], Figure], str]] = {
    "two_worlds": (two_worlds, "One line through the data, followed four decades out."),
    "posterior_mean": (posterior_mean, "The trained network's expected prediction, near and far."),
    "diagonal": (diagonal, "What decides it: the kernel's diagonal."),
    "kernels": (kernels, "The tangent kernel between points of the line."),
    "widths": (widths, "Empirical kernels of finite networks against the closed form."),
}


def draw(name: str, result: CheckResult, path: Path) -> None:
    """Write the figure `name` of `FIGURES` to `path` as PNG."""
    function, _ = FIGURES[name]
    with matplotlib.rc_context(STYLE):
        function(result).savefig(path, dpi=150, format="png")


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08), facecolor="white")


def _far_mean(axis: Axes, result: CheckResult, network: NetworkCheck) -> None:
    ray, colour = result.ray, COLOUR[network.name]
    axis.axvspan(ray.rows.min(), ray.rows.max(), color=SOFT, zorder=0, lw=0)
    if np.isfinite(network.bounds.rkhs):
        axis.axhspan(-network.bounds.rkhs, network.bounds.rkhs, color=colour, alpha=0.08, lw=0, zorder=0.5)
        for sign in (-1, 1):
            axis.axhline(sign * network.bounds.rkhs, color=colour, lw=1, zorder=1)
    axis.plot(ray.far, network.curves.far, color=colour, zorder=3)
    for sign, side in zip((1, -1), network.far_field[:2], strict=False):
        r = np.geomspace(2 * ray.extent, ray.far[-1], 60)
        axis.plot(sign * r, side.predict(r), color=INK, lw=1.2, ls=(0, (4, 3)), zorder=4)


def _far_axes(axis: Axes, result: CheckResult) -> None:
    ray = result.ray
    reach = ray.far[-1]
    axis.set_xscale("asinh", linear_width=ray.extent / 2)
    axis.set_xlim(-reach, reach)
    axis.xaxis.set_major_locator(FixedLocator(_symmetric_ticks(ray.extent, reach, 2)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(_power_of_ten))
    linear = float(np.max(np.abs(result.data.y))) or 1.0
    shown = [np.max(np.abs(n.curves.far)) for n in result.networks]
    shown += [n.bounds.rkhs for n in result.networks if np.isfinite(n.bounds.rkhs)]
    limit = max(1.6 * linear, 2.5 * max(shown))
    axis.set_yscale("asinh", linear_width=linear / 2)
    axis.set_ylim(-limit, limit)
    axis.yaxis.set_major_locator(FixedLocator(_symmetric_ticks(linear, limit, 3)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(_power_of_ten))


def _label_bound(axis: Axes, result: CheckResult, network: NetworkCheck) -> None:
    if not np.isfinite(network.bounds.rkhs):
        return
    axis.annotate(
        f"certified: |mean| ≤ {_number(network.bounds.rkhs)} for every x",
        (result.ray.far[-1], network.bounds.rkhs),
        (-2, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=COLOUR[network.name],
        fontsize=9.5,
    )


def _label_far_line(axis: Axes, result: CheckResult, network: NetworkCheck) -> None:
    """Name the predicted far field on the right, on the side the curve leaves free."""
    side = network.far_field[0]
    r = result.ray.extent * (result.ray.far[-1] / result.ray.extent) ** 0.45
    number = _number(side.coefficient)
    if side.power == 0:
        text, place, above, left = f"predicted {number}", result.ray.far[-1], side.coefficient < 0, False
    else:
        text, place, above, left = f"predicted\n{number}{_times_power(side.power)}", r, side.coefficient < 0, True
    axis.annotate(
        text,
        (place, side.predict(place)),
        (8 if left else -2, 5 if above else -5),
        textcoords="offset points",
        ha="left" if left else "right",
        va="bottom" if above else "top",
        color=INK,
        fontsize=9.5,
        linespacing=1.35,
    )


def _middle(result: CheckResult) -> float:
    return float(result.ray.rows.min() + result.ray.rows.max()) / 2


def _note(axis: Axes, x: float, y: float, text: str, ha: str, x_is_data: bool = False) -> None:
    """Small grey text hanging from a height of the axes."""
    transform = axis.get_xaxis_transform() if x_is_data else axis.transAxes
    axis.text(x, y, text, transform=transform, ha=ha, va="top", color=GREY, fontsize=9.5)


def _fate(network: NetworkCheck) -> str:
    if np.isfinite(network.sup_norm.value):
        return "settles inside a bound" if np.isfinite(network.bounds.rkhs) else "settles"
    return f"runs away like{_times_power(network.far_field[0].power)}"


def _times_power(power: float) -> str:
    if power in (0, 1):
        return " |x|" if power else ""
    if power == int(power):
        return " |x|" + str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f" |x|$^{{{power:.3g}}}$"


def _label_ends(axis: Axes, ends: list[tuple[str, float, str]]) -> None:
    """Write each label right of the axes at its curve's end, pushed apart where they would overlap."""

    def place(value: float) -> float:
        return axis.transAxes.inverted().transform(axis.transData.transform((1.0, value)))[1]

    ordered = sorted(((place(value), text, colour) for text, value, colour in ends), key=lambda end: end[0])
    below = -np.inf
    for y, text, colour in ordered:
        y = max(min(y, 0.97), below)
        below = y + 0.07 * (1 + text.count("\n"))
        axis.text(
            1.02, y, text, transform=axis.transAxes, va="center", color=colour, fontsize=10, fontweight="bold", linespacing=1.4
        )


def _pad_y(axis: Axes, share: float) -> None:
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + share * (high - low))


def _position_label(result: CheckResult) -> str:
    if result.data.x.shape[1] == 1:
        return result.data.features[0]
    return "position on a line through the data"


def _colour_scale(gram: np.ndarray) -> Normalize:
    low, high = float(np.min(gram)), float(np.max(gram))
    if low > 0:
        return LogNorm(low, high)
    return SymLogNorm(linthresh=max(high, -low) * 1e-3 or 1.0, vmin=low, vmax=high)


def _log_ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers inside [low, high]."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(np.arange(1, 10, 0.5))):
        exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
        ticks = [step * 10.0**e for e in exponents for step in steps if low <= step * 10.0**e <= high]
        if len(ticks) >= 3:
            return ticks[:: int(np.ceil(len(ticks) / 7))]
    return [low, high]


def _decades(axis: Axis, low: float, high: float) -> None:
    axis.set_major_locator(FixedLocator(_log_ticks(low, high)))
    axis.set_major_formatter(FuncFormatter(_power_of_ten))
    axis.set_minor_locator(NullLocator())


def _symmetric_ticks(linear: float, limit: float, most: int) -> list[float]:
    first, last = int(np.ceil(np.log10(linear) + 0.3)), int(np.floor(np.log10(limit) + 1e-9))
    exponents = np.arange(min(first, last), last + 1)
    kept = 10.0 ** exponents[:: -max(1, int(np.ceil(len(exponents) / most)))]
    return [*-kept, 0.0, *kept[::-1]]


def _power_of_ten(value: float, _: object = None) -> str:
    return _number(value, 6)


def _number(value: float, digits: int = 3) -> str:
    """A number as text, with a true minus sign, and as m x 10^e outside [0.001, 10000)."""
    text = f"{value:.{digits}g}"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{float(text):g}".replace("-", "\N{MINUS SIGN}")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = f"{float(mantissa):g}"
    lead = mantissa[:-1] if mantissa in ("1", "-1") else rf"{mantissa}\times"
    return f"${lead}10^{{{int(exponent)}}}$"
