"""Deep gated networks: moments of the Gram matrix, parts of the gradient, paths one by one, active and sensitive gates.

The papers are 'Deep gated networks' (DGN) and 'Neural path features and neural path kernel' (NPF). Functions return
float64 NumPy arrays; the kernels themselves are in :mod:`pathlens.kernels`.
"""

from pathlens.theory.deep_gated.gradients import (
    Adaptation,
    SignalWire,
    adaptation,
    gate_gradient_overlap,
    signal_wire,
)
from pathlens.theory.deep_gated.moments import (
    GramMoments,
    frg_moments,
    gram_moments,
    ideal_gram,
    ideal_spectrum,
    printed_variance_bound,
    variance_law,
)
from pathlens.theory.deep_gated.paths import Bundles, PathTable, RhoBound, path_bundles, path_table, rho_bound
from pathlens.theory.deep_gated.sensitive_gates import (
    GateSlopes,
    SubNetworks,
    gate_slopes,
    printed_threshold,
    sensitive_threshold,
    subnetworks,
)
from pathlens.theory.deep_gated.width import WidthSweep, width_sweep

__all__ = [
    "Adaptation",
    "Bundles",
    "GateSlopes",
    "GramMoments",
    "PathTable",
    "RhoBound",
    "SignalWire",
    "SubNetworks",
    "WidthSweep",
    "adaptation",
    "frg_moments",
    "gate_gradient_overlap",
    "gate_slopes",
    "gram_moments",
    "ideal_gram",
    "ideal_spectrum",
    "path_bundles",
    "path_table",
    "printed_threshold",
    "printed_variance_bound",
    "rho_bound",
    "sensitive_threshold",
    "signal_wire",
    "subnetworks",
    "variance_law",
    "width_sweep",
]
