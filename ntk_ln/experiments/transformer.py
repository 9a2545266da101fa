"""Figure 7: a decoder-only transformer continues straight lines, with one LayerNorm after the embedding or none.

Beside it an infinitely wide attention network, whose kernel neural-tangents computes (Hron et al. 2020, "Infinite attention").
"""

from functools import partial
from typing import Any

import numpy as np

import ntk_ln as nl
from ntk_ln.experiments import _networks as networks
from ntk_ln.experiments._run import Report, Row, Settings, exact, over_seeds

TITLE = "Figure 7: a transformer on straight lines"
SEEDS, STEPS, BATCH, RATE = 5, 3000, 64, 1e-3
LAYERS, HEADS, WIDTH, CONTEXT = 2, 4, 64, 20
# Training positions, tested positions, and whether the tested line has a = b = 1 (the discussion's variant).
VARIANTS = {"figure 7": (range(1, 31), range(20, 101), False), "discussion": (range(0, 21), range(0, 101), True)}
LINES = 64  # tested, drawn as in training
ROWS, NOISE = 240, 1e-4  # of the infinite network: windows it is trained on; noise, of the mean of its kernel's diagonal
FLAT = 0.5  # share of the true slope, below which predictions far out count as saturated


def run(settings: Settings) -> Report:
    """Both variants, each with the norm and without."""
    seeds, steps = settings.seeds(SEEDS), settings.steps(STEPS)
    rows: list[Row] = []
    panels = {}
    for variant, (trained_on, tested_on, fixed) in VARIANTS.items():
        for position in ("none", "first"):
            norm = position == "first"
            unit = {"variant": variant, "layer norm": norm}
            finite = unit | {"steps": steps, "seeds": len(seeds), "batch": BATCH}
            runs = settings.kept("transformer", finite, partial(_runs, norm, seeds, steps, trained_on, tested_on, fixed))
            wide = unit | {"infinitely wide": True, "rows": ROWS, "noise": NOISE}
            limit = settings.kept("transformer", wide, partial(_infinite, norm, trained_on, tested_on, fixed))
            panels[variant, position] = runs | {"infinite": limit["predicted"]}
            where = f"{variant}, {'LayerNorm after the embedding' if norm else 'no LayerNorm'}"
            slopes = runs["slopes"]
            rows += [
                over_seeds(
                    f"{where}: slope of the prediction over the last 30 positions, share of the true one",
                    slopes,
                    published="saturates" if norm else "goes on",
                    agrees=bool(slopes.mean() < FLAT if norm else slopes.mean() > FLAT),
                ),
                over_seeds(f"{where}: root mean square error on training lines", runs["error"]),
            ]
            rows += _infinite_rows(f"{where}, infinitely wide", limit, norm)
    setting = {
        "model": f"decoder-only, {LAYERS} layers, {HEADS} heads, width {WIDTH}, linear embedding, learnt positions of the window",
        "window": CONTEXT,
        "windows": "one a line, from a start drawn at random among the training positions",
        "lines": f"a + b i, a, b ~ N(0, 1); tested on {LINES} of them (figure 7) or on a = b = 1 (discussion, and in the figure)",
        "optimizer": f"Adam, {RATE:g}, batches of {BATCH} new lines",
        "infinitely wide": "two blocks of linearly scaled attention (keys and queries tied, all positions of the window seen) and "
        f"ReLU, read at the last position, trained to convergence on {ROWS} windows, noise {NOISE:g} of the mean diagonal",
        "steps": steps,
        "seeds": len(seeds),
    }
    return Report("transformer", TITLE, setting, rows, {"figure_7": _figure(panels)})


def _infinite_rows(where: str, limit: dict[str, np.ndarray], norm: bool) -> list[Row]:
    slope, power = float(limit["slope"]), float(limit["power"])
    found, bound = float(limit["largest"]), float(limit["bound"])
    rows = [
        exact(
            f"{where}: slope of the prediction over the last 30 positions, share of the true one",
            slope,
            published="saturates" if norm else "goes on",
            agrees=slope < FLAT if norm else slope > FLAT,
        ),
        exact(
            f"{where}: growth exponent between positions 10^6 and 2 10^6",
            power,
            published="bounded" if norm else "grows",
            agrees=power < 0.1 if norm else power > 0.9,
        ),
    ]
    if norm:
        note = "C = the largest Theta(x, x) seen on lines, positions 1 to 2 10^6"
        rows.append(exact(f"{where}: sqrt(C) |f|_H", bound, note=note))
        rows.append(exact(f"{where}: largest |f|", found, agrees=found <= bound, note="at most sqrt(C) |f|_H"))
    return rows


def _tested(tested_on: range, fixed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions whose value is predicted, and the lines (a, b), each (lines, 1)."""
    a, b = (np.ones((2, 1)) if fixed else np.random.default_rng(0).normal(size=(2, LINES)))[..., None]
    return np.array([i for i in tested_on if i >= CONTEXT]), a, b


def _infinite(norm: bool, trained_on: range, tested_on: range, fixed: bool) -> dict[str, Any]:
    """The NTK posterior of an attention network of infinite width, trained on windows drawn like those of the finite one."""
    kernel_fn = _attention_kernel(norm)
    # neural-tangents has (rows, positions, channels), the posterior (rows, features).
    kernel = nl.NeuralTangentsKernel(lambda x1, x2, get: kernel_fn(x1[..., None], None if x2 is None else x2[..., None], get))
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, ROWS, 1))
    start = rng.integers(trained_on[0], trained_on[-1] - CONTEXT + 1, size=(ROWS, 1))
    values = a + b * (start + np.arange(CONTEXT + 1))
    x, y = values[:, :-1], values[:, -1]
    p = nl.posterior(kernel, x, y, noise=NOISE * float(kernel.diag(x).mean()))

    def mean(rows):
        return np.concatenate([p.mean(rows[i : i + 256]) for i in range(0, len(rows), 256)])

    tested, a, b = _tested(tested_on, fixed)
    steps = np.arange(-CONTEXT, 0)
    last = tested[-30:]
    outputs = mean((a[..., None] + b[..., None] * (last[:, None] + steps)).reshape(-1, CONTEXT)).reshape(len(a), -1)
    slopes = np.polyfit(last, outputs.T, 1)[0]
    far = 1.0 + np.array([2.0**k for k in range(22)] + [1e6, 2e6])[:, None] + steps
    at_far = np.abs(mean(far))
    constant = max(float(kernel.diag(rows).max()) for rows in (x, far))
    return {
        "predicted": mean(1.0 + tested[:, None] + steps),
        "slope": (slopes * b[:, 0]).sum() / (b[:, 0] ** 2).sum(),
        "power": np.log2(at_far[-1] / at_far[-2]),
        "largest": max(at_far.max(), np.abs(outputs).max()),
        "bound": constant**0.5 * p.rkhs_norm,
    }


def _attention_kernel(norm: bool) -> Any:
    from ntk_ln.kernels._neural_tangents_shim import import_neural_tangents

    stax = import_neural_tangents().stax

    def residual(*body):
        return stax.serial(stax.FanOut(2), stax.parallel(stax.Identity(), stax.serial(*body)), stax.FanInSum())

    def block():
        attention = stax.GlobalSelfAttention(1, 1, 1, 1, linear_scaling=True, pos_emb_type="SUM")
        return [residual(attention), residual(stax.Dense(1, 2**0.5, 0.1), stax.Relu(), stax.Dense(1, 1.0, 0.1))]

    layers = [stax.Dense(1, 1.0, 1.0), *([stax.LayerNorm()] if norm else [])]
    for _ in range(LAYERS):
        layers += block()
    return stax.serial(*layers, stax.Index(stax.Slice[:, -1:, :]), stax.Flatten(), stax.Dense(1, 1.0, 0.1))[2]


def _runs(norm: bool, seeds: Any, steps: int, trained_on: range, tested_on: range, fixed: bool) -> dict[str, Any]:
    tested, a, b = _tested(tested_on, fixed)
    found = {"predicted": [], "error": [], "slopes": []}
    for seed in seeds:
        predict, error = _trained(norm, seed, steps, trained_on)
        window = tested[:, None] + np.arange(-CONTEXT, 0)
        outputs = np.stack([predict(line[0] + line[1] * window) for line in zip(a, b, strict=True)])
        slopes = np.polyfit(tested[-30:], outputs[:, -30:].T, 1)[0]
        found["slopes"].append((slopes * b[:, 0]).sum() / (b[:, 0] ** 2).sum())  # least squares over lines
        found["predicted"].append(predict(1.0 + window))
        found["error"].append(error)
    return found | {"positions": tested, "true": 1.0 + tested}


def _trained(norm: bool, seed: int, steps: int, trained_on: range) -> tuple[Any, float]:
    """The next value of windows (rows, CONTEXT) by a trained model, and its error on lines as in training."""
    import jax
    import jax.numpy as jnp
    import optax

    nnx = _nnx()
    model = _model(nnx, norm, nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(RATE), wrt=nnx.Param)

    def loss(model, key, batch=BATCH):
        of_line, of_start = jax.random.split(key)
        a, b = jax.random.normal(of_line, (2, batch, 1))
        start = jax.random.randint(of_start, (batch, 1), trained_on[0], trained_on[-1] - CONTEXT + 1)
        values = a + b * (start + jnp.arange(CONTEXT + 1))
        return jnp.mean((model(values[:, :-1]) - values[:, 1:]) ** 2)

    @nnx.jit
    def step(model, optimizer, key):
        value, gradient = nnx.value_and_grad(loss)(model, key)
        optimizer.update(model, gradient)
        return value

    for key in jax.random.split(jax.random.key(seed), steps):
        step(model, optimizer, key)
    error = float(loss(model, jax.random.key(10_000 + seed), 1024)) ** 0.5
    return lambda windows: np.asarray(model(jnp.asarray(windows, jnp.float32))[:, -1], np.float64), error


def _nnx() -> Any:
    try:
        from flax import nnx
    except ImportError:
        raise ImportError("The transformer needs Flax: pip install 'ntk_ln[experiments]'.") from None
    return nnx


def _model(nnx: Any, norm: bool, rngs: Any) -> Any:
    """Values (rows, window) to the next values (rows, window)."""
    import jax.numpy as jnp

    class Block(nnx.Module):
        def __init__(self):
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, h, mask):
            h = h + self.attention(h, mask=mask)
            return h + self.down(nnx.relu(self.up(h)))

    class Decoder(nnx.Module):
        def __init__(self):
            self.embedding = nnx.Linear(1, WIDTH, rngs=rngs)
            self.places = nnx.Param(0.02 * rngs.params.normal((CONTEXT, WIDTH)))
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs) if norm else None
            self.blocks = nnx.List([Block() for _ in range(LAYERS)])
            self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, values):
            h = self.embedding(values[..., None])
            h = (self.norm(h) if self.norm is not None else h) + self.places[...][None]
            mask = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))[None, None]
            for block in self.blocks:
                h = block(h, mask)
            return self.head(h)[..., 0]

    return Decoder()


def _figure(panels: Any) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, variant in zip(figure.subplots(1, 2), VARIANTS, strict=True):
        for position in ("none", "first"):
            runs = panels[variant, position]
            x = runs["positions"]
            networks.band(axis, x, runs["predicted"], position, networks.LABELS[position])
            axis.plot(x, runs["infinite"], color=networks.COLORS[position], ls=":", label="infinitely wide")
        axis.plot(x, runs["true"], "k--", lw=1, label="the line")
        axis.axvspan(x[0], VARIANTS[variant][0][-1], color="0.94", zorder=0)
        axis.set(xlabel="position i", ylabel="prediction", title=variant)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    return figure
