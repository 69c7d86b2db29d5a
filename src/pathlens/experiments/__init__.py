"""Tables, figures and claims of the papers, one module per paper, found by name.

This file only lists the modules; :mod:`pathlens.experiments.registry` imports those that a name asks for. Experiments
return artifacts and draw nothing. They may import everything but report and the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlens.experiments.sweeps import sweep

__all__ = ["MODULES", "sweep"]

# the word before the first dot of an experiment's name -> the modules that register such experiments
MODULES: dict[str, tuple[str, ...]] = {
    "hs": ("half_space", "half_space_fashion"),
    "dgn": ("deep_gated", "deep_gated_images", "deep_gated_training"),
    "npk": ("path_features",),
    "loc": ("localisation",),
}


def __getattr__(name: str) -> Any:
    if name == "sweep":  # loads torch, which listing experiments does not need
        from pathlens.experiments.sweeps import sweep

        return sweep
    raise AttributeError(f"module 'pathlens.experiments' has no attribute {name!r}")
