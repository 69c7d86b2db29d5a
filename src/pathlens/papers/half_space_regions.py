"""Half-Space Feature Learning: the shapes of path regions (Figures 1 and 8, section 3.1), in one and two inputs.

Figures about kernels on the circle live in half_space_kernels; the circle's training is that of half_space. Torch is
imported inside functions, so that listing the experiments stays quick.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from pathlens.papers import half_space_circle_panels as panels
from pathlens.papers.artifact import Artifact
from pathlens.papers.claim import Claim, Deviation
from pathlens.papers.experiment import Run, checkpoints_in, experiment
from pathlens.papers.half_space_circle import (
    BETA,
    CIRCLE,
    NAMES,
    PAPER,
    SETTINGS,
    SOFT,
    circle_operations,
    train_circle,
)
from pathlens.papers.half_space_shapes import Shapes, shapes

if TYPE_CHECKING:
    from pathlens.training import Runs

MODELS = {m: NAMES[m] for m in ("relu", "dlgn_pwc")}
ROUNDING = 1e-9
GRID = 80  # pixels of a picture of a region; its numbers come from the polygons


def network_at(runs: Runs, member: int, epoch: int) -> Any:
    """A copy of a trained network with the weights it had at a kept epoch, in float64 on the CPU."""
    net = copy.deepcopy(runs.networks[member]).cpu().double()
    moment = runs[member].at_epoch(epoch)
    assert moment.snapshot is not None
    net.load_state_dict(moment.snapshot.state)
    return net


def _pixels(box: float) -> np.ndarray:
    """Middles of the pixels of [−box, box]², rows from top to bottom: (GRID², 2)."""
    at = (2 * (np.arange(GRID) + 0.5) / GRID - 1) * box
    x, y = np.meshgrid(at, at[::-1])
    return np.stack([x.ravel(), y.ravel()], axis=1)


def _picture(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float32).reshape(GRID, GRID)


def _set_layers(module: Any, weights: Sequence[Any], biases: Sequence[Any]) -> None:
    """Write weights and biases into the first linear layers of a module."""
    import torch

    layers = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    with torch.no_grad():
        for layer, weight, bias in zip(layers, weights, biases):
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.copy_(torch.tensor(bias))


# --- figure 1 --------------------------------------------------------------------------------------------------

FIGURE_1 = Deviation(
    paper="two drawn networks; their weights are in the picture alone",
    authors_code="–",
    ours="left: units x, x − 1, x − 2, x − 3 read by one unit with weights 1, −2, 2, −2 and bias −½; "
    "right: units x₁ and x₂ read by one unit with weights 0, 1 and bias ε",
    why="they have the regions that the caption states",
)
CLOSED = Deviation(
    paper="a gate is on where its pre-activation is ≥ 0 (equation 2), > 0 in the overlap kernel",
    authors_code="–",
    ours="> 0 everywhere; regions are open, and at ε = 0 the region is the first quadrant",
    why="behind a ReLU a pre-activation is exactly 0 on whole regions, where ≥ would count gates that pass nothing",
)
INTERVALS = np.array([[0.5, 1.5], [2.5, 3.5]])
_PIECES = Claim(
    "the path through the first units is active on two separate pieces",
    threshold=2,
    comparison=">=",
    null=1,
    null_text="connected, as every DLGN path region",
    paper="[0.5, 1.5] ∪ [2.5, 3.5]",
    unit="pieces",
    needs=1,
)
_ENDS = Claim(
    "they are [0.5, 1.5] and [2.5, 3.5]",
    threshold=ROUNDING,
    comparison="<=",
    null=0.5,
    null_text="other intervals",
    paper="[0.5, 1.5] ∪ [2.5, 3.5]",
    unit="largest |difference| of an end",
    needs=1,
)
_JUMP = Claim(
    "the region jumps from the right half to the first quadrant when ε changes sign",
    threshold=1.9,
    comparison=">",
    null=1.0,
    null_text="it moves with ε",
    paper="'abruptly changes'",
    unit="× (area at ε = 10⁻⁹ / at −10⁻⁹)",
    needs=1,
)
_SMOOTH = Claim(
    "with linear gates of the same weights it does not jump, and is in one piece",
    threshold=1.1,
    comparison="<",
    null=2.0,
    null_text="it jumps as the ReLU network's",
    paper="'an intersection of L − 1 half-spaces'",
    unit="× (area at ε = 10⁻⁹ / at −10⁻⁹), times pieces of the first region",
    needs=1,
)


def two_bumps(kind: str, inputs: int = 1) -> Any:
    """The network of Figure 1, left, reading the first of its inputs; ``kind`` is "relu" or "dlgn"."""
    weights = [[[1.0] + [0.0] * (inputs - 1)] * 4, [[1.0, -2.0, 2.0, -2.0]]]
    return _with_gates(kind, inputs, (4, 1), weights, [[0.0, -1.0, -2.0, -3.0], [-0.5]])


def jumping(kind: str, epsilon: float) -> Any:
    """The network of Figure 1, right."""
    return _with_gates(kind, 2, (2, 1), [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0]]], [[0.0, 0.0], [epsilon]])


def _with_gates(kind: str, inputs: int, hidden: tuple[int, ...], weights: Any, biases: Any) -> Any:
    from pathlens import models

    make = {"relu": models.relu, "dlgn": models.dlgn}[kind]
    net = make(inputs, hidden, bias=True, seed=0).double()
    _set_layers(net.values if kind == "relu" else net.source, weights, biases)
    return net


@experiment(
    "hs.fig1",
    title="Path regions of ReLU networks come in pieces and jump",
    what="two ReLU networks of a few units: a path region of two intervals, and one that jumps with a parameter",
    claims=[_PIECES, _ENDS, _JUMP, _SMOOTH],
    minutes=(0.1, 0.1),
    flops=1e6,
)
def fig1(run: Run) -> Artifact:
    """Figure 1: exact regions on a segment and in a plane, and those of a DLGN with the same gate weights."""
    from pathlens.regions import segment1d, slice2d

    path = (0, 0)
    lines = {kind: segment1d(two_bumps(kind), [0.0], [4.0]).path_region(path) for kind in ("relu", "dlgn")}
    plane = slice2d(two_bumps("relu", 2), box=((0.0, 4.0), (-1.0, 1.0))).path_region(path)
    ends = lines["relu"].ends[..., 0].numpy()
    wrong = float(np.abs(ends - INTERVALS).max()) if ends.shape == INTERVALS.shape else np.inf
    epsilons = 10.0 ** -np.arange(1, 10)

    def region(kind: str, epsilon: float) -> Any:
        return slice2d(jumping(kind, epsilon), box=1.0).path_region(path)

    areas = {
        kind: np.array([[region(kind, sign * e).area for e in epsilons] for sign in (1, -1)])
        for kind in ("relu", "dlgn")
    }
    ratio = {kind: float(area[0, -1] / area[1, -1]) for kind, area in areas.items()}
    x = np.linspace(0.0, 4.0, 401)
    hidden = np.maximum(x[:, None] - np.arange(4.0), 0.0)
    shown = {
        f"region_{kind}_{word}": _picture(region(kind, e).contains(_pixels(1.0)).numpy())
        for kind in areas
        for word, e in (("above", 0.1), ("below", -0.1))
    }
    return Artifact(
        "hs.fig1",
        "Path regions of ReLU networks come in pieces and jump",
        PAPER,
        run.scale,
        {"epsilons": epsilons.tolist(), "path": list(path)},
        (),
        (
            _PIECES.measure([lines["relu"].n_components], row="segment"),
            _PIECES.measure([plane.n_components], row="plane"),
            _ENDS.measure([wrong]),
            _JUMP.measure([ratio["relu"]]),
            _SMOOTH.measure([ratio["dlgn"] * lines["dlgn"].n_components]),
        ),
        {
            "intervals": {kind: found.ends[..., 0].tolist() for kind, found in lines.items()},
            "area in the plane": plane.area,
            "area in [−1, 1]² at ε = 0": {kind: region(kind, 0.0).area for kind in areas},
            "area at ε and at −ε": {kind: area.tolist() for kind, area in areas.items()},
        },
        {},
        {"left": "[0.5, 1.5] ∪ [2.5, 3.5]", "right": "the right half, then the first quadrant"},
        (FIGURE_1, CLOSED),
        {"regions": "hard"},
        {
            "x": x,
            "preactivation": hidden @ [1.0, -2.0, 2.0, -2.0] - 0.5,
            "linear": 3.5 - x,
            "epsilons": epsilons,
            **{f"areas_{kind}": area for kind, area in areas.items()},
            **shown,
        },
        figures=panels.fig1(),
    )


# --- figure 8 --------------------------------------------------------------------------------------------------

FIGURE_8 = Deviation(
    paper="a drawn DLGN with two hidden layers of two units; its weights are letters",
    authors_code="–",
    ours="networks with the default initialisation, one per seed",
    why="what the figure says holds for any weights",
)
_SUM = Claim(
    "each path's value on its region, added up over the four paths, is the network's output",
    threshold=ROUNDING,
    comparison="<=",
    null=0.1,
    null_text="some path counted wrongly",
    paper="Theorem 2, Figure 8",
    unit="largest |difference| / largest |output|",
)
_FOUR = Claim(
    "the four paths are active in four different regions",
    threshold=4,
    comparison=">=",
    null=3,
    null_text="two paths share a region",
    paper="'each active in a different region'",
    unit="regions",
)
_SIDES = Claim(
    "each region is the intersection of two half-spaces, one per layer",
    threshold=2,
    comparison="<=",
    null=4,
    null_text="bounded by all four gates",
    paper="'the intersection of the appropriately coloured half-spaces'",
    unit="most faces of a region",
)
_AREAS = Claim(
    "the polyhedra of the weights and the polygons of the plane agree",
    threshold=ROUNDING,
    comparison="<=",
    null=0.1,
    null_text="different regions",
    paper="–",
    unit="largest |difference| of areas in [−1, 1]²",
)
PATHS = tuple(itertools.product(range(2), repeat=2))


def path_functions(net: Any) -> np.ndarray:
    """The experts of a DLGN with two hidden layers without biases: g_π(x) = row · x, or row · (1, …, 1) for PWC."""
    u1, u2, u3 = (p.detach().numpy() for p in net.values.parameters())
    return np.stack([u3[0, i2] * u2[i2, i1] * u1[i1] for i1, i2 in PATHS])


@experiment(
    "hs.fig8",
    title="A toy DLGN: four paths, their regions and values",
    what="DLGN and DLGN-PWC with two hidden layers of two units: regions and values of all paths",
    claims=[_SUM, _FOUR, _SIDES, _AREAS],
    minutes=(0.1, 0.1),
    flops=1e7,
)
def fig8(run: Run) -> Artifact:
    """Figure 8: every path of a small network, from its weights."""
    import torch

    from pathlens import models
    from pathlens.regions import path_region, slice2d

    sizes = run.sizes_of("hs.fig8")
    points = np.random.default_rng(0).uniform(-1, 1, (sizes["points"], 2))
    errors: dict[str, list[float]] = {"DLGN": [], "DLGN-PWC": []}
    different, sides, apart = [], [], []
    arrays: dict[str, np.ndarray] = {}
    told: dict[str, Any] = {}
    for seed in run.seeds:
        for name, constant in (("DLGN", False), ("DLGN-PWC", True)):
            net = models.dlgn(2, (2, 2), gate="hard", piecewise_constant=constant, seed=seed).double()
            regions = [path_region(net, path) for path in PATHS]
            experts = path_functions(net)

            def told_by_paths(z: np.ndarray) -> np.ndarray:
                """f_π(z)·g_π(z) of every path: (4, n)."""
                g = experts @ (np.ones_like(z) if constant else z).T  # noqa: B023 - used within the iteration alone
                return np.stack([r.contains(z) for r in regions]) * g  # noqa: B023

            with torch.no_grad():
                f = net(torch.from_numpy(points))[:, 0].numpy()
            errors[name].append(float(np.abs(told_by_paths(points).sum(0) - f).max() / np.abs(f).max()))
            if seed == run.seeds[0]:
                stem = "pwc" if constant else "dlgn"
                arrays["region"] = np.stack([_picture(r.contains(_pixels(1.0)).numpy()) for r in regions])
                arrays[f"path_{stem}"] = np.stack([_picture(v) for v in told_by_paths(_pixels(1.0))])
                arrays[f"sum_{stem}"] = arrays[f"path_{stem}"].sum(0)
                told[name] = {
                    f"path {i1 + 1}, {i2 + 1}": {
                        "half-spaces": [f"{a:+.3f} x₁ {b:+.3f} x₂ > 0" for a, b in r.normals.tolist()],
                        "value": f"{g.sum():+.4f}" if constant else f"{g[0]:+.4f} x₁ {g[1]:+.4f} x₂",
                    }
                    for (i1, i2), r, g in zip(PATHS, regions, experts)
                }
        cells = slice2d(net, box=1.0)
        drawn = [cells.path_region(path) for path in PATHS]
        different.append(len({tuple(r.cells.tolist()) for r in drawn}))
        sides.append(max(len(r.facets) for r in regions))
        apart.append(max(abs(a.area - b.volume(1.0)) for a, b in zip(drawn, regions)))
    return Artifact(
        "hs.fig8",
        "A toy DLGN: four paths, their regions and values",
        PAPER,
        run.scale,
        sizes,
        run.seeds,
        (
            *(_SUM.measure(e, row=name) for name, e in errors.items()),
            _FOUR.measure(different),
            _SIDES.measure(sides),
            _AREAS.measure(apart),
        ),
        {f"seed {run.seeds[0]}": told},
        {},
        {},
        (FIGURE_8,),
        {"regions and values": "hard"},
        arrays,
        figures=panels.fig8(PATHS),
    )


# --- section 3.1: activation-pattern and path regions ----------------------------------------------------------

FORMAL = Deviation(
    paper="path regions are 'lesser in number (m^L vs 2^(mL))' with L − 1 hidden layers",
    authors_code="–",
    ours="exponents m^(L−1) and 2^(m(L−1)); and both counted where they are not empty: different path regions against "
    "activation regions",
    why="almost all of the 2^(m(L−1)) patterns are empty in the plane, so the formal numbers compare nothing",
)
FACES = Deviation(
    paper="'DLGN active path regions have L faces as opposed to activation pattern regions having mL faces'",
    authors_code="–",
    ours="at most L − 1 and m(L − 1); counted on the polygons inside the box",
    why="one half-space per hidden layer; most of them are redundant",
)
BIASED = Deviation(
    paper="networks without biases",
    authors_code="–",
    ours="also networks with biases, narrower, so that every path region can be told from every other",
    why="without biases all regions of the plane are sectors with two faces, which cannot show what a face is worth",
)
_CONVEX = Claim(
    "all path regions of a DLGN are convex and in one piece",
    threshold=1.0,
    comparison=">=",
    null=0.9,
    null_text="some are not, as of ReLU networks",
    paper="'convex polyhedra'",
    unit="share of regions, the smaller of init and end",
)
_BENT = Claim(
    "path regions of a trained ReLU network are not all convex",
    threshold=0.0,
    comparison=">",
    null=0.0,
    null_text="as simple as a DLGN's",
    paper="'can represent complex shapes'",
    unit="share of regions not convex",
)
_FEW_FACES = Claim(
    "a DLGN's path region has at most one face per hidden layer",
    threshold=5,
    comparison="<=",
    null=80,
    null_text="one for every gate",
    paper="L faces",
    unit="most faces of a path region",
)
_SIMPLER = Claim(
    "path regions have fewer faces than activation regions (networks with biases)",
    threshold=1.0,
    comparison="<",
    null=1.0,
    null_text="as many",
    paper="'simpler structures'",
    unit="× (mean faces, path / activation region)",
)
_FEWER = Claim(
    "there are fewer different path regions than activation regions",
    threshold=1.0,
    comparison="<",
    null=1.0,
    null_text="as many",
    paper="'lesser in number'",
    unit="× (not empty and different, path / activation)",
)
_STEADY = Claim(
    "training does not change the number of activation regions drastically",
    threshold=2.0,
    comparison="<=",
    null=10.0,
    null_text="tenfold",
    paper="'observed … to not change drastically'",
    unit="× (larger / smaller of init and end)",
)


def _biased(run: Run, sizes: dict[str, Any]) -> dict[str, Any]:
    """ReLU and DLGN-PWC with biases on the circle, kept at the start and at the end."""
    from pathlens import models
    from pathlens.data import circle
    from pathlens.training import train

    hidden, epochs = tuple(sizes["biased_hidden"]), sizes["biased_epochs"]
    patterns = {
        "relu": models.relu(2, hidden, bias=True),
        "dlgn_pwc": models.dlgn(2, hidden, piecewise_constant=True, beta=BETA, bias=True),
    }
    return {
        model: train(
            net,
            circle(sizes["points"]),
            epochs=epochs,
            lr=sizes["biased_lr"],
            batch_size=sizes["batch_size"],
            seeds=run.seeds,
            keep=[0, epochs],
            device=run.device,
            checkpoints=checkpoints_in(run.checkpoint("circle", "biases", model), every=50),
            progress=functools.partial(run.progress, f"{NAMES[model]} with biases"),
        )
        for model, net in patterns.items()
    }


@experiment(
    "hs.regions",
    title="Activation-pattern regions and path regions",
    what="counts, faces, connectedness and convexity of regions in the plane: ReLU and DLGN-PWC, init and end",
    claims=[_CONVEX, _BENT, _FEW_FACES, _SIMPLER, _FEWER, _STEADY],
    minutes=(2, 14),
    flops=circle_operations,
    shares="circle",
)
def regions(run: Run) -> Artifact:
    """Section 3.1, counted on the networks of the circle, and on networks with biases."""
    from pathlens.regions import slice2d

    sizes = run.sizes_of("hs.regions")
    c = train_circle(run)
    kinds = {
        f"{NAMES[m]}{tail}": runs
        for tail, group in (("", c.runs), (" with biases", _biased(run, sizes)))
        for m, runs in group.items()
        if m in MODELS
    }
    found: dict[str, dict[str, list[Shapes]]] = {}
    arrays: dict[str, np.ndarray] = {}
    for i, (name, runs) in enumerate(kinds.items()):
        moments = {"init": 0, "end": max(int(m.epoch or 0) for m in runs[0].moments)}
        found[name] = {when: [] for when in moments}
        for when, epoch in moments.items():
            for member in range(len(run.seeds)):
                cells = slice2d(network_at(runs, member, epoch), box=sizes["box"])
                found[name][when].append(shapes(cells, sizes["regions"], seed=run.seeds[member]))
                if member == 0:
                    paths = np.array([float(n) for n in cells.counts])
                    arrays[f"paths_{i}_{when}"] = _picture(paths[cells.locate(_pixels(sizes["box"]))])
            run.progress("regions", 2 * i + (when == "end") + 1, 2 * len(kinds))

    def per_seed(name: str, when: str, what: str) -> np.ndarray:
        return np.array([getattr(one, what) for one in found[name][when]], dtype=float)

    for what in (
        "activation_regions",
        "path_regions",
        "active_paths",
        "activation_faces",
        "path_faces",
        "convex",
        "connected",
    ):
        arrays[what] = np.array([[per_seed(name, when, what) for when in ("init", "end")] for name in kinds])
    relu, dlgn = ([name for name in kinds if name.startswith(start)] for start in ("ReLU", "DLGN"))
    claims = [
        _CONVEX.measure(
            np.minimum(*(np.minimum(per_seed(n, w, "convex"), per_seed(n, w, "connected")) for w in ("init", "end"))),
            row=n,
        )
        for n in dlgn
    ]
    claims += [_BENT.measure(1 - per_seed(n, "end", "convex"), row=n) for n in relu]
    claims += [
        _FEW_FACES.measure(np.maximum(*(per_seed(n, w, "most_path_faces") for w in ("init", "end"))), row=n)
        for n in dlgn
    ]
    claims += [
        _SIMPLER.measure(per_seed(n, "end", "path_faces") / per_seed(n, "end", "activation_faces"), row=n)
        for n in kinds
        if n.endswith("biases")
    ]
    counts = {n: [per_seed(n, w, "activation_regions") for w in ("init", "end")] for n in kinds}
    claims += [_FEWER.measure(per_seed(n, "end", "path_regions") / counts[n][1], row=n) for n in kinds]
    claims += [_STEADY.measure(np.maximum(*counts[n]) / np.minimum(*counts[n]), row=n) for n in kinds]
    layers = {"": sizes["hidden"], " with biases": sizes["biased_hidden"]}
    formal = {
        f"networks{tail}": {"paths": int(np.prod(h)), "log₁₀ of patterns": float(sum(h) * np.log10(2))}
        for tail, h in layers.items()
    }
    return Artifact(
        "hs.regions",
        "Activation-pattern regions and path regions",
        PAPER,
        run.scale,
        sizes,
        run.seeds,
        tuple(claims),
        {
            "formal": formal,
            "mean and standard deviation": {
                n: {
                    w: {
                        k: [float(np.mean(v)), float(np.std(v))]
                        for k in asdict(found[n][w][0])
                        for v in [per_seed(n, w, k)]
                    }
                    for w in found[n]
                }
                for n in found
            },
        },
        {},
        {"number": "m^L against 2^(mL)", "faces": "L against mL"},
        (FORMAL, FACES, BIASED, CIRCLE, SETTINGS),
        {"regions": "hard", "DLGN-PWC was trained with": SOFT["dlgn_pwc"]},
        arrays,
        figures=panels.regions(list(kinds)),
    )
