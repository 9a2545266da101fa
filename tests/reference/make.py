"""The reference tables, recomputed in mpmath from the plain recursion.

    python tests/reference/make.py            rewrite every table
    python tests/reference/make.py --check    compare with the stored tables, write nothing
    python tests/reference/make.py --only relu --jobs 2      only cases whose id contains "relu"

One pair of inputs goes through the network in ordinary coordinates: q, q' are the second moments
of a unit, s the cross moment, m, m' the means over units, t the tangent and g the pending gain.
Nothing here is normalised or expanded for small angles; 80 digits stand in for all of that. No
formula is shared with the package.

| table                | cases                                                           |
| -------------------- | --------------------------------------------------------------- |
| kernels.json         | inputs kept, values recomputed                                  |
| posteriors.json      | inputs kept, values recomputed                                  |
| extra.json           | inputs from `extra_cases` below                                 |
| kernels_float32.json | both kernel tables with the inputs rounded to float32           |

Numbers that go in are doubles and are used exactly as they are; those that come out are decimal
strings with 32 significant digits.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import mpmath as mp
import numpy as np
from mpmath import mpf

FOLDER = Path(__file__).parent
DIGITS = 80
QUADRATURE_DIGITS = 42
PRINTED = 32

Layer = dict[str, Any]
Case = dict[str, Any]


# Duals: Gaussian averages for (a, b) with moments (q, q', s).


class Dual(NamedTuple):
    product: Callable  # E[phi(a) phi(b)]
    tangent: Callable  # E[phi'(a) phi'(b)]
    gain: Callable  # E[phi'(a) phi'(b) a b]
    mean: Callable  # E[phi(a)], of q alone


def homogeneous(alpha: float, beta: float, degree: float) -> Dual:
    """phi(a) = alpha max(a, 0)^n + beta max(-a, 0)^n for any real n > 1/2, and n = 0."""
    alpha, beta, n = mpf(alpha), mpf(beta), mpf(degree)

    def product(q1, q2, s, alpha=alpha, beta=beta, n=n):
        # phi = even |a|^n + odd sign(a) |a|^n; the averages of either part are hypergeometric in
        # rho^2 (expand in Hermite polynomials and sum), the mixed ones vanish.
        root = mp.sqrt(q1 * q2)
        rho = min(mpf(1), max(mpf(-1), s / root)) if root else mpf(0)
        even = mp.gamma((n + 1) / 2) ** 2 * mp.hyp2f1(-n / 2, -n / 2, mpf(1) / 2, rho**2)
        odd = 2 * rho * mp.gamma(n / 2 + 1) ** 2
        odd *= mp.hyp2f1((1 - n) / 2, (1 - n) / 2, mpf(3) / 2, rho**2)
        return (2 * root) ** n / mp.pi * (((alpha + beta) / 2) ** 2 * even + ((alpha - beta) / 2) ** 2 * odd)

    def tangent(q1, q2, s):
        return product(q1, q2, s, n * alpha, -n * beta, n - 1) if n and q1 and q2 else mpf(0)

    def gain(q1, q2, s):
        return n**2 * product(q1, q2, s)  # Euler: a phi'(a) = n phi(a)

    def mean(q):
        return (alpha + beta) * (2 * q) ** (n / 2) * mp.gamma((n + 1) / 2) / (2 * mp.sqrt(mp.pi))

    return Dual(product, tangent, gain, mean)


def erf() -> Dual:
    def determinant(q1, q2, s):
        return 1 + 2 * q1 + 2 * q2 + 4 * (q1 * q2 - s**2)

    return Dual(
        product=lambda q1, q2, s: 2 / mp.pi * mp.asin(2 * s / mp.sqrt((1 + 2 * q1) * (1 + 2 * q2))),
        tangent=lambda q1, q2, s: 4 / mp.pi / mp.sqrt(determinant(q1, q2, s)),
        gain=lambda q1, q2, s: 4 / mp.pi * s / determinant(q1, q2, s) ** (mpf(3) / 2),
        mean=lambda q: mpf(0),
    )


def gelu() -> Dual:
    """phi(a) = a Phi(a), by Stein's lemma; a factor exp(-a^2/2) turns one Gaussian into another."""

    def parts(q1, q2, s):
        det = 1 + q1 + q2 + (q1 * q2 - s**2)  # not (1 + q)(1 + q') - s^2: q may be 1e200
        both = mpf(1) / 4 + mp.asin(s / mp.sqrt((1 + q1) * (1 + q2))) / (2 * mp.pi)  # E[Phi Phi]
        return det, both, 1 / (2 * mp.pi * mp.sqrt(det))  # the last is E[density density]

    def bracket(q1, q2, s):
        return (q1 * q2 - s**2) + s**2 * (1 / (1 + q1) + 1 / (1 + q2))

    def product(q1, q2, s):
        _, both, density = parts(q1, q2, s)
        return s * both + bracket(q1, q2, s) * density

    def tangent(q1, q2, s):  # Price: the derivative of `product` in s
        det, both, density = parts(q1, q2, s)
        slope = 2 * s * (1 / (1 + q1) + 1 / (1 + q2) - 1)
        return both + (s + slope + bracket(q1, q2, s) * s / det) * density

    def gain(q1, q2, s):  # (Phi + a density)(Phi + b density) a b, term by term
        det, _, density = parts(q1, q2, s)

        def tilted(q1, q2):  # the variance of a under both densities
            return (q1 + (q1 * q2 - s**2)) / det

        def density_and_phi(q1, q2):  # E[a^2 b density(a) Phi(b)]
            cross, variance = s / (1 + q1), (q2 + (q1 * q2 - s**2)) / (1 + q1)
            return density * (2 * cross**2 + variance * tilted(q1, q2))

        densities = density * (tilted(q1, q2) * tilted(q2, q1) + 2 * (s / det) ** 2)
        return product(q1, q2, s) + density_and_phi(q1, q2) + density_and_phi(q2, q1) + densities

    return Dual(product, tangent, gain, lambda q: q / mp.sqrt(2 * mp.pi * (1 + q)))


def sine(*, cosine: bool) -> Dual:
    sign = 1 if cosine else -1  # sin a sin b = [cos(a-b) - cos(a+b)]/2, cos cos with a plus

    def plain(q1, q2, s, sign):
        return (mp.exp(s - (q1 + q2) / 2) + sign * mp.exp(-s - (q1 + q2) / 2)) / 2

    def gain(q1, q2, s):
        def part(k):  # E[a b cos(a + k b)]
            return (s - (q1 + k * s) * (s + k * q2)) * mp.exp(-(q1 + q2) / 2 - k * s)

        return (part(-1) - sign * part(1)) / 2

    return Dual(
        product=lambda q1, q2, s: plain(q1, q2, s, sign),
        tangent=lambda q1, q2, s: plain(q1, q2, s, -sign),
        gain=gain,
        mean=(lambda q: mp.exp(-q / 2)) if cosine else (lambda q: mpf(0)),
    )


def trapezoid_step(spread: mpf, strip: mpf) -> mpf:
    """A step for the average of f(spread xi), xi ~ N(0, 1), f analytic for |Im| < strip.

    The trapezoid rule is off by exp(d^2/2 - 2 pi d/h) for every d with spread d < strip: h is set so
    that this is below the working precision.
    """
    digits = (QUADRATURE_DIGITS + 2) * mp.log(10)
    d = mp.sqrt(2 * digits)
    if spread * d > strip:
        d = strip / spread * mpf("0.99")
    return 2 * mp.pi * d / (digits + d**2 / 2)


def normal_weights(step: mpf) -> list[mpf]:
    count = int(mp.ceil(mp.sqrt(2 * (QUADRATURE_DIGITS + 2) * mp.log(10)) / step))
    return [step * mp.npdf(k * step) for k in range(-count, count + 1)]


def quadrature(f: Callable, slope: Callable, strip: mpf) -> Dual:
    """Duals of any phi analytic for |Im a| < strip, by the trapezoid rule."""

    def mean(f, q):
        with mp.workdps(QUADRATURE_DIGITS):
            step = trapezoid_step(mp.sqrt(q), strip)
            weights = normal_weights(step)
            half = len(weights) // 2
            return mp.fsum(w * f(mp.sqrt(q) * step * (i - half)) for i, w in enumerate(weights))

    def average(f, q1, q2, s):
        if q1 == q2 == s:
            return mean(lambda a: f(a) ** 2, q1)
        with mp.workdps(QUADRATURE_DIGITS):
            # a = sqrt(q) xi, b = along xi + across eta. The steps are made commensurate, so that f is
            # needed at the multiples of one unit only: b = unit (m i + n j).
            along, across = s / mp.sqrt(q1), mp.sqrt(max(mpf(0), q2 - s**2 / q1))
            step = trapezoid_step(max(mp.sqrt(q1), abs(along)), strip)
            if across > mpf(10) ** (5 - QUADRATURE_DIGITS) * mp.sqrt(q2):
                ratio = abs(along) * step / (across * trapezoid_step(across, strip))
                m, n = (int(mp.ceil(ratio)), 1) if ratio > 1 else (1, int(1 / ratio))
                inner = normal_weights(n * abs(along) * step / (m * across))
            else:  # b is a multiple of a
                m, n, inner = 1, 0, [mpf(1)]
            outer, unit = normal_weights(step), along * step / m
            value = lru_cache(maxsize=None)(lambda index: f(unit * index))
            rows, columns = len(outer) // 2, len(inner) // 2
            total = mpf(0)
            for i, weight in zip(range(-rows, rows + 1), outer, strict=True):
                row = mp.fdot(inner, [value(m * i + n * j) for j in range(-columns, columns + 1)])
                total += weight * f(mp.sqrt(q1) * step * i) * row
            return total

    return Dual(
        product=lambda q1, q2, s: average(f, q1, q2, s),
        tangent=lambda q1, q2, s: average(slope, q1, q2, s),
        gain=lambda q1, q2, s: average(lambda a: a * slope(a), q1, q2, s),
        mean=lambda q: mean(f, q),
    )


def sigmoid(a):
    return 1 / (1 + mp.exp(-a))


def silu_slope(a):
    p = sigmoid(a)
    return p + a * p * (1 - p)


def dual(layer: Layer) -> Dual:
    pi = +mp.pi
    match layer["name"]:
        case "relu":
            return homogeneous(1, 0, 1)
        case "leaky_relu":
            return homogeneous(1, -mpf(layer["slope"]), 1)
        case "abs":
            return homogeneous(1, 1, 1)
        case "identity":
            return homogeneous(1, -1, 1)
        case "step":
            return homogeneous(1, 0, 0)
        case "relu_power":
            return homogeneous(1, 0, layer["degree"])
        case "erf":
            return erf()
        case "gelu":
            return gelu()
        case "sin" | "cos":
            return sine(cosine=layer["name"] == "cos")
        case "tanh":
            return quadrature(mp.tanh, lambda a: 1 - mp.tanh(a) ** 2, pi / 2)
        case "silu":
            return quadrature(lambda a: a * sigmoid(a), silu_slope, pi)
        case "softplus":
            return quadrature(lambda a: mp.log1p(mp.exp(a)), sigmoid, pi)
        case name:
            raise ValueError(f"no duals for the activation {name!r}")


# The recursion.


ZERO = mpf(0)


@dataclass(frozen=True)
class State:
    q1: mpf
    q2: mpf
    s: mpf
    m1: mpf = ZERO
    m2: mpf = ZERO
    t: mpf = ZERO
    g: mpf = ZERO


def dense(a: State, layer: Layer) -> State:
    w, b = mpf(layer["w_std"]) ** 2, mpf(layer["b_std"]) ** 2
    t = w * (a.t + a.g * a.s) + (w * a.s + b)
    return State(w * a.q1 + b, w * a.q2 + b, w * a.s + b, t=t)


def activation(a: State, layer: Layer) -> State:
    phi = dual(layer)
    t = a.t * phi.tangent(a.q1, a.q2, a.s)
    if a.g:
        t += a.g * phi.gain(a.q1, a.q2, a.s)
    s = phi.product(a.q1, a.q2, a.s)
    q1, q2 = phi.product(a.q1, a.q1, a.q1), phi.product(a.q2, a.q2, a.q2)
    return State(q1, q2, s, phi.mean(a.q1), phi.mean(a.q2), t)


def norm(a: State, layer: Layer, *, centred: bool) -> State:
    eps, affine = mpf(layer["eps"]), layer["affine"]
    m1, m2 = (a.m1, a.m2) if centred else (mpf(0), mpf(0))
    d1, d2 = mp.sqrt(a.q1 - m1**2 + eps), mp.sqrt(a.q2 - m2**2 + eps)
    t = a.t / (d1 * d2) + a.g * (m1 / d1) * (m2 / d2)
    return State(
        # one formula for q and s: equal inputs then stay exactly equal
        q1=(a.q1 - m1 * m1) / (d1 * d1),
        q2=(a.q2 - m2 * m2) / (d2 * d2),
        s=(a.s - m1 * m2) / (d1 * d2),
        m1=(a.m1 - m1) / d1,
        m2=(a.m2 - m2) / d2,
        t=t + 1 if affine and centred else t,  # the shift
        g=a.g + 1 if affine else a.g,
    )


def residual(a: State, layer: Layer) -> State:
    if a.g:
        raise ValueError("a pending gain enters a residual layer")
    b = propagate(a, layer["body"])
    return replace(a, q1=a.q1 + b.q1, q2=a.q2 + b.q2, s=a.s + b.s, t=a.t + b.t)


def propagate(state: State, network: list[Layer]) -> State:
    for layer in network:
        match layer["layer"]:
            case "dense":
                state = dense(state, layer)
            case "activation":
                state = activation(state, layer)
            case "layer_norm":
                state = norm(state, layer, centred=True)
            case "rms_norm":
                state = norm(state, layer, centred=False)
            case "residual":
                state = residual(state, layer)
    return state


def normalised_input(x: list[mpf], layer: Layer) -> list[mpf]:
    """A norm on the input itself acts on the d features, no limit is taken."""
    mean = mp.fsum(x) / len(x) if layer["layer"] == "layer_norm" else mpf(0)
    x = [v - mean for v in x]
    scale = mp.sqrt(mp.fdot(x, x) / len(x) + mpf(layer["eps"]))
    return [v / scale for v in x]


class Pair(NamedTuple):
    nngp: mpf
    ntk: mpf


def kernel(network: list[Layer], x1: list, x2: list) -> Pair:
    x1, x2 = [mpf(v) for v in x1], [mpf(v) for v in x2]
    if network[0]["layer"] in ("layer_norm", "rms_norm"):
        x1, x2 = normalised_input(x1, network[0]), normalised_input(x2, network[0])
        network = network[1:]
    d = len(x1)
    state = propagate(State(mp.fdot(x1, x1) / d, mp.fdot(x2, x2) / d, mp.fdot(x1, x2) / d), network)
    return Pair(state.s, state.t + state.g * state.s)


@lru_cache(maxsize=256)
def cached_diagonal(network: str, x: tuple[float, ...]) -> Pair:
    return kernel(json.loads(network), list(x), list(x))


# What is stored for a case.


def text(value: mpf) -> str:
    return mp.nstr(value, PRINTED)


NUDGE = mpf(10) ** -30


def kernel_values(case: Case) -> Case:
    """Both kernels; their scales sqrt(k(x, x) k(x', x')), which errors are measured against; and how far the
    kernels move, in units of their scale, when the inputs move by a relative 1: no method knows them better than
    that times the rounding of the inputs.
    """
    network, x1, x2 = case["network"], case["x1"], case["x2"]
    value = kernel(network, x1, x2)
    left, right = (cached_diagonal(json.dumps(network), tuple(x)) for x in (x1, x2))
    against = 1 if x1 == x2 else -1  # equal inputs stay equal
    moved = kernel(
        network,
        [v * (1 + (-1) ** i * NUDGE) for i, v in enumerate(x1)],
        [v * (1 + against * (-1) ** i * NUDGE) for i, v in enumerate(x2)],
    )
    values = {}
    for name in ("nngp", "ntk"):
        scale = mp.sqrt(getattr(left, name)) * mp.sqrt(getattr(right, name))
        change = abs(getattr(moved, name) - getattr(value, name))
        values[name] = text(getattr(value, name))
        values[f"{name}_scale"] = text(scale)
        values[f"{name}_condition"] = float(mp.nstr(change / (NUDGE * scale), 3)) if scale else 0.0
    return values


FAR = mpf(10) ** 60  # far enough that what is left of the next term is below the printed digits


def posterior_values(case: Case) -> Case:
    network, x, y = case["network"], case["x_train"], [mpf(v) for v in case["y_train"]]
    n = len(x)
    gram = mp.matrix(n, n)
    for i in range(n):
        for j in range(i + 1):
            gram[i, j] = gram[j, i] = kernel(network, x[i], x[j]).ntk
    alpha = mp.lu_solve(gram + mpf(case["noise"]) * mp.eye(n), mp.matrix(y))

    def mean(point):
        return mp.fsum(a * kernel(network, point, row).ntk for a, row in zip(alpha, x, strict=True))

    spectrum = mp.eigsy(gram, eigvals_only=True)
    norm = mp.sqrt((alpha.T * gram * alpha)[0])
    values = {
        "mean": [text(mean(point)) for point in case["x_test"]],
        "min_eigenvalue": text(min(spectrum)),
        "max_eigenvalue": text(max(spectrum)),
        "rkhs_norm": text(norm),
    }
    if "far_field" in case:
        ray = case["far_field"]
        length = mp.norm([mpf(v) for v in ray["direction"]])
        far = mean([FAR * mpf(v) / length for v in ray["direction"]])
        values["far_field"] = {**ray, "coefficient": text(far / FAR ** ray["power"])}
    if "kernel_sup" in case:
        sup = kernel_sup(network, len(x[0]))
        smallest = min(spectrum) + mpf(case["noise"])
        values |= {
            "kernel_sup": text(sup),
            "bound_rkhs": text(mp.sqrt(sup) * norm),
            "bound_spectral": text(mp.sqrt(sup / smallest) * mp.norm(y)),
            "bound_dataset": text(mp.sqrt(sup * n / smallest) * max(abs(v) for v in y)),
        }
    return values


def kernel_sup(network: list[Layer], d: int) -> mpf:
    """sup over x of Theta(x, x), which depends on |x| alone: a grid, then golden section."""

    def value(log_radius):
        x = [mpf(10) ** log_radius] + [mpf(0)] * (d - 1)
        return kernel(network, x, x).ntk

    ends = max(value(mpf(-60)), value(mpf(60)))
    grid = [mpf(k) / 8 for k in range(-48, 49)]
    best = max(range(len(grid)), key=lambda i: value(grid[i]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    golden = (mp.sqrt(5) - 1) / 2
    for _ in range(200):  # the value is flat at a maximum: half the digits of its place suffice
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if value(a) > value(b) else (a, high)
    return max(ends, value((low + high) / 2))


# The cases that are ours.

SQRT2 = 2**0.5


def network(spec: str, *, b_std: float = 0.1) -> list[Layer]:
    """A network from one word a layer, with parameters after colons.

    D, D:b_std                     dense; the last one has w_std = 1, the others sqrt(2)
    LN, RMS with +eps=E, +affine   norms
    [ ... ]                        residual
    name, name:parameter           activation
    """
    layers: list[Layer] = []
    nest = [layers]
    for word in spec.split():
        name, _, value = word.partition(":")
        kind, *options = word.split("+")
        if word == "[":
            nest.append([])
        elif word == "]":
            body = nest.pop()
            nest[-1].append({"layer": "residual", "body": body})
        elif name == "D":
            nest[-1].append({"layer": "dense", "w_std": SQRT2, "b_std": float(value or b_std)})
        elif kind in ("LN", "RMS"):
            eps = [float(o.removeprefix("eps=")) for o in options if o != "affine"]
            layer = {"LN": "layer_norm", "RMS": "rms_norm"}[kind]
            nest[-1].append({"layer": layer, "eps": sum(eps), "affine": "affine" in options})
        else:
            parameter = {"leaky_relu": "slope", "relu_power": "degree"}.get(name)
            nest[-1].append({"layer": "activation", "name": name} | ({parameter: json.loads(value)} if parameter else {}))
    layers[-1]["w_std"] = 1.0
    return layers


USUAL = "generic same near antipodal far origin"
NEARS = "near near@1e3 near@1e6"
ABS3, LEAKY3 = "D abs D abs D abs D", "D leaky_relu:-0.5 D leaky_relu:-0.5 D leaky_relu:-0.5 D"

# name: (network, kinds of pairs, b_std where it is not 0.1)
EXTRA: dict[str, tuple[str, str] | tuple[str, str, float]] = {
    # smooth after smooth and kinked after smooth: 1 - cos loses half the digits if formed at the end
    "gelu 2": ("D gelu D gelu D", f"{NEARS} opposite origin"),
    "gelu 3": ("D gelu D gelu D gelu D", f"generic same far {NEARS}"),
    "gelu relu": ("D gelu D relu D", f"{USUAL} {NEARS} opposite"),
    "gelu relu gelu": ("D gelu D relu D gelu D", f"generic same {NEARS}"),
    "gelu abs": ("D gelu D abs D", f"generic same {NEARS} opposite"),
    "relu gelu": ("D relu D gelu D", f"generic {NEARS}"),
    "erf 2": ("D erf D erf D", "near@1e3 near@1e6 opposite"),
    "erf relu": ("D erf D relu D", f"{USUAL} {NEARS} opposite"),
    "erf gelu": ("D erf D gelu D", f"generic same {NEARS}"),
    "gelu erf": ("D gelu D erf D", f"generic same {NEARS}"),
    "gelu LN2 relu": ("D gelu D LN relu D", f"{USUAL} {NEARS}"),
    # a norm after a smooth activation: the means differ between the sides
    "erf 2 post-LN": ("D erf LN D erf D", f"{USUAL} {NEARS}"),
    "gelu 2 post-LN": ("D gelu LN D gelu D", f"{USUAL} {NEARS} opposite"),
    "gelu 2 post-LN eps affine": ("D gelu LN+eps=0.01+affine D gelu D", USUAL),
    "erf 1 post-LN eps affine": ("D erf LN+eps=0.01+affine D", USUAL),
    "gelu affine RMS then LN": ("D gelu RMS+affine LN D gelu D", USUAL),
    "leaky affine RMS then affine LN": ("D leaky_relu:0.3 RMS+eps=0.01+affine LN+affine D", USUAL),
    # a pending gain inside the expectation
    "gelu 1 affine LN": ("D LN+eps=0.01+affine gelu D", f"{USUAL} {NEARS}"),
    "gelu 1 affine RMS": ("D RMS+affine gelu D", USUAL),
    "erf 1 affine LN": ("D LN+eps=0.01+affine erf D", f"{USUAL} {NEARS}"),
    "abs 1 affine LN": ("D LN+affine abs D", USUAL),
    "relu^2 1 affine LN": ("D LN+affine relu_power:2 D", USUAL),
    "step 1 affine LN": ("D LN+affine step D", "generic near antipodal"),
    # homogeneous
    "step 1": ("D step D", "same near"),
    "step 2 LN2": ("D step D LN step D", "generic antipodal far"),
    "relu^1 2": ("D relu_power:1 D relu_power:1 D", "generic same near"),
    "relu^2 2 LN2": ("D relu_power:2 D LN relu_power:2 D", f"{USUAL} opposite"),
    "relu^3 2": ("D relu_power:3 D relu_power:3 D", "generic same near antipodal"),
    "leaky -.5 3": (LEAKY3, f"{USUAL} opposite"),
    "leaky -.5 3 no bias": (LEAKY3, f"{USUAL} opposite", 0.0),
    "abs 3 no bias": (ABS3, f"{USUAL} opposite tiny extreme", 0.0),
    "identity 2 no bias": ("D identity D identity D", "near orthogonal opposite", 0.0),
    "relu 3 no bias": ("D relu D relu D relu D", "opposite orthogonal tiny extreme origin", 0.0),
    "relu 2 bias late": ("D:0 relu D relu D", "generic opposite origin tiny"),
    "relu 2 LN1 no bias": ("D LN relu D relu D", "generic near opposite tiny extreme", 0.0),
    "relu 2 LN1 eps no bias": ("D LN+eps=1e-5 relu D relu D", "generic far origin tiny", 0.0),
    "relu 2 LN2 bias 1e-8": ("D relu D LN relu D", "generic near opposite tiny", 1e-8),
    "relu 50": ("D relu " * 50 + "D", "generic near antipodal"),
    "relu 20 LN every": ("D LN relu " * 20 + "D", USUAL),
    "relu 1": ("D relu D", "tiny huge wide"),
    "relu 2 LN1": ("D LN relu D relu D", "tiny huge wide extreme"),
    # a norm on the input itself
    "input LN relu 2": ("LN D relu D relu D", "generic same near antipodal far"),
    "input LN eps gelu 1": ("LN+eps=0.1 D gelu D", USUAL),
    "input RMS relu 2": ("RMS D relu D relu D", "generic same near antipodal far"),
    # skips
    "residual relu LN": ("D [ LN relu D ] [ LN relu D ] LN relu D", "near far origin"),
    "residual no LN": ("D [ relu D ] relu D", "near far origin"),
    # exact through exponentials
    "cos 2 affine LN": ("D LN+eps=0.01+affine cos D cos D", USUAL),
    "sin 2 LN every": ("D LN sin D LN sin D", USUAL),
}


def pairs(kind: str, x: np.ndarray, y: np.ndarray, offset: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    zero = np.zeros_like(x)
    kind, _, scale = kind.partition("@")
    by = float(scale or 1)
    match kind:
        case "generic":
            return {"generic": (x, y)}
        case "same":
            return {"same": (x, x)}
        case "near":
            at = f" at {scale}" if scale else ""
            return {f"near {gap}{at}": (by * x, by * (x + float(gap) * offset)) for gap in ("1e-6", "1e-9")}
        case "antipodal":
            return {"antipodal": (x, -x)}
        case "opposite":
            return {"near antipodal 1e-9": (x, -(x + 1e-9 * offset))}
        case "orthogonal":
            return {"orthogonal": (np.array([1.0, 0.0, 0.0]), np.array([0.0, 3.0, 0.0]))}
        case "origin":
            return {"origin": (zero, y), "origin twice": (zero, zero)}
        case "far":
            return {f"far {r}": (float(r) * x, y) for r in ("1e6", "1e100")}
        case "tiny":
            return {f"tiny {r}": (float(r) * x, float(r) * y) for r in ("1e-12", "1e-100")}
        case "huge":
            return {
                "huge 1e12 near": (1e12 * x, 1e12 * (x + 1e-9 * offset)),
                "huge 1e100": (1e100 * x, 1e100 * y),
            }
        case "wide":
            return {"1e-100 with 1e100": (1e-100 * x, 1e100 * y)}
        case "extreme":
            return {"1e-300 with 1e300": (1e-300 * x, 1e300 * y)}
    raise ValueError(f"no pairs of the kind {kind!r}")


def extra_cases() -> list[Case]:
    cases = []
    for name, (spec, kinds, *b_std) in EXTRA.items():
        rng = np.random.default_rng(list(name.encode()))
        x, y, offset = rng.standard_normal((3, 5 if name.startswith("input") else 3))
        layers = network(spec, b_std=b_std[0] if b_std else 0.1)
        for kind in dict.fromkeys(kinds.split()):
            for suffix, (x1, x2) in pairs(kind, x, y, offset).items():
                case = {"id": f"{name} | {suffix}", "network": layers, "x1": x1.tolist(), "x2": x2.tolist()}
                cases.append(case)
    return cases


def float32_cases() -> list[Case]:
    """Every kernel case that is one of its own after rounding its inputs to float32."""

    def rounded(x: list[float]) -> list[float]:
        size = max(map(abs, x))
        hundreds = round(np.log10(size) / 100) if size else 0
        return np.float32(np.array(x) * 10.0 ** (-90 * hundreds)).tolist()  # 1e100 becomes 1e10

    cases = {}
    for case in [*load("kernels"), *load("extra")]:
        x1, x2 = rounded(case["x1"]), rounded(case["x2"])
        name = case["id"]
        for large, small in (("1e100", "1e10"), ("1e-100", "1e-10"), ("1e300", "1e30"), ("1e-300", "1e-30")):
            name = name.replace(large, small)
        key = json.dumps([case["network"], x1, x2])
        cases.setdefault(key, {"id": name, "network": case["network"], "x1": x1, "x2": x2})
    return list(cases.values())


# Tables on disk.


class Table(NamedTuple):
    cases: Callable[[], list[Case]]
    values: Callable[[Case], Case]


def path(table: str) -> Path:
    return FOLDER / f"{table}.json"


def load(table: str) -> list[Case]:
    return json.loads(path(table).read_text())["cases"]


TABLES = {
    "kernels": Table(lambda: load("kernels"), kernel_values),
    "extra": Table(extra_cases, kernel_values),
    "kernels_float32": Table(float32_cases, kernel_values),
    "posteriors": Table(lambda: load("posteriors"), posterior_values),
}


def recomputed(job: tuple[str, Case]) -> Case:
    table, case = job
    with mp.workdps(DIGITS):
        return {**case, **TABLES[table].values(case)}


def save(table: str, cases: list[Case]) -> None:
    lines = ",\n".join(json.dumps(case) for case in cases)
    note = "mpmath 80 digits, printed to 32; numbers as decimal strings"
    path(table).write_text(f'{{"format": "{note}",\n"cases": [\n{lines}\n]}}\n')


def numbers(case: Case) -> dict[str, mpf]:
    """Every decimal string in a case, by its place."""
    found = {}

    def walk(place: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{place}.{key}", inner)
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                walk(f"{place}[{i}]", inner)
        elif isinstance(value, str):
            found[place] = mpf(value)

    for key, value in case.items():
        if key not in ("id", "network"):
            walk(key, value)
    return found


def difference(old: Case, new: Case) -> tuple[float, str]:
    """The largest difference relative to the case's own scale, and where it is."""
    before, after = numbers(old), numbers(new)
    worst = (0.0, "")
    for place, value in after.items():
        if place not in before:
            return float("inf"), place
        scale = max(abs(value), after.get(f"{place}_scale", mpf(0))) or mpf(1)
        worst = max(worst, (float(abs(value - before[place]) / scale), place))
    return worst


def check(table: str, *, only: str = "", jobs: int = 1, tolerance: float = 1e-29) -> list[str]:
    """One line for every case of the stored table that its recomputation does not confirm."""
    stored = [case for case in load(table) if only in case["id"]]
    faults = []
    for old, new in zip(stored, run(table, stored, jobs), strict=True):
        error, place = difference(old, new)
        if error > tolerance:
            faults.append(f"{table}: {old['id']}: {place} differs by {error:.1e}")
    return faults


def run(table: str, cases: list[Case], jobs: int) -> list[Case]:
    work = [(table, case) for case in cases]
    if jobs == 1:
        return [recomputed(job) for job in work]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return pool.map(recomputed, work, chunksize=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the stored tables, write nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose id contains TEXT")
    parser.add_argument("--table", action="append", choices=TABLES, help="only this table (may be repeated)")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    faults = []
    for table in options.table or TABLES:
        if options.check:
            faults += check(table, only=options.only, jobs=options.jobs)
            continue
        cases = TABLES[table].cases()
        fresh = iter(run(table, [case for case in cases if options.only in case["id"]], options.jobs))
        kept = {case["id"]: case for case in load(table)} if options.only and path(table).exists() else {}
        save(table, [next(fresh) if options.only in case["id"] else kept[case["id"]] for case in cases])
    print("\n".join(faults) or "done", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
