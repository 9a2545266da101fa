"""Writes a check to a folder: report.json, a self-contained report.html and the figures as PNG."""

from __future__ import annotations

import base64
import ctypes
import html
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ntk_ln import plots

if TYPE_CHECKING:
    import ntk_ln as nl
    from ntk_ln.check import CheckResult, FarLine, NetworkCheck

LABEL = {"plain": "Plain", "layer_norm": "With LayerNorm"}


def report_dict(result: CheckResult) -> dict[str, Any]:
    """The content of report.json: plain values only, null where a number is not finite."""
    data = result.data
    described = {
        "source": data.source,
        "rows": len(data.y),
        "rows_in_file": data.rows_in_file,
        "features": data.features,
        "target": data.target,
        "standardized": data.standardized,
        "noise": result.noise,
    }
    return _plain(
        {
            "data": described,
            "networks": [_network_dict(network) for network in result.networks],
            "theorems": [
                {"name": check.name, "network": name, "holds": check.holds, "evidence": check.evidence}
                for name, check in result.theorems
            ],
        }
    )


def _network_dict(network: NetworkCheck) -> dict[str, Any]:
    bounds = network.bounds
    bounded = np.isfinite(network.kernel_sup.value)
    return {
        "name": network.name,
        "config": network.network.to_config(),
        "min_eigenvalue": {"value": network.min_eigenvalue.value, "lower": network.min_eigenvalue.lower},
        "kernel_sup": network.kernel_sup.value,
        "bounds": {"rkhs": bounds.rkhs, "spectral": bounds.spectral, "dataset": bounds.dataset} if bounded else None,
        "sup_norm": {"value": network.sup_norm.value, "point": network.sup_norm.point},
        "far_field": [
            {"direction": side.direction, "power": side.power, "coefficient": side.coefficient} for side in network.far_field
        ],
        "agreement": {
            "neural_tangents": network.neural_tangents,
            "empirical": [
                {"width": e.width, "relative_error": e.relative_error, "standard_error": e.standard_error}
                for e in network.empirical
            ],
        },
    }


def _plain(value: Any) -> Any:
    """Strict JSON: arrays as lists, null for what is not a finite number."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return _plain(np.asarray(value).tolist())


def check_folder(folder: str | Path) -> None:
    """Raise ValueError if `folder` is not free to hold a report: it may be new, empty, or an earlier report."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {str(folder)!r} is a file. Give a new folder.")
    ours = {"report.json", "report.html", *(f"{name}.png" for name in plots.FIGURES)}
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours) if folder.exists() else []
    if others:
        raise ValueError(f"--out {str(folder)!r} holds {others[0]!r}, which is not of a report. Give a new or empty folder.")
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=parent))  # tried: what os.access says of special file systems is wrong
    except OSError:
        raise ValueError(f"--out {str(folder)!r} cannot be made: {str(parent)!r} is not a writable folder.") from None


def write(result: CheckResult, folder: str | Path, on_figure: Callable[[str], None] = lambda name: None) -> None:
    """Write the whole report, or nothing: a folder beside `folder` takes its place once complete.

    Raises:
        ValueError: `folder` holds files that are not of a report.
    """
    check_folder(folder)
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    _unfinished.append(building)
    try:
        building.chmod(0o777 & ~_umask())
        for name in plots.FIGURES:
            on_figure(name)
            plots.draw(name, result, building / f"{name}.png")
        text = json.dumps(report_dict(result), indent=2, allow_nan=False)
        (building / "report.json").write_text(text + "\n", encoding="utf-8")
        (building / "report.html").write_text(_html(result, building), encoding="utf-8")
        _put(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        _unfinished.remove(building)


_unfinished: list[Path] = []  # folders being built


def discard_unfinished() -> None:
    """Removes what `write` has not put in place: for a process about to end."""
    for building in _unfinished:
        shutil.rmtree(building, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _put(building: Path, folder: Path) -> None:
    """Move a folder into place in one step; afterwards `building` is gone or holds what was there."""
    with suppress(OSError):
        os.rename(building, folder)  # new, or empty
        return
    if not _exchange(building, folder):
        old = building.with_name(building.name + "-old")
        os.rename(folder, old)
        os.rename(building, folder)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically (Linux renameat2). False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def fate(network: NetworkCheck) -> str:
    """What the mean does far out, in one phrase."""
    if np.isinf(network.sup_norm.value):
        power = network.far_field[0].power
        return "grows without end, like |x|" + ("" if power == 1 else f"^{power:g}")
    if np.isfinite(network.bounds.rkhs):
        return f"never leaves ±{network.bounds.rkhs:.3g}, wherever you ask"
    return "settles, but no bound is certified"


def rows(result: CheckResult) -> list[tuple[str, list[str]]]:
    """The table both the page and the terminal show: (label, one text a network)."""
    networks = result.networks
    lines = [
        ("smallest eigenvalue of K", [_number(n.min_eigenvalue.value) for n in networks]),
        ("  certified lower bound", [_number(n.min_eigenvalue.lower) for n in networks]),
        ("C = sup Theta(x, x)", [_number(n.kernel_sup.value) for n in networks]),
        ("largest |mean| found", [_number(n.sup_norm.value) for n in networks]),
        ("  at", [_place(n.sup_norm) for n in networks]),
        ("bound: sqrt(C) |f|_H", [_number(n.bounds.rkhs) for n in networks]),
        ("bound: spectral", [_number(n.bounds.spectral) for n in networks]),
        ("bound: dataset", [_number(n.bounds.dataset) for n in networks]),
    ]
    if result.noise > 0:
        lines.insert(2, ("  with the noise", [_number(n.bounds.effective_eigenvalue) for n in networks]))
    ends = ("+x", "-x") if result.data.x.shape[1] == 1 else ("one end of the line", "the other end")
    for i, end in enumerate(ends):
        lines.append((f"far field, {end}", [_far(n.far_field[i]) for n in networks]))
    for width in (e.width for e in networks[0].empirical):
        lines.append((f"empirical NTK, width {width}", [_width(n, width) for n in networks]))
    lines.append(("neural-tangents, max difference", [_number(n.neural_tangents, none="not computed") for n in networks]))
    return lines


def _number(value: float | None, none: str = "-") -> str:
    if value is None:
        return none
    return "unbounded" if np.isinf(value) else f"{value:.4g}"


def _place(sup: nl.SupNorm) -> str:
    if sup.point is None:
        return "infinity"
    point = np.ravel(sup.point)
    return f"x = {point[0]:.4g}" if len(point) == 1 else f"|x| = {np.linalg.norm(point):.4g}"


def _far(side: FarLine) -> str:
    power = "" if side.power == 0 else " |x|" if side.power == 1 else f" |x|^{side.power:g}"
    return f"{side.coefficient:.4g}{power}"


def _width(network: NetworkCheck, width: int) -> str:
    found = next(e for e in network.empirical if e.width == width)
    return f"{100 * found.relative_error:.2f}% ± {100 * found.standard_error:.2f}%"


STYLE = """
:root { --ink:#1f2933; --grey:#616e7c; --line:#e4e7eb; --soft:#f5f7f9; --plain:#c8453b; --layer_norm:#11698e; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Arial, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 48px 24px 64px; }
h1 { font-size: 2.1rem; line-height: 1.15; letter-spacing: -.02em; margin: 0 0 8px; }
h2 { font-size: 1.2rem; margin: 52px 0 14px; letter-spacing: -.01em; }
p.lead { color: var(--grey); margin: 0 0 28px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 18px; margin-bottom: 28px; }
.card { background: var(--soft); border-top: 4px solid; border-radius: 4px; padding: 16px 20px 18px; }
.card b { display: block; font-size: .95rem; }
.card span { display: block; font-size: 1.25rem; line-height: 1.35; color: var(--ink); }
.card code { display: block; margin-top: 10px; color: var(--grey); font-size: .8rem; }
.plain { border-color: var(--plain); } .plain > b, th.plain { color: var(--plain); }
.layer_norm { border-color: var(--layer_norm); } .layer_norm > b, th.layer_norm { color: var(--layer_norm); }
figure { margin: 0 0 30px; } img { width: 100%; height: auto; display: block; }
figure.half img { max-width: 660px; }
figcaption { color: var(--grey); font-size: .9rem; margin-top: 4px; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th, td { text-align: right; padding: 7px 12px; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody td.sub { color: var(--grey); padding-left: 1.4em; }
details { border-bottom: 1px solid var(--line); padding: 12px 0; }
summary { cursor: pointer; padding-left: 5.6em; text-indent: -5.6em; }
summary i { font-style: normal; font-weight: 700; display: inline-block; width: 4.4em; text-indent: 0; }
i.holds { color: #187a4c; } i.fails { color: var(--plain); }
details table { margin: 8px 0 0 1.2em; width: calc(100% - 1.2em); }
details td { text-align: left; }
details td:last-child { width: 70%; overflow-wrap: anywhere; }
pre { background: var(--soft); border-radius: 4px; padding: 14px 18px; overflow-x: auto; font-size: .82rem; line-height: 1.45; }
footer { margin-top: 52px; color: var(--grey); font-size: .85rem; }
"""


def _html(result: CheckResult, folder: Path) -> str:
    data, escape = result.data, html.escape
    lead = (
        f"{len(data.y)} rows of {escape(data.source)}, {data.x.shape[1]} feature{'s' if data.x.shape[1] > 1 else ''}"
        f"{' (standardised)' if data.standardized else ''}, target {escape(data.target)}, noise {result.noise:g}. "
        "Infinitely wide networks, trained to convergence."
    )
    cards = "".join(
        f'<div class="card {n.name}"><b>{LABEL[n.name]}</b><span>The mean {escape(fate(n))}.</span>'
        f"<code>{escape(chain(n.network.to_config()))}</code></div>"
        for n in result.networks
    )
    figures = {name: _figure(name, caption, folder) for name, (_, caption) in plots.FIGURES.items()}
    hero = figures.pop("two_worlds")
    theorems = "".join(_theorem(name, check) for name, check in result.theorems)
    head = "".join(f'<th class="{n.name}">{LABEL[n.name]}</th>' for n in result.networks)
    body = "".join(
        f"<tr><td{' class=sub' if label.startswith(' ') else ''}>{escape(label)}</td>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for label, cells in rows(result)
    )
    configs = "".join(f"<h3>{LABEL[n.name]}</h3><pre>{escape(_network_file(n))}</pre>" for n in result.networks)
    made_by = "Made by " + ", ".join(f"{name} {version(name)}" for name in ("ntk_ln", "jax", "numpy"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>ntk-ln check: {escape(data.source)}</title>
<style>{STYLE}</style>
</head>
<body><main>
<h1>Far from the data, with and without LayerNorm</h1>
<p class="lead">{lead}</p>
<div class="cards">{cards}</div>
{hero}
<h2>Theorems</h2>
{theorems or "<p>No theorem applies to these networks.</p>"}
<h2>Numbers</h2>
<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>
<h2>Figures</h2>
{"".join(figures.values())}
<h2>Networks</h2>
{configs}
<footer>{made_by}. The same numbers are in report.json.</footer>
</main></body>
</html>
"""


def _network_file(network: NetworkCheck) -> str:
    """The network as JSON that --network reads, one layer a line."""
    return "[\n" + ",\n".join(" " + json.dumps(_plain(layer)) for layer in network.network.to_config()) + "\n]"


def _figure(name: str, caption: str, folder: Path) -> str:
    encoded = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
    half = ' class="half"' if name in ("diagonal", "widths") else ""
    return (
        f'<figure{half}><img alt="{html.escape(caption)}" src="data:image/png;base64,{encoded}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _theorem(network: str, check: nl.TheoremCheck) -> str:
    word = "holds" if check.holds else "fails"
    lines = "".join(
        f"<tr><td>{html.escape(str(key))}</td><td>{html.escape(json.dumps(_plain(value)))}</td></tr>"
        for key, value in check.evidence.items()
    )
    return (
        f'<details><summary><i class="{word}">{word}</i> Theorem {html.escape(check.name)}, {LABEL[network]}: '
        f"{html.escape(check.statement)}</summary><table>{lines}</table></details>"
    )


def chain(config: list[dict[str, Any]]) -> str:
    """A network's layers in one line: dense → layer_norm → relu → dense."""
    names = []
    for layer in config:
        if layer["layer"] == "residual":
            names.append(f"residual({chain(layer['body'])})")
        else:
            names.append(layer["name"] if layer["layer"] == "activation" else layer["layer"])
    return " → ".join(names)
