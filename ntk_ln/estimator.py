"""The posterior as a scikit-learn estimator."""

from typing import Any

import numpy as np

try:
    from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("`NTKRegressor` needs scikit-learn >= 1.6: pip install 'ntk_ln[estimator]'.") from error

from ntk_ln.kernels import NTK
from ntk_ln.network import Network, mlp
from ntk_ln.posterior import posterior


class NTKRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Regression by the posterior of a network's NTK, with scikit-learn's conventions.

        predict(x) = k_x^T (K + noise I)^-1 y

    Args:
        network: a `Network`; None is `mlp(2, layer_norm="first")`.
        noise: variance of the observation noise, >= 0.

    Attributes:
        posterior_: the `Posterior` after `fit`, for bounds, far fields and the variance.
        n_features_in_: columns of x in training.

    Raises:
        ValueError: as `posterior`; scikit-learn's own for shapes and NaN.
        sklearn.exceptions.NotFittedError: `predict` before `fit`.

    Accuracy: as `posterior`; everything is computed in float64.

    References:
        Jacot, Gabriel, Hongler (2018), section 5; scikit-learn's developer guide, "Developing scikit-learn estimators".

    >>> import numpy as np
    >>> x = np.linspace(-1, 1, 9)[:, None]
    >>> model = NTKRegressor(noise=1e-6).fit(x, x[:, 0] ** 2)
    >>> bool(abs(model.predict([[0.5]])[0] - 0.25) < 0.02)
    True
    """

    def __init__(self, network: Network | None = None, noise: float = 0.0):
        self.network = network
        self.noise = noise

    def fit(self, X: Any, y: Any) -> "NTKRegressor":
        """Fits x of shape (n, d) to y of shape (n,) or (n, k)."""
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        network = mlp(2, layer_norm="first") if self.network is None else self.network
        self.posterior_ = posterior(NTK(network), X, np.asarray(y, np.float64), noise=self.noise)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean at x of shape (m, d); with `return_std` the standard deviation of the Gaussian process (m,) too."""
        check_is_fitted(self, "posterior_")
        X = validate_data(self, X, dtype=np.float64, reset=False)
        mean = self.posterior_.mean(X)
        return (mean, np.sqrt(self.posterior_.variance(X))) if return_std else mean
