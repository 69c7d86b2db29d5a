"""Experiments: how they are declared and found, that they share work and measure the claims that they declare."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from pathlens import papers
from pathlens.errors import OptionError, UnknownNameError
from pathlens.papers import experiment as registry
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Experiment, Run

CLAIM = Claim("more on top", above=2, null=1)


def result(name: str, run: Run, *claims: Claim) -> Artifact:
    return Artifact(name, "Title", "paper", run.scale, seeds=run.seeds, claims=claims or (CLAIM.measure([3, 3, 3]),))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_discover", lambda: None)


def add(name: str, function: object = None) -> Experiment:
    return registry.register(Experiment(name, "Title", "what", (CLAIM,), function or (lambda run: result(name, run))))  # type: ignore[arg-type]


def test_an_experiment_without_a_claim_is_refused() -> None:
    with pytest.raises(OptionError, match="states no claim"):
        Experiment("hs.x", "t", "w", (), lambda run: result("hs.x", run))


def test_a_name_is_registered_once() -> None:
    add("hs.x")
    with pytest.raises(OptionError, match="twice"):
        add("hs.x")


def test_unknown_names_get_a_suggestion() -> None:
    add("hs.fig2")
    with pytest.raises(UnknownNameError, match=r"Did you mean 'hs.fig2'\?"):
        registry.find("hs.fgi2")
    with pytest.raises(UnknownNameError):
        registry.select(["xx.*"])


def test_patterns_select_each_once_in_order() -> None:
    for name in ("hs.a", "hs.b", "dgn.a"):
        add(name)
    assert [entry.name for entry in registry.select(["dgn.a", "hs.*", "hs.a"])] == ["dgn.a", "hs.a", "hs.b"]


def test_adding_a_file_adds_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new_paper"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "_not_scanned.py").write_text("raise RuntimeError\n")
    (folder / "one.py").write_text(
        "from pathlens.papers.claim import Claim\nfrom pathlens.papers.experiment import experiment\n"
        "claim = Claim('c', threshold=2, comparison='>', null=1)\n"
        "@experiment('new.x', title='t', what='w', claims=[claim])\n"
        "def x(run): return run.artifact(claims=[claim.measure([3, 3, 3])])\n"
    )
    monkeypatch.undo()
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(papers, "__path__", [*papers.__path__, str(tmp_path)])
    assert "new.x" in registry.names()
    assert registry.perform(registry.find("new.x"), Run(seeds=(0, 1, 2))).verdict == "reproduced"
    for module in ("new_paper", "new_paper.one"):
        del sys.modules[f"pathlens.papers.{module}"]


def test_work_is_shared_and_its_time_counted_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    now = [0.0]
    monkeypatch.setattr(registry.time, "perf_counter", lambda: now[0])

    def train() -> str:
        calls.append(1)
        now[0] += 40
        return "trained"

    def look(name: str) -> Experiment:
        return add(name, lambda run: (run.once("training", train), run.once("training", train), result(name, run))[2])

    run = Run("quick", (0, 1, 2))
    first, second = (registry.perform(look(name), run) for name in ("hs.a", "hs.b"))
    assert len(calls) == 1
    assert first.duration_seconds == second.duration_seconds == 40  # counted once for each, although asked for twice
    assert second.created.endswith("+00:00") and second.environment["device"] == "cpu"


def test_a_claim_that_was_registered_must_be_measured_as_registered() -> None:
    easier = dataclasses.replace(CLAIM, threshold=1.5).measure([1.6, 1.6, 1.6])
    for claims in ((easier,), (dataclasses.replace(CLAIM, text="other"),)):
        entry = add(
            f"hs.{len(registry._REGISTERED)}",
            lambda run, claims=claims: result(f"hs.{len(registry._REGISTERED) - 1}", run, *claims),
        )
        with pytest.raises(OptionError, match="did not measure its claim 'more on top'"):
            registry.perform(entry, Run())


def test_an_artifact_of_another_name_or_scale_is_refused() -> None:
    with pytest.raises(OptionError, match="expected its own name"):
        registry.perform(add("hs.a", lambda run: result("hs.b", run)), Run())
    with pytest.raises(OptionError, match="expected its own name"):
        registry.perform(add("hs.c", lambda run: result("hs.c", Run("paper"))), Run("quick"))


@pytest.mark.parametrize("options", [{"scale": "huge"}, {"seeds": ()}, {"seeds": (0, 0)}])
def test_bad_runs_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="Run"):
        Run(**options)  # type: ignore[arg-type]
