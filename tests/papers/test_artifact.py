"""Artifacts: verdicts follow from numbers, files survive crashes, and nothing damaged or edited is believed."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathlens.errors import ArtifactError, OptionError
from pathlens.files import with_checksum
from pathlens.papers import artifact as artifacts
from pathlens.papers.artifact import Artifact, load, load_folder
from pathlens.papers.claim import ORIGINS, Claim, Deviation, combine_verdicts

NAN, INF = math.nan, math.inf


def claim(**changes: object) -> Claim:
    return Claim(**{"text": "more on top", "threshold": 2.0, "comparison": ">", "null": 1.0, **changes})


def full() -> Artifact:
    return Artifact(
        "hs.fig3",
        "Paths",
        "half-space",
        "quick",
        config={"width": np.int64(16), "hidden": (16, 16)},
        seeds=[0, 1, 2],
        claims=[claim(measured=[3, np.float32(4), INF], row="ReLU", unit="×")],
        metrics={"loss": [0.5, NAN, INF, -INF], "n": np.float64(2.5), "flag": np.bool_(True), "none": None},
        paper_config={"width": 16},
        paper_numbers={"β": 4},
        deviations=[Deviation("a", "b", "c", "d")],
        gates={"kernel": "hard", "loss": "soft β=4"},
        arrays={"k": np.eye(3, dtype=np.float32), "e": np.arange(3)},
        duration_seconds=1.5,
        created="2026-01-31T12:00:00+00:00",
        environment={"device": "cpu"},
    )


# --- verdicts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ([3, 4, 5], "reproduced"),
        ([3, 3, 3, 3, 1], "reproduced"),  # 4 of 5
        ([3, 3, 3, 1, 1], "cannot tell"),
        ([1, 1, 1, 1, 3], "not reproduced"),
        ([1, 0.5, 2.0], "not reproduced"),  # the threshold itself is not above it
        ([INF, INF, INF], "reproduced"),
        ([-INF, -INF, -INF], "not reproduced"),
        ([3, 3, 3, 3, None], "reproduced"),
        ([3, 3, 3, None, None], "cannot tell"),  # missing seeds help nobody
        ([1, 1, 1, NAN, NAN], "cannot tell"),
        ([1, 1, 1, 1, NAN], "not reproduced"),
        ([3, 3], "cannot tell"),  # too few
        ([3, 3, None], "cannot tell"),
        ([NAN, NAN, NAN], "cannot tell"),
        ([], "cannot tell"),
    ],
)
def test_verdict_follows_from_the_values(measured: list[float | None], verdict: str) -> None:
    assert claim(measured=measured).verdict == verdict


@pytest.mark.parametrize(
    ("comparison", "null", "at_threshold"),
    [
        (">", 1, False),
        (">=", 1, True),
        ("<", 3, False),
        ("<=", 3, True),
    ],
)
def test_each_comparison_at_its_threshold(comparison: str, null: float, at_threshold: bool) -> None:
    assert claim(comparison=comparison, null=null, measured=[2.0]).met == (at_threshold,)


def test_one_value_decides_what_has_no_randomness() -> None:
    assert claim(measured=[3], needs=1).verdict == "reproduced"


@given(st.lists(st.one_of(st.none(), st.floats()), max_size=12), st.floats(0.51, 1))
def test_verdicts_are_sound(values: list[float | None], agree: float) -> None:
    measured = claim(measured=values, agree=agree)
    met, missed = measured.met.count(True), measured.met.count(False)
    if measured.verdict == "reproduced":
        assert met >= agree * len(values) - 1e-6 and met > missed
    if measured.verdict == "not reproduced":
        assert missed >= agree * len(values) - 1e-6 and missed > met


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_spread_agrees_with_numpy(values: list[float]) -> None:
    spread = claim(measured=values).spread
    assert spread.median == pytest.approx(float(np.median(values)))
    assert (spread.low, spread.high, spread.count) == (min(values), max(values), len(values))


def test_spread_with_infinities_and_gaps() -> None:
    spread = claim(measured=[INF, 3, None, INF, INF]).spread
    assert (spread.median, spread.low, spread.high, spread.count, spread.missing) == (INF, 3, INF, 4, 1)
    assert claim(measured=[None]).spread.median is None
    assert claim(measured=[-INF, INF]).spread.median is None


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": NAN},
        {"null": NAN},
        {"threshold": INF},
        {"null": "one"},
        {"threshold": True},
        {"comparison": "=="},
        {"null": 2.5},
        {"agree": 0.5},
        {"needs": 0},
        {"measured": ["3"]},
        {"measured": [True]},
    ],
)
def test_claims_that_cannot_be_decided_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="more on top"):
        claim(**changes)


def test_a_claim_without_threshold_or_null_is_refused() -> None:
    with pytest.raises(OptionError, match="needs a finite threshold"):
        Claim("x", comparison=">", null=1)
    with pytest.raises(OptionError, match="needs a finite null"):
        Claim("x", above=1)
    with pytest.raises(OptionError, match="above, below, at_least"):
        Claim("x", null=1)
    with pytest.raises(OptionError, match="2 thresholds"):
        Claim("x", above=1, at_most=2, null=1)


@pytest.mark.parametrize(
    ("word", "comparison"), [("above", ">"), ("below", "<"), ("at_least", ">="), ("at_most", "<=")]
)
def test_each_word_for_a_threshold_is_a_comparison(word: str, comparison: str) -> None:
    null = 1.0 if word in ("above", "at_least") else 3.0
    made = Claim("x", null=null, **{word: 2})
    assert (made.threshold, made.comparison) == (2.0, comparison)
    assert made == Claim("x", threshold=2, comparison=comparison, null=null)


def test_a_reduced_run_reproduces_nothing_at_paper_scale() -> None:
    good = claim(measured=[3, 3, 3])

    def make(scale, width):
        return Artifact(
            "hs.a",
            "t",
            "p",
            scale,
            config={"width": width},
            seeds=[0, 1, 2],
            claims=[good],
            paper_config={"width": 16},
        )

    assert make("paper", 16).verdict == "reproduced"
    assert make("paper", 8).verdict == "cannot tell"
    assert make("paper", 8).reductions == {"width": (8, 16)}
    assert make("quick", 8).verdict == "reproduced" and make("quick", 8).reduced
    bad = dataclasses.replace(make("paper", 8), claims=(claim(measured=[1, 1, 1]),))
    assert bad.verdict == "not reproduced"


def test_fewer_seeds_than_the_paper_is_a_reduction() -> None:
    assert Artifact("hs.a", "t", "p", "quick", seeds=[0], paper_config={"seeds": 5}).reductions == {"seeds": (1, 5)}


def test_one_failure_settles_it() -> None:
    assert combine_verdicts(["reproduced", "cannot tell", "not reproduced"]) == "not reproduced"
    assert combine_verdicts(["reproduced", "reproduced"]) == "reproduced"


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../evil"},
        {"name": "fig2"},
        {"scale": "huge"},
        {"metrics": {1: 2}},
        {"metrics": {"a": object()}},
        {"metrics": {"a": 1j}},
        {"gates": {"k": "firm"}},
        {"gates": {"k": 4}},
        {"arrays": {"k": np.array([object()])}},
        {"arrays": {"a/b": np.zeros(1)}},
        {"arrays": {"file": np.zeros(1)}},
        {"created": "yesterday"},
        {"created": "2026-01-31T12:00:00"},
        {"claims": ["true"]},
        {"config": {"$float": 1}},
        {"metrics": [1]},
    ],
)
def test_what_cannot_be_stored_is_refused_when_made(changes: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        Artifact(**{"name": "hs.fig2", "title": "t", "paper": "p", "scale": "quick", **changes})


# --- on disk ---------------------------------------------------------------------------------------------------


def same(a: Artifact, b: Artifact) -> bool:
    for field in dataclasses.fields(Artifact):
        if field.name != "arrays" and getattr(a, field.name) != getattr(b, field.name):
            return False
    return a.arrays.keys() == b.arrays.keys() and all(
        np.array_equal(a.arrays[k], b.arrays[k]) and a.arrays[k].dtype == b.arrays[k].dtype for k in a.arrays
    )


def test_round_trip(tmp_path: Path) -> None:
    before = full()
    path = before.save(tmp_path / "new" / "folder")
    after = load(path)
    assert same(before, after)
    assert after.metrics == {"loss": [0.5, None, INF, -INF], "n": 2.5, "flag": True, "none": None}
    assert after.config == {"width": 16, "hidden": [16, 16]} and type(after.config["width"]) is int
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    assert json.loads(path.read_text())["claims"][0]["verdict"] == "reproduced"


numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
keys = st.text(max_size=6).filter(lambda key: key != "$float")
nested = st.recursive(
    numbers, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)


@settings(max_examples=40, deadline=None)
@given(metrics=st.dictionaries(keys, nested, max_size=3))
def test_any_nested_metrics_round_trip(metrics: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("a")
    assert load(Artifact("hs.a", "t", "p", "quick", metrics=metrics).save(folder)).metrics == metrics


def test_two_scales_live_side_by_side_and_order_is_natural(tmp_path: Path) -> None:
    for name, scale in (("hs.fig10", "quick"), ("hs.fig2", "quick"), ("hs.fig2", "paper"), ("dgn.tab4", "quick")):
        Artifact(name, "t", "p", scale).save(tmp_path)
    found = [(a.name, a.scale) for a in load_folder(tmp_path)]
    assert found == [("dgn.tab4", "quick"), ("hs.fig2", "paper"), ("hs.fig2", "quick"), ("hs.fig10", "quick")]


def test_saving_again_replaces_and_leaves_no_litter(tmp_path: Path) -> None:
    full().save(tmp_path)
    path = dataclasses.replace(full(), arrays={"k": np.zeros(2)}).save(tmp_path)
    assert load(path).arrays["k"].shape == (2,)
    assert len(list(tmp_path.iterdir())) == 2
    full().save(tmp_path)
    full().save(tmp_path)  # equal arrays have an equal name: they must not delete themselves
    assert same(load(path), full()) and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("survives", [0, 1])
def test_a_crash_while_saving_keeps_the_previous_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    path = full().save(tmp_path)
    renames = []
    real = os.replace

    def failing(source: Path, target: Path) -> None:
        renames.append(target)
        if len(renames) > survives:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(ArtifactError, match="No space left on device"):
        dataclasses.replace(full(), arrays={"k": np.zeros(2)}).save(tmp_path)
    monkeypatch.undo()
    assert same(load(path), full())
    assert not list(tmp_path.glob(".*.part"))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        full().save(tmp_path / "file")


def edit(path: Path, **changes: object) -> None:
    """Change entries and the checksum with them, as somebody who wants to deceive would."""
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != "checksum"}
    path.write_text(json.dumps(with_checksum({**content, **changes})))


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (3, "newer Pathlens"),
        (1, "again"),
        (0, "again"),
        (None, "again"),
        ("2", "again"),
    ],
)
def test_unknown_versions_are_refused(tmp_path: Path, version: object, remedy: str) -> None:
    path = full().save(tmp_path)
    edit(path, schema=version)
    with pytest.raises(ArtifactError, match=f"schema version.*{remedy}"):
        load(path)


def test_every_truncation_of_the_json_is_noticed(tmp_path: Path) -> None:
    path = full().save(tmp_path)
    whole = path.read_bytes().rstrip()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match=path.name):
            load(path)
        assert path.read_bytes() == whole[:length]  # untouched


def test_damaged_or_missing_arrays_are_noticed_and_left_alone(tmp_path: Path) -> None:
    path = full().save(tmp_path)
    arrays = next(tmp_path.glob("*.npz"))
    whole = arrays.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for broken in (whole[:-1], b"", bytes(flipped)):
        arrays.write_bytes(broken)
        with pytest.raises(ArtifactError, match=r"SHA-256.*truncated or was replaced"):
            load(path)
        assert arrays.read_bytes() == broken
    arrays.unlink()
    with pytest.raises(ArtifactError, match=arrays.name):
        load(path)


def test_pickled_arrays_are_never_opened(tmp_path: Path) -> None:
    path = full().save(tmp_path)
    buffer = io.BytesIO()
    np.savez(buffer, k=np.array([{"evil": 1}], dtype=object))
    (tmp_path / "e.npz").write_bytes(buffer.getvalue())
    edit(path, arrays={"file": "e.npz", "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(), "contents": {}})
    with pytest.raises(ArtifactError, match="not a readable NPZ"):
        load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"arrays": {"file": "../x.npz", "sha256": ""}},
        {"arrays": {"file": "/etc/passwd"}},
        {"arrays": []},
        {"name": 3},
        {"name": "../x"},
        {"metrics": []},
        {"claims": [{"texts": "x"}]},
        {"claims": [3]},
        {"seeds": ["a"]},
        {"seeds": [1.5]},
        {"deviations": [{"paper": "x"}]},
        {"gates": {"k": "firm"}},
        {"verdict": "not reproduced"},
        {"reduced": True},
        {"source": 3},
        {"figures": None},
        {"title": None},
    ],
)
def test_entries_of_the_wrong_kind_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    path = full().save(tmp_path)
    edit(path, **changes)
    with pytest.raises(ArtifactError, match=path.name.replace(".", r"\.")):
        load(path)


@pytest.mark.parametrize("times", [1, -1])  # the verdict of the whole alone, or with that of its claim
def test_an_edited_verdict_is_refused(tmp_path: Path, times: int) -> None:
    path = dataclasses.replace(full(), claims=(claim(measured=[1, 1, 1]),)).save(tmp_path)
    text = path.read_text()
    assert text.count('"verdict": "not reproduced"') == 2
    path.write_text(text.replace('"verdict": "not reproduced"', '"verdict": "reproduced"', times))
    edit(path)
    with pytest.raises(ArtifactError, match="computed, not edited"):
        load(path)


def test_the_edited_verdict_of_one_claim_is_refused(tmp_path: Path) -> None:
    path = full().save(tmp_path)
    claims = json.loads(path.read_text())["claims"]
    edit(path, claims=[{**claims[0], "verdict": "cannot tell"}])
    with pytest.raises(ArtifactError, match="computed, not edited"):
        load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"origin": "hearsay"},
        {"origin": 3},
        {"reduced": 1},
        {"reduced": None},
        {"text": 3},
        {"unit": None},
        {"more": 1},
    ],
)
def test_claims_of_the_wrong_kind_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    path = full().save(tmp_path)
    edit(path, claims=[{**json.loads(path.read_text())["claims"][0], **changes}])
    with pytest.raises(ArtifactError, match=path.name.replace(".", r"\.")):
        load(path)


@pytest.mark.parametrize("missing", ["origin", "reduced"])
def test_claims_without_origin_or_mark_are_refused(tmp_path: Path, missing: str) -> None:
    path = full().save(tmp_path)
    edit(path, claims=[{k: v for k, v in json.loads(path.read_text())["claims"][0].items() if k != missing}])
    with pytest.raises(ArtifactError, match=f"malformed.*{missing}"):
        load(path)


def test_origins_round_trip(tmp_path: Path) -> None:
    claims = [claim(text=str(origin), origin=origin) for origin in (None, *ORIGINS)]
    after = load(dataclasses.replace(full(), claims=claims).save(tmp_path))
    assert [one.origin for one in after.claims] == [None, "paper", "summary", "question", "ours"]
    with pytest.raises(OptionError, match="origin must be one of paper, summary, question, ours, or None"):
        claim(origin="hearsay")


def test_rows_carry_the_mark_of_the_whole(tmp_path: Path) -> None:
    rows = [claim(row=row, measured=[3, 3, 3]) for row in ("ReLU", "DLGN")]
    made = Artifact(
        "hs.a", "t", "p", "paper", config={"width": 8}, seeds=[0, 1, 2], claims=rows, paper_config={"width": 16}
    )
    path = made.save(tmp_path)
    stored = json.loads(path.read_text())
    assert stored["reduced"] is True and [one["reduced"] for one in stored["claims"]] == [True, True]
    assert [one.reduced for one in load(path).claims] == [True, True]
    assert load(path).save(tmp_path / "again").read_bytes() == path.read_bytes()
    edit(path, claims=[{**stored["claims"][0], "reduced": False}, stored["claims"][1]])
    with pytest.raises(ArtifactError, match="not all of its rows say so"):
        load(path)


def test_one_row_can_be_reduced_alone(tmp_path: Path) -> None:
    rows = [claim(row="ReLU").measure([3, 3, 3]), claim(row="DLGN").measure([3, 3, 3], reduced=True)]
    made = load(Artifact("hs.a", "t", "p", "paper", seeds=[0, 1, 2], claims=rows).save(tmp_path))
    assert [one.reduced for one in made.claims] == [False, True] and not made.reduced
    assert [made.verdict_of(one) for one in made.claims] == ["reproduced", "cannot tell"]
    assert made.verdict == "cannot tell"


def test_no_damage_to_a_committed_artifact_passes_for_another_result(tmp_path: Path) -> None:
    origin = Path(__file__).parents[2] / "results" / "hs.fig6.paper.json"
    before, whole = load(origin), origin.read_bytes()
    file = tmp_path / origin.name
    for arrays in origin.parent.glob("hs.fig6.paper.*.npz"):
        (tmp_path / arrays.name).write_bytes(arrays.read_bytes())
    rng = np.random.default_rng(0)
    digits = [i for i, byte in enumerate(whole) if chr(byte).isdigit()]
    passed = 0
    for k in range(1500):
        damaged = bytearray(whole)
        if k % 2:  # a digit becomes another one
            at = digits[rng.integers(len(digits))]
            damaged[at] = 48 + (damaged[at] - 48 + rng.integers(1, 10)) % 10
        else:
            damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        file.write_bytes(bytes(damaged))
        try:
            after = load(file)
        except ArtifactError:
            continue
        passed += 1
        assert same(after, before), bytes(damaged)
    assert passed < 75, "few changes leave every value as it is: of white space, or of a last digit beyond precision"


def test_an_edit_is_reported_with_its_remedy(tmp_path: Path) -> None:
    path = full().save(tmp_path)
    path.write_text(path.read_text().replace("3.0", "3.5", 1))
    with pytest.raises(ArtifactError, match=r"hs\.fig3.*checksum.*edited or damaged.*copy.*again"):
        load(path)


SAVE_MANY = """
import sys, numpy as np
from pathlens.papers.artifact import Artifact
for k in range(25):
    arrays = {"k": np.array([int(sys.argv[2]), k])}
    Artifact("hs.a", "t", "p", "quick", arrays=arrays).save(sys.argv[1])
"""


def test_two_processes_that_save_at_once_leave_one_whole_artifact(tmp_path: Path) -> None:
    savers = [subprocess.Popen([sys.executable, "-c", SAVE_MANY, str(tmp_path), str(k)]) for k in range(2)]
    assert [saver.wait() for saver in savers] == [0, 0]
    assert load(tmp_path / "hs.a.quick.json").arrays["k"][1] == 24
    assert len(list(tmp_path.iterdir())) == 2, "no file is left over"


def test_a_saver_waits_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one begins where it would do harm: between the arrays of the first and the JSON that names them."""
    first, second = (Artifact("hs.a", "t", "p", "quick", arrays={"k": np.full(2, k)}) for k in range(2))
    other = threading.Thread(target=second.save, args=(tmp_path,))
    real = artifacts.write_atomically

    def slow(path: Path, data: bytes) -> None:
        real(path, data)
        if not other.ident:
            other.start()
            other.join(0.3)

    monkeypatch.setattr(artifacts, "write_atomically", slow)
    path = first.save(tmp_path)
    other.join()
    assert same(load(path), second)
    assert len(list(tmp_path.iterdir())) == 2, "no file is left over"


def test_arrays_that_are_too_large_are_refused_when_made() -> None:
    huge = np.broadcast_to(np.zeros(1), 1 << 26)
    with pytest.raises(OptionError, match="268435456 can be stored"):
        Artifact("hs.a", "t", "p", "quick", arrays={"k": huge})


def test_arrays_outside_the_folder_are_never_opened(tmp_path: Path) -> None:
    path = full().save(tmp_path / "inner")
    arrays = next(path.parent.glob("*.npz"))
    entry = json.loads(path.read_text())["arrays"]
    arrays.rename(tmp_path / "outside.npz")
    for name in ("../outside.npz", str(tmp_path / "outside.npz")):
        edit(path, arrays={**entry, "file": name})
        with pytest.raises(ArtifactError, match="does not name a file beside it"):
            load(path)


def test_other_json_is_not_an_artifact(tmp_path: Path) -> None:
    for text in ("[]", "{}", "3", '{"format": "pathlens-artifact", "schema": NaN}', "[" * 100_000):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ArtifactError, match=r"x\.json"):
            load_folder(tmp_path)


def test_a_missing_folder_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="No folder"):
        load_folder(tmp_path / "none")
    with pytest.raises(ArtifactError, match="cannot be read"):
        load(tmp_path / "none.json")


def test_no_torch_is_loaded_by_artifacts_report_and_help() -> None:
    code = (
        "import sys, pathlens.papers.artifact, pathlens.papers.pages, pathlens.papers.experiment, pathlens.cli\n"
        "bad = {'torch', 'matplotlib', 'sklearn', 'scipy'} & set(sys.modules)\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_environment_names_versions_without_loading_them() -> None:
    found = artifacts.environment(device="cpu")
    assert found["device"] == "cpu" and found["numpy"] == np.__version__ and found["cpus"] >= 1
