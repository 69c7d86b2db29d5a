"""Experiments of the note on gated deep linear networks and localisation."""
