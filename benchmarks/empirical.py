"""Empirical NTKs beside neural-tangents: time, agreement and memory.

    uv run python benchmarks/empirical.py [--rows 128] [--width 1024]

N points, 3 hidden layers with LayerNorm, float32. Every mode of neural-tangents that runs on this JAX is jitted and timed with
its fast path (vmap_axes=0); medians after a warm-up. Nothing else should run meanwhile.
"""

import argparse
import platform
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from common import store

import ntk_ln as nl
from ntk_ln.kernels import _layerwise
from ntk_ln.kernels._neural_tangents_shim import import_neural_tangents

REPEATS = 5


def timed(function, repeats=REPEATS):
    """Median seconds of a call, and its value; the first call is not counted."""
    value = np.asarray(jax.block_until_ready(function()))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return statistics.median(times), value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    nt = import_neural_tangents()
    net = nl.mlp(3, layer_norm="every")
    params = net.init(jax.random.key(0), in_features=16, width=args.width)
    x = jax.random.normal(jax.random.key(1), (args.rows, 16))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, JAX {jax.__version__}")
    print(f"N = {args.rows}, width {args.width}, 3 hidden layers with LayerNorm, {size:,} parameters, float32\n")
    print(f"{'what':<58}{'seconds':>10}{'ratio':>9}   difference")

    kernel = nl.EmpiricalNTK(net, params)
    layerwise, ours = timed(lambda: kernel(x))
    print(f"{'ours, layer by layer':<58}{layerwise:>10.4f}{1:>9.1f}")

    def network(params, x):
        return net.apply(params, x)

    any_function = nl.EmpiricalNTK(network, params)
    function, value = timed(lambda: any_function(x), 3)
    difference = np.abs(value - ours).max() / np.abs(ours).max()
    print(f"{'ours, any function':<58}{function:>10.4f}{function / layerwise:>9.1f}   {difference:.1e}")
    best, fastest = np.inf, None
    for mode in nt.NtkImplementation:
        if mode.name == "AUTO":
            continue
        kernel = nt.empirical_ntk_fn(network, trace_axes=(-1,), vmap_axes=0, implementation=mode)
        try:
            call = partial(jax.jit(kernel), x, None, params)
            seconds, value = timed(call, 3)
        except Exception as error:  # its modes break with JAX in many ways
            print(f"{'neural-tangents, ' + mode.name:<58}{'-':>10}{'-':>9}   does not run: {type(error).__name__}")
            continue
        if seconds < best:
            best, fastest = seconds, call
        difference = np.abs(value - ours).max() / np.abs(ours).max()
        print(f"{'neural-tangents, ' + mode.name:<58}{seconds:>10.4f}{seconds / layerwise:>9.1f}   {difference:.1e}")
    print(f"\nfaster than neural-tangents' best mode: {best / layerwise:.0f} x (target 100)")
    # Close to each other: once more, in turns.
    in_turns = [(timed(lambda: any_function(x), 1)[0], timed(fastest, 1)[0]) for _ in range(5)]
    function, best = map(statistics.median, zip(*in_turns, strict=True))
    print(f"any function against neural-tangents' best mode: {best / function:.2f} x (target 1)")

    settings = {"output": "trace", "block": 1024, "dtype": jnp.dtype(jnp.float32)}
    memory = _layerwise.layerwise_gram.lower(net, params, x, None, **settings).compile().memory_analysis()
    result = 4 * args.rows**2
    # Inputs of every layer, and as many signals.
    activations = 2 * 4 * args.rows * args.width * len(net.layers)
    allowed = 3 * result + activations
    peak = memory.temp_size_in_bytes + memory.output_size_in_bytes
    store(
        "empirical",
        [
            (f"empirical NTK, N = {args.rows}, width {args.width}, seconds", layerwise, best, best / layerwise, ">= 100"),
            ("the same of any function, seconds", function, best, best / function, ">= 1"),
            ("the same, peak MiB against 3 results and activations", peak / 2**20, allowed / 2**20, "", "ours < peer"),
        ],
    )
    print(f"peak beside the parameters {peak / 2**20:.1f} MiB, 3 results and all activations {allowed / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
