"""Tables, figures and claims of the papers, one module per paper, found by name.

This file only lists the modules; :mod:`pathlens.experiments.registry` imports the one that a name asks for. Experiments
return artifacts and draw nothing. They may import everything but report and the command line.
"""

from __future__ import annotations

__all__ = ["MODULES"]

# the word before the first dot of an experiment's name -> the module that registers it
MODULES: dict[str, str] = {
    "hs": "pathlens.experiments.half_space",
}
