"""Training finite networks: full batch, many seeds at once."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln._dtype import check_finite, check_rows, check_whole, precision_of
from ntk_ln._posterior_inputs import check_labels, concrete
from ntk_ln.finite import _checkpoint
from ntk_ln.kernels import NTK
from ntk_ln.layers import AbstractLayer, Residual
from ntk_ln.network import Network, check_network
from ntk_ln.parametrisation import to_standard

CALL = "train(net, x, y, ...)"
OPTIMIZERS = ("adam", "gradient_descent", "momentum")
CHUNK = 100  # steps between two looks at the losses
CHECKPOINT_SECONDS = 20.0
DIVERGED = 1e8  # times the first loss


@dataclass(frozen=True, eq=False, repr=False)
class Training:
    """What `train` gives: one trained network a seed.

    Attributes:
        network: as given.
        seeds: of the networks.
        initial, params: parameters before and after, as `net.init` gives them, every array with a leading axis of seeds.
        steps: steps taken by each network, (seeds,).
        losses: 1/2 sum (f - y)^2 before every step, (most steps taken, seeds), and the last ones where all have stopped early;
            constant from where a network has stopped.
        learning_rate: None for an optimizer of your own.
    """

    network: Network
    seeds: tuple[int, ...]
    initial: Any
    params: Any
    steps: np.ndarray
    losses: np.ndarray
    learning_rate: float | None
    _one_output: bool

    def __repr__(self) -> str:
        return f"Training({len(self.seeds)} networks, {self.steps.max()} steps, largest loss {self.losses[-1].max():.3g})"

    def apply(self, x: Any, *, initial: bool = False) -> np.ndarray:
        """The trained (or the initial) networks' outputs: (seeds, n), or (seeds, n, k) for labels of shape (n, k)."""
        rows = check_rows(x, "training.apply(x)")
        params = self.initial if initial else self.params
        dtype = jax.tree.leaves(params)[0].dtype
        with precision_of(dtype):
            outputs = np.asarray(_apply(self.network, params, jnp.asarray(np.asarray(rows), dtype)))
        return outputs[:, :, 0] if self._one_output else outputs

    def network_params(self, index: int, *, initial: bool = False) -> Any:
        """The parameters of the network of seeds[index], for `net.apply` and `EmpiricalNTK`."""
        check_whole(index, "training.network_params(index)", "index", 0, len(self.seeds) - 1)
        with precision_of(jax.tree.leaves(self.params)[0].dtype):
            return jax.tree.map(lambda leaf: leaf[index], self.initial if initial else self.params)


def train(
    net: Network,
    x: Any,
    y: Any,
    *,
    width: int = 512,
    seeds: int | Sequence[int] = 1,
    steps: int = 3000,
    optimizer: Literal["adam", "gradient_descent", "momentum"] | Any = "adam",
    learning_rate: float | None = None,
    stop_loss: float = 0.0,
    dtype: Any = np.float32,
    checkpoint: str | Path | None = None,
    progress: bool = False,
) -> Training:
    r"""Trains finite networks on all rows at once, one a seed, side by side.

        loss = 1/2 sum over rows and outputs of (f(x_i) - y_i)^2

    Gradient descent acts on the NTK parametrisation: steps * learning_rate is the `stop_time` and learning_rate the `step_size` of
    the `posterior` that its mean over seeds tends to with the width. Adam acts on the standard parametrisation (`to_standard`), as
    in the paper.

    Args:
        net: a network that ends in a Dense; BatchNorm is trained on the statistics of all rows, and keeps the last ones.
        x: (n, d), n >= 1.
        y: (n,) or (n, k).
        width: units of every hidden layer.
        seeds: how many networks, or the seeds themselves; network i starts from `net.init(jax.random.key(seeds[i]), ...)`.
        steps: at most so many.
        optimizer: "adam", "gradient_descent", "momentum" (0.9), or any `optax.GradientTransformation` of gradients alone, which
            acts on the NTK parametrisation.
        learning_rate: 1e-3 for Adam; for the others 1/lambda_max of the infinite network's Gram matrix (momentum: a tenth) unless
            given. Not with an optimizer of your own.
        stop_loss: a network stops where its loss has come down to this.
        dtype: of the parameters, float32 or float64.
        checkpoint: a file, written every 20 seconds and at the end; where it exists, training goes on from it. One process at
            a time.
        progress: whether to show a progress bar.

    Returns:
        `Training`.

    Raises:
        ValueError: shapes, NaN or infinity, settings out of range; training that diverges (with a learning rate that would not); a
            checkpoint of another training, of more steps, or that cannot be written.

    References:
        Lee et al. (2019), section 2.2; Kingma & Ba (2015), algorithm 1 (Adam).

    >>> import numpy as np
    >>> import ntk_ln as nl
    >>> x = np.array([[-1.0], [0.0], [1.0]])
    >>> training = nl.train(nl.mlp(1), x, x[:, 0], width=64, seeds=3, steps=200, optimizer="gradient_descent")
    >>> training.apply(x).shape
    (3, 3)
    >>> bool(training.losses[-1].max() < training.losses[0].min())
    True
    """
    x, y, labels = _check_data(net, x, y)
    seeds = _check_seeds(seeds)
    check_whole(width, CALL, "width", 1)
    check_whole(steps, CALL, "steps", 1)
    if not (isinstance(stop_loss, int | float) and 0 <= stop_loss < math.inf):
        raise ValueError(f"`{CALL}` needs a finite stop_loss >= 0. Got {stop_loss!r}.")
    dtype = np.dtype(dtype)
    if dtype not in (np.float32, np.float64):
        raise ValueError(f"`{CALL}` needs dtype float32 or float64. Got {dtype}.")
    check_outputs(net, CALL, x.shape[1], int(width), labels.shape[1])
    optimizer, learning_rate = _check_optimizer(net, x, optimizer, learning_rate)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None:
        _checkpoint.prepare(path, CALL)

    with precision_of(dtype):
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        init = partial(net.init, in_features=x.shape[1], width=int(width), out_features=labels.shape[1], dtype=dtype)
        initial = jax.vmap(init)(keys)
        scales = _scales(net, initial, standard=optimizer == "adam")
        transformation = _transformation(optimizer, learning_rate)
        trained = jax.tree.map(jnp.multiply, initial, scales)
        state = (trained, jax.vmap(transformation.init)(trained), jnp.zeros(len(seeds), jnp.int32))
        _check_gradients_suffice(transformation, state)
        losses = np.empty((0, len(seeds)), dtype)
        data = jnp.asarray(np.asarray(x), dtype), jnp.asarray(labels, dtype)
        save = None
        if path is not None:
            identity = _identity(net, x, labels, width, seeds, optimizer, learning_rate, float(stop_loss), dtype)
            probes = {"network": _some_outputs(net, initial, data[0]), "optimizer": _some_updates(transformation, trained)}
            save = partial(_checkpoint.write, path, identity, probes)
            if path.exists():
                state, losses = _checkpoint.read(path, identity, probes, state, CALL)
                _check_steps(path, int(np.max(state[2])), int(steps))
        run = jax.jit(partial(_chunk, transformation.update))
        written = time.monotonic()
        with _shown(progress, int(steps)) as show:
            show(len(losses))
            while len(losses) < steps and not _all_stopped(state, losses):
                state, more = run(net, scales, state, data, stop_loss, min(CHUNK, steps - len(losses)))
                losses = np.concatenate([losses, np.asarray(more)[: steps - len(losses)]])
                _check_converging(net, x, seeds, losses, optimizer, learning_rate)
                show(len(losses))
                if save is not None and time.monotonic() - written > CHECKPOINT_SECONDS:
                    save(state, losses)
                    written = time.monotonic()
        trained, _, taken = state
        params = jax.tree.map(_parameters, trained, scales)
        # Outputs and statistics of the last parameters.
        outputs, params = _batched(lambda params: net.apply_batch(params, data[0]), params)
        last = 0.5 * ((outputs - data[1]) ** 2).sum(axis=(1, 2))
        _check_converging(net, x, seeds, np.concatenate([losses, np.asarray(last)[None]]), optimizer, learning_rate)
        if save is not None:
            save(state, losses)
    taken = np.asarray(taken)
    return Training(net, seeds, initial, params, taken, losses[: taken.max() + 1], learning_rate, np.ndim(y) == 1)


# --- One step ------------------------------------------------------------------------------------------------------------


def _chunk(update: Callable[..., Any], net: Network, scales: Any, state: Any, data: Any, stop_loss: Any, count: Any) -> Any:
    """`count` <= CHUNK steps of all networks: the new state, and the losses before each."""
    x, y = data

    def loss(trained):
        outputs, kept = net.apply_batch(jax.tree.map(_parameters, trained, scales), x)
        return 0.5 * jnp.sum((outputs - y) ** 2), kept

    def step(trained, optimizer, taken):
        (value, kept), gradient = jax.value_and_grad(loss, has_aux=True)(trained)
        updates, new_optimizer = update(gradient, optimizer, trained)
        new = (_with_kept(net.layers, kept, jax.tree.map(jnp.add, trained, updates)), new_optimizer, taken + 1)
        return jax.tree.map(partial(jnp.where, value > stop_loss), new, (trained, optimizer, taken)), value

    def one(index, carry):
        state, losses = carry
        state, values = jax.vmap(step)(*state)
        return state, losses.at[index].set(values)

    return jax.lax.fori_loop(0, count, one, (state, jnp.zeros((CHUNK, len(state[2])), y.dtype)))


def _parameters(trained: Any, scale: Any) -> Any:
    return trained if isinstance(scale, float) and scale == 1 else trained / jnp.asarray(scale, trained.dtype)


def _with_kept(layers: Sequence[AbstractLayer], kept: Any, trained: Any) -> Any:
    """`trained`, with what layers keep of the batch taken over: it has no gradient."""
    result = []
    for layer, now, given in zip(layers, kept, trained, strict=True):
        if isinstance(layer, Residual):
            given = _with_kept(layer.body, now, given)
        result.append({**given, **{name: now[name] for name in layer.kept}} if layer.kept else given)
    return tuple(result)


@jax.jit
def _apply(net: Network, params: Any, x: Any) -> Any:
    return jax.lax.map(lambda params: net.apply(params, x), params)


def _batched(function: Callable[[Any], Any], params: Any) -> Any:
    return jax.jit(partial(jax.lax.map, function))(params)


def _scales(net: Network, params: Any, *, standard: bool) -> Any:
    """What the trained parameters are multiples of: 1 in the NTK parametrisation."""
    if not standard:
        return jax.tree.map(lambda _: 1.0, params)
    one = jax.tree.map(lambda leaf: leaf[0], params)
    # A scale of 0 has no standard parameter: it stays as it is, and has no gradient.
    return jax.tree.map(lambda rate: float(rate) ** 0.5 or 1.0, to_standard(net, one).learning_rates)


def _transformation(optimizer: Any, learning_rate: Any) -> Any:
    import optax  # not at the top: it doubles the time of `import ntk_ln`

    if optimizer == "adam":
        return optax.adam(learning_rate)
    if optimizer == "gradient_descent":
        return optax.sgd(learning_rate)
    if optimizer == "momentum":
        return optax.sgd(learning_rate, momentum=0.9)
    return optimizer


# --- What a checkpoint must agree in --------------------------------------------------------------------------------------


def _some_outputs(net: Network, initial: Any, x: Any) -> Any:
    """Outputs at the initial parameters: functions of your own have no name that tells them apart."""
    with jax.default_matmul_precision("highest"):
        return _batched(lambda params: net.apply_batch(params, x)[0][:16], initial)


def _some_updates(transformation: Any, trained: Any) -> np.ndarray:
    """A few entries of updates of the first network for gradients that are known: the first three, and later ones of a schedule."""
    params = jax.tree.map(lambda leaf: leaf[0], trained)
    state, found = transformation.init(params), []
    for factor, count in ((0.1, None), (0.3, None), (-0.2, None), *((0.1, 3 * 4**k) for k in range(12))):
        gradient = jax.tree.map(lambda leaf, factor=factor: (factor * leaf).astype(leaf.dtype), params)
        if count is not None:
            state = jax.tree.map(partial(_counted, count), state)
        updates, state = transformation.update(gradient, state, params)
        found += [np.ravel(leaf)[:4] for leaf in jax.tree.leaves(updates)]
    return np.concatenate(found)


def _counted(count: int, leaf: Any) -> Any:
    """What an optimizer counts steps with, moved on."""
    counts = jnp.ndim(leaf) == 0 and jnp.issubdtype(jnp.result_type(leaf), jnp.integer)
    return jnp.full_like(leaf, count) if counts else leaf


def _identity(net: Network, x: Any, labels: np.ndarray, *settings: Any) -> dict[str, Any]:
    """Plain values; what they leave open the numbers above decide."""
    width, seeds, optimizer, learning_rate, stop_loss, dtype = settings
    try:
        config = json.loads(json.dumps(net.to_config()))
    except ValueError:
        config = repr(net)
    data = hashlib.sha256(np.asarray(x, np.float64).tobytes() + labels.tobytes()).hexdigest()
    return {
        "network": config,
        "data": data,
        "width": int(width),
        "seeds": list(seeds),
        "optimizer": optimizer if isinstance(optimizer, str) else "optax",
        "learning_rate": learning_rate,
        "stop_loss": stop_loss,
        "dtype": dtype.name,
    }


# --- What comes in, and what went wrong ----------------------------------------------------------------------------------


def check_outputs(net: Network, call: str, features: int, width: int, outputs: int) -> None:
    """Raises unless the network has as many outputs as the labels."""

    def apply(key, x):
        return net.apply(net.init(key, in_features=features, width=width, out_features=outputs), x)

    got = jax.eval_shape(apply, jax.random.key(0), jax.ShapeDtypeStruct((1, features), np.float32)).shape[1]
    if got != outputs:
        raise ValueError(
            f"`{call}` needs a network with as many outputs as `y` has, {outputs}. Got {got}: its last layer is "
            f"{net.layers[-1]!r}. End the network in a Dense."
        )


def _check_gradients_suffice(transformation: Any, state: Any) -> None:
    trained, kept, _ = state
    try:
        jax.eval_shape(jax.vmap(transformation.update), trained, kept, trained)
    except TypeError as error:
        if "keyword-only argument" not in str(error):
            raise
        raise ValueError(
            f"`{CALL}` needs an optimizer that takes gradients alone, such as `optax.adam(1e-3)`. Got one that needs more: {error}."
        ) from None


def _check_steps(path: Path, done: int, steps: int) -> None:
    if done > steps:
        raise ValueError(
            f"`{CALL}`: the checkpoint {str(path)!r} has taken {done} steps already. Got steps={steps}: ask for {done} or more, or "
            "give another path."
        )


def _check_data(net: Any, x: Any, y: Any) -> tuple[Any, Any, np.ndarray]:
    check_network(net, CALL)
    x = check_rows(concrete(x, "x", CALL), CALL)
    y = check_labels(concrete(y, "y", CALL), x, CALL)
    if len(x) == 0:
        raise ValueError(f"`{CALL}` needs at least one row. Got x.shape={x.shape}.")
    check_finite(y, CALL, "y")
    net.check_rows(CALL, x)
    return x, y, np.asarray(y, np.float64).reshape(len(x), -1)


def _check_seeds(seeds: Any) -> tuple[int, ...]:
    if isinstance(seeds, int | np.integer) and not isinstance(seeds, bool) and seeds >= 1:
        return tuple(range(int(seeds)))
    if isinstance(seeds, Sequence | range | np.ndarray) and not isinstance(seeds, str) and len(seeds):
        numbers = list(seeds)
        if all(isinstance(s, int | np.integer) and not isinstance(s, bool) for s in numbers) and len(set(numbers)) == len(numbers):
            outside = [s for s in numbers if not 0 <= s < 2**32]
            if outside:
                raise ValueError(f"`{CALL}` needs seeds from 0 to 2**32 - 1: others repeat those. Got {outside[0]}.")
            return tuple(map(int, numbers))
    raise ValueError(f"`{CALL}` needs seeds >= 1, or different whole numbers. Got {seeds!r}.")


def _check_optimizer(net: Network, x: Any, optimizer: Any, learning_rate: Any) -> tuple[Any, float | None]:
    if not isinstance(optimizer, str):
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise TypeError(f"`{CALL}` needs an optimizer by name or of optax. Got {optimizer!r}.")
        if learning_rate is not None:
            raise ValueError(f"`{CALL}`: an optimizer of your own has its learning rate. Got learning_rate={learning_rate!r} too.")
        return optimizer, None
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"`{CALL}` knows the optimizers {', '.join(OPTIMIZERS)}. Got {optimizer!r}.")
    if learning_rate is None:
        if optimizer == "adam":
            return optimizer, 1e-3
        largest = _largest_eigenvalue(net, x)
        if largest is None:
            raise ValueError(
                f"`{CALL}` needs a learning_rate for {optimizer!r} and this network, which has no infinite-width kernel."
            )
        return optimizer, (1.0 if optimizer == "gradient_descent" else 0.1) * own_rate(largest, CALL)
    return optimizer, check_rate(learning_rate, CALL)


def check_rate(learning_rate: Any, call: str) -> float:
    """The learning rate as a float."""
    number = isinstance(learning_rate, int | float | np.floating) and not isinstance(learning_rate, bool)
    if not number or not 0 < learning_rate < math.inf:
        raise ValueError(f"`{call}` needs a finite learning_rate > 0. Got {learning_rate!r}.")
    return float(learning_rate)


def own_rate(largest: float, call: str) -> float:
    """1/lambda_max of a Gram matrix."""
    if not largest > 0:
        raise ValueError(
            f"`{call}` needs a learning_rate here: the infinite network's Gram matrix is 0, and 1/lambda_max is the default. "
            "Give the network a bias, or learning_rate."
        )
    return 1 / largest


def _largest_eigenvalue(net: Network, x: Any) -> float | None:
    if net.growth.finite_only:
        return None
    return float(np.linalg.eigvalsh(np.asarray(NTK(net)(np.asarray(x, np.float64))))[-1])


def _check_converging(net: Network, x: Any, seeds: Sequence[int], losses: np.ndarray, optimizer: Any, rate: float | None) -> None:
    if not np.isfinite(losses[0]).all():
        which = int(np.flatnonzero(~np.isfinite(losses[0]))[0])
        wider = "" if losses.dtype == np.float64 else ", or use dtype=np.float64"
        raise ValueError(
            f"`{CALL}` needs outputs and labels whose squares {losses.dtype} holds. The loss of seed {seeds[which]} is "
            f"{losses[0, which]} before the first step: divide `x` and `y` by their scale{wider}."
        )
    bad = ~(losses <= DIVERGED * np.maximum(losses[0].astype(np.float64), np.finfo(losses.dtype).tiny))
    if not bad.any():
        return
    step, which = np.argwhere(bad)[0]
    advice = "Use a smaller learning rate."
    largest = _largest_eigenvalue(net, x) if optimizer in ("gradient_descent", "momentum") else None
    if largest is not None:
        advice = (
            f"The infinite network's Gram matrix has lambda_max = {largest:.3g}: gradient descent needs "
            f"learning_rate < 2/lambda_max = {2 / largest:.3g}, at this width somewhat less."
        )
    rate_text = "" if rate is None else f" at learning_rate={rate:.3g}"
    raise ValueError(
        f"`{CALL}` diverged{rate_text}: the loss of seed {seeds[which]} was {losses[0, which]:.3g} at first and "
        f"{losses[step, which]:.3g} after {step} steps. {advice}"
    )


def _all_stopped(state: Any, losses: np.ndarray) -> bool:
    return len(losses) > 0 and bool((np.asarray(state[2]) < len(losses)).all())


@contextmanager
def _shown(progress: bool, steps: int) -> Iterator[Callable[[int], None]]:
    if not progress:
        yield lambda done: None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("training", total=steps)
        yield lambda done: bar.update(task, completed=done)
