"""Figure 6: BatchNorm in the place of LayerNorm."""

from ntk_ln.experiments import toy
from ntk_ln.experiments._run import Report, Settings

TITLE = "Figure 6: BatchNorm does not help"


def run(settings: Settings) -> Report:
    """The sine without a norm, with BatchNorm and with LayerNorm."""
    return toy.compare(settings, "batch_norm", TITLE, ("sine",), ("none", "batch_norm", "first"), "figure_6")
