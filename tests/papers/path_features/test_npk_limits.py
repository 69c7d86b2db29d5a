"""Wide networks with fixed gates, small: limits, kernels and networks at every stage, results kept on disk."""

import numpy as np
import pytest

from pathlens import kernels
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.pages import write_page
from pathlens.papers.path_features import limits

SMALL = {
    "widths": [20, 80],
    "hidden_layers": 2,
    "inputs": 8,
    "rows": 60,
    "rows_test": 40,
    "width": 20,
    "epochs": 3,
    "stages": [1, 3],
    "images": 12,
    "images_test": 10,
    "channels": [1, 6, 6],
    "dense": [12],
    "draws": 2,
}


def run_limits(out=None, seeds=(0, 1, 2), **changes):
    return perform(find("npk.limits"), Run("quick", seeds=seeds, out=out, changes={**SMALL, **changes}))


@pytest.fixture(scope="module")
def found():
    return run_limits()


def test_kernels_and_networks_are_scored_at_every_stage(found):
    artifact = found
    assert artifact.arrays["kernel"].shape == artifact.arrays["network"].shape == (3, 3)
    assert list(artifact.arrays["stages"]) == [0, 1, 3]
    rows = [claim.row for claim in artifact.claims if claim.text == limits._AGREE.text]
    assert rows == ["random gates", "gates of epoch 1", "gates of epoch 3"]
    assert set(artifact.metrics["test accuracy"]["images"]) == {
        "cntk_pooling",
        "random_pooling",
        "cntk_no_pooling",
        "random_no_pooling",
    }


def test_finished_parts_are_read_from_the_folder(found, tmp_path, monkeypatch):
    first = run_limits(tmp_path)
    for part in ("_distances", "_stage_accuracies"):  # a second run reads the results of the first one
        monkeypatch.setattr(limits, part, None)
    monkeypatch.setattr(kernels, "npk", None)
    monkeypatch.setattr(kernels, "relu_cntk", None)
    again = run_limits(tmp_path)
    for name, values in found.arrays.items():
        assert np.array_equal(first.arrays[name], values) and np.array_equal(again.arrays[name], values)
    fewer = run_limits(tmp_path, seeds=(2, 0))  # whichever seeds are requested
    assert np.allclose(fewer.arrays["random_pooling"], found.arrays["random_pooling"][[2, 0]])
    without = run_limits(tmp_path, images=0)
    assert np.array_equal(without.arrays["kernel"], found.arrays["kernel"])
    assert [c.measured for c in without.claims[-2:]] == [(None,) * 3] * 2
    without.save(tmp_path / "artifacts")
    assert "Convolutional gates" not in write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()


def test_seeds_can_be_added(found, tmp_path):
    alone = run_limits(tmp_path, seeds=(0,), images=0)
    added = run_limits(tmp_path, images=0)
    for name in ("errors", "independent", "kernel", "network", "relu"):
        trained = name in ("kernel", "network", "relu")  # other stacks round differently: one of 360 images
        assert np.allclose(added.arrays[name], found.arrays[name], atol=0.003 if trained else 1e-5)
        at = (0,) if name in ("independent", "relu") else (slice(None), 0)
        assert np.array_equal(added.arrays[name][at], alone.arrays[name][at])  # unchanged


def test_each_kernel_goes_to_its_own_limit(found):
    claims = {claim.text: claim for claim in found.claims}
    for claim in (limits._EXACT, limits._OWN_LIMIT, limits._DEPENDENT):
        measured = np.median(claims[claim.text].measured)
        assert measured < (1 if claim is not limits._EXACT else 3)


def test_the_page_is_written_from_the_saved_artifact(found, tmp_path):
    found.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert found.title in page and "Convolutional gates" in page
