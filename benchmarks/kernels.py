"""Speed and memory of the kernels against torch.func, neural-tangents, a plain autograd loop, and the machine's floors.

Every row compares runs on the same network, the same inputs and the same machine within one run; the tasks of a row
take turns. Run with ``python -m benchmarks.kernels [--quick]``; it asserts nothing, it prints goals and what was met.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from benchmarks.measure import best_of, peak_memory
from benchmarks.peers import Peer, neural_tangents
from torch import Tensor, nn

import pathlens as pl

GIB = 2**30
JACOBIAN_BYTES = 4 * GIB  # a Jacobian beyond this is contracted in blocks of rows


@dataclass
class Row:
    """One case: our time, the peers' times, the floor, and what else was seen."""

    group: str
    case: str
    pathlens: float
    peers: dict[str, float] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float | str] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """Name and time of the fastest peer."""
        return min(self.peers.items(), key=lambda item: item[1]) if self.peers else None

    def goal(self, text: str, value: float, least: float | None = None, most: float | None = None) -> None:
        """Note a goal and whether it was met."""
        met = (least is None or value >= least) and (most is None or value <= most)
        self.goals.append({"goal": text, "value": value, "met": bool(met)})

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


# --- networks and peers --------------------------------------------------------------------------------------------


def inputs(n: int, *shape: int) -> Tensor:
    """The same random inputs for everybody."""
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(0))


def dense_net(d: int, hidden: tuple[int, ...], c: int) -> nn.Sequential:
    """A fully connected ReLU network without biases, from a fixed seed."""
    torch.manual_seed(0)
    return pl.models.templates.mlp(d, hidden, c)


def jacobian_contraction(net: nn.Module, x: Tensor, limit: int = JACOBIAN_BYTES) -> Tensor:
    """Trace kernel by torch.func: vmap of jacrev, then one product; in blocks of rows where it would not fit."""
    params = {k: v.detach() for k, v in net.named_parameters()}

    def one(p: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(net, p, (row[None],))[0]

    jacobian = torch.func.vmap(torch.func.jacrev(one), (None, 0))
    size = sum(v.numel() for v in params.values())
    c = net(x[:1]).shape[1]

    def flat(rows: Tensor) -> list[Tensor]:
        return [j.flatten(1) for j in jacobian(params, rows).values()]

    def product(left: list[Tensor], right: list[Tensor]) -> Tensor:
        return sum(torch.einsum("if,jf->ij", a, b) for a, b in zip(left, right))  # type: ignore[return-value]

    n = len(x)
    if n * c * size * 4 <= limit:
        every = flat(x)
        return product(every, every)
    step = max(limit // 2 // (c * size * 4), 1)
    out = torch.empty(n, n)
    for i in range(0, n, step):
        left = flat(x[i : i + step])
        for j in range(i, n, step):
            block = product(left, left if i == j else flat(x[j : j + step]))
            out[i : i + step, j : j + step] = block
            out[j : j + step, i : i + step] = block.T
    return out


def autograd_loop(net: nn.Module, x: Tensor) -> Tensor:
    """Trace kernel the way a script does it: one backward pass per example and output, then one product."""
    params = list(net.parameters())
    rows = []
    for row in x:
        f = net(row[None])[0]
        grads = [torch.autograd.grad(v, params, retain_graph=True) for v in f]
        rows.append(torch.cat([g.reshape(-1) for output in grads for g in output]))
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.T


def _steps(net: nn.Sequential) -> tuple[list[str], dict[str, np.ndarray], int]:
    names = {nn.Linear: "dense", nn.Conv2d: "conv", nn.ReLU: "relu", nn.AdaptiveAvgPool2d: "pool"}
    steps, arrays, count = [], {}, 0
    for module in net:
        if isinstance(module, nn.Flatten):
            continue
        steps.append(names[type(module)])
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            arrays[f"w{count}"] = module.weight.detach().numpy()
            if module.bias is not None:
                arrays[f"b{count}"] = module.bias.detach().numpy()
            count += 1
    return steps, arrays, count


def ask_peer(
    row: Row, peer: Peer, net: nn.Sequential, x: Tensor, kernel: Tensor, batches: list[int], limit: float
) -> None:
    """Add the times of neural-tangents to a row, and how far its numbers are from ours."""
    steps, arrays, count = _steps(net)
    job = {"kind": "empirical", "layers": steps, "weights": count, "batches": batches, "repeats": 2, "limit": limit}
    found = peer.call(job, {**arrays, "x": x.numpy()})
    row.peers |= {f"neural-tangents, {name}": took for name, took in found["seconds"].items()}
    row.notes += found["notes"]
    if "kernel" in found:
        theirs = torch.from_numpy(found["kernel"]).reshape(len(x), -1)
        theirs = theirs * net(x[:1]).shape[1]  # theirs is the mean over outputs, ours the sum
        rows = settled_rows(net, x)
        row.facts["scaled difference to neural-tangents"] = scaled_error(kernel, theirs, rows)
        if not bool(rows.all()):
            row.facts["rows left out of comparisons, a gate within rounding of zero"] = float((~rows).sum())


def scaled_error(got: Tensor, want: Tensor, rows: Tensor | None = None) -> float:
    """max |got − want| / √(k_ii k_jj), over some rows and columns."""
    size = want.double().diagonal().sqrt()
    error = (got.double() - want.double()).abs() / (size[:, None] * size)
    return float((error if rows is None else error[rows][:, rows]).max())


def settled_rows(net: nn.Sequential, x: Tensor) -> Tensor:
    """Rows whose gates do not hang on float32 rounding, (n,) bool: there alone two float32 programs must agree.

    A pre-activation within 1e-6 of zero opens its gate in one order of summation and not in another, which moves the
    kernel of that row by per cents. In a convolution one gate is one pixel of one channel and hardly counts.
    """
    found = torch.ones(len(x), dtype=torch.bool)
    if any(isinstance(module, nn.Conv2d) for module in net):
        return found
    h = x.double()
    with torch.no_grad():
        for module in copy.deepcopy(net).double():
            if isinstance(module, nn.ReLU):
                found &= (h.abs() > 1e-6 * h.square().mean().sqrt()).all(1)
            h = module(h)
    return found


def reference_error(net: nn.Sequential, x: Tensor, kernel: Tensor, rows: int) -> float:
    """Scaled error of a float32 kernel against float64 Jacobians, on some rows."""
    exact = jacobian_contraction(copy.deepcopy(net).double(), x[:rows].double())
    return scaled_error(kernel[:rows, :rows], exact, settled_rows(net, x[:rows]))


# --- cases ---------------------------------------------------------------------------------------------------------


def dense_ntk(
    n: int,
    c: int,
    peer: Peer | None,
    *,
    width: int = 128,
    layers: int = 5,
    loop: bool = True,
    group: str = "tangent kernel",
    repeats: int = 25,
) -> Row:
    """NTK of 784 → layers × width → c, trace over outputs, recording included."""
    net, x = dense_net(784, (width,) * layers, c), inputs(n, 784)
    record = pl.record(net, x)
    reads = [record.layer_inputs[layer.name][0] for layer in record.layers]
    senses = [t.flatten(1) for t in record.sensitivity.values()]

    weights = [module.weight.detach() for module in net if isinstance(module, nn.Linear)]

    def products() -> None:
        for h, weight in zip(reads, weights):  # forward
            torch.mm(h, weight.T)
        for delta, weight in zip(senses[1:], weights[1:]):  # backward, all outputs
            torch.mm(delta.reshape(-1, weight.shape[0]), weight)
        for factor in (*reads, *senses):  # the kernel
            torch.mm(factor, factor.T)

    own: dict[str, Callable[[], Any]] = {
        "pathlens": lambda: pl.kernels.ntk(net, x).dense(),
        "products": products,
        "record": lambda: pl.record(net, x),
    }
    peers: dict[str, Callable[[], Any]] = {"torch.func": lambda: jacobian_contraction(net, x)}
    size = sum(p.numel() for p in net.parameters())
    if loop and n * c * size * 4 <= JACOBIAN_BYTES:
        peers["autograd loop"] = lambda: autograd_loop(net, x)
    # apart from the peers, whose gigabytes leave the allocator in another state; first calls load and compile
    times = best_of(repeats, own, patience=10.0) | best_of(repeats, peers, patience=10.0)
    row = Row(group, f"NTK, 784→{layers}×{width}→{c}, n = {n}, float32", times["pathlens"])
    row.peers = {f"torch.func, jacrev and einsum{_blocks(n, c, size)}": times["torch.func"]}
    if "autograd loop" in times:
        row.peers["plain torch, autograd loop"] = times["autograd loop"]
    row.floor = {"bare matrix products": times["products"]}
    row.facts["recording alone, s"] = times["record"]
    kernel = pl.kernels.ntk(net, x).dense()
    row.facts["scaled error against float64 Jacobians"] = reference_error(net, x, kernel, 50)
    row.facts["scaled difference to torch.func"] = scaled_error(
        kernel[:200, :200], jacobian_contraction(net, x[:200]), settled_rows(net, x[:200])
    )
    if peer is not None:
        ask_peer(row, peer, net, x, kernel, [0], limit=40.0)
    return row


def _blocks(n: int, c: int, size: int) -> str:
    return "" if n * c * size * 4 <= JACOBIAN_BYTES else " in blocks"


def tangent_rows(n: int, peer: Peer) -> list[Row]:
    """One output and ten outputs, against everybody."""
    one, ten = dense_ntk(n, 1, peer), dense_ntk(n, 10, peer, loop=False)
    for row, least in ((one, 60.0), (ten, 20.0)):
        best = row.best_peer
        assert best is not None
        row.goal(f"at least {least:.0f}× the best peer", best[1] / row.pathlens, least=least)
        row.goal("same numbers, 1e-5 scaled", float(row.facts["scaled error against float64 Jacobians"]), most=1e-5)
    one.goal(
        "at most 1.3× the bare matrix products that recording and kernel need",
        one.pathlens / one.floor["bare matrix products"],
        most=1.3,
    )
    return [one, ten]


def sweep_rows(quick: bool) -> list[Row]:
    """How the time grows with n, width, depth and outputs."""
    n = 100 if quick else 500
    cases = [
        *({"n": size} for size in ((50, 100) if quick else (250, 500, 1000, 2000))),
        *({"width": width} for width in ((32, 64) if quick else (64, 256, 512))),
        *({"layers": layers} for layers in ((2, 3) if quick else (2, 10, 20))),
        *({"c": c} for c in ((3,) if quick else (3, 10, 30))),
    ]
    return [
        dense_ntk(**{"n": n, "c": 1, "peer": None, "loop": False, "group": "scaling", "repeats": 2, **case})  # type: ignore[arg-type]
        for case in cases
    ]


def convolutional_rows(n: int, size: int, peer: Peer) -> list[Row]:
    """GCONV with ten outputs: with all memory against everybody, within one gibibyte against torch.func alone."""
    torch.manual_seed(0)
    net, x = pl.models.templates.gconv(bias=True), inputs(n, 3, size, size)
    rows = []
    for budget in (None, GIB):
        # a Jacobian, the blocks it is made from and their product share the budget
        limit = JACOBIAN_BYTES if budget is None else budget // 4

        def ours(budget: int | None = budget) -> Tensor:
            return pl.kernels.ntk(net, x, max_bytes=budget).dense()

        def theirs(limit: int = limit) -> Tensor:
            return jacobian_contraction(net, x, limit)

        times = best_of(2, {"pathlens": ours, "torch.func": theirs})
        what = "" if budget is None else ", budget 1 GiB"
        row = Row("tangent kernel", f"NTK, GCONV, ten outputs, {size}×{size} images, n = {n}{what}", times["pathlens"])
        row.peers = {"torch.func, jacrev and einsum" + (" in blocks" if budget else ""): times["torch.func"]}
        with peak_memory() as peak:
            kernel = ours()
        with peak_memory() as their_peak:
            theirs()
        if peak.bytes is not None and their_peak.bytes is not None:
            row.facts["peak memory, GiB"] = peak.bytes / GIB
            row.facts["peak memory of torch.func, GiB"] = their_peak.bytes / GIB
        row.facts["scaled error against float64 Jacobians"] = reference_error(net, x, kernel, min(n, 4))
        if budget is None:
            ask_peer(row, peer, net, x, kernel, [0], limit=40.0)
        best = row.best_peer
        assert best is not None
        row.goal("at least as fast as the best peer", best[1] / row.pathlens, least=1.0)
        rows.append(row)
    return rows


def overlap_rows(n: int) -> list[Row]:
    """Λ of recorded gates by counting bits, against float32 products of the same gates."""
    net, x = dense_net(784, (128,) * 5, 1), inputs(n, 784)
    record = pl.record(net, x, sensitivities=False)
    gates = [record.gates(site).float() for site in record.sites]

    def products() -> Tensor:
        out = gates[0] @ gates[0].T
        for gate in gates[1:]:
            out *= gate @ gate.T
        return out

    ours = pl.kernels.overlap(record).dense()
    times = best_of(5, {"pathlens": lambda: pl.kernels.overlap(record).dense(), "products": products})
    row = Row("overlap kernel", f"Λ, 5 × 128 gates, n = {n}", times["pathlens"])
    row.peers = {"plain torch, float32 products": times["products"]}
    row.facts["equal to the products"] = str(bool(torch.equal(ours, products())))
    bits = n * n * sum(gate.shape[1] for gate in gates)
    row.facts["Gbit/s counted"] = bits / times["pathlens"] / 1e9
    row.goal("at least 4× the float32 products", times["products"] / times["pathlens"], least=4.0)
    return [row]


def large_rows(n: int, conv_rows: int, size: int) -> list[Row]:
    """Kernels too large to hold, within one gibibyte."""
    net, x = dense_net(784, (128,) * 5, 1), inputs(n, 784)
    rows = []
    kernel = pl.kernels.ntk(net, x, max_bytes=GIB)
    v = inputs(n)

    def by_tiles() -> Tensor:
        out = torch.zeros(n)
        for at, cols, tile in kernel.tiles():
            out[at] += tile @ v[cols]
        return out

    with peak_memory() as peak:
        times = best_of(3, {"pathlens": lambda: kernel @ v}) | best_of(1, {"tiles": by_tiles})
    gap = float((kernel @ v - by_tiles()).norm() / (kernel @ v).norm())
    row = Row("beyond memory", f"K @ v, NTK 784→5×128→1, n = {n:,}, budget 1 GiB: factors", times["pathlens"])
    row.peers = {"the same kernel tile by tile": times["tiles"]}
    row.facts["relative difference to tiles"] = gap
    if peak.bytes is not None:
        row.facts["peak memory, GiB"] = peak.bytes / GIB
        row.goal("peak memory at most 1.25 GiB", peak.bytes / GIB, most=1.25)
    rows.append(row)

    with peak_memory() as peak:
        times = best_of(1, {"pathlens": lambda: kernel.eigsh(5)})
    row = Row("beyond memory", f"five largest eigenpairs of the same kernel, n = {n:,}", times["pathlens"])
    row.facts["one product K @ v, s"] = rows[0].pathlens
    if peak.bytes is not None:
        row.facts["peak memory, GiB"] = peak.bytes / GIB
        row.goal("peak memory at most 1.25 GiB", peak.bytes / GIB, most=1.25)
    rows.append(row)

    torch.manual_seed(0)
    conv, images = pl.models.templates.gconv(bias=True), inputs(conv_rows, 3, size, size)
    with peak_memory() as peak:
        times = best_of(1, {"pathlens": lambda: pl.kernels.ntk(conv, images, max_bytes=GIB).dense()})
    gradients = conv_rows * 10 * sum(p.numel() for p in conv.parameters()) * 4 / GIB
    case = f"{conv_rows} × {conv_rows} block of the NTK of GCONV, ten outputs, budget 1 GiB"
    row = Row("beyond memory", case, times["pathlens"])
    row.facts["its gradients would take, GiB"] = gradients
    if peak.bytes is not None:
        row.facts["peak memory, GiB"] = peak.bytes / GIB
        row.goal("peak memory at most 1.25 GiB", peak.bytes / GIB, most=1.25)
    rows.append(row)
    return rows


def infinite_rows(n: int, images: int, size: int, peer: Peer) -> list[Row]:
    """Infinite-width kernels in float64, against the analytic kernels of neural-tangents."""
    rows = []
    x = inputs(n, 784).double()
    pictures = inputs(images, 3, size, size).double()
    cases: list[tuple[str, dict[str, Any], Tensor, Callable[[], Tensor]]] = [
        (
            f"infinite-width NTK, 5 hidden layers, n = {n}",
            {"kind": "infinite dense", "hidden_layers": 5},
            x,
            lambda: pl.kernels.relu_ntk(x).dense(),
        ),
    ]
    for pool in ("flatten", "gap"):
        job = {"kind": "infinite conv", "hidden_layers": 4, "pool": pool}
        name = f"CNTK, 4 layers, {pool}, {size}×{size} images, n = {images}"
        cases.append((name, job, pictures, lambda pool=pool: pl.kernels.relu_cntk(pictures, pool=pool).dense()))
    for name, job, data, task in cases:
        kernel = task()
        row = Row("infinite width", name + ", float64", best_of(2, {"pathlens": task})["pathlens"])
        found = peer.call({**job, "repeats": 2}, {"x": data.numpy()})
        row.peers = {f"neural-tangents, {k}": took for k, took in found["seconds"].items()}
        row.notes = found["notes"]
        if "kernel" in found:
            row.facts["scaled difference to neural-tangents"] = scaled_error(kernel, torch.from_numpy(found["kernel"]))
        rows.append(row)
    return rows


def main(quick: bool = False, peers: bool = True) -> list[dict[str, Any]]:
    """Run every case, print a line for each, and return the rows."""
    peer = neural_tangents() if peers else Peer(None, "neural-tangents was left out")
    size = 8 if quick else 32
    jobs: dict[str, Callable[[], list[Row]]] = {
        "tangent kernels, fully connected": lambda: tangent_rows(100 if quick else 1000, peer),
        "tangent kernel, convolutional": lambda: convolutional_rows(3 if quick else 32, size, peer),
        "overlap kernel": lambda: overlap_rows(500 if quick else 4096),
        "beyond memory": lambda: large_rows(1000 if quick else 20_000, 6 if quick else 500, size),
        "infinite width": lambda: infinite_rows(100 if quick else 1000, 3 if quick else 8, size, peer),
        "scaling": lambda: sweep_rows(quick),
    }
    out = []
    for name, job in jobs.items():
        print(f"  … {name}", flush=True)
        for row in job():
            out.append(row.as_dict())
            print(line(out[-1]), flush=True)
    return out


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    best = min(row["peers"].items(), key=lambda item: item[1]) if row["peers"] else None
    text = f"{row['case']}: {seconds(row['pathlens'])}"
    if best:
        text += f"; best peer {seconds(best[1])} ({best[0]}): {ratio(best[1] / row['pathlens'])}"
    for goal in row["goals"]:
        text += f"; {goal['goal']}: {goal['value']:.3g}, {'met' if goal['met'] else 'NOT met'}"
    return "  " + text + "".join(f"\n    ({note})" for note in row["notes"])


def seconds(value: float) -> str:
    """A time for people.

    >>> seconds(0.01234), seconds(3.21), seconds(321.4)
    ('12.3 ms', '3.2 s', '321 s')
    """
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def ratio(value: float) -> str:
    """A factor for people.

    >>> ratio(123.4), ratio(1.234)
    ('123×', '1.2×')
    """
    return f"{value:.0f}×" if value >= 20 or math.isinf(value) else f"{value:.1f}×"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--no-peers", action="store_true", help="leave neural-tangents out")
    chosen = parser.parse_args()
    main(chosen.quick, not chosen.no_peers)
