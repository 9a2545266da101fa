"""posterior: mean, variance, norm and eigenvalue against 50 digits, against a second way of computing them, and at the edges."""

import importlib
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers import KERNEL, NO_BIAS, Plain, assert_accurate, load_cases, network_covered, slow

import ntk_ln as nl
from ntk_ln import log_marginal_likelihood
from ntk_ln.posterior import posterior

EPS = np.finfo(np.float64).eps
CASES = load_cases("posteriors")
MODULE = importlib.import_module("ntk_ln.posterior")

# --- Reference tables ----------------------------------------------------------------------------------------------------


COVERED = [case for case in CASES if network_covered(case.network)]
QUICK = ("relu 3 LN1", "residual trunk norm")


def test_no_case_is_lost():
    assert len(COVERED) == 13  # a new layer raises the number


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id, marks=[] if c.id in QUICK else [pytest.mark.slow]) for c in COVERED])
def test_reference(case):
    p = posterior(nl.NTK(nl.network_from_config(case.network)), case.x_train, case.y_train, noise=case.noise)
    n = len(case.x_train)
    condition = case.max_eigenvalue / (case.min_eigenvalue + case.noise)
    size = np.sqrt(p.kernel.diag(case.x_test)) * case.rkhs_norm
    assert_accurate(p.mean(case.x_test), case.mean, scale=size, tol=n * EPS * condition, what="mean")
    assert_accurate(p.rkhs_norm, case.rkhs_norm, scale=case.rkhs_norm, tol=n * EPS * condition, what="norm")
    value, lower, _ = p.min_eigenvalue
    assert_accurate(value, case.min_eigenvalue, scale=case.max_eigenvalue, tol=n * EPS, what="eigenvalue")
    assert lower <= case.min_eigenvalue
    assert p.effective_eigenvalue == value + case.noise


# --- The mean ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_alpha_solves(data, noise):
    x, y = data
    p = posterior(KERNEL, x, y, noise=noise)
    np.testing.assert_array_equal(p.gram, KERNEL(x))
    np.testing.assert_allclose(p.gram @ p.alpha + noise * p.alpha, y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(p.mean(x), p.gram @ p.alpha, rtol=0, atol=1e-12)
    assert p.rkhs_norm == pytest.approx(math.sqrt(p.alpha @ p.gram @ p.alpha), rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"noise": 0.1}, {"stop_time": 2.0}, {"stop_time": 2.0, "step_size": 0.01}])
def test_outputs_share_the_kernel(data, options):
    x, y = data
    both = posterior(KERNEL, x, np.c_[y, 2 * y**2], **options)
    one, two = posterior(KERNEL, x, y, **options), posterior(KERNEL, x, 2 * y**2, **options)
    points = x[:5] + 0.1
    np.testing.assert_allclose(both.mean(points), np.c_[one.mean(points), two.mean(points)], rtol=1e-10, atol=1e-12)
    assert both.alpha.shape == (12, 2)
    assert one.alpha.shape == (12,)
    assert both.rkhs_norm == pytest.approx(max(one.rkhs_norm, two.rkhs_norm), rel=1e-12)
    assert posterior(KERNEL, x, y[:, None], **options).mean(points).shape == (5, 1)


@pytest.mark.parametrize("m", [0, slow(1), 7, slow(11)])
@pytest.mark.parametrize("to_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_blocks_equal_one_pass(data, monkeypatch, m, to_array):
    x, y = data
    p = posterior(KERNEL, x, np.c_[y, -y])
    points = to_array(np.random.default_rng(1).standard_normal((m, 3)).astype(np.float32))
    mean, variance = p.mean(points), p.variance(points)
    monkeypatch.setattr(MODULE, "_BLOCK", 4 * 12)
    np.testing.assert_allclose(p.mean(points), mean, rtol=0, atol=2e-5 if isinstance(points, jax.Array) else 1e-6)
    np.testing.assert_allclose(p.variance(points), variance, rtol=0, atol=1e-6)
    assert p.mean(points).shape == (m, 2)
    assert p.variance(points).shape == (m,)


# --- Early stopping ------------------------------------------------------------------------------------------------------


def test_gradient_descent(data):
    x, y = data
    gram = KERNEL(x)
    step = 1 / np.linalg.eigvalsh(gram)[-1] * (1 - 1e-12)
    for steps in (1, 2, 37):
        p = posterior(KERNEL, x, y, stop_time=steps * step, step_size=step)
        alpha = np.zeros(12)
        for _ in range(steps):
            alpha += step * (y - gram @ alpha)
        np.testing.assert_allclose(p.alpha, alpha, rtol=0, atol=1e-12 * np.abs(alpha).max())


def test_gradient_flow_is_the_limit_of_small_steps(data):
    x, y = data
    flow = posterior(KERNEL, x, y, stop_time=3.0)
    errors = [np.abs(posterior(KERNEL, x, y, stop_time=3.0, step_size=h).alpha - flow.alpha).max() for h in (1e-3, 1e-4, 1e-5)]
    np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 10, rtol=0.1)


def test_gradient_flow_limits(data):
    x, y = data
    np.testing.assert_allclose(posterior(KERNEL, x, y, stop_time=1e9).alpha, posterior(KERNEL, x, y).alpha, rtol=1e-9)
    np.testing.assert_allclose(posterior(KERNEL, x, y, stop_time=1e-12).alpha, 1e-12 * y, rtol=1e-9)


@pytest.mark.parametrize("options", [{"noise": 0.2}, {"stop_time": 0.7}, {"stop_time": 0.7, "step_size": 0.01}])
def test_effective_eigenvalue_bounds_the_norm(data, options):
    x, y = data
    p = posterior(KERNEL, x, y, **options)
    values, vectors = np.linalg.eigh(p.gram)
    smallest = values[0]
    want = {
        ("noise",): lambda: smallest + 0.2,
        ("stop_time",): lambda: smallest / (1 - math.exp(-smallest * 0.7)),
        ("stop_time", "step_size"): lambda: smallest / (1 - (1 - 0.01 * smallest) ** 70),
    }[tuple(options)]()
    assert p.effective_eigenvalue == pytest.approx(want, rel=1e-9)
    assert p.rkhs_norm**2 <= y @ y / p.effective_eigenvalue
    assert p.min_eigenvalue.value == pytest.approx(smallest, rel=1e-9)
    worst = posterior(KERNEL, x, vectors[:, 0], noise=0.0)
    assert worst.rkhs_norm**2 == pytest.approx(1 / worst.effective_eigenvalue, rel=1e-9)


@pytest.mark.parametrize("step_size", [None, 0.01])
def test_effective_eigenvalue_of_a_singular_matrix_is_one_over_time(step_size):
    x = np.array([[1.0], [2.0], [3.0]])
    p = posterior(NO_BIAS, x, np.array([1.0, -1.0, 5.0]), stop_time=4.0, step_size=step_size)
    assert p.effective_eigenvalue == pytest.approx(1 / 4, rel=1e-9)


# --- Singular Gram matrices ----------------------------------------------------------------------------------------------


def test_equal_rows_with_equal_labels(data):
    x, y = data
    rows = [*range(12), 3, 3, 7]
    p, distinct = posterior(KERNEL, x[rows], y[rows]), posterior(KERNEL, x, y)
    np.testing.assert_allclose(p.mean(x + 0.2), distinct.mean(x + 0.2), rtol=0, atol=1e-12)
    np.testing.assert_allclose(p.mean(x[rows]), y[rows], rtol=0, atol=1e-12)
    np.testing.assert_allclose(p.alpha, np.linalg.pinv(KERNEL(x[rows]), hermitian=True) @ y[rows], rtol=0, atol=1e-11)
    np.testing.assert_allclose(p.variance(x + 0.2), distinct.variance(x + 0.2), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(p.gram, KERNEL(x)[np.ix_(rows, rows)])
    assert p.rkhs_norm == pytest.approx(distinct.rkhs_norm, rel=1e-12)
    smallest = np.linalg.eigvalsh(KERNEL(x[rows]))[3]
    assert p.min_eigenvalue.value == pytest.approx(smallest, rel=1e-10)
    assert smallest * (1 - 1e-10) <= p.min_eigenvalue.lower <= smallest
    assert p.min_eigenvalue.method == "eigvalsh_nonzero"
    assert p.rkhs_norm**2 <= y[rows] @ y[rows] / p.effective_eigenvalue


def test_equal_rows_with_different_labels(data):
    x, y = data
    x, y = np.vstack([x, x[4]]), np.append(y, y[4] + 1)
    with pytest.raises(ValueError, match=r"Rows 4 and 12 of `x` are equal, y\[4\]=.* and y\[12\]=.*Use noise >= 1e-") as caught:
        posterior(KERNEL, x, y)
    assert_suggested_noise_works(caught, KERNEL, x, y)


def assert_suggested_noise_works(caught, kernel, x, y):
    noise = float(str(caught.value).split("Use noise >= ")[1].split(",")[0])
    assert np.isfinite(posterior(kernel, x, y, noise=noise).mean(x)).all()


def test_rank_two(rng):
    # Without biases a network on 1-D data has two features, max(x, 0) and max(-x, 0).
    x = np.array([[1.0], [2.0], [3.0], [-1.0]])
    with pytest.raises(ValueError, match=r"rank 2 < n=4.*Rows 0 and 2 of `x` are equal to the kernel but for a factor") as caught:
        posterior(NO_BIAS, x, np.array([1.0, 2.0, 4.0, 1.0]))
    assert_suggested_noise_works(caught, NO_BIAS, x, np.array([1.0, 2.0, 4.0, 1.0]))
    y = np.array([1.0, 2.0, 3.0, 5.0])
    p = posterior(NO_BIAS, x, y)
    np.testing.assert_allclose(p.mean(x), y, rtol=1e-13)
    np.testing.assert_allclose(p.mean(np.array([[10.0], [-3.0]])), [10, 15], rtol=1e-13)
    assert p.min_eigenvalue.value == pytest.approx(np.linalg.eigvalsh(p.gram)[2], rel=1e-12)
    assert p.min_eigenvalue.method == "eigh_nonzero"
    assert p.variance(x).max() <= 1e-12 * p.kernel.diag(x).max()
    with pytest.raises(ValueError, match="a singular K and noise=0"):
        p.log_marginal_likelihood()
    assert posterior(KERNEL, x, np.array([1.0, 2.0, 4.0, 1.0])).min_eigenvalue.lower > 0


def test_zero_row():
    x = np.array([[0.0], [1.0]])
    with pytest.raises(ValueError, match=r"Row 0 of `x` has k\(x, x\) = 0"):
        posterior(NO_BIAS, x, np.array([1.0, 1.0]))
    np.testing.assert_allclose(posterior(NO_BIAS, x, np.array([0.0, 2.0])).mean(x), [0, 2], atol=1e-15)


def test_rows_that_nearly_coincide(data):
    x, y = data
    x, y = np.vstack([x, x[4] * (1 + 1e-15)]), np.append(y, y[4] + 1)
    with pytest.raises(ValueError, match="Rows 4 and 12 of `x` are equal to the kernel"):
        posterior(KERNEL, x, y)


def test_smooth_kernel_on_a_fine_grid():
    # The eigenvalues fall below rounding: smooth labels have an interpolant to 1e-8, rough ones do not.
    x = np.linspace(-2, 2, 60)[:, None]
    p = posterior(Plain(), x, np.sin(x[:, 0]))
    np.testing.assert_allclose(p.mean(x), np.sin(x[:, 0]), rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match=r"rank .* < n=60 to rounding"):
        posterior(Plain(), x, np.cos(1e3 * x[:, 0]))


@pytest.mark.parametrize("n", [5, 100, 400])
def test_sine_grid_is_no_trouble(n):
    x = np.linspace(-np.pi, np.pi, n)[:, None]
    p = posterior(KERNEL, x, np.sin(x[:, 0]))
    np.testing.assert_allclose(p.mean(x), np.sin(x[:, 0]), rtol=0, atol=1e-8)
    assert p.min_eigenvalue.lower > 0


def test_indefinite():
    kernel = Plain(np.array([[1.0, 2.0], [2.0, 1.0]]))
    x = np.array([[0.0], [1.0]])
    for noise in (0.0, 0.5):
        with pytest.raises(ValueError, match=r"positive semi-definite Gram matrix. Got lambda_min=-1,") as caught:
            posterior(kernel, x, np.ones(2), noise=noise)
    assert_suggested_noise_works(caught, kernel, x, np.ones(2))


# --- Noise ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_noise_below_rounding_is_refused(data, scale):
    x, y = scale * data[0], data[1]
    rounding = 12 * EPS * np.linalg.eigvalsh(NO_BIAS(x))[-1]
    with pytest.raises(ValueError, match=r"lost in the rounding of the Gram matrix .* Use noise=0 or noise >= ") as caught:
        posterior(NO_BIAS, x, y, noise=0.9 * rounding)
    least = float(str(caught.value).split("noise >= ")[1].strip("."))
    assert rounding <= least <= 10 * rounding
    posterior(NO_BIAS, x, y, noise=least)


def test_noise_of_float32_kernels_is_judged_in_float32(data):
    x, y = data

    class Single(Plain):
        def __call__(self, x1, x2=None):
            return super().__call__(x1, x2).astype(np.float32)

    posterior(Plain(), x, y, noise=1e-8)
    with pytest.raises(ValueError, match="lost in the rounding"):
        posterior(Single(), x, y, noise=1e-8)


# --- Variance ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, slow(1e-6), 0.5])
def test_variance(data, noise):
    x, y = data
    p = posterior(nl.NNGP(nl.mlp(1)), x, y, noise=noise)
    points = np.r_[x, x + 0.1, 100 * x]
    cross, prior = p.kernel(points, x), p.kernel.diag(points)
    want = prior - np.einsum("ij,ij->i", cross, np.linalg.solve(p.gram + noise * np.eye(12), cross.T).T)
    variance = p.variance(points)
    np.testing.assert_allclose(variance, want, rtol=0, atol=1e-9 * prior.max())
    assert (variance >= 0).all()
    assert (variance <= prior).all()
    if noise == 0:
        assert (variance[:12] <= 1e-10 * prior[:12]).all()
    else:
        assert (variance[:12] <= noise).all()


def test_variance_beyond_rounding_warns(data):
    x, y = data
    p = posterior(Plain(), x, y, noise=0.1)

    class Wrong(Plain):
        def diag(self, x):
            return np.full(len(x), 0.5)

    wrong = posterior(Wrong(), x, y, noise=0.1)
    assert (p.variance(x) > 0).all()
    with pytest.warns(RuntimeWarning, match="below 0 by more than rounding"):
        assert (wrong.variance(x) == 0).all()


def test_variance_at_rounding_level_does_not_warn():
    x = np.linspace(0, 1, 40)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variance = posterior(Plain(), x, x[:, 0], noise=1e-12).variance(np.linspace(0, 1, 300)[:, None])
    assert (variance >= 0).all()


# --- Marginal likelihood -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_log_marginal_likelihood(data, noise):
    x, y = data
    normal = scipy.stats.multivariate_normal(np.zeros(12), KERNEL(x) + noise * np.eye(12))
    want = normal.logpdf(y)
    assert posterior(KERNEL, x, y, noise=noise).log_marginal_likelihood() == pytest.approx(want, rel=1e-11)
    value = log_marginal_likelihood(KERNEL, x, y, noise)
    assert value == pytest.approx(want, rel=1e-11)
    assert type(value) is float
    two = np.c_[y, 2 * y]
    want += normal.logpdf(2 * y)
    assert posterior(KERNEL, x, two, noise=noise).log_marginal_likelihood() == pytest.approx(want, rel=1e-11)
    assert log_marginal_likelihood(KERNEL, x, two, noise) == pytest.approx(want, rel=1e-11)


@pytest.mark.slow
def test_log_marginal_likelihood_under_jit_and_grad(data):
    x, y = data
    eager = log_marginal_likelihood(KERNEL, x, y, 0.1)
    assert float(jax.jit(log_marginal_likelihood)(KERNEL, x, y, 0.1)) == pytest.approx(eager, rel=1e-5)

    def build(w_std, b_std, noise):
        return log_marginal_likelihood(nl.NTK(nl.mlp(1, w_std=w_std, b_std=b_std)), x, y, noise)

    at, h = (1.3, 0.4, 0.1), 1e-6
    gradient = jax.grad(build, argnums=(0, 1, 2))(*at)
    for i, got in enumerate(gradient):
        up, down = ([v + s * h * (i == j) for j, v in enumerate(at)] for s in (1, -1))
        want = (build(*up) - build(*down)) / (2 * h)
        assert float(got) == pytest.approx(want, rel=2e-3)
    leaves = jax.tree.leaves(jax.grad(lambda kernel: log_marginal_likelihood(kernel, x, y, 0.1))(KERNEL))
    assert leaves
    assert all(np.isfinite(leaf) for leaf in leaves)


def test_log_marginal_likelihood_without_a_density(data):
    x, y = data
    kernel = Plain(np.array([[1.0, 2.0], [2.0, 1.0]]))
    with pytest.raises(ValueError, match="positive definite"):
        log_marginal_likelihood(kernel, x[:2], y[:2], 0.0)
    with pytest.raises(ValueError, match=r"stop_time=1.0"):
        posterior(KERNEL, x, y, stop_time=1.0).log_marginal_likelihood()
    with pytest.raises(ValueError, match=r"noise >= 0. Got -1"):
        log_marginal_likelihood(KERNEL, x, y, -1)
