"""The exact posterior on all training rows of a large table, in memory: seconds, and the share of the matrix product's rate.

    uv run python benchmarks/protein.py CASP.csv --target RMSD [--rows 40132]

The Gram matrix in one triangle, its factor in the other: 12.9 GB at 40,132 rows.
"""

import argparse
import resource
import time

import numpy as np

import ntk_ln as nl
from ntk_ln.data import load_table
from ntk_ln.spectrum import largest_eigenvalue


def rate_of_products(n=4000):
    """Flops a second of NumPy's product of square matrices."""
    a = np.ones((n, n))
    a @ a
    start = time.perf_counter()
    a @ a
    return 2 * n**3 / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--target", required=True)
    parser.add_argument("--rows", type=int, default=40_132)
    parser.add_argument("--noise", type=float, default=0.1)
    arguments = parser.parse_args()
    dataset = load_table(arguments.data, arguments.target)
    order = np.random.default_rng(0).permutation(len(dataset.y))
    x, y = dataset.standardize().x[order], dataset.y[order]
    rows = arguments.rows
    train, test = slice(None, rows), slice(rows, rows + 5000)
    y_mean = y[train].mean()
    kernel = nl.NTK(nl.mlp(2, layer_norm="first"))
    peak = rate_of_products()
    print(f"{rows} rows, {x.shape[1]} features; the product runs at {peak / 1e9:.1f} GF/s", flush=True)

    start = time.perf_counter()
    gram = kernel(x[train])
    seconds = time.perf_counter() - start
    print(f"Gram matrix: {seconds:.1f} s, {seconds / rows**2 * 1e9:.1f} ns an entry, {gram.nbytes / 1e9:.1f} GB", flush=True)
    del gram

    start = time.perf_counter()
    p = nl.posterior(kernel, x[train], y[train] - y_mean, noise=arguments.noise)
    whole = time.perf_counter() - start
    factor = whole - seconds
    print(f"posterior: {whole:.1f} s, of which {factor:.1f} s to factor and solve:", end=" ")
    print(
        f"{rows**3 / 3 / factor / 1e9:.1f} GF/s, {rows**3 / 3 / factor / peak:.0%} of the product's rate (target 60 %)", flush=True
    )

    start = time.perf_counter()
    mean = p.mean(x[test]) + y_mean
    error = np.sqrt(np.mean((mean - y[test]) ** 2))
    print(f"mean at {len(mean)} rows: {time.perf_counter() - start:.1f} s, RMSE {error:.3f} (labels' deviation {y.std():.3f})")

    # The smallest eigenvalue through the factor that is there: a few solves. `p.min_eigenvalue` would certify that of K itself, at
    # the price of two or more factorisations; what the bounds need is K + noise I, at least noise.
    start = time.perf_counter()
    effective = 1 / largest_eigenvalue(lambda v: p.solve(v.reshape(-1, 1))[:, 0], rows)
    print(
        f"lambda_min(K + noise I) = {effective:.9g} ({time.perf_counter() - start:.0f} s), lambda_min(K) = "
        f"{effective - arguments.noise:.2g}: {rows - len(np.unique(x[train], axis=0))} rows repeat others",
        flush=True,
    )
    sup, labels = nl.kernel_sup(kernel).value, y[train] - y_mean
    spectral = np.sqrt(sup / arguments.noise) * np.linalg.norm(labels)
    dataset_bound = np.sqrt(sup * rows / arguments.noise) * np.abs(labels).max()
    rkhs = np.sqrt(sup) * p.rkhs_norm
    print(f"|mean| <= {rkhs:.4g} (rkhs) <= {spectral:.4g} (spectral) <= {dataset_bound:.4g} (dataset), for every x")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB", flush=True)


if __name__ == "__main__":
    main()
