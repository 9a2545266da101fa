"""The audit: the paper's statements and side remarks, each computed, with a verdict."""

from collections.abc import Iterator
from functools import partial

import jax
import numpy as np

import ntk_ln as nl
from ntk_ln.experiments import _networks as networks
from ntk_ln.experiments import tightness, width
from ntk_ln.experiments._run import Report, Row, Settings, exact

TITLE = "Audit of the paper's statements"
R = 1e8  # "far out"


def run(settings: Settings) -> Report:
    """Every statement; networks are trained for the remark on widths alone."""
    parts = (
        theorem_3_1,
        theorems_3_2_and_3_3,
        proposition_3_4,
        theorem_c_1,
        proposition_e_2,
        corollary_e_3,
        proof_of_3_3,
        diagonal_claim,
        frozen_batch_norm,
        training_set_eigenvalue,
        partial(remark_on_widths, settings),
        assumption_on_degree,
        remark_on_tightness,
        what_is_left_open,
    )
    rows: list[Row] = []
    for part in parts:
        settings.announce(f"audit: {(getattr(part, 'func', part).__doc__ or '').splitlines()[0]}")
        rows += part()
    return Report("audit", TITLE, {"far out": R}, rows)


def _data(n: int = 12, d: int = 2) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(n, d))
    return x, np.sin(x[:, 0])


def theorem_3_1() -> Iterator[Row]:
    """Theorem 3.1: without LayerNorm some dataset makes the mean unbounded, growing as r^(n^L)."""
    for depth in (1, 2, 3):
        for degree in (1, 2):
            net = nl.mlp(depth, activation="relu") if degree == 1 else _power(depth, 2)
            x, y = _data()
            found = nl.check_theorem_3_1(net, x, y)
            yield exact(
                f"Theorem 3.1, {depth} hidden layers of degree {degree}: growth exponent fitted on the proof's dataset",
                found.evidence["witness"]["fitted_power"],
                published=f"n^L = {degree**depth}",
                agrees=found.holds,
            )


def _power(depth: int, degree: float, norm: str = "none") -> nl.Network:
    layers: list[nl.AbstractLayer] = []
    for layer in range(depth):
        layers.append(nl.Dense(w_std=1.0, b_std=0.3))
        if norm == "last" and layer == depth - 1:
            layers.append(nl.LayerNorm())
        layers.append(nl.Activation("relu_power", degree=degree))
    return nl.Network(*layers, nl.Dense(b_std=0.1))


def theorems_3_2_and_3_3() -> Iterator[Row]:
    """Theorems 3.2 and 3.3: one LayerNorm anywhere bounds Theta(x, x) and the mean."""
    x, y = _data()
    for position in ("first", "last", "every"):
        for activation in ("relu", "gelu", "silu"):
            net = nl.mlp(3, layer_norm=position, activation=activation)
            p = nl.posterior(nl.NTK(net), x, y, noise=1e-8)
            bound, found = nl.sup_norm_bound(p), nl.sup_norm(p).value
            yield exact(
                f"Theorem 3.3, LayerNorm {position}, {activation}: sup |mean| over its rkhs bound",
                found / bound.rkhs,
                published="at most 1",
                agrees=bool(found <= bound.rkhs <= bound.spectral <= bound.dataset),
                note=f"C = {bound.kernel_sup:.6g}: Theorem 3.2",
            )


def proposition_3_4() -> Iterator[Row]:
    """Proposition 3.4: a network of minimum training loss with a LayerNorm inside, and no bound."""
    x, y = _data()  # not the sine: the kinks of a narrow random layer on a line leave pairs of its rows alike
    for name, net in (("1 hidden layer", nl.paper_mlp(1)), ("2 hidden layers", nl.paper_mlp(2))):
        found = nl.check_proposition_3_4(net, x, y)
        for eps in ("eps", "eps/10"):
            one = found.evidence[eps]
            yield exact(
                f"Proposition 3.4, {name}, eps = {one['eps']:g}: largest |f| of a network whose training outputs are y",
                one["largest"],
                published=f"no bound: 1/eps = {1 / one['eps']:g}",
                agrees=found.holds,
                note=f"training outputs differ by {one['training_error']:.1e}; it follows the network without a norm to "
                f"|x| = {one['radius_of_saturation']:.3g}, then saturates",
            )


def theorem_c_1() -> Iterator[Row]:
    """Theorem C.1 and Corollary C.2: Linear, then LayerNorm: the kernel depends on the soft cosine alone."""
    net = nl.paper_mlp(3, layer_norm="first")
    found = nl.check_theorem_c_1(net)
    norms = np.array([[1e-6, 0.0], [0.3, 0.4], [3.0, -4.0], [0.0, 1e6]])
    diagonal = nl.NTK(net).diag(norms)
    yield exact(
        "Theorem C.1: relative spread of Theta(x, x) over |x| from 1e-6 to 1e6",
        float(np.ptp(diagonal) / diagonal.mean()),
        published="constant",
        agrees=bool(found.holds) and bool(np.ptp(diagonal) <= 1e-13 * diagonal.mean()),
    )
    for name, kind in (("convolutional", "conv"), ("attention", "attention")):
        yield from _constant_diagonal(name, kind)


def _constant_diagonal(name: str, kind: str) -> Iterator[Row]:
    """Theorem C.3: Theta(x, x) of a convolutional or attention network whose inputs pass a Linear and a LayerNorm first."""
    try:
        kernel_fn = _neural_tangents_kernel(kind)
    except ImportError:
        return  # neural-tangents is not installed
    x = np.random.default_rng(0).normal(size=(1, 4, 4, 3) if kind == "conv" else (1, 6, 3))
    values = []
    with jax.enable_x64(True):
        for scale in (0.5, 1.0, 8.0, 64.0):
            values.append(float(np.asarray(kernel_fn(scale * x, None, "ntk"))[0, 0]))
    spread = float(np.ptp(values) / np.mean(values))
    yield exact(
        f"Theorem C.3, {name} network (neural-tangents' kernel): relative spread of Theta(x, x) over |x| from 0.5 to 64",
        spread,
        published="constant",
        agrees=spread < 1e-3,
        note="inputs without bias: the norm takes their scale away; neural-tangents' LayerNorm adds eps = 1e-12",
    )


def _neural_tangents_kernel(kind: str):
    from ntk_ln.kernels._neural_tangents_shim import import_neural_tangents

    stax = import_neural_tangents().stax
    if kind == "conv":
        return stax.serial(
            stax.Conv(1, (1, 1), W_std=1.0),
            stax.LayerNorm(axis=-1),
            stax.Relu(),
            stax.Conv(1, (3, 3), padding="SAME", W_std=2**0.5, b_std=0.1),
            stax.Relu(),
            stax.GlobalAvgPool(),
            stax.Dense(1),
        )[2]
    return stax.serial(
        stax.Dense(1, W_std=1.0),
        stax.LayerNorm(axis=-1),
        stax.GlobalSelfAttention(1, n_chan_key=1, n_chan_val=1, n_heads=1, linear_scaling=True),
        stax.Relu(),
        stax.GlobalAvgPool(),
        stax.Dense(1),
    )[2]


def proposition_e_2() -> Iterator[Row]:
    """Proposition E.2: Theta(x, x)/r^2 far out is sum_h q^h/n_0; its printed closed form (1 - q^L)/(1 - q) is not."""
    for depth in (1, 2, 5):
        d = 3
        net = nl.paper_mlp(depth)
        x = np.full((1, d), R / d**0.5)
        constant = float(nl.NTK(net).diag(x)[0]) / R**2 * d
        # paper_mlp: w_std^2 = c_phi = 2 after the first Dense, so that E[phi^2] keeps the scale of its input; q = 1 for ReLU.
        yield exact(
            f"Proposition E.2, {depth} hidden ReLU layers: n_0 Theta(x, x)/r^2 at r = {R:g}",
            constant,
            published=f"sum of q^h, h = 0 ... L: {depth + 1}",
            agrees=abs(constant - (depth + 1)) < 1e-6 * (depth + 1),
            note=f"the printed closed form is 0/0 at q = 1, and its limit {depth} is one short",
        )


def corollary_e_3() -> Iterator[Row]:
    """Corollary E.3: for x.x' > 0 the limit kernel is positive; Cor. E.1, E.2: homogeneous of degree n^L in each argument."""
    x = np.abs(np.random.default_rng(0).normal(size=(20, 3)))
    limit = nl.NTK(nl.paper_mlp(3))(R * x, x) / R
    yield exact(
        "Corollary E.3: smallest one-sided limit kernel over 400 pairs with x.x' > 0", float(limit.min()), published="> 0",
        agrees=bool(limit.min() > 0),
    )  # fmt: skip
    ratio = nl.NTK(nl.paper_mlp(3))(2 * R * x, x) / nl.NTK(nl.paper_mlp(3))(R * x, x)
    yield exact(
        "Corollaries E.1, E.2: Theta(2 r x, x')/Theta(r x, x') far out, largest deviation from 2^(n^L) = 2",
        float(np.abs(ratio - 2).max()),
        published="0",
        agrees=bool(np.abs(ratio - 2).max() < 1e-6),
    )


def proof_of_3_3() -> Iterator[Row]:
    """Theorem 3.3's proof sketch: C n max|y|/sqrt(lambda_min) is no bound, sqrt(C n/lambda_min) max|y| is."""
    x, y = _data()
    for w_out in (1.0, 1e-3):
        net = nl.mlp(2, layer_norm="first", w_out=w_out, b_out=0.1 * w_out)
        p = nl.posterior(nl.NTK(net), x, y, noise=0.0)
        bound, found = nl.sup_norm_bound(p), nl.sup_norm(p).value
        c, smallest = bound.kernel_sup, p.min_eigenvalue.value
        sketch = c * len(y) * float(np.abs(y).max()) / smallest**0.5
        yield exact(
            f"Theorem 3.3's sketch, output weights {w_out:g}: sup |mean| over C n max|y|/sqrt(lambda_min)",
            found / sketch,
            published="at most 1 (sketch)",
            agrees=found <= sketch,
            note="not invariant under a rescaling of the kernel, which leaves the mean as it is: it fails for small outputs",
        )
        yield exact(
            f"Theorem 3.3, output weights {w_out:g}: sup |mean| over sqrt(C n/lambda_min) max|y|",
            found / bound.dataset,
            published="at most 1",
            agrees=found <= bound.dataset,
        )


def diagonal_claim() -> Iterator[Row]:
    """The discussion: K = D K_LN D, D = diag sqrt(h + |x|^2), and lambda_min(K_LN) >= lambda_min(K)/(h + max |x|^2)."""
    x = np.array([[10.0], [10.2]])
    for depth, bias_after in ((2, 0.0), (2, 1.0), (5, 1.0)):
        plain, normed = (_with_bias(depth, bias_after, norm) for norm in (False, True))
        k, k_ln = (nl.NTK(net)(x) for net in (plain, normed))
        d = np.sqrt(1 + (x**2).sum(axis=1))
        off = float(np.abs(d[:, None] * k_ln * d - k).max() / np.abs(k).max())
        claimed = float(np.linalg.eigvalsh(k)[0] / (d**2).max())
        after = "no bias after the norm" if not bias_after else "biases of variance 1"
        yield exact(
            f"K = D K_LN D, depth {depth}, {after}: largest deviation",
            off,
            published="0",
            agrees=off < 1e-10,
            note="exact only where no bias follows the norm" if bias_after else "",
        )
        smallest = float(np.linalg.eigvalsh(k_ln)[0])
        yield exact(
            f"lambda_min(K_LN) over lambda_min(K)/(h + max |x|^2), depth {depth}, {after}",
            smallest / claimed,
            published="at least 1",
            agrees=smallest >= claimed * (1 - 1e-6),
        )


def _with_bias(depth: int, after: float, norm: bool) -> nl.Network:
    layers: list[nl.AbstractLayer] = [nl.Dense(w_std=1.0, b_std=1.0)]
    if norm:
        layers.append(nl.LayerNorm())
    for _ in range(depth):
        layers += [nl.Activation("relu"), nl.Dense(w_std=2**0.5, b_std=after)]
    return nl.Network(*layers)


def frozen_batch_norm() -> Iterator[Row]:
    """BatchNorm "does not alter the NTK": growth of the empirical NTK with statistics frozen after a batch."""
    dense, *rest = nl.paper_mlp(2).layers
    net = nl.Network(dense, nl.BatchNorm(), *rest)
    x = np.linspace(-3, 3, 32, dtype=np.float32)[:, None]
    params = net.init(jax.random.key(0), in_features=1, width=512)
    _, params = net.apply_batch(params, jax.numpy.asarray(x))
    far = np.array([[1e4], [2e4]], np.float32)
    diagonal = np.asarray(nl.EmpiricalNTK(net, params).diag(far), np.float64)
    power = float(np.log2(diagonal[1] / diagonal[0]))
    yield exact(
        "BatchNorm with frozen statistics: growth exponent of Theta(x, x)",
        power,
        published="as without a norm: 2",
        agrees=abs(power - 2) < 0.01,
        note="true of frozen statistics; in training mode the rows of a batch depend on each other and there is no kernel of pairs",
    )


def training_set_eigenvalue() -> Iterator[Row]:
    """Could lambda_min "shrink as |x| grows and void the bound"? It is of the training set."""
    x, y = _data()
    p = nl.posterior(nl.NTK(nl.mlp(2, layer_norm="first")), x, y)
    bound = nl.sup_norm_bound(p)
    worst = max(float(np.abs(p.mean(r * x)).max()) for r in 10.0 ** np.arange(0, 101, 20))
    yield exact(
        "largest |mean| at the training directions out to |x| = 1e100, over the bound",
        worst / bound.rkhs,
        published="at most 1 however far",
        agrees=worst <= bound.rkhs,
    )


def remark_on_widths(settings: Settings) -> Iterator[Row]:
    """Widths above 512: the largest prediction within 10% of that of the NTK posterior, on the sine."""
    yield from width.compare(settings, (width.CLAIMED_FROM,))[0]
    yield from width.at_the_same_time(settings)


def assumption_on_degree() -> Iterator[Row]:
    """The assumption n > 1/2: with erf or tanh before the LayerNorm Theta(x, x) grows like |x|, though the mean is bounded."""
    x, y = _data()
    for activation in ("erf", "tanh"):
        net = nl.mlp(2, layer_norm="last", activation=activation)
        kernel = nl.NTK(net)
        diagonal = kernel.diag(np.array([[1e6, 0.0], [2e6, 0.0]]))
        power = float(np.log2(diagonal[1] / diagonal[0]))
        p = nl.posterior(kernel, x, y, noise=1e-6)
        yield exact(
            f"{activation} before the norm: growth exponent of Theta(x, x)",
            power,
            published="not covered: n = 0",
            agrees=None,
            note=f"sup |mean| = {nl.sup_norm(p).value:.4g}: bounded all the same",
        )
    for degree in (0.6, 0.75):
        net = _power(2, degree, norm="last")
        kernel_sup = nl.kernel_sup(nl.NTK(net))
        yield exact(
            f"degree {degree:g}, between 1/2 and 1, before the norm: C", kernel_sup.value, published="finite",
            agrees=bool(np.isfinite(kernel_sup.value)),
        )  # fmt: skip


def remark_on_tightness() -> Iterator[Row]:
    """The bound is of the order of the largest prediction for few points and loosens as they grow; a plain network exceeds it."""
    shares = []
    for n in (tightness.POINTS[0], 50):
        p, plain = (
            nl.posterior(nl.NTK(networks.network(position)), *networks.data("sine", n), noise=0) for position in ("first", "none")
        )
        found, bound = nl.sup_norm(p).value, nl.sup_norm_bound(p)
        shares.append(found / bound.rkhs)
        few = n <= tightness.FEW
        yield exact(
            f"sine, {n} points, LayerNorm first: sup |mean| over the rkhs bound",
            shares[-1],
            published="of the order of 1" if few else "loosening",
            agrees=bool(0.1 < shares[-1] <= 1 if few else shares[-1] < shares[0]),
            note=f"over the spectral bound {found / bound.spectral:.3g}, the dataset bound {found / bound.dataset:.3g}",
        )
        far = float(np.abs(plain.mean([[-1e4], [1e4]])).max())
        yield exact(
            f"sine, {n} points, no LayerNorm: |mean| at 10^4 over that rkhs bound",
            far / bound.rkhs,
            published="above 1",
            agrees=far > bound.rkhs,
            note=f"over the dataset bound {far / bound.dataset:.3g}",
        )


def what_is_left_open() -> Iterator[Row]:
    """What the paper leaves open: a norm inside a residual branch, RMSNorm, gain and shift, tanh in the place of the norm."""
    relu, dense = nl.Activation("relu"), nl.Dense(w_std=2**0.5, b_std=0.1)
    nets = {
        "norm inside the branch of a skip": (
            nl.Network(nl.Dense(b_std=0.1), nl.Residual(nl.LayerNorm(), relu, dense), relu, nl.Dense()),
            False,
        ),
        "norm on the trunk after a skip": (
            nl.Network(nl.Dense(b_std=0.1), nl.Residual(relu, dense), nl.LayerNorm(), relu, nl.Dense()),
            True,
        ),
        "RMSNorm": (nl.Network(nl.Dense(b_std=0.1), nl.RMSNorm(), relu, nl.Dense()), True),
        "LayerNorm with trained gain and shift": (
            nl.Network(nl.Dense(b_std=0.1), nl.LayerNorm(affine=True), relu, nl.Dense()),
            True,
        ),
        "tanh in the place of LayerNorm (DyT)": (
            nl.Network(nl.Dense(b_std=0.1), nl.Activation("tanh"), dense, relu, nl.Dense()),
            None,
        ),
    }
    for name, (net, bounded) in nets.items():
        value, note = nl.kernel_sup(nl.NTK(net)).value, ""
        if bounded is None:
            found = nl.sup_norm(nl.posterior(nl.NTK(net), *_data(), noise=1e-6)).value
            note = f"sup |mean| = {found:.4g}: the mean stays bounded, the kernel does not, so no bound of this kind"
        yield exact(
            f"{name}: C = sup Theta(x, x)",
            value,
            published="open",
            agrees=None if bounded is None else bool(np.isfinite(value)) == bounded,
            note=note,
        )
