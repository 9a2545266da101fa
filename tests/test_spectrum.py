"""min_eigenvalue: the estimate against dense solvers, the bound against exact eigenvalues."""

import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from scipy.sparse.linalg import aslinearoperator

from ntk_ln.spectrum import min_eigenvalue

EPS = np.finfo(np.float64).eps


def arc_cosine_gram(n, d, seed=0):
    """A network-like Gram matrix made without the package: order-one arc-cosine kernel of random points."""
    x = np.random.default_rng(seed).standard_normal((n, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    cos = np.clip(x @ x.T, -1, 1)
    np.fill_diagonal(cos, 1)
    theta = np.arccos(cos)
    gram = (np.sin(theta) + (np.pi - theta) * cos) / np.pi + cos * (np.pi - theta) / np.pi
    return (gram + gram.T) / 2


def laplacian(n):
    """Tridiagonal (-1, 2, -1): integers, so exact, with eigenvalues 2 - 2 cos(k pi / (n + 1))."""
    return 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1), 4 * np.sin(np.pi / (2 * (n + 1))) ** 2


def exact_smallest(gram):
    with mpmath.workdps(60):
        return mpmath.eigsy(mpmath.matrix(gram.tolist()), eigvals_only=True)[0]


def assert_within_target(result, exact, trace, n):
    """DESIGN's numbers: value to 1e-8 relative (or rounding), lower within max(1e-6 value, 3 n eps trace) and never above."""
    assert result.lower <= exact
    assert abs(result.value - exact) <= max(1e-8 * abs(exact), n * EPS * trace), (result, exact)
    assert 0 <= result.value - result.lower <= max(1e-6 * abs(exact), 3 * n * EPS * trace), (result, exact)


@pytest.mark.parametrize("n", [2, 3, 7, 256, 257, 300, 801])
def test_exact_spectrum(n):
    gram, exact = laplacian(n)
    assert_within_target(min_eigenvalue(gram), exact, 2 * n, n)


@pytest.mark.parametrize(("n", "d"), [(500, 16), (500, 2), (700, 1), (401, 64)])
def test_iteration_equals_dense(n, d):
    gram = arc_cosine_gram(n, d)
    result = min_eigenvalue(gram)
    assert result.method == "inverse_lanczos"
    dense = np.linalg.eigvalsh(gram)
    assert abs(result.value - dense[0]) <= 1e-8 * dense[-1]
    assert result.lower <= dense[0] + n * EPS * dense[-1]
    assert result.value - result.lower <= max(1e-6 * dense[0], 3 * n * EPS * np.trace(gram))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("log_smallest", [0, -6, -12, -15])
def test_lower_against_50_digits(seed, log_smallest):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 12))
    q, _ = np.linalg.qr(rng.standard_normal((n, n)))
    gram = (q * np.logspace(log_smallest, 0, n)) @ q.T
    gram = (gram + gram.T) / 2
    assert_within_target(min_eigenvalue(gram), float(exact_smallest(gram)), np.trace(gram), n)


def test_hilbert():
    gram = scipy.linalg.hilbert(14)
    result, exact = min_eigenvalue(gram), exact_smallest(gram)
    assert result.lower <= exact
    assert result.value - result.lower <= 3 * 14 * EPS * np.trace(gram)


@pytest.mark.parametrize("n", [20, 300])
@pytest.mark.parametrize("kind", ["rank", "indefinite", "negative", "duplicate", "zero"])
def test_singular_and_indefinite(n, kind, rng):
    a = rng.standard_normal((n, n))
    gram = {
        "rank": a[:, : n // 3] @ a[:, : n // 3].T,
        "indefinite": a + a.T,
        "negative": -(a @ a.T),
        "duplicate": (a @ a.T)[np.ix_([*range(n - 1), 3], [*range(n - 1), 3])],
        "zero": np.zeros((n, n)),
    }[kind]
    gram = (gram + gram.T) / 2
    result, dense = min_eigenvalue(gram), np.linalg.eigvalsh(gram)
    size = n * EPS * np.abs(np.diagonal(gram)).sum()
    assert abs(result.value - dense[0]) <= 2 * size + 1e-8 * abs(dense[0])
    assert result.lower <= dense[0] + size
    assert result.value - result.lower <= 6 * size + 1e-5 * abs(dense[0])


@pytest.mark.parametrize("n", [1, 5, 300])
def test_entry_error_is_exhausted(n):
    # I - e (all ones) has the smallest eigenvalue 1 - n e: Weyl's bound is reached.
    error = 1e-3 / n
    result = min_eigenvalue(np.eye(n), entry_error=error)
    exact = 1 - n * error
    assert result.value == pytest.approx(1, rel=1e-8)
    assert exact - 2e-6 <= result.lower <= exact


def test_entry_error_covers_perturbations(rng):
    gram, error = arc_cosine_gram(60, 3), 1e-5
    lower = min_eigenvalue(gram, entry_error=error).lower
    for _ in range(20):
        change = np.triu(rng.choice([-error, error], size=gram.shape))
        assert np.linalg.eigvalsh(gram + change + np.triu(change, 1).T)[0] >= lower


@pytest.mark.parametrize("n", [30, 300])
@pytest.mark.parametrize("exponent", [-1000, -300, 300, 900])
def test_scaling_by_powers_of_two(n, exponent):
    gram = arc_cosine_gram(n, 8)
    plain, scaled = min_eigenvalue(gram), min_eigenvalue(np.ldexp(gram, exponent))
    assert scaled.value == pytest.approx(np.ldexp(plain.value, exponent), rel=1e-12)
    assert scaled.lower == pytest.approx(np.ldexp(plain.lower, exponent), rel=1e-12)


def test_graded_matrix():
    scale = np.logspace(0, -40, 300)
    gram = arc_cosine_gram(300, 8) * scale[:, None] * scale
    result = min_eigenvalue(gram)
    assert abs(result.value) <= 300 * EPS * np.trace(gram)
    assert -3 * 300 * EPS * np.trace(gram) <= result.lower <= gram[-1, -1]


def test_start_that_misses_the_eigenvector():
    # The smallest eigenvector is orthogonal to the start of the iteration: only the factorisation can tell.
    n = 300
    start = np.random.default_rng(0).standard_normal(n)
    u = np.random.default_rng(1).standard_normal(n)
    u -= start * (u @ start) / (start @ start)
    u /= np.linalg.norm(u)
    gram = 2 * np.eye(n) - np.outer(u, u)
    assert_within_target(min_eigenvalue((gram + gram.T) / 2), 1.0, np.trace(gram), n)


@pytest.mark.parametrize("n", [40, 300])
def test_array_kinds(n):
    gram = arc_cosine_gram(n, 5).astype(np.float32)
    want = min_eigenvalue(gram.astype(np.float64))
    assert min_eigenvalue(gram) == want
    assert min_eigenvalue(jnp.asarray(gram)) == want
    assert min_eigenvalue(np.asfortranarray(gram)) == want
    assert min_eigenvalue(np.repeat(np.repeat(gram, 2, 0), 2, 1)[::2, ::2]) == want
    assert min_eigenvalue([[2, 1], [1, 2]]).value == pytest.approx(1)
    assert [type(v) for v in want] == [float, float, str]


def test_input_is_left_alone():
    gram = arc_cosine_gram(300, 5)
    kept = gram.copy()
    min_eigenvalue(gram)
    np.testing.assert_array_equal(gram, kept)


def test_operator():
    gram = arc_cosine_gram(500, 16)
    dense = np.linalg.eigvalsh(gram)
    result = min_eigenvalue(aslinearoperator(gram), entry_error=1e-9)
    assert result.method == "lanczos"
    assert abs(result.value - dense[0]) <= 1e-8 * dense[-1]
    assert result.value - 1e-6 <= result.lower <= dense[0] - 500 * 1e-9


def test_large_operator():
    n = 40_000
    operator = aslinearoperator(scipy.sparse.diags_array(np.r_[0.5, np.linspace(1, 2, n - 1)]))
    result = min_eigenvalue(operator)
    assert result.value == pytest.approx(0.5, rel=1e-9)
    assert 0.5 - 1e-6 <= result.lower <= 0.5


@pytest.mark.parametrize(
    ("gram", "error", "match"),
    [
        (np.ones((2, 3)), ValueError, r"square matrix of shape \(n, n\), n >= 1. Got shape \(2, 3\)"),
        (np.ones(3), ValueError, r"Got shape \(3,\)"),
        (np.ones((0, 0)), ValueError, r"Got shape \(0, 0\)"),
        (np.array([[1, 2], [3, 4.0]]), ValueError, r"symmetric matrix. Got gram\[0, 1\]=2 and gram\[1, 0\]=3"),
        (np.array([[1, 0], [0, np.nan]]), ValueError, "finite entries. Row 1, column 1"),
        (np.array([[1, np.inf], [np.inf, 1]]), ValueError, "finite entries. Row 0, column 1"),
        (np.eye(2) * 1j, TypeError, "real array. Got dtype complex128"),
        (np.array([["a"]]), TypeError, "real array"),
        (scipy.sparse.eye_array(3), TypeError, "aslinearoperator"),
        (aslinearoperator(np.ones((2, 3))), ValueError, r"Got shape \(2, 3\)"),
        (aslinearoperator(np.eye(2) * 1j), TypeError, "real operator. Got dtype complex128"),
        (aslinearoperator(np.full((2, 2), np.nan)), ValueError, "finite products"),
    ],
)
def test_refused(gram, error, match):
    with pytest.raises(error, match=match):
        min_eigenvalue(gram)


@pytest.mark.parametrize("error", [-1e-3, np.nan, np.inf])
def test_refused_entry_error(error):
    with pytest.raises(ValueError, match="finite `entry_error` >= 0"):
        min_eigenvalue(np.eye(2), entry_error=error)


def test_entry_error_allows_asymmetry():
    gram = np.array([[1.0, 0.1], [0.1 + 1e-6, 1.0]])
    with pytest.raises(ValueError, match="pass it as `entry_error`"):
        min_eigenvalue(gram)
    assert min_eigenvalue(gram, entry_error=1e-6).lower <= 0.9 - 1e-6
