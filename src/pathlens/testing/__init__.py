"""Slow, plain reference versions of what the package computes fast, and the one table of tolerances.

Imported by tests alone; may import anything of the package.
"""
