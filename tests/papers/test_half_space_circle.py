"""Regions, tangent kernels, fixed kernels and stress tests on the circle, small, against definitions given here."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.spatial import ConvexHull

import pathlens as pl
from pathlens.papers import half_space_failures as failures
from pathlens.papers import half_space_kernels as kernels
from pathlens.papers import half_space_regions as regions
from pathlens.papers import half_space_shapes as shapes
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.pages import write_page
from pathlens.regions import path_region, slice2d

NAMES = ("hs.fig1", "hs.fig8", "hs.regions", "hs.fig4", "hs.spectral", "hs.failures")
SMALL = {
    "points": 32,
    "epochs": {"relu": 200, "dlgn_pwc": 200, "frozen": 1},
    "kernel_points": 32,
    "regions": 25,
    "biased_hidden": [6, 6],
    "biased_epochs": 2,
    "hidden": [8, 8],
    "steps": 4,
    "inputs": 5,
    "bits": [3],
    "frequencies": [4, 8],
    "samples": [16],
    "turns": 1,
    "turn_steps": [4],
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All six, in seconds; either scale runs the same code."""
    run = Run("paper", seeds=(0, 1), out=tmp_path_factory.mktemp("run"), changes=SMALL)
    return {name: perform(find(name), run) for name in NAMES}, run


def test_what_is_smaller_than_the_paper_says_so(done):
    found, _ = done
    assert found["hs.fig1"].verdict == "reproduced" and not found["hs.fig1"].reduced  # has nothing to reduce
    assert all(found[name].reduced and found[name].verdict != "reproduced" for name in NAMES[1:])


def test_they_share_the_training_and_the_kernels(done):
    assert len(done[1]._results) == 2


def test_the_page_is_written(done, tmp_path):
    for artifact in done[0].values():
        artifact.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(artifact.title in page for artifact in done[0].values())


# --- figures 1 and 8 -------------------------------------------------------------------------------------------


def test_areas_of_the_jumping_region(done):
    arrays = done[0]["hs.fig1"].arrays
    e = arrays["epsilons"]
    assert np.allclose(arrays["areas_relu"], [np.full(9, 2.0), 1 - e], atol=1e-12)  # right half; x₁ > 0, x₂ > ε
    assert np.allclose(arrays["areas_dlgn"], [1 + e, 1 - e], atol=1e-12)


@pytest.mark.parametrize("kind", ["relu", "dlgn"])
def test_pictures_show_where_both_gates_are_on(done, kind):
    pixels = regions._pixels(1.0)
    net = regions.jumping(kind, -0.1)
    with torch.no_grad():
        first, second = net.gates(torch.from_numpy(pixels), hard=True).values()
    assert np.array_equal(
        done[0]["hs.fig1"].arrays[f"region_{kind}_below"].ravel() > 0, (first[:, 0] * second[:, 0] > 0).numpy()
    )
    assert (pixels[0] == [-1 + 1 / 80, 1 - 1 / 80]).all()  # the first pixel is top left


def test_paths_of_the_toy_add_up_to_its_output(done):
    x = torch.from_numpy(regions._pixels(1.0))
    for stem, constant in (("dlgn", False), ("pwc", True)):
        net = pl.models.dlgn(2, (2, 2), gate="hard", piecewise_constant=constant, seed=0).double()
        with torch.no_grad():
            assert np.allclose(done[0]["hs.fig8"].arrays[f"sum_{stem}"].ravel(), net(x)[:, 0], atol=1e-6)
        each = pl.paths.values(net, x, list(regions.PATHS)).T
        assert np.allclose(done[0]["hs.fig8"].arrays[f"path_{stem}"].reshape(4, -1), each, atol=1e-6)


# --- shapes ----------------------------------------------------------------------------------------------------


def all_masks(cells):
    """Where each path is active, path by path."""
    sizes = [bits.shape[1] for bits in cells.patterns.values()]
    return {path: cells.active(path).numpy() for path in itertools.product(*map(range, sizes))}


@pytest.mark.parametrize("kind", [pl.models.relu, pl.models.dlgn])
def test_path_regions_are_counted_as_by_enumeration(kind):
    cells = slice2d(kind(2, (4, 3, 4), bias=True, seed=1), box=3.0)
    active = [mask.tobytes() for mask in all_masks(cells).values() if mask.any()]
    found = shapes.path_masks({site: bits.numpy() for site, bits in cells.patterns.items()})
    assert sum(found.values()) == len(active)
    assert len(found) == len(set(active)) < len(active)


def test_faces_of_a_dlgn_are_the_facets_of_its_polyhedra():
    net = pl.models.dlgn(2, (3, 3, 3), bias=True, seed=2).double()
    cells = slice2d(net, box=100.0)  # every corner is inside
    lines, numbers = shapes.borders(cells)
    pairs = cells.neighbours.numpy()
    centres = cells.centres.numpy()
    inner, outer = ((lines[:, :2] * centres[pairs[:, k]]).sum(1) + lines[:, 2] for k in (0, 1))
    assert (inner > 0).all() and (outer < 0).all()
    assert numbers.max() + 1 == 9  # one line per gate
    for path, mask in all_masks(cells).items():
        if mask.any():
            border = mask[pairs[:, 0]] != mask[pairs[:, 1]]
            assert len(np.unique(numbers[border])) == len(path_region(net, path).facets)


@pytest.mark.parametrize("kind", [pl.models.relu, pl.models.dlgn])
def test_convex_means_as_large_as_the_hull(kind):
    cells = slice2d(kind(2, (4, 3, 4), bias=True, seed=1), box=3.0)
    expected, pieces = [], []
    for mask in {mask.tobytes(): (path, mask) for path, mask in all_masks(cells).items() if mask.any()}.values():
        hull = ConvexHull(cells.corners.numpy()[mask[1]].reshape(-1, 2)).volume
        expected.append(hull < cells.areas.numpy()[mask[1]].sum() * (1 + 1e-9))
        pieces.append(cells.path_region(mask[0]).n_components == 1)
    found = shapes.shapes(cells, most=10**6)
    assert (found.convex, found.connected) == (np.mean(expected), np.mean(pieces))
    assert found.looked_at == len(expected) and found.activation_regions == len(cells)
    assert (found.convex == 1) == (kind is pl.models.dlgn)


def test_a_dead_network_has_no_path_regions():
    net = pl.models.relu(2, (2, 2), bias=True)
    with torch.no_grad():
        net.values.linear2.bias.fill_(-100.0)
    found = shapes.shapes(slice2d(net, box=1.0), most=10)
    assert (found.path_regions, found.active_paths) == (0, 0) and math.isnan(found.convex)


def test_two_strips_are_neither_connected_nor_convex():
    cells = slice2d(regions.two_bumps("relu", 2), box=((0.0, 4.0), (-1.0, 1.0)))
    found = shapes.shapes(cells, most=10)
    assert found.path_regions == 4 and found.convex < 1 and found.connected < 1


def test_lines_through_the_origin_give_two_sectors_each(done):
    counts = done[0]["hs.regions"].arrays["activation_regions"]
    assert (counts[1, 0] == 2 * 16).all()  # DLGN-PWC at initialisation, 16 gates without biases


# --- kernels ---------------------------------------------------------------------------------------------------


def test_tangent_kernels_are_those_of_autograd(done):
    _, run = done
    circle, found = regions.train_circle(run), kernels.tangent_kernels(run, SMALL["kernel_points"])
    for model in kernels.MODELS:
        net = regions.network_at(circle.runs[model], 1, 200)
        weights = list(net.parameters())
        rows = [torch.autograd.grad(f, weights, retain_graph=True) for f in net(circle.data.x.double())[:, 0]]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        assert np.allclose(found[model][1, kernels._kept(circle).index(200)], (J @ J.T).numpy(), atol=1e-10)
        f, ours = kernels.linearisation(net, circle.data.x.double())
        assert torch.allclose(ours, J) and torch.allclose(f, net(circle.data.x.double())[:, 0])


def test_alignments_leave_out_the_network_itself(done):
    found, run = done
    K = kernels.tangent_kernels(run, SMALL["kernel_points"])["relu"]
    H = np.eye(32) - 1 / 32
    a, b = (H @ K[s, -1] @ H for s in (0, 1))
    cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    assert np.allclose(found["hs.fig4"].arrays["alignment_ntk_relu"][:, -1], cosine, rtol=1e-5)


def test_flow_is_the_matrix_exponential():
    rng = np.random.default_rng(0)
    A, e = rng.normal(size=(6, 6)), rng.normal(size=6)
    flow = kernels.Flow(A @ A.T, e)
    later = scipy.linalg.expm(-A @ A.T * 0.7 / 6) @ e
    assert np.allclose(flow.error(0.7), later, atol=1e-12)
    assert flow.loss([0.7])[0] == pytest.approx(np.mean(later**2))
    assert flow.loss([flow.time_to(0.1)])[0] == pytest.approx(0.1)
    assert kernels.Flow(np.ones((6, 6)), e).time_to(1e-3) == math.inf  # only the mean can be learned


def test_eigenvalues_by_frequency():
    values, purity, K = kernels.circle_spectrum(32, 5)
    both = np.sort(np.concatenate([values, values[1:-1]]))  # all but 0 and n/2 come twice
    assert np.allclose(both, np.linalg.eigvalsh(K) / 32, atol=1e-12)
    assert purity == pytest.approx(1.0)


def test_the_linearised_network_is_trained_by_plain_adam():
    generator = torch.Generator().manual_seed(3)
    J, f, y = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((12, 5), (12,), (12,)))
    found = kernels.train_linearised(
        [(f, J), (f, 2 * J)], y, (7, 8), epochs=3, lr=0.1, batch_size=5, progress=lambda *_: None, label=""
    )
    w = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    adam, shuffle = torch.optim.Adam([w], lr=0.1), torch.Generator().manual_seed(7)
    losses = [(f - y).square().mean()]
    for _ in range(3):
        for rows in torch.randperm(12, generator=shuffle).split(5):
            adam.zero_grad()
            (f[rows] + J[rows] @ w - y[rows]).square().mean().backward()
            adam.step()
        losses.append((f + J @ w - y).square().mean())
    assert np.allclose(found[0], torch.stack(losses).detach().numpy(), rtol=1e-10)


# --- stress tests ----------------------------------------------------------------------------------------------


class Known(torch.nn.Module):
    """A network that is what it is told to be."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)[:, None]


def test_skill_is_one_for_the_target_and_zero_for_a_constant():
    data = failures.parity(5, 3)
    assert len(data.x) == len(data.x_test) == 16
    assert not {tuple(r) for r in data.x.tolist()} & {tuple(r) for r in data.x_test.tolist()}
    right, wrong = Known(lambda x: x[:, 0] * x[:, 1] * x[:, 2]), Known(lambda x: torch.zeros(len(x)))
    runs = SimpleNamespace(networks=[right, wrong])
    assert failures.skills(runs, data, "parity").tolist() == [1.0, 0.0]
    data = pl.data.circle(64, bottom=6, test_points=96)
    angle = lambda x: torch.atan2(x[:, 1], x[:, 0])  # noqa: E731
    runs = SimpleNamespace(networks=[Known(lambda x: torch.sin(6 * angle(x))), Known(lambda x: 0 * x[:, 0])])
    assert failures.skills(runs, data, "frequency") == pytest.approx([1.0, 0.0], abs=1e-5)  # the fast half alone
    assert failures.skills(runs, data, "samples")[0] < 0.5


def test_turning_moves_the_target_round_the_circle():
    data = pl.data.circle(360, test_points=8)
    moved = failures.turned(data, math.pi / 3)
    assert torch.allclose(moved.x[:300], data.x[60:], atol=1e-6) and torch.equal(moved.y, data.y)


def test_the_second_task_goes_on_from_the_first(done):
    found, run = done
    sizes = run.sizes_of("hs.failures")
    start = pl.data.circle(32, bottom=sizes["easy_frequency"], test_points=failures.TEST_POINTS)
    options = {"epochs": 4, "lr": sizes["lr"], "batch_size": 32, "progress": False}
    options["keep"] = pl.training.Keep(evaluate="running")
    first = pl.train(pl.models.relu(2, (8, 8)), start, seeds=run.seeds, **options)
    second = failures.turned(start, math.pi / 3)
    both = pl.train(first.networks, second, **options)
    skill = failures.skills(both, second, "drift")
    assert np.allclose(found["hs.failures"].arrays["drift_relu"][:, 0], skill, atol=1e-6)


def test_running_again_from_checkpoints_gives_the_same_numbers(done):
    found, run = done
    again = Run(run.scale, seeds=run.seeds, out=run.out, changes=SMALL)
    for name in ("hs.regions", "hs.failures"):
        for key, value in perform(find(name), again).arrays.items():
            assert np.array_equal(value, found[name].arrays[key]), (name, key)
