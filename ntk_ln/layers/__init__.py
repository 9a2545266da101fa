"""Layers: each file shows a layer's finite form beside its infinite-width rule."""

from ntk_ln.layers._base import AbstractLayer
from ntk_ln.layers._state import First, Growth, Inputs, Pairing, Side, State
from ntk_ln.layers.activation import Activation
from ntk_ln.layers.batch_norm import BatchNorm
from ntk_ln.layers.dense import Dense
from ntk_ln.layers.layer_norm import LayerNorm
from ntk_ln.layers.residual import Residual
from ntk_ln.layers.rms_norm import RMSNorm

__all__ = [
    "AbstractLayer",
    "Activation",
    "BatchNorm",
    "Dense",
    "First",
    "Growth",
    "Inputs",
    "LayerNorm",
    "Pairing",
    "RMSNorm",
    "Residual",
    "Side",
    "State",
]
