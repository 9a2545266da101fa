"""The paper's theorems, checked numerically on a network and a dataset."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ntk_ln._dtype import check_whole
from ntk_ln.bounds import SupNorm, kernel_sup, lengths_of, sup_norm, sup_norm_bound, varying_decades
from ntk_ln.far_field import homogeneous_kernel
from ntk_ln.kernels import NTK
from ntk_ln.layers import Dense, LayerNorm
from ntk_ln.layers._base import is_zero
from ntk_ln.network import Network, check_network
from ntk_ln.posterior import Posterior, posterior


class TheoremCheck(NamedTuple):
    """A theorem on one network: whether its hypotheses apply, whether it holds (None where it does not apply), and the numbers."""

    name: str
    applies: bool
    holds: bool | None
    statement: str
    evidence: dict[str, Any]


STATEMENT_3_1 = (
    "Without a norm layer and with (asymptotically) positively n-homogeneous activations, n > 1/2, some finite dataset makes the "
    "trained infinite network unbounded: it grows as r^(n^L) along a training direction."
)
STATEMENT_3_2 = "With a norm layer anywhere and activations of degree n > 1/2 before it, Theta(x,x) <= C for all x, C finite."
STATEMENT_3_3 = (
    "With such a norm layer |E f(x)| is bounded for all x by a constant of C, n, lambda_min and max|y|: "
    "sup|f| <= rkhs <= spectral <= dataset."
)


STATEMENT_C_1 = (
    "With a LayerNorm right after the first Dense the NTK depends on x and x' only through their soft cosine S(x, x'), so "
    "Theta(x,x) is one constant."
)


def check_theorem_c_1(net: Network, *, features: int = 3, pairs: int = 200, seed: int = 0) -> TheoremCheck:
    r"""Theorem C.1 and Corollary C.2 on a network: pairs of inputs with equal soft cosines have equal NTKs, whatever their norms.

        S(x, x') = (w x.x'/d + b)/sqrt((w |x|^2/d + b)(w |x'|^2/d + b)),   w = w_std^2, b = b_std^2 of the first Dense

    It holds if Theta of random pairs, and of other pairs with the same S but norms up to 100 times larger, agree to 1e-12, and
    Theta(x,x) is the same for all of them.

    Args:
        net: a network.
        features: d of the inputs that are drawn, >= 2.
        pairs: how many.
        seed: of the draw.

    Returns:
        `TheoremCheck`; `applies` is False unless a LayerNorm with eps = 0 follows the first Dense, and with a BatchNorm.

    References:
        Ziomek, Whittle, Osborne (2025), theorem C.1 and corollary C.2.

    >>> import ntk_ln as nl
    >>> nl.check_theorem_c_1(nl.mlp(2, layer_norm="first")).holds
    True
    >>> nl.check_theorem_c_1(nl.mlp(2, layer_norm="last")).applies
    False
    """
    call = "check_theorem_c_1(net, ...)"
    check_network(net, call)
    check_whole(features, call, "features", 2)
    check_whole(pairs, call, "pairs", 1)
    check_whole(seed, call, "seed", 0)
    first, *rest = net.layers
    if not (isinstance(first, Dense) and rest and isinstance(rest[0], LayerNorm) and is_zero(rest[0].eps)):
        reason = "no LayerNorm with eps = 0 right after the first Dense"
        return TheoremCheck("C.1", False, None, STATEMENT_C_1, {"reason": reason})
    if net.growth.finite_only:
        return TheoremCheck("C.1", False, None, STATEMENT_C_1, {"reason": f"{net.growth.finite_only} has no infinite-width kernel"})
    rng, w, b = np.random.default_rng(seed), float(first.w_std) ** 2 / features, float(first.b_std) ** 2
    kernel = NTK(net)

    def of_angle(r1, r2, cosine):
        # Two rows of these lengths at this angle, in a random plane.
        plane = np.linalg.qr(rng.standard_normal((pairs, features, 2)))[0]
        sine = np.sqrt(1 - cosine**2)
        return r1[:, None] * plane[..., 0], r2[:, None] * (cosine[:, None] * plane[..., 0] + sine[:, None] * plane[..., 1])

    def size(r):
        return np.sqrt(w * r**2 + b)

    near1, near2 = 10.0 ** rng.uniform(-1, 1, (2, pairs))
    cosine = rng.uniform(-0.9, 0.9, pairs)
    with np.errstate(invalid="ignore"):  # 0/0 of a first Dense that is 0
        soft = (w * near1 * near2 * cosine + b) / (size(near1) * size(near2))
    # The same S at larger norms; the norms grow less where no angle gives it.
    far1, far2, grown = near1.copy(), near2.copy(), cosine.copy()
    for factor in 10.0 ** rng.uniform(0, 2, (8, 1, pairs)):
        r1, r2 = factor[0] * near1, factor[0] * near2
        with np.errstate(divide="ignore", invalid="ignore"):
            new = (soft * size(r1) * size(r2) - b) / (w * r1 * r2)
        better = (np.abs(new) <= 0.95) & (r1 > far1)
        far1, far2, grown = np.where(better, r1, far1), np.where(better, r2, far2), np.where(better, new, grown)
    values, diagonals = [], []
    for rows1, rows2 in (of_angle(near1, near2, cosine), of_angle(far1, far2, grown)):
        values.append(np.array([kernel(a[None], c[None])[0, 0] for a, c in zip(rows1, rows2, strict=True)]))
        diagonals.append(kernel.diag(np.concatenate([rows1, rows2])))
    constant, diagonal = float(diagonals[0][0]), np.concatenate(diagonals)
    scale = constant or 1.0
    evidence = {
        "kernel_sup": constant,
        "largest_difference": float(np.abs(values[0] - values[1]).max() / scale),
        "diagonal_spread": float(np.ptp(diagonal) / scale),
        "largest_growth_of_the_norm": float((far1 / near1).max()),
    }
    holds = evidence["largest_difference"] <= 1e-12 and evidence["diagonal_spread"] <= 1e-12
    return TheoremCheck("C.1", True, holds, STATEMENT_C_1, evidence)


def check_theorem_3_1(net: Network, x: Any, y: Any, *, noise: float = 0.0) -> TheoremCheck:
    """Theorem 3.1 on your data: without LayerNorm the mean grows without bound.

    It holds if, on your data and on the proof's witness dataset (inputs with positive inner products, one nonzero target), the
    far-field coefficient exceeds its own error bound along a training direction, and the growth exponent fitted to |f(r v)| is
    within 0.02 of n^L.

    Args:
        net: a network.
        x: training inputs (n, d).
        y: targets (n,) or (n, k), not all zero: the zero function does not grow.
        noise: observation noise variance.

    Returns:
        `TheoremCheck`; `applies` is False with a norm layer, with an activation of degree n <= 1/2, or with y = 0.

    Raises:
        ValueError: as `posterior`.

    References:
        Ziomek, Whittle, Osborne (2025), theorem 3.1.

    >>> import numpy as np
    >>> import ntk_ln as nl
    >>> check = nl.check_theorem_3_1(nl.mlp(2), np.array([[1.0], [2.0]]), np.array([0.0, 1.0]))
    >>> check.applies, check.holds
    (True, True)
    """
    reason = _why_3_1_does_not_apply(net, x, y)
    if reason:
        return TheoremCheck("3.1", False, None, STATEMENT_3_1, {"reason": reason})
    return theorem_3_1(posterior(NTK(net), x, y, noise=noise))


def theorem_3_1(p: Posterior) -> TheoremCheck:
    """`check_theorem_3_1` on a posterior that is there already."""
    net = p.kernel.network
    reason = _why_3_1_does_not_apply(net, p.x, p.y)
    if reason:
        return TheoremCheck("3.1", False, None, STATEMENT_3_1, {"reason": reason})
    data, witness = _growth(p), _growth(_witness(p.kernel, np.shape(p.x)[1]))
    evidence = {"predicted_power": float(net.growth.mean), "data": data, "witness": witness}
    return TheoremCheck("3.1", True, data["grows"] and witness["grows"], STATEMENT_3_1, evidence)


def check_theorem_3_2(net: Network) -> TheoremCheck:
    """Theorem 3.2 on a network: with LayerNorm Theta(x,x) is bounded by C.

    It holds if C is finite, Theta(x,x) at 10,000 radii, from 1e-12 to 1e12 and wherever else it varies, stays below it, and comes
    within 1e-6 of it.

    Args:
        net: a network.

    Returns:
        `TheoremCheck`; `applies` is False without a norm layer, or with an activation of degree n <= 1/2 before the first one.

    References:
        Ziomek, Whittle, Osborne (2025), theorems 3.2 and C.2.

    >>> import ntk_ln as nl
    >>> nl.check_theorem_3_2(nl.mlp(2, layer_norm="last")).holds
    True
    >>> nl.check_theorem_3_2(nl.mlp(2)).applies
    False
    """
    reason = _why_3_2_does_not_apply(net)
    if reason:
        return TheoremCheck("3.2", False, None, STATEMENT_3_2, {"reason": reason})
    c = kernel_sup(NTK(net))
    low, high = varying_decades(NTK(net)) if np.isfinite(c.value) else (0, 0)
    radii = 10.0 ** np.linspace(min(low, -12), max(high, 12), 10_000)
    diagonal = NTK(net).diag(radii[:, None] * np.repeat([1.0, -1.0], 2))  # |x|^2/d = radius^2, and no two features alone
    largest = float(diagonal.max())
    # Rounding of the diagonal itself: a few eps a layer.
    holds = bool(np.isfinite(c.value) and largest <= c.value * (1 + 1e-12) and largest >= c.value * (1 - 1e-6))
    evidence = {
        "kernel_sup": c.value,
        "exact": c.exact,
        "largest_diagonal_found": largest,
        "at_radius": float(radii[np.argmax(diagonal)]),
    }
    return TheoremCheck("3.2", True, holds, STATEMENT_3_2, evidence)


def check_theorem_3_3(net: Network, x: Any, y: Any, *, noise: float = 0.0) -> TheoremCheck:
    """Theorem 3.3 on your data: with LayerNorm the mean is bounded over all of R^d.

    It holds if the largest |f| that optimisation over R^d and infinity finds is below the rkhs bound, and the bounds are finite
    and ordered, rkhs <= spectral <= dataset.

    Args:
        net: a network.
        x: training inputs (n, d).
        y: targets (n,) or (n, k).
        noise: observation noise variance.

    Returns:
        `TheoremCheck`; `applies` as in `check_theorem_3_2`.

    Raises:
        ValueError: as `posterior`.

    References:
        Ziomek, Whittle, Osborne (2025), theorems 3.3 and C.3.

    >>> import numpy as np
    >>> import ntk_ln as nl
    >>> net = nl.mlp(2, layer_norm="first")
    >>> nl.check_theorem_3_3(net, np.array([[1.0], [2.0]]), np.array([0.0, 1.0])).holds
    True
    """
    reason = _why_3_2_does_not_apply(net)
    if reason:
        return TheoremCheck("3.3", False, None, STATEMENT_3_3, {"reason": reason})
    return theorem_3_3(posterior(NTK(net), x, y, noise=noise))


def theorem_3_3(p: Posterior, found: SupNorm | None = None) -> TheoremCheck:
    """`check_theorem_3_3` on a posterior, and a `sup_norm` of it, that are there already."""
    reason = _why_3_2_does_not_apply(p.kernel.network)
    if reason:
        return TheoremCheck("3.3", False, None, STATEMENT_3_3, {"reason": reason})
    bound, found = sup_norm_bound(p), found or sup_norm(p)
    # The mean and the norm carry the rounding of the solve.
    slack = 1 + 1e-12 + _rounding(p)
    chain = [found.value, bound.rkhs, bound.spectral, bound.dataset]
    holds = bool(np.isfinite(chain).all()) and all(a <= b * slack for a, b in pairwise(chain))
    evidence = {
        "largest_mean_found": found.value,
        "rkhs": bound.rkhs,
        "spectral": bound.spectral,
        "dataset": bound.dataset,
        "tightness": found.value / bound.rkhs if bound.rkhs > 0 else None,
        "kernel_sup": bound.kernel_sup,
        "effective_eigenvalue": bound.effective_eigenvalue,
    }
    return TheoremCheck("3.3", True, holds, STATEMENT_3_3, evidence)


def _why_3_1_does_not_apply(net: Network, x: Any, y: Any) -> str | None:
    growth = net.growth
    if growth.has_norm:
        return "the network has a norm layer"
    if growth.cut:
        return "the weights of a Dense are 0: its outputs do not depend on x"
    if growth.no_limit is not None or growth.mean != growth.mean:
        return "an activation has no known limit far out (sin, cos, or a function without a degree)"
    if not growth.assumption:
        return "an activation has degree n <= 1/2 (erf, step: the mean stays bounded without a norm layer)"
    if not np.any(np.asarray(y)):
        return "all targets are 0, and so is the mean"
    if not np.any(np.asarray(x)):
        return "all inputs are 0: there is no training direction"
    return None


def _why_3_2_does_not_apply(net: Network) -> str | None:
    growth = net.growth
    if not growth.has_norm:
        return "the network has no norm layer"
    if not growth.normalised:
        return "the network has no norm layer on its trunk: skips pass the one in a branch by"
    if not growth.assumption:
        return "an activation before the first norm layer has degree n <= 1/2 (erf: Theta(x,x) grows as |x|)"
    return None


def _rounding(p: Posterior) -> float:
    """n eps times the condition number: the relative error a solve may have."""
    n, trace = len(p.gram), float(np.trace(np.asarray(p.gram, dtype=np.float64))) + len(p.gram) * p.noise
    eps = np.finfo(np.asarray(p.gram).dtype).eps
    return min(float(n * eps * trace / max(p.effective_eigenvalue, 1e-300)), 1e-2)


DIRECTIONS = 256  # training directions looked at


def _growth(p: Posterior) -> dict[str, Any]:
    """The training direction along which the mean grows most surely, and the exponent fitted there."""
    x = np.asarray(p.x, dtype=np.float64)
    rows = x[np.flatnonzero(x.any(axis=1))][:DIRECTIONS]
    if not len(rows):
        return {"grows": False, "reason": "every input is 0"}
    lengths = lengths_of(rows)
    directions = rows / lengths[:, None]
    k = homogeneous_kernel(p, directions, np.zeros(len(rows)))
    coefficients = k @ np.asarray(p.alpha, np.float64).reshape(len(x), -1)
    errors = _coefficient_errors(p, k)
    ratio = np.abs(coefficients) / errors
    i, k = np.unravel_index(np.argmax(ratio), ratio.shape)
    # The next term is smaller by c1/(c0 r): from 1e4 to 1e7 times the largest input it bends the fit by less than 1e-4.
    with np.errstate(over="ignore"):
        radii = float(lengths.max()) * 10.0 ** np.arange(4, 8)
        points = radii[:, None] * directions[i]
    if not np.isfinite(points).all():
        raise ValueError(
            "Theorem 3.1 is checked at up to 1e7 times the longest input, which leaves float64: its length is "
            f"{lengths.max():.1e}. Divide the inputs by their scale."
        )
    mean = np.asarray(p.mean(points), dtype=np.float64).reshape(len(radii), -1)[:, k]
    with np.errstate(divide="ignore"):
        power = float(np.polyfit(np.log(radii), np.log(np.abs(mean)), 1)[0]) if np.all(mean != 0) else None
    expected = float(p.kernel.growth.mean)
    grows = bool(ratio[i, k] > 1) and power is not None and abs(power - expected) < 0.02
    return {
        "grows": grows,
        "direction": directions[i].tolist(),
        "coefficient": float(coefficients[i, k]),
        "coefficient_error": float(errors[i, k]),
        "fitted_power": power,
        "n": len(x),
    }


def _coefficient_errors(p: Posterior, k: np.ndarray) -> np.ndarray:
    """Bounds of the rounding errors of c0 = k alpha for far-field kernels k (m, n): (m, outputs).

    c0 = k^T K^-1 y: a relative error delta of every kernel value (in units of sqrt(k_ii k_jj)) moves it by at most
    delta (|beta|^T s + s_v) |alpha|^T s, with beta = K^-1 k the weights of the labels and s = sqrt(diag K).
    """
    gram = np.asarray(p.gram, dtype=np.float64)
    scale = np.sqrt(np.diag(gram))
    alpha = np.abs(np.asarray(p.alpha, dtype=np.float64)).reshape(len(scale), -1)
    beta = np.abs(p.solve(k.T))
    delta = len(scale) * np.finfo(np.float64).eps + 1e-13
    reach = beta.T @ scale + np.max(np.abs(k) / scale, axis=1)
    return delta * reach[:, None] * (scale @ alpha)[None, :]


def _witness(kernel: NTK, d: int) -> Posterior:
    """The proof's dataset: inputs with positive inner products, one nonzero target."""
    x = np.array([[1.0], [2.0]]) if d == 1 else np.stack([np.eye(d)[0], np.eye(d)[0] + np.eye(d)[1]])
    y = np.array([0.0, 1.0])
    try:
        return posterior(kernel, x, y)
    except ValueError:  # one feature and no bias: the two rows are dependent, one is a witness by itself
        return posterior(kernel, x[1:], y[1:])
