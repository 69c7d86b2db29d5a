"""The page of a fitted model, written from its saved `ModelReport` alone; neither the model nor its data are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pathlens.errors import ArtifactError
from pathlens.estimators.report import ModelReport
from pathlens.pages import render, save_page, write_file


def save_model_report(report: ModelReport, path: str | Path) -> Path:
    """Write a report as a JSON file and return its path."""
    return write_file(Path(path), msgspec.json.format(msgspec.json.encode(report)))


def load_model_report(path: str | Path) -> ModelReport:
    """Read a report that `save_model_report` wrote; anything else is an `ArtifactError`."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=ModelReport)
    except (OSError, RecursionError, msgspec.MsgspecError) as error:
        raise ArtifactError(
            f"{path} is not the report of a model: {error}. Write one with model.report(X, y, out)."
        ) from error


def write_model_page(report: str | Path, out: str | Path) -> Path:
    """Write the page of a saved report and return its path.

    Parameters
    ----------
    report : path
        The JSON file that ``model.report(X, y, out)`` saved.
    out : path
        A file that ends in ``.html``, or a folder, where ``index.html`` is written.
    """
    found = load_model_report(report)
    lead = (
        f"A network whose gates are {found.in_use} half-spaces of {found.features} features. "
        "This page shows the model itself, not an approximation of it."
    )
    heading = found.title or found.estimator
    text = render("estimators/model.html", report=found, heading=heading, lead=lead, number=_number, signed=_signed)
    return save_page(text, out)


def _number(value: Any) -> str:
    """A number as text; other values, such as class labels, as they are."""
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return text.replace("-", "−")


def _signed(value: float) -> str:
    return ("+" if value >= 0 else "") + _number(value)
