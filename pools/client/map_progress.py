"""The bar of `Client.map`, on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_DRAW_EVERY_S = 0.1


class MapProgress:
    """A bar while its block runs: how many are done, run and queue. wanted: None means on a terminal."""

    def __init__(self, total: int | None, wanted: bool | None) -> None:
        self._total = total
        self._wanted = sys.stderr.isatty() if wanted is None else wanted
        self._bar: Any = None
        self._task: Any = None
        self._shown_at = 0.0
        self._last = (0, 0, 0)

    def __enter__(self) -> MapProgress:
        if self._wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._draw()
            self._bar.stop()

    def show(self, done: int, running: int, queued: int) -> None:
        """Called for each change; drawn now and then."""
        self._last = (done, running, queued)
        now = time.monotonic()
        if self._bar is not None and now - self._shown_at >= _DRAW_EVERY_S:
            self._shown_at = now
            self._draw()

    def _draw(self) -> None:
        done, running, queued = self._last
        self._bar.update(self._task, completed=done, description=f"{running} running, {queued} queued")
