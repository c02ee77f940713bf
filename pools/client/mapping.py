"""`Client.map`: one function over many inputs, in as many slots as there are, in bounded memory and few threads.

Each of `concurrency` workers (coroutines) has one request: it queues, runs one input after the other in its slot, and
gives the slot back after `slot_s`, so that others get their turn. An input whose slot is called back runs again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import SlotPreempted
from ..limits import BATCH_MAX, RETRIES_MAX, check_integer, check_seconds
from .map_progress import MapProgress
from .running import Crashed, Done, Failed, call_in, give_back, stop
from .submission import Submission
from .tasks import Call

if TYPE_CHECKING:
    from .client import Client
    from .slot import Slot

DEFAULT_CONCURRENCY = 32
DEFAULT_SLOT_S = 60.0
_AHEAD = 4
"""Results that nobody has asked for yet are kept up to so many times the concurrency; then no input is begun."""
_END = object()


@dataclass
class Item:
    """One input, and how often it was begun in vain."""

    index: int
    value: Any
    tries: int = 0
    crashes: int = 0


@dataclass(frozen=True)
class MapOptions:
    """How a map runs, checked when made. retries and crash_retries are per input."""

    concurrency: int | None = None
    slot_s: float = DEFAULT_SLOT_S
    retries: int = 0
    crash_retries: int = 0
    timeout_s: float | None = None
    return_exceptions: bool = False
    ordered: bool = True
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            check_integer("concurrency", self.concurrency, 1, BATCH_MAX)
        check_integer("crash_retries", self.crash_retries, 0, RETRIES_MAX)
        check_seconds("slot_s", self.slot_s)


@dataclass
class Map:
    """One map under way. Everything but `iterate` and `iterate_async` runs in the client's background loop."""

    client: Client
    call_of: Callable[[Any], Call]
    inputs: Iterable[Any]
    submission: Callable[[], Submission]
    options: MapOptions
    _pending: deque[Item] = field(default_factory=deque)
    _results: dict[int, Any] = field(default_factory=dict)
    _fetched: int = 0
    _delivered: int = 0
    _done: int = 0
    _exhausted: bool = False
    _problem: BaseException | None = None
    _workers: set[asyncio.Task[None]] = field(default_factory=set)
    _idle: set[asyncio.Task[None]] = field(default_factory=set)

    def iterate(self) -> Iterator[Any]:
        """The results. Leaving early, by an error or a break, ends what runs and cancels what waits."""
        background = self.client._background
        with MapProgress(self._total(), self.options.progress) as progress:
            background.start(self._begin(progress)).result()
            try:
                while batch := background.start(self._next_batch()).result():
                    yield from batch
            finally:
                background.start(self._end()).result()

    async def iterate_async(self) -> AsyncIterator[Any]:
        """Likewise, for `async for`."""
        background = self.client._background
        with MapProgress(self._total(), self.options.progress) as progress:
            await background.start(self._begin(progress)).outcome()
            try:
                while batch := await background.start(self._next_batch()).outcome():
                    for each in batch:
                        yield each
            finally:
                await background.start(self._end()).carried_out()

    def _total(self) -> int | None:
        return len(self.inputs) if isinstance(self.inputs, Sized) else None

    async def _begin(self, progress: MapProgress) -> None:
        self._source = iter(self.inputs)
        self._fetching = asyncio.Lock()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._progress = progress
        for _ in range(self.options.concurrency or DEFAULT_CONCURRENCY):
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._worker_ended)

    async def _next_batch(self) -> list[Any]:
        """All results that can be handed out now; none when there will be no more."""
        while True:
            if self._problem is not None:
                raise self._problem
            batch = self._take_results()
            if batch:
                self._delivered += len(batch)
                self._room.set()
                return batch
            if self._exhausted and self._delivered == self._fetched:
                return []
            await self._news.wait()
            self._news.clear()

    def _take_results(self) -> list[Any]:
        if not self.options.ordered:
            found, self._results = [*self._results.values()], {}
            return found
        batch: list[Any] = []
        while self._delivered + len(batch) in self._results:
            batch.append(self._results.pop(self._delivered + len(batch)))
        return batch

    async def _end(self) -> None:
        self._exhausted = True
        workers = [*self._workers]
        for worker in workers:
            worker.cancel()
        if workers:
            await asyncio.wait(workers)

    # --- inputs and results

    def _may_fetch(self) -> bool:
        ahead = _AHEAD * (self.options.concurrency or DEFAULT_CONCURRENCY)
        return not self._exhausted and self._fetched - self._delivered < ahead

    async def _fetch(self) -> bool:
        """Brings one more input in; False if there is none now."""
        async with self._fetching:  # a generator is not asked by two at once
            if not self._may_fetch():
                return False
            if isinstance(self.inputs, (list, tuple, range)):
                value = next(self._source, _END)
            else:  # a user's code, which may take its time
                value = await self.client._background.in_thread(next, self._source, _END)
            if value is _END:
                self._exhausted = True
                self._news.set()
                self._room.set()
                return False
            self._pending.append(Item(self._fetched, value))
            self._fetched += 1
            return True

    async def _take(self) -> Item | None:
        if not self._pending:
            await self._fetch()
        item = self._pending.popleft() if self._pending else None
        if self._exhausted and not self._pending:
            for worker in self._idle:  # what they wait for has been taken by others
                worker.cancel()
        return item

    def _put(self, item: Item, result: Any, failed: bool = False) -> None:
        self._done += 1
        if failed and not self.options.return_exceptions:
            self._fail(result, f"input {item.index} of a map")
        self._results[item.index] = result
        self._news.set()
        self._tell()

    def _fail(self, problem: BaseException, where: str = "") -> None:
        """The first one is what the caller gets; the rest ends."""
        if self._problem is None:
            self._problem = problem
            if where and hasattr(problem, "add_note"):  # Python 3.11
                problem.add_note(where)
        self._exhausted = True
        for worker in self._workers:
            if worker is not asyncio.current_task():
                worker.cancel()
        self._news.set()

    def _tell(self) -> None:
        busy = len(self._workers) - len(self._idle)
        self._progress.show(self._done, min(busy, self._fetched - self._done), len(self._idle))

    # --- the workers

    async def _work(self) -> None:
        while self._problem is None:
            # one input for each that queues: no request is made that nothing is left for
            if len(self._pending) <= len(self._idle) and not await self._fetch():
                if self._exhausted:
                    return
                self._room.clear()
                if not self._may_fetch():
                    await self._room.wait()
                continue
            await self._with_request()

    async def _with_request(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._idle.add(me)
        item: Item | None = None
        try:
            (ticket,), _ = await self.client._submit_coroutine([self.submission()])
            try:
                while True:
                    try:
                        slot = await ticket.wait_async(self.options.timeout_s)
                    except SlotPreempted as problem:  # called back before it was ours, and no retries left
                        if item is not None:
                            self._put(item, problem, failed=True)
                        return
                    self._idle.discard(me)
                    item = await self._use(slot, item)
                    if item is None:
                        return
            finally:
                await self.client._give_up_coroutine(ticket)
        finally:
            self._idle.discard(me)

    async def _use(self, slot: Slot, item: Item | None) -> Item | None:
        """Runs inputs in a slot, until it must go or nothing is left. Returns one that has to run again."""
        ends_at = time.monotonic() + self.options.slot_s
        while True:
            if item is None and slot.preempting.is_set():
                await stop(slot)
                return None
            item = item or await self._take()
            if item is None:
                await give_back(slot)
                return None
            self._tell()
            outcome = await call_in(self.client, slot, self.call_of(item.value))
            if isinstance(outcome, Done):
                self._put(item, outcome.value)
            elif isinstance(outcome, Failed):
                self._put(item, outcome.problem, failed=True)
            elif isinstance(outcome, Crashed):
                item.crashes += 1
                if item.crashes <= self.options.crash_retries:
                    continue
                self._put(item, outcome.problem, failed=True)
            else:
                await stop(slot)
                return self._again(slot, item)
            item = None
            if self._problem is not None or time.monotonic() >= ends_at:
                await give_back(slot)
                return None

    def _again(self, slot: Slot, item: Item) -> Item | None:
        item.tries += 1
        if item.tries <= self.options.retries:
            return item
        tries = f"{item.tries} attempt" + ("s" if item.tries != 1 else "")
        self._put(item, SlotPreempted(slot.id, f"{tries}, and no retries left"), failed=True)
        return None

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        self._idle.discard(worker)
        if not worker.cancelled() and worker.exception() is not None:
            problem = worker.exception()
            assert problem is not None
            self._fail(problem)
        self._news.set()
