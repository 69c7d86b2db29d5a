"""Tables, figures and claims of the papers, a few modules per paper, found by name.

This file only lists the modules; :mod:`pathlens.papers.registry` imports those that a name asks for. Experiments
return artifacts and draw nothing. They may import everything but report and the command line.
"""

from __future__ import annotations

__all__ = ["MODULES"]

# the word before the first dot of an experiment's name -> the modules that register such experiments
MODULES: dict[str, tuple[str, ...]] = {
    "hs": (
        "half_space",
        "half_space_fashion",
        "half_space_early",
        "half_space_remedies",
        "half_space_regions",
        "half_space_kernels",
        "half_space_failures",
        "half_space_cifar",
        "half_space_residual",
        "half_space_quadratic",
    ),
    "dgn": ("deep_gated", "deep_gated_images", "deep_gated_training"),
    "npk": ("path_features", "path_features_images"),
    "loc": ("localisation",),
}
