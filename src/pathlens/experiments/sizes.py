"""The sizes of every experiment: one table, `quick` and `paper`, by the name that ``pathlens run`` takes.

``paper`` holds the paper's own numbers where it states them (or the authors' code does); an artifact at paper scale
whose sizes differ from it is marked REDUCED. Plain values only; nothing is imported.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SIZES"]

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    # --- half-space: the circle ------------------------------------------------------------------------------------
    # --- half-space: modified Fashion-MNIST ------------------------------------------------------------------------
    # --- half-space: CIFAR-10 and residual networks ----------------------------------------------------------------
    # --- deep gated networks: image sets ---------------------------------------------------------------------------
    # --- neural path features: image sets --------------------------------------------------------------------------
}
