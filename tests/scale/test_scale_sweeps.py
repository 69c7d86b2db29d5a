"""Sweeps over settings and seeds: saved one by one, resumed, and the same on a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pathlens import papers
from pathlens.errors import FileFormatError, OptionError, UnknownNameError
from pathlens.papers import registry
from pathlens.papers.artifact import Artifact, Claim
from pathlens.papers.sweeps import sweep

SETTINGS = [{"width": 4, "gate": "hard"}, {"width": 8, "gate": "soft"}]


def measure(setting: dict[str, Any], seed: int) -> dict[str, Any]:
    return {"loss": np.float64(setting["width"] + seed / 10), "curve": np.arange(2), "gate": setting["gate"]}


def test_results_are_saved_one_by_one_and_resumed(tmp_path: Path) -> None:
    asked = []

    def fragile(setting: dict[str, Any], seed: int) -> dict[str, Any]:
        asked.append((setting["width"], seed))
        if len(asked) == 4:
            raise ValueError("out of luck")
        return measure(setting, seed)

    with pytest.raises(ValueError, match="out of luck"):
        sweep(fragile, SETTINGS, (0, 1, 2), out=tmp_path, client=False)
    assert len(list(tmp_path.glob("*.json"))) == 3
    done = sweep(fragile, SETTINGS, (0, 1, 2), out=tmp_path, client=False)
    assert asked == [(4, 0), (4, 1), (4, 2), (8, 0), (8, 0), (8, 1), (8, 2)] and done.computed == 3
    assert np.allclose(done.values("loss"), [[4.0, 4.1, 4.2], [8.0, 8.1, 8.2]])
    with pytest.raises(UnknownNameError, match="Unknown result 'absent'"):
        done.values("absent")
    assert done.runs[3].result["curve"] == [0, 1] and done.runs[3].setting == SETTINGS[1]
    assert sweep(fragile, SETTINGS, (2, 0), out=tmp_path).computed == 0  # no cluster is started for nothing
    assert "2 settings × 3 seeds, 3 of 6 run now; results: curve, gate, loss" in repr(done)


def test_a_damaged_or_foreign_result_is_refused(tmp_path: Path) -> None:
    first = sweep(measure, SETTINGS[:1], (0, 1), out=tmp_path, client=False).runs
    whole = first[0].file.read_text()
    first[0].file.write_text(whole.replace("4.0", "3.0"))
    with pytest.raises(FileFormatError, match="does not have the checksum"):
        sweep(measure, SETTINGS[:1], (0, 1), out=tmp_path, client=False)
    first[0].file.write_text(first[1].file.read_text())
    with pytest.raises(FileFormatError, match="belongs to another run"):
        sweep(measure, SETTINGS[:1], (0, 1), out=tmp_path, client=False)


def test_what_cannot_be_swept_is_told(tmp_path: Path) -> None:
    bad: list[tuple[Any, Any, Any, str]] = [
        (measure, [], (0,), "at least one setting"),
        (measure, SETTINGS, (0, 0), "distinct seeds"),
        (measure, [{"a": 1}, {"a": 1}], (0,), "two settings are equal"),
        (measure, [{"a": object()}], (0,), "plain"),
        (3, SETTINGS, (0,), "expected a function"),
        (lambda setting, seed: 3.0, SETTINGS, (0,), "expected a mapping"),
        (lambda setting, seed: {"a": {1, 2}}, SETTINGS, (0,), "plain"),
        (measure, {"a": [1, 2]}, (0,), "a list of mappings"),
    ]
    for what, settings, seeds, match in bad:
        with pytest.raises(OptionError, match=match):
            sweep(what, settings, seeds, out=tmp_path, client=False)
    with pytest.raises(UnknownNameError):
        sweep("hs.nothing", [{}], out=tmp_path, client=False)


def test_an_experiment_is_swept_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim("positive", threshold=0.5, comparison=">", null=0.0, needs=1)

    def run(run: registry.Run) -> Artifact:
        return Artifact(
            "hs.tiny",
            "Tiny",
            "none",
            run.scale,
            seeds=run.seeds,
            claims=(claim.measure([1.0]),),
            metrics={"seed": run.seeds[0]},
        )

    monkeypatch.setitem(
        registry._REGISTERED, "hs.tiny", registry.Experiment("hs.tiny", "none", "Tiny", "a test", (claim,), run)
    )
    done = papers.sweep("hs.tiny", [{"scale": "quick"}, {"scale": "paper"}], (5, 7), out=tmp_path, client=False)
    assert done.values("seed").tolist() == [[5.0, 7.0], [5.0, 7.0]]
    saved = json.loads((tmp_path / done.runs[1].result["artifact"]).read_text())
    assert saved["seeds"] == [7] and saved["scale"] == "quick"
    with pytest.raises(OptionError, match="takes device and scale, the setting has width"):
        sweep("hs.tiny", [{"width": 3}], (5,), out=tmp_path, client=False)


def test_a_sweep_runs_on_a_cluster(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address="127.0.0.1:0", silence_logs=50
    )
    with cluster, distributed.Client(cluster, set_as_default=False) as client:
        done = sweep(measure, SETTINGS, (0, 1), out=tmp_path, client=client)
    assert done.computed == 4 and np.allclose(done.values("loss"), [[4.0, 4.1], [8.0, 8.1]])
