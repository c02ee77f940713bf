"""The time that an actor tells its core: it never runs backwards, and a wall clock that jumps expires no one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Gives the core's time in seconds."""

    def now(self) -> float:
        """The time, never less than before."""
        ...


class WallClock:
    """Starts at the wall clock, or at the last logged time if that is later; goes on by the monotonic clock."""

    def __init__(self, last_logged: float) -> None:
        self._base = max(time.time(), last_logged)
        self._started = time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch, as if nobody had set the clock since this actor started."""
        return self._base + (time.monotonic() - self._started)


class ManualClock:
    """Stands still until it is told to move: for scenarios on live actors."""

    def __init__(self, last_logged: float) -> None:
        self._now = last_logged

    def now(self) -> float:
        """The time that was last set."""
        return self._now

    def set(self, now: float) -> None:
        """Move on; going back has no effect."""
        self._now = max(self._now, now)


def make_clock(kind: str, last_logged: float) -> Clock:
    """`wall`, or `manual`."""
    return ManualClock(last_logged) if kind == "manual" else WallClock(last_logged)
