"""Do finite networks follow the infinite one? Errors against width, with and without LayerNorm.

    uv run python examples/width_study.py [FOLDER] [--full]

--full: widths to 4096, training to 1024, ten seeds (some four minutes on two cores).
"""

import sys
from pathlib import Path

import numpy as np

import ntk_ln as nl


def main() -> None:
    full = "--full" in sys.argv
    folder = Path(next((argument for argument in sys.argv[1:] if argument != "--full"), "."))
    x = np.linspace(-np.pi, np.pi, 100 if full else 20)[:, None]
    settings = {"seeds": 10} if full else {"widths": (32, 128, 512), "seeds": 4, "steps": 10}
    for name, net in {"layer_norm": nl.mlp(2, layer_norm="first"), "plain": nl.mlp(2)}.items():
        study = nl.width_study(net, x, np.sin(x[:, 0]), **settings)
        kernel, change = study.kernel_exponent, study.change_exponent
        print(f"{name}: stop_time {study.stop_time:.3g}")
        print(f"  power of the width: kernel {kernel.mean:.2f} ({kernel.low:.2f}, {kernel.high:.2f}), ", end="")
        print(f"f_t - f_0 {change.mean:.2f} ({change.low:.2f}, {change.high:.2f})")
        for row in study.table():
            trained = f", f_t - f_0 {row['change_error']:.1%}, largest {row['largest_ratio']:.2f}" if "change_error" in row else ""
            print(f"  width {row['width']:>5}: kernel {row['kernel_error']:.1%}{trained}")
        study.figure().savefig(folder / f"width_study_{name}.png", dpi=150)


if __name__ == "__main__":
    main()
