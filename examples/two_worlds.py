"""One dataset, two networks: without LayerNorm the prediction runs away, with it it settles. Writes two_worlds.png.

Usage: python examples/two_worlds.py [OUT]
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import ntk_ln as nl

out = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
rng = np.random.default_rng(0)
x = np.sort(rng.uniform(-2, 2, 30))[:, None]
y = np.cos(2 * x[:, 0]) + 0.1 * rng.normal(size=30)

figure = Figure(figsize=(8, 4), layout="constrained", dpi=150)
axes = figure.subplots()
far = np.concatenate([-(10.0 ** np.linspace(4, -2, 150)), 10.0 ** np.linspace(-2, 4, 150)])
for name, net in {"plain": nl.mlp(2), "LayerNorm": nl.mlp(2, layer_norm="first")}.items():
    p = nl.posterior(nl.NTK(net), x, y, noise=0.01)
    right, bound = nl.far_field(p, [1.0]), nl.sup_norm_bound(p)
    print(f"{name}: f(r) ~ {float(right.coefficient):.4f} r^{right.power:g} to the right; |f| <= {bound.rkhs:.3f} everywhere")
    axes.plot(far, p.mean(far[:, None]), label=name)
axes.plot(x[:, 0], y, ".", color="gray", label="data")
axes.set_xscale("symlog", linthresh=2)
axes.set_yscale("symlog", linthresh=2)
axes.legend()
figure.savefig(out / "two_worlds.png")
