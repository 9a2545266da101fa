"""The blocked Cholesky factor: K stays above, L below, whatever the block."""

import numpy as np
import pytest

from ntk_ln import _cholesky

EPS = np.finfo(float).eps


@pytest.fixture(params=[(1024, 4096), (16, 24), (7, 5)])
def blocks(request, monkeypatch):
    monkeypatch.setattr(_cholesky, "BLOCK", request.param[0])
    monkeypatch.setattr(_cholesky, "ROWS", request.param[1])


@pytest.mark.parametrize("n", [1, 16, 50])
def test_factor_and_solves(blocks, rng, n):
    a = rng.normal(size=(n, n + 3))
    matrix = a @ a.T
    square = np.array(matrix, order="F")
    assert _cholesky.factor(square)
    lower = np.tril(square)
    np.testing.assert_allclose(lower @ lower.T, matrix, rtol=0, atol=4 * n * EPS * matrix.max())
    np.testing.assert_array_equal(np.triu(square, 1), np.triu(matrix, 1))
    b = rng.normal(size=(n, 2))
    np.testing.assert_allclose(lower @ _cholesky.forward(square, b), b, atol=1e-10)
    np.testing.assert_allclose(matrix @ _cholesky.solve(square, b), b, atol=1e-8)


def test_indefinite(blocks, rng):
    a = rng.normal(size=(40, 30))  # of rank 30: block 7 finds out in the middle
    assert not _cholesky.factor(np.asfortranarray(a @ a.T - 1e-6 * np.eye(40)))
