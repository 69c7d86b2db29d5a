"""Worker processes on this machine, connected by pipes: nothing listens, so that nobody else can send them work.

They run ``worker.py`` by command line. Python's own process pools import the user's script anew in every worker, which
fails for scripts that do not guard their main part. Only `pathlens.linops.cluster` imports this module.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import torch
from cloudpickle import dumps  # functions of the user's script are sent by value

from pathlens.errors import ClusterError
from pathlens.linops import worker
from pathlens.linops.cluster import Crew, cannot_be_sent, default_workers, keeps_dying

RETRIES = 3  # times that a piece is given to another worker because its own has died
_LOOK = 0.5  # seconds between looks at who is silent
_STOP_SECONDS = 10.0  # for a killed process to be gone


@dataclass(frozen=True)
class _Task:
    """What a worker process does with an item, as bytes."""

    function: Callable[..., Any]
    shared: Any
    threads: int

    def __call__(self, item: bytes) -> bytes:
        torch.set_num_threads(self.threads)
        try:
            answer = ("done", self.function(self.shared, *pickle.loads(item)))
        except Exception as error:
            answer = ("failed", error)
        try:
            data = dumps(answer)
            if answer[0] == "failed":
                pickle.loads(data)  # exceptions that cannot be rebuilt are common
        except Exception as error:
            what = f"{type(answer[1]).__name__}: {answer[1]}" if answer[0] == "failed" else "its result"
            return pickle.dumps(("unsendable", f"{what[:2000]} cannot be sent ({type(error).__name__}: {error})"))
        return data


class _Worker:
    """One process, and the thread here that sends it items and waits for its answers."""

    def __init__(self, task: bytes, answers: queue.SimpleQueue[tuple[_Worker, bytes | None]], log: IO[bytes]) -> None:
        self.items: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.silent = 0.0  # seconds since the last sign of life, by the looks of the thread that waits
        self.process = subprocess.Popen(  # -P: the folder of worker.py must not become part of the import path
            [sys.executable, "-P", worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._serve, args=(task, answers), daemon=True)
        self._thread.start()

    def _serve(self, task: bytes, answers: queue.SimpleQueue[tuple[_Worker, bytes | None]]) -> None:
        to, back = self.process.stdin, self.process.stdout
        assert to is not None and back is not None
        try:
            worker.send(to, pickle.dumps([part or os.getcwd() for part in sys.path]))
            worker.send(to, task)
            while (item := self.items.get()) is not None:
                worker.send(to, item)
                while not (data := worker.receive(back)):
                    self.silent = 0.0
                self.silent = 0.0
                answers.put((self, data))
        except (EOFError, OSError):
            answers.put((self, None))

    def kill(self) -> None:
        """End the process at once, with those that it has started: it holds nothing."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()

    def stop(self) -> None:
        """End the process and the thread."""
        if self.process.returncode is None:
            self.kill()
        self.items.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_SECONDS)
        self._thread.join(_STOP_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what was not sent yet
                if pipe is not None and not self._thread.is_alive():
                    pipe.close()


class Processes(Crew):
    """So many processes on this machine, started when there is work for them."""

    def __init__(self, workers: int, timeout: float) -> None:
        self.workers, self.place = workers, f"{workers} processes on this machine"
        self._timeout = timeout
        self._threads = max(default_workers() // workers, 1)
        self._team: set[_Worker] = set()

    def map(self, function: Callable[..., Any], shared: Any, items: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        try:
            task = dumps(_Task(function, shared, self._threads))
        except Exception as error:  # pickle raises whatever the object's own methods raise
            raise cannot_be_sent(error) from error
        with tempfile.TemporaryFile("a+b") as log:
            try:
                yield from self._run(task, iter(items), log)
            finally:
                self.stop()

    def stop(self) -> None:
        """End all processes."""
        for member in self._team:  # all at once, then wait
            if member.process.returncode is None:
                member.kill()
        while self._team:
            self._team.pop().stop()

    def _run(self, task: bytes, items: Iterator[tuple[Any, ...]], log: IO[bytes]) -> Iterator[Any]:
        answers: queue.SimpleQueue[tuple[_Worker, bytes | None]] = queue.SimpleQueue()
        busy: dict[_Worker, tuple[Any, ...]] = {}
        idle: list[_Worker] = []
        again: list[tuple[Any, ...]] = []  # items whose worker has died
        lost: dict[tuple[Any, ...], int] = {}
        error: BaseException | None = None
        looked = time.monotonic()
        while True:
            while error is None and len(busy) < self.workers:
                item = again.pop() if again else next(items, None)
                if item is None:
                    break
                member = idle.pop() if idle else self._start(task, answers, log)
                busy[member], member.silent = item, 0.0
                member.items.put(dumps(item))
            if not busy:
                break
            if time.monotonic() - looked >= _LOOK:  # counted in looks: a suspended process does not blame its workers
                looked = time.monotonic()
                for member in busy:
                    member.silent += _LOOK
                    if member.silent > self._timeout:
                        member.kill()
            try:
                member, data = answers.get(timeout=_LOOK)
            except queue.Empty:
                continue
            item = busy.pop(member)
            if data is None:
                member.stop()
                self._team.discard(member)
                lost[item] = lost.get(item, 0) + 1
                if lost[item] > RETRIES:
                    error = error or keeps_dying(self.place, item, self._cause(member, log))
                again.append(item)
                continue
            idle.append(member)
            kind, value = self._read(data, item)
            if kind == "done":
                yield item, value
            else:
                error = error or value
        if error is not None:
            raise error

    def _start(self, *arguments: Any) -> _Worker:
        try:
            member = _Worker(*arguments)
        except OSError as error:
            raise ClusterError(
                f"{self.place}: a process cannot be started ({error}). Lower workers, or use client=False."
            ) from error
        self._team.add(member)
        return member

    def _read(self, data: bytes, item: tuple[Any, ...]) -> tuple[str, Any]:
        """What a worker answered: ("done", result), or a kind of failure and the error that says so."""
        try:
            kind, value = pickle.loads(data)
        except Exception as error:  # whatever the object's own methods raise
            kind, value = "unsendable", f"its result cannot be read here ({type(error).__name__}: {error})"
        if kind == "unsendable":
            value = ClusterError(f"{self.place}: piece {item}: {value}. Use client=False.")
        elif kind == "unprepared":
            value = ClusterError(
                f"{self.place}: the workers could not be prepared ({value}). Everything that the work "
                f"needs must be importable by {sys.executable}; or use client=False."
            )
        return kind, value

    def _cause(self, member: _Worker, log: IO[bytes]) -> str:
        """Why a worker is gone, as far as it can be known."""
        if member.silent > self._timeout:
            return f"no sign of life for {self._timeout:g} s"
        status = member.process.returncode
        if status is None or status < 0:
            return "still running" if status is None else f"killed by signal {-status}"
        log.seek(max(log.seek(0, os.SEEK_END) - 2000, 0))
        last = log.read().decode(errors="replace").strip().splitlines()[-1:]
        return ": ".join([f"exit status {status}", *last])


@contextlib.contextmanager
def processes(workers: int, timeout: float) -> Iterator[Processes]:
    """A crew of so many processes, gone when the block ends."""
    found = Processes(workers, timeout)
    try:
        yield found
    finally:
        found.stop()
