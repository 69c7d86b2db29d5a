"""Worker processes on this machine, run by loky and connected by pipes, so that no other process can send them work.

Loky is used in place of `concurrent.futures.ProcessPoolExecutor` because that one imports the user's script again in
every worker, which fails for scripts without a main guard.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudpickle import dumps  # sends functions of the user's script by value
from joblib.externals.loky import process_executor

from pathlens.errors import ClusterError
from pathlens.stores.executors import Executor, Item, default_workers, pickle_error, repeated_death_error

RETRIES = 3  # how often a task is run again because its worker has died
_HEARTBEAT_SECONDS = 0.5  # between heartbeats, and between checks of them


# --- inside a worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """A function and its shared argument; called with a pickled item, returns a pickled ("done" or "failed", value)."""

    function: Callable[..., Any]
    shared: Any
    threads: int

    def __call__(self, item: bytes) -> bytes:
        import torch

        torch.set_num_threads(self.threads)
        try:
            answer = ("done", self.function(self.shared, *pickle.loads(item)))
        except Exception as error:
            answer = ("failed", error)
        try:
            data = dumps(answer)
            if answer[0] == "failed":
                pickle.loads(data)  # many exceptions can be pickled but not unpickled
        except Exception as error:
            what = f"{type(answer[1]).__name__}: {answer[1]}" if answer[0] == "failed" else "its result"
            return pickle.dumps(("unsendable", f"{what[:2000]} cannot be sent ({type(error).__name__}: {error})"))
        return data


_task: Callable[[bytes], bytes]


def _start(heartbeat: str, log: str, parent: int) -> None:
    """Initialise a worker process: its output goes to the log file, and its heartbeats begin."""
    if hasattr(os, "setsid"):
        os.setsid()  # an interrupt from the keyboard goes to the parent alone, which then stops the workers
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    process_executor._USE_PSUTIL = False  # loky replaces workers that grow by 300 MB; blocks may need that much

    def beat() -> None:
        while os.getppid() == parent:
            os.utime(heartbeat)
            time.sleep(_HEARTBEAT_SECONDS)
        if hasattr(os, "killpg"):  # the parent has ended: end at once, with the processes that a task has started
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=beat, daemon=True).start()


def _load(data: bytes) -> None:
    """Unpickle the task; if that fails, every item returns the error."""
    global _task
    try:
        _task = pickle.loads(data)
    except Exception as error:  # of any class: an import or the object's own methods fail
        answer = pickle.dumps(("unprepared", f"{type(error).__name__}: {error}"))
        _task = lambda item: answer  # noqa: E731


def _run(item: bytes) -> bytes:
    return _task(item)


# --- in this process -------------------------------------------------------------------------------------------


class _Worker:
    """A pool of one process: when it dies, other workers continue."""

    def __init__(self, folder: Path, number: int, task: bytes) -> None:
        self._heartbeat = folder / str(number)
        self._heartbeat.touch()
        self._last_beat = 0
        self.silent = 0.0  # seconds without a heartbeat
        self._pool = process_executor.ProcessPoolExecutor(
            1, initializer=_start, initargs=(str(self._heartbeat), str(folder / "log"), os.getpid())
        )
        self._pool.submit(_load, task)

    def submit(self, item: Item) -> Future[bytes]:
        self.silent = 0.0
        found: Future[bytes] = self._pool.submit(_run, dumps(item))
        return found

    def check(self, timeout: float) -> None:
        """Stop the process if it is silent for too long. Counts checks: a suspended parent does not blame workers."""
        beat = self._heartbeat.stat().st_mtime_ns
        self.silent = self.silent + _HEARTBEAT_SECONDS if beat == self._last_beat else 0.0
        self._last_beat = beat
        if self.silent > timeout:
            self.stop()

    def stop(self) -> None:
        """End the process at once, with those that it has started: it holds nothing."""
        self._pool.shutdown(kill_workers=True)


class ProcessExecutor(Executor, contextlib.AbstractContextManager["ProcessExecutor"]):
    """Processes on this machine, started when there is work for them and stopped on exit."""

    def __init__(self, workers: int, timeout: float) -> None:
        self.workers, self.place = workers, f"{workers} processes on this machine"
        self._timeout = timeout
        self._threads = max(default_workers() // workers, 1)
        self._alive: list[_Worker] = []

    def __exit__(self, *error: object) -> None:
        while self._alive:
            self._alive.pop().stop()

    def map(self, function: Callable[..., Any], shared: Any, items: Iterable[Item]) -> Iterator[Any]:
        try:
            task = dumps(_Task(function, shared, self._threads))
        except Exception as error:  # pickle raises whatever the object's own methods raise
            raise pickle_error(error) from error
        with tempfile.TemporaryDirectory(prefix="pathlens-", ignore_cleanup_errors=True) as folder, self:
            yield from self._run(task, iter(items), Path(folder))

    def _run(self, task: bytes, items: Iterator[Item], folder: Path) -> Iterator[Any]:
        (folder / "log").touch()
        running: dict[Future[bytes], tuple[_Worker, Item]] = {}
        idle: list[_Worker] = []
        again: list[Item] = []  # items whose worker has died
        deaths: dict[Item, int] = {}
        started = 0
        error: BaseException | None = None
        checked = time.monotonic()
        while True:
            while error is None and len(running) < self.workers:
                item = again.pop() if again else next(items, None)
                if item is None:
                    break
                if not idle:
                    started += 1
                    idle.append(self._start(folder, started, task))
                worker = idle.pop()
                running[worker.submit(item)] = worker, item
            if not running:
                break
            if time.monotonic() - checked >= _HEARTBEAT_SECONDS:
                checked = time.monotonic()
                for worker, _ in running.values():
                    worker.check(self._timeout)
            for future in wait(running, _HEARTBEAT_SECONDS, FIRST_COMPLETED).done:
                worker, item = running.pop(future)
                try:
                    data = future.result()
                except BaseException as death:  # loky's errors for a process that has ended
                    worker.stop()
                    self._alive.remove(worker)
                    deaths[item] = deaths.get(item, 0) + 1
                    if deaths[item] > RETRIES:
                        error = error or repeated_death_error(self.place, item, self._cause(worker, death, folder))
                    again.append(item)
                    continue
                idle.append(worker)
                kind, value = self._read(data, item)
                if kind == "done":
                    yield item, value
                else:
                    error = error or value
        if error is not None:
            raise error

    def _start(self, folder: Path, number: int, task: bytes) -> _Worker:
        try:
            worker = _Worker(folder, number, task)
        except OSError as error:
            raise ClusterError(
                f"{self.place}: a process cannot be started ({error}). Lower workers, or use client=False."
            ) from error
        self._alive.append(worker)
        return worker

    def _read(self, data: bytes, item: Item) -> tuple[str, Any]:
        """The answer of a worker: ("done", result), or a kind of failure and its error."""
        try:
            kind, value = pickle.loads(data)
        except Exception as error:  # of any class: the object's own methods fail
            kind, value = "unsendable", f"its result cannot be read here ({type(error).__name__}: {error})"
        if kind == "unsendable":
            value = ClusterError(f"{self.place}: task {item}: {value}. Use client=False.")
        elif kind == "unprepared":
            value = ClusterError(
                f"{self.place}: the workers could not be prepared ({value}). Everything that the work "
                f"needs must be importable by {sys.executable}; or use client=False."
            )
        return kind, value

    def _cause(self, worker: _Worker, death: BaseException, folder: Path) -> str:
        """Why a worker has ended, as far as it is known."""
        if worker.silent > self._timeout:
            return f"no heartbeat for {self._timeout:g} s"
        codes = re.findall(r"[\w ]+\(-?\d+\)", str(death))  # of the form SIGKILL(-9) or EXIT(1)
        last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        return ": ".join(["worker ended", *codes, *last])
