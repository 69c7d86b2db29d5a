"""Described panels: what is refused, what every kind draws at its edges, and that words and colours come out right."""

from __future__ import annotations

import base64
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pathlens.errors import ArtifactError, OptionError
from pathlens.files import verify_checksum, with_checksum
from pathlens.papers.artifact import Artifact, load
from pathlens.papers.pages import write_page
from pathlens.papers.pages.axes import _log_ticks, _tick_texts, draw_band, draw_marks
from pathlens.papers.pages.charts import RENDERERS, Drawn, _names, _rows, draw
from pathlens.papers.pages.palette import COLOURS, drawing, heat_map, heat_png, panel
from pathlens.papers.panels import KINDS, Panel, Series, array_at

NAN, INF = np.nan, np.inf


def drawn(described: Panel | list[Panel], **arrays: Any) -> Drawn:
    panels = [described] if isinstance(described, Panel) else described
    artifact = Artifact("x.y", "t", "p", "quick", arrays={k: np.asarray(v) for k, v in arrays.items()}, figures=panels)
    found = draw(artifact)
    assert found is not None
    parse(found)
    return found


def parse(found: Drawn) -> ET.Element:
    """All panels as one tree: fails on anything that is not well formed."""
    text = "".join("".join(row) for row in found.rows)
    text = re.sub(r"(<img [^>]*)>", r"\1/>", text)  # HTML closes images by itself
    return ET.fromstring(f'<div xmlns:xlink="x">{text}</div>')


def words(found: Drawn) -> str:
    return " ".join(parse(found).itertext())


# --- descriptions ----------------------------------------------------------------------------------------------


def test_a_part_of_an_array_is_named_with_integers_and_colons() -> None:
    a = np.arange(24).reshape(2, 3, 4)
    for text, expected in (
        ("a", a),
        ("a[1]", a[1]),
        ("a[0, :, -1]", a[0, :, -1]),
        ("a[:,2]", a[:, 2]),
        ("a[0].T", a[0].T),
        ("a.T", a.T),
    ):
        assert (array_at({"a": a}, text, "here") == expected).all()


@pytest.mark.parametrize("text", ["", "a[", "a[1:2]", "a.b", "a[x]", "__import__('os')", "a[1]b"])
def test_anything_else_is_no_reference(text: str) -> None:
    with pytest.raises(OptionError, match="does not name an array"):
        Series(text)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (Panel("lines", "t", [Series("b")]), "no array 'b', only a, names, x, cube"),
        (Panel("lines", "t", [Series("a[5]")]), "outside of an array of shape"),
        (Panel("lines", "t", [Series("a")], x="z"), "no array 'z'"),
        (Panel("lines", "t", [Series("a")], x="x[0]"), "does not fit"),
        (Panel("lines", "t", [Series("names")]), "need numbers"),
        (Panel("matrices", "t", [Series("a[0]")]), "need numbers in 2 dimensions"),
        (Panel("fields", "t", [Series("x")]), "need numbers in 2 dimensions"),
        (Panel("points", "t", [Series("a")]), "points need an x"),
        (Panel("points", "t", [Series("a", x="x")]), "does not fit"),
        (Panel("points", "t", [Series("x", x="x", colour_by="a")]), "does not fit"),
        (Panel("matrices", "t", [Series("a")], x="names"), "does not fit"),
        (Panel("stacks", "t", [Series("a")]), "need numbers in 1 dimensions"),
        (Panel("stacks", "t", [Series("a[0]")], background="names"), "does not fit"),
        (Panel("half_spaces", "t", [Series("cube")]), "the last of size 2"),
    ],
)
def test_an_artifact_refuses_panels_that_do_not_fit_its_arrays(described: Panel, message: str) -> None:
    arrays = {"a": np.ones((2, 3)), "names": np.array(["u", "v"]), "x": np.arange(3), "cube": np.ones((2, 3, 3))}
    with pytest.raises(OptionError, match=f"Artifact 'x.y', panel 't'.*{message}"):
        Artifact("x.y", "t", "p", "quick", arrays=arrays, figures=[described])


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "pie"},
        {"series": []},
        {"series": ["a"]},
        {"x_scale": "log2"},
        {"marks": [(NAN, "t")]},
        {"marks": [1.0]},
        {"x": "a b"},
        {"slope": 1.0},
        {"y_scale": "sqrt"},
        {"shade": (1.0,)},
        {"x_ticks": [(0.0, 1)]},
        {"background": "a b"},
    ],
)
def test_descriptions_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="Panel 't'"):
        Panel(**{"kind": "lines", "title": "t", "series": [Series("a")], **options})


def test_descriptions_are_saved_and_read(tmp_path: Path) -> None:
    described = (
        Panel(
            "lines",
            "loss",
            [Series("a", "ReLU", style="dashed"), Series("a[0]", x="x")],
            x="x",
            y_scale="log",
            x_scale="log",
            marks=[(0.5, "half")],
            slope=-1.0,
            ordered=True,
        ),
        Panel("matrices", "m", [Series("a")], note="see"),
    )
    arrays = {"a": np.ones((2, 3)), "x": np.arange(3)}
    path = Artifact("x.y", "t", "p", "quick", arrays=arrays, figures=described).save(tmp_path)
    assert load(path).figures == described
    document = verify_checksum(json.loads(path.read_text()))
    assert document["figures"][1] == {
        "kind": "matrices",
        "title": "m",
        "note": "see",
        "series": [{"values": "a"}],
    }
    for broken in (
        [{"kind": "lines"}],
        [3],
        [{**document["figures"][1], "colour": "red"}],
        [{**document["figures"][1], "kind": "pie"}],
    ):
        path.write_text(json.dumps(with_checksum({**document, "figures": broken})))
        with pytest.raises(ArtifactError, match=r"malformed|invalid entry"):
            load(path)
    del document["figures"]
    path.write_text(json.dumps(with_checksum(document)))
    with pytest.raises(ArtifactError, match="malformed: Object missing required field `figures`"):
        load(path)


def test_every_kind_has_a_renderer() -> None:
    assert set(KINDS) == set(RENDERERS)


# --- edges -----------------------------------------------------------------------------------------------------

VECTORS = {
    "one point": [[3.0]],
    "one seed": [[1.0, 2.0, 3.0]],
    "gaps": [[1.0, NAN, 3.0, NAN], [2.0, NAN, NAN, NAN]],
    "nothing": [[NAN, NAN]],
    "infinite": [[INF, 1.0], [-INF, 2.0]],
    "constant": [[2.0, 2.0, 2.0]],
    "zeros": [[0.0, 0.0]],
    "some zeros": [[0.0, 1e-9, 1.0]],
    "tiny": [[1e-300, 1e-299]],
    "booleans": np.array([[True, False]]),
}
CASES = [("linear", name) for name in ("one point", "gaps", "nothing", "infinite", "constant", "booleans")]
CASES += [("log", name) for name in ("one seed", "one point", "nothing", "infinite", "zeros", "some zeros", "tiny")]


@pytest.mark.parametrize("kind", ["lines", "points", "strips"])
@pytest.mark.parametrize(("scale", "name"), CASES)
def test_charts_of_few_and_missing_values(kind: str, name: str, scale: str) -> None:
    values = np.asarray(VECTORS[name])
    if scale == "log" and name == "infinite":
        values = np.abs(values)
    x = np.arange(values.shape[1]) if kind == "lines" else np.broadcast_to(np.arange(values.shape[1]), values.shape)
    described = Panel(kind, "t", [Series("a", "u")], x="x", x_scale=scale, y_scale=scale, marks=[(1.0, "one")])
    if kind == "strips":
        described = Panel(kind, "t", [Series("a", "u"), Series("a[0]", "v")], x_scale=scale, marks=[(1.0, "one")])
    found = drawn(described, a=values, x=x)
    assert "one" in words(found)
    assert ("not above zero are drawn at the edge" in found.caption) == (
        scale == "log" and ((values == 0).any() or (kind == "points" and (x[np.isfinite(values)] == 0).any()))
    )


MATRICES = (
    [[1.0]],
    [[0.0, 0.0]],
    [[NAN, 1.0], [2.0, NAN]],
    [[NAN]],
    [[-1.0, 2.0]],
    [[1e-9, 1.0]],
    np.eye(3, dtype=int),
)


@pytest.mark.parametrize("matrix", MATRICES)
def test_fields_of_few_and_missing_values(matrix: Any) -> None:
    said = words(drawn(Panel("fields", "t", [Series("a", "first"), Series("a", "last")]), a=matrix))
    assert "first" in said and "last" in said


@pytest.mark.parametrize(
    ("matrix", "scale", "ends"),
    [
        ([[1.0]], "linear", ("0", "1")),
        ([[0.0, 0.0]], "linear", ("0", "1")),
        ([[NAN, 3.0], [2.0, NAN]], "linear", ("0", "3")),
        ([[NAN]], "linear", ("0", "1")),
        ([[-1.0, 2.0]], "linear", ("−2", "2")),
        ([[1e-9, 1.0]], "log", ("0.0001", "1")),
        ([[0.0, 1.0]], "log", ("0.1", "1")),
        ([[NAN]], "log", ("0.1", "1")),
        ([[0.5, 0.5]], "log", ("0.05", "0.5")),
        ([[-1.0, 1.0]], "log", ("0.1", "1")),
    ],
)
def test_matrices_of_few_and_missing_values(matrix: Any, scale: str, ends: tuple[str, str]) -> None:
    found = drawn(Panel("matrices", "t", [Series("a", "u")], y_scale=scale), a=matrix)
    assert tuple(span.text for span in parse(found).iter("span")) == ends


@pytest.mark.parametrize(("kind", "axis"), [("lines", "y_scale"), ("points", "x_scale"), ("strips", "x_scale")])
def test_rounding_below_zero_does_not_cost_the_page(kind: str, axis: str) -> None:
    a = np.array([[1.0, -1e-8], [1.0, 2.0]])
    described = Panel(kind, "loss", [Series("a", x="a" if kind == "points" else "")], **{axis: "log"})  # type: ignore[arg-type]
    found = drawn(described, a=a)
    assert "not above zero are drawn at the edge" in found.caption and "⁻" not in words(found)  # not down to 1e-8
    assert "not above zero" not in drawn(Panel("strips", "t", [Series("a")]), a=a).caption


def test_a_point_without_neighbours_is_a_dot_and_the_line_is_the_median() -> None:
    with drawing():
        _, axes = panel(300, 200)
        values = np.array([[1.0, 2.0, NAN, 7.0], [3.0, 5.0, NAN, 9.0], [INF, 4.0, NAN, 8.0]])
        draw_band(axes, np.arange(4), values, "#000000")
    line, dots = axes.get_lines()
    assert np.array_equal(line.get_ydata(), [2.0, 4.0, NAN, 8.0], equal_nan=True)
    assert dots.get_marker() == "o" and list(dots.get_xdata()) == [3]


def test_many_values_become_a_bar() -> None:
    a = np.random.default_rng(0).standard_normal((5, 40))
    found = drawn(Panel("strips", "t", [Series("a", "many"), Series("a[0]", "few")]), a=a)
    assert "5 to 95 %" in found.caption and "dots are single values" in found.caption
    assert "5 to 95 %" not in drawn(Panel("strips", "t", [Series("a[0]")]), a=a).caption


def test_a_row_that_was_never_reached_says_so() -> None:
    found = drawn(Panel("strips", "t", [Series("a[0]"), Series("a[1]"), Series("a[2]")]), a=[[INF], [NAN], [1.0]])
    assert "not reached" in words(found) and "not measured" in words(found)


def test_large_clouds_are_thinned_and_say_so() -> None:
    a = np.arange(5000.0)
    found = drawn(Panel("points", "t", [Series("a", x="a")]), a=a)
    assert "".join(found.rows[0]).count("<use") < 2100 and "At most 2000 points" in found.caption


def test_unknown_entries_of_a_matrix_are_transparent() -> None:
    from PIL import Image

    with drawing():
        uri = heat_png(np.array([[NAN, 0.0, 0.5, 1.0, 7.0]]), heat_map())
        expected = [tuple(round(255 * c) for c in heat_map()(level)[:3]) for level in (0.0, 0.5, 1.0, 1.0)]
    pixels = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGBA")
    colours = [pixels.getpixel((k, 0)) for k in range(5)]
    assert colours[0][3] == 0  # type: ignore[index]
    assert [c[:3] for c in colours[1:]] == expected  # type: ignore[index]


# --- words, legends, axes --------------------------------------------------------------------------------------


def test_labels_are_escaped_and_dollars_are_dollars() -> None:
    evil = '<script>$x$ & "y"</script>'
    panels = [
        Panel(
            kind,
            evil,
            [Series(array, evil, x="a" if kind == "points" else "")],
            x_label=evil,
            y_label=evil,
            marks=[(1.0, evil)],
            note=evil,
        )
        for kind, (_, most) in KINDS.items()
        for array in [{1: "v", 3: "n"}.get(most, "a")]
    ]
    found = drawn(panels, a=np.arange(1.0, 7.0).reshape(2, 3), v=np.arange(3.0), n=np.ones((2, 3, 2)))
    assert not any("<script" in text for row in found.rows for text in row)
    assert words(found).count(evil) >= 5 * 3
    assert "US$ and $x$" in words(drawn(Panel("lines", "t", [Series("a")], x_label="US$ and $x$"), a=[[1.0]]))


def test_a_name_has_one_colour_in_all_panels_and_one_legend_explains_them() -> None:
    a = np.ones((2, 3))
    both = [Series("a", "ReLU"), Series("a", "GaLU")]
    found = drawn([Panel("lines", "t", both), Panel("lines", "u", both[1:]), Panel("strips", "s", both)], a=a)
    assert words(found).count("GaLU") == 2  # once in the legend, once as a row
    legend = found.rows[0][0]
    assert re.findall(r"var\(--(\w+)\)\"></i>(\w+)", legend) == [("relu", "ReLU"), ("dlgn", "GaLU")]
    second = found.rows[1][1]
    assert "var(--dlgn)" in second and "var(--relu)" not in second
    # where no legend explains the others, each panel has its own
    apart = drawn([Panel("lines", "t", both[:1]), Panel("lines", "u", both[1:])], a=a)
    assert [row.count('class="legend"') for row in apart.rows[0]] == [1, 1]


def test_panels_that_share_no_name_count_colours_afresh() -> None:
    def lines(*labels: str) -> Panel:
        return Panel("lines", "t", [Series("a", label) for label in labels])

    panels = [
        lines("a", "b"),
        lines("x", "y"),
        lines("b", "c"),
        Panel("strips", "t", [Series("a", "z")]),
        lines("c", "d"),
    ]
    first = ("a", "b", "c", "d")
    assert _names(panels) == [first, ("x", "y"), first, (), first]


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_long_lines_are_thinned_and_keep_their_ends(scale: str) -> None:
    a = 2.0 + np.sin(np.arange(20000.0))
    text = drawn(Panel("lines", "t", [Series("a")], x_scale=scale), a=a).rows[0][0]
    assert len(text) < 60_000 and ("10000" in text or "20000" in text)


def test_theory_has_the_colour_of_what_it_explains() -> None:
    series = [Series("a", "w = 5"), Series("a", "w = 9"), Series("b", style="dashed"), Series("b", style="points")]
    text = "".join(drawn(Panel("lines", "t", series), a=np.ones((2, 3)), b=np.arange(3)).rows[0])
    assert text.count("<span>") == 2 and "var(--frozen)" not in text
    ordered = drawn(Panel("lines", "t", series, ordered=True), a=np.ones((2, 3)), b=np.arange(3)).rows[0][0]
    assert "#5a6fd8" in ordered and "#b79a1f" in ordered  # the ends of the scale of order


def test_ids_differ_between_panels_and_no_colour_escapes_the_theme(tmp_path: Path) -> None:
    a = np.random.default_rng(0).random((3, 4))
    panels = [Panel(kind, "t", [Series("a")]) for kind in ("lines", "lines", "fields")]
    text = write_page([Artifact("x.y", "t", "p", "quick", arrays={"a": a}, figures=panels)], tmp_path).read_text()
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert 'class="caption"' in text
    bare = Artifact("x.y", "t", "p", "quick", arrays={"a": a}, figures=panels[2:])
    assert 'class="caption"' not in write_page([bare], tmp_path).read_text()  # nothing to say, no empty paragraph
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)
    figures = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not any(colour in figures for colour in COLOURS.values())


@pytest.mark.parametrize(("count", "rows"), [(1, [1]), (2, [2]), (3, [3]), (4, [2, 2]), (5, [2, 3])])
def test_panels_stand_in_rows(count: int, rows: list[int]) -> None:
    assert [len(row) for row in _rows([Panel("lines", "t", [Series("a")])] * count)] == rows
    assert [len(row) for row in _rows([Panel("fields", "t", [Series("a")])] * 3)] == [2, 1]


def test_a_word_on_a_reference_line_stands_where_the_data_leave_room() -> None:
    with drawing():
        sides = []
        for data in ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]):
            _, axes = panel(300, 200)
            axes.plot([0.0, 1.0, 2.0, 3.0], data)
            axes.set_ylim(-1, 3)
            draw_marks(axes, [(1.0, "word")])
            sides.append(axes.texts[0].get_ha())
    assert sides == ["right", "left"]


def test_ticks_of_logarithmic_axes() -> None:
    assert _tick_texts(_log_ticks(0.002, 300)) == ["0.01", "0.1", "1", "10", "100"]
    assert _tick_texts(_log_ticks(1e-14, 1e-4)) == ["10⁻¹⁴", "10⁻¹²", "10⁻¹⁰", "10⁻⁸", "10⁻⁶", "10⁻⁴"]
    assert _tick_texts(_log_ticks(0.04, 0.6)) == ["0.05", "0.1", "0.2", "0.5"]
    assert _tick_texts(_log_ticks(0.59, 1.1)) == ["0.6", "0.7", "0.8", "0.9", "1"]
    assert _tick_texts(_log_ticks(2.31, 2.36)) == ["2.32", "2.34"]
    assert _tick_texts([2e-7, 1.0]) == ["2·10⁻⁷", "1"]


def test_a_slope_lies_below_the_data_and_is_explained() -> None:
    described = Panel("lines", "t", [Series("a", "u")], x="x", x_scale="log", y_scale="log", slope=1.0)
    assert "slope 1" in words(drawn(described, a=[[1e-3, 1e-2]], x=[0.1, 1.0]))


def test_few_whole_numbers_are_ticks_where_their_labels_have_room() -> None:
    described = Panel("lines", "t", [Series("a")], x="x")
    spaced, crowded = ([0, 5, 10, 17], [0, 1, 2, 5, 10, 100])
    assert "17" in words(drawn(described, a=np.ones((1, 4)), x=spaced)).split()
    ticks = words(drawn(described, a=np.ones((1, 6)), x=crowded)).split()
    assert "1" not in ticks[ticks.index("0") : ticks.index("100")] and "20" in ticks


# --- maps, small charts, half discs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "ends"), [([1.0, -2.0, NAN], ("−2", "2")), ([0.0, 3.0, 1.0], ("0", "3")), ([NAN] * 3, ("0", "1"))]
)
def test_points_are_coloured_by_value_with_a_scale(values: list[float], ends: tuple[str, str]) -> None:
    described = Panel("points", "t", [Series("a", x="a", colour_by="c")], marks=[(0.5, "half")])
    found = drawn(described, a=np.arange(3.0), c=values)
    assert tuple(span.text for span in parse(found).iter("span")) == ends and "half" in words(found)


def test_matrices_on_a_square_root_scale_are_marked_in_rows_and_columns() -> None:
    matrix = np.arange(16.0).reshape(4, 4)
    found = drawn(Panel("matrices", "t", [Series("a")], y_scale="sqrt", marks=[(1.0, "")]), a=matrix)
    assert "square-root scale" in words(found)
    assert [i.get("style") for i in parse(found).iter("i")][:2] == ["left:25.00%", "top:25.00%"]


def test_small_charts_share_a_background_and_stay_within_their_limits() -> None:
    described = Panel(
        "stacks",
        "t",
        [Series("a[0]", "epoch 0", colour="frozen"), Series("a[1]", "epoch 9", colour="frozen")],
        y_limits=(-1.0, 1.0),
        background="b",
        x_ticks=[(0.0, "start"), (2.0, "end")],
        shade=(0.0, 1.0),
    )
    found = drawn(described, a=[[0.0, 1e9, 1.0], [NAN, INF, -5.0]], b=np.zeros(3))
    text = str(found.rows[0][0])
    for word in ("epoch 0", "epoch 9", "start", "end"):
        assert word in words(found)
    assert '<h4><i class="key" style="background:var(--frozen)"></i>t</h4>' in text
    assert "var(--off)" in text and "var(--tint)" in text and "1e9" not in text


def test_half_discs_are_sorted_by_their_angle_to_the_top() -> None:
    angles = np.radians([[200.0, 90.0, 0.0, 100.0]])
    normals = np.stack([np.cos(angles), np.sin(angles)], -1)
    found = drawn(Panel("half_spaces", "t", [Series("a", "now")]), a=normals)
    fills = [path.get("fill") for path in parse(found).iter("path")]
    assert fills == ["var(--top)", "var(--top)", "var(--off)", "var(--off)"] and "now" in words(found)
