"""The neural path features experiments, small: what they write and claim."""

import numpy as np
import pytest
from small_sizes import shrink

from pathlens import kernels
from pathlens.papers import path_features_toy as path_features
from pathlens.papers.artifact import load_folder
from pathlens.papers.deep_gated import depths
from pathlens.papers.experiment import Run, find, perform, select
from pathlens.papers.pages import write_page

NAMES = ("npk.fig1", "npk.limits", "npk.memorise")


@pytest.fixture(scope="module")
def found():
    """Seconds, and the same code."""
    sizes = {
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
    grid = {"n": 10, "trained_depths": [2, 4, 6], "trained_widths": [6, 12], "epochs": 5}
    with pytest.MonkeyPatch.context() as patch:
        for name, changed in (("npk.limits", sizes), ("npk.memorise", grid), ("dgn.fig3", grid)):
            shrink(patch, name, changed)
        run = Run("quick", seeds=(0, 1, 2))
        yield {name: perform(find(name), run) for name in NAMES}, run


def test_all_are_listed_with_their_claims():
    assert {e.name for e in select(["npk.*"])} >= set(NAMES)


def test_the_toy_network_shares_the_path_of_the_figure(found):
    artifact = found[0]["npk.fig1"]
    units, gates, x = (artifact.arrays[key] for key in ("units", "gates", "x"))
    assert units.shape == (18, 3) and artifact.verdict == "reproduced"
    features = np.array([[x[s, a] * gates[s, 0, b] * gates[s, 1, c] for a, b, c in units] for s in range(3)])
    assert np.array_equal(artifact.arrays["features"], features)
    both = np.flatnonzero((features[0] != 0) & (features[1] != 0))
    assert list(both + 1) == [3, 12] and artifact.metrics["Λ"][0][1] == 1


def test_kernels_and_networks_are_scored_at_every_stage(found):
    artifact = found[0]["npk.limits"]
    assert artifact.arrays["kernel"].shape == artifact.arrays["network"].shape == (3, 3)
    assert list(artifact.arrays["stages"]) == [0, 1, 3]
    rows = [claim.row for claim in artifact.claims if claim.text == path_features._AGREE.text]
    assert rows == ["random gates", "gates of epoch 1", "gates of epoch 3"]
    assert set(artifact.metrics["test accuracy"]["images"]) == {
        "cntk_pooling",
        "random_pooling",
        "cntk_no_pooling",
        "random_no_pooling",
    }


def test_parts_are_kept_and_images_may_be_left_out(found, tmp_path, monkeypatch):
    whole, run = found[0]["npk.limits"], Run("quick", seeds=(0, 1, 2), out=tmp_path)
    first = perform(find("npk.limits"), run)
    fewer = tmp_path / "fewer"
    alone = perform(find("npk.limits"), Run("quick", seeds=(0,), out=fewer, changes={"images": 0}))
    added = perform(find("npk.limits"), Run("quick", seeds=(0, 1, 2), out=fewer, changes={"images": 0}))
    for name in ("errors", "independent", "kernel", "network", "relu"):  # seeds may come in turn
        trained = name in ("kernel", "network", "relu")  # in other stacks, which round otherwise: one of 360 images
        assert np.allclose(added.arrays[name], whole.arrays[name], atol=0.003 if trained else 1e-5)
        at = (0,) if name in ("independent", "relu") else (slice(None), 0)
        assert np.array_equal(added.arrays[name][at], alone.arrays[name][at])  # as it was
    for part in ("_limits", "_gates_and_networks"):  # a second run reads what the first one wrote
        monkeypatch.setattr(path_features, part, None)
    again = perform(find("npk.limits"), Run("quick", seeds=(0, 1, 2), out=tmp_path))
    for name, values in whole.arrays.items():
        assert np.array_equal(first.arrays[name], values) and np.array_equal(again.arrays[name], values)
    fewer = Run("quick", seeds=(2, 0), out=tmp_path)
    with monkeypatch.context() as patch:  # kernels of a seed are found whichever seeds are asked for
        patch.setattr(kernels, "npk", None)
        patch.setattr(kernels, "relu_cntk", None)
        found = path_features._convolutional(fewer)
    assert np.allclose(found["random_pooling"], whole.arrays["random_pooling"][[2, 0]])
    without = perform(find("npk.limits"), Run("quick", seeds=(0, 1, 2), out=tmp_path, changes={"images": 0}))
    assert np.array_equal(without.arrays["kernel"], whole.arrays["kernel"])
    assert [c.measured for c in without.claims[-2:]] == [(None,) * 3] * 2
    without.save(tmp_path / "artifacts")
    assert "Convolutional gates" not in write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()


def test_each_kernel_goes_to_its_own_limit(found):
    claims = {claim.text: claim for claim in found[0]["npk.limits"].claims}
    for claim in (path_features._EXACT, path_features._OWN_LIMIT, path_features._DEPENDENT):
        measured = np.median(claims[claim.text].measured)
        assert measured < (1 if claim is not path_features._EXACT else 3)


def test_memorising_shares_the_trainings_of_figure_3(found):
    artifacts, run = found
    error = artifacts["npk.memorise"].arrays["error"]
    assert error.shape == (2, 3, 3) and {key for key in run._results if key[0] == "memorise"} == {
        ("memorise", 6),
        ("memorise", 12),
    }
    assert np.allclose(error[1], depths.memorise(run, 12).final, atol=1e-6)


def test_the_page_is_written_from_saved_artifacts(found, tmp_path):
    for artifact in found[0].values():
        artifact.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(artifact.title in page for artifact in found[0].values())
