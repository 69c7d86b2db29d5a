"""Experiments of the user's own, from files: run, kept, changed, in several processes, and told what is wrong."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pathlens import cli
from pathlens.papers import experiment as registry
from pathlens.papers.artifact import load

SOURCE = """
from beside import VALUE

from pathlens.papers.claim import Claim
from pathlens.papers.experiment import experiment

claim = Claim("more", above=1, null=0)


@experiment("NAME", paper="mine", title="T", what="w", claims=[claim],
            sizes={"epochs": (2, 9)})
def run_it(run):
    values = [VALUE + run.sizes["epochs"] for _ in run.seeds]
    return run.artifact(claims=[claim.measure(values)])
"""


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_discover", lambda: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)  # that of the last test
    monkeypatch.delenv("PATHLENS_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("beside.py").write_text("VALUE = 1\n")
    for file in ("one", "two"):
        Path(f"{file}.py").write_text(SOURCE.replace("NAME", f"own.{file}"))
        hour_ago = time.time() - 3600
        os.utime(f"{file}.py", (hour_ago, hour_ago))


def invoke(*words: str, code: int = 0) -> str:
    registry._REGISTERED.clear()  # as a process of its own would begin
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == code, (result.output, result.exception)
    return " ".join(result.output.split())


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_files_run_in_one_process_and_in_several(jobs: str) -> None:
    out = invoke("run", "one.py", "two.py", "--seeds", "3", "--jobs", jobs, "--device", "cpu")
    assert "own.one reproduced" in out and "own.two reproduced" in out
    made = load(Path("runs/artifacts/own.two.quick.json"))
    assert made.claims[0].measured == (3.0, 3.0, 3.0) and Path("runs/index.html").exists()


def test_an_interrupt_is_for_the_process_that_started_the_others() -> None:
    """Ctrl-C reaches all of them: the first one ends the others, which must not print where they were."""
    for file in ("one", "two"):
        text = Path(f"{file}.py").read_text()
        interrupt = "    os.kill(os.getpid(), signal.SIGINT)\n    values ="
        Path(f"{file}.py").write_text("import os, signal\n" + text.replace("    values =", interrupt))
    out = invoke("run", "one.py", "two.py", "--jobs", "2", "--device", "cpu")
    assert "own.one reproduced" in out and "own.two reproduced" in out


def test_what_is_finished_is_kept_until_the_file_changes() -> None:
    assert "kept from" not in invoke("run", "one.py", "--device", "cpu")
    assert "own.one reproduced, kept from" in invoke("run", "one.py", "--device", "cpu")
    text = Path("one.py").read_text()
    Path("one.py").write_text(text + "\n")
    assert "kept from" not in invoke("run", "one.py", "--device", "cpu")
    assert "own.one reproduced, kept from" in invoke("run", "one.py", "--device", "cpu")
    os.utime("one.py", (time.time() + 5, time.time() + 5))  # a date alone is no change
    assert "own.one reproduced, kept from" in invoke("run", "one.py", "--device", "cpu")


def test_an_edited_file_with_its_old_date_and_length_runs_anew() -> None:
    """As a restored backup or a checkout of another version has; Python's own bytecode cache looks at just these."""
    assert "own.one reproduced" in invoke("run", "one.py", "--device", "cpu")
    date, text = os.stat("one.py").st_mtime_ns, Path("one.py").read_text()
    Path("one.py").write_text(text.replace("[VALUE + ", "[VALUE - "))
    os.utime("one.py", ns=(date, date))
    assert "own.one not reproduced" in invoke("run", "one.py", "--device", "cpu")
    assert load(Path("runs/artifacts/own.one.quick.json")).claims[0].measured[0] == -1


def test_checkpoints_of_an_edited_file_are_not_resumed() -> None:
    """`train` compares settings and data, but cannot see that a function of the file has changed."""
    training = """
    from pathlens import data, models, training
    net = models.gdln(2, (4,), gates=lambda x: SIGN * x[:, :1].expand(-1, 4))
    options = {"seeds": run.seeds, "progress": False, "checkpoints": run.checkpoint("w")}
    runs = training.train(net, data.circle(16), epochs=2, **options)
    values = [10 + loss for loss in runs.history()[:, -1]]
"""
    text = Path("one.py").read_text()
    start = text.index("    values =")
    text = text[:start] + training.lstrip("\n") + text[text.index("    return") :]
    found = []
    for sign in ("1", "-1"):
        Path("one.py").write_text(text.replace("SIGN", sign))
        assert "own.one reproduced" in invoke("run", "one.py", "--seeds", "3", "--device", "cpu")
        found.append(load(Path("runs/artifacts/own.one.quick.json")).claims[0].measured)
    assert found[0] != found[1]


def test_names_are_checked_before_anything_runs() -> None:
    Path("one.py").write_text(Path("one.py").read_text().replace("own.one", "My experiment"))
    assert "lower-case words joined by dots" in invoke("run", "one.py", code=1)


def test_a_log_shows_that_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("one.py").write_text(
        SOURCE.replace("    values", "    run.progress('steps [a]', 3, 7)\n    values").replace("NAME", "own.one")
    )
    assert "steps" not in invoke("run", "one.py", "--device", "cpu")
    monkeypatch.setattr(cli, "_LOG_SECONDS", -1.0)
    assert "steps [a]: 3 of 7" in invoke("run", "one.py", "--device", "cpu", "--again")


def test_sizes_are_changed_and_told() -> None:
    invoke("run", "one.py", "--scale", "paper", "--device", "cpu")
    full = load(Path("runs/artifacts/own.one.paper.json"))
    assert full.claims[0].measured[0] == 10 and not full.reduced
    assert "REDUCED" in invoke("run", "one.py", "--scale", "paper", "--set", "epochs=4", "--device", "cpu")
    assert load(Path("runs/artifacts/own.one.paper.json")).claims[0].measured[0] == 5
    assert "own.two" in invoke("list", "two.py")


def test_wrong_files_are_told() -> None:
    assert "three.py: no such file" in invoke("run", "three.py", code=1)
    Path("empty.py").write_text("x = 1\n")
    assert "empty.py declares no experiment" in invoke("run", "empty.py", code=1)
    Path("broken.py").write_text(SOURCE.replace("NAME", "own.one") + "\nwrong\n")
    assert "broken.py, line 16: NameError: name 'wrong' is not defined" in invoke("run", "broken.py", code=1)
    assert not registry._REGISTERED
    Path("syntax.py").write_text("def f(:\n")
    assert "syntax.py: SyntaxError" in invoke("run", "syntax.py", code=1)
    Path("scales.py").write_text(SOURCE.replace("NAME", "own.one").replace("(2, 9)", "(2, 5, 9)"))
    assert "the size 'epochs' must be a pair (quick, paper) or one value for both, got (2, 5, 9)" in invoke(
        "run", "scales.py", code=1
    )
