"""Self-contained pages: values are escaped, missing values and unwritable folders are errors."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from pathlens.errors import ArtifactError
from pathlens.pages import page_path, render, save_page


def test_values_are_escaped() -> None:
    text = render("pages/base.html", heading="<script>alert(1)</script>", lead='"quoted" & <b>bold</b>')
    assert "<script>" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<b>bold" not in text


def test_a_page_refers_to_nothing_outside_of_it() -> None:
    text = render("pages/base.html", heading="Title", lead="Lead")
    assert "http" not in text and "src=" not in text and "@import" not in text


def test_a_missing_value_and_a_missing_template_are_errors() -> None:
    with pytest.raises(jinja2.UndefinedError, match="lead"):
        render("pages/base.html", heading="Title")
    with pytest.raises(jinja2.TemplateNotFound, match="nothing"):
        render("pages/nothing.html")


def test_a_page_is_saved_as_a_file_or_as_the_index_of_a_folder(tmp_path: Path) -> None:
    assert save_page("<p>é</p>", tmp_path / "new" / "folder").read_text(encoding="utf-8") == "<p>é</p>"
    assert save_page("one", tmp_path / "page.html") == tmp_path / "page.html"
    assert page_path(tmp_path / "PAGE.HTM").name == "PAGE.HTM"


def test_a_page_that_cannot_be_written_names_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ArtifactError, match=r"file.*cannot be written.*Choose another folder"):
        save_page("text", tmp_path / "file" / "index.html")
