"""HTML pages: :func:`render` fills a template, :func:`save_page` writes the result as one self-contained file.

Here are the frame of every page (``templates/base.html``), its style and the macros that pages share
(``templates/parts.html``). What is on a page is decided by the package that writes it, in templates of its own.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathlens.errors import ArtifactError
from pathlens.files import write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["page_path", "render", "save_page", "write_file"]


def render(template: str, /, **values: Any) -> str:
    """Fill a Jinja2 template and return the text.

    Values are escaped: ``<script>`` in a name stays text. HTML and SVG that Pathlens itself has made are passed as
    ``markupsafe.Markup``. Templates whose name ends in ``.md`` are not escaped.

    Parameters
    ----------
    template : str
        Package and file: ``"estimators/model.html"`` is ``pathlens/estimators/templates/model.html``.
        The same names are used inside of templates: a page begins with ``{% extends "pages/base.html" %}`` and
        fills its blocks (``style``, ``contents``, ``main``, ``footer``); the caller gives ``heading`` and ``lead``.
    **values
        The variables of the template. A variable that is used and not given is an error.

    Examples
    --------
    >>> text = render("pages/base.html", heading="ReLU <b>", lead="One network.")
    >>> "<h1>ReLU &lt;b&gt;</h1>" in text
    True
    """
    return _environment().get_template(template).render(values)


def page_path(out: str | os.PathLike[str]) -> Path:
    """A file that ends in .html, or index.html in a folder.

    >>> page_path("folder").as_posix(), page_path("page.html").as_posix()
    ('folder/index.html', 'page.html')
    """
    path = Path(out)
    return path if path.suffix.lower() in (".html", ".htm") else path / "index.html"


def save_page(text: str, out: str | os.PathLike[str]) -> Path:
    """Write a page atomically to a file that ends in .html, or to index.html in a folder, and return its path."""
    return write_file(page_path(out), text.encode())


def write_file(path: Path, data: bytes) -> Path:
    """Write a file atomically, create its folder, and return its path; an `ArtifactError` if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {error.strerror or error}. Choose another folder.") from error
    return path


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """The templates of all packages; Jinja2 is loaded when the first page is made."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    def source(template: str) -> str | None:
        package, _, name = template.rpartition("/")
        file = files("pathlens").joinpath(package, "templates", name)
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return Environment(
        loader=FunctionLoader(source),
        autoescape=lambda name: name is None or not name.endswith(".md"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
