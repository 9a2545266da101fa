"""The paper's experiments, one module each, beside their infinite-width counterparts: `ntk-ln reproduce`."""

import importlib
from types import ModuleType

NAMES = ("toy", "ntk_maps", "activations", "batch_norm", "width", "tightness", "transformer", "protein", "utkface", "audit")
ALONE = ("utkface",)  # not in `all`: its data are the user's own


def module(name: str) -> ModuleType:
    """The module of an experiment: its `TITLE`, and `run(settings) -> Report`."""
    return importlib.import_module(f"ntk_ln.experiments.{name}")
