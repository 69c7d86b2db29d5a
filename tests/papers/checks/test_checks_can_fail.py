"""Every check can fail: on each of its wrong formulas, and on faults put into the package's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pathlens import kernels
from pathlens.linops import GramSum
from pathlens.models import gates
from pathlens.papers.checks import perform, select
from pathlens.regions.partitions import Slice2D
from pathlens.theory import evolving, flow
from pathlens.theory.deep_gated import moments

MUTANTS = [(one, mutant) for one in select() for mutant in one.mutants]


@pytest.mark.parametrize(("one", "mutant"), MUTANTS, ids=lambda v: v if isinstance(v, str) else v.name)
def test_it_rejects(one: Any, mutant: str) -> None:
    result = perform(one, mutant)
    assert result.verdict == "fails", f"{one.name} does not tell its formula from this one: {mutant}"


def test_every_check_has_something_to_reject() -> None:
    assert all(one.mutants for one in select())


# --- faults in the package -----------------------------------------------------------------------------------------


def scaled(function: Callable[..., Any], by: float) -> Callable[..., Any]:
    def wrong(*args: Any, **options: Any) -> Any:
        return function(*args, **options) * by

    return wrong


def test_gates_that_are_on_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates.Hard, "forward", lambda self, q: (q >= 0).to(q.dtype))
    assert perform(select(["hs.theorem1"])[0]).verdict == "holds"  # outputs cannot tell
    monkeypatch.setattr(kernels, "overlap", _with_loose_bits(kernels.overlap))
    assert perform(select(["hs.gates"])[0]).verdict == "fails"


def _with_loose_bits(overlap: Callable[..., Any]) -> Callable[..., Any]:
    class Loose:
        def __init__(self, net: Any, X: Any) -> None:
            found = [(q >= 0).double() for q in net.preactivations(X).values()]
            self.counts = np.prod([(g @ g.T).numpy() for g in found], axis=0)

        def exact_counts(self) -> np.ndarray:
            return self.counts

    return Loose


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[pytest.MonkeyPatch], None]]] = {
    "npk too large": (
        ("dgn.features", "dgn.theorem2.3", "dgn.lemma3.1ii", "dgn.lemma4.1", "npf.lemma2.1", "npf.theorem5.1"),
        lambda m: m.setattr(kernels, "npk", scaled(kernels.npk, 1.5)),
    ),
    "ntk too small": (
        ("dgn.eq1", "dgn.lemma2.1", "npf.prop1.1", "npf.prop3.1", "npf.prop3.2", "npf.prop4.1", "npf.vtk"),
        lambda m: m.setattr(kernels, "ntk", scaled(kernels.ntk, 0.5)),
    ),
    "counts off by one": (
        ("hs.overlap",),
        lambda m: m.setattr(GramSum, "exact_counts", lambda self, f=GramSum.exact_counts: f(self) + 1),
    ),
    "soft gates a little steeper": (
        ("dgn.eq2", "dgn.eq6", "dgn.lemma3.1iii", "npf.prop4.1"),
        lambda m: m.setattr(gates.Soft, "forward", lambda self, q: torch.sigmoid(1.01 * self.beta * q)),
    ),
    "cells of a slice without the last gate": (
        ("hs.union", "hs.patterns"),
        lambda m: m.setattr(Slice2D, "active", lambda self, p, f=Slice2D.active: f(self, p) | True),
    ),
    "flow with one 1/K": (
        ("gdln.eq9", "gdln.dual", "gdln.eq19", "gdln.eq31", "gdln.redundant"),
        lambda m: m.setattr(flow.GDLN, "_rates", property(lambda self, f=flow.GDLN._rates.fget: self.K * f(self))),
    ),
    "moments without gates": (
        ("gdln.eq6", "gdln.eq9"),
        lambda m: m.setattr(flow, "gate_table", lambda g, x, allow_dead=False: np.ones_like(g)),
    ),
    "flow with gates that never flip": (
        ("gdln.evolving",),
        lambda m: m.setattr(evolving, "first_violation", lambda polynomials: (1.0, -1)),
    ),
    "variance of normal weights": (
        ("dgn.variance", "dgn.variance_linear"),
        lambda m: m.setattr(moments, "_moments", lambda x, s, v, e, f=moments._moments: f(x, s, v, 0.0)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_package_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names, put = FAULTS[fault]
    put(monkeypatch)
    for one in select(names):
        assert perform(one).verdict == "fails", f"{one.name} did not notice"
