"""Import neural-tangents 0.6.5, the last release, on JAX releases newer than it.

Since that release JAX has moved or dropped a few names which neural-tangents imports but its infinite-width kernels
never call. They are lent to it while it is imported and taken back afterwards: no JAX module is left changed, no flag
is touched, and TensorFlow, which only `neural_tangents.experimental` wants, is not imported.
"""

import contextlib
import importlib
import sys
import threading
import types
import warnings
from typing import Any

import jax
import jax.core
import jax.extend.core
import jax.interpreters.ad

_INSTALL = 'pip install --no-deps "neural-tangents>=0.6.5" frozendict'
_EXPERIMENTAL = "neural_tangents.experimental"
_lock = threading.Lock()


def import_neural_tangents() -> Any:
    """The `neural_tangents` module, imported on the first call.

    Raises
    ------
    ImportError
        Where the package is missing, with the command that installs it (`--no-deps` leaves out TensorFlow and tf2jax,
        which it declares and its kernels do not use), or where this JAX has dropped more than is lent here.
    """
    with _lock:
        if sys.modules.get("neural_tangents") is not None:
            return importlib.import_module("neural_tangents")
        try:
            with contextlib.ExitStack() as stack:
                # JAX warns of the deprecated names which neural-tangents reads; nobody here can act on that.
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                _lend_names(stack)
                _hide_experimental(stack)
                return importlib.import_module("neural_tangents")
        except ModuleNotFoundError as error:
            if error.name in ("neural_tangents", "frozendict"):
                raise ImportError(
                    f"`NeuralTangentsKernel` needs the package {error.name}, which is not installed. "
                    f"Install it without TensorFlow by `{_INSTALL}`."
                ) from error
            raise _unknown_jax(error) from error
        except (ImportError, AttributeError) as error:
            raise _unknown_jax(error) from error


def _unknown_jax(error: Exception) -> ImportError:
    return ImportError(
        f"`NeuralTangentsKernel` could not import neural-tangents on JAX {jax.__version__}: {error}. "
        "Use `NTK(network)`, which does without it, or another JAX."
    )


def _lend_names(stack: contextlib.ExitStack) -> None:
    """Put back, until `stack` closes, what neural-tangents imports and this JAX lacks."""
    for name in ("Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var"):
        if not hasattr(jax.core, name):
            _lend(stack, jax.core, name, getattr(jax.extend.core, name))
    # Only a key in neural-tangents' table of structured derivatives: a primitive which no program contains.
    _lend(stack, jax.interpreters.ad, "zeros_like_p", jax.extend.core.Primitive("zeros_like"))
    try:
        util = importlib.import_module("jax.util")
    except ModuleNotFoundError:
        util = sys.modules["jax.util"] = types.ModuleType("jax.util")
        stack.callback(sys.modules.pop, "jax.util", None)
    _lend(stack, util, "safe_zip", _safe_zip)
    _lend(stack, util, "safe_map", lambda function, *args: [function(*row) for row in _safe_zip(*args)])


def _lend(stack: contextlib.ExitStack, module: types.ModuleType, name: str, value: Any) -> None:
    if not hasattr(module, name):
        setattr(module, name, value)
        stack.callback(delattr, module, name)


def _hide_experimental(stack: contextlib.ExitStack) -> None:
    """Let `from . import experimental` find an empty module; a later import of it finds the real one."""
    if _EXPERIMENTAL not in sys.modules:
        sys.modules[_EXPERIMENTAL] = types.ModuleType(_EXPERIMENTAL)
        stack.callback(_show_experimental)


def _show_experimental() -> None:
    sys.modules.pop(_EXPERIMENTAL, None)
    package = sys.modules.get("neural_tangents")
    if package is not None:
        vars(package).pop("experimental", None)


def _safe_zip(*args: Any) -> list[tuple[Any, ...]]:
    return list(zip(*args, strict=True))
