"""Smaller sizes for experiments under test."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from pathlens.papers import experiment


def shrink(patch: pytest.MonkeyPatch, name: str, sizes: Mapping[str, Any]) -> None:
    """Change sizes of an experiment at both scales until the patch is undone."""
    entry = experiment.find(name)
    assert set(sizes) <= set(entry.sizes)
    patch.setitem(experiment._REGISTERED, name, dataclasses.replace(entry, sizes={**entry.sizes, **sizes}))
