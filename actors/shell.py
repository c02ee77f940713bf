"""The shell that pool and coordinator share: turns, the log, answers and timers around a pure core.

A turn takes every command that waits, steps the core, appends the events of all of them in one transaction, and only
then answers, runs effects and talks to others: nothing leaves an actor before all that it depends on is durable.
A turn runs without a break on the event loop, so what other coroutines see is always durable.

- An append that fails (disk full) is rolled back: the core is rebuilt from the log and the callers get the error.
- A sync that fails, a newer epoch (another copy of this actor took over) or a log that is not what was written ends the
  process: nobody may answer from here any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgpack

from ray_pools import wire
from ray_pools.actors.clock import ManualClock, make_clock
from ray_pools.actors.metrics import SEND_EVERY_S, Meter, MetricsFeed, More, RaySink
from ray_pools.core import records as ev
from ray_pools.errors import BadInput, PoolsError, Refused
from ray_pools.store import AppendFailed, Corrupt, Fenced, SequenceGap, Store, SyncFailed, open_store
from ray_pools.store.base import DamagedSnapshot, reading_much

log = logging.getLogger("ray_pools")

# A restart folds at most about this many events after a snapshot.
SNAPSHOT_EVERY = 50_000

# Longest that the loop sleeps until it looks at the clock again.
_TIMER_MAX_S = 30.0


class Later:
    """A result that is made once the turn is durable."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


class Deferred:
    """A result that a later turn brings, when the request is final."""

    def __init__(self, id: str) -> None:
        self.id = id


class State(Protocol):
    """What a shell asks of a fold."""

    seq: int
    clock: float

    def apply(self, event: Any, at: float) -> None: ...
    def dump(self) -> dict[str, Any]: ...
    def digest(self) -> str: ...


class Command:
    """One command, or several of one call, on its way through a turn."""

    __slots__ = ("future", "missing", "ops", "results")

    def __init__(self, ops: Sequence[dict[str, Any]], future: asyncio.Future[list[Any]]) -> None:
        self.ops = ops
        self.future = future
        self.results: list[Any] = [None] * len(ops)
        self.missing = len(ops)

    def done(self, index: int, result: Any) -> None:
        """One of its results is known; with the last, the caller is answered."""
        self.results[index] = result
        self.missing -= 1
        if self.missing == 0 and not self.future.done():
            self.future.set_result(self.results)


class Shell:
    """See the module's docstring. A subclass makes the core and names the operations."""

    def __init__(self, name: str, store_address: str, clock: str) -> None:
        self.name = name
        self.store_address = store_address
        self.loop = asyncio.get_running_loop()
        self.store: Store = open_store(store_address, name)
        self.epoch = self.store.open(int(time.time() * 1000))
        self._ops: dict[str, Callable[[dict[str, Any]], Any]] = {
            "ping": self._op_ping,
            "digest": self._op_digest,
            "clock": self._op_clock,
            "quiet": self._op_quiet,
            **self.operations(),
        }
        # for scenarios: time and walks wait until everybody's clock is set
        self.held_still = False
        self._inbox: list[Command] = []
        self._turn_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._on_final: dict[str, list[tuple[Command, int]]] = {}
        self._snapshot_seq = 0
        self._append_s = 0.0
        self.metrics: MetricsFeed | None = None
        self.state = self._folded()
        self.clock = make_clock(clock, self.state.clock)
        self.core = self.new_core(self.state)

    # --- what a subclass says

    def operations(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Name of each operation, and what carries it out. Raising a PoolsError refuses it."""
        raise NotImplementedError

    def new_state(self, dumped: dict[str, Any] | None) -> Any:
        """The state at the start, or the one that a snapshot holds."""
        raise NotImplementedError

    def new_core(self, state: Any) -> Any:
        """The core around a state."""
        raise NotImplementedError

    def settle(self) -> None:
        """What the core does by itself at the end of a turn."""
        raise NotImplementedError

    def after_turn(self, step: Any) -> None:
        """The turn is durable: run effects, talk to peers."""
        raise NotImplementedError

    def next_event_at(self) -> float | None:
        """The core's time of the next thing that time alone brings."""
        at: float | None = self.core.next_event_at()
        return at

    def start_metrics(
        self, meter: Meter, namespace: str, options: Mapping[str, Any], more: More | None = None
    ) -> None:
        """What happens from now on is counted, unless the option `metrics` says no or time is a scenario's."""
        if options.get("metrics", not isinstance(self.clock, ManualClock)):
            self.metrics = MetricsFeed(meter, RaySink(namespace), more)
            self._metrics_every_s = float(options.get("metrics_every_s", SEND_EVERY_S))
            self._metrics_beat()

    def _metrics_beat(self) -> None:
        if self.metrics is not None:
            self.metrics.beat(self.clock.now())
            self.loop.call_later(self._metrics_every_s, self._metrics_beat)

    # --- the log

    def _folded(self) -> Any:
        """The state as the log tells it."""
        state = self._from_snapshot()
        self._snapshot_seq = state.seq
        with reading_much():
            for run in self.store.read_runs(state.seq + 1):
                for event, at in zip(ev.unpack_all(run.body, run.rows), run.times(), strict=True):
                    state.apply(event, at)
        return state

    def _from_snapshot(self) -> Any:
        """The state that the snapshot holds. One that can't be read is no loss as long as the log is whole."""
        try:
            snapshot = self.store.latest_snapshot()
            return self.new_state(msgpack.unpackb(snapshot.state, strict_map_key=False) if snapshot else None)
        except (DamagedSnapshot, ev.UnknownSnapshot) as error:
            lost = isinstance(error, DamagedSnapshot) and error.seq > self.store.head()[1]
            if lost or self.store.first_seq() > 1:
                raise
            log.warning("%s starts from its whole log: %s", self.name, error)
            return self.new_state(None)

    def _persist(self, events: Sequence[Any], before: int) -> None:
        at, begun = self.core.now, time.perf_counter()
        try:
            self.store.append([(at, ev.pack(event)) for event in events], before)
            self._append_s = time.perf_counter() - begun
        except AppendFailed:
            raise
        except (SyncFailed, Fenced, SequenceGap, Corrupt) as error:
            self._die(str(error))
        if self.state.seq - self._snapshot_seq >= SNAPSHOT_EVERY:
            try:
                self.store.snapshot(self.state.seq, msgpack.packb(self.state.dump()))
            except AppendFailed as error:
                log.warning("%s: no snapshot: %s", self.name, error)
            except (SyncFailed, Fenced, Corrupt) as error:
                self._die(str(error))
            self._snapshot_seq = self.state.seq

    def _die(self, why: str) -> None:
        """Nobody may be answered from this process any more. Ray starts it anew from the log."""
        log.error("%s ends its process: %s", self.name, why)
        sys.stderr.flush()
        os._exit(70)

    # --- turns

    async def command(self, ops: Sequence[dict[str, Any]]) -> list[Any]:
        """Carry out operations; returns, per operation, its result or the PoolsError that refused it."""
        command = Command(ops, self.loop.create_future())
        if not ops:
            return []
        self._inbox.append(command)
        self.schedule_turn()
        return await command.future

    def schedule_turn(self) -> None:
        """A turn will be run as soon as the loop is free."""
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_scheduled = False
        batch, self._inbox = self._inbox, []
        before, soft = self.state.seq, self.core.soft()
        self.core.set_time(self.clock.now())
        results: list[tuple[Command, int, Any]] = []
        try:
            for command in batch:
                for index, op in enumerate(command.ops):
                    results.append((command, index, self._carry_out(op)))
            if not self.held_still:
                self.settle()
            step = self.core.take_step()
            # also who only answers must not have been replaced; but who asks for a sign of life gets it
            if step.events or any(op.get("op") != "ping" for command in batch for op in command.ops):
                self._persist(step.events, before)
        except Exception as error:  # a turn is all or nothing, whatever went wrong in it
            if not isinstance(error, AppendFailed):
                log.exception("%s: a turn failed and is undone", self.name)
            self._undo(batch, error, soft)
            return
        try:
            self._answer(results)
            if self.metrics is not None and step.events:
                self.metrics.hear(step.events, self.core.now, self._append_s)
            self.after_turn(step)
            self._arm_timer()
        except Exception:
            log.exception("%s: a durable turn can't be answered", self.name)
            self._die("what is durable is answered by its successor")

    def _answer(self, results: Sequence[tuple[Command, int, Any]]) -> None:
        """The turn is durable: tell the callers."""
        for command, index, result in results:
            if isinstance(result, Deferred):
                self._on_final.setdefault(result.id, []).append((command, index))
            else:
                command.done(index, result.make() if isinstance(result, Later) else result)

    def _carry_out(self, op: dict[str, Any]) -> Any:
        run = self._ops.get(op.get("op", ""))
        if run is None:
            return BadInput("op", op.get("op"), f"one of {', '.join(sorted(self._ops))}")
        try:
            return run(op)
        except PoolsError as error:
            return error
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, KeyError) and error.args and error.args[0] not in op:
                return BadInput(str(error.args[0]), None, f"operation {op['op']!r} needs it")
            raise

    def _undo(self, batch: Sequence[Command], error: Exception, soft: Any) -> None:
        """Nothing of the turn happened: the core is what the log says, and every caller gets the error."""
        shown = (
            error
            if isinstance(error, PoolsError)
            else Refused("internal", f"{type(error).__name__}: {error}")
        )
        self.state = self._folded()
        failed, self.core = self.core, self.new_core(self.state)
        self.core.resume(soft, failed)  # peers know what they were told before: the epoch goes on
        if self.metrics is not None:
            self.metrics.failed()
        for command in batch:
            for index, result in enumerate(command.results):
                if result is None:
                    command.done(index, shown)
        self._arm_timer(retry_s=1.0)

    def finals(self, id: str, result: Any) -> None:
        """Whoever waits for the request to be final is answered."""
        for command, index in self._on_final.pop(id, ()):
            command.done(index, result)

    def _arm_timer(self, retry_s: float = _TIMER_MAX_S) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if isinstance(self.clock, ManualClock):
            return
        at = self.next_event_at()
        delay = retry_s if at is None else min(max(at - self.clock.now(), 0.001), _TIMER_MAX_S)
        self._timer = self.loop.call_later(delay, self.schedule_turn)

    # --- the face (docs/protocol.md, "Wire")

    async def call(self, request: bytes) -> bytes:
        """Answer one call from outside."""
        try:
            ops = wire.decode_request(request)
            for index, op in enumerate(ops):
                if op["op"].startswith("_"):  # an actor's word to itself, which needs no token
                    raise BadInput(f"ops[{index}].op", op["op"], "an operation for callers from outside")
        except PoolsError as error:
            return wire.encode_failure(error)
        results = await self.command(ops)
        return wire.encode_response(
            [wire.failed(r) if isinstance(r, PoolsError) else wire.ok(r) for r in results]
        )

    # --- operations that every actor has

    def _op_ping(self, op: dict[str, Any]) -> dict[str, Any]:
        from ray_pools import __version__

        return {
            "name": self.name,
            "epoch": self.epoch,
            "seq": self.state.seq,
            "pid": os.getpid(),
            "now": self.clock.now(),
            "version": __version__,
            "protocol": wire.PROTOCOL,
        }

    def _op_digest(self, op: dict[str, Any]) -> Later:
        return Later(lambda: {"seq": self.state.seq, "digest": self.state.digest()})

    def _op_clock(self, op: dict[str, Any]) -> Later:
        if not isinstance(self.clock, ManualClock):
            raise Refused("wall_clock", f"{self.name} goes by the wall clock, which nobody sets")
        self.clock.set(float(op["now"]))
        self.core.set_time(self.clock.now())
        self.held_still = bool(op.get("hold", False))
        return Later(lambda: {"now": self.clock.now(), "next": self.core.next_event_at()})

    def has_news(self) -> bool:
        """Somebody must still be told something, or has not acknowledged it."""
        raise NotImplementedError

    def _op_quiet(self, op: dict[str, Any]) -> Later:
        return Later(lambda: {"seq": self.state.seq, "quiet": not self.has_news(), "epoch": self.epoch})
