"""What is seen while something waits: one line on a terminal, written over and over, and gone at the end."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import PoolsError
from .explanation import duration_text

if TYPE_CHECKING:
    from .ticket import Ticket

ASK_EVERY_S = 5.0
"""The pools are asked so often why it waits, and after each change of the request."""
ASK_AT_MOST_EVERY_S = 1.0
_REDRAW_S = 1.0
_CLEAR = "\r\x1b[2K"
_COLUMNS_MIN = 20


class Stream(Protocol):
    """A terminal, or what is none."""

    def write(self, text: str, /) -> Any: ...

    def flush(self) -> Any: ...

    def isatty(self) -> bool: ...


class LiveStatus:
    """While its block runs, a line on why a ticket waits: `with LiveStatus(ticket): ticket.wait()`.

    Nothing is written, and nobody is asked, unless `stream` (stderr) is a terminal and it is `enabled`.
    """

    def __init__(self, ticket: Ticket, enabled: bool = True, stream: Stream | None = None) -> None:
        self._ticket = ticket
        self._stream: Stream = sys.stderr if stream is None else stream
        self._enabled = enabled and self._stream.isatty()
        self._news, self._over = threading.Event(), threading.Event()
        self._writing = threading.Lock()
        self._since = time.monotonic()

    def __enter__(self) -> LiveStatus:
        if self._enabled:
            self._since = time.monotonic()
            threading.Thread(target=self._run, name="ray-pools-status", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The line goes; the thread may still be asking, and writes nothing any more."""
        if not self._enabled:
            return
        with self._writing:
            self._over.set()
            self._news.set()
            self._put("")

    def _run(self) -> None:
        asked_at, line, seen = 0.0, self._ticket.state, -1
        with self._ticket._listening(self._news.set):
            while not self._over.is_set():
                now = time.monotonic()
                # asking brings a view, too: only one that is another is news
                news = self._ticket.view["changed_seq"] != seen
                if not asked_at or now - asked_at >= (ASK_AT_MOST_EVERY_S if news else ASK_EVERY_S):
                    asked_at = now
                    line = self._asked()
                    seen = self._ticket.view["changed_seq"]
                self._show(f"{line} ({duration_text(now - self._since)})")
                self._news.wait(_REDRAW_S)
                self._news.clear()

    def _asked(self) -> str:
        try:
            return self._ticket.explain(estimate=True).line()
        except PoolsError as problem:
            return str(problem)

    def _show(self, line: str) -> None:
        with self._writing:
            if not self._over.is_set():
                columns = max(shutil.get_terminal_size().columns - 1, _COLUMNS_MIN)
                self._put("".join(char for char in line if char.isprintable())[:columns])

    def _put(self, line: str) -> None:
        try:
            self._stream.write(_CLEAR + line)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone: nobody reads it
            self._over.set()
