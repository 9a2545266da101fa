"""The trained ensemble: its covariance against simulated draws, by a second formula, and at its limits."""

import numpy as np
import pytest
from helpers import slow

import ntk_ln as nl

RNG = np.random.default_rng(0)
X, Y, POINTS = RNG.normal(size=(7, 2)), RNG.normal(size=7), RNG.normal(size=(5, 2))
NET = nl.mlp(1, layer_norm="first")
EPS = np.finfo(np.float64).eps


@pytest.mark.parametrize("schedule", [{}, *map(slow, ({"noise": 0.3}, {"stop_time": 2.0})), {"stop_time": 2.0, "step_size": 0.1}])
def test_covariance_is_that_of_the_linear_map_of_prior_draws(schedule):
    # f_t = f_0 + A (y - f_0(X)) for every draw f_0 of the prior: the covariance of a linear map, by an explicit matrix.
    e = nl.ensemble(NET, X, Y, **schedule)
    joint = nl.NNGP(NET)(np.concatenate([POINTS, X]))
    operator = np.stack([nl.posterior(nl.NTK(NET), X, unit, **schedule).mean(POINTS) for unit in np.eye(7)], axis=1)
    through = np.concatenate([np.eye(5), -operator], axis=1)
    wanted = through @ joint @ through.T
    scale = np.abs(joint).max() * np.linalg.cond(nl.NTK(NET)(X))
    np.testing.assert_allclose(e.covariance(POINTS), wanted, atol=64 * EPS * scale)
    np.testing.assert_allclose(e.variance(POINTS), np.diagonal(wanted), atol=64 * EPS * scale)
    np.testing.assert_array_equal(e.mean(POINTS), e.posterior.mean(POINTS))
    assert np.linalg.eigvalsh(e.covariance(POINTS))[0] >= -64 * EPS * scale


def test_trained_to_convergence_all_networks_agree_on_the_data():
    e = nl.ensemble(NET, X, Y)
    assert e.variance(X).max() < 1e-10
    assert (e.variance(10 * POINTS) > 1e-4).all()


def test_training_has_not_begun():
    e = nl.ensemble(NET, X, Y, stop_time=1e-12)
    np.testing.assert_allclose(e.covariance(POINTS), nl.NNGP(NET)(POINTS), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_nngp_posterior(noise):
    e, p = nl.ensemble(NET, X, Y, noise=noise), nl.posterior(nl.NNGP(NET), X, Y, noise=noise)
    scale = np.linalg.cond(nl.NNGP(NET)(X))
    np.testing.assert_allclose(e.nngp_mean(POINTS), p.mean(POINTS), atol=64 * EPS * scale)
    np.testing.assert_allclose(np.diagonal(e.nngp_covariance(POINTS)), p.variance(POINTS), atol=64 * EPS * scale)


@pytest.mark.slow
def test_networks_of_width_1024_are_draws_of_it():
    net = nl.mlp(1, b_std=1.0, layer_norm="first")
    training = nl.train(net, X, Y, width=1024, seeds=60, steps=20, optimizer="gradient_descent")
    e = nl.ensemble(net, X, Y, stop_time=20 * training.learning_rate, step_size=training.learning_rate)
    outputs = training.apply(POINTS)
    deviation = np.sqrt(e.variance(POINTS))
    # Four standard errors: of a mean, and of a standard deviation, which is known to 1/sqrt(2 (n - 1)).
    assert (np.abs(outputs.mean(axis=0) - e.mean(POINTS)) < 4 * deviation / 60**0.5).all()
    assert (np.abs(outputs.std(axis=0, ddof=1) / deviation - 1) < 4 / (2 * 59) ** 0.5).all()


@pytest.mark.slow
def test_equal_rows_and_outputs():
    twice, labels = np.concatenate([X, X[:2]]), np.concatenate([Y, Y[:2]])
    one, two = nl.ensemble(NET, X, Y), nl.ensemble(NET, twice, np.stack([labels, -labels], axis=1))
    np.testing.assert_allclose(two.covariance(POINTS), one.covariance(POINTS), atol=1e-9)
    assert two.mean(POINTS).shape == (5, 2)
    assert two.variance(POINTS[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: nl.ensemble(nl.NTK(NET), X, Y), TypeError, r"needs a Network, which gives both kernels\. Got NTK\."),
        (lambda: nl.ensemble(NET, X, np.ma.array(Y, mask=Y > 0)), ValueError, r"`y` has masked entries: drop or fill those rows"),
        (lambda: nl.ensemble(NET, X, Y, noise=1.0, stop_time=1.0), ValueError, r"takes noise or stop_time, not both"),
        (
            lambda: nl.ensemble(NET, X, Y).covariance(POINTS[:, :1]),
            ValueError,
            r"needs `x` of shape \(m, 2\).* Got shape \(5, 1\)\.",
        ),
    ],
)
def test_errors(call, error, says):
    with pytest.raises(error, match=says):
        call()
