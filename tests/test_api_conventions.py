"""docs/api-conventions.md, as far as it can be checked mechanically, on every public function."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PACKAGES = (
    "data",
    "estimators",
    "hardening",
    "kernels",
    "linops",
    "models",
    "paths",
    "recording",
    "regions",
    "theory",
    "theory.deep_gated",
    "training",
)
# arguments with a default that may be positional: data, and the shape of a network
POSITIONAL = {"X", "Y", "y", "data", "inputs", "hidden", "outputs"}
FORBIDDEN = {
    "learning_rate",
    "n_epochs",
    "optimiser",
    "schedule",
    "held_out",
    "val",
    "columns",
    "dataset",
    "rng",
    "random_seed",
    "budget",
    "fidelity",
}
MOST_REQUIRED = 3  # positional arguments without a default

# Functions that do not follow the conventions yet. Remove an entry together with what it excuses; add none.
EXCEPTIONS: dict[str, set[str]] = {}


def public_functions(package: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions of a package, as (name, function)."""
    module = importlib.import_module(f"pathlens.{package}")
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value):
            yield name, value


def broken_rules(function: Callable[..., Any]) -> list[str]:
    """What a function's signature breaks, in words; empty if nothing."""
    parameters = list(inspect.signature(function).parameters.values())
    required = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    found = [f"{len(required)} required positional arguments"] if len(required) > MOST_REQUIRED else []
    for i, p in enumerate(parameters):
        if p.annotation is p.empty:
            found.append(f"{p.name} has no annotation")
        if p.name in FORBIDDEN:
            found.append(f"{p.name} is not a name of docs/api-conventions.md")
        if i and p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty and p.name not in POSITIONAL:
            found.append(f"{p.name} has a default and is not keyword-only")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_follow_the_conventions(package: str) -> None:
    broken = {name: rules for name, function in public_functions(package) if (rules := broken_rules(function))}
    excused = EXCEPTIONS.get(package, set())
    assert {name: rules for name, rules in broken.items() if name not in excused} == {}
    assert excused <= broken.keys(), "these follow the conventions now: remove them from EXCEPTIONS"


def test_the_rules_can_be_broken() -> None:
    def wrong(net, X: Any, learning_rate: float = 0.1) -> None: ...  # type: ignore[no-untyped-def]

    def long(a: int, b: int, c: int, d: int) -> None: ...

    assert broken_rules(wrong) == [
        "net has no annotation",
        "learning_rate is not a name of docs/api-conventions.md",
        "learning_rate has a default and is not keyword-only",
    ]
    assert broken_rules(long) == ["4 required positional arguments"]


def test_every_result_is_annotated() -> None:
    bare = [
        f"{package}.{name}"
        for package in PACKAGES
        for name, function in public_functions(package)
        if inspect.signature(function).return_annotation is inspect.Signature.empty
    ]
    assert bare == []
