"""Slow reference implementations of the package's computations, and the table of tolerances.

Used by the tests and by the checks of theorems in `pathlens.papers.checks`, never by the library.
"""
