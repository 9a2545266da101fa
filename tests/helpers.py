"""What the tests share: one way to judge accuracy, and the reference tables."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import ntk_ln as nl

REFERENCE = Path(__file__).parent / "reference"
QUADRATURE = ("tanh", "silu", "softplus", "elu")


def slow(*values: Any, id: str | None = None) -> Any:
    """A parameter of the slow run only."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def assert_accurate(got: Any, want: Any, *, scale: Any, tol: Any, what: str | Sequence[str]) -> float:
    """Asserts |got - want| <= tol * scale at every point, and shows the worst one where that fails.

    The worst is the one furthest past its own tolerance.

    Args:
        got, want: arrays of one shape, or numbers.
        scale: what errors are relative to, broadcast against `want`; where it is 0, `got` must be exact.
        tol: the largest error allowed, as a share of `scale`; one number, or one for every point.
        what: what is compared, or one label for every point.

    Returns:
        The largest error, as a share of `scale`.
    """
    got, want = (np.asarray(v, np.float64) for v in (got, want))
    assert got.shape == want.shape, f"{what}: got shape {got.shape}, wanted {want.shape}"
    if not want.size:
        return 0.0
    scale, tol = (np.broadcast_to(np.asarray(v, np.float64), want.shape) for v in (scale, tol))
    assert (scale >= 0).all(), f"{what}: a scale is negative or not a number"
    assert (tol > 0).all(), f"{what}: a tolerance is not positive"
    off = np.where(got == want, 0, np.abs(got - want))
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(off == 0, 0, off / scale)
    error = np.where(np.isnan(error), np.inf, error)  # NaN, or infinity where a number is wanted
    worst = np.unravel_index(np.argmax(error / tol), error.shape)
    label = what if isinstance(what, str) else np.reshape(np.asarray(what, object), want.shape)[worst]
    assert error[worst] <= tol[worst], (
        f"{label}: worst of {want.size} points at {tuple(map(int, worst))}: got {got[worst]!r}, wanted {want[worst]!r}, "
        f"error {error[worst]:.2e} of scale {scale[worst]:.3e} = {error[worst] / tol[worst]:.3g} x the tolerance "
        f"{tol[worst]:.1e}"
    )
    return float(error.max())


class KernelCase(NamedTuple):
    """One pair of inputs.

    The scales are sqrt(k(x, x) k(x', x')); the conditions say how far a kernel moves, in units of its scale, when the inputs
    move by a relative 1.
    """

    id: str
    network: list[dict[str, Any]]
    x1: np.ndarray
    x2: np.ndarray
    nngp: float
    ntk: float
    nngp_scale: float
    ntk_scale: float
    nngp_condition: float
    ntk_condition: float


class FarFieldCase(NamedTuple):
    direction: np.ndarray
    power: float
    coefficient: float


class PosteriorCase(NamedTuple):
    """One training set; the last five are None where the case does not have them."""

    id: str
    network: list[dict[str, Any]]
    x_train: np.ndarray
    y_train: np.ndarray
    noise: float
    x_test: np.ndarray
    mean: np.ndarray
    min_eigenvalue: float
    max_eigenvalue: float
    rkhs_norm: float
    far_field: FarFieldCase | None = None
    kernel_sup: float | None = None
    bound_rkhs: float | None = None
    bound_spectral: float | None = None
    bound_dataset: float | None = None


@cache
def load_cases(table: str) -> tuple[Any, ...]:
    """The cases of `reference/<table>.json`: kernels, extra, kernels_float32 or posteriors. Values are rounded to float64."""
    case_type = PosteriorCase if table == "posteriors" else KernelCase
    cases = json.loads((REFERENCE / f"{table}.json").read_text())["cases"]
    return tuple(case_type(**{name: _parsed(name, value) for name, value in case.items()}) for case in cases)


def _parsed(name: str, value: Any) -> Any:
    if name in ("id", "network"):
        return value
    if name == "far_field":
        return FarFieldCase(**{key: _parsed(key, inner) for key, inner in value.items()})
    return np.array(value, np.float64) if isinstance(value, list) else float(value)


def network_covered(config: list[dict[str, Any]]) -> bool:
    """Whether the package has every layer of a network."""
    try:
        nl.network_from_config(config)
    except (ValueError, NotImplementedError):
        return False
    return True


def uses_quadrature(config: list[dict[str, Any]]) -> bool:
    """Whether an activation of the network has no closed form."""
    return any(layer.get("name") in QUADRATURE or uses_quadrature(layer.get("body", [])) for layer in config)


# --- Posteriors ----------------------------------------------------------------------------------------------------------

KERNEL = nl.NTK(nl.mlp(1))
NO_BIAS = nl.NTK(nl.mlp(1, b_std=0.0, b_out=0.0))


class Plain:
    """A kernel with the protocol and nothing else: whatever Gram matrix it is told, or a squared exponential."""

    def __init__(self, gram=None):
        self.fixed = gram

    def __call__(self, x1, x2=None):
        if self.fixed is not None:
            return self.fixed
        x2 = x1 if x2 is None else x2
        return np.exp(-((x1[:, None, :] - x2[None, :, :]) ** 2).sum(axis=2))

    def diag(self, x):
        return np.ones(len(x))
