"""`exact_precision`: float32 work in float32, whatever reduced precision torch has been allowed elsewhere.

Every part of the package that runs a network or multiplies matrices of a kernel does so inside this context. Backends
of reduced precision are chosen by name, not here.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

_DEVICES = ("cpu", "cuda", "mps", "xpu")  # of autocast
_asked: ContextVar[bool] = ContextVar("exact_precision", default=True)
_lock = threading.Lock()  # torch's settings belong to the process, not to a thread
_inside = 0  # how many contexts are open, in all threads
_restore: Callable[[], None] | None = None  # restores the settings that the first of them found
_warned = False  # whether torch has warned of its older names, which it does once


@contextmanager
def exact_precision(enabled: bool = True) -> Iterator[None]:
    """Switch TF32, other reduced precisions of float32 and autocast off; restore them afterwards.

    Pathlens does its own work in this context: recordings, rows of streams, tiles of kernels, solvers, paths and
    regions, here or on a worker. By default cuDNN convolves in TF32, which has 10 bits of mantissa: without this the
    tangent kernel of a ResNet-18 in float32 is off by 2e-4 (scaled), with it by 7e-7.

    Parameters
    ----------
    enabled : bool
        If False, Pathlens leaves torch's own settings for float32 as they are (`torch.backends.cudnn`,
        `torch.backends.cuda.matmul`, `torch.set_float32_matmul_precision`), for speed. Use it where numbers are
        computed: around ``K.dense()``, not only around ``ntk(net, X)``. Workers of a cluster are always exact, and
        autocast stays off: a kernel has one dtype.

    Notes
    -----
    TF32 is a setting of the process: other threads compute without it too while Pathlens works. Autocast is one of the
    thread. The context may be entered again, by several threads at once; the last one out restores the settings.

    Examples
    --------
    >>> torch.backends.cudnn.allow_tf32
    True
    >>> with exact_precision():
    ...     torch.backends.cudnn.allow_tf32
    False
    >>> with exact_precision(False), exact_precision():
    ...     torch.backends.cudnn.allow_tf32
    True
    """
    if not enabled:
        token = _asked.set(False)
        try:
            yield
        finally:
            _asked.reset(token)
        return
    switches = _asked.get()
    if switches:
        _enter()
    try:
        with _no_autocast():
            yield
    finally:
        if switches:
            _leave()


def _no_autocast() -> AbstractContextManager[Any]:
    found = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    if not found:
        return nullcontext()
    stack = ExitStack()
    for device in found:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def _enter() -> None:
    global _inside, _restore
    with _lock:
        if _inside == 0:
            _restore = _switch_off()
        _inside += 1


def _leave() -> None:
    global _inside, _restore
    with _lock:
        _inside -= 1
        if _inside == 0 and _restore is not None:
            _restore()
            _restore = None


def _switch_off() -> Callable[[], None]:
    """Switch to full float32; returns a function that restores the settings."""
    global _warned
    with nullcontext() if _warned else warnings.catch_warnings():
        if not _warned:
            warnings.simplefilter("ignore")  # torch 2.9 warns once that the older names are deprecated
        operations = _operations()
        own, allowed = _own_settings(operations), _allows_tf32(operations)
        _set(operations, "ieee")
        matmul = torch.get_float32_matmul_precision()
        # the older names must agree with the newer ones: torch raises an error when one that does not is read
        _set_older_names(False, "highest")
        _set(operations, "ieee")
    _warned = True

    def restore() -> None:
        _set_older_names(allowed, matmul)
        for operation, precision in zip(operations, own):
            operation.fp32_precision = precision

    return restore


def _set(operations: tuple[Any, ...], precision: str) -> None:
    for operation in operations:
        operation.fp32_precision = precision


def _set_older_names(cudnn_tf32: bool, matmul: str) -> None:
    torch.backends.cudnn.allow_tf32 = cudnn_tf32
    torch.set_float32_matmul_precision(matmul)


@cache
def _operations() -> tuple[Any, ...]:
    """The settings that have a precision of their own, from torch 2.9 on; none before."""
    if not hasattr(torch.backends, "fp32_precision"):
        return ()
    cuda, cudnn, mkldnn = (getattr(torch.backends, name) for name in ("cuda", "cudnn", "mkldnn"))
    return cudnn.conv, cudnn.rnn, cuda.matmul, mkldnn.conv, mkldnn.rnn, mkldnn.matmul


def _own_settings(operations: tuple[Any, ...]) -> list[str]:
    """The precision of every operation, "none" where it follows a more general setting."""
    own = [operation.fp32_precision for operation in operations]
    followed: list[bool] = []
    cudnn: Any = torch.backends.cudnn
    if operations and torch.backends.fp32_precision != "none":  # type: ignore[attr-defined]
        followed = _followers(torch.backends, (*operations, cudnn))
        own = ["none" if follows else precision for precision, follows in zip(own, followed)]
    if operations and cudnn.fp32_precision != "none" and not any(followed[-1:]):
        own = ["none" if follows else precision for precision, follows in zip(own, _followers(cudnn, operations))]
    return own


def _followers(general: Any, operations: tuple[Any, ...]) -> list[bool]:
    """Which operations follow a setting; torch cannot be asked, so the setting is changed for a moment."""
    precision, before = general.fp32_precision, [operation.fp32_precision for operation in operations]
    general.fp32_precision = "tf32" if precision == "ieee" else "ieee"
    after = [operation.fp32_precision for operation in operations]
    general.fp32_precision = precision
    return [a != b for a, b in zip(before, after)]


def _allows_tf32(operations: tuple[Any, ...]) -> bool:
    """`torch.backends.cudnn.allow_tf32`, also where the newer names disagree with it, and reading it is an error."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        _set(operations[:2], "ieee")
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # it disagrees with "ieee" as well
        return True
