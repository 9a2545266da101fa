"""Table 1 and Figure 3: the UCI protein data, trained on small surface areas and tested on large ones."""

import hashlib
import lzma
import os
import urllib.request
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

import ntk_ln as nl
from ntk_ln.data import load_table
from ntk_ln.experiments import _networks as networks
from ntk_ln.experiments._run import Report, Row, Settings, over_seeds
from ntk_ln.experiments._shift import digest, infinite, infinite_rows, lowess, ordering, scores

TITLE = "Table 1: protein structure, larger surface areas than in training"
SEEDS, STEPS, SPLIT, SHARE, WIDTH = 10, 2500, 20_000.0, 0.9, 128
POSITIONS = ("none", "first", "last", "every")
LABELS = networks.LABELS | {"XGBoost": "XGBoost"}
PUBLISHED = {  # R^2 out of distribution, in distribution
    "every": (0.50, 0.60),
    "first": (0.50, 0.59),
    "last": (0.50, 0.60),
    "none": (0.31, 0.58),
    "XGBoost": (0.27, 0.61),
}
QUICK_ROWS = 4000
URL = "https://archive.ics.uci.edu/static/public/265/physicochemical+properties+of+protein+tertiary+structure.zip"
SHA256 = "4277cfcb4e91a181746cbc654f001b57951c9e6a80f4f795fdb5c807e0848f40"


def run(settings: Settings) -> Report:
    """Four networks and XGBoost, and the infinitely wide networks on the same rows."""
    x, y = load(settings)
    inside = np.flatnonzero(x[:, 0] < SPLIT)
    outside = np.flatnonzero(x[:, 0] >= SPLIT)
    seeds, steps = settings.seeds(SEEDS), settings.steps(STEPS)
    rows: list[Row] = []
    predictions: dict[str, np.ndarray] = {}
    outer: dict[str, np.ndarray] = {}
    for name in (*POSITIONS, "XGBoost"):
        label = LABELS[name]
        found = [_one(settings, name, seed, steps, x, y, inside, outside) for seed in seeds]
        predictions[label] = np.mean([f["outside"] for f in found], axis=0)
        outer[name] = np.array([float(f["r2_outside"]) for f in found])
        inner = [float(f["r2_inside"]) for f in found]
        for what, values, published in zip(("out of", "in"), (outer[name], inner), PUBLISHED[name], strict=True):
            rows.append(over_seeds(f"{label}: R^2 {what} distribution", values, published=f"{published:.2f}"))
    rows += ordering(outer, PUBLISHED, {name: LABELS[name] for name in POSITIONS})
    train, test = _split(settings, 0, inside)
    z = _standardised(x, train)
    for name in POSITIONS:
        found = infinite(settings, "protein", name, networks.network(name), z, y, train, test, outside)
        rows += infinite_rows(LABELS[name], found, "y")
    setting = {
        "training rows": int(_training_rows(settings, inside)),
        "in-distribution test rows": len(inside) - round(SHARE * len(inside)),
        "out-of-distribution rows": len(outside),
        "inputs": "standardised on the training rows; the target is raw for the networks, centred for the infinite ones",
        "optimizer": "Adam, 1e-3, full batch",
        "steps": steps,
        "seeds": len(seeds),
    }
    figure = _figure(predictions, x[outside, 0], y[outside])
    return Report("protein", TITLE, setting, rows, {"figure_3": figure})


def load(settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Features (45730, 9) with F1, the surface area, first, and the target RMSD; from --data or from UCI."""
    path = settings.data
    if path is None:
        path = settings.out / "protein" / "CASP.csv"
        if not path.is_file():
            _download(path, settings)
    table = load_table(path, "RMSD")
    if table.features != tuple(f"F{i}" for i in range(1, 10)):
        raise ValueError(f"{path.name!r} needs the columns RMSD, F1, ..., F9. Got {', '.join((table.target, *table.features))}.")
    return table.x, table.y


def _download(path: Path, settings: Settings) -> None:
    settings.announce(f"protein: downloading {URL}")
    try:
        with urllib.request.urlopen(URL, timeout=60) as answer:
            archive = answer.read()
        with zipfile.ZipFile(BytesIO(archive)) as file:
            content = file.read("CASP.csv")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"The protein data cannot be downloaded from UCI ({error}). Pass --data CASP.csv (or .csv.xz).") from None
    check_content(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def check_content(content: bytes) -> None:
    """Raises unless these are the bytes of UCI's CASP.csv, perhaps compressed by xz."""
    if content[:6] == b"\xfd7zXZ\x00":
        content = lzma.decompress(content)
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise ValueError(f"The protein data needs sha256 {SHA256}. Got {found}: the file has changed or is damaged.")


def _training_rows(settings: Settings, inside: np.ndarray) -> int:
    return min(QUICK_ROWS, len(inside)) if settings.quick else round(SHARE * len(inside))


def _split(settings: Settings, seed: int, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(inside)
    held = len(inside) - round(SHARE * len(inside))
    return order[held:][: _training_rows(settings, inside)], order[:held]


def _standardised(x: np.ndarray, train: np.ndarray) -> np.ndarray:
    return (x - x[train].mean(axis=0)) / x[train].std(axis=0)


def _one(settings, name: str, seed: int, steps: int, x, y, inside, outside) -> dict[str, np.ndarray]:
    train, test = _split(settings, seed, inside)
    unit = {"network": name, "seed": seed, "steps": steps if name != "XGBoost" else 100, "rows": len(train), "data": digest(x, y)}
    z = _standardised(x, train)

    def compute() -> dict[str, Any]:
        if name == "XGBoost":
            return scores(_boosted(z[train], y[train], z, seed), y, test, outside)
        checkpoint = settings.out / "protein" / "runs" / f"{name}-{seed}-{steps}-{len(train)}.checkpoint"
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        net = networks.network(name)
        training = nl.train(net, z[train], y[train], width=WIDTH, seeds=[seed], steps=steps, checkpoint=checkpoint)
        found = scores(lambda rows: training.apply(z[rows])[0], y, test, outside)
        checkpoint.unlink(missing_ok=True)
        return found

    return settings.kept("protein", unit, compute)


def _boosted(x: np.ndarray, y: np.ndarray, z: np.ndarray, seed: int) -> Any:
    try:
        import xgboost
    except ImportError:
        raise ImportError("The protein experiment needs XGBoost: pip install 'ntk_ln[experiments]'.") from None
    model = xgboost.XGBRegressor(n_estimators=100, random_state=seed, n_jobs=os.cpu_count()).fit(x, y)
    return lambda rows: model.predict(z[rows]).astype(np.float64)


def _figure(predictions: dict[str, np.ndarray], area: np.ndarray, y: np.ndarray) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = {LABELS[name]: networks.COLORS[name] for name in POSITIONS} | {LABELS["XGBoost"]: "0.4"}
    bins = np.linspace(min(y.min(), -5), max(y.max(), 40), 60)
    left.hist(y, bins, density=True, color="0.88", label="labels")
    for label, values in predictions.items():
        left.hist(np.clip(values, bins[0], bins[-1]), bins, density=True, histtype="step", color=colors[label], label=label)
    left.set(xlabel="prediction out of distribution", ylabel="density")
    for label, values in {"labels": y, **predictions}.items():
        curve = lowess(values, area)
        right.plot(*curve.T, color=colors.get(label, "black"), ls="--" if label == "labels" else "-", label=label)
    right.set(xlabel="surface area F1", ylabel="LOWESS of the prediction")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7)
    return figure
