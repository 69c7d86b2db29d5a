"""Pages from artifacts: :func:`write_page`, :func:`results_page`, :func:`write_verification`.

This package runs no experiments and does not need torch; matplotlib is loaded when a figure is drawn.
"""

from __future__ import annotations

from pathlens.papers.pages.page import headline, write_page
from pathlens.papers.pages.results import Entry, not_run, remarks, results_page
from pathlens.papers.pages.verification import write_verification

__all__ = [
    "Entry",
    "headline",
    "not_run",
    "remarks",
    "results_page",
    "write_page",
    "write_verification",
]
