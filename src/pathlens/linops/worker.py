"""A worker process: computes one piece of work after the other, and ends with the process that started it.

`pathlens.linops.processes` runs this file by its path and talks to it through its standard input and output. Only the
standard library is imported here, so that a sign of life does not wait for torch.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import time
from typing import IO

BEAT_SECONDS = 0.5  # between signs of life


def send(stream: IO[bytes], data: bytes) -> None:
    """Write one message: its length in eight bytes, and the bytes."""
    stream.write(len(data).to_bytes(8, "little"))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """Read one message; EOFError where the other side has ended."""
    size = stream.read(8)
    data = stream.read(int.from_bytes(size, "little"))
    if len(size) < 8 or len(data) < int.from_bytes(size, "little"):
        raise EOFError("the other side has ended")
    return data


def main() -> None:
    """Read the import path, then a pickled function of bytes, then arguments; write what the function returns.

    An empty message is a sign of life.
    """
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a piece prints must not get between the answers
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    one_writer = threading.Lock()

    def answer(data: bytes) -> None:
        with one_writer:
            send(outbox, data)

    def listen() -> None:
        try:
            while True:
                messages.put(receive(inbox))
        except (EOFError, OSError):
            _end()

    def beat() -> None:
        try:
            while True:
                answer(b"")
                time.sleep(BEAT_SECONDS)
        except OSError:
            _end()

    for target in (listen, beat):
        threading.Thread(target=target, daemon=True).start()
    sys.path[:] = pickle.loads(messages.get())
    try:
        function = pickle.loads(messages.get())
    except Exception as error:  # whatever an import or an object's own methods raise
        answer(pickle.dumps(("unprepared", f"{type(error).__name__}: {error}")))
        return
    while True:
        answer(function(messages.get()))


def _end() -> None:
    """End at once, with the processes that a piece has started: the parent has ended."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
