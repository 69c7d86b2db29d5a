"""The progress bar, drawn on terminals for work that takes longer than two seconds; rich is loaded when it is drawn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 2.0  # seconds without a bar


def short_number(value: float) -> str:
    """Three digits and a power of a thousand.

    >>> short_number(0.25), short_number(12_345), short_number(4e8)
    ('0.25', '12.3 k', '400 M')
    """
    for unit in ("", " k", " M", " G"):
        if value < 999.5 or unit == " G":
            break
        value /= 1000
    return f"{value:.3g}{unit}"


class ProgressBar:
    """Counts steps; draws a bar on a terminal once two seconds have passed, and removes it at the end.

    Parameters
    ----------
    label
        What is being done.
    total
        Number of steps, or None where it is not known.

    Examples
    --------
    >>> with ProgressBar("tiles", 3) as bar:
    ...     bar.advance()
    """

    _drawn = False  # rich allows one live display: a solver's bar hides the bars of its matrix products

    def __init__(self, label: str, total: int | None) -> None:
        self._label, self._total = label, total
        self._done = 0
        self._start = time.monotonic()
        self._bar: Any = None
        self._refused = False
        self._note = ""

    def __enter__(self) -> ProgressBar:
        return self

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Count finished steps; a note is shown after the label until the next note."""
        self._done += steps
        self._note = note or self._note
        if self._bar is not None:
            self._bar.update(0, completed=self._done, description=f"{self._label} {self._note}".rstrip())
        elif not self._refused and time.monotonic() - self._start > PATIENCE:
            self._show()

    def _show(self) -> None:
        self._refused = True  # the only attempt: another bar may be drawn already
        if ProgressBar._drawn or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.errors import LiveError
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text

        class Rate(ProgressColumn):
            def render(self, task: Any) -> Text:
                return Text(f"{short_number(task.speed)}/s" if task.speed else "")

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            Rate(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        try:
            bar.start()
        except LiveError:  # the caller draws a display of their own
            return
        bar.add_task(self._label, total=self._total, completed=self._done)
        self._bar, ProgressBar._drawn = bar, True

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar, ProgressBar._drawn = None, False


def track(items: Collection[T], label: str) -> Iterator[T]:
    """Iterate over the items with a progress bar.

    >>> list(track([1, 2], "counting"))
    [1, 2]
    """
    with ProgressBar(label, len(items)) as bar:
        for item in items:
            yield item
            bar.advance()


@contextmanager
def progress_reporter(
    progress: bool | str | Callable[[int, int], object], label: str, total: int, *, start: int = 0
) -> Iterator[Callable[[int, str], None]]:
    """Report progress as the argument `progress` of a public function asks.

    Parameters
    ----------
    progress
        Whether to draw a bar; a text is its label; a function is called with (done, total).
    label
        Label of the bar if `progress` is True.
    total, start
        Number of steps, and how many of them are done already.

    Yields
    ------
    function of (steps, note)
        Counts finished steps; the note is shown behind the label.

    Examples
    --------
    >>> with progress_reporter(lambda done, total: print(done, "of", total), "tiles", 3) as report:
    ...     report(2, "half-way")
    2 of 3
    """
    done = start
    with ProgressBar(progress if isinstance(progress, str) else label, total) as bar:
        if start:
            bar.advance(start)

        def report(steps: int, note: str) -> None:
            nonlocal done
            done += steps
            if callable(progress):
                progress(done, total)
            elif progress:
                bar.advance(steps, note)

        yield report
