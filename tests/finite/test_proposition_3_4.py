"""Proposition 3.4 by construction, and Theorem C.1 by pairs of equal soft cosine."""

import numpy as np
import pytest

import ntk_ln as nl

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 3)), RNG.normal(size=12)


@pytest.mark.parametrize("net", [nl.mlp(2), nl.mlp(1, activation="gelu", b_std=1.0)], ids=["relu", "gelu"])
def test_a_network_with_a_layer_norm_and_no_training_loss_runs_away(net):
    check = nl.check_proposition_3_4(net, X, Y)
    assert check.applies
    assert check.holds
    one, ten = check.evidence["eps"], check.evidence["eps/10"]
    assert one["training_error"] < 1e-6
    np.testing.assert_allclose(one["saturation_times_eps"], 1, rtol=1e-2)
    np.testing.assert_allclose(ten["radius_of_saturation"] / one["radius_of_saturation"], 10, rtol=0.2)


def test_where_it_does_not_apply():
    assert nl.check_proposition_3_4(nl.mlp(1, layer_norm="first"), X, Y).evidence["reason"] == "the network has a norm layer"
    assert not nl.check_proposition_3_4(nl.mlp(1, activation="erf"), X, Y).applies
    assert "no hidden Dense" in nl.check_proposition_3_4(nl.mlp(0), X, Y).evidence["reason"]
    assert "all targets are 0" in nl.check_proposition_3_4(nl.mlp(1), X, 0 * Y).evidence["reason"]


@pytest.mark.parametrize("scale", [1e-8, 1e6])
def test_the_scale_of_the_labels_does_not_matter(scale):
    assert nl.check_proposition_3_4(nl.mlp(1), X, scale * Y).holds


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"eps": 1.5}, r"needs eps in \(0, 1\)\. Got 1\.5\."),
        ({"seed": -1}, r"needs a whole number seed from 0 to 4294967295\. Got -1\."),
        ({"x": 0 * X}, r"needs an input that is not 0"),
        ({"y": np.ma.array(Y, mask=Y > 0)}, r"`y` has masked entries"),
        ({"y": Y[:-1]}, r"needs one row of `y` per row of `x`"),
        ({"y": np.full(12, np.inf)}, r"needs finite numbers\. Row 0 of `y` has inf"),
        ({"x": np.ones((12, 3))}, r"do not interpolate these 12 rows .* Merge equal rows"),
    ],
)
def test_errors(settings, says):
    arguments = {"x": X, "y": Y} | settings
    with pytest.raises(ValueError, match=says):
        nl.check_proposition_3_4(nl.mlp(1), arguments.pop("x"), arguments.pop("y"), **arguments)


@pytest.mark.parametrize("net", [nl.mlp(2, layer_norm="first"), nl.paper_mlp(1, layer_norm="every", w_in=2.0, b_std=1.0)])
def test_equal_soft_cosines_have_equal_kernels(net):
    check = nl.check_theorem_c_1(net)
    assert check.holds
    assert check.evidence["largest_growth_of_the_norm"] > 10


def test_soft_cosines_decide_only_after_a_norm_right_after_the_first_dense():
    for net in (nl.mlp(2), nl.mlp(2, layer_norm="last"), nl.mlp(2, layer_norm="first", eps=0.1)):
        assert not nl.check_theorem_c_1(net).applies
    batch = nl.Network(nl.Dense(), nl.LayerNorm(), nl.BatchNorm(), nl.Activation("relu"), nl.Dense())
    assert "BatchNorm" in nl.check_theorem_c_1(batch).evidence["reason"]
    with pytest.raises(ValueError, match=r"needs a whole number features >= 2\. Got 1\."):
        nl.check_theorem_c_1(nl.mlp(1, layer_norm="first"), features=1)
    with pytest.raises(TypeError, match=r"`check_theorem_c_1\(net, \.\.\.\)` needs a Network\. Got NTK\."):
        nl.check_theorem_c_1(nl.NTK(nl.mlp(1)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", [{"w_out": 0.0, "b_out": 0.0}, {"w_std": 0.0}, {"w_std": 0.0, "b_std": 0.0}])
def test_a_kernel_without_variation_is_one_of_the_soft_cosine(change):
    check = nl.check_theorem_c_1(nl.mlp(1, layer_norm="first", **change), pairs=5)
    assert check.holds
    assert np.isfinite(list(check.evidence.values())).all()
