"""Laws that every network and dataset obeys, drawn from the public strategies of `ntk_ln.testing`.

A network's numbers may be drawn freely; each new structure costs compilations, so every test draws from a few structures and
from datasets of one shape.
"""

from math import inf

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ntk_ln as nl
from ntk_ln import testing

EPS = np.finfo(np.float64).eps
N, D = 5, 2

laws = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
data = testing.datasets(points=N, features=D)


@pytest.mark.parametrize(
    "activation", [pytest.param(name, marks=[] if name == "relu" else [pytest.mark.slow]) for name in testing.ACTIVATIONS]
)
@settings(laws, max_examples=4)
@given(net=testing.networks(activations=("relu",), max_depth=1), dataset=data)
def test_a_gram_matrix_is_symmetric_psd_and_has_its_diagonal(activation, net, dataset):
    net = nl.network_from_config([c | {"name": activation} if c["layer"] == "activation" else c for c in net.to_config()])
    x, _ = dataset
    k = nl.NTK(net)
    for dtype in (np.float64, np.float32):
        eps = np.finfo(dtype).eps
        rows = x.astype(dtype)
        gram = k(rows)
        assert gram.dtype == dtype
        np.testing.assert_array_equal(gram, gram.T)
        np.testing.assert_array_equal(gram, k(rows, rows.copy()))
        np.testing.assert_allclose(np.diag(gram), k.diag(rows), rtol=32 * eps)
        values = np.linalg.eigvalsh(gram.astype(np.float64))
        assert values[0] >= -N * eps * values[-1]
    cross = k(x, x[::-1] + 0.25)
    np.testing.assert_allclose(cross, k(x[::-1] + 0.25, x).T, rtol=0, atol=64 * EPS * np.abs(cross).max())


@settings(laws, max_examples=3)
@given(
    net=testing.networks(layer_norm=True, activations=("relu",), max_depth=1),
    dataset=data,
    v=testing.directions(D),
    radius=st.integers(-3, 12),
)
def test_with_a_norm_the_mean_is_bounded_and_has_a_limit(net, dataset, v, radius):
    x, y = dataset
    noise = 1e-6 * float(nl.NTK(net).diag(x).max())  # near-parallel rows can be singular to rounding without
    bound = testing.assert_bound_holds(net, x, y, noise=noise, points=10.0**radius * np.stack([v, -v]))
    assert bound.dataset < inf
    p = nl.posterior(nl.NTK(net), x, y, noise=noise)
    limit = nl.far_field(p, v)
    assert limit.power == 0
    # The next term at r = 1e12, and the rounding of the solve.
    slack = 4e-12 * abs(limit.correction) + 1e-13 * np.abs(p.alpha).sum() * bound.kernel_sup
    assert abs(p.mean(1e12 * v[None, :])[0] - limit.coefficient) <= slack


@pytest.mark.slow
@settings(laws, max_examples=3)
@given(net=testing.networks(layer_norm=False, activations=("relu", "abs"), max_depth=1), dataset=data)
def test_without_a_norm_theorem_3_1_holds_and_no_number_is_called_a_bound(net, dataset):
    x, y = dataset
    check = nl.check_theorem_3_1(net, x, y, noise=1e-6 * float(nl.NTK(net).diag(x).max()))
    assert check.applies
    assert check.holds, check.evidence
    assert not nl.check_theorem_3_2(net).applies
    assert not nl.check_theorem_3_3(net, x, y).applies
    assert nl.kernel_sup(nl.NTK(net)).value == inf
    with pytest.raises(AssertionError, match="No finite bound"):
        testing.assert_bound_holds(net, x, y, noise=1.0)


@pytest.mark.slow
@settings(laws, max_examples=4)
@given(net=testing.networks(layer_norm=True, activations=("erf",), max_depth=1), dataset=data)
def test_erf_before_the_norm_has_no_bound(net, dataset):
    before = next(c["layer"] for c in net.to_config() if c["layer"] in ("layer_norm", "activation"))
    applies = before == "layer_norm"
    assert nl.check_theorem_3_2(net).applies is applies
    assert nl.check_theorem_3_3(net, *dataset, noise=0.1).applies is applies
    assert (nl.kernel_sup(nl.NTK(net)).value < inf) is applies


@settings(laws, max_examples=20)
@given(net=testing.networks())
def test_a_network_is_its_configuration(net):
    assert nl.network_from_config(net.to_config()) == net


def test_assert_bound_holds_fails_where_the_bound_does(monkeypatch):
    monkeypatch.setattr(testing, "sup_norm_bound", lambda p: nl.SupNormBound(1.0, 1.0, 1.0, 0.5, 0.6, 0.7))
    with pytest.raises(AssertionError, match=r"\|f\| = .* at x = .* exceeds the bound 0.5"):
        testing.assert_bound_holds(nl.mlp(1, layer_norm="first"), [[1.0], [2.0]], [0.0, 1.0])
    monkeypatch.setattr(testing, "sup_norm_bound", lambda p: nl.SupNormBound(1.0, 1.0, 1.0, 8.0, 0.6, 0.7))
    with pytest.raises(AssertionError, match="not ordered"):
        testing.assert_bound_holds(nl.mlp(1, layer_norm="first"), [[1.0], [2.0]], [0.0, 1.0])
