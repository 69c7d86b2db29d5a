"""Streams and budgets: recomputed rows equal the materialised ones, nothing depends on the live network any more."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pathlens import gated_twin, models, record
from pathlens.errors import BudgetError, OptionError, RecordError, ShapeError
from pathlens.recording import RecordStream
from pathlens.records import Record

N = 7


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
    ).double()


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "dlgn": lambda: (models.dlgn(3, (5, 4), 3, bias=True, seed=0).double(), rows(N, 3)),
    "galu": lambda: (models.galu(3, (5, 4), 2, seed=0).double(), rows(N, 3)),
    "frg": lambda: (models.frg(3, (5, 4), 3, examples=N, seed=0).double(), rows(N, 3)),
    "straight-through": lambda: (models.dlgn(3, (5,), 2, gate="straight_through", seed=0).double(), rows(N, 3)),
    "twin": lambda: (gated_twin(convolutional(), "dlgn", rows(2, 2, 4, 4), seed=0).double(), rows(N, 2, 4, 4)),
    "plain": lambda: (convolutional(), rows(N, 2, 4, 4)),
}


def assert_same(got: Record, want: Record) -> None:
    assert got.layers == want.layers and got.sites == want.sites and got.kept == want.kept
    assert (got.gate_label, got.untracked, got.flops_per_row) == (want.gate_label, want.untracked, want.flops_per_row)
    assert torch.equal(got.x, want.x) and torch.allclose(got.f, want.f, rtol=0, atol=1e-13)
    for site in want.sites:
        assert torch.equal(got.bits[site], want.bits[site])
        assert torch.allclose(got.gates(site), want.gates(site), rtol=0, atol=1e-13)
    assert got.sensitivity.keys() == want.sensitivity.keys()
    for layer in want.layers:
        assert torch.allclose(got.inputs(layer.name), want.inputs(layer.name), rtol=0, atol=1e-13)
        for k in range(want.outputs):
            got_k, want_k = got.sensitivities(layer.name, k), want.sensitivities(layer.name, k)
            assert torch.allclose(got_k, want_k, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_stream_are_the_rows_of_the_record(case: str) -> None:
    net, x = CASES[case]()
    whole, stream = record(net, x, stream=False), record(net, x, stream=True)
    assert isinstance(whole, Record) and isinstance(stream, RecordStream)
    assert (stream.n, stream.outputs, stream.sites, stream.layers) == (N, whole.outputs, whole.sites, whole.layers)
    assert stream.flops_per_row == whole.flops_per_row and stream.bytes_per_row > 0
    for lo, hi in [(0, N), (2, 5), (N - 1, N)]:
        assert_same(stream.rows(lo, hi), whole.rows(lo, hi))
        for k in range(whole.outputs):
            one = stream.rows(lo, hi, output=k)
            cut = whole.rows(lo, hi, output=k)
            assert one.outputs == cut.outputs == 1 and one.kept == (k,)
            assert one.flops_per_row < whole.flops_per_row or whole.outputs == 1
            cut.flops_per_row = one.flops_per_row  # a recomputed row of one output costs less
            assert_same(one, cut)


@pytest.mark.parametrize("case", CASES)
def test_a_record_assembled_from_batches_is_the_record(case: str) -> None:
    net, x = CASES[case]()
    whole = record(net, x)
    row = record(net, x[:1]).nbytes
    assembled = record(net, x, max_bytes=2 * 4 * row, stream=False)  # two rows at a time, the last one alone
    assert_same(assembled, whole)
    assert abs(assembled.nbytes - whole.nbytes) <= 0.01 * whole.nbytes


def test_the_budget_decides() -> None:
    net, x = CASES["dlgn"]()
    row = record(net, x[:1]).nbytes
    assert isinstance(record(net, x), Record)
    assert isinstance(record(net, x, max_bytes=2 * N * row), Record)
    assert isinstance(record(net, x, max_bytes=2 * N * row - 2), RecordStream)
    assert isinstance(record(net, x, max_bytes=4 * row), RecordStream)
    assert isinstance(record(net, x, max_bytes=4 * row, stream=False), Record)
    with pytest.raises(BudgetError, match=r"one row needs about .* Raise max_bytes"):
        record(net, x, max_bytes=4 * row - 1)
    with pytest.raises(OptionError, match="max_bytes must be a positive"):
        record(net, x, max_bytes=-1)


def test_chosen_outputs_of_a_stream() -> None:
    net, x = CASES["dlgn"]()
    whole, stream = record(net, x, outputs=[2, 0]), record(net, x, outputs=[2, 0], stream=True)
    assert stream.outputs == 2 and stream.kept == (2, 0)
    assert_same(stream.rows(1, 4), whole.rows(1, 4))
    assert stream.rows(1, 4, output=0).kept == (2,)
    one = stream.rows(1, 4, output=1).f  # computed from three rows, not seven: rounding may differ
    assert torch.allclose(one, whole.f[1:4, 1:], rtol=0, atol=1e-13)


@pytest.mark.parametrize("stream", [False, True])
def test_bad_rows_and_outputs(stream: bool) -> None:
    net, x = CASES["dlgn"]()
    source = record(net, x, stream=stream)
    for lo, hi in [(-1, 2), (3, 3), (0, N + 1), (5, 2)]:
        with pytest.raises(RecordError, match=f"no rows {lo}:{hi}; it has {N}"):
            source.rows(lo, hi)
    for k in (-1, 3):
        with pytest.raises(RecordError, match=f"no output {k}; it has 3"):
            source.rows(0, 1, output=k)
    for outputs in ([], [3], [-1]):
        with pytest.raises(RecordError, match="the network has 3, numbered from 0"):
            record(net, x, outputs=outputs)


def test_inputs_made_in_inference_mode() -> None:
    net, x = CASES["plain"]()
    with torch.inference_mode():
        y = x * 1
        inside = record(net, y, stream=True)
    assert_same(record(net, y, stream=True).rows(0, N), record(net, x))
    with torch.inference_mode():
        y.zero_()  # which torch does not count as a change
    assert_same(inside.rows(0, N), record(net, x))


def test_training_afterwards_changes_nothing() -> None:
    net, x = CASES["dlgn"]()
    whole, stream = record(net, x), record(net, x, stream=True)
    before, twice = stream.rows(0, N), copy_of(whole)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(3):
        optimiser.zero_grad()
        net(x).square().sum().backward()
        optimiser.step()
    assert_same(stream.rows(0, N), before)
    assert_same(whole, twice)
    with pytest.raises(AssertionError):
        assert_same(record(net, x), before)  # the training was real


def copy_of(rec: Record) -> Record:
    whole = rec.rows(0, rec.n)
    whole.f = whole.f.clone()
    whole.sensitivity = {k: v.clone() for k, v in whole.sensitivity.items()}
    whole.layer_inputs = {k: [t.clone() for t in v] for k, v in whole.layer_inputs.items()}
    return whole


@pytest.mark.parametrize("case", ["dlgn", "plain"])
def test_changing_the_inputs_afterwards(case: str) -> None:
    net, x = CASES[case]()
    small = 4 * record(net, x[:1]).nbytes
    sources = [record(net, x), record(net, x, stream=False, max_bytes=small)]
    stream, copied = record(net, x, stream=True), record(net, x.numpy(), stream=True)
    before = copied.rows(0, N)
    stream.rows(0, 2)
    x.zero_()
    for source in [*sources, copied]:
        assert_same(source.rows(0, N), before)
    with pytest.raises(RecordError, match="changed in place"):
        stream.rows(0, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_neither_keeps_the_live_network(stream: bool) -> None:
    net, x = CASES["plain"]()
    source = record(net, x, stream=stream)
    alive = weakref.ref(net)
    del net
    gc.collect()
    assert alive() is None
    assert source.rows(0, 1).n == 1


def test_without_a_backward_pass() -> None:
    net, x = CASES["dlgn"]()
    full = record(net, x)
    for source in (record(net, x, sensitivities=False), record(net, x, sensitivities=False, stream=True)):
        rec = source.rows(0, N)
        assert not rec.has_sensitivities and rec.sensitivity == {} and rec.flops_per_row < full.flops_per_row
        assert torch.equal(rec.inputs("values.linear2"), full.inputs("values.linear2"))
        for name in ("values.linear1", "values.output"):
            with pytest.raises(RecordError, match="without a backward pass"):
                rec.sensitivities(name, 0)


def test_bytes_are_those_of_the_tensors() -> None:
    rec = record(models.dlgn(3, (5, 4), 2, seed=0), torch.randn(N, 3))
    x, f, bits, soft = 3 * 4, 2 * 4, 5 + 4, (5 + 4) * 4
    inputs = (5 + 5 + 4) * 4  # h1, q1, h2; the first layers of both networks read x itself
    sensitivities = 2 * (2 * (5 + 4)) * 4  # two outputs, both networks
    assert rec.bytes_per_row == x + f + bits + soft + inputs + sensitivities
    assert rec.nbytes == N * rec.bytes_per_row


def test_flops_are_those_of_the_matrix_products() -> None:
    rec = record(models.relu(3, (5, 4), 2, seed=0), torch.randn(4, 3))
    assert rec.flops_per_row == 2 * (3 * 5 + 5 * 4 + 4 * 2) * (1 + 2)


def test_names_that_are_not_there() -> None:
    rec = record(*CASES["dlgn"]())
    with pytest.raises(RecordError, match=r"no layer 'values.linear9'\. It has: .*values\.linear1"):
        rec.inputs("values.linear9")
    with pytest.raises(RecordError, match=r"no gate site 'relu9'\. It has: relu1@0, relu2@0"):
        rec.gates("relu9")


def test_rows_must_agree_within_a_record() -> None:
    rec = record(*CASES["dlgn"]())
    for field in ("f", "bits", "soft", "sensitivity", "layer_inputs"):
        parts = dict(vars(rec))
        value = parts[field]
        if field == "f":
            parts[field] = value[1:]
        else:
            key = next(iter(value))
            short = [value[key][0][1:]] if field == "layer_inputs" else value[key][1:]
            parts[field] = {**value, key: short}
        with pytest.raises(ShapeError, match=f"has {N - 1} rows, expected {N}"):
            Record(**parts)


class Branches(nn.Module):
    """Runs another layer where a batch holds a large row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if x.max() > 10 else self.b(x)


def test_control_flow_that_depends_on_the_batch_is_noticed() -> None:
    x = torch.zeros(4, 2)
    x[3] = 100.0
    small = 4 * record(Branches(), x[:1]).nbytes
    with pytest.raises(RecordError, match="other layers on rows 3…3 than on the rows before"):
        record(Branches(), x, max_bytes=small, stream=False)


def test_reprs_say_what_they_are() -> None:
    net, x = CASES["dlgn"]()
    assert repr(record(net, x)).startswith("Record(7 rows, 3 outputs, 2 gate sites (soft β=4), 5 layers")
    assert "recomputed when needed" in repr(record(net, x, stream=True))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's account of resident memory")
def test_peak_memory_stays_near_the_budget() -> None:
    """A record of half the budget is made within it, in batches; in one batch it takes three times its size."""
    script = """
        import torch
        from pathlens import models, record
        def peak():
            line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        torch.set_num_threads(1)
        net = models.gconv(4, channels=(3, 16, 16), dense=(8,), bias=True).eval()
        x = torch.randn(800, 3, 16, 16)
        record(net, x[:2])
        before = peak()
        budget = 200 << 20
        made = record(net, x, max_bytes=budget, stream=False)
        print(made.nbytes, peak() - before, budget)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    size, growth, budget = map(int, out.stdout.split())
    assert 3 * size > 1.5 * budget, "the record must be large enough to need batches"
    assert growth < budget + (32 << 20)
