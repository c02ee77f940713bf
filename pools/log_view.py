"""What a log says, for people and for other programs: lines, an actor's state at some row, a portable export.

All of it only reads, so a log may be live: what is read is a prefix of it. A request's story over all logs is in
log_tale.py, whether logs keep the rules in log_check.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import IO, Any, NamedTuple

import msgpack

from .core import records as ev
from .core.coordinator_state import CoordinatorState
from .core.pool import Pool
from .core.pool_state import PoolState
from .core.requests import FINAL, Request
from .core.status import grants, pool_status
from .errors import BadInput, PoolsError
from .log_story import COORDINATOR, pool_log
from .log_words import is_about, request_of, words
from .store import NoLog, Pruned, Reader, Row, open_reader

EXPORT_FORMAT = "ray-pools-log"
EXPORT_VERSION = 1
QUEUE_SHOWN = 1_000_000

State = CoordinatorState | PoolState


class Line(NamedTuple):
    """One event as it is shown. `at`: the core's time."""

    log: str
    seq: int
    epoch: int
    at: float
    event: Any

    @property
    def name(self) -> str:
        """The event's name."""
        return type(self.event).__name__

    @property
    def request(self) -> str:
        """The request that it is about, or ""."""
        return request_of(self.event)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "log": self.log,
            "seq": self.seq,
            "epoch": self.epoch,
            "at": self.at,
            "event": self.name,
            "request": self.request,
            "fields": plain(self.event._asdict()),
            "text": words(self.event),
        }


def plain(value: Any) -> Any:
    """A field's value as JSON has it; bytes become their hex digits."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def is_clock_time(at: float) -> bool:
    """A wall clock's; a scenario's starts at 0."""
    return at >= 1e8


def time_text(at: float) -> str:
    """The core's time, to the millisecond: local time where it is one of a clock, else seconds."""
    if not is_clock_time(at):
        return f"{at:.3f} s"
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def log_name(said: str) -> str:
    """The log that a user means: `coordinator`, a pool's name, or `pool:NAME` in full."""
    return said if said == COORDINATOR or said.startswith("pool:") else pool_log(said)


def events(reader: Reader, from_seq: int) -> Iterator[tuple[Row, Any]]:
    """Rows with their events."""
    for row in reader.read(from_seq):
        yield row, ev.unpack(row.body)


def lines(reader: Reader, log: str, from_seq: int | None = None, request: str = "") -> Iterator[Line]:
    """The log from a row on (by default the first that is kept), or only what concerns one request.

    Raises, while iterating: Pruned, SequenceGap, Corrupt, UnknownEvent.
    """
    for row, event in events(reader, reader.first_seq() if from_seq is None else from_seq):
        if not request or is_about(event, request):
            yield Line(log, row.seq, row.epoch, row.at, event)


# --- which logs there are


def pools_in(store: str) -> list[str]:
    """Every pool that the coordinator's log ever named and that has a log, in order. Raises NoLog without the first."""
    reader = open_reader(store, COORDINATOR)
    try:
        names = set(base_state(reader, COORDINATOR).pools)
        for _, event in events(reader, reader.first_seq()):
            if isinstance(event, ev.Changed):
                names.update(rest[0]["name"] for kind, *rest in event.changes if kind == "pool")
    finally:
        reader.close()
    return sorted(name for name in names if _is_there(store, pool_log(name)))


def _is_there(store: str, log: str) -> bool:
    try:
        open_reader(store, log).close()
    except NoLog:
        return False
    except BadInput:
        raise
    except PoolsError:  # it is there, and damaged: whoever reads it will say so
        return True
    return True


# --- the state at some row


def base_state(reader: Reader, log: str) -> Any:
    """The state before the first row that is kept: nothing, or the snapshot where rows are pruned."""
    kind: Any = CoordinatorState if log == COORDINATOR else PoolState
    first = reader.first_seq()
    if first == 1:
        return kind()
    snapshot = reader.latest_snapshot()
    if snapshot is None:
        raise PoolsError(f"{reader.where}: rows below {first} are pruned, and there is no snapshot")
    return kind.load(msgpack.unpackb(snapshot.state, strict_map_key=False))


def parse_moment(said: str, field: str = "--at") -> int | float:
    """A row's number, or a time: ISO 8601 (local unless it says otherwise), or `@SECONDS` of the core.

    Raises:
        BadInput: it is none of these; of that field.
    """
    try:
        if said.isdecimal():
            return int(said)
        if said.startswith("@"):
            return float(said[1:])
        return datetime.fromisoformat(said.replace("Z", "+00:00")).timestamp()
    except (OverflowError, ValueError):
        expected = "a row's number, a time such as 2026-01-31T12:00:00, or @SECONDS of the log's own time"
        raise BadInput(field, said, expected) from None


def folded(
    reader: Reader, log: str, moment: int | float | None = None, start: tuple[State, int] | None = None
) -> tuple[State, int]:
    """The state after row `moment` (an integer), or after all rows up to a time; and the epoch of its last row.

    start: such a pair of an earlier row, which is used up; by default the fold begins with the log.

    Raises:
        BadInput: there is no such row yet, or the time is before the first row or yet to come.
        Pruned: the rows that the state then needs are gone.
    """
    state, epoch = start if start is not None else (base_state(reader, log), 0)
    first, last = reader.first_seq(), reader.head()[1]
    if isinstance(moment, int) and not 1 <= moment <= last:
        raise BadInput("--at", moment, f"a row of {log}, from {first} to {last}, or a time")
    by_time = isinstance(moment, float)
    if isinstance(moment, float):
        _check_time(reader, log, moment)
    if first > 1 and moment is not None and (state.clock if by_time else state.seq) > moment:
        raise Pruned(reader.where, first - 1 if by_time else int(moment), state.seq)
    for row, event in events(reader, state.seq + 1):
        if moment is not None and (row.at if by_time else row.seq) > moment:
            break
        state.apply(event, row.at)
        epoch = row.epoch
    return state, epoch


def _check_time(reader: Reader, log: str, moment: float) -> None:
    """After the last row the state is known up to now, where the log's time is a clock's."""
    first, last = reader.first_seq(), reader.head()[1]
    begins, ends = (next(reader.read(seq), None) for seq in (first, last))
    if begins is None or ends is None:
        raise BadInput("--at", moment, f"left out: {log} has no rows yet")
    known_to = max(ends.at, time.time()) if is_clock_time(ends.at) else ends.at
    if not moment <= known_to or (moment < begins.at and first == 1):  # nan is none, either
        expected = (
            f"a time from {time_text(begins.at)} (row {first}) to {time_text(ends.at)} (row {last}), or a row"
        )
        raise BadInput("--at", _moment_text(moment), expected)


def _moment_text(moment: float) -> str:
    try:
        return time_text(moment)
    except (OverflowError, OSError, ValueError):  # beyond what a calendar has
        return f"@{moment:g}"


def state_at(
    reader: Reader, log: str, moment: int | float | None = None, start: tuple[State, int] | None = None
) -> dict[str, Any]:
    """An actor's state as plain values. A pool: capacity, held, queue with causes, grants. The coordinator: requests.

    What is soft was in no log: room that is promised, and how much of a victim's grace is over. Otherwise as `folded`.
    """
    return as_plain(log, *folded(reader, log, moment, start))


def as_plain(log: str, state: State, epoch: int, shown: int = QUEUE_SHOWN) -> dict[str, Any]:
    """A state as `state_at` shows it; of a pool's queue and of its grants at most so many."""
    common = {"log": log, "seq": state.seq, "at": state.clock, "epoch": epoch, "digest": state.digest()}
    if isinstance(state, CoordinatorState):
        return {**common, **_coordinator_at(state)}
    pool = Pool(log.removeprefix("pool:"), state, epoch, state.clock)
    return {
        **common,
        "version": state.version,
        **pool_status(pool, shown),
        "grants": grants(pool, shown),
    }


def _coordinator_at(state: CoordinatorState) -> dict[str, Any]:
    live = sorted((r for r in state.requests.values() if r.phase != FINAL), key=lambda r: r.age)
    return {
        "version": state.version,
        "pools": {name: dict(state.pools[name].capacity) for name in sorted(state.pools)},
        "policies": sum(len(policies) for policies in state.policies.values()),
        "requests": dict(sorted(Counter(r.shown for r in state.requests.values()).items())),
        "live": [_live(request) for request in live],
    }


def _live(request: Request) -> dict[str, Any]:
    return {
        "id": request.id,
        "requester": request.requester,
        "state": request.shown,
        "k": request.k,
        "pools": list(request.pools),
        "owner": request.owner,
        "asked": request.asked,
        "amounts": dict(request.amounts),
        "submitted_at": request.submitted_at,
    }


# --- the export


def link_hash(before: bytes, row: Row) -> bytes:
    """The hash of an exported row (docs/operations.md, "The export"): BLAKE2b-128 over the one before and the row."""
    packed = before + struct.pack("<QQd", row.seq, row.epoch, row.at) + row.body
    return hashlib.blake2b(packed, digest_size=16).digest()


def export(reader: Reader, log: str, out: IO[str]) -> dict[str, Any]:
    """Writes the whole log as JSON lines: a head, the snapshot where rows are pruned, the rows, an end with the digest.

    Returns the end. Raises as reading does; what was written by then has no end, by which it is known as incomplete.
    """
    first, (epoch, _) = reader.first_seq(), reader.head()
    sums = hashlib.blake2b(digest_size=32)

    def put(value: dict[str, Any]) -> None:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"
        sums.update(text.encode())
        out.write(text)

    put(
        {
            "format": EXPORT_FORMAT,
            "version": EXPORT_VERSION,
            "log": log,
            "epoch": epoch,
            "first_seq": first,
        }
    )
    state = base_state(reader, log)
    folded_up_to = state.seq
    if first > 1 and (snapshot := reader.latest_snapshot()) is not None:
        packed = base64.b64encode(snapshot.state).decode()
        put({"snapshot": snapshot.seq, "epoch": snapshot.epoch, "state": packed})
    chain, rows = hashlib.blake2b(log.encode(), digest_size=16).digest(), 0
    for row, event in events(reader, first):
        chain, rows = link_hash(chain, row), rows + 1
        if row.seq > folded_up_to:
            state.apply(event, row.at)
        put(
            {
                "seq": row.seq,
                "epoch": row.epoch,
                "at": row.at,
                "event": type(event).__name__,
                "fields": plain(event._asdict()),
                "body": base64.b64encode(row.body).decode(),
                "hash": chain.hex(),
            }
        )
    end = {"end": rows, "last_seq": state.seq, "digest": state.digest(), "blake2b": sums.hexdigest()}
    out.write(json.dumps(end, separators=(",", ":")) + "\n")
    return end
