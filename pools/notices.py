"""What somebody should be told of: preemptions, expiries, rejections, starvation; out of the logs, each at least once.

It reads logs and nothing else, in a process of its own, so no turn of an actor ever waits for a receiver. A cursor says
how far each log was told; it moves after a notice was taken, so one that is repeated after a crash has the same id.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .core import records as ev
from .core.coordinator_state import CoordinatorState
from .core.pool_state import PoolState
from .core.victims import OPERATOR, reason
from .errors import BadInput
from .log_story import COORDINATOR, pool_log
from .log_view import base_state, events, pools_in
from .log_words import amounts_words, causes_words
from .store import NoLog, Reader, open_reader

KINDS = ("preemption", "expiry", "rejection", "starvation")
LOOK_EVERY_S = 1.0
CURSOR_VERSION = 1


class Notice(NamedTuple):
    """`id` is the same whenever the notice is told again. `at`: the core's time. `details`: numbers and names."""

    id: str
    kind: str
    at: float
    request: str
    requester: str
    pool: str
    text: str
    details: dict[str, Any]


class Cursor:
    """How far each log was told, and which waiting requests were told as starving; in a file, or in memory (None).

    Raises:
        BadInput: the file holds something else, or can't be written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known = False
        self.told: dict[str, int] = {}
        self.starving: set[str] = set()
        if path is not None and path.exists():
            try:
                held = json.loads(path.read_text())
                self.told = {str(log): int(seq) for log, seq in held["told"].items()}
                self.starving = set(map(str, held["starving"]))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                raise BadInput("cursor", str(path), "a file that an earlier run wrote, or none") from None
            self.known = True

    def save(self) -> None:
        """Durably, at once or not at all."""
        if self.path is None:
            return
        held = {"version": CURSOR_VERSION, "told": self.told, "starving": sorted(self.starving)}
        draft = self.path.with_name(f"{self.path.name}.new-{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("w") as file:
                json.dump(held, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
        except OSError as problem:
            raise BadInput(
                "cursor", str(self.path), f"a file that can be written: {problem.strerror}"
            ) from None


class Watch:
    """Follows the logs of a store from a cursor on. `notices` gives what is new; `took` moves the cursor behind one."""

    def __init__(self, store: str, cursor: Cursor, *, from_start: bool = False) -> None:
        """A cursor without a place begins at the end of the logs as they are, or at their start.

        Raises:
            NoLog: there is no coordinator's log.
        """
        self.store, self.cursor = store, cursor
        self._tellers: dict[str, _Teller] = {}
        self._from_end = not (cursor.known or from_start)
        self._open(COORDINATOR)
        for pool in pools_in(store):
            self._open(pool_log(pool))
        self._from_end = False  # a log that comes later is told from its start

    def _open(self, log: str) -> None:
        if log in self._tellers:
            return
        reader = open_reader(self.store, log)
        teller = self._tellers[log] = _Teller(log, reader)
        if self._from_end:
            self.cursor.told[log] = reader.head()[1]
        teller.catch_up(self.cursor.told.setdefault(log, teller.state.seq))
        if self._from_end and log == COORDINATOR:
            self.cursor.starving = {each.request for each in self._starving(time.time())}

    def notices(self, now: float | None = None) -> Iterator[tuple[Notice, Callable[[], None]]]:
        """What is new in each log, then who starves now; each with what to call once it was told."""
        for log in [*self._tellers]:
            teller = self._tellers[log]
            for seq, found in teller.news():
                for index, notice in enumerate(found):
                    last = index == len(found) - 1
                    yield notice, self._mover(log, seq) if last else (lambda: None)
                if not found:
                    self.cursor.told[log] = seq
        for pool in self._coordinator().pools:
            try:
                self._open(pool_log(pool))
            except NoLog:
                continue  # it has not begun yet
        for notice in self._starving(time.time() if now is None else now):
            yield notice, self._teller_of(notice.request)

    def close(self) -> None:
        """Lets go of the logs."""
        for teller in self._tellers.values():
            teller.reader.close()

    def _mover(self, log: str, seq: int) -> Callable[[], None]:
        def move() -> None:
            self.cursor.told[log] = seq
            self.cursor.save()

        return move

    def _teller_of(self, request: str) -> Callable[[], None]:
        def told() -> None:
            self.cursor.starving.add(request)
            self.cursor.save()

        return told

    def _coordinator(self) -> CoordinatorState:
        state: CoordinatorState = self._tellers[COORDINATOR].state
        return state

    def _starving(self, now: float) -> Iterator[Notice]:
        """Who waits for longer than its first pool's `starvation_after_s` (docs/rules.md section 5); not yet told."""
        state = self._coordinator()
        waiting = {request.id: request for request in state.waiting_or_holding.values() if request.waits}
        self.cursor.starving &= set(waiting)
        for request in waiting.values():
            pool = state.pools.get(request.owner or (request.pools[0] if request.pools else ""))
            if pool is None or request.id in self.cursor.starving:
                continue
            waited_s = now - request.submitted_at
            if waited_s >= pool.starvation_after_s:
                yield Notice(
                    f"starvation:{request.id}",
                    "starvation",
                    request.submitted_at + pool.starvation_after_s,
                    request.id,
                    request.requester,
                    pool.name,
                    f"request {request.id} of {request.requester} ({amounts_words(request.amounts)}) waits for"
                    f" {waited_s:.0f} s in {', '.join(request.pools)}",
                    {"waited_s": waited_s, "pools": list(request.pools), "amounts": dict(request.amounts)},
                )


class _Teller:
    """Folds one log, and knows what of it is to be told."""

    def __init__(self, log: str, reader: Reader) -> None:
        self.log, self.reader = log, reader
        self.state: Any = base_state(reader, log)

    def catch_up(self, told: int) -> None:
        """The state after the last row that was told."""
        for row, event in events(self.reader, self.state.seq + 1):
            if row.seq > told:
                break
            self.state.apply(event, row.at)

    def news(self) -> Iterator[tuple[int, list[Notice]]]:
        """Row number and notices of each row that came since."""
        for row, event in events(self.reader, self.state.seq + 1):
            if isinstance(self.state, PoolState):
                found = list(self._of_pool(row.seq, row.at, event))
                self.state.apply(event, row.at)
            else:
                self.state.apply(event, row.at)
                found = list(self._of_coordinator(row.seq, row.at, event))
            yield row.seq, found

    def _of_coordinator(self, seq: int, at: float, event: Any) -> Iterator[Notice]:
        final = event.state if isinstance(event, ev.Finished) else ""
        rejected = final == "rejected" or (isinstance(event, ev.Submitted) and not event.pools)
        if not (rejected or final == "expired"):
            return
        request = self.state.requests[event.id]
        who = f"request {request.id} of {request.requester}"
        yield Notice(
            f"{self.log}:{seq}",
            "rejection" if rejected else "expiry",
            at,
            request.id,
            request.requester,
            "" if rejected else request.owner,
            f"{who} was rejected ({causes_words(request.causes)})"
            if rejected
            else f"{who} is over: its lease ran out",
            {"causes": dict(request.causes), "amounts": dict(request.amounts)},
        )

    def _of_pool(self, seq: int, at: float, event: Any) -> Iterator[Notice]:
        """Before the event is applied."""
        state, pool = self.state, self.log.removeprefix("pool:")
        if isinstance(event, ev.Evicted):
            victims: list[list[Any]] = [[event.id, event.k]]
            asker = None
        elif isinstance(event, ev.Nominated):
            victims, asker = event.victims, state.attempts[event.id]
        else:
            return
        grace_s = state.config.grace_s if state.config else 0.0
        share = asker is not None and state.in_share(asker)
        for id, k in victims:
            victim = state.attempts[id]
            why, whom = OPERATOR, "an operator empties the pool"
            if asker is not None:
                why = reason(asker.requester, share, victim.requester)
                whom = f"for {asker.id} of {asker.requester} ({why})"
            yield Notice(
                f"{self.log}:{seq}:{id}",
                "preemption",
                at,
                id,
                victim.requester,
                pool,
                f"request {id} of {victim.requester} must stop in {pool} within {grace_s:g} s: {whom}",
                {
                    "attempt": k,
                    "reason": why,
                    "for": asker.id if asker is not None else "",
                    "for_requester": asker.requester if asker is not None else "",
                    "grace_s": grace_s,
                    "amounts": dict(victim.amounts),
                },
            )


def follow(
    store: str,
    callback: Callable[[Notice], Any],
    *,
    cursor: str | Path | None = None,
    kinds: Collection[str] = KINDS,
    from_start: bool = False,
    once: bool = False,
    stop: threading.Event | None = None,
    look_every_s: float = LOOK_EVERY_S,
) -> int:
    """Calls `callback` for each notice, each log's in order, until `stop` is set, or (`once`) all there is was told.

    store: an address such as sqlite:///var/lib/ray-pools. cursor: a file that remembers what was told over restarts;
    where a callback raises, its notice comes again with the next run. Returns how many were told.

    Raises:
        BadInput: an unknown kind, or a cursor that can't be right.
        NoLog: there is no coordinator's log at `store`.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise BadInput("kind", kind, f"any of {', '.join(KINDS)}")
    watch = Watch(store, Cursor(None if cursor is None else Path(cursor)), from_start=from_start)
    stop = stop or threading.Event()
    count = 0
    try:
        while True:
            for notice, took in watch.notices():
                if notice.kind in kinds:
                    callback(notice)
                    count += 1
                took()
                if stop.is_set():
                    return count
            watch.cursor.save()
            if once or stop.wait(look_every_s):
                return count
    finally:
        watch.close()
