"""Experiments of 'Deep Gated Networks'."""
