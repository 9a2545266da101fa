"""Figure 5: GELU and SiLU instead of ReLU."""

from ntk_ln.experiments import toy
from ntk_ln.experiments._run import Report, Settings

TITLE = "Figure 5: other activations"


def run(settings: Settings) -> Report:
    """The sine with and without LayerNorm, for each activation."""
    parts = [
        toy.compare(settings, "activations", TITLE, ("sine",), ("none", "first"), f"figure_5_{name}", name)
        for name in ("gelu", "silu")
    ]
    rows = [row for part in parts for row in part.rows]
    setting = parts[0].setting | {"activation": ["gelu", "silu"]}
    return Report("activations", TITLE, setting, rows, {k: v for part in parts for k, v in part.figures.items()})
