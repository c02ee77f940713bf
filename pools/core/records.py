"""The events of the two logs, and how one event becomes bytes and back.

An event is a named tuple of plain values. On disk it is one msgpack array: ``[tag, version, *fields]``. The
state of an actor is a fold over its events; nothing else changes it. Times are not fields of events: the log
keeps the core's time beside each row, and the fold receives it with the event.

A field is never renamed, reordered or removed in place. A change makes a new version of the event and a pure
function in `UPCASTS` that turns the fields of one version into those of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgpack

from ray_pools.errors import PoolsError

Amounts = tuple[tuple[str, int], ...]


def positive(amounts: Iterable[tuple[str, int]]) -> Amounts:
    """The amounts of a request that count: those above 0, by key."""
    return tuple(sorted((key, amount) for key, amount in amounts if amount > 0))


class UnknownEvent(PoolsError):
    """A log holds an event that this version of the code does not know."""


class UnknownSnapshot(PoolsError):
    """A snapshot has another layout than this version of the code writes."""


def check_layout(dumped: dict[str, Any], here: dict[str, Any]) -> None:
    """A state that was dumped can be loaded only by code that dumps alike (`here`: what an empty one dumps).

    Unlike events a snapshot has no upcasts: the log has it all.

    Raises:
        UnknownSnapshot: it names what differs.
    """
    for name in ("keys", "fields"):
        was, now = dumped.get("layout", {}).get(name), here["layout"][name]
        if was != now:
            differ = sorted(set(was or ()) ^ set(now))
            raise UnknownSnapshot(
                f"the snapshot after row {dumped.get('seq')} is of another version: its {name} differ in"
                f" {', '.join(differ) or 'their order'}"
            )


# --- events of a pool's log


class Configured(NamedTuple):
    """The pool goes by this configuration and these policies from here on (rules 9)."""

    version: int
    uid: str
    config: dict[str, Any]
    policies: list[dict[str, Any]]


class Queued(NamedTuple):
    """Attempt `k` of a request waits here. `owned`: this pool alone may run it (protocol: enqueue)."""

    id: str
    k: int
    owned: bool
    requester: str
    amounts: list[list[Any]]
    preemptible: bool
    age: int
    submitted_at: float
    not_before: float
    options: dict[str, Any]


class Granted(NamedTuple):
    """The attempt holds capacity of this pool."""

    id: str
    k: int


class Placed(NamedTuple):
    """The grant's placement group is ready: its holder may be told."""

    id: str
    k: int
    detail: dict[str, Any]


class Nominated(NamedTuple):
    """The attempt is booked here and its victims are told to stop; one event, so that neither stands alone."""

    id: str
    k: int
    victims: list[list[Any]]


class Evicted(NamedTuple):
    """An operator wants the grant to end, and `why`: its holder is told to stop, as a victim is, for nobody."""

    id: str
    k: int
    why: str


class Ending(NamedTuple):
    """The grant is over for its holder; its capacity is free when its placement group is gone."""

    id: str
    k: int
    how: str
    why: str


class Ended(NamedTuple):
    """The attempt is over here and holds nothing. `how`: one of `ENDS`."""

    id: str
    k: int
    how: str
    why: str


class BegunAnew(NamedTuple):
    """The pool was declared lost: nothing of what stands before this counts any more. `uid` is what it is from here
    on; `epoch` and `head` are the coordinator's, who said so.
    """

    uid: str
    epoch: int
    head: int


# --- events of the coordinator's log


class Changed(NamedTuple):
    """Pools, policies, keys, limits or times changed, all of it or nothing (rules 9). Each change is a list that starts
    with its kind. `command_id`: of the command, so that one that is repeated changes nothing; "" where it had none.
    `by`: which operator, "" where none was named. Version 1 had no `by`, and of pools and policies only.
    """

    version: int
    changes: list[list[Any]]
    command_id: str = ""
    by: str = ""


class Submitted(NamedTuple):
    """A request exists. It opens attempt 1 in `pools`, in its own order; with none it is rejected (rules 3)."""

    id: str
    requester: str
    amounts: list[list[Any]]
    preemptible: bool
    retries: int
    lease_s: float
    age: int
    options: dict[str, Any]
    token: bytes
    client: str
    pools: list[str]
    causes: dict[str, str]


class Opened(NamedTuple):
    """Attempt `k` takes the place of the one before, which can hold nothing any more. With one pool it is taken."""

    id: str
    k: int
    pools: list[str]
    not_before: dict[str, float]
    pauses: dict[str, int]
    retries: int


class Taken(NamedTuple):
    """Attempt `k` belongs to `pool`: only this pool may grant it."""

    id: str
    k: int
    pool: str


class Told(NamedTuple):
    """The pool said what became of the attempt that it has taken: nominated, granted, placed or preempting."""

    id: str
    k: int
    state: str
    detail: dict[str, Any]


class Asked(NamedTuple):
    """The pool that took the attempt must be told: `what` is one of release, cancel, expire, give, yield, stopped,
    evict."""

    id: str
    k: int
    what: str


class Finished(NamedTuple):
    """The request reached a final state (rules 8)."""

    id: str
    state: str
    causes: dict[str, str]


class Forgotten(NamedTuple):
    """Final requests older than the retention time leave the state; the log keeps their story."""

    ids: list[str]


class HolderSeen(NamedTuple):
    """A client process said who it is, in Ray's ids: by them its death is seen before its leases run out (rules 8)."""

    client: str
    holder: dict[str, str]


class HolderGone(NamedTuple):
    """A client process is gone for sure, and `why`: the leases of these requests end now (rules 8)."""

    client: str
    ids: list[str]
    why: str


class Adopted(NamedTuple):
    """The same submission came from another client, with the request's token: that one holds it from here on."""

    id: str
    client: str


class DeclaredLost(NamedTuple):
    """An operator says that the pool's log is lost for good: from here on it is another pool, of this uid
    (protocol: "A pool whose log is lost"). `command_id`: as in `Changed`.
    """

    version: int
    pool: str
    uid: str
    operator: str
    command_id: str


class Commanded(NamedTuple):
    """An operator `by` that name did `what`: to a request that may be another's (`id`), or to all ("").

    What comes of it follows as events of its own.
    """

    id: str
    what: str
    by: str
    detail: str


class Denied(NamedTuple):
    """Who says to be `by` was refused `what` (of request `id`), `times` times since the last such event. `why`: a code.

    Nothing else came of it.
    """

    id: str
    what: str
    by: str
    why: str
    times: int


class Announced(NamedTuple):
    """Capacity of `pool` that will be needed until then (`for_s` from now on): its nodes are to be up before anybody
    asks. `requester`: whose requests use it up, "" for everybody's. `by`: who announced it.
    """

    id: str
    pool: str
    amounts: list[list[Any]]
    for_s: float
    until: float
    requester: str
    by: str


class Unannounced(NamedTuple):
    """These announcements are over, and `why`. `by`: who took them back, "" where nobody did."""

    ids: list[str]
    why: str
    by: str


# --- both


class Peer(NamedTuple):
    """How far the other side's stream has been worked in (`epoch`, `heard`), its head, and what it acknowledged."""

    name: str
    epoch: int
    head: int
    heard: int
    acked: int


Event = (
    Configured
    | Queued
    | Granted
    | Placed
    | Nominated
    | Evicted
    | Ending
    | Ended
    | Changed
    | Submitted
    | Opened
    | Taken
    | Told
    | Asked
    | Finished
    | Forgotten
    | HolderSeen
    | HolderGone
    | Adopted
    | Peer
    | Commanded
    | Denied
    | DeclaredLost
    | BegunAnew
    | Announced
    | Unannounced
)

ENDS = ("withdrawn", "returned", "released", "cancelled", "expired", "stopped")

# `why` of a grant that ends as stopped; where its group was lost it is what Ray says
HOLDER_STOPPED = "its holder stopped"
GRACE_RAN_OUT = "its grace ran out"
NOT_PLACED_YET = "it was not placed yet"

# tag -> (class, version). Tags are small integers, never used twice.
_CLASSES: dict[int, tuple[type[Any], int]] = {
    1: (Configured, 1),
    2: (Queued, 1),
    3: (Granted, 1),
    4: (Placed, 1),
    5: (Nominated, 1),
    6: (Ending, 1),
    7: (Ended, 1),
    8: (Changed, 2),
    9: (Submitted, 1),
    10: (Opened, 1),
    11: (Taken, 1),
    12: (Told, 1),
    13: (Asked, 1),
    14: (Finished, 1),
    15: (Forgotten, 1),
    16: (Peer, 1),
    17: (HolderSeen, 1),
    18: (HolderGone, 1),
    19: (Adopted, 1),
    20: (Commanded, 1),
    21: (Denied, 1),
    22: (DeclaredLost, 1),
    23: (BegunAnew, 1),
    24: (Evicted, 1),
    25: (Announced, 1),
    26: (Unannounced, 1),
}
_HEADERS: dict[type[Any], tuple[int, int]] = {cls: (tag, version) for tag, (cls, version) in _CLASSES.items()}

# (tag, version) -> the fields of version + 1
UPCASTS: dict[tuple[int, int], Callable[[list[Any]], list[Any]]] = {
    (8, 1): lambda fields: [*fields, ""],  # nobody was named
}


def pack(event: Event) -> bytes:
    """The event as one msgpack array."""
    packed: bytes = msgpack.packb((*_HEADERS[type(event)], *event))
    return packed


def unpack(body: bytes) -> Event:
    """The event that `pack` wrote, in the newest version.

    Raises:
        UnknownEvent: the tag or its version is not known here; the message names both.
    """
    values = msgpack.unpackb(body, strict_map_key=False)
    cls, newest, length = _SHAPES.get(values[0], _NO_SHAPE) if values else _NO_SHAPE
    if len(values) != length or values[1] != newest:
        return _older(values)
    del values[:2]
    event: Event = _make(cls, values)
    return event


def unpack_all(body: bytes, count: int) -> list[Event]:
    """The events of `count` bodies that stand one after the other; as `unpack`, and quicker than one by one."""
    if count == 1:
        return [unpack(body)]
    events: list[Event] = []
    shapes, make, add = _SHAPES, _make, events.append
    for values in msgpack.unpackb(_array_header(count) + body, strict_map_key=False):
        try:
            cls, newest, length = shapes[values[0]]
        except (LookupError, TypeError):
            cls, newest, length = _NO_SHAPE
        if values[1] == newest and len(values) == length:
            del values[:2]
            add(make(cls, values))
        else:
            add(_older(values))
    return events


def _array_header(count: int) -> bytes:
    return bytes((0x90 | count,)) if count < 16 else b"\xdd" + count.to_bytes(4, "big")


# What a named tuple's own constructor does, without its calls in between: a restart unpacks a whole log.
_make: Callable[[type[Any], list[Any]], Any] = tuple.__new__
_SHAPES = {tag: (cls, version, len(cls._fields) + 2) for tag, (cls, version) in _CLASSES.items()}
_NO_SHAPE: tuple[type[Any], int, int] = (tuple, 0, -1)


def _older(values: list[Any]) -> Event:
    """An event that is not in the newest version, or that no version has."""
    tag, version, *fields = values
    known = _CLASSES.get(tag)
    if known is None:
        raise UnknownEvent(
            f"the log holds an event with tag {tag!r}, version {version!r}, which is unknown here"
        )
    cls, newest = known
    while version < newest:
        fields = UPCASTS[tag, version](fields)
        version += 1
    if version != newest:
        raise UnknownEvent(
            f"the log holds {cls.__name__} in version {version}; the newest known here is {newest}"
        )
    event: Event = cls(*fields)
    return event
