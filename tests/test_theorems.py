"""The theorem checks: where they apply, that they hold there, and that they can fail."""

from math import inf

import numpy as np
import pytest
from helpers import slow

import ntk_ln as nl
from ntk_ln import theorems

X = np.array([[1.0, 0.5], [-0.7, 1.1], [0.3, -1.4], [2.0, 0.1]])
Y = np.array([0.5, -1.0, 2.0, 0.3])


@pytest.mark.parametrize("net", [nl.mlp(2), pytest.param(nl.mlp(1, activation="gelu"), marks=pytest.mark.slow)])
def test_3_1_holds_without_a_norm(net):
    check = nl.check_theorem_3_1(net, X, Y)
    assert (check.name, check.applies, check.holds) == ("3.1", True, True)
    for part in ("data", "witness"):
        evidence = check.evidence[part]
        assert abs(evidence["coefficient"]) > evidence["coefficient_error"] > 0
        assert abs(evidence["fitted_power"] - 1) < 0.02


@pytest.mark.slow
def test_3_1_predicts_the_power_of_the_degree():
    net = nl.Network(
        nl.Dense(b_std=0.3),
        nl.Activation("relu_power", degree=2),
        nl.Dense(b_std=0.3),
        nl.Activation("relu_power", degree=2),
        nl.Dense(),
    )
    check = nl.check_theorem_3_1(net, X, Y)
    assert check.holds
    assert check.evidence["predicted_power"] == 4


def test_3_1_can_be_undecided_by_its_own_error_bound(monkeypatch):
    monkeypatch.setattr(theorems, "_coefficient_errors", lambda p, k: np.full((len(k), 1), 1e9))
    assert nl.check_theorem_3_1(nl.mlp(1), X, Y).holds is False


@pytest.mark.parametrize(
    ("net", "y", "reason"),
    [
        (nl.mlp(2, layer_norm="first"), Y, "has a norm layer"),
        (nl.mlp(2, activation="erf"), Y, "degree n <= 1/2"),
        (nl.mlp(2, activation="step"), Y, "degree n <= 1/2"),
        (nl.mlp(2), 0 * Y, "all targets are 0"),
    ],
)
def test_3_1_says_where_it_does_not_apply(net, y, reason):
    check = nl.check_theorem_3_1(net, X, y)
    assert (check.applies, check.holds) == (False, None)
    assert reason in check.evidence["reason"]


NORMED = [
    slow(nl.mlp(2, layer_norm="first")),
    nl.mlp(2, layer_norm="last", after_activation=True, eps=0.1, affine=True),
    slow(nl.mlp(2, activation="gelu", layer_norm="last")),
    slow(nl.mlp(1, activation="erf", layer_norm="first")),
]


@pytest.mark.parametrize("net", NORMED)
def test_3_2_and_3_3_hold_with_a_norm(net):
    assert nl.check_theorem_3_2(net).holds
    check = nl.check_theorem_3_3(net, X, Y)
    assert (check.applies, check.holds) == (True, True)
    e = check.evidence
    assert e["largest_mean_found"] <= e["rkhs"] <= e["spectral"] <= e["dataset"] < inf


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (nl.mlp(2), "has no norm layer"),
        (nl.mlp(2, activation="erf", layer_norm="last"), "degree n <= 1/2"),
        (nl.mlp(2, activation="erf", layer_norm="first", after_activation=True), "degree n <= 1/2"),
    ],
)
def test_3_2_and_3_3_say_where_they_do_not_apply(net, reason):
    for check in (nl.check_theorem_3_2(net), nl.check_theorem_3_3(net, X, Y)):
        assert (check.applies, check.holds) == (False, None)
        assert reason in check.evidence["reason"]
    assert nl.kernel_sup(nl.NTK(net)).value == inf


def test_3_2_fails_on_a_wrong_constant(monkeypatch):
    for wrong in (1.0, 2.0, inf):
        monkeypatch.setattr(theorems, "kernel_sup", lambda kernel, wrong=wrong: nl.KernelSup(wrong, True))
        assert nl.check_theorem_3_2(nl.mlp(2, layer_norm="first")).holds is False


def test_3_3_fails_on_a_broken_chain(monkeypatch):
    monkeypatch.setattr(theorems, "sup_norm_bound", lambda p: nl.SupNormBound(1.5, 0.1, 1.0, 0.01, 2.0, 3.0))
    assert nl.check_theorem_3_3(nl.mlp(2, layer_norm="first"), X, Y).holds is False


def test_3_1_at_large_inputs():
    x, y = np.array([[1.0, 0.5], [2.0, -1.0]]), np.array([1.0, -1.0])
    assert nl.check_theorem_3_1(nl.mlp(1), 1e150 * x, y).holds
    with pytest.raises(
        ValueError, match=r"needs finite kernel values\. kernel\(x\)\[0, 0\] is inf, of inputs up to 2\.0e\+200: divide"
    ):
        nl.check_theorem_3_1(nl.mlp(1), 1e200 * x, y)
