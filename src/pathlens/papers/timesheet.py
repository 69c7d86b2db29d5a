"""How long experiments take when they share work, run in pieces, or run in several processes.

An experiment's time is what it spent itself, in all attempts, and what others spent on results that it shares with
them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pathlens.files import parse_json, write_atomically

__all__ = ["Timesheet"]

_EVERY = 5.0  # seconds between writes: what a killed run may lose


class Timesheet:
    """Seconds per experiment and per shared result, in memory and, if there is a folder, on disk.

    Each experiment has a file of its own, so that processes do not write over each other.

    Parameters
    ----------
    folder : path, optional
    again : bool
        Forget earlier attempts.

    Examples
    --------
    >>> sheet = Timesheet()
    >>> sheet.begin("a")
    >>> with sheet.shared("training"):
    ...     time.sleep(0.02)
    >>> _ = sheet.end()
    >>> sheet.begin("b")
    >>> sheet.use("training")
    >>> sheet.end() > 0.02  # b did nothing, but would have had to
    True
    """

    def __init__(self, folder: Path | None = None, again: bool = False) -> None:
        self._folder, self._again = folder, again
        self._name = ""
        self._entries: dict[str, dict[str, float]] = {}  # experiment → seconds by shared result; "" is all of it
        self._used: set[str] = set()
        self._open: dict[str, float] = {}  # what runs now → when it started
        self._written = 0.0

    def begin(self, name: str) -> None:
        """Start an experiment; time of an earlier attempt that did not end counts too."""
        found = None if self._again else self._read(name)
        self._entries[name] = {} if found is None or "ended" in found else found
        self._name, self._used, self._open = name, set(), {"": time.perf_counter()}
        self._written = time.perf_counter()

    def tick(self) -> None:
        """Something moved: write, if the last time is long ago."""
        if self._name and time.perf_counter() - self._written >= _EVERY:
            self._write()

    @contextmanager
    def shared(self, key: str) -> Iterator[None]:
        """Time what is done inside as a result that other experiments may use."""
        self._open[key] = time.perf_counter()
        self.use(key)
        try:
            yield
        finally:
            entry = self._entries.setdefault(self._name, {})
            entry[key] = entry.get(key, 0.0) + time.perf_counter() - self._open.pop(key)

    def use(self, key: str) -> None:
        """The present experiment needs this result."""
        self._used.add(key)

    def end(self) -> float:
        """End the present experiment and return its seconds."""
        entry = self._entries[self._name] = self._now()
        self._open = {}
        borrowed = 0.0
        for name, other in self._all().items():
            if name != self._name:
                borrowed += sum(seconds for key, seconds in other.items() if key in self._used)
        entry["ended"] = 1.0
        self._write()
        return entry[""] + borrowed

    def _now(self) -> dict[str, float]:
        entry = dict(self._entries.get(self._name, {}))
        for key, start in self._open.items():
            entry[key] = entry.get(key, 0.0) + time.perf_counter() - start
        return entry

    def _all(self) -> dict[str, dict[str, float]]:
        names = [] if self._folder is None else [path.stem for path in self._folder.glob("*.json")]
        found = {name: self._read(name) or {} for name in names}
        return {**found, **self._entries}

    def _read(self, name: str) -> dict[str, float] | None:
        if self._folder is None:
            return None
        try:
            found = parse_json((self._folder / f"{name}.json").read_bytes())
            return {str(key): float(value) for key, value in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):  # times are worth no error
            return None

    def _write(self) -> None:
        self._written = time.perf_counter()
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / f"{self._name}.json", json.dumps(self._now()).encode())
