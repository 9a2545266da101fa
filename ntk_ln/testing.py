"""Hypothesis strategies and an assertion, to write property-based tests of the bound on networks and data of your own."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ntk_ln.bounds import SupNormBound, sup_norm_bound
from ntk_ln.kernels import NTK
from ntk_ln.network import Network, mlp
from ntk_ln.posterior import posterior

try:
    from hypothesis import strategies as st
except ImportError:  # pragma: no cover
    raise ImportError("`ntk_ln.testing` needs Hypothesis: pip install 'ntk_ln[testing]', or pip install hypothesis.") from None

HOMOGENEOUS = ("relu", "leaky_relu", "abs", "identity")
ACTIVATIONS = (*HOMOGENEOUS, "gelu", "erf")
SCALES = (0.5, 1.0, 2**0.5, 2.0)


def networks(
    *, layer_norm: bool | None = None, activations: Sequence[str] = ACTIVATIONS, max_depth: int = 3
) -> st.SearchStrategy[Network]:
    """Networks built by `mlp`, with positive biases, so that Gram matrices of distinct rows have full rank.

    Args:
        layer_norm: True only with a LayerNorm somewhere (before or after an activation), False only without, None both.
        activations: names to draw from.
        max_depth: the largest number of hidden layers, >= 1.

    >>> from hypothesis import given
    >>> @given(networks(layer_norm=True))
    ... def test_every_norm_counts(net):
    ...     assert net.has_norm
    >>> test_every_norm_counts()
    """

    def build(depth: int) -> st.SearchStrategy[Network]:
        hidden = st.integers(1, depth)
        norms = st.sets(hidden, min_size=1).map(sorted)
        choices = {True: norms, False: st.just([]), None: st.just([]) | norms}
        return st.builds(
            mlp,
            st.just(depth),
            activation=st.sampled_from(tuple(activations)),
            layer_norm=choices[layer_norm],
            after_activation=st.booleans(),
            eps=st.sampled_from((0.0, 1e-5, 0.1)),
            affine=st.booleans(),
            w_std=st.sampled_from(SCALES),
            b_std=st.sampled_from((0.1, 1.0)),
            w_out=st.sampled_from(SCALES),
            b_out=st.sampled_from((0.0, 0.1)),
        )

    return st.integers(1, max_depth).flatmap(build)


def datasets(
    *, max_points: int = 8, max_features: int = 3, points: int | None = None, features: int | None = None
) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    """Datasets (x, y): distinct rows on a grid of quarters within [-5, 5]^d, targets in [-10, 10], not all zero.

    Args:
        max_points: the largest n, >= 1.
        max_features: the largest d, >= 1.
        points: this n only.
        features: this d only.

    >>> x, y = datasets(features=2).example()  # doctest: +SKIP
    >>> x.shape[1], len(x) == len(y)  # doctest: +SKIP
    (2, True)
    """

    def build(d: int) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
        row = st.tuples(*[st.integers(-20, 20)] * d)
        rows = st.lists(row, min_size=points or 1, max_size=points or max_points, unique=True)
        return rows.flatmap(
            lambda rows: st.tuples(
                st.just(np.array(rows, dtype=np.float64) / 4),
                st.lists(st.integers(-40, 40), min_size=len(rows), max_size=len(rows))
                .filter(any)
                .map(lambda y: np.array(y, dtype=np.float64) / 4),
            )
        )

    return (st.integers(1, max_features) if features is None else st.just(features)).flatmap(build)


def directions(features: int) -> st.SearchStrategy[np.ndarray]:
    """Unit vectors of R^d, axes and diagonals among them.

    Args:
        features: d, >= 1.

    >>> from hypothesis import given
    >>> @given(directions(3))
    ... def test_unit(v):
    ...     assert abs(np.linalg.norm(v) - 1) < 1e-12
    >>> test_unit()
    """
    entries = st.tuples(*[st.integers(-8, 8)] * features)
    return entries.filter(any).map(lambda v: np.array(v, dtype=np.float64) / np.linalg.norm(v))


def assert_bound_holds(net: Network, x: Any, y: Any, *, noise: float = 0.0, points: Any = None) -> SupNormBound:
    """Asserts Theorem 3.3 on your network and data: |f| <= rkhs <= spectral <= dataset, all finite.

    Args:
        net: a network with a norm layer.
        x: training inputs (n, d).
        y: targets (n,) or (n, k).
        noise: observation noise variance.
        points: where to look, (m, d); by default along both ways of training rows and axes, from |x| = 1e-3 to 1e12.

    Returns:
        The bounds.

    Raises:
        AssertionError: a point where |f| exceeds the bound (named), a chain out of order, or no finite bound.
        ValueError: as `posterior`.

    >>> import ntk_ln as nl
    >>> b = assert_bound_holds(nl.mlp(1, layer_norm="first"), np.array([[1.0], [2.0]]), np.array([0.0, 1.0]))
    >>> round(b.kernel_sup, 3)
    1.01
    """
    p = posterior(NTK(net), x, y, noise=noise)
    bound = sup_norm_bound(p)
    chain = (bound.rkhs, bound.spectral, bound.dataset)
    if not np.isfinite(chain).all():
        raise AssertionError(f"No finite bound: {bound}. A norm layer bounds a network only if no activation before it is bounded.")
    # Rounding of the solve: n eps times the condition number.
    trace = float(np.trace(np.asarray(p.gram, dtype=np.float64)))
    slack = 1 + 1e-12 + len(p.gram) * np.finfo(np.asarray(p.gram).dtype).eps * trace / bound.effective_eigenvalue
    if not (chain[0] <= chain[1] * slack and chain[1] <= chain[2] * slack):
        raise AssertionError(f"The bounds are not ordered, rkhs <= spectral <= dataset: {bound}.")
    at = _rays(np.asarray(x, dtype=np.float64)) if points is None else np.asarray(points, dtype=np.float64)
    values = np.abs(np.asarray(p.mean(at), dtype=np.float64)).reshape(len(at), -1).max(axis=1)
    worst = int(np.argmax(values))
    if not values[worst] <= bound.rkhs * slack:
        raise AssertionError(f"|f| = {values[worst]!r} at x = {at[worst]!r} exceeds the bound {bound.rkhs!r}.")
    return bound


def _rays(x: np.ndarray) -> np.ndarray:
    axes = np.eye(x.shape[1])
    rows = np.concatenate([x[:16], axes])
    rows = rows[rows.any(axis=1)]
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    rays = np.concatenate([rows, -rows])
    radii = 10.0 ** np.arange(-3, 13)
    return np.concatenate([x, (radii[:, None, None] * rays[None]).reshape(-1, x.shape[1])])
