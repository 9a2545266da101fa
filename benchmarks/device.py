"""Does an accelerator give the CPU's numbers, and how near its limits does it run? One table, inside four minutes.

    uv run python benchmarks/device.py

Gram matrices (closed form) and empirical NTKs in float32 and float64 are compared with the CPU's; a probe finds products in TF32 or
bfloat16; times stand beside the roofline: the larger of flops over the peak of a large matrix product and bytes over the
peak of a large copy, both measured here. Without an accelerator the table shows the CPU against itself.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import ntk_ln as nl
from ntk_ln._dtype import enable_x64

BUDGET = 200.0  # seconds; later rows are left out, and said so
N, FEATURES, WIDTH, DEPTH = 4096, 64, 1024, 3


def timed(function, *args):
    """Median seconds of a compiled call whose inputs and result stay on the device."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peaks(device, dtype):
    """Flop and byte rates of a matrix product at the highest precision and of a copy."""
    n = 8192 if device.platform != "cpu" else 2048
    with jax.default_device(device):
        a = jnp.ones((n, n), dtype)
        product = timed(jax.jit(lambda a: jnp.matmul(a, a, precision="highest")), a)
        copy = timed(jax.jit(lambda a: a + 1), a)
    return 2 * n**3 / product, 2 * a.nbytes / copy


def worst(got, wanted):
    return float(np.abs(np.asarray(got, np.float64) - wanted).max() / np.abs(wanted).max())


def main() -> None:
    began = time.perf_counter()
    cpu, device = jax.devices("cpu")[0], jax.devices()[0]
    print(f"JAX {jax.__version__}, {device.platform}: {device.device_kind}, beside the CPU\n")
    # x.x = 2.00048834: a product in TF32 gives 2.0.
    probe = np.tile(np.array([[1 + 2**-12, 1]], np.float32), (256, 1))
    with jax.default_device(device):
        x = jnp.asarray(probe)
        plain = float(jnp.matmul(x, x.T)[0, 0])
        linear = float(nl.NTK(nl.Network(nl.Dense(w_std=2**0.5)))(x)[0, 0])
        finite = float(nl.EmpiricalNTK(lambda w, x: x @ w, jnp.asarray(probe[0]))(x)[0, 0])
    exact = 2.000488340854645
    print(f"TF32 probe, x.x = {exact:.9f}: jnp.matmul {plain:.9f}, NTK {linear:.9f}, EmpiricalNTK {finite:.9f}")
    safe = abs(linear - exact) < 1e-6 and abs(finite - exact) < 1e-6
    print("kernels are free of TF32" if safe else "KERNELS LOSE DIGITS TO TF32")
    print(f"\n{'what':<44}{'dtype':>9}{'difference':>12}{'seconds':>11}{'roofline':>11}{'share':>8}")

    rng = np.random.default_rng(0)
    rows, small = rng.standard_normal((N, FEATURES)), rng.standard_normal((128, FEATURES))
    nets = {"Gram, 3 relu": nl.mlp(DEPTH), "Gram, 3 relu with LayerNorm": nl.mlp(DEPTH, layer_norm="every")}
    for dtype in (np.float32, np.float64):
        with enable_x64(dtype == np.float64):
            rates = peaks(device, dtype)
            for name, net in nets.items():
                if time.perf_counter() - began > BUDGET:
                    print(f"{name:<44}{np.dtype(dtype).name:>9}   left out: the time is up")
                    continue
                kernel = nl.NTK(net)
                x = jnp.asarray(rows.astype(dtype))
                got = kernel(jax.device_put(x[:512], device))
                wanted = np.asarray(kernel(jax.device_put(x[:512], cpu)), np.float64)
                # The product, and some 60 operations an entry and layer; every entry is written once.
                flops, size = 2 * N * N * FEATURES + 60 * DEPTH * N * N, N * N * np.dtype(dtype).itemsize
                report(name, dtype, worst(got, wanted), timed(kernel, jax.device_put(x, device)), flops, size, rates)
            net = nets["Gram, 3 relu with LayerNorm"]
            if time.perf_counter() - began > BUDGET:
                print(f"{'empirical NTK':<44}{np.dtype(dtype).name:>9}   left out: the time is up")
                continue
            params = net.init(jax.random.key(0), in_features=FEATURES, width=WIDTH, dtype=dtype)
            kernel = nl.EmpiricalNTK(net, jax.device_put(params, device))
            reference = nl.EmpiricalNTK(net, jax.device_put(params, cpu))
            x = small.astype(dtype)
            wanted = np.asarray(reference(jax.device_put(x, cpu)), np.float64)
            # Forward and backward through every layer, and two products between rows.
            flops = DEPTH * (4 * 128 * WIDTH**2 + 4 * 128**2 * WIDTH)
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            seconds = timed(kernel, jax.device_put(x, device))
            name = f"empirical NTK, N = 128, width {WIDTH}"
            report(name, dtype, worst(kernel(jax.device_put(x, device)), wanted), seconds, flops, size, rates)
    print(f"\n{time.perf_counter() - began:.0f} s in all")


def report(name, dtype, difference, seconds, flops, size, rates):
    roofline = max(flops / rates[0], size / rates[1])
    print(
        f"{name:<44}{np.dtype(dtype).name:>9}{difference:>12.1e}{seconds:>11.5f}{roofline:>11.5f}{100 * roofline / seconds:>7.0f}%",
        flush=True,
    )


if __name__ == "__main__":
    main()
