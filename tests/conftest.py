"""Every test leaves JAX's global flags as it found them; compilations are kept and shared between workers and runs."""

import os
from pathlib import Path

# Read when JAX is imported. Compiling dominates the suite: what one worker, or an earlier run, has compiled is read back.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# A quarter less of it without LLVM's expensive passes. CI runs the suite once more with XLA_FLAGS= for what users get.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
# Two workers with two BLAS threads each would fight over two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gc

import jax
import numpy as np
import pytest

# Traced programs are millions of small objects: collected as often as by default, and all kept, they slow later tests threefold.
gc.set_threshold(100_000, 50, 50)


@pytest.fixture(scope="module", autouse=True)
def fresh_caches():
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def flags_untouched():
    before = jax.config.jax_enable_x64, jax.config.jax_numpy_rank_promotion
    yield
    assert (jax.config.jax_enable_x64, jax.config.jax_numpy_rank_promotion) == before


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def data(rng) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((12, 3)), rng.standard_normal(12)
