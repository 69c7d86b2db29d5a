"""Writes the reference, from docstrings, into build/docs: `make docs`."""

from pathlib import Path

import pdoc

import pathlens

if __name__ == "__main__":
    for name in pathlens.__all__:  # public names load when first used; pdoc looks only at what is there
        getattr(pathlens, name)
    pdoc.render.configure(docformat="numpy", footer_text=f"Pathlens {pathlens.__version__}")
    pdoc.pdoc("pathlens", "!pathlens.testing", output_directory=Path("build/docs"))
