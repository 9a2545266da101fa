"""One file that holds an interrupted training: written whole or not at all, refused where it does not belong."""

import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def write(path: Path, identity: dict[str, Any], state: Any, losses: np.ndarray) -> None:
    """Writes the leaves of `state` and the losses so far (steps, seeds); a killed process leaves the earlier file."""
    leaves: dict[str, Any] = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, identity=np.array(json.dumps(identity)), losses=losses, **leaves)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read(path: Path, identity: dict[str, Any], state: Any, call: str) -> tuple[Any, np.ndarray]:
    """The state of the structure of `state`, and the losses so far.

    Raises:
        ValueError: not such a file, or one of another training; the message says what differs.
    """
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        found = json.loads(str(arrays["identity"]))
        losses = arrays["losses"]
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
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
        new is not None and new.shape == old.shape for new, old in zip(stored, leaves, strict=True)
    )
    if not same:
        raise ValueError(
            f"`{call}`: {str(path)!r} is a checkpoint of another training: its optimizer kept other arrays. Give another path."
        )
    return jax.tree.unflatten(structure, [jnp.asarray(new, old.dtype) for new, old in zip(stored, leaves, strict=True)]), losses
