"""What the experiments on tables share: scores in and out of distribution, the infinitely wide network, LOWESS."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

import ntk_ln as nl
from ntk_ln.experiments._run import Row, Settings, exact, over_seeds

NOISE = 1e-2  # of the infinite networks, times the mean of the kernel's diagonal


def r2(predicted: np.ndarray, y: np.ndarray) -> float:
    """1 - sum of squared errors / sum of squares about the mean of these labels."""
    return float(1 - ((y - predicted) ** 2).sum() / ((y - y.mean()) ** 2).sum())


def scores(predict: Callable[[np.ndarray], np.ndarray], y: np.ndarray, test: np.ndarray, outside: np.ndarray) -> dict[str, Any]:
    """R^2 on both sets of rows, and the predictions out of distribution."""
    far = predict(outside)
    return {"r2_outside": r2(far, y[outside]), "r2_inside": r2(predict(test), y[test]), "outside": far}


def digest(*arrays: np.ndarray) -> str:
    """A few digits that tell one data set from another."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()[:16]


def infinite(settings: Settings, name: str, position: str, net: nl.Network, x, y, train, test, outside) -> dict[str, np.ndarray]:
    """Scores of the NTK posterior on the training rows, labels centred, with its largest prediction and its bound."""
    unit = {"network": position, "infinitely wide": True, "rows": len(train), "noise": NOISE, "data": digest(x[train], y[train])}

    def compute() -> dict[str, Any]:
        kernel, mean = nl.NTK(net), y[train].mean()
        noise = NOISE * float(kernel.diag(x[train]).mean())
        p = nl.posterior(kernel, x[train], y[train] - mean, noise=noise)
        found = scores(lambda rows: p.mean(x[rows]) + mean, y, test, outside)
        direction = x[outside].mean(axis=0)
        field = nl.far_field(p, direction)
        return found | {
            "rows": len(train),
            "bound": float(np.sqrt(nl.kernel_sup(kernel).value)) * p.rkhs_norm,
            "largest": float(np.abs(found["outside"] - mean).max()),
            "power": float(field.power),
            "coefficient": float(field.coefficient),
        }

    return settings.kept(name, unit, compute)


def infinite_rows(label: str, f: dict[str, np.ndarray], y: str) -> list[Row]:
    """What `infinite` found, in rows."""
    where, note = f"{label}, infinitely wide", f"{int(f['rows'])} rows, noise {NOISE:g} of the mean diagonal"
    bound, largest = float(f["bound"]), float(f["largest"])
    far = f"along the mean input out of distribution, f - mean of {y} -> coefficient r^{float(f['power']):g}"
    return [
        exact(f"{where}: R^2 out of distribution", float(f["r2_outside"]), note=note),
        exact(f"{where}: R^2 in distribution", float(f["r2_inside"]), note=note),
        exact(
            f"{where}: largest |f - mean of {y}| out of distribution", largest, agrees=largest <= bound, note="at most the bound"
        ),
        exact(f"{where}: bound of |f - mean of {y}| (rkhs)", bound, note=note if np.isfinite(bound) else "no LayerNorm, no bound"),
        exact(f"{where}: far field, coefficient", float(f["coefficient"]), note=far),
    ]


def ordering(found: dict[str, np.ndarray], published: dict[str, tuple[float, float]], labels: dict[str, str]) -> list[Row]:
    """Whether networks with a LayerNorm do better out of distribution than the one without, as published."""
    return [
        over_seeds(
            f"{labels[name]} minus {labels['none']}: R^2 out of distribution",
            values - found["none"],
            published=f"{published[name][0] - published['none'][0]:+.2f}",
            agrees=bool((np.mean(values - found["none"]) > 0) == (published[name][0] > published["none"][0])),
            note="seed by seed; agrees in sign",
        )
        for name, values in found.items()
        if name in labels and name != "none"
    ]


def lowess(values: np.ndarray, against: np.ndarray) -> np.ndarray:
    """Locally weighted regression: (n, 2), sorted by `against`."""
    try:
        from statsmodels.nonparametric.smoothers_lowess import lowess as smooth
    except ImportError:
        raise ImportError("Figures 3 and 4 need statsmodels: pip install 'ntk_ln[experiments]'.") from None
    return smooth(values, against)
