"""Kernels of gated networks: overlap, neural path and neural tangent kernels, as lazy operators."""

from pathlens.kernels.overlap import overlap

__all__ = ["overlap"]
