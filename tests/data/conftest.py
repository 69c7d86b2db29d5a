"""Where the real files are, an empty cache for every test, and the tiny sets as fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_sets import Tiny, make_cifar10, make_cifar100, make_idx

SIBLING = Path(__file__).parents[2] / "../shared/data"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's own cache or data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PATHLENS_DATA", raising=False)
    return tmp_path / "cache" / "pathlens"


@pytest.fixture(scope="session")
def real_folder() -> Path:
    given = os.environ.get("PATHLENS_DATA")
    folder = Path(given) if given else SIBLING.resolve()
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not a folder; set PATHLENS_DATA")
    return folder


@pytest.fixture
def real(real_folder, monkeypatch):
    """Asks for one real set; skips where it is absent."""
    from pathlens.data import store

    monkeypatch.setenv("PATHLENS_DATA", str(real_folder))

    def need(name: str) -> Path:
        if store.find(store.facts_of(name)) is None:
            pytest.skip(f"{name} is not in {real_folder}")
        return real_folder

    return need


@pytest.fixture
def tiny_mnist(monkeypatch) -> Tiny:
    return make_idx(monkeypatch, "mnist", 1)


@pytest.fixture
def tiny_fashion(monkeypatch) -> Tiny:
    return make_idx(monkeypatch, "fashion_mnist", 2)


@pytest.fixture
def tiny_cifar10(monkeypatch) -> Tiny:
    return make_cifar10(monkeypatch)


@pytest.fixture
def tiny_cifar100(monkeypatch) -> Tiny:
    return make_cifar100(monkeypatch)
