"""What a long plan is doing, for whoever wants to know: `stage` says it, `watched` listens."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

_listener: Callable[[str], None] | None = None


def stage(words: str) -> None:
    """Say what begins now: ``"tracing"``."""
    if _listener is not None:
        _listener(words)


@contextlib.contextmanager
def watched(listener: Callable[[str], None]) -> Iterator[None]:
    """Within, every `stage` is told to ``listener``."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


@contextlib.contextmanager
def shown(stream: TextIO = sys.stderr, every: float = 0.5) -> Iterator[None]:
    """Within, a line of a terminal says what is being done and for how long; nothing is written to what is none."""
    if not stream.isatty():
        yield
        return
    start, words, done = time.monotonic(), ["starting"], threading.Event()

    def write() -> None:
        stream.write(f"\r\x1b[K{time.monotonic() - start:6.1f} s  {words[0]}")
        stream.flush()

    def tick() -> None:
        while not done.wait(every):
            write()

    def begin(what: str) -> None:
        words[0] = what
        write()

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        with watched(begin):
            yield
    finally:
        done.set()
        ticker.join()
        stream.write("\r\x1b[K")
        stream.flush()
