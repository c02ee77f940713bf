"""An event loop in a thread of its own, one per client, for whatever goes on while its callers do something else.

A caller's own loop may end, or be cancelled, at any moment; what must be sent then (a cancel, a release) is sent from
here. Started when it is first needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

from .. import wire
from ..errors import PoolsError, Unreachable
from .patience import result_of
from .transport import ATTEMPT_S, Caller, TryAgain, no_answer, shown_actor

T = TypeVar("T")

_CANCELLED_WITHIN_S = 30.0
"""So long a caller that was interrupted waits for what it began to be undone."""
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 1.0
_THREADS = 4
"""For calls of Ray that may block, such as finding an actor while the GCS is away; none of them waits for a grant."""


class Running(Generic[T]):
    """A coroutine that runs in the background. `ended` is done when it really has, its clean-up included."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.ended: Future[T] = Future()
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False
        loop.call_soon_threadsafe(self._begin, coroutine)

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._end)
        if self._cancelled:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        problem = PoolsError("the client was closed") if task.cancelled() else task.exception()
        if problem is not None:
            self.ended.set_exception(problem)
        else:
            self.ended.set_result(task.result())

    def cancel(self) -> None:
        """Asks it to end; `ended` tells when it has."""
        self._cancelled = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def result(self) -> T:
        """Waits for it. Interrupted (Ctrl-C), it cancels it, and waits until what it began is undone."""
        try:
            return result_of(self.ended)
        except BaseException:
            if not self.ended.done():
                self.cancel()
                wait([self.ended], _CANCELLED_WITHIN_S)
            raise

    async def outcome(self) -> T:
        """Likewise, without blocking the loop that asks. A second cancellation does not wait for the end."""
        try:
            return await outcome_of(self.ended)
        except asyncio.CancelledError:
            if not self.ended.done():
                self.cancel()
                await settled(self.ended, _CANCELLED_WITHIN_S)
            raise

    async def carried_out(self) -> T:
        """Likewise, but that a caller who is cancelled does not cancel it: what was begun is carried out."""
        return await outcome_of(self.ended)


class Background:
    """The loop and its thread. `close` cancels what runs, and lets it clean up for a moment."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Running[T]:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise PoolsError("the client was closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            return Running(self._loop, coroutine)

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """A call that may block for a moment. A cancelled caller still waits until it is over: what it sends is
        sent before anything that undoes it.
        """
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_THREADS, f"{self._name}-call")
            calling = self._executor.submit(function, *arguments)
        try:
            return await outcome_of(calling)
        except asyncio.CancelledError:
            await settled(calling, _CANCELLED_WITHIN_S)
            raise

    async def call(
        self, caller: Caller, actor: str, ops: Iterable[Mapping[str, Any]], give_up_s: float | None = None
    ) -> list[wire.Wire]:
        """As `Caller.call`, without a thread that waits."""
        sent = caller.signed(ops)
        data = wire.encode_request(sent)
        limit_s = caller.give_up_s if give_up_s is None else give_up_s
        ends_at = time.monotonic() + limit_s
        backoff_s = _BACKOFF_FIRST_S
        while True:
            left_s = max(ends_at - time.monotonic(), 0.0)
            try:
                future = await self.in_thread(caller.transport.start, actor, "call", data)
                answer = await outcome_of(future, min(left_s, ATTEMPT_S))
                return wire.decode_response(answer, len(sent), shown_actor(actor))
            except (TryAgain, FutureTimeout) as problem:
                why = str(problem) or "no answer yet"
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                raise Unreachable(no_answer(actor, caller.transport.namespace, limit_s, why))
            await asyncio.sleep(min(backoff_s, left_s))
            if caller.closed.is_set():
                raise PoolsError("the client was closed")
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    def close(self, timeout_s: float = 2.0) -> None:
        """Harmless twice, and from the loop's own thread."""
        with self._lock:
            self._closed = True
            loop, thread, executor = self._loop, self._thread, self._executor
        if loop is not None and thread is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._cancel_all)
            if thread is not threading.current_thread():
                thread.join(timeout_s)
        if executor is not None:
            executor.shutdown(wait=False)

    def _run(self) -> None:
        assert self._loop is not None
        self._loop.run_forever()
        self._loop.close()

    def _cancel_all(self) -> None:
        assert self._loop is not None
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.create_task(self._stop())

    async def _stop(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others, timeout=1.0)
        await asyncio.sleep(0)  # a task's own callbacks run after its last step
        asyncio.get_running_loop().stop()


class Bell:
    """Wakes one coroutine of this loop, rung from any thread; a loop that is gone hears nothing."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung: asyncio.Future[None] = self._loop.create_future()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set)

    async def heard(self, timeout_s: float | None = None) -> None:
        """Returns when it rang, or the time is over."""
        timer = None if timeout_s is None else self._loop.call_later(max(timeout_s, 0.0), self._set)
        try:
            await self._rung
        finally:
            if timer is not None:
                timer.cancel()

    def _set(self) -> None:
        if not self._rung.done():
            self._rung.set_result(None)


async def settled(future: Future[Any], timeout_s: float | None = None) -> None:
    """Returns when it is done, whatever its outcome, or the time is over. Never cancels it."""
    bell = Bell()
    future.add_done_callback(lambda _: bell.ring())
    await bell.heard(timeout_s)


async def outcome_of(future: Future[T], timeout_s: float | None = None) -> T:
    """Its result or its error; concurrent.futures.TimeoutError if there is none within the time."""
    await settled(future, timeout_s)
    return future.result(0)
