"""posterior: kinds of arrays, files, and what is refused."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import KERNEL, NO_BIAS, Plain

import ntk_ln as nl
from ntk_ln._dtype import enable_x64
from ntk_ln.posterior import load_posterior, posterior

MODULE = importlib.import_module("ntk_ln.posterior")

# --- Kinds of arrays -----------------------------------------------------------------------------------------------------


def test_numpy_in_numpy_out(data):
    x, y = data
    p = posterior(KERNEL, x, y)
    for dtype in (np.float32, np.float64):
        for out in (p.mean(x.astype(dtype)), p.variance(x.astype(dtype))):
            assert isinstance(out, np.ndarray)
            assert out.dtype == dtype
    assert isinstance(p.alpha, np.ndarray)
    single = posterior(KERNEL, x.astype(np.float32), y.astype(np.float32))
    assert single.alpha.dtype == single.gram.dtype == np.float64
    assert single.x.dtype == np.float32
    np.testing.assert_array_equal(posterior(KERNEL, x.tolist(), y.tolist()).alpha, p.alpha)
    whole = posterior(KERNEL, [[1, 0], [2, 1]], [True, False])
    np.testing.assert_array_equal(whole.alpha, posterior(KERNEL, [[1.0, 0.0], [2.0, 1.0]], [1.0, 0.0]).alpha)


def test_jax_in_jax_out(data):
    x, y = (jnp.asarray(v, jnp.float32) for v in data)
    p = posterior(KERNEL, x, y)
    for out in (p.alpha, p.gram, p.mean(x), p.variance(x), p.x, p.y):
        assert isinstance(out, jax.Array)
        assert out.dtype == jnp.float32
    assert isinstance(p.mean(np.asarray(x)), np.ndarray)
    np.testing.assert_allclose(p.mean(x), y, rtol=0, atol=1e-4)
    double = posterior(KERNEL, np.asarray(x), np.asarray(y))
    np.testing.assert_allclose(p.alpha, double.alpha, rtol=1e-6)
    assert p.min_eigenvalue == double.min_eigenvalue


def test_jax_float64_without_the_global_flag(data):
    with enable_x64(True):
        x, y = (jnp.asarray(v) for v in data)
    p = posterior(KERNEL, x, y)
    assert p.mean(x).dtype == p.alpha.dtype == p.variance(x).dtype == jnp.float64
    np.testing.assert_allclose(p.mean(x), data[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("blocks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_mean_is_traced_and_differentiated(data, monkeypatch, blocks):
    x, y = data
    p = posterior(KERNEL, x, y)
    if blocks:
        monkeypatch.setattr(MODULE, "_BLOCK", 2 * 12)
    with enable_x64(True):
        points = jnp.asarray(x[:3] + 0.3)
        np.testing.assert_allclose(jax.jit(p.mean)(points), p.mean(x[:3] + 0.3), rtol=0, atol=1e-12)
        gradient = jax.grad(lambda v: p.mean(v).sum())(points)
    h = 1e-5
    for i in range(3):
        step = h * np.eye(3)[i]
        want = (p.mean(x[:3] + 0.3 + step) - p.mean(x[:3] + 0.3 - step)) / (2 * h)
        np.testing.assert_allclose(gradient[:, i], want, rtol=0, atol=1e-7)
    at_training_points = jax.grad(lambda v: p.mean(v).sum())(jnp.asarray(x, jnp.float32))
    assert np.isfinite(at_training_points).all()


# --- Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_array", [np.asarray, pytest.param(jnp.asarray, marks=pytest.mark.slow)], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (nl.NTK(nl.mlp(1, layer_norm="first")), {}),
        (nl.NNGP(nl.mlp(1)), {"noise": 0.1}),
        (nl.NTK(nl.mlp(1)), {"stop_time": 3.0, "step_size": 0.01}),
        (NO_BIAS, {}),
    ],
)
def test_save_and_load_give_the_same_bits(tmp_path, data, kernel, options, to_array):
    x, y = data
    rows = [*range(12), 5]
    if kernel is NO_BIAS:
        x, y = np.abs(x[:, :1]), np.abs(x[:, 0])
    p = posterior(kernel, to_array(x[rows]), to_array(y[rows]), **options)
    path = tmp_path / "file.with.any.name"
    p.save(path)
    q = load_posterior(path)
    assert type(q.kernel) is type(kernel)
    assert q.kernel.network.to_config() == kernel.network.to_config()
    for name in ("x", "y", "alpha", "gram"):
        assert type(getattr(p, name)) is type(getattr(q, name))
        np.testing.assert_array_equal(getattr(q, name), getattr(p, name), strict=True)
    for name in ("noise", "stop_time", "step_size", "rkhs_norm", "min_eigenvalue", "effective_eigenvalue"):
        assert getattr(p, name) == getattr(q, name)
    points = to_array(x + 0.1)
    np.testing.assert_array_equal(q.mean(points), p.mean(points), strict=True)
    if "stop_time" not in options:
        np.testing.assert_array_equal(q.variance(points), p.variance(points), strict=True)
    for ours, theirs in zip(vars(p._solution).values(), vars(q._solution).values(), strict=True):
        np.testing.assert_array_equal(theirs, ours)


def test_refused_files(tmp_path, data):
    with pytest.raises(TypeError, match=r"NTK and NNGP. Got Plain"):
        posterior(Plain(np.eye(12)), *data).save(tmp_path / "p.npz")
    (tmp_path / "text").write_text("nothing")
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    for name in ("text", "other.npz"):
        with pytest.raises(ValueError, match=r"needs a file of `p.save"):
            load_posterior(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="missing"):
        load_posterior(tmp_path / "missing")


# --- Refusals ------------------------------------------------------------------------------------------------------------

X, Y = np.arange(6.0).reshape(3, 2), np.arange(3.0)
X_NAN, Y_INF = np.where(X == 3, np.nan, X), np.where(Y == 2, np.inf, Y)


@pytest.mark.parametrize(
    ("x", "y", "options", "error", "match"),
    [
        (X, Y[:2], {}, ValueError, r"one row of `y` per row of `x`. Got x.shape=\(3, 2\), y.shape=\(2,\)"),
        (X[:, 0], Y, {}, ValueError, r"shape \(n, d\)"),
        (X[:, :0], Y, {}, ValueError, "at least one feature"),
        (X[:0], Y[:0], {}, ValueError, r"at least one row. Got x.shape=\(0, 2\)"),
        (X, np.ones((3, 0)), {}, ValueError, r"`y` of shape \(n,\) or \(n, k\). Got shape \(3, 0\)"),
        (X, np.ones((3, 1, 1)), {}, ValueError, r"Got shape \(3, 1, 1\)"),
        (X, 1.0, {}, ValueError, r"Got shape \(\)"),
        (X_NAN, Y, {}, ValueError, "Row 1 of `x`"),
        (X, Y_INF, {}, ValueError, "Row 2 of `y`"),
        (X, ["a", "b", "c"], {}, TypeError, "real numbers as `y`"),
        (X, Y * 1j, {}, TypeError, "real numbers as `y`. Got dtype complex128"),
        (X, [[1], [2, 3], [4]], {}, ValueError, "rectangular array"),
        (X, Y, {"noise": -0.1}, ValueError, "finite number >= 0. Got -0.1"),
        (X, Y, {"noise": np.nan}, ValueError, "finite number >= 0. Got nan"),
        (X, Y, {"noise": "much"}, TypeError, "needs a number. Got 'much'"),
        (X, Y, {"noise": None}, TypeError, "needs a number. Got None"),
        (X, Y, {"stop_time": 0.0}, ValueError, "finite number > 0. Got 0"),
        (X, Y, {"noise": 0.1, "stop_time": 1.0}, ValueError, "noise or stop_time, not both"),
        (X, Y, {"step_size": 0.1}, ValueError, "needs stop_time"),
        (X, Y, {"stop_time": 1.0, "step_size": -1.0}, ValueError, "step_size=.*finite number > 0"),
        # A part of a step would learn large eigenvalues less than small ones: the bounds rest on the opposite.
        (X, Y, {"stop_time": 0.01, "step_size": 0.02}, ValueError, "at least one step, stop_time >= step_size"),
        (np.ma.array(X, mask=X > 1.5), Y, {}, ValueError, "has masked entries"),
    ],
)
def test_refused(x, y, options, error, match):
    with pytest.raises(error, match=match):
        posterior(KERNEL, x, y, **options)


def test_step_too_large(data):
    x, y = data
    largest = np.linalg.eigvalsh(KERNEL(x))[-1]
    with pytest.raises(ValueError, match=r"step_size \* lambda_max <= 1.*use step_size <= ") as caught:
        posterior(KERNEL, x, y, stop_time=100.0, step_size=1.01 / largest)
    allowed = float(str(caught.value).split("use step_size <= ")[1].strip("."))
    assert allowed == pytest.approx(1 / largest, rel=1e-12)
    posterior(KERNEL, x, y, stop_time=100.0, step_size=allowed)


def test_refused_calls(data):
    x, y = data
    with pytest.raises(TypeError, match=r"kernel such as `NTK\(net\)`.*Got Network"):
        posterior(nl.mlp(2), x, y)
    with pytest.raises(TypeError, match="Got function"):
        posterior(lambda x1, x2=None: x1 @ x1.T, x, y)
    with pytest.raises(TypeError, match="Got a traced `x`: under jit"):
        jax.jit(lambda v: posterior(KERNEL, v, y).alpha)(jnp.asarray(x))
    with pytest.raises(TypeError, match="Got a traced `kernel`"):
        jax.grad(lambda w: posterior(nl.NTK(nl.mlp(1, w_std=w)), x, y).alpha.sum())(1.0)
    with pytest.raises(TypeError, match="Got a traced `noise`"):
        jax.grad(lambda s: posterior(KERNEL, x, y, noise=s).alpha.sum())(1.0)
    with pytest.raises(ValueError, match=r"shape \(n, n\) = \(12, 12\). Got shape \(2, 2\)"):
        posterior(Plain(np.eye(2)), x, y)
    with pytest.raises(ValueError, match=r"needs finite kernel values\. kernel\(x\)\[0, 0\] is nan"):
        posterior(Plain(np.full((12, 12), np.nan)), x, y)
    p = posterior(KERNEL, x, y)
    with pytest.raises(ValueError, match=r"shape \(m, 3\), as in training. Got shape \(2, 2\)"):
        p.mean(np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"`p.mean\(x\)` needs `x` of shape \(n, d\)"):
        p.mean(np.ones(3))
    with pytest.raises(ValueError, match="without `stop_time`"):
        posterior(KERNEL, x, y, stop_time=1.0).variance(x)


def test_inputs_are_left_alone(data):
    x, y = data
    kept = x.copy(), y.copy()
    posterior(KERNEL, x, y, noise=0.1).variance(x)
    np.testing.assert_array_equal(x, kept[0])
    np.testing.assert_array_equal(y, kept[1])


def test_repr(data):
    assert repr(posterior(KERNEL, *data, noise=0.5)) == "Posterior(NTK, x: (12, 3), y: (12,), noise=0.5)"
