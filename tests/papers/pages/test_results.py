"""The table of results: complete, up to date, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pathlens.cli import results_text
from pathlens.errors import ArtifactError
from pathlens.papers.artifact import Artifact, load_folder
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import names
from pathlens.papers.pages import Entry, not_run, results_page, write_page

ROOT = Path(__file__).parents[3]
ENTRIES = [Entry("hs.fig2", "Half", "a | b"), Entry("hs.tab2", "Half", "x", "4 h, 5e17 operations")]
CLAIM = Claim(
    "less",
    below=0.4,
    null=0.5,
    null_text="none",
    measured=(0.1, 0.2, 0.3, 0.4, None),
    row="A_1",
    unit="*share*",
    paper="<about> .2",
)


def artifact(**changes: object) -> Artifact:
    return Artifact(
        **{
            "name": "hs.fig2",
            "title": "Circle",
            "paper": "Half",
            "scale": "paper",
            "claims": (CLAIM,),
            "seeds": (0, 1, 2),
            "config": {"epochs": 3},
            "created": "2026-01-31T12:00:00+00:00",
            "duration_seconds": 96.2,
            "environment": {"device": "cuda", "gpu": "Card 9"},
            "paper_numbers": {"epochs": {"relu": 200}},
        }
        | changes
    )  # type: ignore[arg-type]


def test_every_experiment_has_an_artifact_or_a_reason() -> None:
    run, excused = {found.name for found in load_folder(ROOT / "results")}, set(not_run(ROOT / "results"))
    assert not run & excused
    assert run | excused <= set(names())
    stored = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert [name for name in names() if f"`{name}`" not in stored] == []


def test_the_table_is_up_to_date() -> None:
    stored = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert stored == results_text(ROOT / "results"), "run `pathlens results`"


def test_the_readme_tells_the_numbers_of_the_artifact() -> None:
    best = next(found for found in load_folder(ROOT / "results") if found.name == "hs.best")
    rows = {
        "ReLU": "relu",
        "ReLU on the code": "encoded_relu",
        "ReLU, taught by a ReLU network": "taught_relu",
        "DLGN on the code, taught by a ReLU network": "encoded_taught",
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sizes = dict(zip(rows, (11.2, 11.2, 11.2, 22.4)))
    for label, key in rows.items():
        epochs = best.arrays[f"history_{key}"].shape[1] - 1
        accuracy = best.arrays[f"hard_{key}"].mean()
        assert f"| {label} | {epochs} | {sizes[label]} M | {accuracy:.1f} % |" in text
    pixels, code, taught = best.metrics["accuracy on held-out training images"].values()
    assert f"the code gained {code - pixels:.1f} points and the teacher {taught - code:.1f}." in text
    guide = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split())
    relu, encoded, likewise, chosen = (best.arrays[f"hard_{key}"].mean() for key in rows.values())
    assert (
        f"hard at test time, reaches {chosen:.1f} %. With the same {epochs} epochs, a ReLU network reaches {relu:.1f}, "
        f"on the same code {encoded:.1f}, and with the same teacher {likewise:.1f} (means"
    ) in guide
    held_out = (
        f"{taught:.1f} with the teacher, {code:.1f} from labels, and {pixels:.1f} from labels without the code (one"
    )
    assert held_out in guide
    assert sorted({round(count / 1e6, 1) for count in best.metrics["parameters"].values()}) == [11.2, 22.4]


def test_a_row_says_when_where_and_how_long() -> None:
    text = results_page(ENTRIES, [artifact()], {"hs.tab2": "needs a GPU"})
    assert (
        "| [`hs.fig2`](#hsfig2) | a \\| b | **cannot tell** | 0 of 1 reproduced | 3 | 2026-01-31 | Card 9 | 1.6 min |"
    ) in text
    assert "| `hs.tab2` | x | not run: needs a GPU (expected: 4 h, 5e17 operations) | | | | | |" in text
    assert (
        "| A\\_1: less \\[\\*share\\*\\] | **cannot tell** | 0.25 ± 0.13 | 0.25 (0.1–0.4), 1 missing | below 0.4 | "
        "0.5 (none) | \\<about> .2 |"
    ) in text
    assert "\nThe paper's numbers:\n\n| epochs | paper |\n| --- | --- |\n| relu | 200 |\n" in text
    counts = "(0 reproduced, 0 not reproduced, 1 cannot tell) and 0 at smaller ones; 1 was not run."
    assert f"1 were run at the paper's sizes {counts}" in text


def test_a_remark_stands_with_its_experiment_and_with_no_other() -> None:
    text = results_page(ENTRIES, [artifact()], {"hs.tab2": "needs a GPU"}, {"hs.fig2": "made of *two* pieces"})
    assert text.count("**Remark:** made of \\*two\\* pieces") == 1
    with pytest.raises(ArtifactError, match=r"hs\.tab2: there is a remark and no artifact"):
        results_page(ENTRIES, [artifact()], {"hs.tab2": "needs a GPU"}, {"hs.tab2": "odd"})


def test_what_is_reduced_says_in_what() -> None:
    text = results_page(ENTRIES, [artifact(paper_config={"epochs": 9, "seeds": 3})], {"hs.tab2": "needs a GPU"})
    assert "**cannot tell**, REDUCED |" in text and "REDUCED: epochs 3 (paper 9)." in text
    assert "0 were run at the paper's sizes" in text and "1 at smaller" in text


def test_a_new_experiment_is_listed_as_not_run_yet() -> None:
    text = results_page(ENTRIES, [], {"hs.tab2": "needs a GPU"})
    assert "| `hs.fig2` |" in text and "not run: no run at paper scale yet" in text


@pytest.mark.parametrize(
    ("artifacts", "reasons", "words"),
    [
        ([artifact()], {"hs.tab2": "r", "hs.fig2": "r"}, "hs.fig2: there is an artifact and a reason"),
        ([artifact(), artifact(name="hs.x")], {"hs.tab2": "r"}, "hs.x: there is no experiment"),
    ],
)
def test_what_does_not_add_up_is_named(artifacts: list[Artifact], reasons: dict[str, str], words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        results_page(ENTRIES, artifacts, reasons)


@pytest.mark.parametrize("text", ["no toml at all", 'hs.tab2 = "a name without quotes"', '"hs.tab2" = 3'])
def test_a_file_of_reasons_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "not-run.toml").write_text(text)
    with pytest.raises(ArtifactError, match=r"not-run\.toml"):
        not_run(tmp_path)


def test_means_over_seeds_stand_in_tables() -> None:
    told = {"mean": 72.0, "sd": 2.8, "seeds": [70.0, 74.0]}
    text = results_page(
        ENTRIES,
        [artifact(metrics={"accuracy": {"A|B": {"test": told}, "C": {"train": told}}})],
        {"hs.tab2": "needs a GPU"},
    )
    assert (
        "\nMeasured:\n\n| accuracy | test | train |\n| --- | --- | --- |\n| A\\|B | 72 ± 2.8 | – |\n"
        "| C | – | 72 ± 2.8 |\n"
    ) in text


def test_a_reduced_run_says_what_is_met_and_what_was_not_measured() -> None:
    met, not_met, open_ = CLAIM.measure([0.1, 0.2, 0.3]), CLAIM.measure([0.5, 0.5, 0.6]), CLAIM.measure([None] * 3)
    reduced = artifact(claims=(met, not_met, open_), paper_config={"epochs": 9})
    text = results_page(ENTRIES, [reduced], {"hs.tab2": "needs a GPU"})
    assert "| **not reproduced**, REDUCED | 1 of 2 met, 1 not measured | 3 |" in text
    assert "| **cannot tell** (met, but REDUCED) | 0.2 ± 0.1 |" in text
    assert "| **not reproduced** | 0.533 ± 0.058 |" in text
    assert "| **cannot tell** (not measured) | – | –, 3 missing |" in text


def test_the_page_lists_what_was_not_run_and_marks_what_is_reduced(tmp_path: Path) -> None:
    reduced = artifact(name="hs.fig9", paper_config={"epochs": 9})
    quick = artifact(name="hs.fig9", scale="quick")
    text = write_page(
        [reduced, quick], tmp_path, not_run={"hs.tab2": "needs <a> GPU"}, remarks={"hs.fig9": "two <b> pieces"}
    ).read_text()
    assert text.count("two &lt;b&gt; pieces") == 1  # at paper scale alone
    assert "needs &lt;a&gt; GPU</span>" in text and text.count(">not run<") == 1
    assert '<span class="chip">REDUCED</span>' in text and "REDUCED: epochs 3 (paper 9)" in text
    assert "Figure 9 of the Half paper · <code>hs.fig9</code> · 2026-01-31 · Card 9 · 1.6 min" in text
    assert "mean 0.25 ± 0.13" in text
