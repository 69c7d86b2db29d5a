"""Gradient flows in closed form, gates that evolve, the best gates, and measures of localisation.

Everything here is float64 NumPy on the CPU; tensors are taken and converted.
"""

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
from pathlens.theory.rows import Rows

__all__ = [
    "GDLN",
    "Gates",
    "Moments",
    "Rows",
    "exclusive",
    "gate_table",
    "half_spaces",
    "nlgp_moments",
    "random_half_spaces",
    "redundant",
    "single",
    "tiling",
]
