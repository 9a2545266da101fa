"""The computation behind `ntk-ln check`: a network beside its counterpart, on one data set.

Nothing is read or written here; `ntk_ln.report` and `ntk_ln.plots` show the result.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

import ntk_ln as nl
from ntk_ln.data import Dataset
from ntk_ln.far_field import check_far
from ntk_ln.theorems import theorem_3_1, theorem_3_3

WIDTHS = (128, 256, 512, 1024)
SEEDS = 16
EMPIRICAL_ROWS = 20
PEER_ROWS = 100
TRAINING_DIRECTIONS = 4
SHARED = range(80, 401, 2)  # as many heat map points as rows, if they are in here: the compiled kernel then serves both

Fitted = dict[str, tuple[nl.Network, nl.Posterior]]


@dataclass(frozen=True)
class Ray:
    """The line `t * direction` and the positions t where it is sampled."""

    direction: np.ndarray
    rows: np.ndarray  # t of each training row (its projection where d > 1)
    extent: float  # the largest |t| of a row
    near: np.ndarray
    far: np.ndarray
    grid: np.ndarray
    reach: float  # the largest |x| of a row
    radii: np.ndarray

    def points(self, t: np.ndarray) -> np.ndarray:
        """Inputs (m, d) at the positions `t` (m,)."""
        return t[:, None] * self.direction


@dataclass(frozen=True)
class Curves:
    """What the figures draw of one network: its mean and its kernel along the ray."""

    near: np.ndarray
    far: np.ndarray
    diagonal: np.ndarray
    gram: np.ndarray


@dataclass(frozen=True)
class FarLine:
    """The mean at distance r along one direction: r^power (coefficient + correction r^-correction_power + ...)."""

    direction: np.ndarray
    power: float
    coefficient: float
    correction: float
    correction_power: float

    def predict(self, r: np.ndarray) -> np.ndarray:
        """The two leading terms at distances `r`."""
        return r**self.power * (self.coefficient + self.correction / r**self.correction_power)


@dataclass(frozen=True)
class WidthError:
    """Relative Frobenius error of the empirical kernel at one width: mean and standard error over seeds."""

    width: int
    relative_error: float
    standard_error: float


@dataclass(frozen=True)
class NetworkCheck:
    """All numbers of one network. `far_field` starts with the two ends of the ray."""

    name: str
    network: nl.Network
    min_eigenvalue: nl.MinEigenvalue
    kernel_sup: nl.KernelSup
    bounds: nl.SupNormBound
    sup_norm: nl.SupNorm
    far_field: tuple[FarLine, ...]
    neural_tangents: float | None
    empirical: tuple[WidthError, ...]
    theorems: tuple[nl.TheoremCheck, ...]  # those that apply
    curves: Curves


@dataclass(frozen=True)
class CheckResult:
    """The plain network first, then the one with LayerNorm."""

    data: Dataset
    noise: float
    ray: Ray
    networks: tuple[NetworkCheck, NetworkCheck]

    @property
    def theorems(self) -> list[tuple[str, nl.TheoremCheck]]:
        """The theorems that apply, each with its network's name."""
        return [(network.name, check) for network in self.networks for check in network.theorems]

    @property
    def holds(self) -> bool:
        """Whether every theorem that applies holds."""
        return all(check.holds for _, check in self.theorems)


def counterparts(network: nl.Network) -> tuple[nl.Network, nl.Network]:
    """The plain network and the one with norms, given either.

    A network with norms is stripped of them; one without gets a LayerNorm before its first activation (before the Residual that
    has it in its body, since a norm in a branch bounds nothing).

    >>> plain, normed = counterparts(nl.mlp(1))
    >>> [type(layer).__name__ for layer in normed.layers]
    ['Dense', 'LayerNorm', 'Activation', 'Dense']
    """
    layers = network.layers
    if network.has_norm:
        return nl.Network(*_stripped(layers)), network
    first = next((i for i, layer in enumerate(layers) if _has_activation(layer)), None)
    if first is None:
        raise ValueError("`counterparts(network)` puts a LayerNorm before the first activation. Got no activation; add one.")
    return network, nl.Network(*layers[:first], nl.LayerNorm(), *layers[first:])


def _stripped(layers: Sequence[nl.AbstractLayer]) -> Iterator[nl.AbstractLayer]:
    for layer in layers:
        if isinstance(layer, nl.Residual):
            yield nl.Residual(*_stripped(layer.body))
        elif not isinstance(layer, nl.LayerNorm | nl.RMSNorm):
            yield layer


def _has_activation(layer: nl.AbstractLayer) -> bool:
    return isinstance(layer, nl.Activation) or (isinstance(layer, nl.Residual) and any(map(_has_activation, layer.body)))


def fit(data: Dataset, network: nl.Network, noise: float = 0.0) -> Fitted:
    """Both networks and their posteriors, under the names "plain" and "layer_norm".

    Raises:
        ValueError: a network without an infinite-width kernel for these inputs, or (sin, cos) without a far limit; rows that
            contradict each other without noise.
    """
    named = dict(zip(("plain", "layer_norm"), counterparts(network), strict=True))
    for net in named.values():
        check_far(nl.NTK(net), "ntk-ln check")
    return {name: (net, nl.posterior(nl.NTK(net), data.x, data.y, noise=noise)) for name, net in named.items()}


STEPS = 14  # calls of `on_step` in `check`: seven a network


def check(data: Dataset, fitted: Fitted, noise: float = 0.0, on_step: Callable[[str], None] = lambda step: None) -> CheckResult:
    """Every number and curve of the report.

    Args:
        data: what the posteriors were fitted to.
        fitted: from `fit` with the same `noise`.
        noise: variance of the observation noise.
        on_step: called with a few words before each of the `STEPS` steps, from two threads.
    """
    ray = make_ray(data.x)

    def run(name: str) -> NetworkCheck:
        return _check_network(name, *fitted[name], data.x, ray, on_step)

    with ThreadPoolExecutor(2) as pool:  # most of the time goes into compiling, which runs beside Python
        plain, normed = pool.map(run, ("plain", "layer_norm"))
    return CheckResult(data, noise, ray, (plain, normed))


def _check_network(
    name: str, network: nl.Network, p: nl.Posterior, x: np.ndarray, ray: Ray, on_step: Callable[[str], None]
) -> NetworkCheck:
    on_step(f"{name}: bounds")
    bounds, kernel_sup = nl.sup_norm_bound(p), nl.kernel_sup(p.kernel)
    on_step(f"{name}: largest mean")
    sup_norm = nl.sup_norm(p)
    on_step(f"{name}: far field")
    far_field = _far_lines(p, x, ray.direction)
    on_step(f"{name}: curves")
    means = p.mean(ray.points(np.concatenate([ray.near, ray.far])))  # one call: each shape compiles anew
    curves = Curves(
        near=means[: len(ray.near)],
        far=means[len(ray.near) :],
        diagonal=p.kernel.diag(ray.points(ray.radii)),
        gram=p.kernel(ray.points(ray.grid)),
    )
    gram = np.asarray(p.gram)
    on_step(f"{name}: finite widths")
    kept = _spread(len(x), EMPIRICAL_ROWS)
    empirical = _width_errors(network, x[kept], gram[np.ix_(kept, kept)])
    on_step(f"{name}: neural-tangents")
    kept = _spread(len(x), PEER_ROWS)
    peer = _peer_difference(network, x[kept], gram[np.ix_(kept, kept)])
    on_step(f"{name}: theorems")
    checks = (theorem_3_1(p), nl.check_theorem_3_2(network), theorem_3_3(p, sup_norm))
    return NetworkCheck(
        name=name,
        network=network,
        min_eigenvalue=p.min_eigenvalue,
        kernel_sup=kernel_sup,
        bounds=bounds,
        sup_norm=sup_norm,
        far_field=far_field,
        neural_tangents=peer,
        empirical=empirical,
        theorems=tuple(check for check in checks if check.applies),
        curves=curves,
    )


def make_ray(x: np.ndarray) -> Ray:
    """The line the figures follow: the axis itself for one feature, else from the origin through the row farthest from the mean."""
    d = x.shape[1]
    direction = np.ones(d) / np.sqrt(d)
    size = float(np.abs(x).max()) or 1.0  # the squares of the raw values may overflow
    unit = x / size
    if d > 1 and x.any():
        distance = np.linalg.norm(unit - unit.mean(axis=0), axis=1)
        row = unit[np.where(x.any(axis=1), distance, -1.0).argmax()]
        direction = row / np.linalg.norm(row)
    rows = x @ direction
    extent = float(np.abs(rows).max()) or 1.0
    middle, span = (rows.min() + rows.max()) / 2, float(np.ptp(rows)) or extent
    end = 10.0 ** (np.floor(np.log10(extent)) + 4)
    side = np.geomspace(extent, end, 150)
    # Even counts below: they step over x = 0, where a norm layer without a bias before it is 0/0.
    reach = size * float(np.linalg.norm(unit, axis=1).max()) or 1.0
    return Ray(
        direction=direction,
        rows=rows,
        extent=extent,
        near=np.linspace(middle - 2 * span, middle + 2 * span, 400),
        far=np.concatenate([-side[::-1], np.linspace(-extent, extent, 202)[1:-1], side]),
        grid=np.linspace(-8 * extent, 8 * extent, len(x) if len(x) in SHARED else 200),
        reach=reach,
        radii=10.0 ** (np.floor(np.log10(reach)) + np.linspace(-2, 4, 121)),
    )


def _far_lines(p: nl.Posterior, x: np.ndarray, direction: np.ndarray) -> tuple[FarLine, ...]:
    """Both ends of the ray, then training rows whose directions are far apart."""
    directions = [direction, -direction]
    norms = np.linalg.norm(x, axis=1)
    units = x[norms > 0] / norms[norms > 0, None]
    for _ in range(TRAINING_DIRECTIONS if x.shape[1] > 1 else 0):
        nearest = np.max(units @ np.array(directions).T, axis=1, initial=-1.0)
        if len(units) == 0 or nearest.min() > 1 - 1e-9:
            break
        directions.append(units[nearest.argmin()])
    found = [nl.far_field(p, v) for v in directions]
    return tuple(
        FarLine(v, float(f.power), float(f.coefficient), float(f.correction), float(f.correction_power))
        for v, f in zip(directions, found, strict=True)
    )


def _spread(n: int, most: int) -> np.ndarray:
    """At most `most` of n rows, evenly through the file."""
    return np.unique(np.linspace(0, n - 1, min(most, n)).round().astype(int))


def _width_errors(network: nl.Network, x: np.ndarray, exact: np.ndarray) -> tuple[WidthError, ...]:
    """Errors at `WIDTHS` from the same draws: each narrower network is a corner of the widest, so that JAX compiles one `init`."""

    def init(seed: int, width: int) -> Any:
        return network.init(jax.random.key(seed), in_features=x.shape[1], width=width)

    shapes = [jax.eval_shape(partial(init, 0, width)) for width in WIDTHS]
    relative = np.empty((len(WIDTHS), SEEDS))
    for seed in range(SEEDS):
        widest = init(seed, max(WIDTHS))
        for i, shape in enumerate(shapes):
            params = jax.tree.map(lambda full, part: np.asarray(full)[tuple(map(slice, part.shape))], widest, shape)
            relative[i, seed] = np.linalg.norm(nl.EmpiricalNTK(network, params)(x) - exact) / np.linalg.norm(exact)
    means, errors = relative.mean(axis=1), relative.std(axis=1, ddof=1) / np.sqrt(SEEDS)
    return tuple(map(WidthError, WIDTHS, means.tolist(), errors.tolist()))


def _peer_difference(network: nl.Network, x: np.ndarray, ours: np.ndarray) -> float | None:
    """Largest difference from neural-tangents over sqrt(Theta(x,x) Theta(x',x')); None where it is missing or lacks the case."""
    try:
        theirs = nl.NeuralTangentsKernel(network)(x)
    except (ImportError, NotImplementedError):
        return None
    scale = np.sqrt(np.diag(ours))
    return float(np.max(np.abs(theirs - ours) / (scale[:, None] * scale)))
