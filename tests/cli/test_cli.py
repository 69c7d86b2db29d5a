"""The command line: each command with small fake experiments, its exit codes, and how errors look."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pathlens import __version__, cli
from pathlens.errors import DataMissingError, OptionError
from pathlens.papers import experiment as registry
from pathlens.papers.artifact import Artifact, load
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Experiment, Run

runner = CliRunner()
CLAIM = Claim("more on top", above=2, null=1)
TRAININGS: list[int] = []
REAL_DEMO = cli.DEMO  # the tests below replace it


def fake(run: Run, name: str) -> Artifact:
    """A tiny experiment that shares a 'training' with its sibling."""
    values = run.once("training", lambda: TRAININGS.append(1) or [3.0 + seed for seed in run.seeds])
    run.progress("training", 1, 2)
    run.progress("training", 2, 2)
    return Artifact(
        name,
        "A fake [thing]",
        "none",
        run.scale,
        seeds=run.seeds,
        claims=[CLAIM.measure(values)],
        arrays={"v": np.array(values)},
        config={"device": run.device},
    )


def broken(run: Run) -> Artifact:
    raise OptionError("fake.broken: it broke on purpose [really]. Do not run it.")


@pytest.fixture(autouse=True)
def only_fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_discover", lambda: None)
    monkeypatch.setattr(cli, "DEMO", ("fake.one", "fake.two"))
    monkeypatch.delenv("PATHLENS_DEBUG", raising=False)
    monkeypatch.setenv("PATHLENS_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    TRAININGS.clear()
    for name in ("fake.one", "fake.two"):
        registry.register(
            Experiment(
                name,
                "Fake",
                f"what {name} [does]",
                (CLAIM,),
                lambda run, name=name: fake(run, name),
                data=("mnist",),  # type: ignore[misc]
                flops=3e15,
            )
        )
    registry.register(Experiment("fake.broken", "Broken", "fails", (CLAIM,), broken))


def invoke(*words: str, code: int = 0) -> str:
    result = runner.invoke(cli.app, list(words))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    """Measured as processor time: waiting for other programs is not our cost."""
    probe = (
        "import sys, time\nfrom typer.testing import CliRunner\nfrom pathlens.cli import app\n"
        "r = CliRunner().invoke(app, ['--help'])\nassert r.exit_code == 0 and 'doctor' in r.output\n"
        "bad = {'torch', 'numpy', 'matplotlib', 'sklearn'} & set(sys.modules)\nassert not bad, bad\n"
        "print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 5  # a tenth of that here; torch alone takes longer on a slow machine


def test_version() -> None:
    assert invoke("--version").strip() == f"pathlens {__version__}"


def test_run_trains_once_and_writes_artifacts_and_a_page(tmp_path: Path) -> None:
    output = invoke("run", "fake.one", "fake.two", "--seeds", "3", "--device", "cpu", "--out", "o")
    assert len(TRAININGS) == 1
    for name in ("fake.one", "fake.two"):
        artifact = load(tmp_path / "o" / "artifacts" / f"{name}.quick.json")
        assert artifact.seeds == (0, 1, 2) and artifact.verdict == "reproduced" and artifact.config["device"] == "cpu"
    assert "one (1 of 1 claims reproduced): more on top: 4 (3–5), needed above 2" in output
    assert "A fake [thing]" in (tmp_path / "o" / "index.html").read_text()


def test_run_at_paper_scale_with_a_pattern(tmp_path: Path) -> None:
    invoke("run", "fake.[ot]*", "--scale", "paper", "--seeds", "1", "--device", "cpu")
    found = sorted(path.name for path in (tmp_path / "runs" / "artifacts").glob("*.json"))
    assert found == ["fake.one.paper.json", "fake.two.paper.json"]
    assert load(tmp_path / "runs" / "artifacts" / found[0]).verdict == "cannot tell"  # one seed decides nothing


def test_one_that_fails_stops_no_other(tmp_path: Path) -> None:
    output = invoke("run", "fake.broken", "fake.one", "--device", "cpu", code=1)
    assert "1/2 fake.broken failed: fake.broken: it broke on purpose [really]" in output and "Traceback" not in output
    assert re.search(r"2/2 fake\.one reproduced, \d+ s\. one \(1 of 1 claims", output), output
    assert "1 of 2 failed: fake.broken." in output
    assert load(tmp_path / "runs" / "artifacts" / "fake.one.quick.json").verdict == "reproduced"
    assert "fake.one" in (tmp_path / "runs" / "index.html").read_text()


def test_an_error_that_nobody_expected_leaves_its_traceback_in_a_file(tmp_path: Path) -> None:
    registry.register(Experiment("fake.bug", "Bug", "fails", (CLAIM,), lambda run: 1 / 0))  # type: ignore[arg-type, return-value]
    output = invoke("run", "fake.bug", "--device", "cpu", code=1)
    assert "ZeroDivisionError: division by zero" in output and "Traceback" not in output
    assert "Traceback" in (tmp_path / "runs" / "errors" / "fake.bug.quick.txt").read_text()


def test_an_error_whose_traceback_cannot_be_written_stops_no_other(tmp_path: Path) -> None:
    registry.register(Experiment("fake.bug", "Bug", "fails", (CLAIM,), lambda run: 1 / 0))  # type: ignore[arg-type, return-value]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "errors").write_text("a file where the folder should be, as a full disk has none")
    output = invoke("run", "fake.bug", "fake.one", "--device", "cpu", code=1)
    assert "fake.bug failed: ZeroDivisionError" in output and "could not be written to runs/errors" in output
    assert "2/2 fake.one reproduced" in output and "--again starts all of them over" in output


def test_what_is_finished_is_kept_unless_it_would_differ(tmp_path: Path) -> None:
    words = ("run", "fake.one", "--device", "cpu")
    invoke(*words)
    first = (tmp_path / "runs" / "artifacts" / "fake.one.quick.json").read_bytes()
    assert "kept from" in invoke(*words) and len(TRAININGS) == 1
    assert (tmp_path / "runs" / "artifacts" / "fake.one.quick.json").read_bytes() == first
    assert "kept from" not in invoke(*words, "--again") and len(TRAININGS) == 2
    assert "kept from" not in invoke(*words, "--seeds", "3") and len(TRAININGS) == 3
    (tmp_path / "runs" / "artifacts" / "fake.one.quick.json").write_text("{")
    invoke(*words, "--seeds", "3")
    assert len(TRAININGS) == 4


def test_an_artifact_of_an_older_schema_is_made_anew_or_named(tmp_path: Path) -> None:
    for name in ("fake.one", "fake.two"):
        invoke("run", name, "--device", "cpu")
        file = tmp_path / "runs" / "artifacts" / f"{name}.quick.json"
        file.write_text(file.read_text().replace('"schema": 2', '"schema": 1'))
    output = " ".join(invoke("run", "fake.one", "--device", "cpu").split())
    assert "fake.one reproduced" in output and "kept from" not in output
    assert "No page: Artifact" in output and "schema version 1; this Pathlens reads 2. Run the experiment" in output
    assert "The page" in invoke("run", "fake.one", "fake.two", "--device", "cpu")


def test_an_artifact_of_other_claims_or_another_version_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("run", "fake.one", "--device", "cpu")
    invoke(*words)
    monkeypatch.setattr("pathlens.papers.runner.__version__", "99")
    invoke(*words)
    assert len(TRAININGS) == 2


def test_a_size_that_nothing_has_is_refused() -> None:
    assert "No experiment of this run has a size 'epoch'" in invoke("run", "fake.one", "--set", "epoch=3", code=1)
    assert not TRAININGS


def test_a_run_that_is_interrupted_says_how_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlens.papers.runner.run_all", interrupted)
    assert "Stopped after 0 of 1. Repeat the command to resume" in invoke("run", "fake.one", code=130)


def test_paper_scale_says_first_what_it_will_cost() -> None:
    output = invoke("run", "fake.one", "fake.two", "--scale", "paper", "--device", "cpu")
    assert output.index("fake.one: about 3e15 floating-point operations, about 1 min") < output.index("1/2 fake.one")
    assert "All 2: about 2 min" in output
    assert "floating-point" not in invoke("run", "fake.one", "--scale", "paper", "--device", "cpu")  # it is there


def test_debug_mode_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATHLENS_DEBUG", "1")
    result = runner.invoke(cli.app, ["run", "fake.broken", "--device", "cpu"])
    assert isinstance(result.exception, OptionError)


def test_unknown_experiment_suggests_the_closest() -> None:
    assert "Did you mean 'fake.one'?" in invoke("run", "fake.onee", code=1)


@pytest.mark.parametrize(
    "words", [("run", "fake.one", "--seeds", "0"), ("run", "fake.one", "--scale", "huge"), ("run",), ("unknown",)]
)
def test_wrong_usage_is_exit_code_two(words: tuple[str, ...]) -> None:
    invoke(*words, code=2)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta", "vulkan"])
def test_a_device_that_cannot_be_used(device: str) -> None:
    output = invoke("run", "fake.one", "--device", device, code=1)
    assert f"--device '{device}'" in output and "Use cpu" in output and len(output) < 500
    assert not TRAININGS


def test_a_folder_that_cannot_be_made_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in (["run", "fake.one"], ["demo"]):
        output = invoke(*command, "--device", "cpu", "--out", "file/o", code=1)
        assert "--out file/o cannot be made: " in output and "Choose another." in output
    assert not TRAININGS


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    for command in (["run", "fake.one"], ["demo"]):
        output = invoke(*command, "--device", "cpu", "--out", "o", code=1)
        assert "--out o cannot be written to: Permission denied. Choose another." in output
    assert not TRAININGS


def test_list_says_where_results_at_paper_scale_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(Path(__file__).parents[2] / "docs" / "results.md") in invoke("list").splitlines()[-1]
    monkeypatch.setattr(cli, "SOURCE", tmp_path)
    assert "docs/results.md of the source repository; an installed" in invoke("list").splitlines()[-1]


def test_list_shows_needs_and_status(tmp_path: Path) -> None:
    assert invoke("list").count("not run") == 3
    assert invoke("list", "*.t*").count("not run") == 1
    assert "Unknown experiment 'fake.three'" in invoke("list", "fake.three", code=1)
    invoke("run", "fake.one", "fake.two", "--device", "cpu", "--out", "o")
    (tmp_path / "o" / "artifacts" / "fake.two.quick.json").write_text("{")
    lines = {line.split()[0]: line for line in invoke("list", "--in", "o").splitlines() if line.startswith("fake")}
    assert "quick: reproduced" in lines["fake.one"] and "mnist" in lines["fake.one"]
    assert "what fake.one [does]" in lines["fake.one"] and "1 min" in lines["fake.one"] and "3e15" in lines["fake.one"]
    assert "unreadable" in lines["fake.two"]
    assert "not run" in lines["fake.broken"]
    assert "--in nowhere: no such folder" in invoke("list", "--in", "o", "--in", "nowhere", code=1)


def test_demo_says_where_the_page_is_and_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    lines = invoke("demo", "--out", "d", "--seeds", "3").strip().splitlines()
    page = tmp_path / "d" / "index.html"
    assert lines[0] == f"The page: {page}" and page.exists() and not opened
    assert lines[1].startswith("one (1 of 1 claims reproduced): more on top: 4 (3–5)") and len(lines) == 1 + 2
    invoke("demo", "--out", "d", "--open")
    assert opened == [page.as_uri()]


def test_demo_shows_four_figures() -> None:
    assert REAL_DEMO == ("hs.fig2", "hs.fig3", "hs.fig5", "hs.fig6")


def test_report_rebuilds_the_page_from_either_folder(tmp_path: Path) -> None:
    invoke("run", "fake.one", "--device", "cpu", "--out", "o")
    (tmp_path / "o" / "index.html").unlink()
    invoke("report", "o")
    assert (tmp_path / "o" / "index.html").exists()
    invoke("report", "o/artifacts")
    assert (tmp_path / "o" / "artifacts" / "index.html").exists()


def test_report_of_nothing(tmp_path: Path) -> None:
    assert "No folder of artifacts" in invoke("report", "none", code=1)
    (tmp_path / "empty").mkdir()
    assert "no artifact" in invoke("report", "empty", code=1)


def test_doctor_shows_versions_memory_and_data() -> None:
    output = invoke("doctor")
    for words in (
        __version__,
        "torch",
        "cores usable",
        "free for this process",
        "cuda",
        "matplotlib",
        "MNIST",
        "absent",
    ):
        assert words in output, words


def test_data_list_and_check() -> None:
    output = invoke("data", "list")
    assert "CIFAR-10" in output and "absent" in output and "Searched:" in output and "Tables: none" in output
    invoke("data", "check")
    assert "absent" in invoke("data", "check", "mnist", code=1)
    assert "Did you mean 'mnist'?" in invoke("data", "check", "mnits", code=1)


def test_data_list_names_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"name": "loans", "file": "loans.csv.gz", "sha256": "", "task": "classification", "rows": 1, "columns": 1}
    (tmp_path / "tabular").mkdir()
    (tmp_path / "tabular" / "manifest.json").write_text(json.dumps({"datasets": [entry]}))
    monkeypatch.setenv("PATHLENS_DATA", str(tmp_path))
    assert "Tables: loans" in invoke("data", "list")


def test_data_import_prints_what_was_copied_and_fails_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist" in invoke("data", "import", "nowhere", code=1)
    from pathlens.data import store

    seen: list[object] = []

    def copied(path: Path, names: list[str] | None) -> list[store.Imported]:
        seen.append((path, names))
        return [store.Imported("mnist", "idx.gz", tmp_path, ("a", "b"), 2048, True)]

    monkeypatch.setattr(store, "import_from", copied)
    assert f"mnist: 2 files, 2.0 KiB, checksums agree, in {tmp_path}" in invoke("data", "import", "x", "mnist")
    invoke("data", "import", "x")
    assert seen == [(Path("x"), ["mnist"]), (Path("x"), None)]


def test_corrupt_data_is_exit_code_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlens.data import store

    bad = store.SetStatus("mnist", "MNIST", "corrupt", "idx.gz", tmp_path, "a: sha256 is 1, expected 2 [x]")
    monkeypatch.setattr(store, "check", lambda name: bad)
    assert "expected 2 [x]" in invoke("data", "check", code=1)


def test_missing_data_in_an_experiment_is_one_paragraph() -> None:
    def needy(run: Run) -> Artifact:
        raise DataMissingError("MNIST is not on this machine. Run: pathlens data import FOLDER")

    registry.register(Experiment("fake.needy", "Needy", "needs data", (CLAIM,), needy))
    assert "pathlens data import FOLDER" in invoke("run", "fake.needy", "--device", "cpu", code=1)


def test_the_package_is_the_command_line_too() -> None:
    done = subprocess.run([sys.executable, "-m", "pathlens", "--help"], check=True, capture_output=True, text=True)
    assert "pathlens" in done.stdout and "run" in done.stdout


def test_table(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(80, 2))
    lines = [f"{a};{b};{'yes' if a > b else 'no'};{i}".replace(".", ",") for i, (a, b) in enumerate(x)]
    Path("t.csv").write_text("\n".join(["a;b;kind;id", *lines]) + "\n", encoding="utf-16")
    text = invoke("table", "t.csv", "--target", "kind", "--drop", "id", "--rows", "60", "--out", "page.html")
    assert "numbers read with decimal commas: a, b" in text
    assert "45 rows fitted" in text and "accuracy on 15 held out" in text and "gradient boosting" in text
    page = Path("page.html").read_text(encoding="utf-8")
    assert "kind, from t.csv" in page and "of 60 of 80 rows" in page and "What would have to be different" in page
    assert "Did you mean 'kind'" in invoke("table", "t.csv", "--target", "kin", code=1)
    assert "column to drop 'c'" in invoke("table", "t.csv", "--target", "kind", "--drop", "c", code=1)
    assert "not numeric" in invoke("table", "t.csv", "--target", "kind", "--kind", "regression", code=1)
    for name in ("none.csv", "empty.csv"):
        Path("empty.csv").write_text("")
        assert "cannot be read as a table" in invoke("table", name, "--target", "kind", code=1)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The table that `pathlens table` reads from the bytes of a file, and what it prints; nothing is fitted."""
    from pathlens.estimators import frames

    def reader(data: bytes, name: str = "t.csv", target: str = "kind") -> tuple[Any, str]:
        seen = []

        def stop(frame: Any, *_: Any, **__: Any) -> None:
            seen.append(frame)
            raise OptionError("Enough was seen.")

        monkeypatch.setattr(frames, "fit_table", stop)
        Path(name).write_bytes(data)
        text = invoke("table", name, "--target", target, code=1)
        assert "Enough was seen" in text
        return seen[0], text

    return reader


ROWS = [(1.5, "Köln"), (20.25, "Rome"), (-0.125, "Köln")]


def written(separator: str, comma: bool = False) -> str:
    cells = [(f"{size}".replace(".", "," if comma else "."), city) for size, city in ROWS]
    return "\r\n".join(separator.join(row) for row in [("größe", "kind"), *cells]) + "\r\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252"])
@pytest.mark.parametrize(("separator", "comma"), [(",", False), (";", False), (";", True), ("\t", True), ("|", False)])
def test_tables_of_any_program(read: Any, encoding: str, separator: str, comma: bool) -> None:
    frame, text = read(written(separator, comma).encode(encoding))
    assert list(frame.columns) == ["größe", "kind"]
    assert frame["größe"].tolist() == [1.5, 20.25, -0.125] and frame["kind"].tolist() == ["Köln", "Rome", "Köln"]
    assert ("read as Windows-1252" in text) == (encoding == "cp1252")
    assert ("decimal commas: größe" in text) == comma


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zip"])
def test_compressed_tables(read: Any, suffix: str) -> None:
    import bz2
    import gzip
    import io
    import lzma
    import zipfile

    data, packed = written(";", True).encode("cp1252"), io.BytesIO()
    if suffix == ".zip":
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("t.csv", data)
        found = packed.getvalue()
    else:
        found = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix](data)
    assert read(found, f"t.csv{suffix}")[0]["größe"].tolist() == [1.5, 20.25, -0.125]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            b"a,kind\n1,x\ninf,y\n-inf,x\n",
            "Column 'a' holds inf in row 2 (counted from 1, without the header), 2 infinite",
        ),
        (b"a;kind\n1,234;x\n2,345;y\n", "column 'a' holds '1,234' in row 1"),
        (b"a,b,kind\n1,5,2,5,x\n", "line 2 has 5 cells separated by ',', the header has 3"),
        (b"a,kind\n1,\x81\n", "line 2 is not text in"),
        ("a,kind\n1,x\n".encode("utf-16-le"), "a zero byte, as in UTF-16 without a byte-order mark"),
        (b"\xff\xfea\x00,", "is not text in utf-16"),
    ],
)
def test_tables_that_cannot_be_read_say_where(data: bytes, words: str) -> None:
    Path("t.csv").write_bytes(data)
    text = invoke("table", "t.csv", "--target", "kind", code=1)
    assert words in text and "Traceback" not in text


def test_an_infinite_number_in_a_column_that_is_dropped(read: Any) -> None:
    Path("t.csv").write_bytes(b"a,b,kind\n1,inf,x\n2,1,y\n")
    text = invoke("table", "t.csv", "--target", "kind", "--drop", "b", code=1)
    assert "too few" in text


def test_commas_in_words_beside_decimal_points_stay_words(read: Any) -> None:
    frame, text = read(b"a;b;kind\n1.5;1,2;x\n2;3,45;y\n")
    assert frame["b"].tolist() == ["1,2", "3,45"] and "columns with commas read as text, because a has" in text


def test_thousands_with_points_and_decimal_commas(read: Any) -> None:
    frame, _ = read(b"a;b;kind\n1.234,5;1,234;x\n-2;;y\n+,5;12,5e-1;x\n")
    np.testing.assert_array_equal(frame["a"], [1234.5, -2.0, 0.5])
    np.testing.assert_array_equal(frame["b"], [1.234, np.nan, 1.25])
