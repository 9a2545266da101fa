"""Every test leaves JAX's global flags as it found them."""

import jax
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def flags_untouched():
    before = jax.config.jax_enable_x64, jax.config.jax_numpy_rank_promotion
    yield
    assert (jax.config.jax_enable_x64, jax.config.jax_numpy_rank_promotion) == before


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
