"""The kernels of neural-tangents beside the closed forms, what it refuses, and what importing it leaves behind."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow

from ntk_ln import NTK, Activation, Dense, LayerNorm, Network, NeuralTangentsKernel, mlp
from ntk_ln.kernels._neural_tangents_shim import import_neural_tangents

RNG = np.random.default_rng(7)
X1 = RNG.normal(size=(4, 3))
X2 = RNG.normal(size=(4, 3)) * np.array([[0.3], [1.0], [3.0], [10.0]])

NETWORKS = {
    **{name: mlp(2, activation=name) for name in ("relu", "abs", "identity", "step", "erf", "gelu")},
    **{f"{name}, norm": mlp(2, activation=name, layer_norm="first", eps=0.3) for name in ("relu", "step", "erf", "gelu")},
    "relu, every": mlp(3, layer_norm="every"),
    "no bias": mlp(2, b_std=0.0, b_out=0.0),
    "relu power 1": Network(Dense(b_std=0.2), Activation("relu_power", degree=1), Dense()),
    "mixed": Network(
        Dense(w_std=1.7, b_std=0.4),
        Activation("leaky_relu", slope=-0.3),
        Dense(w_std=0.6),
        Dense(w_std=1.3, b_std=1.0),
        LayerNorm(eps=1e-3),
        LayerNorm(eps=0.5),
        Activation("gelu"),
        Dense(w_std=1.1, b_std=0.2),
    ),
    "norm": Network(Dense(w_std=1.5, b_std=0.5), LayerNorm(eps=0.3), Dense(w_std=1.1, b_std=0.2)),
    "linear": Network(Dense(w_std=2.0, b_std=0.5)),
}


def relative_difference(got, wanted):
    assert np.shape(got) == np.shape(wanted)
    return np.max(np.abs(np.asarray(got, float) / np.asarray(wanted, float) - 1))


def without_jit(function, *args):
    # Operations compile once for all networks: a third of the time of compiling each network for its one small call.
    with jax.disable_jit():
        return function(*args)


QUICK = list(NETWORKS)[::2]


@pytest.mark.parametrize("name", [n if n in QUICK else slow(n) for n in NETWORKS])
def test_agrees_with_the_closed_form(name):
    k = NeuralTangentsKernel(NETWORKS[name])
    wanted = without_jit(NTK(k.network).pair, X1, np.concatenate([X1, X2]))
    square, rectangle = k.pair(X1), k.pair(X1, X2)
    assert relative_difference(np.hstack([square.ntk, rectangle.ntk]), wanted.ntk) < 1e-10
    assert relative_difference(np.hstack([square.nngp, rectangle.nngp]), wanted.nngp) < 1e-10
    assert relative_difference(k.diag(X1), np.diag(wanted.ntk)) < 1e-13


def test_every_call_gives_the_same_kernel():
    net = NETWORKS["relu, norm"]
    for get in ("ntk", "nngp"):
        k = NeuralTangentsKernel(net, get=get)
        np.testing.assert_array_equal(k(X1, X2), getattr(k.pair(X1, X2), get))
        np.testing.assert_array_equal(k(X1), getattr(k.pair(X1), get))
        np.testing.assert_array_equal(k.diag(X1), np.diag(k(X1)))


def test_the_same_array_twice_has_an_exact_diagonal():
    x = RNG.normal(size=(4, 100))  # enough features for neural-tangents' own diagonal to be off by 1e-8
    k = NeuralTangentsKernel(Network(Dense(), Activation("relu"), Dense()))  # Theta(x, x) = |x|^2/d
    gram = k(x, x)
    np.testing.assert_array_equal(gram, gram.T)
    np.testing.assert_array_equal(np.diag(gram), k.diag(x))
    assert relative_difference(k.diag(x), np.mean(x**2, axis=1)) < 1e-14


@pytest.mark.slow
def test_wraps_a_kernel_fn():
    stax = import_neural_tangents().stax
    # Not translated, since it is NaN between an input and itself; between others it checks relu_power all the same.
    square = stax.RectifiedMonomial(2)
    _, _, kernel_fn = stax.serial(stax.Dense(1, 1.2, 0.3), stax.LayerNorm(eps=0.1), square, stax.Dense(1, 0.9, 0.5))
    net = Network(Dense(w_std=1.2, b_std=0.3), LayerNorm(eps=0.1), Activation("relu_power", degree=2), Dense(w_std=0.9, b_std=0.5))
    pair, wanted = NeuralTangentsKernel(kernel_fn).pair(X1, X2), without_jit(NTK(net).pair, X1, X2)
    assert isinstance(pair.ntk, np.ndarray)
    assert relative_difference(pair.ntk, wanted.ntk) < 1e-10
    assert relative_difference(pair.nngp, wanted.nngp) < 1e-10

    _, _, kernel_fn = stax.serial(stax.Dense(1, 1.0), stax.Sin(), stax.Dense(1, 1.0))
    k = NeuralTangentsKernel(kernel_fn, get="nngp")
    q = np.sum(X2**2, axis=1) / 3
    assert relative_difference(k.diag(X2), (1 - np.exp(-2 * q)) / 2) < 1e-14


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_in_numpy_out(dtype):
    k, x = NeuralTangentsKernel(NETWORKS["norm"]), X1.astype(dtype)
    for value in (k(x), k.diag(x), k.pair(x).nngp):
        assert isinstance(value, np.ndarray)
        assert value.dtype == dtype
    assert relative_difference(k(x), k(X1)) < 50 * np.finfo(dtype).eps


def test_jax_in_jax_out():
    k, x = NeuralTangentsKernel(NETWORKS["norm"]), jnp.asarray(X1, jnp.float32)
    for value in (k(x), k.diag(x), k.pair(x).nngp, jax.jit(k)(x)):
        assert isinstance(value, jax.Array)
        assert value.dtype == jnp.float32
    np.testing.assert_array_equal(k(x), k(X1.astype(np.float32)))


def test_derivatives_reach_the_network():
    def total(w_std):
        net = Network(Dense(w_std=w_std), Dense(w_std=w_std))  # Theta = 2 w_std^4 x.x'/d
        return jnp.sum(NeuralTangentsKernel(net)(x1, x2))

    x1, x2 = jnp.asarray(X1, jnp.float32), jnp.asarray(X2, jnp.float32)
    assert relative_difference(jax.grad(total)(1.3), 8 * 1.3**3 * np.sum(X1 @ X2.T) / 3) < 1e-5


@pytest.mark.parametrize(("n1", "n2"), [(0, None), (0, 4), (4, 0)])
def test_any_number_of_rows(n1, n2):
    k = NeuralTangentsKernel(NETWORKS["norm"])
    x1, x2 = X1[:n1], None if n2 is None else X2[:n2]
    assert k(x1, x2).shape == (n1, n1 if n2 is None else n2)
    assert k.pair(x1, x2).nngp.shape == k(x1, x2).shape
    assert k.diag(x1).shape == (n1,)


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ((Dense(), Activation("relu"), LayerNorm(), Dense()), r"layer 2, LayerNorm\(.*only after a Dense.*Use `NTK\(network\)`"),
        ((Dense(), LayerNorm(affine=True), Dense()), r"layer 1, LayerNorm\(.*no trained gain and shift.*Use `NTK\(network\)`"),
        ((Dense(), Activation("relu_power", degree=2), Dense()), r"layer 1, Activation\('relu_power'.*is NaN.*Use `NTK"),
    ],
)
def test_refuses_what_neural_tangents_does_not_have(layers, match):
    with pytest.raises(NotImplementedError, match=match):
        NeuralTangentsKernel(Network(*layers))


def test_refuses_wrong_arguments():
    with pytest.raises(ValueError, match=r'needs get="ntk" or "nngp". Got \'both\''):
        NeuralTangentsKernel(mlp(1), get="both")
    for wrong in (3, NTK(mlp(1)), (len, len, len)):
        with pytest.raises(TypeError, match=f"needs a Network or a neural-tangents kernel_fn.*Got {type(wrong).__name__}"):
            NeuralTangentsKernel(wrong)
    k = NeuralTangentsKernel(mlp(1))
    with pytest.raises(ValueError, match=r"`NeuralTangentsKernel\(network\)\(x1, x2\)` needs `x` of shape \(n, d\)"):
        k([1.0, 2.0])
    with pytest.raises(ValueError, match=r"`NeuralTangentsKernel\(network\).diag\(x\)` needs finite numbers. Row 1"):
        k.diag([[1.0], [np.nan]])
    with pytest.raises(ValueError, match=r"makes 0/0 of a zero input. Row 1 is one"):
        NeuralTangentsKernel(mlp(1, layer_norm="first", b_std=0.0))([[1.0], [0.0]])


IMPORT = """
import sys
import jax, jax.interpreters.ad, jax.extend.core
import ntk_ln
assert "neural_tangents" not in sys.modules

def state():
    util = sys.modules.get("jax.util")
    modules = [jax.core, jax.interpreters.ad] + ([util] if util else [])
    lent = ("Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var", "zeros_like_p", "safe_map", "safe_zip")
    return [[name in vars(module) for name in lent] for module in modules], jax.config.jax_enable_x64

def refusal():
    try:
        ntk_ln.NeuralTangentsKernel(ntk_ln.mlp(0))
    except ImportError as error:
        assert "neural_tangents.experimental" not in sys.modules
        return str(error)
    raise AssertionError("not refused")

try:
    import jax.util  # there or not, it must be so afterwards
except ImportError:
    pass
before = state()

# What is missing is named, with the way out; and nothing stands in the way of trying again.
for name in ("neural_tangents", "frozendict"):
    sys.modules[name] = None
    message = refusal()
    assert f"package {name}" in message and "pip install --no-deps" in message, message
    del sys.modules[name]
sys.modules["jax.example_libraries.stax"] = None
message = refusal()
assert f"on JAX {jax.__version__}" in message and "NTK(network)" in message, message
del sys.modules["jax.example_libraries.stax"]
assert state() == before

k = ntk_ln.NeuralTangentsKernel(ntk_ln.mlp(0))
assert k([[1.0, 2.0]]).dtype == "float64"
import neural_tangents
assert ntk_ln.NeuralTangentsKernel(ntk_ln.mlp(0))([[1.0, 2.0]]) == k([[1.0, 2.0]])
assert state() == before
assert "tensorflow" not in sys.modules and "tf2jax" not in sys.modules
assert "neural_tangents.experimental" not in sys.modules and not hasattr(neural_tangents, "experimental")
"""


def test_importing_it_leaves_nothing_behind():
    result = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
