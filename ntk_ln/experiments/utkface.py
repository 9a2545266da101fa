"""Table 2 and Figure 4: ages from frozen features of UTKFace, trained on four ethnicities and tested on a fifth."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ntk_ln as nl
from ntk_ln._dtype import precision_of
from ntk_ln.experiments import _networks as networks
from ntk_ln.experiments._run import Report, Row, Settings, over_seeds
from ntk_ln.experiments._shift import digest, infinite, infinite_rows, lowess, ordering, scores

TITLE = "Table 2: age from a face, an ethnicity that training has not seen"
SEEDS, EPOCHS, BATCH, WIDTH = 250, 10, 128, 128
SIDE_BY_SIDE = 10  # seeds trained at once
RATES = {"none": 1e-3, "first": 1e-3, "last": 3e-3, "every": 3e-3}
PUBLISHED = {  # R^2 out of distribution, in distribution
    "every": (0.42, 0.66),
    "first": (0.47, 0.68),
    "last": (0.36, 0.66),
    "none": (0.27, 0.66),
}
OTHERS = 4  # the ethnicity left out, by its number in the file names
VALIDATION = 0.2
NAME = re.compile(r"(\d{1,3})_([01])_([0-4])_(\d+)\.", re.ASCII)  # age_gender_race_date
IMAGES = (".jpg", ".jpeg", ".png")
NEEDED = (
    'needs --data: the folder of UTKFace\'s images (age_gender_race_date.jpg), or an NPZ file with the arrays "features" (n, k), '
    '"age" (n,) and "race" (n,), and "validation" (n,) where the split is yours. The images may not be passed on, so nothing is '
    "downloaded."
)


@dataclass(frozen=True)
class Faces:
    """Frozen features (n, k), ages (n,), ethnicities (n,) from 0 to 4, and which rows are for validation (n,)."""

    features: np.ndarray
    age: np.ndarray
    race: np.ndarray
    validation: np.ndarray


def run(settings: Settings) -> Report:
    """Four networks, and the infinitely wide ones on the same rows."""
    faces = load(settings)
    x, y = faces.features.astype(np.float64), faces.age.astype(np.float64)
    train = np.flatnonzero(~faces.validation & (faces.race != OTHERS))
    test = np.flatnonzero(faces.validation & (faces.race != OTHERS))
    outside = np.flatnonzero(faces.validation & (faces.race == OTHERS))
    for what, indices in (("training", train), ("in-distribution test", test), ("out-of-distribution test", outside)):
        if len(indices) < 2:
            raise ValueError(f"reproduce utkface needs at least two {what} rows. Got {len(indices)} of {len(y)} faces.")
    seeds, epochs = settings.seeds(SEEDS), EPOCHS
    rows: list[Row] = []
    errors: dict[str, np.ndarray] = {}
    outer: dict[str, np.ndarray] = {}
    for name, published in PUBLISHED.items():
        found = [
            _trained(settings, name, seeds[start : start + SIDE_BY_SIDE], epochs, x, y, train, test, outside)
            for start in range(0, len(seeds), SIDE_BY_SIDE)
        ]
        outer[name] = np.concatenate([f["r2_outside"] for f in found])
        inner = np.concatenate([f["r2_inside"] for f in found])
        errors[name] = np.abs(np.concatenate([f["outside"] for f in found]) - y[outside]).mean(axis=0)
        for what, values, number in zip(("out of", "in"), (outer[name], inner), published, strict=True):
            rows.append(over_seeds(f"{networks.LABELS[name]}: R^2 {what} distribution", values, published=f"{number:.2f}"))
    rows += ordering(outer, PUBLISHED, networks.LABELS)
    for name in PUBLISHED:
        found = infinite(settings, "utkface", name, networks.network(name), x, y, train, test, outside)
        rows += infinite_rows(networks.LABELS[name], found, "age")
    setting = {
        "training rows": len(train),
        "in-distribution test rows": len(test),
        "out-of-distribution rows": len(outside),
        "inputs": "frozen features as they are; the target is the raw age for the networks, centred for the infinite ones",
        "optimizer": f"Adam, batches of {BATCH}, {epochs} epochs, learning rates {RATES}",
        "seeds": len(seeds),
    }
    figure = _figure(errors, similarity(x[outside], x[train]))
    return Report("utkface", TITLE, setting, rows, {"figure_4": figure})


# --- Faces ----------------------------------------------------------------------------------------------------------------


def load(settings: Settings, extractor: Callable[[Iterator[Any]], np.ndarray] | None = None) -> Faces:
    """Features and labels from an NPZ file, or from the folder of images and `extractor`, by default torchvision's ResNet-18."""
    path = settings.data
    if path is None:
        raise ValueError(f"reproduce utkface {NEEDED}")
    if path.is_dir():
        return _from_images(path, settings, extractor or resnet18)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError):
        arrays = {}
    if not {"features", "age", "race"} <= set(arrays):
        got = f"the arrays {', '.join(arrays)}" if arrays else "no NPZ file"
        raise ValueError(f"reproduce utkface {NEEDED} Got {path.name!r}: {got}.")
    return _faces(arrays["features"], arrays["age"], arrays["race"], arrays.get("validation"))


def _faces(features: Any, age: Any, race: Any, validation: Any) -> Faces:
    n = len(age)
    if validation is None:
        validation = np.zeros(n, bool)
        validation[np.random.default_rng(0).permutation(n)[: round(VALIDATION * n)]] = True
    shapes = {"features": features.shape[:1], "race": race.shape, "validation": np.shape(validation)}
    wrong = {name: shape for name, shape in shapes.items() if shape != (n,)}
    if wrong or age.ndim != 1 or features.ndim != 2:
        shapes = {"features": features.shape, "age": age.shape, "race": race.shape, "validation": np.shape(validation)}
        raise ValueError(f'reproduce utkface needs "features" (n, k) and one age, race and validation a row. Got {shapes}.')
    for name, values in (("features", features), ("age", age)):
        if not np.isfinite(values).all():
            raise ValueError(f"reproduce utkface needs finite {name}. Row {int(np.argwhere(~np.isfinite(values))[0][0])} is not.")
    if not np.isin(race, range(OTHERS + 1)).all():
        raise ValueError(f"reproduce utkface needs races from 0 to {OTHERS} ({OTHERS}: others). Got {sorted(set(race.tolist()))}.")
    return Faces(features, age, race, np.asarray(validation, bool))


def labelled(folder: Path) -> tuple[list[Path], np.ndarray, np.ndarray, list[str]]:
    """Images of a folder with their ages and ethnicities, and the names that do not say them (the original set has a few)."""
    paths, labels, without = [], [], []
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES):
        match = NAME.match(path.name)
        if match is None:
            without.append(path.name)
        else:
            paths.append(path)
            labels.append((int(match[1]), int(match[3])))
    age, race = np.array(labels, int).reshape(-1, 2).T
    return paths, age, race, without


def _from_images(folder: Path, settings: Settings, extractor: Callable[[Iterator[Any]], np.ndarray]) -> Faces:
    paths, age, race, without = labelled(folder)
    if not paths:
        raise ValueError(f"reproduce utkface {NEEDED} Got {str(folder)!r}, without an image of such a name.")
    if without:
        settings.announce(f"utkface: {len(without)} names without age_gender_race_date are left out: {', '.join(without[:5])}")
    unit = {"images": len(paths), "names": digest(np.array([path.name for path in paths])), "folder": str(folder.resolve())}
    features = settings.kept("utkface", unit, lambda: {"features": extractor(_images(paths))})["features"]
    return _faces(features, age, race, None)


def _images(paths: list[Path]) -> Iterator[Any]:
    from PIL import Image, UnidentifiedImageError

    for path in paths:
        try:
            with Image.open(path) as image:
                yield image.convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"The image {path.name!r} cannot be read ({error}). Mend it or take it out of the folder.") from None


def resnet18(images: Iterator[Any]) -> np.ndarray:
    """The 512 features before the last layer of torchvision's ResNet-18, trained on ImageNet."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from torchvision.models import ResNet18_Weights  # pyright: ignore[reportMissingImports]
        from torchvision.models import resnet18 as build  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(
            "Features of images need torchvision, and its weights once: pip install torchvision. Or pass --data FEATURES.npz."
        ) from None
    weights = ResNet18_Weights.IMAGENET1K_V1
    return _features(torch, build(weights=weights), weights.transforms(), images)


def _features(torch: Any, model: Any, transform: Any, images: Iterator[Any]) -> np.ndarray:
    model.fc = torch.nn.Identity()
    model.eval()
    found, batch = [], []

    def flush():
        if batch:
            found.append(model(torch.stack(batch)).numpy())
            batch.clear()

    with torch.inference_mode():
        for image in images:
            batch.append(transform(image))
            if len(batch) == 64:
                flush()
        flush()
    return np.concatenate(found)


# --- Training -------------------------------------------------------------------------------------------------------------


def _trained(settings: Settings, name: str, seeds: Any, epochs: int, x, y, train, test, outside) -> dict[str, np.ndarray]:
    unit = {"network": name, "first seed": seeds[0], "seeds": len(seeds), "epochs": epochs, "data": digest(x[train], y[train])}

    def compute() -> dict[str, Any]:
        predict = fit(networks.network(name), x[train], y[train], seeds, epochs, RATES[name])
        far, near = predict(x[outside]), predict(x[test])
        each = [
            scores(lambda rows, f=f, g=g: f if rows is outside else g, y, test, outside) for f, g in zip(far, near, strict=True)
        ]
        return {key: [one[key] for one in each] for key in ("r2_outside", "r2_inside", "outside")}

    return settings.kept("utkface", unit, compute)


def fit(net: nl.Network, x: np.ndarray, y: np.ndarray, seeds: Any, epochs: int, rate: float) -> Callable[[np.ndarray], np.ndarray]:
    """Networks trained on batches, one a seed: rows (m, k) to outputs (seeds, m). Adam on the standard parametrisation."""
    import optax

    with precision_of(np.float32):
        data, labels = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
        keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
        init = partial(net.init, in_features=x.shape[1], width=WIDTH)
        # What parameters of the standard parametrisation are multiples of.
        rates = nl.to_standard(net, init(keys[0])).learning_rates
        scales = jax.tree.map(lambda factor: float(factor) ** 0.5, rates)
        adam = optax.adam(rate)

        def outputs(standard, rows):
            return net.apply(jax.tree.map(jnp.divide, standard, scales), rows)[:, 0]

        def one(key):
            standard = jax.tree.map(jnp.multiply, init(key), scales)

            def step(carry, rows):
                standard, state = carry
                gradient = jax.grad(lambda p: jnp.mean((outputs(p, data[rows]) - labels[rows]) ** 2))(standard)
                updates, state = adam.update(gradient, state)
                return (optax.apply_updates(standard, updates), state), None

            def epoch(carry, key):
                batch = min(BATCH, len(labels))
                order = jax.random.permutation(key, len(labels))[: len(labels) // batch * batch]
                return jax.lax.scan(step, carry, order.reshape(-1, batch))

            epochs_of_key = jax.random.split(jax.random.fold_in(key, 1), epochs)
            return jax.lax.scan(epoch, (standard, adam.init(standard)), epochs_of_key)[0][0]

        trained = jax.jit(jax.vmap(one))(keys)
        apply = jax.jit(jax.vmap(outputs, (0, None)))

    def predict(rows: np.ndarray) -> np.ndarray:
        with precision_of(np.float32):
            return np.asarray(apply(trained, jnp.asarray(rows, jnp.float32)), np.float64)

    return predict


# --- Figure 4 -------------------------------------------------------------------------------------------------------------


def similarity(rows: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Mean over training rows of the cosine with each of `rows`."""
    unit = [z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), np.finfo(z.dtype).tiny) for z in (rows, train)]
    return unit[0] @ unit[1].mean(axis=0)


def _figure(errors: dict[str, np.ndarray], cosine: np.ndarray) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axis = figure.subplots()
    for name, values in errors.items():
        axis.plot(*lowess(values, cosine).T, color=networks.COLORS[name], label=networks.LABELS[name])
    axis.set(xlabel="mean cosine similarity to the training features", ylabel="LOWESS of the error out of distribution (years)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    return figure
