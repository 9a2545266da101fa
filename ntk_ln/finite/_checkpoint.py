"""One file that holds an interrupted training: written whole or not at all, refused where it does not belong."""

import glob
import json
import os
import tempfile
import tokenize
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

RTOL = 1e-5  # of probes: one machine rounds as another, where products are taken at full precision


def prepare(path: Path, call: str) -> None:
    """Removes what a killed process has left of this file, and raises where it cannot be written."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????.tmp"):
        left.unlink(missing_ok=True)
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"):
            pass
    except OSError as error:
        raise ValueError(
            f"`{call}` cannot write the checkpoint {str(path)!r}: {error}. Give a path in a folder where you may write."
        ) from None


def write(path: Path, identity: dict[str, Any], probes: dict[str, Any], state: Any, losses: np.ndarray) -> None:
    """Writes the leaves of `state` and the losses so far (steps, seeds); a killed process leaves the earlier file.

    `identity` are plain values and `probes` numbers that another training has to agree in.
    """
    arrays: dict[str, Any] = {f"leaf{i}": np.asarray(_data(leaf)) for i, leaf in enumerate(jax.tree.leaves(state))}
    arrays |= {f"probe_{key}": np.asarray(value) for key, value in probes.items()}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, identity=np.array(json.dumps(identity)), losses=losses, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read(path: Path, identity: dict[str, Any], probes: dict[str, Any], state: Any, call: str) -> tuple[Any, np.ndarray]:
    """The state of the structure of `state`, and the losses so far.

    Raises:
        ValueError: not such a file, or one of another training; the message says what differs.
    """
    try:
        with open(path, "rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            arrays = {key: file[key] for key in file.files}
        found = dict(json.loads(str(arrays["identity"])))
        losses = arrays["losses"]
        probed = {key: arrays.pop(f"probe_{key}") for key in probes}
    except (TypeError, ValueError, KeyError, OSError, EOFError, RuntimeError, tokenize.TokenError, zipfile.BadZipFile) as error:
        raise ValueError(f"`{call}`: {str(path)!r} is no checkpoint of `train`: {error}. Give another path.") from None
    differs = [key for key in identity if found.get(key) != identity[key]]
    if differs:
        key = differs[0]
        raise ValueError(
            f"`{call}`: {str(path)!r} is a checkpoint of another training: {key} was {found.get(key)!r}, is {identity[key]!r}. "
            "Give another path, or delete the file."
        )
    leaves, structure = jax.tree.flatten(state)
    stored = [arrays.get(f"leaf{i}") for i in range(len(leaves))]
    # The name of an optimizer of your own is not known: what it keeps is.
    same = len(arrays) == len(leaves) + 2 and all(
        new is not None and new.shape == _data(old).shape for new, old in zip(stored, leaves, strict=True)
    )
    if not same:
        raise ValueError(
            f"`{call}`: {str(path)!r} is a checkpoint of another training: its optimizer kept other arrays. Give another path."
        )
    for key, value in probes.items():
        if not _close(probed[key], np.asarray(value)):
            raise ValueError(
                f"`{call}`: {str(path)!r} is a checkpoint of another training: its {key} gave other numbers. Give another path."
            )
    return jax.tree.unflatten(structure, [_restored(new, old) for new, old in zip(stored, leaves, strict=True)]), losses


def _close(one: np.ndarray, two: np.ndarray) -> bool:
    return one.shape == two.shape and np.allclose(one, two, rtol=RTOL, atol=RTOL * np.abs(two).max(initial=0), equal_nan=True)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _restored(new: Any, old: Any) -> Any:
    if _is_key(old):
        return jax.random.wrap_key_data(jnp.asarray(new), impl=jax.random.key_impl(old))
    return jnp.asarray(new, old.dtype)
