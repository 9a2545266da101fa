"""What the benchmarks share: the machine's line, and their CSV files."""

import csv
import importlib.metadata
import os
import platform
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
COLUMNS = ["what", "ours", "peer", "ratio", "target", "product_s", "write_s", "elementwise_s"]


def machine() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("ntk_ln", "jax", "numpy", "neural-tangents"))
    return f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line for line in lines if line.startswith("flags")), "")
    widest = next((flag for flag in ("avx512f", "avx2", "avx") if f" {flag}" in flags), "no AVX")
    return f"{name} ({widest})"


def store(name: str, rows: list[tuple]) -> None:
    """Writes results/name.csv: the machine, the column names, and the rows (filled up with empty cells)."""
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["machine", machine()])
        writer.writerow(COLUMNS)
        for row in rows:
            cells = [f"{v:.5g}" if isinstance(v, float) else v for v in row]
            writer.writerow(cells + [""] * (len(COLUMNS) - len(row)))


def load(name: str) -> list[dict[str, str]]:
    with open(RESULTS / f"{name}.csv", encoding="utf-8") as file:
        next(file)
        return list(csv.DictReader(file))
