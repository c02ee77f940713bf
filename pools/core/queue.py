"""Attempts, and the queue of a pool (docs/rules.md section 5).

Waiters of the same requester, amounts and preemptibility are judged alike but for their age. So they stand together
in one `Kind`, oldest first, and one of them is judged for all: a decision costs the number of kinds, not of waiters.

The order of the queue:
  1. nominated requests first,
  2. then those in their share before those that are not,
  3. then higher policy priority first,
  4. then the older first (age: the sequence number of the first submission).
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Mapping
from typing import Any

from ray_pools.core.config_rules import PolicyConfig
from ray_pools.core.quota import Ledger, Need, Use, need_of
from ray_pools.core.records import Amounts

QUEUED = "queued"
NOMINATED = "nominated"
GRANTED = "granted"
PREEMPTING = "preempting"
ENDING = "ending"
ENDED = "ended"
HOLDING = frozenset((GRANTED, PREEMPTING, ENDING))

# share before borrowing, then priority, then age
Rank = tuple[bool, int, int]

_KINDS_KEPT = 4096


class Attempt:
    """One attempt of a request at one pool. An id has at most one here, the newest."""

    __slots__ = (
        "age",
        "amounts",
        "ended_as",
        "entry",
        "grant_number",
        "granted_at",
        "id",
        "k",
        "not_before",
        "notice_seq",
        "options",
        "owned",
        "placed",
        "preemptible",
        "requester",
        "state",
        "submitted_at",
        "why",
    )

    def __init__(self, id: str, k: int) -> None:
        self.id = id
        self.k = k
        self.state = ENDED
        self.owned = False
        self.requester = ""
        self.amounts: Amounts = ()
        self.preemptible = True
        self.age = 0
        self.submitted_at = 0.0
        self.not_before = 0.0
        self.options: dict[str, Any] = {}
        self.granted_at = 0.0
        # the sequence number of its `Granted`: the order of grants
        self.grant_number = 0
        # what the placement group's maker said of it; None while it is being placed
        self.placed: dict[str, Any] | None = None
        self.ended_as = ""
        self.why = ""
        # the sequence number of the newest event here that the coordinator must hear of; 0: none
        self.notice_seq = 0
        # its valid entry in the heap of its kind; 0: it is in none
        self.entry = 0


class Grants:
    """The grants of one requester that may be preempted, oldest first."""

    __slots__ = ("_entries", "_live", "requester")

    def __init__(self, requester: str) -> None:
        self.requester = requester
        # some that ended stand here too, until they are half of all
        self._entries: list[Attempt] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def add(self, grant: Attempt) -> None:
        """A grant newer than all."""
        self._entries.append(grant)
        self._live += 1

    def discard(self, grant: Attempt) -> None:
        """The grant is over, or on its way out; its state says so from now on."""
        self._live -= 1
        if len(self._entries) > 2 * self._live + 16:
            self._entries = [each for each in self._entries if each is not grant and each.state == GRANTED]

    def newest_first(self, granted_until: float) -> Iterator[Attempt]:
        """Those granted at `granted_until` or before."""
        entries = self._entries
        if entries and entries[-1].granted_at <= granted_until:
            end = len(entries)
        else:
            end = bisect.bisect_right(entries, granted_until, key=_granted_at)
        for place in range(end - 1, -1, -1):
            grant = entries[place]
            if grant.state == GRANTED:
                yield grant

    def first_after(self, granted_at: float) -> Attempt | None:
        """The oldest that was granted later than that."""
        entries = self._entries
        for place in range(bisect.bisect_right(entries, granted_at, key=_granted_at), len(entries)):
            if entries[place].state == GRANTED:
                return entries[place]
        return None


def _granted_at(grant: Attempt) -> float:
    return grant.granted_at


class Kind:
    """The waiters that are equal but for their age."""

    __slots__ = (
        "amounts",
        "live",
        "need",
        "oldest_at",
        "owned",
        "policy_cause",
        "preemptible",
        "priority",
        "rank",
        "requester",
        "share",
        "use",
        "waiters",
    )

    def __init__(self, requester: str, amounts: Amounts, preemptible: bool, owned: bool) -> None:
        self.requester = requester
        self.amounts = amounts
        self.preemptible = preemptible
        self.owned = owned
        # (age, entry, attempt); entries that an attempt does not name any more are skipped
        self.waiters: list[tuple[int, int, Attempt]] = []
        # how many of them are named
        self.live = 0
        # None where its requester has no policy: it is admitted no more and waits for the coordinator to say so
        self.need: Need | None = None
        self.use: Use = Use()
        self.priority = 0
        # --- as of the last look at its requester's use, and at its oldest waiter
        self.share = False
        self.policy_cause: str | None = None
        self.oldest_at = 0.0
        self.rank: Rank | None = None

    def head(self) -> Attempt | None:
        """The oldest waiter."""
        waiters = self.waiters
        while waiters:
            _, entry, attempt = waiters[0]
            if attempt.entry == entry:
                return attempt
            heapq.heappop(waiters)
        return None

    def all(self) -> list[Attempt]:
        """Its waiters, oldest first."""
        return [attempt for _, entry, attempt in sorted(self.waiters) if attempt.entry == entry]


class WaitQueue:
    """The waiters of a pool that are neither nominated nor paused, by kind, and the kinds in the queue's order."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, Amounts, bool, bool], Kind] = {}
        self._of: dict[str, list[Kind]] = {}
        # requesters whose use changed, and kinds whose oldest waiter may have
        self._touched: set[str] = set()
        self._changed: dict[Kind, None] = {}
        # the kinds that have waiters, in the queue's order, and their ranks beside them
        self._order: list[Kind] = []
        self._ranks: list[Rank] = []
        self._entries = 0
        self.size = 0

    def kind(self, attempt: Attempt) -> Kind:
        """The kind of an attempt; made when it is the first of it."""
        key = (attempt.requester, attempt.amounts, attempt.preemptible, attempt.owned)
        kind = self.kinds.get(key)
        if kind is None:
            if len(self.kinds) >= 2 * (len(self._order) + _KINDS_KEPT):
                self._drop_empty()
            kind = self.kinds[key] = Kind(*key)
            self._of.setdefault(attempt.requester, []).append(kind)
        return kind

    def add(self, attempt: Attempt) -> Kind:
        """A waiter joins. A kind that is new has no need yet: the caller gives it one."""
        kind = self.kind(attempt)
        self._entries += 1
        attempt.entry = self._entries
        heapq.heappush(kind.waiters, (attempt.age, attempt.entry, attempt))
        if not kind.live:  # one that nobody waits in is not looked at
            self._touched.add(attempt.requester)
        kind.live += 1
        if kind.rank is None or kind.rank[2] > attempt.age:
            self._changed[kind] = None
        self.size += 1
        return kind

    def remove(self, attempt: Attempt) -> None:
        """A waiter leaves: it was granted, nominated or ended, or its bid of room stands."""
        if attempt.entry:
            attempt.entry = 0
            kind = self.kind(attempt)
            kind.live -= 1
            if len(kind.waiters) > 2 * kind.live + 16:
                kind.waiters = [each for each in kind.waiters if each[2].entry == each[1]]
                heapq.heapify(kind.waiters)
            if kind.rank is not None and kind.rank[2] == attempt.age:
                self._changed[kind] = None
            self.size -= 1

    def touch(self, requester: str) -> None:
        """What the requester uses changed, and with it which of its waiters are in their share."""
        self._touched.add(requester)

    def refit(
        self, policies: Mapping[str, PolicyConfig], capacity: Mapping[str, int], ledger: Ledger
    ) -> None:
        """The configuration changed: every kind is judged by new numbers."""
        for kind in self.kinds.values():
            self.fit(kind, policies.get(kind.requester), capacity, ledger)

    def fit(
        self, kind: Kind, policy: PolicyConfig | None, capacity: Mapping[str, int], ledger: Ledger
    ) -> None:
        """Give a kind the numbers that it is judged by."""
        kind.need = need_of(kind.amounts, capacity, policy) if policy else None
        kind.priority = policy.priority if policy else 0
        kind.use = ledger.uses[kind.requester]
        self._touched.add(kind.requester)
        self._changed[kind] = None

    def ordered(self, ledger: Ledger) -> list[Kind]:
        """The kinds that have waiters, in the order of the queue."""
        if self._touched or self._changed:
            for requester in self._touched:
                for kind in self._of.get(requester, ()):
                    need = kind.need
                    if kind.live and need is not None:
                        kind.policy_cause = ledger.policy_cause(need, kind.use, kind.preemptible)
                        share = ledger.in_share(need, kind.use, kind.preemptible)
                        if share is not kind.share:
                            kind.share = share
                            self._changed[kind] = None
            self._touched.clear()
            for kind in self._changed:
                self._place(kind)
            self._changed.clear()
        return self._order

    def _place(self, kind: Kind) -> None:
        """Put a kind where it stands now."""
        head = kind.head()
        rank = None if head is None else (not kind.share, -kind.priority, head.age)
        if rank == kind.rank:
            return
        if kind.rank is not None:
            place = bisect.bisect_left(self._ranks, kind.rank)
            while (
                self._order[place] is not kind
            ):  # the kind of the same request's next attempt, placed just before
                place += 1
            del self._ranks[place], self._order[place]
        if rank is not None and head is not None:
            kind.oldest_at = head.submitted_at
            place = bisect.bisect_left(self._ranks, rank)
            self._ranks.insert(place, rank)
            self._order.insert(place, kind)
        kind.rank = rank

    def _drop_empty(self) -> None:
        """Kinds that nobody waits in any more are only kept while they are few."""
        self.kinds = {key: k for key, k in self.kinds.items() if k.rank is not None or k in self._changed}
        self._of = {}
        for kind in self.kinds.values():
            self._of.setdefault(kind.requester, []).append(kind)
