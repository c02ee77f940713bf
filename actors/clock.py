"""The time that an actor tells its core: it never runs backwards, and a wall clock that jumps expires no one."""

from __future__ import annotations

import time
from pathlib import Path
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
    """Stands still until it is told to move: for scenarios on live actors.

    `file` holds the time that it starts at: that of the runner, which goes on while the actor is away.
    """

    def __init__(self, last_logged: float, file: str = "") -> None:
        self._now = last_logged
        if file:
            self.set(float(Path(file).read_text()))

    def now(self) -> float:
        """The time that was last set."""
        return self._now

    def set(self, now: float) -> None:
        """Move on; going back has no effect."""
        self._now = max(self._now, now)


def make_clock(kind: str, last_logged: float) -> Clock:
    """`wall`, `manual`, or `manual:FILE` with the time to start at."""
    name, _, file = kind.partition(":")
    return ManualClock(last_logged, file) if name == "manual" else WallClock(last_logged)
