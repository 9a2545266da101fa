"""What the experiments share: settings, units of work that are kept when a run is stopped, and reports."""

import csv
import hashlib
import importlib.metadata
import json
import os
import platform
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats


@dataclass(frozen=True)
class Settings:
    """Where an experiment writes, and how much of it runs.

    Attributes:
        out: folder of all experiments; each has one of its own in it.
        quick: fewer seeds and steps, minutes rather than hours; the output says so.
        data: a file or folder of the user's, for experiments that need one.
        most_seeds: fewer seeds than the paper's, if not None; the output says so.
        announce: called with a line at each unit of work.
    """

    out: Path
    quick: bool = False
    data: Path | None = None
    most_seeds: int | None = None
    announce: Callable[[str], None] = lambda line: None

    def seeds(self, full: int) -> tuple[int, ...]:
        """The paper's number of seeds, `most_seeds` of them, two if quick."""
        most = 2 if self.quick else full
        return tuple(range(min(full, most if self.most_seeds is None else self.most_seeds)))

    def steps(self, full: int) -> int:
        """The paper's number of training steps, a tenth if quick."""
        return full // 10 if self.quick else full

    def kept(self, name: str, unit: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, np.ndarray]:
        """The arrays that `compute` gives for this unit of work, read from the folder where an earlier run has left them."""
        text = json.dumps(unit, sort_keys=True)
        path = self.out / name / "runs" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
        try:
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                return {key: file[key] for key in file.files if key != "unit"}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            pass  # not there, or half written by a process that was killed
        self.announce(f"{name}: {', '.join(f'{k} {v}' for k, v in unit.items() if not isinstance(v, list | dict))}")
        arrays = {key: np.asarray(value) for key, value in compute().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp.npz")
        everything: dict[str, Any] = {"unit": np.array(text), **arrays}
        np.savez(unfinished, **everything)
        unfinished.replace(path)
        return arrays


@dataclass(frozen=True)
class Row:
    """One number of a report.

    Attributes:
        what: what was measured, of which network.
        mean, low, high: over seeds, with the 95% interval of the mean; equal for numbers without seeds.
        seeds: how many; 0 for the infinitely wide network.
        published: the paper's number or statement, empty where it has none.
        agrees: whether the measurement agrees with it; None where there is nothing to compare.
        note: how the number is to be read.
    """

    what: str
    mean: float
    low: float
    high: float
    seeds: int
    published: str = ""
    agrees: bool | None = None
    note: str = ""


def over_seeds(what: str, values: Sequence[float] | np.ndarray, **rest: Any) -> Row:
    """A row of the mean over seeds and its 95% interval by Student's t."""
    values = np.asarray(values, np.float64)
    n, mean = len(values), float(values.mean())
    half = float(scipy.stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5) if n > 1 else float("nan")
    return Row(what, mean, mean - half, mean + half, n, **rest)


def exact(what: str, value: float, **rest: Any) -> Row:
    """A row of an infinitely wide network's number."""
    return Row(what, float(value), float(value), float(value), 0, **rest)


@dataclass(frozen=True)
class Report:
    """What an experiment found: rows, figures by name (`matplotlib.figure.Figure`), and how it was set up."""

    name: str
    title: str
    setting: dict[str, Any]
    rows: list[Row]
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether every row that has something to compare with agrees."""
        return all(row.agrees is not False for row in self.rows)

    def write(self, settings: Settings) -> Path:
        """Writes results.csv, results.json and the figures; returns their folder."""
        folder = settings.out / self.name
        folder.mkdir(parents=True, exist_ok=True)
        versions = {name: importlib.metadata.version(name) for name in ("ntk_ln", "jax", "numpy", "scipy")}
        document = {
            "experiment": self.name,
            "title": self.title,
            "quick": settings.quick,
            "most_seeds": settings.most_seeds,
            "setting": self.setting,
            "versions": {"python": platform.python_version(), **versions},
            "rows": [{key: _plain(value) for key, value in asdict(row).items()} for row in self.rows],
        }
        (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        with open(folder / "results.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(asdict(row) for row in self.rows)
        for name, figure in self.figures.items():
            figure.savefig(folder / f"{name}.png", dpi=130)
        return folder


def _plain(value: Any) -> Any:
    """A value as strict JSON has it: no NaN, no infinity."""
    return None if isinstance(value, float) and not np.isfinite(value) else value
