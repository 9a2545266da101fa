"""width_study: numbers against their definitions, and the powers of the width that the theory predicts."""

import numpy as np
import pytest

import ntk_ln as nl
from ntk_ln.finite.width_study import _exponent, interval

X = np.linspace(-1, 1, 10)[:, None]
Y = np.sin(3 * X[:, 0])
NET = nl.mlp(1, b_std=1.0, layer_norm="first")
SKIP = nl.Network(nl.Dense(b_std=0.3), nl.Residual(nl.Activation("relu"), nl.Dense(w_std=1.3, b_std=0.2)))


@pytest.fixture(scope="module")
def study():
    return nl.width_study(NET, X, Y, widths=(64, 256, 1024), seeds=10, steps=10)


@pytest.mark.slow
def test_powers_of_the_width(study):
    assert study.kernel_exponent.low - 0.1 < -0.5 < study.kernel_exponent.high + 0.1
    assert study.change_exponent.low - 0.1 < -0.5 < study.change_exponent.high + 0.1
    assert study.kernel_errors.mean(axis=1)[-1] < study.kernel_errors.mean(axis=1)[0] / 2


@pytest.mark.slow
def test_numbers_are_their_definitions(study):
    rate, steps = study.learning_rate, 10
    assert study.stop_time == steps * rate
    p = nl.posterior(nl.NTK(NET), X, Y, stop_time=study.stop_time, step_size=rate)
    np.testing.assert_allclose(study.mean, p.mean(study.points), rtol=1e-9, atol=1e-12)
    training = nl.train(NET, X, Y, width=256, seeds=10, steps=steps, optimizer="gradient_descent", learning_rate=rate)
    np.testing.assert_allclose(study.outputs[1], training.apply(study.points), atol=1e-5)
    largest = np.abs(study.outputs.mean(axis=1)).max(axis=1) / np.abs(study.mean).max()
    np.testing.assert_array_equal(study.largest_ratios, largest)
    assert (study.mean_errors < 4 * study.mean_noise + 5 / study.trained_widths).all()
    assert abs(study.spread_ratios[-1] - 1) < 0.6
    row = study.table()[1]
    assert row["width"] == 256
    assert row["kernel_error_low"] < row["kernel_error"] < row["kernel_error_high"]
    assert row["largest_ratio"] == study.largest_ratios[1]


def test_the_fit_finds_a_power():
    widths, rng = np.array([10, 100, 1000]), np.random.default_rng(1)
    errors = widths[:, None] ** -0.5 * rng.uniform(0.9, 1.1, (3, 40))
    found = _exponent(widths, errors)
    assert found.low < -0.5 < found.high
    assert found.high - found.low < 0.02
    few = interval(np.array([1.0, 3.0]))
    assert np.isnan(_exponent(widths[:1], errors[:1])).all()
    np.testing.assert_allclose(few, (2.0, 2 - 12.706, 2 + 12.706), rtol=1e-4)  # t of one degree of freedom


@pytest.mark.slow
def test_figure(study, tmp_path):
    study.figure().savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 20_000


def test_one_trained_width_that_is_none_of_the_kernels():
    one, two = np.array([[0.2, 0.3]]), np.array([[0.2, 0.3], [0.1, 0.2]])
    study = nl.WidthStudy(
        widths=np.array([8, 32]),
        kernel_errors=two,
        trained_widths=np.array([16]),
        stop_time=1.0,
        learning_rate=0.5,
        points=X,
        change_errors=one,
        outputs=np.stack([[Y, 2 * Y]]),
        mean=Y,
        deviation=np.ones(10),
        kernel_changes=one,
    )
    rows = study.table()
    assert [row["width"] for row in rows] == [8, 16, 32]
    assert ["kernel_error" in row for row in rows] == ["change_error" not in row for row in rows] == [True, False, True]
    assert np.isnan(study.change_exponent).all()
    change = study.figure().axes[1].get_legend()
    assert [text.get_text() for text in change.get_texts()] == ["one width, no power"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"widths": (64,)}, r"needs widths of at least 2 whole numbers >= 1, ascending\. Got \(64,\)\."),
        ({"widths": (64, 32)}, r"ascending\. Got \(64, 32\)\."),
        ({"seeds": 1}, r"needs at least 2 seeds, or there is no spread\. Got 1\."),
        ({"y": Y[:, None]}, r"needs `y` of shape \(n,\), one output"),
        ({"y": 0 * Y}, r"needs labels that are not all 0"),
        ({"widths": 8}, r"ascending\. Got 8\."),
        ({"steps": 0}, r"`width_study.* needs a whole number steps >= 1\. Got 0\."),
        ({"learning_rate": "a"}, r"`width_study.* needs a finite learning_rate > 0\. Got 'a'\."),
        ({"points": np.ones((2, 5))}, r"needs `points` of shape \(m, 1\), as `x` has it\. Got shape \(2, 5\)\."),
        ({"net": nl.mlp(1, b_std=0.0, b_out=0.0), "x": 0 * X}, r"`width_study.* Gram matrix is 0"),
        ({"y": np.ma.array(Y, mask=Y > 0)}, r"`y` has masked entries"),
        (
            {"net": SKIP, "widths": (8, 16)},
            r"`width_study.* as many outputs as `y` has, 1\. Got 16: .*End the network in a Dense\.",
        ),
    ],
)
def test_errors(change, says):
    settings = {"net": NET, "x": X, "y": Y} | change
    with pytest.raises(ValueError, match=says):
        nl.width_study(settings.pop("net"), settings.pop("x"), settings.pop("y"), **settings)
