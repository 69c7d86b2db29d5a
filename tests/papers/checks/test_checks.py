"""Theorems as checks: all of them hold here, and verdicts, names, the command and its page say so."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pathlens import cli
from pathlens.errors import ArtifactError, OptionError, UnknownNameError
from pathlens.papers import checks
from pathlens.papers.checks import initialisation, registry
from pathlens.papers.checks.registry import Check, Comparisons, Result, check, errata_table, perform, select
from pathlens.papers.pages import write_verification
from pathlens.papers.pages.verification import FORMAT, Verification
from pathlens.testing import reference as ref

runner = CliRunner()

#: statements that must be there, whatever else is
STATEMENTS = {
    "hs": "theorem1 theorem2 lemma3 lemma4 union overlap",
    "dgn": "eq1 eq2 eq5 eq6 eq13 features lemma2.1 lemma2.2 lemma2.4 lemma3.1i lemma3.1ii lemma3.1iii lemma4.1 "
    "theorem2.3 theorem2.3v variance galu soft_relu corollary8.1",
    "npf": "prop1.1 prop2.1 prop3.1 prop3.2 prop3.3 prop4.1 lemma2.1 theorem5.1 appendixA appendixA_he appendixA_lecun "
    "vtk pwc",
    "gdln": "eq3 eq5 eq6 eq8 eq9 constant limit eq13 eq18 eq19 eq26 eq27 eq31",
}


@pytest.mark.parametrize("one", select(), ids=lambda c: c.name)
def test_it_holds(one: Check) -> None:
    result = perform(one)
    assert result.verdict != "fails", str(result)
    assert (result.verdict == "holds") == (one.printed is None)


def test_no_statement_is_forgotten() -> None:
    assert {f"{paper}.{one}" for paper, many in STATEMENTS.items() for one in many.split()} <= set(registry.names())


def test_the_reference_side_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(ref.__file__).read_text(encoding="utf-8"))
    imported = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert imported and not any("pathlens" in line for line in imported)


def test_the_page_of_errata_is_up_to_date() -> None:
    page = (Path(__file__).parents[3] / "docs" / "errata.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    results = [perform(one) for one in select() if one.printed is not None]
    assert list(rows) == [result.check.name for result in results]
    for result, line in zip(results, errata_table(results).splitlines()[2:]):
        written = rows[result.check.name].split(" | ")
        assert float(written[3]) == pytest.approx(result.printed_error, rel=0.1)
        assert (written[1], written[4]) == tuple(line.split(" | ")[k] for k in (1, 4))


# --- verdicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "printed", "verdict"),
    [
        (1e-13, None, "holds"),
        (1e-12, None, "holds"),
        (1e-11, None, "fails"),
        (math.nan, None, "fails"),
        (math.inf, None, "fails"),
        (1e-13, 0.5, "printed form wrong, corrected holds"),
        (1e-13, math.nan, "printed form wrong, corrected holds"),
        (1e-13, 1e-13, "fails"),  # the check cannot tell them apart
        (0.5, 0.5, "fails"),
    ],
)
def test_verdict(error: float, printed: float | None, verdict: str) -> None:
    one = Check("hs.x", "x", "x", 1e-12, lambda f: iter([0.0]), lambda: None)
    assert Result(one, error, printed).verdict == verdict
    assert str(Result(one, error, printed)).startswith(verdict)


@pytest.mark.parametrize(
    ("name", "statement", "options", "words"),
    [
        ("hs.new", "x: x", {}, "no mutant"),
        ("hs.new", "x: x", {"printed": lambda: 0}, "or neither"),
        ("hs.new", "x: x\n\nErratum: wrong", {"mutants": {"m": lambda: 0}}, "or neither"),
        ("hs.theorem1", "x: x", {"mutants": {"m": lambda: 0}}, "taken"),
        ("xy.new", "x: x", {"mutants": {"m": lambda: 0}}, "start with one of hs"),
        ("hs.new", "x", {"mutants": {"m": lambda: 0}}, "'Where: claim', got 'x'"),
        ("hs.new", None, {"mutants": {"m": lambda: 0}}, "'Where: claim', got ''"),
    ],
)
def test_a_check_that_checks_nothing_is_refused(name: str, statement: str, options: dict, words: str) -> None:
    def compare(formula: object) -> Comparisons:
        yield 0.0

    compare.__doc__ = statement
    before = registry.names()
    with pytest.raises(OptionError, match=words):
        check(name, tolerance=1.0, formula=lambda: 0, **options)(compare)
    assert registry.names() == before


def test_the_docstring_is_the_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_CHECKS", dict(registry._CHECKS))

    @check("npf.new", formula=lambda: 2.0, printed=lambda: 1.0)
    def new(formula: registry.Formula) -> Comparisons:
        """Lemma 9: two numbers
        are equal: 2 = 2

        Erratum: printed 1
        """
        yield formula(), 2.0
        yield 1e-13
        yield "one remark"

    assert (new.where, new.claim, new.erratum) == ("Lemma 9", "two numbers are equal: 2 = 2", "printed 1")
    found = perform(new)
    assert (found.error, found.printed_error, found.detail) == (1e-13, 0.5, "one remark")
    assert found.verdict == "printed form wrong, corrected holds"
    names = registry.names()
    assert names[names.index("npf.new") + 1].startswith("gdln.")  # without a number, last of its paper


@pytest.mark.parametrize("items", [[math.nan, 0.0], [0.0, math.nan], [(math.nan, 1.0), 0.0]])
def test_an_error_that_is_not_a_number_is_not_lost_among_others(items: list) -> None:
    one = Check("hs.x", "x", "x", 1e-12, lambda f: iter(items), lambda: None)
    assert math.isnan(perform(one).error)


def test_a_new_file_in_the_folder_adds_its_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_CHECKS", dict(registry._CHECKS))
    monkeypatch.setattr(checks, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "pathlens.papers.checks.fresh", raising=False)
    (tmp_path / "fresh.py").write_text(
        "from pathlens.papers.checks.registry import check\n"
        "ORDER = 1.5\n"
        "@check('dgn.fresh', formula=lambda: 1.0, mutants={'two': lambda: 2.0})\n"
        "def fresh(formula):\n"
        "    'Lemma 0: one is one'\n"
        "    yield formula(), 1.0\n"
    )
    checks.load()
    names = registry.names()
    after = names.index("dgn.fresh") + 1
    assert names[after] == "dgn.lemma2.2" and names[after - 2] == "dgn.corollary8.1"


def test_select() -> None:
    assert [c.name for c in select(["npf.prop3.?"])] == ["npf.prop3.1", "npf.prop3.2", "npf.prop3.3"]
    assert [c.name for c in select(["gdln.eq5", "gdln.eq5", "gdln.eq[58]"])] == ["gdln.eq5", "gdln.eq8"]
    assert len(select()) == len(registry.names()) >= 60
    with pytest.raises(UnknownNameError, match=r"Did you mean 'dgn.lemma2.1'"):
        select(["dgn.lema2.1"])


# --- formulas that only the checks use ------------------------------------------------------------------------------


def test_fixed_random_gates_whiten_by_one_power_per_hidden_layer() -> None:
    own, cross = initialisation.frg_overlap(20, 3, 0.6)
    assert cross / own == pytest.approx(0.6**3)


def test_the_overlap_bound_holds_and_is_reached() -> None:
    generator = np.random.default_rng(1)
    for _ in range(50):
        ratio, bound = initialisation.gate_overlap_decay([(generator.random((5, 8)) < 0.6) * 1.0 for _ in range(3)])
        assert ratio <= bound + 1e-12
    same = [np.array([[1, 1, 0], [1, 0, 1]])] * 3
    assert initialisation.gate_overlap_decay(same) == pytest.approx((0.125, 0.125))
    with pytest.raises(ValueError, match="fewer than two inputs"):
        initialisation.gate_overlap_decay([np.zeros((3, 2))])


# --- references ----------------------------------------------------------------------------------------------------


def test_references_of_a_network_done_by_hand() -> None:
    U = [torch.tensor([[1.0, 2], [3, -1]]).double(), torch.tensor([[5.0, 7]]).double()]
    X = torch.tensor([[1.0, 1], [1, -1]]).double()
    gates = ref.hard_gates(U[:-1], X)
    assert [g.tolist() for g in gates] == [[[1, 1], [0, 1]]]
    assert ref.path_values(U).tolist() == [5, 21, 10, -7]  # (input, unit): 00, 01, 10, 11
    assert ref.path_features(U, gates, X).tolist() == [[1, 1, 1, 1], [0, 1, 0, -1]]
    assert ref.gated_output(U, gates, X).tolist() == [29, 28]


def test_all_signs_and_their_mean() -> None:
    assert ref.all_signs(2).tolist() == [[1, 1], [-1, 1], [1, -1], [-1, -1]]
    squares = ref.over_signs(lambda W: (W[0].sum() * W[1].sum()) ** 2, [(2,), (3,)], 0.5)
    assert len(squares) == 32 and float(squares.mean()) == 2 * 3 * 0.5**4


def test_sectors_of_two_half_planes() -> None:
    found = ref.sectors([torch.eye(2).double()], relu=False)
    assert len(found) == 4 and {s.bits[0] for s in found} == {(a, b) for a in (True, False) for b in (True, False)}
    assert all(abs(s.area() - 1) < 1e-14 for s in found)  # quadrants of the box [−1, 1]²
    one = ref.sectors([torch.tensor([[1.0, -0.5]]).double()], relu=False)
    assert len(one) == 2 and all(abs(s.area() - 2) < 1e-14 for s in one)


def test_distance_is_infinite_for_another_shape() -> None:
    assert ref.distance([1.0, 2.0], [1.0]) == math.inf


# --- the command and its page --------------------------------------------------------------------------------------


def test_command(tmp_path: Path) -> None:
    files = tmp_path / "v.json", tmp_path / "page" / "v.html"
    words = ["verify", "gdln.eq5", "npf.lemma*", "--json", str(files[0]), "--html", str(files[1])]
    result = runner.invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert "printed form wrong, corrected holds: gdln.eq5" in result.output
    assert "2 checks in" in result.output and "1 hold, 1 hold in a corrected form, 0 fail" in result.output
    document = json.loads(files[0].read_text(encoding="utf-8"))
    assert [c["name"] for c in document["checks"]] == ["gdln.eq5", "npf.lemma2.1"]
    assert document["checks"][0]["printed_error"] > 1 > document["checks"][0]["error"]
    page = files[1].read_text(encoding="utf-8")
    assert page.count("<li id=") == 2 and "http" not in page and "<script" not in page
    again = write_verification(files[0], tmp_path / "again.html")
    assert again.read_text(encoding="utf-8") == page


def test_command_fails_where_a_check_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = select(["npf.lemma2.1"])[0]
    monkeypatch.setitem(registry._CHECKS, one.name, dataclasses.replace(one, tolerance=-1.0))
    result = runner.invoke(cli.app, ["verify", one.name, "--html", str(tmp_path / "v.html")])
    assert result.exit_code == 1 and "1 fail." in result.output
    assert 'class="chip verdict fails"' in (tmp_path / "v.html").read_text(encoding="utf-8")


def test_a_check_that_raises_has_failed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    one = select(["npf.lemma2.1"])[0]

    def broken(formula: object) -> Comparisons:
        raise ValueError("no such matrix [really]")
        yield

    monkeypatch.setitem(registry._CHECKS, one.name, dataclasses.replace(one, compare=broken))
    assert [r.verdict for r in checks.verify(["npf.lemma2.1", "npf.prop1.1"])] == ["fails", "holds"]
    result = runner.invoke(cli.app, ["verify", "npf.lemma2.1", "npf.prop1.1"])
    assert result.exit_code == 1 and "ValueError: no such matrix [really]" in result.output
    assert "1 hold, 0 hold in a corrected form, 1 fail." in result.output


def test_command_lists_and_refuses() -> None:
    listed = runner.invoke(cli.app, ["verify", "--list", "hs.theorem?"])
    assert listed.exit_code == 0 and len(listed.output.strip().splitlines()) == 2
    assert runner.invoke(cli.app, ["verify", "hs.theorem9"]).exit_code == 1


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"format": "pathlens-artifact", "checks": [{}]},
        {"format": "pathlens-verification", "checks": []},
        {"format": "pathlens-verification", "checks": [{"name": "hs.x"}]},
        {"format": "pathlens-verification", "checks": [3]},
    ],
)
def test_page_refuses_what_is_no_verification(document: dict, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="verify --json"):
        write_verification(document, tmp_path)
    (tmp_path / "v.json").write_text("{", encoding="utf-8")
    with pytest.raises(ArtifactError, match="cannot be read"):
        write_verification(tmp_path / "v.json", tmp_path)


def test_page_shows_an_error_that_is_no_number(tmp_path: Path) -> None:
    one = Result(select(["gdln.eq5"])[0], math.nan, math.inf).document()
    assert one.error is None and one.printed_error is None and one.verdict == "fails"
    page = write_verification(Verification(format=FORMAT, checks=[one]), tmp_path)
    assert page.read_text(encoding="utf-8").count("no finite number") == 2
