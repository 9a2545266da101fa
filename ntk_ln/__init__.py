"""Analytic neural tangent kernels with and without LayerNorm, and what their predictions do far from the data."""

from ntk_ln._marginal_likelihood import log_marginal_likelihood
from ntk_ln.activations import AbstractActivation
from ntk_ln.bounds import KernelSup, SupNorm, SupNormBound, kernel_sup, sup_norm, sup_norm_bound
from ntk_ln.ensemble import Ensemble, ensemble
from ntk_ln.far_field import FarField, far_field
from ntk_ln.finite import Training, WidthStudy, check_proposition_3_4, train, width_study
from ntk_ln.kernels import (
    NNGP,
    NTK,
    AbstractKernel,
    EmpiricalNTK,
    KernelPair,
    NeuralTangentsKernel,
    StoredGram,
    from_equinox,
    from_nnx,
    open_gram,
    stream_gram,
)
from ntk_ln.layers import AbstractLayer, Activation, BatchNorm, Dense, LayerNorm, Residual, RMSNorm
from ntk_ln.network import Network, mlp, network_from_config, paper_mlp
from ntk_ln.parametrisation import Standard, from_standard, to_standard
from ntk_ln.posterior import Posterior, load_posterior, posterior
from ntk_ln.spectrum import MinEigenvalue, min_eigenvalue
from ntk_ln.theorems import TheoremCheck, check_theorem_3_1, check_theorem_3_2, check_theorem_3_3, check_theorem_c_1

__all__ = [
    "NNGP",
    "NTK",
    "AbstractActivation",
    "AbstractKernel",
    "AbstractLayer",
    "Activation",
    "BatchNorm",
    "Dense",
    "EmpiricalNTK",
    "Ensemble",
    "FarField",
    "KernelPair",
    "KernelSup",
    "LayerNorm",
    "MinEigenvalue",
    "Network",
    "NeuralTangentsKernel",
    "Posterior",
    "RMSNorm",
    "Residual",
    "Standard",
    "StoredGram",
    "SupNorm",
    "SupNormBound",
    "TheoremCheck",
    "Training",
    "WidthStudy",
    "check_proposition_3_4",
    "check_theorem_3_1",
    "check_theorem_3_2",
    "check_theorem_3_3",
    "check_theorem_c_1",
    "ensemble",
    "far_field",
    "from_equinox",
    "from_nnx",
    "from_standard",
    "kernel_sup",
    "load_posterior",
    "log_marginal_likelihood",
    "min_eigenvalue",
    "mlp",
    "network_from_config",
    "open_gram",
    "paper_mlp",
    "posterior",
    "stream_gram",
    "sup_norm",
    "sup_norm_bound",
    "to_standard",
    "train",
    "width_study",
]


def __getattr__(name: str) -> object:
    if name == "NTKRegressor":  # scikit-learn is imported, and needed, only by who asks for it
        from ntk_ln.estimator import NTKRegressor

        return NTKRegressor
    raise AttributeError(f"module 'ntk_ln' has no attribute {name!r}")
