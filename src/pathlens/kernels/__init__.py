"""Kernels of gated networks: overlap, neural path and neural tangent kernels, as lazy operators."""

from pathlens.kernels.infinite import random_gate_limit, relu_cntk, relu_nngp, relu_ntk
from pathlens.kernels.linearised import LinearFit, LinearisedModel
from pathlens.kernels.measures import (
    Norms,
    Nu,
    class_blocks,
    cumulative_spectrum,
    drift,
    effective_rank,
    frobenius_norm,
    kernel_alignment,
    nu,
    part_norms,
    spectral_ecdf,
    spectrum,
    target_alignment,
)
from pathlens.kernels.overlap import npk, overlap
from pathlens.kernels.regression import (
    GateInformation,
    KernelFit,
    gate_information,
    kernel_classification,
    kernel_regression,
    leave_one_out,
    one_hot,
)
from pathlens.kernels.tangent import ntk

__all__ = [
    "GateInformation",
    "KernelFit",
    "LinearFit",
    "LinearisedModel",
    "Norms",
    "Nu",
    "class_blocks",
    "cumulative_spectrum",
    "drift",
    "effective_rank",
    "frobenius_norm",
    "gate_information",
    "kernel_alignment",
    "kernel_classification",
    "kernel_regression",
    "leave_one_out",
    "npk",
    "ntk",
    "nu",
    "one_hot",
    "overlap",
    "part_norms",
    "random_gate_limit",
    "relu_cntk",
    "relu_nngp",
    "relu_ntk",
    "spectral_ecdf",
    "spectrum",
    "target_alignment",
]
