"""C = sup Theta(x,x), the chain of bounds, and the largest mean found."""

from math import inf, sqrt

import numpy as np
import pytest
from helpers import slow

import ntk_ln as nl

X = np.array([[1.0, 0.5], [-0.7, 1.1], [0.3, -1.4], [2.0, 0.1]])
Y = np.array([0.5, -1.0, 2.0, 0.3])


def diagonal_on_a_grid(net: nl.Network) -> np.ndarray:
    return nl.NTK(net).diag(np.concatenate([[0.0], 10.0 ** np.linspace(-8, 8, 4001)])[:, None])


def test_by_hand_values():
    s = 0.01  # b_std^2; paper_mlp, depth 2, d = 1
    by_hand = {"first": 3 + 3 * s, (2,): max(1 + 2 + s, 0.5 + 2 + s), "every": 1 / (1 + s) + 2 + s}
    for layer_norm, value in by_hand.items():
        got = nl.kernel_sup(nl.NTK(nl.paper_mlp(2, layer_norm=layer_norm)))
        assert got.exact
        np.testing.assert_allclose(got.value, value, rtol=1e-14)
    assert nl.kernel_sup(nl.NTK(nl.paper_mlp(2))) == (inf, True)


@pytest.mark.parametrize(
    ("net", "exact"),
    [
        (nl.mlp(3, layer_norm="last"), True),
        (nl.mlp(2, layer_norm=(1,), after_activation=True, eps=0.5, affine=True), True),
        pytest.param(nl.mlp(2, layer_norm="every", eps=0.5, b_std=1.0), True, marks=pytest.mark.slow),
        pytest.param(nl.mlp(2, activation="gelu", layer_norm="first"), True, marks=pytest.mark.slow),
        (nl.mlp(2, activation="gelu", layer_norm="last"), False),
        pytest.param(nl.mlp(2, activation="gelu", layer_norm="first", eps=0.5), False, marks=pytest.mark.slow),
        (nl.mlp(2, activation="erf", layer_norm="first", eps=0.5), False),
    ],
)
def test_the_supremum_is_never_exceeded_and_always_reached(net, exact):
    c = nl.kernel_sup(nl.NTK(net))
    assert c.exact is exact
    grid = diagonal_on_a_grid(net)
    assert grid.max() <= c.value * (1 + 1e-12)
    np.testing.assert_allclose(grid.max(), c.value, rtol=1e-5)
    nngp = nl.kernel_sup(nl.NNGP(net)).value
    assert 0 < nngp <= c.value


@pytest.mark.parametrize(
    "net",
    [nl.mlp(2), *(slow(nl.mlp(2, activation=name)) for name in ("gelu", "erf")), nl.mlp(2, activation="erf", layer_norm="last")],
)
def test_unbounded_networks_have_no_bound(net):
    assert nl.kernel_sup(nl.NTK(net)) == (inf, True)
    bound = nl.sup_norm_bound(nl.posterior(nl.NTK(net), X, Y))
    assert bound[3:] == (inf, inf, inf)
    diagonal = nl.NTK(net).diag(np.array([[1e8], [1e12]]))
    exponent = np.log(diagonal[1] / diagonal[0]) / np.log(1e4)
    np.testing.assert_allclose(exponent, 2 * net.growth.diag, atol=1e-3)


def test_a_step_network_is_bounded_without_a_norm():
    assert nl.kernel_sup(nl.NTK(nl.mlp(1, activation="step"))).value < inf


@pytest.mark.parametrize("noise", [slow(0.0), 0.5])
@pytest.mark.parametrize("y", [Y, np.stack([Y, Y[::-1]], axis=1)], ids=["one output", "two outputs"])
def test_the_chain_is_what_it_says(y, noise):
    p = nl.posterior(nl.NTK(nl.mlp(2, layer_norm="first")), X, y, noise=noise)
    b = nl.sup_norm_bound(p)
    eigenvalue = np.linalg.eigvalsh(p.gram)[0] + noise
    np.testing.assert_allclose(b.effective_eigenvalue, eigenvalue, rtol=1e-10)
    length = np.sqrt((y.reshape(4, -1) ** 2).sum(0)).max()
    np.testing.assert_allclose(b.rkhs, sqrt(b.kernel_sup) * p.rkhs_norm, rtol=1e-14)
    np.testing.assert_allclose(b.spectral, sqrt(b.kernel_sup / eigenvalue) * length, rtol=1e-10)
    np.testing.assert_allclose(b.dataset, sqrt(b.kernel_sup * 4 / eigenvalue) * np.abs(y).max(), rtol=1e-10)
    found = nl.sup_norm(p)
    assert found.value <= b.rkhs <= b.spectral <= b.dataset


def test_the_bound_is_tight_for_one_point():
    # One training point where Theta(x,x) = C: f(x) = y there, and |f|_H = |y|/sqrt(C).
    p = nl.posterior(nl.NTK(nl.paper_mlp(2, layer_norm="first")), [[1.0]], [3.0])
    np.testing.assert_allclose([nl.sup_norm_bound(p).rkhs, nl.sup_norm(p).value], 3.0, rtol=1e-12)


def test_early_stopping_keeps_the_chain():
    p = nl.posterior(nl.NTK(nl.mlp(2, layer_norm="last")), X, Y, stop_time=3.0)
    b = nl.sup_norm_bound(p)
    assert b.effective_eigenvalue >= 1 / 3.0
    assert nl.sup_norm(p).value <= b.rkhs <= b.spectral <= b.dataset < inf


@pytest.mark.slow
@pytest.mark.parametrize("layer_norm", ["first", "last"])
def test_sup_norm_finds_what_a_fine_grid_finds(layer_norm):
    x, y = np.array([[-2.0], [-0.5], [1.0], [2.5]]), np.array([1.0, -2.0, 0.5, 3.0])
    p = nl.posterior(nl.NTK(nl.mlp(2, layer_norm=layer_norm)), x, y)
    r = np.concatenate([np.linspace(-20, 20, 8001), -(10.0 ** np.linspace(1, 9, 400)), 10.0 ** np.linspace(1, 9, 400)])
    found = nl.sup_norm(p)
    assert found.value >= np.abs(p.mean(r[:, None])).max() * (1 - 1e-9)
    if found.point is not None:
        np.testing.assert_allclose(abs(p.mean(found.point[None, :])[0]), found.value, rtol=1e-9)
    else:
        np.testing.assert_allclose(abs(nl.far_field(p, found.direction).coefficient), found.value, rtol=1e-9)


@pytest.mark.slow
def test_sup_norm_does_not_depend_on_the_units_of_x():
    # Without biases a LayerNorm network sees directions only.
    net = nl.mlp(2, layer_norm="first", b_std=0.0)
    values = [nl.sup_norm(nl.posterior(nl.NTK(net), c * X, Y)).value for c in (1e-6, 1.0, 1e6)]
    np.testing.assert_allclose(values, values[1], rtol=1e-6)


def test_a_zero_target_gives_a_zero_mean():
    p = nl.posterior(nl.NTK(nl.mlp(1)), X, 0 * Y)
    assert nl.sup_norm(p).value == 0


@pytest.mark.parametrize("call", [nl.sup_norm_bound, nl.sup_norm, lambda p: nl.kernel_sup(p.kernel)])
def test_a_kernel_without_a_closed_form_is_refused(call):
    p = nl.posterior(nl.NeuralTangentsKernel(nl.mlp(1, layer_norm="first")), X, Y)
    with pytest.raises(TypeError, match="needs a closed-form kernel"):
        call(p)


@pytest.mark.parametrize("scale", [1e-300, 1e160, 1e300])
def test_bounds_and_suprema_at_every_scale(scale):
    x, y = np.random.default_rng(0).normal(size=(4, 2)), np.random.default_rng(1).normal(size=4)
    kernel = nl.NTK(nl.mlp(1, layer_norm="first"))
    near = nl.posterior(kernel, x, y)
    labels = nl.posterior(kernel, x, scale * y)
    np.testing.assert_allclose(np.array(nl.sup_norm_bound(labels)[2:]) / scale, nl.sup_norm_bound(near)[2:], rtol=1e-9)
    np.testing.assert_allclose(nl.sup_norm(labels).value / scale, nl.sup_norm(near).value, rtol=1e-6)
    inputs = nl.posterior(kernel, scale * x, y) if scale > 1 else near  # below the bias' scale the rows are one
    found, bound = nl.sup_norm(inputs), nl.sup_norm_bound(inputs)
    assert np.abs(y).max() * (1 - 1e-9) <= found.value <= bound.rkhs <= bound.spectral <= bound.dataset


def test_the_supremum_is_found_wherever_the_weights_put_it():
    for w_std in (1e-20, 1.0, 1e18):
        net = nl.Network(nl.Dense(w_std=w_std, b_std=0.1), nl.Activation("gelu"), nl.LayerNorm(), nl.Dense())
        assert nl.kernel_sup(nl.NTK(net)).value == pytest.approx(2.47723682120763, rel=1e-9)


@pytest.mark.parametrize("activation", ["erf", pytest.param("tanh", marks=pytest.mark.slow), "sin"])
def test_the_origin_does_not_count_where_a_norm_makes_0_over_0_of_it(activation):
    net = nl.Network(nl.Dense(), nl.LayerNorm(), nl.Activation(activation), nl.Dense())
    p = nl.posterior(nl.NTK(net), X, Y, noise=0.1)
    found = nl.sup_norm(p)
    assert found.value <= nl.sup_norm_bound(p).rkhs
    assert nl.check_theorem_3_3(net, X, Y, noise=0.1).holds


@pytest.mark.parametrize("cut", [0, 2])
def test_weights_of_0_leave_a_constant(cut):
    layers = [nl.Dense(b_std=0.5), nl.Activation("relu"), nl.Dense(w_std=2.0, b_std=0.4), nl.Activation("erf"), nl.Dense(b_std=1.0)]
    layers[cut] = nl.Dense(w_std=0.0, b_std=0.3)
    net = nl.Network(*layers)
    p = nl.posterior(nl.NTK(net), X, Y, noise=0.1)
    assert nl.kernel_sup(p.kernel) == (pytest.approx(p.kernel.diag(X)[0], rel=1e-14), True)
    far = p.mean(1e12 * X)
    np.testing.assert_allclose(far, far[0], rtol=1e-14)
    assert nl.sup_norm(p).value == pytest.approx(abs(far[0]), rel=1e-14)
    assert nl.far_field(p, X[0])[:3] == (0, pytest.approx(far[0], rel=1e-14), 0)
    check = nl.check_theorem_3_1(net, X, Y, noise=0.1)
    assert not check.applies
    assert "do not depend on x" in check.evidence["reason"]


def test_many_features_take_derivatives_instead_of_differences(monkeypatch):
    x = np.random.default_rng(0).normal(size=(6, 30))
    p = nl.posterior(nl.NTK(nl.mlp(1, layer_norm="first")), x, x[:, 0])
    by_differences = nl.sup_norm(p).value
    monkeypatch.setattr("ntk_ln.bounds.DIFFERENCES", 10)
    assert nl.sup_norm(p).value == pytest.approx(by_differences, rel=1e-6)


@pytest.mark.slow
def test_thousands_of_features_fit():
    x = np.random.default_rng(0).normal(size=(8, 5000))
    p = nl.posterior(nl.NTK(nl.mlp(2, layer_norm="first")), x, x[:, 0])
    assert nl.sup_norm(p).value <= nl.sup_norm_bound(p).rkhs
