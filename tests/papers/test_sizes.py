"""The list of experiments, their sizes, and the mark REDUCED."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pathlens.papers import PAPERS
from pathlens.papers.artifact import Artifact, load, load_folder
from pathlens.papers.claim import Claim
from pathlens.papers.experiment import Experiment, Run, find, names, perform, select

RESULTS = Path(__file__).parents[2] / "results"
CLAIM = Claim("more", above=2, null=1, needs=1)
# every table, figure and claim that the papers and their summaries have
WANTED = {
    "hs": "fig1 fig2 fig3 fig4 fig5 fig6 fig7 fig8 fig13 early controls spectral regions tab1 tab2 cifar quadratic "
    "failures cost",
    "dgn": "fig1 fig2 fig3 fig4 fig5 fig6 fig7 fig8 fig9 exp6 tab4 fig10 subnetworks conv unfittable",
    "npk": "fig1 tab2 fig3 limits memorise",
    "loc": "activations gdln flips location evolving flow gates dft",
}


def small(**settings: Any) -> Experiment:
    """An experiment that reports these settings."""

    def function(run: Run) -> Artifact:
        return run.artifact(claims=[CLAIM.measure([3.0])], config=settings)

    sizes = {"epochs": (2, 9), "hidden": [4, 4]}
    return Experiment("t.a", "A", "what", (CLAIM,), function, sizes=sizes, seeds=(1, 3))


def test_everything_that_was_wanted_is_there_in_order() -> None:
    found = names()
    assert {f"{paper}.{name}" for paper, words in WANTED.items() for name in words.split()} <= set(found)
    figures = [name for name in found if name.startswith("dgn.fig")]
    assert figures == [f"dgn.fig{i}" for i in range(1, 11)]
    assert [name.partition(".")[0] for name in found] == sorted(
        (name.partition(".")[0] for name in found), key=list(PAPERS).index
    )


@pytest.mark.parametrize("name", names())
def test_every_experiment_has_sizes_and_estimates(name: str) -> None:
    entry = find(name)
    assert 0 < entry.minutes[0] <= 3 and entry.minutes[1] > 0
    flops, minutes = entry.estimate(Run("paper", tuple(range(entry.seed_count("paper")))))
    assert flops is not None and flops > 0, "give flops= to the decorator: operations at paper scale, to one digit"
    assert minutes == pytest.approx(entry.minutes[1])
    # a set that is named in the sizes is a set that is needed
    words = [word for size in entry.sizes_at("paper").values() for word in (size if isinstance(size, list) else [size])]
    wanted = {word.split(",")[0].lower().replace("-", "") for word in words if isinstance(word, str)}
    assert wanted & {"mnist", "fashion_mnist", "cifar10", "cifar100"} <= set(entry.data)


def test_all_of_them_at_quick_scale_fit_an_hour_on_two_cores() -> None:
    assert sum(entry.minutes[0] for entry in select(["all"])) < 2 * 60


def test_a_smaller_run_costs_less() -> None:
    entry = find("hs.fig2")
    assert callable(entry.flops)
    run = Run("paper", seeds=(0, 1, 2, 3, 4), changes={"epochs": {"relu": 100, "dlgn_pwc": 100, "frozen": 800}})
    full, less = entry.estimate(Run("paper", seeds=(0, 1, 2, 3, 4))), entry.estimate(run)
    assert less[0] == pytest.approx(0.1 * full[0]) and less[1] == pytest.approx(0.1 * full[1])  # type: ignore[operator]


def test_one_value_is_for_all_networks_that_have_a_size_each() -> None:
    run = Run("quick", changes={"epochs": 3, "points": 64})
    assert run.sizes_of("hs.fig2")["epochs"] == {"relu": 3, "dlgn_pwc": 3, "frozen": 3}
    assert run.sizes_of("hs.fig2")["points"] == 64


def test_a_run_with_other_sizes_is_reduced() -> None:
    run = Run("paper", seeds=(0, 1, 2), changes={"epochs": 5})
    artifact = perform(small(), run)
    assert artifact.config == {"epochs": 5, "hidden": [4, 4]} and artifact.reductions == {"epochs": (5, 9)}
    assert artifact.verdict == "cannot tell"
    assert perform(small(), Run("paper", seeds=(0, 1, 2))).verdict == "reproduced"
    assert perform(small(), Run("paper", seeds=(0,))).reductions == {"seeds": (1, 3)}
    assert perform(small(hidden=[4, 2]), Run("paper", seeds=(0, 1, 2))).reductions == {"hidden": ([4, 2], [4, 4])}
    assert perform(small(), Run("quick", seeds=(0, 1, 2))).reductions == {"epochs": (2, 9)}


def test_sizes_include_the_number_of_seeds() -> None:
    assert Run("paper", seeds=(0, 1)).sizes_of(small()) == {"epochs": 9, "hidden": [4, 4], "seeds": 2}
    assert (small().seed_count("quick"), small().seed_count("paper")) == (1, 3)


# --- the results that are kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_are_held_against_the_table(path: Path) -> None:
    artifact = load(path)
    rows = Artifact("t.a", "", "", "paper", paper_config=find(artifact.name).sizes_at("paper")).paper_config
    assert artifact.paper_config == rows, "the table has changed: run the experiment again"
    ours = {**artifact.config, "seeds": len(artifact.seeds)}
    smaller = {key for key, value in rows.items() if ours.get(key) != value}
    assert artifact.reduced == bool(smaller) and set(artifact.reductions) == smaller
    if smaller:
        assert artifact.verdict != "reproduced"
        assert all(artifact.verdict_of(claim) != "reproduced" for claim in artifact.claims)


def test_results_measure_the_claims_that_are_registered() -> None:
    for artifact in load_folder(RESULTS):
        stated = {(claim.text, claim.threshold, claim.comparison, claim.null) for claim in artifact.claims}
        for claim in find(artifact.name).claims:
            assert (claim.text, claim.threshold, claim.comparison, claim.null) in stated, (artifact.name, claim.text)
