"""Gram matrices beside jitted neural-tangents, the posterior beside scikit-learn, memory, and growth with n and depth.

    uv run python benchmarks/gram.py [--largest 16000]

Times are medians after a warm-up, ours and the peer's in turns; ours take NumPy and give NumPy, the peer's arrays stay on the
device. Prints the table, stores benchmarks/results/gram.csv and growth.png. Nothing else should run meanwhile.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from functools import lru_cache
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS, machine, store

import ntk_ln as nl

RNG = np.random.default_rng(0)
N = 4000
MEMORY = """
import resource, sys, numpy as np, ntk_ln as nl
x = np.random.default_rng(0).normal(size=(int(sys.argv[1]), 16))
k = nl.NTK(nl.mlp(3))
k(x[:2000])
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()  # the peak so far was a compilation's
gram = k(x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / gram.nbytes)
"""


def medians(functions, repeats=5):
    """Median seconds of each, called in turns."""
    for function in functions:
        function()
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, its in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            its.append(time.perf_counter() - start)
    return [statistics.median(its) for its in times]


def peer(net, x):
    """neural-tangents' kernel, jitted, on the device."""
    kernel_fn = nl.NeuralTangentsKernel(net)._function()
    with jax.enable_x64(True):
        jitted, on_device = jax.jit(lambda x: kernel_fn(x, None, "ntk")), jnp.asarray(x)

    def call():
        with jax.enable_x64(True):
            jax.block_until_ready(jitted(on_device))

    return call


def floors(x, net):
    """Seconds of what cannot be left out: the product, writing the result, and the elementwise part.

    The elementwise part: of half the pairs, two square roots and 30 multiply-adds an activation, which is about as few as the
    recursion in half-angles takes (12 for its polynomial), at the rates of `rates`.
    """
    out = np.empty((len(x), len(x)), x.dtype)
    product, write = medians([lambda: x @ x.T, lambda: out.fill(1.0)], 3)  # NumPy computes one triangle of x @ x.T
    activations = sum(isinstance(layer, nl.Activation) for layer in net.layers)
    root, multiply_add = rates(x.dtype)
    return product, write, len(x) ** 2 / 2 * activations * (2 * root + 30 * multiply_add)


@lru_cache
def rates(dtype):
    """Seconds of a square root (NumPy's, in the first cache) and of a multiply-add (BLAS's), on all cores."""
    a, b = np.full(2000, 0.7, dtype), np.ones((2000, 2000), dtype)
    root, product = medians([lambda: [np.sqrt(a, out=a) for _ in range(1000)], lambda: b @ b], 5)
    return root / 1000 / a.size / os.cpu_count(), product / 2000**3


def speed():
    cases = [
        ("3 hidden, d = 16, float64", nl.mlp(3), 16, np.float64, 4.0),
        ("3 hidden, d = 784, float64", nl.mlp(3), 784, np.float64, 2.5),
        ("10 hidden, d = 16, float64", nl.mlp(10), 16, np.float64, 5.0),
        ("10 hidden, LayerNorm first, d = 16, float64", nl.mlp(10, layer_norm="first"), 16, np.float64, 12.0),
        ("3 hidden, d = 16, float32", nl.mlp(3), 16, np.float32, 6.0),
    ]
    for name, net, d, dtype, target in cases:
        x = RNG.normal(size=(N, d)).astype(dtype)
        kernel = nl.NTK(net)
        ours, theirs = medians([lambda kernel=kernel, x=x: kernel(x), peer(net, x)])
        yield name, ours, theirs, theirs / ours, target, *floors(x, net)


def solving(n):
    """Posterior and mean at 1000 points, n = 3000, the same Gram matrix to both."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Kernel

    kernel, x = nl.NTK(nl.mlp(3)), RNG.normal(size=(n, 16))
    y, points = np.sin(x[:, 0]), RNG.normal(size=(1000, 16))

    class Same(Kernel):
        hyperparameters = ()

        def __init__(self):
            pass

        def __call__(self, x1, x2=None, eval_gradient=False):
            return kernel(x1, x2)

        def diag(self, x):
            return kernel.diag(x)

        def is_stationary(self):
            return False

    def theirs():
        GaussianProcessRegressor(Same(), alpha=0.01, optimizer=None).fit(x, y).predict(points)

    ours, other = medians([lambda: nl.posterior(kernel, x, y, noise=0.01).mean(points), theirs], 3)
    return f"posterior and 1000 means, n = {n} (peer: scikit-learn)", ours, other, other / ours, 1.0


def growth(largest):
    kernel = nl.NTK(nl.mlp(3))
    sizes = [n for n in (1000, 2000, 4000, 8000, 16000, 32000, 40000) if n <= largest]
    by_n = []
    for n in sizes:
        x = RNG.normal(size=(n, 16))
        by_n.append((n, medians([lambda x=x: kernel(x)], 3 if n <= 8000 else 1)[0]))
        print(f"n = {n:>6}: {by_n[-1][1]:8.3f} s, {by_n[-1][1] / n**2 * 1e9:6.1f} ns an entry", flush=True)
    x, by_depth = RNG.normal(size=(2000, 16)), []
    for depth in (1, 2, 4, 8, 12, 16):
        deep = nl.NTK(nl.mlp(depth))
        by_depth.append((depth, medians([lambda deep=deep: deep(x)], 3)[0]))
        print(f"depth {depth:>2}: {by_depth[-1][1]:8.3f} s", flush=True)
    return by_n, by_depth


def draw(by_n, by_depth):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    n, seconds = np.array(by_n).T
    left.loglog(n, seconds, "o-", label="measured")
    left.loglog(n, seconds[-1] * (n / n[-1]) ** 2, "--", color="0.5", label="4x for twice the rows")
    left.set(xlabel="rows n", ylabel="seconds", title="3 hidden layers, d = 16, float64")
    left.legend(frameon=False)
    depth, seconds = np.array(by_depth).T
    right.plot(depth, seconds, "o-")
    right.set(xlabel="hidden layers", ylabel="seconds", title="n = 2000", ylim=(0, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "growth.png", dpi=120)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest", type=int, default=16000)
    largest = parser.parse_args().largest
    print(machine(), "\n")
    floors_ = f"{'product':>9}{'write':>8}{'elements':>10}"
    print(f"{'Gram, n = 4000 (seconds)':<58}{'ours':>8}{'peer':>8}{'ratio':>7}{'target':>8}{floors_}")
    rows = []
    for row in chain(speed(), map(solving, [3000])):
        rows.append(row)
        name, ours, theirs, ratio, target, *floor = row
        print(f"{name:<58}{ours:8.3f}{theirs:8.3f}{ratio:7.2f}{target:8.1f}", *(f"{v:8.3f}" for v in floor), flush=True)
    memory = subprocess.run([sys.executable, "-c", MEMORY, "16000"], check=True, capture_output=True, text=True).stdout
    print(f"\npeak memory of a Gram of 16000 rows: {float(memory):.2f} x the matrix (target 1.2)\n")
    by_n, by_depth = growth(largest)
    RESULTS.mkdir(exist_ok=True)
    draw(by_n, by_depth)
    rows.append(("peak memory / matrix, n = 16000", float(memory), "", "", "<= 1.2"))
    rows += [(f"gram n = {n}, seconds", seconds) for n, seconds in by_n]
    rows += [(f"gram n = 2000, {depth} hidden, seconds", seconds) for depth, seconds in by_depth]
    store("gram", [(name, *values) for name, *values in rows])


if __name__ == "__main__":
    main()
