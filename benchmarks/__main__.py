"""All benchmarks, one after the other, and the table of their ratios.

    uv run python benchmarks [--largest 16000]

Each runs in a process of its own and stores results/NAME.csv with the machine and the versions. Nothing else should run meanwhile.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from common import load, machine

NAMES = ("gram", "empirical", "basics")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest", default="16000", help="rows of the largest Gram matrix of the growth plot")
    largest = parser.parse_args().largest
    for name in NAMES:
        print(f"--- {name}", flush=True)
        options = ["--largest", largest] if name == "gram" else []
        subprocess.run([sys.executable, str(Path(__file__).parent / f"{name}.py"), *options], check=True)
    print(f"\n{machine()}\n\n{'what':<62}{'ours':>10}{'peer':>10}{'ratio':>8}{'target':>9}")
    for name in NAMES:
        for row in load(name):
            if row["target"]:
                print(f"{row['what']:<62}{row['ours']:>10}{row['peer']:>10}{row['ratio']:>8}{row['target']:>9}")


if __name__ == "__main__":
    main()
