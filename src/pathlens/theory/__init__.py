"""Gated linear networks in closed form: gradient flows, ReLU flows with changing gates, best gates, localisation.

Functions accept tensors, arrays and data sets, and return float64 NumPy arrays. Deep gated networks are in
`pathlens.theory.deep_gated`.
"""

from pathlens.theory import deep_gated
from pathlens.theory.evolving import OFF, ON, SLIDING, ReluFlow, relu_flow
from pathlens.theory.flow import GDLN, Moments, nlgp_moments
from pathlens.theory.gates import (
    Gates,
    exclusive,
    gate_table,
    half_spaces,
    random_half_spaces,
    redundant,
    single,
    tiling,
)
from pathlens.theory.gatings import (
    Gating,
    GatingTable,
    class_separation,
    gating_loss,
    off_diagonal_mass,
    search_gatings,
)
from pathlens.theory.inputs import WeightedRows
from pathlens.theory.localisation import (
    arc90,
    centre_of_mass,
    circular_correlation,
    ipr,
    ipr_references,
    kurtosis,
    sign_alternation,
)
from pathlens.theory.switching import Switching, switching_instants

__all__ = [
    "GDLN",
    "OFF",
    "ON",
    "SLIDING",
    "Gates",
    "Gating",
    "GatingTable",
    "Moments",
    "ReluFlow",
    "Switching",
    "WeightedRows",
    "arc90",
    "centre_of_mass",
    "circular_correlation",
    "class_separation",
    "deep_gated",
    "exclusive",
    "gate_table",
    "gating_loss",
    "half_spaces",
    "ipr",
    "ipr_references",
    "kurtosis",
    "nlgp_moments",
    "off_diagonal_mass",
    "random_half_spaces",
    "redundant",
    "relu_flow",
    "search_gatings",
    "sign_alternation",
    "single",
    "switching_instants",
    "tiling",
]
