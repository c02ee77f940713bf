"""What is new, for everybody who looks: one loop asks, each reader gets the parts that it does not have yet.

Nobody looks, nobody asks. A reader that is slow gets the newest and skips what lay between.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import PoolsError
from .history import History
from .sources import Source

log = logging.getLogger("ray_pools")

EVERY_S = 0.5
READERS_MAX = 100
# The present does not wait longer than this for the past: a long log takes its time when it is read first.
_LOGS_WAIT_S = 1.0
_BEING_READ = {"rows": {}, "trouble": "the logs are being read"}
Result = TypeVar("Result")


def to_json(value: Any) -> str:
    """Compact, and of what JSON has: no NaN."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)


class Feed:
    """See the module's docstring. `open_history`: opens the logs, or raises why they can't be read here."""

    def __init__(self, source: Source, open_history: Callable[[], History], every_s: float = EVERY_S) -> None:
        self.source = source
        self._open_history = open_history
        self._every_s = every_s
        self.history: History | None = None
        self.no_history = ""
        # part -> (number of its last change, JSON)
        self._parts: dict[str, tuple[int, str]] = {}
        self._number = 0
        self._changed = asyncio.Condition()
        self._readers = 0
        self._wanted = asyncio.Event()
        # logs and actors are each asked by one thread, stories by another: they may take long
        self._threads = {
            name: ThreadPoolExecutor(1, f"dashboard {name}") for name in ("look", "logs", "story")
        }
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[dict[str, Any]] | None = None
        self._logs: dict[str, Any] = _BEING_READ

    # --- in threads

    async def in_thread(self, name: str, run: Callable[..., Result], *args: Any) -> Result:
        """Runs what blocks, in the thread for it: look, logs or story."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[name], run, *args)

    def _read_logs(self, pools: list[str]) -> dict[str, Any]:
        if self.history is None:
            try:
                self.history = self._open_history()
            except PoolsError as problem:
                self.no_history = str(problem)
                return {"rows": {}, "trouble": self.no_history}
        self.no_history = ""
        try:
            self.history.add(pools)
            self.history.read()
        except PoolsError as problem:
            return {**self.history.span(), "trouble": str(problem)}
        return {**self.history.span(), "trouble": ""}

    # --- the loop

    async def start(self) -> None:
        """Begins to look, as soon as somebody reads."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Ends; readers end too."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._reading is not None:
            await asyncio.wait({self._reading})
        if self.history is not None:
            await self.in_thread("logs", self.history.close)
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            try:
                await self.look()
            except Exception:
                log.exception("dashboard: a look failed")
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        """Asks once, and tells what is new."""
        if self.source.live:
            seen = await self.in_thread("look", self.source.look, None)
            logs = await self._what_logs_say(list(seen["pools"]))
        else:
            logs = await self._what_logs_say([])
            if self.history is None or self._reading is not None:
                seen = {"at": None, "namespace": "", "coordinator": {}, "pools": {}, "trouble": ""}
            else:
                seen = await self.in_thread("logs", self.source.look, self.history)
        pools = seen.pop("pools")
        parts = {f"pool:{name}": said for name, said in pools.items()}
        parts["logs"] = logs
        at = seen.pop("at")
        parts["top"] = {**seen, "pools": sorted(pools), "live": self.source.live}
        async with self._changed:
            before = self._number
            for part in set(self._parts) - {*parts, "at"}:
                del self._parts[part]
            for part, said in parts.items():
                self._put(part, to_json(said))
            if self._number > before:
                self._put("at", to_json(at))  # that time goes on is no news by itself
                self._changed.notify_all()

    async def _what_logs_say(self, pools: list[str]) -> dict[str, Any]:
        if self._reading is None:
            run = self.in_thread("logs", self._read_logs, pools)
            self._reading = asyncio.get_running_loop().create_task(run)
        done, _ = await asyncio.wait({self._reading}, timeout=_LOGS_WAIT_S)
        if done:
            reading, self._reading = self._reading, None
            self._logs = reading.result()
        return self._logs

    def _put(self, part: str, text: str) -> None:
        if part not in self._parts or self._parts[part][1] != text:
            self._number += 1
            self._parts[part] = self._number, text

    # --- readers

    @property
    def is_full(self) -> bool:
        """No more readers."""
        return self._readers >= READERS_MAX

    async def read(self, patience_s: float) -> AsyncGenerator[str, None]:
        """What is new, each time as one JSON object of parts; "" where nothing was for a while."""
        self._readers += 1
        self._wanted.set()
        known: dict[str, int] = {}
        try:
            while True:
                async with self._changed:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._changed.wait_for(lambda: self._news(known)), patience_s)
                    news = self._news(known)
                    known.update({part: self._parts[part][0] for part in news})
                yield (
                    "{" + ",".join(f"{json.dumps(part)}:{self._parts[part][1]}" for part in news) + "}"
                    if news
                    else ""
                )
        finally:
            self._readers -= 1
            if self._readers == 0:
                self._wanted.clear()

    def _news(self, known: dict[str, int]) -> list[str]:
        return [part for part, (number, _) in self._parts.items() if known.get(part) != number]
