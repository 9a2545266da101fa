"""Finite networks: training, how they compare with the infinite one, and what a LayerNorm alone does not do."""

from ntk_ln.finite.proposition_3_4 import check_proposition_3_4
from ntk_ln.finite.training import Training, train
from ntk_ln.finite.width_study import WidthStudy, width_study

__all__ = ["Training", "WidthStudy", "check_proposition_3_4", "train", "width_study"]
