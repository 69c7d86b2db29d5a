"""Experiments of our own: what the papers neither claim nor ask."""
