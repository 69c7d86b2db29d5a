"""`exact_precision` switches reduced precision off and restores every setting, in whichever way it was made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pathlens.precision import exact_precision

_B: Any = torch.backends


def _newer() -> tuple[Any, ...]:
    if not hasattr(torch.backends, "fp32_precision"):
        return ()
    return _B, _B.cudnn, _B.cudnn.conv, _B.cudnn.rnn, _B.cuda.matmul, _B.mkldnn.conv, _B.mkldnn.rnn, _B.mkldnn.matmul


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:  # older and newer names disagree
        return "disagree"


def settings() -> dict[str, Any]:
    older: dict[str, Callable[[], Any]] = {
        "cudnn": lambda: torch.backends.cudnn.allow_tf32,
        "cublas": lambda: torch.backends.cuda.matmul.allow_tf32,
        "matmul": torch.get_float32_matmul_precision,
    }
    found = {name: _read(get) for name, get in older.items()}
    return found | {f"newer {i}": op.fp32_precision for i, op in enumerate(_newer())}


def _reset() -> None:
    """torch's defaults, whatever a test before has left."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for op in _newer():
        if op not in _newer()[2:4]:
            op.fp32_precision = "none"


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    _reset()
    yield
    _reset()


def _nothing() -> None:
    pass


def _cudnn_off() -> None:
    torch.backends.cudnn.allow_tf32 = False


def _cublas_on() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def _all(precision: str) -> Callable[[], None]:
    def change() -> None:
        _B.fp32_precision = precision

    return change


def _conv_only() -> None:
    _B.cudnn.conv.fp32_precision = "ieee"


def _rnn_only_after_off() -> None:
    torch.backends.cudnn.allow_tf32 = False
    _B.cudnn.rnn.fp32_precision = "tf32"


def _matmul_by_the_newer_name() -> None:
    _B.cuda.matmul.fp32_precision = "tf32"


def _cudnn_general() -> None:
    _B.cudnn.fp32_precision = "ieee"
    _B.cudnn.conv.fp32_precision = "none"


def _follows_and_not() -> None:
    _B.fp32_precision = "tf32"
    _B.cudnn.conv.fp32_precision = "none"
    _B.mkldnn.matmul.fp32_precision = "ieee"


WAYS: dict[str, Callable[[], None]] = {
    "defaults": _nothing,
    "cudnn off": _cudnn_off,
    "cublas on": _cublas_on,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
}
NEWER: dict[str, Callable[[], None]] = {
    "all tf32": _all("tf32"),
    "all ieee": _all("ieee"),
    "conv only": _conv_only,
    "rnn only": _rnn_only_after_off,
    "matmul": _matmul_by_the_newer_name,
    "cudnn general": _cudnn_general,
    "some follow": _follows_and_not,
}
if _newer():
    WAYS |= NEWER


def check_exact() -> None:
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
    assert all(op.fp32_precision == "ieee" for op in _newer()[2:])


@pytest.mark.parametrize("way", WAYS)
def test_every_setting_is_restored(way: str) -> None:
    WAYS[way]()
    before = settings()
    with exact_precision():
        check_exact()
        with exact_precision():
            check_exact()
        check_exact()
    assert settings() == before
    with pytest.raises(KeyError), exact_precision():
        raise KeyError
    assert settings() == before
    if _newer():  # what followed a general setting still does, and nothing else
        _B.fp32_precision = "ieee" if _B.fp32_precision != "ieee" else "tf32"
        moved = settings()
        _reset()
        WAYS[way]()
        _B.fp32_precision = "ieee" if _B.fp32_precision != "ieee" else "tf32"
        assert settings() == moved


def test_autocast_is_off_inside_only() -> None:
    x = torch.randn(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        with exact_precision():
            assert not torch.is_autocast_enabled("cpu")
            assert (x @ x).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu") and (x @ x).dtype == torch.bfloat16


def test_settings_can_be_kept() -> None:
    torch.set_float32_matmul_precision("high")
    before = settings()
    with exact_precision(False):
        with exact_precision():
            assert settings() == before
        with torch.autocast("cpu", torch.bfloat16), exact_precision():
            assert not torch.is_autocast_enabled("cpu")
    with exact_precision():
        check_exact()


def test_threads_that_work_at_once_do_not_restore_too_early() -> None:
    before = settings()
    entered, leave = threading.Event(), threading.Event()
    found: list[Any] = []

    def work() -> None:
        with exact_precision():
            entered.set()
            leave.wait(10)
            found.append(torch.backends.cudnn.allow_tf32)

    thread = threading.Thread(target=work)
    with exact_precision():
        thread.start()
        entered.wait(10)
    assert not torch.backends.cudnn.allow_tf32  # the other one still works
    leave.set()
    thread.join()
    assert found == [False] and settings() == before
