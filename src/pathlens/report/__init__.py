"""Pages and pictures from what was saved: :func:`write_page`, :func:`results_page`, :func:`write_verification`,
:func:`write_model`, :func:`opening_picture`.

Nothing here runs an experiment or needs torch; matplotlib is loaded when something is drawn. May import artifacts and
errors only.
"""

from __future__ import annotations

from pathlens.report.model import MODEL_FORMAT, write_model
from pathlens.report.page import headline, write_page
from pathlens.report.picture import opening_picture
from pathlens.report.results import Entry, not_run, remarks, results_page
from pathlens.report.verification import write_verification

__all__ = [
    "MODEL_FORMAT",
    "Entry",
    "headline",
    "not_run",
    "opening_picture",
    "remarks",
    "results_page",
    "write_model",
    "write_page",
    "write_verification",
]
