"""The posterior by conjugate gradients: the numbers of the Cholesky factor, without the matrix."""

import numpy as np
import pytest

import ntk_ln as nl
from ntk_ln import _conjugate

X = np.random.default_rng(0).normal(size=(60, 3))
Y = np.stack([np.sin(X[:, 0]), 1e9 * X[:, 1]], axis=1)
KERNEL = nl.NTK(nl.mlp(1))
NOISE = 1e-3


@pytest.fixture(scope="module")
def exact():
    return nl.posterior(KERNEL, X, Y, noise=NOISE)


@pytest.mark.parametrize("of", ["tiles", "disk", pytest.param("blocks", marks=pytest.mark.slow)])
def test_it_is_the_posterior(exact, of, tmp_path):
    kernel, options = KERNEL, {}
    if of == "disk":
        options["gram"] = nl.stream_gram(KERNEL, X, tmp_path / "gram", tile=25)
    elif of == "blocks":
        kernel = nl.NeuralTangentsKernel(KERNEL.network)
    p = nl.posterior(kernel, X, Y, noise=NOISE, solver="cg", **options)
    assert 0 < p.iterations <= 60
    assert p.residual <= 1e-10
    # |alpha - exact| <= |residual| / noise
    error = np.linalg.norm(np.asarray(p.alpha) - exact.alpha, axis=0)
    assert np.all(error <= 2e-10 * np.linalg.norm(Y, axis=0) / NOISE)
    assert p.rkhs_norm == pytest.approx(exact.rkhs_norm, rel=1e-6)
    points = X[:4] + 0.5
    np.testing.assert_allclose(p.mean(points), exact.mean(points), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(p.variance(points), exact.variance(points), rtol=1e-6)
    assert p.min_eigenvalue.value == pytest.approx(exact.min_eigenvalue.value, rel=1e-6)
    assert exact.iterations is exact.residual is None
    in_memory = {"gram": lambda: p.gram, "log": lambda: p.log_marginal_likelihood(), "save": lambda: p.save(tmp_path / "p")}
    for name, call in in_memory.items():
        with pytest.raises(ValueError, match=rf'`p\.{name}.*needs K in memory, which only solver="cholesky" has\.'):
            call()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"solver": "lu"}, ValueError, 'knows "cholesky", "cg" and "jaxmg". Got \'lu\''),
        ({"solver": "jaxmg"}, ValueError, "needs `x` sharded by rows over several GPUs"),
        ({"solver": "cg", "noise": 0.0}, ValueError, "needs noise > 0 and no stop_time"),
        ({"solver": "cg", "noise": 1e-18}, ValueError, r"needs noise of at least n eps lambda_max = .* Use noise >="),
        ({"solver": "cg", "tolerance": 2.0}, ValueError, "needs a number between 1e-15 and 1. Got 2.0"),
        ({"solver": "cg", "gram": np.eye(60)}, TypeError, "needs what `stream_gram` or `open_gram` gives. Got ndarray"),
    ],
)
def test_errors(options, error, says):
    with pytest.raises(error, match=says):
        nl.posterior(KERNEL, X, Y, **({"noise": NOISE} | options))


def test_no_convergence_is_no_answer(monkeypatch):
    monkeypatch.setattr(_conjugate, "STEPS", 2)
    monkeypatch.setattr(_conjugate, "RANK", 1)
    with pytest.raises(
        ValueError, match=r"stopped after 2 steps with a residual of .*, more than tolerance=1\.0e-10; rounding alone leaves about"
    ):
        nl.posterior(KERNEL, X, Y, noise=NOISE, solver="cg")


@pytest.mark.parametrize("size", [1e-170, 1e160])
def test_labels_of_any_size(exact, size):
    p = nl.posterior(KERNEL, X, size * Y[:, 0], noise=NOISE, solver="cg")
    assert p.rkhs_norm == pytest.approx(nl.posterior(KERNEL, X, size * Y[:, 0], noise=NOISE).rkhs_norm, rel=1e-6)


def test_equal_rows_and_a_small_noise():
    x = np.concatenate([X, X])
    p = nl.posterior(KERNEL, x, np.random.default_rng(1).normal(size=120), noise=1e-4, solver="cg")
    assert p.residual <= 1e-10


def test_float32_rows_are_widened_and_a_store_keeps_its_precision(tmp_path):
    x = X.astype(np.float32)
    wide = nl.posterior(KERNEL, x.astype(float), Y, noise=NOISE, solver="cg")
    np.testing.assert_array_equal(nl.posterior(KERNEL, x, Y, noise=NOISE, solver="cg").alpha, wide.alpha)
    stored = nl.stream_gram(KERNEL, x, tmp_path / "gram", tile=25)
    for rows in (x, x.astype(float)):
        with pytest.raises(ValueError, match="needs noise of at least n eps lambda_max"):
            nl.posterior(KERNEL, rows, Y, noise=1e-9, solver="cg", gram=stored)
    p = nl.posterior(KERNEL, x, Y, noise=0.1, solver="cg", gram=stored, tolerance=1e-6)
    assert p.min_eigenvalue.lower < np.linalg.eigvalsh(KERNEL(x.astype(float)))[0]


def test_a_gram_of_something_else(tmp_path):
    stored = nl.stream_gram(KERNEL, X, tmp_path / "gram")
    with pytest.raises(ValueError, match='needs solver="cg"'):
        nl.posterior(KERNEL, X, Y, noise=NOISE, gram=stored)
    with pytest.raises(ValueError, match="needs the x that `gram` was computed from"):
        nl.posterior(KERNEL, X[::-1], Y, noise=NOISE, solver="cg", gram=stored)
    with pytest.raises(ValueError, match="needs the kernel that `gram` was computed with: other kernel"):
        nl.posterior(nl.NNGP(KERNEL.network), X, Y, noise=NOISE, solver="cg", gram=stored)


def test_a_gram_of_another_depth_with_the_same_diagonal(tmp_path):
    def kernel(depth):
        return nl.NNGP(nl.mlp(depth, w_std=2**0.5, b_std=0.0, w_out=2**0.5, b_out=0.0))

    np.testing.assert_allclose(kernel(1).diag(X), kernel(4).diag(X), rtol=1e-14)
    stored = nl.stream_gram(kernel(1), X, tmp_path / "gram")
    with pytest.raises(ValueError, match="needs the kernel that `gram` was computed with: other network"):
        nl.posterior(kernel(4), X, Y, noise=NOISE, solver="cg", gram=stored)


def test_products_of_a_kernel():
    v = np.random.default_rng(1).normal(size=(60, 2))
    np.testing.assert_allclose(KERNEL.matvec(X, v), KERNEL(X) @ v, rtol=1e-12)
    np.testing.assert_allclose(KERNEL.operator(X) @ v[:, 0], KERNEL(X) @ v[:, 0], rtol=1e-12)
    with pytest.raises(ValueError, match=r"needs `v` of shape \(n,\) or \(n, columns\), n >= 1\. Got x: \(60, 3\), v: \(3,\)"):
        KERNEL.matvec(X, np.ones(3))
