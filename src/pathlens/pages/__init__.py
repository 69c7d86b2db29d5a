"""What every page has around its sections: one self-contained HTML file with a heading, written at once.

The sections themselves are made in page and verification. May import the errors and files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path

from pathlens.errors import ArtifactError
from pathlens.files import write_atomically

__all__ = ["full_page", "save_page"]

_MARK = (
    '<svg viewBox="0 0 20 20" aria-hidden="true"><circle cx="10" cy="10" r="9" fill="none" stroke="var(--rule)" '
    'stroke-width="1.5"/><path d="M1.9 13.9A9 9 0 0 1 18.1 6.1Z" fill="var(--top)"/></svg>'
)


def full_page(heading: str, lead: str, contents: str, sections: Iterable[str], footer: str, style: str = "") -> str:
    """The text of a page; contents, sections and footer are HTML, heading and lead plain text, `style` more CSS."""
    sheet = files("pathlens.pages").joinpath("page.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(heading)} · Pathlens</title>",
            f"<style>\n{sheet}{style}</style></head><body>",
            f'<header><p class="mark">{_MARK}Pathlens</p><h1>{escape(heading)}</h1><p class="lead">{escape(lead)}</p>',
            contents,
            "</header><main>",
            *sections,
            "</main>",
            footer,
            "</body></html>\n",
        ]
    )


def save_page(text: str, out: str | os.PathLike[str]) -> Path:
    """Write a page to a file that ends in .html, or to index.html in a folder; a reader never sees half a page."""
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        path = path / "index.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise ArtifactError(
            f"The page {path} cannot be written: {error.strerror or error}. Choose another folder."
        ) from error
    return path
