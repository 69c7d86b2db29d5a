"""Per-example Jacobians by torch.func, one row at a time, and the gradients that a record says."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pathlens.models import GatedNetwork
from pathlens.records import Record


def jacobians(net: nn.Module, x: Tensor, rows: Tensor | None = None) -> dict[str, Tensor]:
    """Parameter → ∂f_k/∂parameter for every row, (n, c, *shape); computed without records."""
    parameters = {k: p.detach() for k, p in net.named_parameters()}
    found: dict[str, list[Tensor]] = {k: [] for k in parameters}
    for i in range(x.shape[0]):
        one = copy.deepcopy(net)  # a forward that writes into a buffer must not meet its own trace
        extra = () if rows is None else (rows[i : i + 1],)

        def outputs(p: dict[str, Tensor], one: nn.Module = one, i: int = i, extra: tuple = extra) -> Tensor:
            return torch.func.functional_call(one, p, (x[i : i + 1].clone(), *extra)).reshape(-1)

        for k, jacobian in torch.func.jacrev(outputs)(parameters).items():
            found[k].append(jacobian)
    return {k: torch.stack(v) for k, v in found.items()}


def recorded_gradients(rec: Record, net: nn.Module) -> dict[str, Tensor]:
    """Parameter → (n, c, *shape) for every weight and bias that the record's layers give: Σ_p A_p ⊗ D_p and Σ_p D_p."""
    parameters = dict(net.named_parameters())
    found = {}
    for layer in rec.layers:
        weight = layer.name if layer.name in parameters else f"{layer.name}.weight"
        a = rec.inputs(layer.name)
        d = torch.stack([rec.sensitivities(layer.name, k) for k in range(rec.outputs)], dim=1)
        assert a.shape[1:] == (d.shape[2], layer.inputs) and d.shape[-1] == layer.outputs
        shape = parameters[weight].shape
        found[weight] = torch.einsum("npi,ncpm->ncmi", a, d).reshape(rec.n, rec.outputs, *shape)
        if layer.bias:
            found[weight.removesuffix("weight") + "bias"] = d.sum(2)
    return found


def check_record(net: nn.Module, x: Tensor, rec: Record, rows: Tensor | None = None) -> None:
    """Fail unless outputs and every gradient of the record are right, and every other parameter is named."""
    with torch.no_grad():
        expected = net(x.clone()) if rows is None else net(x, rows)
    expected = expected.reshape(x.shape[0], -1)
    assert rec.f.dtype == torch.float64 and torch.allclose(rec.f, expected, rtol=0, atol=1e-12)
    truth = jacobians(net, x, rows)
    recorded = recorded_gradients(rec, net)
    for name, gradient in recorded.items():
        scale = max(1.0, float(truth[name].abs().max()))
        error = float((gradient - truth[name]).abs().max()) / scale
        assert error <= 1e-12, f"{name}: error {error:.1e}"
    trained = {k for k, p in net.named_parameters() if p.requires_grad}
    assert trained - set(recorded) == set(rec.untracked)
    assert not set(recorded) & set(rec.untracked)


def check_gates(net: GatedNetwork, x: Tensor, rec: Record, rows: Tensor | None = None) -> None:
    """Fail unless gate values and bits are the network's own, bit for bit."""
    with torch.no_grad():
        own, hard = net.gates(x, rows), net.gates(x, rows, hard=True)
    assert rec.sites == net.site_names == tuple(own)
    for site in net.sites:
        assert torch.equal(rec.gates(site.name), own[site.name])
        assert rec.bits[site.name].dtype == torch.bool
        if not site.slope:
            assert torch.equal(rec.bits[site.name].to(x.dtype), hard[site.name])
