"""The page: complete, self-contained, honest about gates and verdicts, and clear about artifacts it cannot draw."""

from __future__ import annotations

import dataclasses
import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from docs.opening import opening_picture

from pathlens.errors import ArtifactError, MissingExtraError, OptionError
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim
from pathlens.papers.half_space.fig3 import fig3_panels
from pathlens.papers.pages import headline, write_page
from pathlens.papers.pages.charts import _half_disc, draw
from pathlens.papers.pages.palette import COLOURS, inline_svg
from pathlens.papers.pages.words import read_spread


class Page(HTMLParser):
    """Collects what the tests ask about, and checks that every element that opens also closes."""

    VOID = frozenset({"meta", "img", "path", "circle", "rect", "use", "stop", "image"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.sections: dict[str, str] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(attrs)

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action") and value:
                self.links.append(value)
            if name == "id" and value:
                self.ids.append(value)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="session")
def text(artifacts: list[Artifact], tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_page(artifacts, tmp_path_factory.mktemp("page")).read_text(encoding="utf-8")


def test_nothing_is_loaded_from_outside(text: str) -> None:
    page = Page(text)
    assert page.links
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert not re.search(r"url\((?!['\"]?#)", text)
    assert "@import" not in text and "<script" not in text
    assert not re.search(r"https?://", text)


def test_links_inside_the_page_lead_somewhere(text: str) -> None:
    page = Page(text)
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(page.ids)


def test_all_figures_are_there(text: str, artifacts: list[Artifact]) -> None:
    for artifact in artifacts:
        assert f'<section id="{artifact.name.replace(".", "-")}-quick">' in text
    sections = text.split("<section")[1:]
    assert [section.count("<svg viewBox") for section in sections] == [3, 2, 3, 3]
    assert [section.count("data:image/png;base64") for section in sections] == [0, 6, 0, 0]
    # a half disc for each of 5 layers × 16 neurons, twice
    assert len(re.findall(r'<path d="M[^"]*A9.5', sections[3])) == 160


def test_gates_verdicts_and_numbers_are_shown(text: str) -> None:
    said = " ".join(Page(text).words)
    for words in (
        "loss: soft gates β=4",
        "kernel: hard gates",
        "REDUCED",
        "quick scale",
        "5 seeds",
        "cannot tell",
        "reproduced",
        "needed: below 400",
        "if it were false: 2000",
        "paper: about 200 epochs",
        "2 of 5 meet it, 1 missing",
        "the authors’ code does",
        "sin θ on the top half",
        "torch 2.13.0",
    ):
        assert words in said, words


def test_what_is_said_of_gates_follows_them(tmp_path: Path) -> None:
    gates = {"a": "hard, straight-through β=4 while training", "b": "hard (all open)", "c": "soft β=4", "d": "hard"}
    said = " ".join(Page(write_page([Artifact("x.y", "t", "p", "quick", gates=gates)], tmp_path).read_text()).words)
    for words in ("a: hard gates, straight-through β=4", "b: hard gates (all open)", "c: soft gates β=4", "d: hard g"):
        assert words in said, words


def test_print_shows_what_is_folded_on_the_screen(text: str) -> None:
    """A browser hides a closed <details> by its content, whatever its own display is."""
    printed = text[text.index("@media print") :]
    assert "details::details-content { content-visibility: visible; }" in printed[: printed.index("</style>")]


def test_colours_follow_the_theme(text: str) -> None:
    figures = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not any(colour in figures for colour in COLOURS.values())
    defined = re.findall(r"--([a-z-]+):", text)
    assert set(re.findall(r"var\(--([a-z-]+)\)", text)) <= set(defined)
    assert all(defined.count(name) == 2 for name in COLOURS)  # light and dark


def test_equal_artifacts_give_an_equal_page(artifacts: list[Artifact], tmp_path: Path) -> None:
    half_spaces = [artifacts[3]]
    one = write_page(half_spaces, tmp_path / "a.html").read_bytes()
    assert one == write_page(half_spaces, tmp_path / "b.html").read_bytes()


def test_words_from_artifacts_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>"
    claim = Claim(evil, above=2, null=1, null_text=evil, paper=evil, unit=evil, row=evil, measured=(3, 4, 5))
    artifact = Artifact(
        "x.y",
        evil,
        evil,
        "quick",
        config={evil: evil},
        claims=[claim],
        metrics={evil: [1.5]},
        gates={evil: f"hard {evil}"},
        environment={evil: evil},
        paper_numbers={evil: evil},
        paper_config={evil: 2},
    )
    page = write_page([artifact], tmp_path, title=evil, lead=evil).read_text()
    assert "<script" not in page
    Page(page)


def test_an_experiment_without_a_drawing_still_gets_its_claims(tmp_path: Path) -> None:
    claims = [
        Claim("exact", below=1e-12, null=0.36, measured=(3e-16,), needs=1),
        Claim("open", below=1, null=2),
        Claim("never", above=1, null=0, measured=(np.inf, np.inf, np.inf)),
    ]
    artifact = Artifact("npk.tab2", "Table", "neural path features", "quick", claims=claims)
    assert draw(artifact) is None
    said = " ".join(Page(write_page([artifact], tmp_path).read_text()).words)
    assert "Table 2" in said and "3e-16" in said and "not measured" in said and "not reached" in said
    assert said.count("decided by at least 1 value and 80% of all") == 1


def test_no_artifact_no_page(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no artifact"):
        write_page([], tmp_path)


@pytest.mark.parametrize(
    ("index", "name", "wrong"),
    [
        (0, "y", np.zeros(3)),
        (0, "x", None),
        (0, "loss_relu", np.zeros((0, 7))),
        (1, "kernel_relu", np.zeros((3, 4, 4))),
        (1, "diag_ratio_relu", None),
        (2, "outputs_frozen", np.zeros((3, 3))),
        (3, "normals_end", np.zeros((1, 5, 16, 3))),
        (3, "share_top_end", None),
        (0, "theta", np.zeros(0)),
    ],
)
def test_arrays_that_do_not_fit_are_named(artifacts: list[Artifact], index: int, name: str, wrong: object) -> None:
    arrays = {**artifacts[index].arrays}
    if wrong is None:
        del arrays[name]
    else:
        arrays[name] = wrong  # type: ignore[assignment]
    with pytest.raises(OptionError, match=rf"'{artifacts[index].name}', panel .*'{name}[\[']"):
        dataclasses.replace(artifacts[index], arrays=arrays)


def test_a_figure_without_any_model_is_refused(artifacts: list[Artifact]) -> None:
    arrays = {key: value for key, value in artifacts[0].arrays.items() if not key.startswith("loss")}
    with pytest.raises(OptionError, match="no array 'loss_relu', only theta, x, y"):
        dataclasses.replace(artifacts[0], arrays=arrays)


def test_diverged_runs_and_infinite_ratios_are_drawn(artifacts: list[Artifact]) -> None:
    loss = artifacts[0].arrays["loss_relu"].copy()
    loss[:, 10:] = np.nan
    loss[0, 5] = np.inf
    assert draw(dataclasses.replace(artifacts[0], arrays={**artifacts[0].arrays, "loss_relu": loss}))
    ratio = artifacts[1].arrays["diag_ratio_relu"].copy()
    ratio[:, 3] = np.nan
    ratio[:3, -1] = np.inf
    arrays = {**artifacts[1].arrays, "diag_ratio_relu": ratio}
    drawn = draw(dataclasses.replace(artifacts[1], arrays=arrays, figures=fig3_panels(arrays)))
    assert drawn is not None and "∞" in "".join(drawn.rows[2])


def test_notes_say_what_was_measured(artifacts: list[Artifact]) -> None:
    drawn = draw(artifacts[3])
    last = 100 * artifacts[3].arrays["share_top_end"][:, -1]
    assert drawn is not None and read_spread(last.round(1)) in drawn.rows[0][1]
    first = draw(artifacts[0])
    assert first is not None and "gates frozen &gt;2000" in first.rows[1][0]


def test_half_discs_lie_on_the_side_of_their_normal() -> None:
    # normal up: the arc from the left end to the right end, clockwise, passes over the top
    assert _half_disc(10, 10, 10, np.pi / 2) == "M0.00 10.00A10 10 0 0 1 20.00 10.00Z"
    assert _half_disc(10, 10, 10, 0.0) == "M10.00 0.00A10 10 0 0 1 10.00 20.00Z"  # normal to the right


def test_headline_names_verdict_and_numbers(artifacts: list[Artifact]) -> None:
    assert headline(artifacts[0]) == (
        "Figure 2 (2 of 2 claims reproduced): DLGN-PWC: Learned gates reach a loss of "
        ".01 early: 166 (130–257) epochs, needed below 400"
    )


def test_the_opening_picture(artifacts: list[Artifact], tmp_path: Path) -> None:
    data = opening_picture(artifacts, tmp_path / "p.png").read_bytes()
    assert struct.unpack(">II", data[16:24]) == (2400, 840)
    with pytest.raises(ArtifactError, match=r"hs\.fig6"):
        opening_picture(artifacts[:3], tmp_path / "p.png")
    with pytest.raises(OptionError, match=r"png or \.svg"):
        opening_picture(artifacts, tmp_path / "p.gif")


def test_without_matplotlib_the_remedy_is_named(artifacts: list[Artifact], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pathlens\[plot\]"):
        draw(artifacts[0])


def test_inline_svg_keeps_text_as_text() -> None:
    from matplotlib.figure import Figure

    from pathlens.papers.pages.palette import drawing

    with drawing():
        figure = Figure(figsize=(1, 1))
        figure.text(0.5, 0.5, "angle θ")
        svg = inline_svg(figure, "k", 'a "label"')
    assert "angle θ" in svg and "var(--font)" in svg and "&#34;label&#34;" in svg
    assert "DejaVu" not in svg and "<style" not in svg  # a style element would reach the whole page
