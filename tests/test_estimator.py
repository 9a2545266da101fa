"""The estimator: scikit-learn's own checks, and the posterior's numbers."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import ntk_ln as nl

X = np.random.default_rng(0).normal(size=(30, 2))
Y = np.sin(X[:, 0]) + X[:, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # scikit-learn's checks warn of what they skip
def test_scikit_learns_own_checks():
    check_estimator(nl.NTKRegressor(noise=1e-2))


def test_it_is_the_posterior():
    net = nl.mlp(1, layer_norm="last")
    model = nl.NTKRegressor(network=net, noise=0.1).fit(X, Y)
    p = nl.posterior(nl.NTK(net), X, Y, noise=0.1)
    mean, std = model.predict(X[:5] + 1, return_std=True)
    np.testing.assert_array_equal(mean, p.mean(X[:5] + 1))
    np.testing.assert_array_equal(std, np.sqrt(p.variance(X[:5] + 1)))
    assert nl.sup_norm_bound(model.posterior_).rkhs > np.abs(mean).max()
    both = nl.NTKRegressor(network=net, noise=0.1).fit(X, np.stack([Y, -Y], axis=1))
    np.testing.assert_allclose(both.predict(X), np.stack([model.predict(X), -model.predict(X)], axis=1), rtol=1e-12)
    assert clone(model).get_params()["network"] == net


def test_in_a_pipeline_and_a_search():
    model = make_pipeline(StandardScaler(), nl.NTKRegressor(noise=1e-3))
    search = GridSearchCV(model, {"ntkregressor__noise": [1e-3, 1.0]}, cv=2).fit(X, Y)
    assert search.best_params_ == {"ntkregressor__noise": 1e-3}
    assert search.score(X, Y) > 0.99


def test_errors():
    with pytest.raises(NotFittedError, match="not fitted yet"):
        nl.NTKRegressor().predict(X)
    with pytest.raises(ValueError, match="X has 1 features, but NTKRegressor is expecting 2 features"):
        nl.NTKRegressor(noise=0.1).fit(X, Y).predict(X[:, :1])
    with pytest.raises(ValueError, match="noise"):
        nl.NTKRegressor(noise=-1.0).fit(X, Y)
    with pytest.raises(AttributeError, match="has no attribute 'NTKClassifier'"):
        _ = nl.NTKClassifier
