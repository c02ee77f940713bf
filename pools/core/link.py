"""What two actors tell each other, and how neither misses a word (docs/protocol.md, "Links").

Each side has a stream: for each subject (a request's id; "" is the configuration) the newest thing that the other side
must know, numbered by the sequence number of the event that it follows from. All of it can be derived from the
durable state, so it can be sent again after any crash. A message carries what the other side has not acknowledged, in
order, and says where it starts; the receiver takes it only when nothing is missing before it. An acknowledgement says
how far the stream was worked in, durably. So loss, repetition and reordering of messages are harmless.

A side that comes back opens its log with a higher epoch: what a lower epoch still sends is refused, and so is a log
that is shorter than one seen before. What counts is its length when it was opened: what was appended since then says
nothing about what was lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ray_pools.errors import Refused

ITEMS_MAX = 2000

SHORTER_LOG = "shorter_log"


_MARK = "+"


def is_made_anew(uid: str) -> bool:
    """The uid is of a pool that took the place of one that was declared lost."""
    return _MARK in uid


def took_the_place_of(uid: str, before: str) -> bool:
    """The uid is of a pool that took the place of the one with uid `before`, or of one that took its place."""
    return is_made_anew(uid) and uid.partition(_MARK)[0] == before.partition(_MARK)[0]


def uid_anew(uid: str, version: int) -> str:
    """The uid of what takes the place of the pool with this uid, by the change that makes this version."""
    return f"{uid.partition(_MARK)[0]}{_MARK}{version}"


class StalePeer(Refused):
    """A message of a run of the other side that has been replaced: it must stop."""

    def __init__(self, message: str) -> None:
        super().__init__("stale_peer", message)


class ShorterLog(Refused):
    """A side came back with less than it had told the other before: its log lost something."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(SHORTER_LOG, message, {"log": log})


def lost(whose: str, opened: int, epoch: int, witness: str, head: int, seen_in: int) -> ShorterLog:
    """What both sides say of a log that lost something; it names both, and what to do."""
    remedy = (
        f"say that it is lost for good: pools pool declare-lost {whose.removeprefix('pool:')}"
        if whose.startswith("pool:")
        else "restore a backup of all logs: pools restore"
    )
    return ShorterLog(
        f"the log of {whose} lost something: it was opened with {opened} events (epoch {epoch}), and {witness}"
        f" has seen {head} of it (epoch {seen_in}). Put its newest whole copy back, or {remedy}"
        ' (docs/operations.md, "A log that lost something")',
        whose,
    )


class Message(NamedTuple):
    """One exchange, in either direction. Items are lists that start with (sequence number, subject)."""

    sender: str
    uid: str
    epoch: int
    head: int
    after: int
    upto: int
    items: list[list[Any]]
    ack: int
    # of a pool: bids (number, id, k, answer, in_share), meant for this epoch of the coordinator; of the
    # coordinator: how far it has the bids
    bids: list[list[Any]]
    bids_upto: int
    bids_ack: int
    to_epoch: int
    # how long the sender's log was when this run of it opened it (-1: an older version, which does not say)
    opened: int = -1
    # the longest that the sender has seen the receiver's log, and in which epoch
    seen_epoch: int = 0
    seen_head: int = 0

    def to_wire(self, *, whole: bool = True) -> list[Any]:
        """The message as it travels; not `whole`: as an older version takes it."""
        return list(self if whole else self[:_FIELDS_AT_FIRST])


_FIELDS_AT_FIRST = 12


class Link:
    """One side's view of the stream in both directions with one peer."""

    def __init__(
        self, me: str, peer: str, epoch: int = 0, head: int = 0, heard: int = 0, acked: int = 0
    ) -> None:
        self.me, self.peer = me, peer
        # the highest epoch, and in it the longest log, that the peer has shown
        self.epoch = epoch
        self.head = head
        # the peer's stream is worked in up to here
        self.heard = heard
        # the peer has ours up to here
        self.acked = acked
        # subject -> sequence number of what the peer does not have yet, ascending
        self.index: dict[str, int] = {}
        self.went_back = False
        # numbered answers that follow from no event (bids): kept by the pool, acknowledged per run of the coordinator
        self.bids_ack = 0

    def note(self, subject: str, seq: int) -> None:
        """Something new about the subject: it takes the place of what was to be said before."""
        self.index.pop(subject, None)
        self.index[subject] = seq

    def rebuild(self, pairs: Iterable[tuple[int, str]]) -> None:
        """The stream as it follows from durable state: (sequence number, subject), in any order."""
        self.index = {subject: seq for seq, subject in sorted(pairs) if seq > self.acked}
        self.went_back = False

    def due(self) -> list[tuple[str, int]]:
        """What goes into the next message."""
        pairs = []
        for pair in self.index.items():
            pairs.append(pair)
            if len(pairs) == ITEMS_MAX:
                # a message ends between two numbers, never between two subjects of one event
                last = pair[1]
                pairs.extend(p for p in list(self.index.items())[ITEMS_MAX:] if p[1] == last)
                break
        return pairs

    def check(self, message: Message, asked_in: int = 0) -> None:
        """Whether the peer may be listened to. `asked_in`: of an answer, the peer's epoch as it was known when it was
        asked. Who answers has just seen that nobody opened its log after it: with a lower epoch its log went back.

        Raises:
            StalePeer: the message is of an epoch that has been replaced.
            ShorterLog: the peer's log is shorter than it was.
        """
        opened = message.opened if message.opened >= 0 else message.head
        if message.epoch < asked_in or (message.epoch > self.epoch and opened < self.head):
            raise lost(self.peer, opened, message.epoch, self.me, self.head, self.epoch)
        if message.epoch < self.epoch:
            raise StalePeer(
                f"{self.peer} speaks in epoch {message.epoch}, but epoch {self.epoch} has taken over: it must stop"
            )

    def receive(self, message: Message, asked_in: int = 0) -> list[list[Any]]:
        """The items that are new, in order; none where something is missing before them. Raises as `check`."""
        self.check(message, asked_in)
        if message.epoch > self.epoch:
            self.epoch = message.epoch
            if message.ack < self.acked:
                self.acked = message.ack
                self.went_back = True
        self.head = max(self.head, message.head)
        self.acknowledge(message.ack)
        if message.after > self.heard:
            return []
        fresh = [item for item in message.items if item[0] > self.heard]
        self.heard = max(self.heard, message.upto)
        return fresh

    def acknowledge(self, seq: int) -> None:
        """The peer has our stream up to `seq`."""
        if seq > self.acked:
            self.acked = seq
            done = []
            for subject, at in self.index.items():
                if at > seq:
                    break
                done.append(subject)
            for subject in done:
                del self.index[subject]
