"""Every public function on one random network, against the reference. A check raises AssertionError for a wrong number.

`CHECKS` maps a name to a function of (case, random generator).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from network_reference import (
    Calls,
    Reference,
    Undefined,
    Unknown,
    count_paths,
    jacobian,
    path_kernel,
    rows_of,
    run,
    shared_paths,
)
from random_networks import Drawn, draw
from torch import Tensor, nn

import pathlens as pl
from pathlens.errors import PathlensError

_NEAR = 1e-9  # gates that read less than this are decided by rounding
_TENTH = float(torch.tensor(0.1, dtype=torch.float32))  # a gate's ε is a buffer, made in float32
_SOFT = {
    "soft_relu": (4.0, _TENTH),
    "soft_galu": (4.0, _TENTH),
    "gates_only": (4.0, 0.0),
    "dlgn": (4.0, 0.0),
    "dlgn_pwc": (4.0, 0.0),
    "dlgn_frozen": (4.0, 0.0),
}
_SOURCE = {
    "relu": "self",
    "soft_relu": "self",
    "dln": "none",
    "galu": "relu",
    "flnpf": "relu",
    "soft_galu": "relu",
    "gates_only": "relu",
    "dlgn": "linear",
    "dlgn_pwc": "linear",
    "dlgn_frozen": "linear",
}


@dataclass
class Subject:
    """A network as Pathlens gets it, and what it must compute."""

    label: str
    net: nn.Module
    ref: Reference
    x: Tensor
    y: Tensor

    @property
    def plain(self) -> bool:
        return self.label == "plain"


class Case:
    """A drawn network with the gated networks that are made of it."""

    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn
        self._made: dict[Any, Subject] = {}

    def plain(self) -> Subject:
        d = self.drawn
        return Subject("plain", d.net, Reference(d.net), d.x, d.y)

    def twin(self, kind: str, rng: random.Random, hard: bool = False) -> Subject:
        """The gated twin of a kind; `hard` replaces soft gates."""
        if (kind, hard) in self._made:
            return self._made[kind, hard]
        d = self.drawn
        if kind == "dlgn_pwc" and "BatchNorm" in d.text:
            kind = "dlgn"  # where its ones enter is a matter of its own
        average = "MaxPool" in d.text and _SOURCE[kind] in ("linear", "none") and rng.random() < 0.9
        options: dict[str, Any] = {"max_pool": "average"} if average else {}
        soft = None if hard else _SOFT.get(kind)
        if hard and kind in _SOFT:
            options["gate"] = "hard"
        # parameters outside layers cannot be drawn anew
        own = _SOURCE[kind] in ("linear", "relu") and kind != "flnpf"
        if own and rng.random() < (0.8 if "nn.Parameter" in d.text else 0.2):
            options["gates_from"] = "dependent"
        with unchanged(d.net, d.x), torch.random.fork_rng(devices=[]):
            torch.manual_seed(d.seed)
            net = pl.gated_twin(d.net, kind, example=d.x[:2], **options)
        assert isinstance(net, pl.models.GatedNetwork)
        gates = net.source.network.state_dict() if net.source is not None else None  # type: ignore[union-attr]
        ref = Reference(d.net, net.values.state_dict(), gates, _SOURCE[kind], soft, kind == "dlgn_pwc", average)
        self._made[kind, hard] = Subject(f"twin {kind}" + (", hard" if hard else ""), net, ref, d.x, d.y)
        return self._made[kind, hard]

    def any(self, rng: random.Random) -> Subject:
        """The plain network, its ReLU twin, or another."""
        how = rng.random()
        if how < 0.35:
            return self.plain()
        if how < 0.6:
            return self.twin("relu", rng)
        return self.gated(rng)

    def gated(self, rng: random.Random) -> Subject:
        kind = rng.choice(["relu", "dlgn", *_SOURCE])
        return self.twin(kind, rng, hard=kind != "gates_only" and rng.random() < 0.2)

    def wired(self, rng: random.Random) -> Subject:
        """Mostly a gated network: of a plain one, kernels of paths know chains alone."""
        return self.plain() if rng.random() < 0.15 else self.gated(rng)


@contextlib.contextmanager
def unchanged(net: nn.Module, *tensors: Tensor) -> Iterator[None]:
    """Nothing of the user's may move: weights, buffers, gradients, modes, hooks, inputs."""

    def state() -> list[Any]:
        found: list[Any] = [t.detach().clone() for t in (*net.parameters(), *net.buffers(), *tensors)]
        found += [(m.training, *(len(v) for k, v in sorted(vars(m).items()) if "hooks" in k)) for m in net.modules()]
        found += [(p.requires_grad, p.grad is None) for p in (*net.parameters(), *tensors)]
        return [*found, [k for k, _ in net.named_parameters()], [k for k, _ in net.named_modules()]]

    before = state()
    yield
    for old, new in zip(before, state()):
        same = torch.equal(old, new) if isinstance(old, Tensor) else old == new
        assert same, f"something of the user's was changed: {old!r} became {new!r}"


def close(got: Any, want: Tensor, what: str, tolerance: float = 1e-9) -> None:
    got, want = torch.as_tensor(got).detach().double(), want.detach().double()
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    scale = max(float(want.abs().max()), 1e-3) if want.numel() else 1.0
    gap = float((got - want).abs().max()) if want.numel() else 0.0
    assert gap <= tolerance * scale, f"{what}: off by {gap:.3e} of {scale:.3e}\ngot  {got}\nwant {want}"


def steady(subject: Subject, *points: Tensor) -> None:
    """Skip networks whose gates are a matter of rounding."""
    for x in points or (subject.x,):
        if subject.ref.margin(x) < _NEAR:
            raise Unknown("gates at their boundary")


def wanted(compute: Callable[[], Any]) -> Any:
    """The reference's answer; where there is none by definition, the exception, which an answer must not follow."""
    try:
        return compute()
    except Undefined as why:
        return why


def refusal_expected(want: Any) -> None:
    assert not isinstance(want, Undefined), f"an answer, although it is not defined: {want}"


# --- networks ------------------------------------------------------------------------------------------------------


def check_twin(case: Case, rng: random.Random) -> None:
    s = case.gated(rng) if rng.random() < 0.7 else case.twin("relu", rng)
    steady(s)
    with unchanged(s.net, s.x):
        got = rows_of(s.net(s.x.clone()))
    close(got, s.ref.output(s.x), s.label)
    used = s.ref.used(s.x)
    assert len(s.net.site_names) == len(used), f"{s.net.site_names} for the ReLU calls {used}"
    bits = [g > 0 for g in s.net.gates(s.x.clone(), hard=True).values()]
    if all(not site.slope for site in s.net.sites):
        want = s.ref.bits(s.x)
        for name, got_bits, i in zip(s.net.site_names, bits, used):
            assert torch.equal(got_bits, want[i]), f"{s.label}: gates at {name}"
    if s.label == "twin relu":
        _same_in_training(case, s)


def _same_in_training(case: Case, s: Subject) -> None:
    """Batch-norm with the statistics of the batch, and what it keeps of them."""
    if case.drawn.has_dropout:
        return
    net, twin = copy.deepcopy(case.drawn.net).train(), copy.deepcopy(s.net).train()
    close(rows_of(twin(s.x.clone())), rows_of(net(s.x.clone())), "ReLU twin in train mode", 1e-8)
    own = dict(net.named_buffers(remove_duplicate=False))
    for name, b in twin.values.named_buffers():
        if "running" in name:
            close(b, own[name], f"statistics {name}")


def check_site_names(case: Case, rng: random.Random) -> None:
    s = case.twin("relu", rng)
    plain, twin = pl.record(case.drawn.net, s.x), pl.record(s.net, s.x)
    assert plain.sites == twin.sites, f"sites {plain.sites} of the module, {twin.sites} of its twin"
    steady(s)
    for site in plain.sites:
        assert torch.equal(plain.bits[site], twin.bits[site]), site


# --- records -------------------------------------------------------------------------------------------------------


def _check_gates(s: Subject, rec: Any, x: Tensor) -> None:
    bits, used = s.ref.bits(x), s.ref.used(x)
    chosen = list(range(len(bits))) if s.plain and len(rec.sites) == len(bits) else used
    assert len(rec.sites) == len(chosen), f"sites {rec.sites} for the ReLU calls {chosen} of {len(bits)}"
    heard, slopes = s.ref.scores(x)
    for site, i in zip(rec.sites, chosen):
        assert torch.equal(rec.bits[site], bits[i]), f"{s.label}: bits at {site}"
        close(rec.gates(site), s.ref.gate(heard[i], slopes[i]), f"{s.label}: gates at {site}")


def named_parameters(s: Subject) -> dict[str, Tensor]:
    """The reference's parameters by the names that the network gives them."""
    if s.plain:
        return dict(s.ref.values.named_parameters())
    own = dict(s.net.named_parameters())
    found = {f"values.{k}": p for k, p in s.ref.values.named_parameters(remove_duplicate=False)}
    if s.ref.gates is not None:
        found |= {f"source.network.{k}": p for k, p in s.ref.gates.named_parameters(remove_duplicate=False)}
    return {k: found[k] for k in own}


def check_record(case: Case, rng: random.Random) -> None:
    compare_record(case.any(rng), rng)


def compare_record(s: Subject, rng: random.Random) -> None:
    steady(s)
    with unchanged(s.net, s.x):
        if rng.random() < 0.2:
            rec = pl.record(s.net, s.x, stream=True).rows(0, len(s.x))
        else:
            rec = pl.record(s.net, s.x)
    f = s.ref.output(s.x)
    close(rec.f, f, f"{s.label}: outputs")
    close(rec.x, s.x, f"{s.label}: inputs")
    _check_gates(s, rec, s.x)
    parameters = named_parameters(s)
    whole = jacobian(f, parameters)
    recorded = set(rec.untracked)
    for layer in rec.layers:
        recorded |= set(layer.parameters)
        weight, *bias = layer.parameters
        for k in range(f.shape[1]):
            a, d = rec.inputs(layer.name), rec.sensitivities(layer.name, k)
            made = torch.einsum("npi,npm->nmi", a, d)
            close(made, whole[weight][:, k].reshape(made.shape), f"{s.label}: gradient of {weight} to output {k}")
            if bias and layer.bias:
                close(d.sum(1), whole[bias[0]][:, k], f"{s.label}: gradient of {bias[0]} to output {k}")
    trained = {k for k, p in s.net.named_parameters() if p.requires_grad}
    silent = [k for k in trained - recorded if bool(whole[k].any())]
    assert not silent, f"{s.label}: no gradient is recorded for {silent}"


def check_files(case: Case, rng: random.Random) -> None:
    s = case.any(rng)
    with tempfile.TemporaryDirectory() as folder, unchanged(s.net, s.x):
        rec = pl.record(s.net, s.x)
        rec.save(Path(folder) / "record")
        again = pl.Record.load(Path(folder) / "record")
        assert again.sites == rec.sites and again.layers == rec.layers and again.chain == rec.chain
        for site in rec.sites:
            assert torch.equal(again.bits[site], rec.bits[site])
            assert torch.equal(again.gates(site), rec.gates(site))
        for layer in rec.layers:
            assert torch.equal(again.inputs(layer.name), rec.inputs(layer.name))
            assert torch.equal(again.sensitivities(layer.name, 0), rec.sensitivities(layer.name, 0))
        pl.snapshot(s.net).save(Path(folder) / "snapshot")
        like = copy.deepcopy(s.net)
        with torch.no_grad():
            for p in like.parameters():
                p.add_(1.0)
        back = pl.rebuild(pl.Snapshot.load(Path(folder) / "snapshot"), like=like)
        assert torch.equal(rows_of(back(s.x.clone())), rows_of(s.net(s.x.clone()))), f"{s.label}: rebuilt"


# --- kernels -------------------------------------------------------------------------------------------------------


def _source(s: Subject, rng: random.Random) -> tuple[Any, Any]:
    """A network and its inputs, or, seldom, their record."""
    return (pl.record(s.net, s.x), None) if rng.random() < 0.15 else (s.net, s.x)


def check_overlap(case: Case, rng: random.Random) -> None:
    compare_overlap(case.wired(rng), rng)


def compare_overlap(s: Subject, rng: random.Random) -> None:
    steady(s)
    inputs = rng.random() < 0.4
    columns = s.x[:1] * 0.7 - s.x[1:2] if rng.random() < 0.2 else None
    if columns is not None:
        steady(s, columns)
    want = wanted(lambda: shared_paths(s.ref, s.x, s.x if columns is None else columns, inputs))
    with unchanged(s.net, s.x):
        source = (s.net, s.x) if columns is not None else _source(s, rng)
        got = pl.kernels.overlap(*source, include_inputs=inputs, Y=columns).dense()
    refusal_expected(want)
    close(got, want, f"{s.label}: overlap, include_inputs={inputs}", 1e-12)


def check_npk(case: Case, rng: random.Random) -> None:
    compare_npk(case.wired(rng), rng)


def compare_npk(s: Subject, rng: random.Random) -> None:
    steady(s)
    want = wanted(lambda: path_kernel(s.ref, s.x))
    with unchanged(s.net, s.x):
        K = pl.kernels.npk(*_source(s, rng))
        got, diagonal = K.dense(), K.diagonal()
    refusal_expected(want)
    close(got, want, f"{s.label}: npk", 1e-8)
    close(diagonal, want.diagonal(), f"{s.label}: diagonal of the npk", 1e-8)


def check_count(case: Case, rng: random.Random) -> None:
    compare_count(case.wired(rng), rng)


def compare_count(s: Subject, rng: random.Random) -> None:
    steady(s)
    inputs = rng.random() < 0.5
    want = wanted(lambda: count_paths(s.ref, s.x, s.ref.bits(s.x), inputs))
    with unchanged(s.net, s.x):
        got = pl.paths.count(s.net, s.x, include_inputs=inputs)
    refusal_expected(want)
    answer = torch.tensor([int(n) for n in got])[:, None].expand(want.shape)
    close(answer, want, f"{s.label}: count, include_inputs={inputs}", 0.0)


def check_ntk(case: Case, rng: random.Random) -> None:
    compare_ntk(case.any(rng), rng)


def compare_ntk(s: Subject, rng: random.Random) -> None:
    steady(s)
    part = rng.choice(["all", "all", "value", "feature"])
    outputs = rng.choice(["trace", "full", 0])
    columns = s.x[:1] * 0.7 - s.x[1:2] if rng.random() < 0.2 else None
    frozen = rng.random() < 0.2
    options: dict[str, Any] = {"layer": None}
    modules = [n for n, m in s.net.named_modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))]
    if modules and part == "all" and rng.random() < 0.15:
        options["layer"] = rng.choice(modules)
        found = jacobian(s.ref.output(s.x), named_parameters(s))
        if not any(bool(g.any()) for k, g in found.items() if k.startswith(options["layer"])):
            options["layer"] = None  # one that is not called

    def features(x: Tensor) -> Tensor:
        f = _differentiable(s, x, part)
        whole = jacobian(f, named_parameters(s))
        trained = {k for k, p in s.net.named_parameters() if p.requires_grad or frozen}
        if options["layer"] is not None:
            trained = {k for k in whole if k.rpartition(".")[0] == options["layer"]}
        elif s.ref.gates is not None and part != "all":
            trained = {k for k in trained if k.startswith("values." if part == "value" else "source.")}
        elif part == "feature" and s.ref.soft is None:
            trained = set()
        chosen = [whole[k].reshape(*f.shape, -1) for k in whole if k in trained]
        return torch.cat(chosen, 2) if chosen else torch.zeros(*f.shape, 1, dtype=f.dtype)

    left = features(s.x)
    right = left if columns is None else features(columns)
    if outputs == "trace":
        want = torch.einsum("skq,tkq->st", left, right)
    elif outputs == "full":
        want = left.flatten(0, 1) @ right.flatten(0, 1).T
    else:
        want = left[:, 0] @ right[:, 0].T
    with unchanged(s.net, s.x):
        got = pl.kernels.ntk(s.net, s.x, part=part, outputs=outputs, Y=columns, frozen=frozen, **options).dense()
    close(got, want, f"{s.label}: ntk, part={part}, outputs={outputs}, frozen={frozen}, {options}", 1e-8)


def _differentiable(s: Subject, x: Tensor, part: str) -> Tensor:
    """The output, of a soft self-gated network with its gates or its values held fixed."""
    if part == "all" or s.ref.gates is not None or s.ref.soft is None:
        return s.ref.output(x)
    if part == "value":
        return run(s.ref.values, x, Calls(lambda i, q, slope: q * s.ref.gate(q, slope).detach(), s.ref.average))
    heard, slopes = s.ref.scores(x)
    gates = [s.ref.gate(q, slope) for q, slope in zip(heard, slopes)]
    fixed = copy.deepcopy(s.ref.values).requires_grad_(False)
    return run(fixed, x, Calls(lambda i, q, slope: q * gates[i], s.ref.average))


# --- paths ---------------------------------------------------------------------------------------------------------


class _Layers(Calls):
    """Adds a mark to what every dense layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Tensor] = []

    def other(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name != "linear":
            return func(*args, **kwargs)
        self.marks.append(torch.zeros((), dtype=torch.float64, requires_grad=True))
        return func(*args, **kwargs) + self.marks[-1]


class _Biases(Calls):
    """Of the biases of dense layers, by call, that of `start` alone; without `enters` nothing else enters there."""

    def __init__(self, unit: Any, start: int, enters: bool) -> None:
        super().__init__(unit)
        self.start, self.enters, self.layer = start, enters, 0

    def other(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name != "linear":
            return func(*args, **kwargs)
        given = dict(zip(("input", "weight", "bias"), args)) | kwargs
        number, self.layer = self.layer, self.layer + 1
        h, bias = given["input"], given.get("bias")
        if number == self.start and not self.enters:
            h = torch.zeros_like(h)
        return func(h, given["weight"], bias if number == self.start else None)


def contributions(s: Subject, output: int, inputs: bool) -> dict[tuple[int, ...], Tensor]:
    """What each path of a chain of dense layers adds to an output, (n,), by units; −1 before a bias.

    With `inputs`, paths begin with the input that they start at; constants that come before the first layer belong to
    its bias.
    """
    heard, slopes = s.ref.scores(s.x)
    used = s.ref.used(s.x)
    gates = [s.ref.gate(q, slope) for q, slope in zip(heard, slopes)]
    widths = [heard[i].shape[1] for i in used]
    found: dict[tuple[int, ...], Tensor] = {}
    layers = _Layers()
    marked = torch.autograd.grad(run(s.ref.values, s.x, layers).sum(), layers.marks, allow_unused=True)
    calls = [i for i, g in enumerate(marked) if g is not None]  # those that the output depends on
    for start in range(len(used) + 1):
        for path in itertools.product(*(range(w) for w in widths[start:])):
            units = (-1,) * start + path

            def unit(i: int, q: Tensor, slope: float, units: tuple[int, ...] = units) -> Tensor:
                at = units[used.index(i)] if i in used else -1
                mask = torch.ones(q.shape[1]) if at < 0 else torch.eye(q.shape[1])[at]
                return q * gates[i] * mask

            def value(x: Tensor, unit: Any = unit, start: int = start) -> Tensor:
                with torch.no_grad():
                    return run(s.ref.values, x, _Biases(unit, calls[start], start == 0))[:, output]

            x = s.ref.read(s.x)
            if not inputs:
                found[units] = value(x)
                continue
            found[(-1, *units)] = bias = value(torch.zeros_like(x))
            for j in range(x[0].numel() if start == 0 else 0):
                alone = torch.zeros_like(x)
                alone.flatten(1)[:, j] = x.flatten(1)[:, j]
                found[(j, *units)] = value(alone) - bias
    return found


def check_top(case: Case, rng: random.Random) -> None:
    compare_top(case.any(rng), rng)


def compare_top(s: Subject, rng: random.Random) -> None:
    steady(s)
    output, k, inputs = rng.randrange(s.y.shape[1]), rng.choice([3, 300]), rng.random() < 0.4
    with unchanged(s.net, s.x):
        got = pl.paths.top(s.net, s.x, k=k, output=output, include_inputs=inputs)
    f = s.ref.output(s.x)[:, output]
    close(got.f, f, f"{s.label}: f of paths.top")
    close(got.contributions.sum(1) + got.remainder, f, f"{s.label}: sum of paths.top")
    every = contributions(s, output, inputs)
    table = torch.stack(list(every.values()), 1)
    largest = table.abs().sort(1, descending=True).values[:, :k]
    shown = got.contributions.abs()
    size = largest.shape[1]
    close(shown[:, :size], largest[:, : shown.shape[1]], f"{s.label}: largest |contributions|")
    for row, listed in enumerate(got.listed.tolist()):
        for i in range(listed):
            path = tuple(got.paths[row, i].tolist())
            close(got.contributions[row, i], every[path][row], f"{s.label}: contribution of {path}")
    some = [path for path, value in every.items() if bool(value.any())]
    some = rng.sample(some, min(5, len(some)))
    answer = pl.paths.values(s.net, s.x, torch.tensor(some), output=output)
    close(answer, torch.stack([every[path] for path in some], 1), f"{s.label}: values of {some}")
    if not inputs:
        layer = rng.randrange(len(some[0]))
        groups = pl.paths.groups(s.net, s.x, by=layer, output=output)
        through = torch.zeros_like(groups.contributions)
        for path, value in every.items():
            if path[layer] >= 0:
                through[:, path[layer]] += value
        close(groups.contributions, through, f"{s.label}: groups of layer {layer}")
        close(groups.rest, f - through.sum(1), f"{s.label}: rest of the groups of layer {layer}")
    size = pl.paths.cancellation(s.net, s.x, output=output, include_inputs=inputs).size
    close(size, table.abs().sum(1), f"{s.label}: Σ|v|")


def check_inputs(case: Case, rng: random.Random) -> None:
    s = case.gated(rng) if rng.random() < 0.6 else case.twin("relu", rng)
    compare_inputs(s, rng)


def compare_inputs(s: Subject, rng: random.Random) -> None:
    steady(s)
    output = rng.randrange(s.y.shape[1])
    heard, slopes = s.ref.scores(s.x)
    gates = [s.ref.gate(q, slope).detach() for q, slope in zip(heard, slopes)]
    x = s.ref.read(s.x).detach().clone().requires_grad_()
    try:
        f = s.ref.at_gates(x, gates)[:, output]
        (slope,) = torch.autograd.grad(f.sum(), x) if f.requires_grad else (torch.zeros_like(x),)
    except RuntimeError as error:  # of a network that changes its input in place autograd may know no derivative by it
        raise Unknown("in-place changes of the input") from error
    want = x.detach() * slope
    with unchanged(s.net, s.x):
        got = pl.paths.inputs(s.net, s.x, output=output)
    close(got.f, f, f"{s.label}: f of paths.inputs")
    close(got.contributions, want, f"{s.label}: contributions of inputs")
    close(got.rest, f.detach() - want.flatten(1).sum(1), f"{s.label}: rest of paths.inputs")


# --- regions -------------------------------------------------------------------------------------------------------


def _points(s: Subject, rng: random.Random, n: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return 1.5 * torch.randn(n, *s.x.shape[1:], generator=generator, dtype=torch.float64)


def check_halfspaces(case: Case, rng: random.Random) -> None:
    kind = rng.choice(["dlgn", "dlgn", "dlgn", "dlgn_frozen", "galu"])
    compare_halfspaces(case.twin(kind, rng), rng)


def compare_halfspaces(s: Subject, rng: random.Random) -> None:
    x = _points(s, rng)
    with unchanged(s.net, s.x):
        H = pl.regions.halfspaces(s.net, input_shape=tuple(s.x.shape[1:]))
        heard, _ = s.ref.scores(x)
        used = s.ref.used(s.x)
        assert len(H.sites) == len(used)
        for site, i in zip(H.sites, used):
            q = heard[i].flatten(1)
            answer = H.normals(site) @ x.flatten(1).T + H.offsets(site)[:, None]
            close(answer.T, q, f"{s.label}: half-spaces of {site}")
            sure = q.abs() > 1e-7
            inside = H.contains(site, x).reshape(q.shape)
            assert torch.equal(inside[sure], (q > 0)[sure]), f"{s.label}: contains at {site}"
    shapes = [heard[i].shape[1:] for i in used]
    path = [rng.randrange(shape.numel()) for shape in shapes]
    region = pl.regions.path_region(s.net, path, input_shape=tuple(s.x.shape[1:]))
    scores = torch.stack([heard[i].flatten(1)[:, unit] for i, unit in zip(used, path)], 1)
    sure = (scores.abs() > 1e-7).all(1)
    inside = region.contains(x)
    assert torch.equal(inside[sure], (scores > 0).all(1)[sure]), f"{s.label}: path region {path}"
    if not region.is_empty:
        centre = region.certificate.point.reshape(1, *s.x.shape[1:])
        there, _ = s.ref.scores(centre)
        for i, unit in zip(used, path):
            assert float(there[i].flatten()[unit].detach()) > 0, f"{s.label}: the centre of {path}"


def _hard(s: Subject) -> Reference:
    ref = copy.copy(s.ref)
    ref.soft = None
    return ref


def check_segment(case: Case, rng: random.Random) -> None:
    compare_segment(case.any(rng), rng)


def compare_segment(s: Subject, rng: random.Random) -> None:
    a, b = _points(s, rng, 2)
    with unchanged(s.net, s.x):
        line = pl.regions.segment1d(s.net, a, b)
    t = torch.tensor([rng.random() for _ in range(12)], dtype=torch.float64)
    x = a + t.reshape(-1, *[1] * a.ndim) * (b - a)
    _compare_cells(s, line, t.numpy(), x)
    assert abs(float(line.lengths.sum()) - float((b - a).norm())) < 1e-8 or abs(float(line.lengths.sum()) - 1) < 1e-9


def check_slice(case: Case, rng: random.Random) -> None:
    compare_slice(case.any(rng), rng)


def compare_slice(s: Subject, rng: random.Random) -> None:
    units = sum(q[0].numel() for q in s.ref.scores(s.x[:1])[0])
    if units > 60:
        raise Unknown("many gates")
    origin, u, v = _points(s, rng, 3)
    plane = pl.regions.Plane(origin, u, v)
    with unchanged(s.net, s.x):
        cells = pl.regions.slice2d(s.net, plane=plane, box=0.5)
    z = torch.tensor([[rng.uniform(-0.5, 0.5), rng.uniform(-0.5, 0.5)] for _ in range(12)], dtype=torch.float64)
    shape = (-1, *[1] * origin.ndim)
    x = origin + z[:, 0].reshape(shape) * u + z[:, 1].reshape(shape) * v
    _compare_cells(s, cells, z.numpy(), x)
    assert abs(float(cells.areas.sum()) - 1.0) < 1e-9, f"{s.label}: areas"


def _compare_cells(s: Subject, cells: Any, coordinates: Any, x: Tensor) -> None:
    ref = _hard(s)
    heard, _ = ref.scores(x)
    used = ref.used(s.x)
    sure = torch.stack([(q.abs() > 1e-7).flatten(1).all(1) | (q == 0).flatten(1).any(1) for q in heard]).all(0)
    at = cells.locate(coordinates)
    assert (at >= 0).all()
    assert len(cells.patterns) == len(used), f"sites {list(cells.patterns)} for the ReLU calls {used}"
    bits = ref.bits(x)
    for site, i in zip(cells.patterns, used):
        got, q = cells.patterns[site][at], heard[i].flatten(1)
        clear = sure[:, None] & (q.abs() > 1e-7)
        assert torch.equal(got[clear], bits[i].flatten(1)[clear]), f"{s.label}: gates at {site}"
    close(cells.evaluate(coordinates)[sure], ref.output(x)[sure], f"{s.label}: outputs of cells")


# --- training ------------------------------------------------------------------------------------------------------


def check_train(case: Case, rng: random.Random) -> None:
    """A few steps on the full batch, alone or in a stack of two, against a plain loop."""
    s = case.any(rng)
    if case.drawn.has_dropout:
        raise Unknown("dropout")
    lr, stacked = 0.01, rng.random() < 0.25
    # Adam divides by the size of a gradient, and batch-norm of two rows leaves one of rounding alone
    optimizer = "sgd" if "BatchNorm" in case.drawn.text else rng.choice(["sgd", "adam"])
    nets = [copy.deepcopy(s.net) for _ in range(2 if stacked else 1)]
    with torch.no_grad():
        for p in nets[-1].parameters() if stacked else ():
            p.mul_(1.1)
    plain = [copy.deepcopy(net) for net in nets]
    x, y = s.x.detach().clone(), s.y.clone()
    options = {"execution": pl.training.Execution(compile=rng.random() < 0.25), "progress": False}
    made = pl.train(
        nets if stacked else nets[0], (x, y), epochs=3, batch_size=None, optimizer=optimizer, lr=lr, **options
    )
    assert torch.equal(x, s.x) and torch.equal(y, s.y), "the data were changed"
    for net, want, trajectory in zip(nets, plain, made if stacked else [made]):
        trained = [p for p in want.parameters() if p.requires_grad]
        step = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](trained, lr=lr)
        history = [_loss(s, want)]
        for _ in range(3):
            want.train()
            step.zero_grad()
            (rows_of(want(s.x.detach().clone())) - s.y).square().mean().backward()
            step.step()
            history.append(_loss(s, want))
        close(torch.tensor(trajectory.history["loss"]), torch.tensor(history), f"{s.label}: losses", 1e-6)
        got = dict(net.named_parameters()) | dict(net.named_buffers())
        for name, t in (*want.named_parameters(), *want.named_buffers()):
            if t.is_floating_point():
                close(got[name], t, f"{s.label}: {name} after training", 1e-7)


def _loss(s: Subject, net: nn.Module) -> float:
    with torch.no_grad():
        return float((rows_of(net.eval()(s.x.detach().clone())) - s.y).square().mean())


def check_harden(case: Case, rng: random.Random) -> None:
    s = case.twin(rng.choice(["dlgn", "dlgn", "dlgn_pwc", "soft_galu"]), rng)
    method = rng.choice(["direct", "refit", "straight_through"])
    with unchanged(s.net, s.x, s.y):
        found = pl.harden(s.net, (s.x, s.y), method=method, epochs=1, progress=False)
    hard = found.network
    assert hard.gate.hard
    slopes = {site.name: site.slope for site in hard.sites}
    for site, g in hard.gates(s.x.clone()).items():
        assert bool(((g == 1) | (g == slopes[site])).all()), f"gates at {site} are {g.unique()}"
    if method == "direct":
        steady(s)
        close(rows_of(hard(s.x.clone())), _hard(s).output(s.x), f"{s.label}: switched to hard gates")


# --- named constructors ---------------------------------------------------------------------------------------------


def check_constructor(case: Case, rng: random.Random) -> None:
    """A named constructor, with one of the other comparisons."""
    d, hidden = rng.randint(2, 3), tuple(rng.randint(2, 4) for _ in range(rng.randint(1, 3)))
    outputs, bias, seed = rng.randint(1, 2), rng.random() < 0.5, rng.randrange(1000)
    kind = rng.choice(["relu", "soft_relu", "dln", "galu", "soft_galu", "gates_only", "dlgn", "dlgn_pwc"])
    options = {"piecewise_constant": True} if kind == "dlgn_pwc" else {}
    make = getattr(pl.models, "dlgn" if kind == "dlgn_pwc" else kind)
    net = make(d, hidden=hidden, outputs=outputs, bias=bias, seed=seed, **options).double().eval()
    layers: dict[str, nn.Module] = {}
    width = d
    for i, w in enumerate(hidden, start=1):
        layers |= {f"linear{i}": nn.Linear(width, w, bias=bias), f"relu{i}": nn.ReLU()}
        width = w
    template = nn.Sequential()
    for name, layer in (*layers.items(), ("output", nn.Linear(width, outputs, bias=bias))):
        template.add_module(name, layer)
    gates = net.source.network.state_dict() if net.source is not None else None
    ref = Reference(
        template.double(), net.values.state_dict(), gates, _SOURCE[kind], _SOFT.get(kind), kind == "dlgn_pwc"
    )
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, d, generator=generator, dtype=torch.float64)
    s = Subject(
        f"models.{kind}({d}, {hidden}, {outputs}, bias={bias}, seed={seed})",
        net,
        ref,
        x,
        torch.randn(3, outputs, generator=generator, dtype=torch.float64),
    )
    close(net(x), ref.output(x), s.label)
    back = pl.rebuild(pl.snapshot(net))
    assert torch.equal(back(x), net(x)), f"{s.label}: rebuilt"
    rng.choice(_COMPARISONS)(s, rng)


_COMPARISONS = (
    compare_record,
    compare_overlap,
    compare_npk,
    compare_count,
    compare_ntk,
    compare_top,
    compare_inputs,
    compare_segment,
    compare_slice,
)

CHECKS: dict[str, Callable[[Case, random.Random], None]] = {
    "gated_twin": check_twin,
    "site names": check_site_names,
    "record": check_record,
    "files": check_files,
    "kernels.overlap": check_overlap,
    "kernels.npk": check_npk,
    "kernels.ntk": check_ntk,
    "paths.count": check_count,
    "paths.top": check_top,
    "paths.inputs": check_inputs,
    "halfspaces, path_region": check_halfspaces,
    "segment1d": check_segment,
    "slice2d": check_slice,
    "train": check_train,
    "harden": check_harden,
    "constructors": check_constructor,
}


_SLOW = {"train", "harden", "files"}  # tried on every other network
_CHAINS = {"paths.top"}  # mostly tried on dense layers and ReLUs in turn: it refuses all others


# --- one network ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one function did with one network."""

    seed: int
    check: str
    kind: str  # right, refused, wrong or skipped
    message: str = ""


def try_check(case: Case, name: str) -> Outcome:
    """Run one check; every exception becomes an outcome."""
    seed = case.drawn.seed
    rng = random.Random(f"{seed} {name}")
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CHECKS[name](case, rng)
    except Unknown as why:
        return Outcome(seed, name, "skipped", str(why))
    except PathlensError as error:
        return Outcome(seed, name, "refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # a wrong number, or a crash
        where = "" if isinstance(error, AssertionError) else "\n" + traceback.format_exc(limit=-3)
        return Outcome(seed, name, "wrong", f"{type(error).__name__}: {error}{where}")
    return Outcome(seed, name, "right")


def case_of(seed: int, name: str | None = None) -> Case:
    """The network of a seed, for a check of that name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Case(draw(seed, "chain" if name in _CHAINS and seed % 4 else None))


def try_network(seed: int, checks: int = 5, only: str | None = None) -> list[tuple[Drawn, Outcome]]:
    """The network of a seed under some of the checks, which the seed chooses too."""
    chosen = random.Random(seed).sample(list(CHECKS), checks)
    names = [n for n in chosen if n not in _SLOW or seed % 2] if only is None else [only]
    usual, found = case_of(seed), []
    for name in names:
        case = case_of(seed, name) if name in _CHAINS else usual
        found.append((case.drawn, try_check(case, name)))
    return found


def describe(drawn: Drawn, outcome: Outcome) -> str:
    """All that is needed to look at a failure."""
    return (
        f"--- seed {outcome.seed}, {outcome.check}: {outcome.kind}\n{outcome.message}\n"
        f"inputs {tuple(drawn.x.shape)}\n{drawn.text}"
        f"repeat: python tests/fuzz/fuzz_networks.py --seed {outcome.seed} --n 1 --only '{outcome.check}'\n"
    )
