"""The list of experiments and their pages, from small runs."""

from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import select
from pathlens.papers.pages import write_page

IMAGES = ("dgn.exp6", "dgn.tab4", "dgn.fig5", "dgn.fig6", "dgn.fig7", "dgn.fig8")


def test_all_are_listed_with_their_claims(synthetic_names):
    assert {e.name for e in select(["dgn.*"])} >= {*synthetic_names, *IMAGES}


def write(artifacts, folder):
    for artifact in artifacts:
        artifact.save(folder / "artifacts")
    page = write_page(load_folder(folder / "artifacts"), folder).read_text()
    assert all(artifact.title in page for artifact in artifacts)


def test_the_page_is_written_from_saved_artifacts(on_synthetic, synthetic_names, tmp_path):
    write([on_synthetic(name) for name in synthetic_names], tmp_path)


def test_small_runs_are_marked_and_the_page_is_written(on_images, tmp_path):
    artifacts = [on_images(name) for name in IMAGES]
    for artifact in artifacts:
        assert artifact.reduced and artifact.verdict != "reproduced" and "seeds" in artifact.reductions
    write(artifacts, tmp_path)
