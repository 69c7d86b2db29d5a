"""Neural path features on image sets, small and on scikit-learn's digits, against definitions written out here."""

import copy

import numpy as np
import pytest
import torch
from torch.func import functional_call, jacrev
from torch.utils.flop_counter import FlopCounterMode

import pathlens as pl
from pathlens.data import DataSet, digits
from pathlens.errors import UnknownNameError
from pathlens.papers.artifact import load_folder
from pathlens.papers.experiment import Run, find, perform
from pathlens.papers.pages import write_page
from pathlens.papers.path_features import fig3, tab2
from pathlens.papers.path_features import image_training as training

SEEDS = (0, 1, 2)
SMALL = {
    "flat_data": "digits",
    "flat_rows": 60,
    "flat_rows_test": 40,
    "image_data": "digits",
    "image_rows": 60,
    "image_rows_test": 40,
    "hidden": [12, 8],
    "channels": [4, 6],
    "dense": [8],
    "batch_size": 20,
    "rates": 5e-3,
    "epochs": 3,
    "stages": [1, 2, 3, 9],
    "value_epochs": 2,
    "kernel_epochs": [1, 3, 9],
    "per_class": [2, 3],
    "binary_hidden": [12, 12],
    "binary_rows": 60,
    "binary_epochs": 3,
    "binary_batch_size": 20,
    "watched": 12,
    "nu_epochs": [0, 1, 3],
    "optimisers": ["adam"],
}


def two_digits(*, flatten=True):
    """Even against odd."""
    full = digits(flatten=flatten)
    sign = [torch.where(y % 2 == 0, 1.0, -1.0)[:, None] for y in (full.y, full.y_test)]
    return DataSet(full.x, sign[0], full.x_test, sign[1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """At paper scale, so that this is the code that runs there; all of it is then REDUCED."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl.data, "binary_mnist", two_digits)
        changes = {**SMALL, "architectures": ["fc", "gconv"]}
        run = Run("paper", SEEDS, changes=changes, out=tmp_path_factory.mktemp("run"))
        yield {name: perform(find(name), run) for name in ("npk.tab2", "npk.fig3")}, run


def claim(artifact, stated, row=""):
    (one,) = [c for c in artifact.claims if c.text == stated.text and c.row == row]
    return np.array([np.nan if v is None else v for v in one.measured])


# --- trainings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["fc-adam", "gconv-adam"])
@pytest.mark.parametrize("model", ["frnpf_ii", "dnpfl"])
def test_accuracies_are_those_of_the_networks(found, row, model):
    artifact, run = found[0]["npk.tab2"], found[1]
    data = training.load_data(run, row)
    for i, net in enumerate(training.train_entry(run, row, model).networks):
        right = float((net(data.x_test).argmax(1) == data.y_test).float().mean())
        assert artifact.arrays[f"{row.replace('-', '_')}_{model}"][i, -1] == pytest.approx(100 * right, abs=1e-3)


@pytest.mark.parametrize("row", ["fc-adam", "gconv-adam"])
def test_copied_gates_are_those_of_the_trained_network_of_the_same_seed(found, row):
    run = found[1]
    x = training.load_data(run, row).x_test
    pairs = zip(training.train_entry(run, row, "flnpf").networks, training.train_entry(run, row, "relu").networks)
    for behind, source in pairs:
        gates, own = behind.gates(x), source.gates(x)
        assert all(torch.equal(gates[site], own[site]) for site in own)
        assert not torch.equal(behind.values.state_dict()["output.weight"], source.values.state_dict()["output.weight"])


def test_random_gates_stay_where_they_were_drawn(found):
    run = found[1]
    for model, same in (("frnpf_di", True), ("frnpf_ii", False)):
        net = training.train_entry(run, "gconv-adam", model).networks[1]
        gates = {name: weight.clone() for name, weight in net.source.network.state_dict().items()}
        start = training._networks(run, "gconv-adam", "relu")[1].values.state_dict()
        assert all(torch.equal(start[name], weight) for name, weight in gates.items() if "weight" in name) == same
        assert not torch.equal(net.values.state_dict()["conv1.weight"], start["conv1.weight"])


def test_dnpfl_has_the_gate_of_the_authors_code(found):
    gate = training.train_entry(found[1], "gconv-adam", "dnpfl").networks[0].gate
    q = torch.linspace(-2, 2, 9)
    assert torch.allclose(gate(q), 1.1 / (1 + torch.exp(-4 * q)), atol=1e-6)


@pytest.mark.parametrize("row", ["fc-adam", "vconv-adam", "gconv-adam"])
def test_operations_are_counted_as_torch_counts_them(row):
    size = find("npk.tab2").sizes_at("paper")
    architecture = row.split("-")[0]
    x = torch.zeros(1, 784) if architecture == "fc" else torch.zeros(1, 3, 32, 32)
    template = {
        "fc": lambda: pl.models.mlp(784, size["hidden"], 10, bias=True),
        "vconv": pl.models.vconv,
        "gconv": pl.models.gconv,
    }[architecture]()
    with FlopCounterMode(display=False) as counter:
        template(x)
    rows = 60_000 if architecture == "fc" else 50_000
    assert training.training_flops(size, row, "relu", 2) == 3 * 2 * 5 * rows * counter.get_total_flops()


# --- table 2 ---------------------------------------------------------------------------------------------------


def test_claims_follow_from_the_last_epochs(found):
    artifact = found[0]["npk.tab2"]
    a = {m: artifact.arrays[f"gconv_adam_{m}"][:, -1].astype(float) for m in training.MODELS}
    row = "GCONV, Adam"
    worst = np.min([a["dnpfl"], a["flnpf"], a["relu"]], axis=0) - np.max([a["frnpf_ii"], a["frnpf_di"]], axis=0)
    assert np.allclose(claim(artifact, tab2._LOWEST, row), worst, atol=1e-4)
    random = (a["frnpf_ii"] + a["frnpf_di"]) / 2
    share = claim(artifact, tab2._NEAR, row)
    assert np.array_equal(np.isnan(share), a["relu"] <= random)
    there = ~np.isnan(share)
    assert np.allclose(share[there], ((a["flnpf"] - random) / (a["relu"] - random))[there], atol=1e-3)


def test_rows_that_were_not_trained_cannot_be_told(found):
    artifact = found[0]["npk.tab2"]
    for row in ("VCONV, Adam", "GCONV, SGD"):
        assert np.isnan(claim(artifact, tab2._LOWEST, row)).all()
    verdicts = {c.row: c.verdict for c in artifact.claims if c.text == tab2._LOWEST.text}
    assert verdicts["VCONV, Adam"] == "cannot tell" and set(verdicts) == set(training.ROWS.values())
    assert artifact.config["epochs"] == {"fc-adam": 3, "gconv-adam": 3} and artifact.reduced
    assert artifact.config["architectures"] == ["fc", "gconv"] and artifact.config["optimisers"] == ["adam"]


def test_pieces_add_up_to_one_table(found, tmp_path, monkeypatch):
    def piece(**more):
        run = Run("paper", SEEDS[:2], changes={**SMALL, "architectures": ["gconv"], **more}, out=tmp_path)
        return perform(find("npk.tab2"), run)

    first = piece(models=["relu"], epochs=1)
    assert set(first.config["models"]) == {"relu"} and first.config["epochs"] == {"gconv-adam": {"relu": 1}}
    second = piece(models=["relu", "flnpf"])
    assert second.config["epochs"] == {"gconv-adam": {"relu": 3, "flnpf": 3}}
    monkeypatch.setattr(training, "train_entry", None)  # nothing is trained from here on
    again = piece(models=[])
    assert again.config == second.config
    assert all(np.array_equal(again.arrays[name], second.arrays[name]) for name in second.arrays)
    fresh = Run("paper", (5, 6), changes=SMALL | {"models": []}, out=tmp_path)
    assert perform(find("npk.tab2"), fresh).config["models"] == []  # other seeds are another table


def test_seeds_that_are_added_later_are_the_only_ones_that_are_trained(found, tmp_path, monkeypatch):
    monkeypatch.setattr(pl.data, "binary_mnist", two_digits)
    changes = {**SMALL, "architectures": ["gconv"]}
    first = perform(find("npk.tab2"), Run("paper", SEEDS[:1], changes=changes, out=tmp_path))
    labels, train = [], pl.training.train

    def watched(networks, *given, seed, **more):
        labels.append((seed, len(networks)))
        return train(networks, *given, seed=seed, **more)

    monkeypatch.setattr(pl.training, "train", watched)
    made = perform(find("npk.tab2"), Run("paper", SEEDS, changes=changes, out=tmp_path))
    assert len(labels) == 2 * len(training.MODELS) and {seed for seed, _ in labels} == {1, 2}  # one by one on a CPU
    for m in training.MODELS:
        key = f"gconv_adam_{m}"
        assert np.array_equal(made.arrays[key][0], first.arrays[key][0])
        assert np.allclose(made.arrays[key], found[0]["npk.tab2"].arrays[key], atol=1e-4)


def test_a_word_that_is_no_row_is_refused():
    chosen = training.selected({**find("npk.tab2").sizes_at("paper"), "architectures": "gconv"})
    assert ("gconv-sgd", "relu") in chosen and ("fc-sgd", "relu") not in chosen
    with pytest.raises(UnknownNameError, match="GCONV"):
        perform(find("npk.tab2"), Run("paper", SEEDS, changes={"architectures": ["GCONV"]}))


# --- figure 3 --------------------------------------------------------------------------------------------------


def test_stages_end_with_the_training(found):
    artifact = found[0]["npk.fig3"]
    assert list(artifact.arrays["stages"]) == [0, 1, 2, 3] and artifact.arrays["best"].shape == (4, 3)
    assert artifact.config["stages"] == [1, 2, 3] and artifact.config["kernel_epochs"] == [1, 3]
    best = artifact.arrays["best"]
    assert np.allclose(claim(artifact, fig3._EARLY), best[1] - best[0], atol=1e-4)
    assert np.isnan(claim(artifact, fig3._ABOVE)).all()  # 77.43 % is for CIFAR-10
    assert artifact.arrays["relu"] == pytest.approx(found[0]["npk.tab2"].arrays["gconv_adam_relu"].max(1))


def test_ranks():
    assert fig3._rank_correlation([1, 2, 3, 4, 5, 6], np.array([1.0, 2, 3, 4, 6, 5])) == pytest.approx(1 - 12 / 210)
    assert np.isnan(fig3._rank_correlation([1, 2], np.array([3.0, 3.0])))


def test_nu_is_that_of_the_path_kernel(found):
    data = two_digits().subsample(60)
    rows = torch.cat([(data.y[:, 0] == sign).nonzero()[:6, 0] for sign in (-1, 1)])
    X, y = data.x[rows].double().numpy(), data.y[rows, 0].numpy()
    net = pl.models.relu(64, (12, 12), 1, init=pl.models.Init("bernoulli", (2 / 12) ** 0.5), seed=1)
    H, h = X @ X.T, X
    for name in ("linear1", "linear2"):
        q = h @ net.values.state_dict()[f"{name}.weight"].double().numpy().T
        gates, h = (q > 0).astype(float), np.maximum(q, 0)
        H = H * (gates @ gates.T)
    assert found[0]["npk.fig3"].arrays["nu"][1, 0] == pytest.approx(np.trace(H) * y @ np.linalg.solve(H, y), rel=1e-4)


def test_traces_are_squared_gradients_of_the_logits(found):
    artifact, run = found[0]["npk.fig3"], found[1]
    runs = training.train_entry(run, "fc-adam", "dnpfl")
    net = copy.deepcopy(runs.networks[0]).requires_grad_(False)
    net.load_state_dict(training.state_at(runs, 2, 3))
    X = training.load_data(run, "fc-adam").subsample(per_class=2).x
    for part, prefix in enumerate(("values.", "source.")):
        weights = {name: p.detach() for name, p in net.named_parameters() if name.startswith(prefix)}
        gradients = jacrev(lambda w: functional_call(net, w, (X,)))(weights)
        total = sum(float(g.double().square().sum()) for g in gradients.values())
        assert artifact.arrays["norms"][0, part, 0, 2, -1] == pytest.approx(total, rel=1e-4)


def test_the_page_is_written_from_saved_artifacts(found, tmp_path):
    for artifact in found[0].values():
        artifact.save(tmp_path / "artifacts")
    page = write_page(load_folder(tmp_path / "artifacts"), tmp_path).read_text()
    assert all(artifact.title in page for artifact in found[0].values())
