"""The marginal likelihood of a kernel as a pure function of kernel and noise."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ntk_ln import _posterior_inputs as inputs
from ntk_ln._dtype import check_rows, computing, is_tracer


def log_marginal_likelihood(kernel: Any, x: Any, y: Any, noise: Any) -> Any:
    r"""The log density of the labels under the Gaussian process prior; a pure function for `jax.jit` and `jax.grad`.

        -1/2 y^T (K + noise I)^-1 y - 1/2 log det(K + noise I) - n/2 log(2 pi)

    A sum over the n rows (and outputs); divide by n for a figure that does not grow with the data.

    Args:
        kernel: any kernel; its leaves (w_std, b_std, eps) can be traced and differentiated.
        x: (n, d), n >= 1.
        y: (n,) or (n, k).
        noise: variance, >= 0, a number or a JAX scalar.

    Returns:
        A scalar: JAX in the dtype of x where something is a JAX array x or traced, otherwise a float computed in float64. Traced
        inputs that make K + noise I not positive definite give NaN.

    Raises:
        ValueError: shapes, NaN or infinity, noise < 0; outside of tracing also K + noise I not positive definite.

    References:
        Rasmussen, Williams (2006), "Gaussian processes for machine learning", eq. 2.30.

    >>> import jax, jax.numpy as jnp
    >>> from ntk_ln import NTK, mlp
    >>> x, y = jnp.array([[0.0], [1.0], [2.0]]), jnp.array([0.0, 1.0, 0.0])
    >>> bool(jax.grad(lambda noise: log_marginal_likelihood(NTK(mlp(1)), x, y, noise))(1e-2) > 0)
    True
    """
    call = "log_marginal_likelihood(kernel, x, y, noise)"
    inputs.check_kernel(kernel, call)
    traced = any(is_tracer(leaf) for leaf in jax.tree.leaves((kernel, x, y, noise)))
    x = check_rows(x, call)
    y = inputs.check_labels(y, x, call)
    if not is_tracer(noise) and not noise >= 0:
        raise ValueError(f"`{call}` needs noise >= 0. Got {noise}.")
    if not isinstance(x, jax.Array):
        x = jnp.asarray(x) if traced else x.astype(np.float64)
    with computing(call, x, traced=traced) as given:
        value = _log_density(kernel(given.x1), y, noise)
    if traced:
        return value
    if not np.isfinite(value):
        raise ValueError(
            f"`{call}` needs K + noise I positive definite and y finite. Got {value} with noise={noise}; `posterior(kernel, x, y, "
            f"noise=noise)` names the cause."
        )
    return value if given.is_jax else float(value)


def _log_density(gram: Any, y: Any, noise: Any) -> Any:
    n = len(gram)
    labels = jnp.asarray(y, gram.dtype).reshape(n, -1)
    factor = jnp.linalg.cholesky(gram + jnp.asarray(noise, gram.dtype) * jnp.eye(n, dtype=gram.dtype))
    white = jax.scipy.linalg.solve_triangular(factor, labels, lower=True)
    per_output = 2 * jnp.sum(jnp.log(jnp.diagonal(factor))) + n * math.log(2 * math.pi)
    return -0.5 * jnp.sum(white * white) - 0.5 * labels.shape[1] * per_output
