"""The Gram matrix in tiles: the same numbers as in one pass, whatever the tile."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ntk_ln as nl
from ntk_ln import _memory, _progress
from ntk_ln.kernels import _profile, gram

RNG = np.random.default_rng(3)
NETWORKS = {
    "biases": nl.mlp(2),
    "table of the angle": nl.mlp(4, layer_norm="first"),
    "table with a gain": nl.mlp(4, layer_norm=(1, 3), affine=True),
    "no biases": nl.mlp(3, activation="leaky_relu", b_std=0.0, b_out=0.0),
    "norm on the input": nl.Network(nl.LayerNorm(), *nl.mlp(3).layers),
    "skip": nl.Network(nl.Dense(b_std=0.1), nl.Residual(nl.Activation("relu"), nl.Dense(w_std=2**0.5)), nl.Dense()),
    "smooth": nl.mlp(1, activation="gelu", layer_norm="last"),
}
QUICK = ("biases", "table of the angle")


def points(n, d, dtype=np.float64):
    x = RNG.normal(size=(n, d)).astype(dtype)
    x[3], x[5], x[8] = x[n - 2], -x[n - 4], x[n - 9] * dtype(1 + 1e-6)  # equal, opposite and near rows, tiles apart
    x[20] = x[21] + dtype(1e-6)
    return x


def one_pass(monkeypatch, k, *x):
    with monkeypatch.context() as m:
        m.setattr(gram, "AT_LEAST", 1 << 60)
        return k(*x)


@pytest.fixture
def tiles(monkeypatch):
    """Small tiles, and every matrix in them."""
    monkeypatch.setattr(gram, "AT_LEAST", 1)
    monkeypatch.setattr(gram, "SIDES", (24,))


@pytest.mark.parametrize(
    ("name", "d"),
    [pytest.param(n, d, marks=[] if n in QUICK and d == 20 else [pytest.mark.slow]) for n in NETWORKS for d in (3, 20)],
)
def test_tiles_equal_one_pass(monkeypatch, tiles, name, d):
    k = nl.NTK(NETWORKS[name])
    x = points(61, d)
    whole, got = one_pass(monkeypatch, k, x), k(x)
    scale = np.sqrt(np.diag(whole))
    np.testing.assert_array_equal(got, got.T)
    np.testing.assert_allclose(np.diag(got), k.diag(x), rtol=8 * np.finfo(float).eps)
    np.testing.assert_allclose(got / scale / scale[:, None], whole / scale / scale[:, None], atol=32 * np.finfo(float).eps)
    # Near pairs keep their distance: it is what a small eigenvalue is made of.
    for i, j in ((8, 52), (20, 21)):
        gaps = [g[i, i] + g[j, j] - 2 * g[i, j] for g in (got, whole)]
        assert abs(gaps[0] - gaps[1]) <= 64 * np.finfo(float).eps * whole[i, i]
    assert got[3, 59] == pytest.approx(got[3, 3], rel=8 * np.finfo(float).eps)
    np.testing.assert_allclose(k(x[:50], x[7:]), got[:50, 7:], atol=32 * np.finfo(float).eps * scale.max() ** 2)


def test_the_tile_does_not_show(monkeypatch, tiles):
    x, k = points(50, 20), nl.NTK(NETWORKS["biases"])
    grams = []
    for side in (24, 28, 64):
        monkeypatch.setattr(gram, "SIDES", (side,))
        grams.append(k(x))
    for other in grams[1:]:
        np.testing.assert_allclose(other, grams[0], rtol=0, atol=4 * np.finfo(float).eps * grams[0].max())


@pytest.mark.slow
def test_float32_pairs_and_jax(monkeypatch, tiles):
    x = points(50, 20, np.float32)
    k = nl.NTK(NETWORKS["table of the angle"])
    got, exact = k(x), one_pass(monkeypatch, k, x.astype(np.float64))
    assert got.dtype == np.float32
    scale = np.sqrt(np.diag(exact))
    np.testing.assert_allclose(got / scale / scale[:, None], exact / scale / scale[:, None], atol=2e-6)
    values = np.linalg.eigvalsh(got.astype(np.float64))
    assert values[0] >= -50 * np.finfo(np.float32).eps * values[-1]
    pair = k.pair(x)
    np.testing.assert_array_equal(pair.ntk, got)
    np.testing.assert_array_equal(pair.nngp, nl.NNGP(k.network)(x))
    of_jax = k(jnp.asarray(x))
    assert isinstance(of_jax, jax.Array)
    np.testing.assert_array_equal(of_jax, got)


def test_many_near_pairs_take_differences(monkeypatch, tiles):
    x = np.array([[1.0, 2.0, 3.0] * 7]) + 1e-3 * RNG.normal(size=(50, 21))
    k = nl.NTK(NETWORKS["biases"])
    got, whole = k(x), one_pass(monkeypatch, k, x)
    np.testing.assert_allclose(got, whole, rtol=16 * np.finfo(float).eps)


def test_tables_are_right_or_not_made():
    assert _profile.table(nl.mlp(3).layers) is None  # biases: not the angle alone
    assert _profile.table(nl.mlp(2, layer_norm="first").layers) is None  # not worth it
    assert _profile.table(nl.mlp(4, layer_norm="first", activation="step").layers) is None  # a kink in the angle


def test_what_does_not_fit_is_refused(monkeypatch, tiles):
    monkeypatch.setattr(_memory, "available", lambda: 1e4)
    with pytest.raises(MemoryError, match=r"`NTK\(net\)\(x1, x2\)` needs 2e-05 GB, 1e-05 GB are free\. Use `stream_gram`"):
        nl.NTK(NETWORKS["biases"])(points(50, 3))


def test_long_work_is_announced(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "AFTER", 0.0)
    assert list(_progress.announced(iter(range(3)), 3, "Gram matrix")) == [0, 1, 2]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(_progress.announced(iter(range(3)), 3, "Gram matrix")) == [0, 1, 2]
    assert "Gram matrix" in capsys.readouterr().err
