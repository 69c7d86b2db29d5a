"""Tables, figures and claims of the papers, one module per paper, found by name.

This file only lists the modules; :mod:`pathlens.experiments.registry` imports the one that a name asks for. Experiments
return artifacts and draw nothing. They may import everything but report and the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlens.experiments.sweeps import sweep

__all__ = ["MODULES", "sweep"]

# the word before the first dot of an experiment's name -> the module that registers it
MODULES: dict[str, str] = {
    "hs": "pathlens.experiments.half_space",
    "dgn": "pathlens.experiments.deep_gated",
    "npk": "pathlens.experiments.path_features",
    "loc": "pathlens.experiments.localisation",
}


def __getattr__(name: str) -> Any:
    if name == "sweep":  # loads torch, which listing experiments does not need
        from pathlens.experiments.sweeps import sweep

        return sweep
    raise AttributeError(f"module 'pathlens.experiments' has no attribute {name!r}")
