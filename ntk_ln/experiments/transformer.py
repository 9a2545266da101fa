"""Figure 7: a decoder-only transformer continues straight lines, with one LayerNorm after the embedding or none."""

from typing import Any

import numpy as np

from ntk_ln.experiments import _networks as networks
from ntk_ln.experiments._run import Report, Row, Settings, over_seeds

TITLE = "Figure 7: a transformer on straight lines"
SEEDS, STEPS, BATCH, RATE = 5, 3000, 32, 1e-3
LAYERS, HEADS, WIDTH, CONTEXT = 2, 4, 64, 20
# Training positions, tested positions, and whether the tested line has a = b = 1 (the discussion's variant).
VARIANTS = {"figure 7": (range(1, 31), range(20, 101), False), "discussion": (range(0, 21), range(0, 101), True)}
LINES = 64  # tested, drawn as in training
FLAT = 0.5  # share of the true slope, below which predictions far out count as saturated


def run(settings: Settings) -> Report:
    """Both variants, each with the norm and without."""
    seeds, steps = settings.seeds(SEEDS), settings.steps(STEPS)
    rows: list[Row] = []
    panels = {}
    for variant, (trained_on, tested_on, fixed) in VARIANTS.items():
        for position in ("none", "first"):
            unit = {"variant": variant, "layer norm": position == "first", "steps": steps, "seeds": len(seeds), "batch": BATCH}
            runs = settings.kept(
                "transformer",
                unit,
                lambda position=position, trained_on=trained_on, tested_on=tested_on, fixed=fixed: _runs(
                    position == "first", seeds, steps, trained_on, tested_on, fixed
                ),
            )
            panels[variant, position] = runs
            where = f"{variant}, {'LayerNorm after the embedding' if position == 'first' else 'no LayerNorm'}"
            slopes = runs["slopes"]
            rows += [
                over_seeds(
                    f"{where}: slope of the prediction over the last 30 positions, share of the true one",
                    slopes,
                    published="saturates" if position == "first" else "goes on",
                    agrees=bool(slopes.mean() < FLAT if position == "first" else slopes.mean() > FLAT),
                ),
                over_seeds(f"{where}: root mean square error on training lines", runs["error"]),
            ]
    setting = {
        "model": f"decoder-only, {LAYERS} layers, {HEADS} heads, width {WIDTH}, linear embedding, learnt positions of the window",
        "window": CONTEXT,
        "lines": f"a + b i, a, b ~ N(0, 1); tested on {LINES} of them (figure 7) or on a = b = 1 (discussion, and in the figure)",
        "optimizer": f"Adam, {RATE:g}, batches of {BATCH} new lines",
        "steps": steps,
        "seeds": len(seeds),
    }
    return Report("transformer", TITLE, setting, rows, {"figure_7": _figure(panels)})


def _runs(norm: bool, seeds: Any, steps: int, trained_on: range, tested_on: range, fixed: bool) -> dict[str, Any]:
    tested = np.array([i for i in tested_on if i >= CONTEXT])
    a, b = (np.ones((2, 1)) if fixed else np.random.default_rng(0).normal(size=(2, LINES)))[..., None]
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
    positions = jnp.asarray(list(trained_on), jnp.float32)

    def lines(key):
        a, b = jax.random.normal(key, (2, BATCH, 1))
        return a + b * positions[None, :]

    def windows(values):
        starts = range(values.shape[1] - CONTEXT)
        inputs = jnp.concatenate([values[:, s : s + CONTEXT] for s in starts])
        return inputs, jnp.concatenate([values[:, s + 1 : s + CONTEXT + 1] for s in starts])

    def loss(model, key):
        inputs, targets = windows(lines(key))
        return jnp.mean((model(inputs) - targets) ** 2)

    @nnx.jit
    def step(model, optimizer, key):
        value, gradient = nnx.value_and_grad(loss)(model, key)
        optimizer.update(model, gradient)
        return value

    for key in jax.random.split(jax.random.key(seed), steps):
        step(model, optimizer, key)
    error = float(loss(model, jax.random.key(10_000 + seed))) ** 0.5
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
            x, mean = runs["positions"], runs["predicted"].mean(axis=0)
            half = 1.96 * runs["predicted"].std(axis=0, ddof=1) / len(runs["predicted"]) ** 0.5
            axis.plot(x, mean, color=networks.COLORS[position], label=networks.LABELS[position])
            axis.fill_between(x, mean - half, mean + half, color=networks.COLORS[position], alpha=0.25, lw=0)
        axis.plot(x, runs["true"], "k--", lw=1, label="the line")
        axis.axvspan(x[0], VARIANTS[variant][0][-1], color="0.94", zorder=0)
        axis.set(xlabel="position i", ylabel="prediction", title=variant)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    return figure
