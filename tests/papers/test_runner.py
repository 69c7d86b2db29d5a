"""Running several experiments: several processes, and killed runs that are started again."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pathlens import cli
from pathlens.errors import CheckpointError, OptionError, UnknownNameError
from pathlens.papers import image_runs, runner
from pathlens.papers.artifact import Artifact, load
from pathlens.papers.experiment import Run, find, names
from pathlens.papers.runner import Plan, run_all

CIRCLE = ("hs.fig2", "hs.fig6")
CHANGES = {"points": 32, "epochs": {"relu": 60, "dlgn_pwc": 100, "frozen": 60}}


def run_circle(out: str) -> None:
    run_all([find(name) for name in CIRCLE], Plan("quick", Path(out), seeds=2, changes=CHANGES))


def run_circle_and_die(out: str) -> None:
    """Killed where the second of three trainings has announced a checkpoint and is about to put it in its place."""

    def die(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and list(Path(out).glob("checkpoints/*circle-dlgn_pwc*/checkpoint-*.json")):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    run_circle(out)


def start(call: str, **options: Any) -> subprocess.Popen[str]:
    """A call of a function of this file in a process of its own."""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_runner; test_runner.{call}"
    return subprocess.Popen([sys.executable, "-c", script], text=True, **options)


def same(one: Artifact, other: Artifact) -> bool:
    """Equal but for times, and the checksum that covers them."""

    def plain(artifact: Artifact) -> dict[str, Any]:
        document = artifact._document("", "")
        return {key: value for key, value in document.items() if key not in ("created", "duration_seconds", "checksum")}

    arrays = all(np.array_equal(value, other.arrays[key], equal_nan=True) for key, value in one.arrays.items())
    return arrays and json.dumps(plain(one)) == json.dumps(plain(other))


def test_a_killed_run_that_is_started_again_gives_the_same_artifacts(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    assert start(f"run_circle_and_die({str(killed)!r})").wait() == -signal.SIGKILL
    assert not (killed / "artifacts").exists()
    for place in ("killed", "whole"):
        run_circle(str(tmp_path / place))
    for name in CIRCLE:
        one, other = (load(tmp_path / place / "artifacts" / f"{name}.quick.json") for place in ("killed", "whole"))
        assert same(one, other)
        assert one.config["points"] == 32 and one.reductions["points"] == (32, 1024)


def test_two_processes_end_to_end(tmp_path: Path) -> None:
    """Two cheap experiments end to end; each goes to a process of its own."""
    words = ["run", "npk.fig1", "dgn.fig9", "--seeds", "2", "--device", "cpu", "--jobs", "2", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "npk.fig1 reproduced" in result.output and "dgn.fig9 reproduced" in result.output
    assert (tmp_path / "index.html").exists()
    alone = run_all([find("npk.fig1"), find("dgn.fig9")], Plan("quick", tmp_path / "alone", seeds=2))
    for outcome in alone:
        assert outcome.artifact is not None
        other = load(tmp_path / "artifacts" / f"{outcome.name}.quick.json")
        assert all(np.array_equal(value, other.arrays[key]) for key, value in outcome.artifact.arrays.items())


def test_a_process_that_dies_takes_only_its_own_experiment_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    class Context:
        """Processes as the real context makes them; the first one is killed before it says anything."""

        def __init__(self, real: Any) -> None:
            self.real = real
            self.Pipe = real.Pipe

        def Process(self, target: Any, args: Any, daemon: bool) -> Any:
            started.append(args[0])
            kill = len(started) == 1
            return self.real.Process(target=_die if kill else target, args=args, daemon=daemon)

    real = runner.multiprocessing.get_context("spawn")
    monkeypatch.setattr(runner.multiprocessing, "get_context", lambda kind: Context(real))
    first, second, third = (find(name) for name in ("dgn.fig9", "dgn.conv", "npk.fig1"))
    entries = [dataclasses.replace(first, shares="one"), dataclasses.replace(second, shares="one"), third]
    plan = Plan("quick", tmp_path, seeds=1)
    outcomes = run_all(entries, plan, jobs=2)
    assert [bool(outcome.error) for outcome in outcomes] == [True, False, False]
    assert "ended with code 7" in outcomes[0].error
    assert started[-1] == ["dgn.conv"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_processes_end_with_the_one_that_started_them() -> None:
    with start("start_child()", stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 60
    while lives(child):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_child() -> None:
    multiprocessing.get_context("spawn").Process(target=wait_for_ever).start()
    time.sleep(600)


def wait_for_ever() -> None:
    threading.Thread(target=runner._end_with_parent, daemon=True).start()
    print(os.getpid(), flush=True)
    time.sleep(600)


def _die(*ignored: Any) -> None:
    os._exit(7)


def test_trainings_shared_by_modules_run_in_one_process() -> None:
    plan = Plan("quick", Path("unused"))
    groups = runner._groups([find("dgn.fig3"), find("npk.fig1"), find("npk.memorise")], plan)
    assert [[entry.name for entry in group] for group in groups] == [["dgn.fig3", "npk.memorise"], ["npk.fig1"]]
    together = {
        "circle": "hs.fig2 hs.fig3 hs.fig4 hs.fig5 hs.fig6 hs.spectral hs.regions",
        "modified Fashion-MNIST": "hs.fig7 hs.fig13",
        "five convolutions": "hs.tab1 hs.cifar",
        "binary MNIST": "dgn.fig6 dgn.fig7 dgn.fig8",
        "path features": "npk.tab2 npk.fig3",
        "localisation": "loc.gdln loc.flips loc.dft",
    }
    for training, found in together.items():
        assert len(runner._groups([find(name) for name in found.split()], plan)) == 1, training


def test_seeds_are_the_experiments_own() -> None:
    entry = dataclasses.replace(find("hs.fig2"), seeds=(3, 5))
    assert Plan("quick", Path("unused")).run(entry).seeds == (0, 1, 2)
    assert Plan("quick", Path("unused"), seeds=1).run(entry).seeds == (0,)


def test_checkpoints_of_other_settings_are_elsewhere(tmp_path: Path) -> None:
    places = {
        Run(out=tmp_path, seeds=seeds, changes=changes).checkpoint("a")
        for seeds in ((0,), (0, 1))
        for changes in ({}, {"epochs": 3})
    }
    assert len(places) == 4
    (place,) = {Run("paper", out=tmp_path).checkpoint("a", "b") for _ in range(2)}
    assert place is not None and place.name.startswith("paper-a-b-")


def test_starting_over_forgets_checkpoints_once(tmp_path: Path) -> None:
    place = Run(out=tmp_path).checkpoint("a")
    assert place is not None
    place.mkdir(parents=True)
    numbers = place.with_name(f"{place.name}-30.json")
    numbers.touch()
    again = Run(out=tmp_path, again=True)
    assert again.checkpoint("a") == place and not place.exists() and not numbers.exists()
    place.mkdir()
    assert again.checkpoint("a") == place and place.exists()  # what it has written since is its own


def test_two_runs_do_not_compute_the_same_at_once(tmp_path: Path) -> None:
    import fcntl

    run, other = Run(out=tmp_path), Run(out=tmp_path)

    def compute() -> bool:
        (lock,) = (tmp_path / "checkpoints" / "locks").iterdir()
        with open(lock) as stream, pytest.raises(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True

    assert run.once("training", compute)
    assert other.once("training", lambda: True)  # free again


@pytest.mark.parametrize("text", ['{"0": {"accu', "[1, 2]", ""])
def test_finished_results_that_cannot_be_read_are_told_and_left(tmp_path: Path, text: str) -> None:
    run, seeds, file = Run("quick", (0, 1)), tmp_path / "seeds-0.json", tmp_path / "found.json"
    assert image_runs.remembered(file, lambda: {"accuracy": 0.5}) == {"accuracy": 0.5}
    for path in (seeds, file):
        path.write_text(text)
    with pytest.raises(CheckpointError, match=r"found\.json: finished results.* delete it to compute them again"):
        image_runs.remembered(file, lambda: {"accuracy": 0.6})
    with pytest.raises(CheckpointError, match=r"seeds-0\.json: finished results"):
        image_runs.each_seed(run, tmp_path, lambda part: {"accuracy": np.zeros(len(part.seeds))})
    assert seeds.read_text() == file.read_text() == text


@pytest.mark.parametrize("epochs", ["abc", [3], True, None, {"relu": "abc"}, {"rleu": 3}, {"relu": {"relu": 3}}])
def test_a_size_of_another_kind_is_refused(tmp_path: Path, epochs: Any) -> None:
    with pytest.raises(OptionError, match=r"The size 'epochs' cannot be .* here it is"):
        Plan("quick", tmp_path, changes={"epochs": epochs}).check([find("hs.fig2")])
    Plan("quick", tmp_path, changes={"epochs": 3}).check([find("hs.fig2")])


def test_a_size_for_some_of_the_networks_leaves_the_others(tmp_path: Path) -> None:
    for changes, epochs in (
        ({"relu": 3}, {"relu": 3, "dlgn_pwc": 1000, "frozen": 8000}),
        (3, {"relu": 3, "dlgn_pwc": 3, "frozen": 3}),
    ):
        plan = Plan("paper", tmp_path, changes={"epochs": changes})
        plan.check([find("hs.fig2")])
        assert plan.run(find("hs.fig2")).sizes_of("hs.fig2")["epochs"] == epochs
        assert find("hs.fig2").estimate(plan.run(find("hs.fig2")))[1] < 12


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("hs.tab2", {"networks": ["resnet5"]}, "Unknown word for the size 'networks': 'resnet5'.*resnet110, .*tiny"),
        ("hs.tab2", {"data": ["imagenet"]}, "Unknown word for the size 'data'"),
        ("dgn.exp6", {"gates": ["hard"]}, "Unknown word for the size 'gates'"),
        ("dgn.tab4", {"betas": ["x"]}, r"The size 'betas' cannot be \['x'\]"),
        ("hs.fig2", {"hidden": [[3]]}, r"The size 'hidden' cannot be \[\[3\]\]"),
    ],
)
def test_lists_of_other_words_or_kinds_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises((OptionError, UnknownNameError), match=words):
        Plan("paper", tmp_path, changes=changes).check([find(name)])
    Plan("paper", tmp_path, changes={"residual": ["resnet110"]}).check([find("hs.cost")])


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("hs.fig3", {"epochs": 100}, "shows epoch 200, but the training of ReLU, DLGN-PWC would end before it"),
        ("hs.fig4", {"epochs": 100}, "shows epoch 200"),
        (
            "hs.fig5",
            {"epochs": {"frozen": 100}},
            "shows epoch 200, but the training of DLGN-PWC, gates frozen would",
        ),
        ("hs.fig4", {"points": 1000}, "kernel_points must divide points, got 128 and 1000"),
        ("hs.spectral", {"points": 64}, "kernel_points must divide points, got 128 and 64"),
        ("hs.fig6", {"hidden": [3, 4]}, r"compares layers of the same width, got hidden=\[3, 4\]"),
        ("npk.fig3", {"epochs": 1}, "none of the stages .* is within the epochs of GCONV"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_told_before_training(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    (outcome,) = run_all([find(name)], Plan("quick", tmp_path, seeds=1, changes=changes))
    assert re.search(words, outcome.error), outcome.error
    assert not list(tmp_path.glob("checkpoints/*/checkpoint-*"))


def test_a_wrong_size_is_told_before_its_cost_is_estimated(tmp_path: Path) -> None:
    words = ["run", "hs.tab1", "--scale", "paper", "--set", "widths=abc", "--device", "cpu", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 1 and "The size 'widths' cannot be 'abc'" in result.output


def test_every_size_can_be_set_to_itself_and_to_that_of_the_other_scale(tmp_path: Path) -> None:
    for name in names():
        for one, other in itertools.product(("quick", "paper"), repeat=2):
            changes = {key: value for key, value in find(name).sizes_at(one).items() if key != "seeds"}
            Plan(other, tmp_path, changes=changes).check([find(name)])
