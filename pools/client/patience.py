"""Waits that Ctrl-C ends.

Python runs a signal's handler in the main thread, between two steps of it. A signal that comes after the last step and
before the wait itself has begun does not end that wait, so the main thread never waits for long at a time.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 1.0


def slice_s(left_s: float | None) -> float | None:
    """How long to wait before looking again, of the time that is left (None: for ever)."""
    if threading.current_thread() is not threading.main_thread():
        return left_s
    return SLICE_S if left_s is None else min(left_s, SLICE_S)


def result_of(future: Future[T]) -> T:
    """Its result or its error, however long it takes."""
    while not wait([future], slice_s(None)).done:
        pass
    return future.result()
