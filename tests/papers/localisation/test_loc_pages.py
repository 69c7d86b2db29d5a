"""The localisation experiments as a whole: their list and their page."""

from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import select
from pathlens.papers.pages import write_page

NAMES = ("loc.gdln", "loc.flips", "loc.dft", "loc.location", "loc.flow", "loc.evolving", "loc.gates")


def test_all_are_listed():
    assert {e.name for e in select(["loc.*"])} == {*NAMES, "loc.activations"}


def test_the_page_is_written_from_saved_artifacts(artifact, tmp_path):
    for name in NAMES:
        artifact(name).save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(artifact(name).title in page for name in NAMES)
