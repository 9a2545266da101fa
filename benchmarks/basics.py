"""Import time, the first call at depth 1000, the smallest eigenvalue and `ntk-ln check`, each beside its target.

    uv run python benchmarks/basics.py

Every number comes from a process of its own or from the median of several runs after a warm-up; nothing else should run meanwhile.
"""

import platform
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from common import store

DEPTH = """
import time, numpy as np, ntk_ln as nl
kernel, x = nl.NTK(nl.paper_mlp(1000)), np.random.default_rng(0).normal(size=(10, 3))
start = time.perf_counter(); kernel(x); first = time.perf_counter() - start
start = time.perf_counter(); kernel(x + 1); print(first, time.perf_counter() - start)
"""


def seconds(code: str, repeats: int = 5) -> float:
    """Median wall time of a new Python process."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def eigenvalues() -> tuple[float, float, float]:
    """Medians of numpy's eigvalsh and of ours at n = 3000, and the relative difference of the smallest eigenvalue."""
    import ntk_ln as nl

    x = np.random.default_rng(0).normal(size=(3000, 16))
    gram = nl.NTK(nl.mlp(3))(x)

    def timed(function):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            value = function(gram)
            times.append(time.perf_counter() - start)
        return statistics.median(times), value

    (dense, values), (ours, found) = timed(np.linalg.eigvalsh), timed(nl.min_eigenvalue)
    return dense, ours, abs(found.value / values[0] - 1)


def main() -> None:
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, JAX {jax.__version__}\n")
    print(f"{'what':<46}{'measured':>16}   target")

    rows = []

    def line(what, measured, target):
        print(f"{what:<46}{measured:>16}   {target}", flush=True)
        rows.append((what, measured, "", "", target))

    ratio = seconds("import ntk_ln") / seconds("import jax")
    line("import ntk_ln / import jax", f"{ratio:.2f}", "<= 1.5")
    first, second = map(
        float, subprocess.run([sys.executable, "-c", DEPTH], check=True, capture_output=True, text=True).stdout.split()
    )
    line("depth 1000, n = 10, first call", f"{first:.2f} s", "< 5 s")
    line("depth 1000, n = 10, second call", f"{second:.2f} s", "no compilation")
    dense, ours, error = eigenvalues()
    line("min_eigenvalue, n = 3000: eigvalsh / ours", f"{dense / ours:.2f}", ">= 3")
    line("min_eigenvalue, relative difference", f"{error:.1e}", "<= 1e-8")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "-m", "ntk_ln.cli", "check", "--out", f"{folder}/report"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        line("ntk-ln check, default data", f"{time.perf_counter() - start:.1f} s", "< 60 s")
    store("basics", rows)


if __name__ == "__main__":
    main()
