"""How fast finite networks approach the infinite one: their kernels at random parameters, and trained networks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy

from ntk_ln._dtype import check_finite, check_rows, check_whole
from ntk_ln._posterior_inputs import check_labels
from ntk_ln.ensemble import ensemble
from ntk_ln.finite.training import check_outputs, check_rate, own_rate, train
from ntk_ln.kernels import NTK, EmpiricalNTK
from ntk_ln.network import Network, check_network
from ntk_ln.posterior import posterior

CALL = "width_study(net, x, y, ...)"
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
TRAINED_TO = 1024  # wider networks are not trained unless asked for
RESAMPLES = 2000  # of the seeds, for the exponents' intervals


class Estimate(NamedTuple):
    """A mean with its 95% confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False, repr=False)
class WidthStudy:
    """What `width_study` gives. Rows of arrays are widths, columns seeds.

    Attributes:
        widths: of the kernels.
        kernel_errors: |Theta_w - Theta|/|Theta| in the Frobenius norm at random parameters.
        trained_widths: of the trained networks.
        stop_time: steps times learning_rate of the training, and of the posterior beside it.
        learning_rate: of its gradient descent.
        points: where predictions are compared, (m, d).
        change_errors: of f_t - f_0, relative in the 2-norm over `points`, from the infinite network's change from the same f_0:
            Theta(x, X) S (y - f_0(X)).
        outputs: f_t at `points`, (widths, seeds, m).
        mean: the posterior's mean at `points`, (m,).
        deviation: the ensemble's standard deviation at `points`, (m,).
        kernel_changes: |Theta_t - Theta_0|/|Theta_0| over the training rows.
    """

    widths: np.ndarray
    kernel_errors: np.ndarray
    trained_widths: np.ndarray
    stop_time: float
    learning_rate: float
    points: np.ndarray
    change_errors: np.ndarray
    outputs: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    kernel_changes: np.ndarray

    @property
    def kernel_exponent(self) -> Estimate:
        """The power of the width in the kernel's error: -1/2 by theory."""
        return _exponent(self.widths, self.kernel_errors)

    @property
    def change_exponent(self) -> Estimate:
        """The power of the width in the error of f_t - f_0."""
        return _exponent(self.trained_widths, self.change_errors)

    @property
    def kernel_change_exponent(self) -> Estimate:
        """The power of the width in the change of the kernel during training."""
        return _exponent(self.trained_widths, self.kernel_changes)

    @property
    def mean_errors(self) -> np.ndarray:
        """Of the mean over seeds from the posterior's, over its norm: at most about `mean_noise` where nothing else is wrong."""
        return _norm(self.outputs.mean(axis=1) - self.mean) / _norm(self.mean)

    @property
    def mean_noise(self) -> np.ndarray:
        """What so few seeds leave of their spread in `mean_errors`."""
        return _norm(self.outputs.std(axis=1, ddof=1)) / self.outputs.shape[1] ** 0.5 / _norm(self.mean)

    @property
    def spread_ratios(self) -> np.ndarray:
        """The spread over seeds over the ensemble's, in root mean square over `points`."""
        return _norm(self.outputs.std(axis=1, ddof=1)) / _norm(self.deviation)

    @property
    def largest_ratios(self) -> np.ndarray:
        """The largest |mean over seeds| at `points` over the posterior's."""
        return np.abs(self.outputs.mean(axis=1)).max(axis=1) / np.abs(self.mean).max()

    def figure(self) -> Any:
        """A `matplotlib.figure.Figure`: errors against width with their intervals and a width^(-1/2) line, and the ratios."""
        from ntk_ln.finite.figure import width_figure  # matplotlib only where it is asked for

        return width_figure(self)

    def table(self) -> list[dict[str, float]]:
        """One dictionary a width, of plain numbers: what the figure shows, as far as that width has it."""
        rows = []
        for width in np.union1d(self.widths, self.trained_widths):
            row = {"width": int(width)}
            for i in np.flatnonzero(self.widths == width):
                row |= _named("kernel_error", interval(self.kernel_errors[i]))
            for j in np.flatnonzero(self.trained_widths == width):
                row |= _named("change_error", interval(self.change_errors[j]))
                row |= _named("kernel_change", interval(self.kernel_changes[j]))
                for name in ("mean_errors", "mean_noise", "spread_ratios", "largest_ratios"):
                    row[name.removesuffix("s")] = float(getattr(self, name)[j])
            rows.append(row)
        return rows


def width_study(
    net: Network,
    x: Any,
    y: Any,
    *,
    widths: Sequence[int] = WIDTHS,
    trained_widths: Sequence[int] | None = None,
    seeds: int = 10,
    steps: int = 30,
    learning_rate: float | None = None,
    points: Any = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> WidthStudy:
    r"""Errors of finite networks against width: of their kernels, and after training of their outputs.

    Networks are trained by `steps` steps of full-batch gradient descent and compared with the posterior at the same `stop_time`,
    not at convergence: f_t - f_0 of each with the infinite network's change from the same f_0, the mean over seeds with the
    posterior's mean, the spread with the `ensemble`'s. The theory says width^(-1/2) for the kernel, and for training as long as the
    kernel's change is small beside the eigenvalues that have been learnt by then.

    Args:
        net: a network with an infinite-width kernel.
        x: (n, d).
        y: (n,), one output.
        widths: of the kernels at random parameters, at least two.
        trained_widths: of the trained networks; those of `widths` up to 1024 by default.
        seeds: networks of each width, at least 2.
        steps: of gradient descent.
        learning_rate: 1/lambda_max of the infinite network's Gram matrix by default.
        points: (m, d), where outputs are compared; by default the rows of x, and the same three times as far from their mean.
        on_step: called with a few words before each width.

    Returns:
        `WidthStudy`.

    Raises:
        ValueError: fewer than two widths or seeds; as `train` and `posterior`.

    References:
        Lee et al. (2019), section 3 and figure 2; Ziomek, Whittle, Osborne (2025), experiments on width.

    >>> import numpy as np
    >>> import ntk_ln as nl
    >>> x = np.linspace(-1, 1, 4)[:, None]
    >>> study = nl.width_study(nl.mlp(1), x, x[:, 0], widths=(8, 32), trained_widths=(32,), seeds=3, steps=2)
    >>> study.kernel_errors.shape, study.outputs.shape
    ((2, 3), (1, 3, 8))
    """
    check_network(net, CALL)
    x = np.asarray(check_rows(x, CALL), np.float64)
    y = np.asarray(check_labels(y, x, CALL), np.float64)
    if y.ndim != 1:
        raise ValueError(f"`{CALL}` needs `y` of shape (n,), one output. Got x.shape={x.shape}, y.shape={y.shape}.")
    check_finite(y, CALL, "y")
    if not y.any():
        raise ValueError(f"`{CALL}` needs labels that are not all 0: errors are relative to what they make of the network.")
    widths = _check_widths(widths, "widths", 2)
    trained = _check_widths(
        [w for w in widths if w <= TRAINED_TO] if trained_widths is None else trained_widths, "trained_widths", 1
    )
    check_outputs(net, CALL, x.shape[1], widths[-1], 1)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 2:
        raise ValueError(f"`{CALL}` needs at least 2 seeds, or there is no spread. Got {seeds!r}.")
    check_whole(steps, CALL, "steps", 1)
    points = np.concatenate([x, x + 2 * (x - x.mean(axis=0))]) if points is None else np.asarray(check_rows(points, CALL, "points"))
    if points.shape[1] != x.shape[1]:
        raise ValueError(f"`{CALL}` needs `points` of shape (m, {x.shape[1]}), as `x` has it. Got shape {points.shape}.")
    exact = np.asarray(NTK(net)(x))
    if learning_rate is None:
        learning_rate = own_rate(float(np.linalg.eigvalsh(exact)[-1]), CALL)
    learning_rate = check_rate(learning_rate, CALL)
    kernel_errors = np.empty((len(widths), seeds))
    for i, width in enumerate(widths):
        on_step(f"kernels of width {width}")
        for seed in range(seeds):
            params = net.init(jax.random.key(seed), in_features=x.shape[1], width=width)
            kernel_errors[i, seed] = _distance(EmpiricalNTK(net, params)(x), exact)

    stop_time = steps * learning_rate
    limit = ensemble(net, x, y, stop_time=stop_time, step_size=learning_rate)
    outputs = np.empty((len(trained), seeds, len(points)))
    change_errors, kernel_changes = np.empty((2, len(trained), seeds))
    for i, width in enumerate(trained):
        on_step(f"training at width {width}")
        training = train(
            net, x, y, width=width, seeds=seeds, steps=steps, optimizer="gradient_descent", learning_rate=learning_rate
        )
        outputs[i] = training.apply(points)
        start = training.apply(x, initial=True).astype(np.float64)
        infinite = posterior(NTK(net), x, y[:, None] - start.T, stop_time=stop_time, step_size=learning_rate)
        predicted = infinite.mean(points).T
        changes = outputs[i] - training.apply(points, initial=True)
        change_errors[i] = _norm(changes - predicted) / _norm(predicted)
        for seed in range(seeds):
            before, after = (EmpiricalNTK(net, training.network_params(seed, initial=initial))(x) for initial in (True, False))
            kernel_changes[i, seed] = _distance(after, before)
    return WidthStudy(
        widths=np.array(widths),
        kernel_errors=kernel_errors,
        trained_widths=np.array(trained),
        stop_time=stop_time,
        learning_rate=learning_rate,
        points=points,
        change_errors=change_errors,
        outputs=outputs,
        mean=limit.mean(points),
        deviation=np.sqrt(limit.variance(points)),
        kernel_changes=kernel_changes,
    )


def interval(values: np.ndarray) -> Estimate:
    """The mean over seeds and its 95% interval (Student's t)."""
    mean = float(values.mean())
    half = float(scipy.special.stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / len(values) ** 0.5)
    return Estimate(mean, mean - half, mean + half)


def _exponent(widths: np.ndarray, errors: np.ndarray) -> Estimate:
    """The slope of log mean error against log width, and its 95% interval from resampled seeds; NaN of a single width."""
    if len(widths) < 2:
        return Estimate(np.nan, np.nan, np.nan)
    rng, seeds = np.random.default_rng(0), errors.shape[1]
    columns = rng.integers(seeds, size=(RESAMPLES, len(widths), seeds))
    resampled = np.take_along_axis(np.broadcast_to(errors, columns.shape), columns, axis=2).mean(axis=2)
    slopes = np.polyfit(np.log(widths), np.log(resampled).T, 1)[0]
    slope = float(np.polyfit(np.log(widths), np.log(errors.mean(axis=1)), 1)[0])
    return Estimate(slope, *(float(q) for q in np.quantile(slopes, (0.025, 0.975))))


def _check_widths(widths: Any, name: str, least: int) -> list[int]:
    numbers = list(widths) if isinstance(widths, Sequence | range | np.ndarray) else []
    if (
        len(numbers) < least
        or any(not isinstance(w, int | np.integer) or w < 1 for w in numbers)
        or sorted(set(numbers)) != numbers
    ):
        raise ValueError(f"`{CALL}` needs {name} of at least {least} whole numbers >= 1, ascending. Got {widths!r}.")
    return [int(w) for w in numbers]


def _distance(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def _norm(values: np.ndarray) -> Any:
    return np.linalg.norm(values, axis=-1)


def _named(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
