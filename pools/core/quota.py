"""All quota arithmetic of one pool (docs/rules.md section 4), and nothing else.

Amounts are counted for every key that a request asks for with a positive amount, metered or not, so that a key
that becomes metered later counts what already runs. Only metered keys are judged: they are what a `Need` lists.

Numbers here are never negative, but for headroom: it is negative when a share shrank under what runs in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from ray_pools.core import config_rules
from ray_pools.core.config_rules import PolicyConfig
from ray_pools.core.records import Amounts

WAITING_CAPACITY = "waiting_capacity"
AWAITING_PREEMPTION = "awaiting_preemption"
AT_LIMIT = "at_limit"
RESERVED_IN_USE = "reserved_in_use"
BEHIND_HEAD = "behind_head"
NO_POLICY = "no_policy"
PAUSED = "paused"
CORDONED, DRAINING = config_rules.CORDONED, config_rules.DRAINING  # the pool's state is the cause
NOMINATED = "nominated"

# A request waits for capacity, and not for its own policy, when its cause is one of these (section 5).
FOR_CAPACITY = frozenset((WAITING_CAPACITY, AWAITING_PREEMPTION))

UNMETERED_IF_ABSENT = frozenset(("mcpu", "memory_mb", "step_run"))


NO_LIMIT = 1 << 62

# The priority of a requester that has lost its policy (section 6).
BELOW_ALL = float("-inf")


class Item(NamedTuple):
    """One metered key of a request: its amount, and the most that may be used beside it for it to fit."""

    key: str
    amount: int
    # of the pool's capacity, by whoever
    room: int
    # of the limit, by its requester (NO_LIMIT: none is set)
    limit_room: int
    # of the share, by its requester; negative where the amount alone is more
    share_room: int


Need = tuple[Item, ...]


class Use:
    """What one requester uses of one pool, per key."""

    __slots__ = ("booked", "claimed", "pinned")

    def __init__(self) -> None:
        # by its grants, those being preempted included, and its nominations: what its limit is held against
        self.claimed: dict[str, int] = defaultdict(int)
        # by its grants that are not being preempted, and its nominations: what its share is held against
        self.booked: dict[str, int] = defaultdict(int)
        # the part of `claimed` that can't be preempted
        self.pinned: dict[str, int] = defaultdict(int)


class Ledger:
    """What is held and booked in one pool, in all and per requester. Kept, never summed anew."""

    __slots__ = ("booked", "held", "pinned", "promised", "uses")

    def __init__(self) -> None:
        self.held: dict[str, int] = defaultdict(int)
        self.booked: dict[str, int] = defaultdict(int)
        # held by grants that can't be preempted (not by nominations)
        self.pinned: dict[str, int] = defaultdict(int)
        # booked for bids of room that nobody answered yet: counts as held for all others, and is not yet
        self.promised: dict[str, int] = defaultdict(int)
        self.uses: dict[str, Use] = defaultdict(Use)

    # --- the five moves of a request's amounts; each is undone by the one with the opposite sign

    def book(self, requester: str, amounts: Amounts, preemptible: bool, sign: int = 1) -> None:
        """Nominated (or promised): booked, and nothing held yet."""
        use, total = self.uses[requester], self.booked
        claimed, booked, pinned = use.claimed, use.booked, use.pinned
        for key, amount in amounts:
            amount *= sign
            total[key] += amount
            claimed[key] += amount
            booked[key] += amount
            if not preemptible:
                pinned[key] += amount

    def hold(self, amounts: Amounts, preemptible: bool, sign: int = 1) -> None:
        """What is booked becomes held."""
        held, pinned = self.held, self.pinned
        for key, amount in amounts:
            amount *= sign
            held[key] += amount
            if not preemptible:
                pinned[key] += amount

    def promise(self, amounts: Amounts, sign: int = 1) -> None:
        """A bid of room stands: what is booked for it counts as held for all others."""
        for key, amount in amounts:
            self.promised[key] += sign * amount

    def unbook(self, requester: str, amounts: Amounts) -> None:
        """A grant is on its way out: it holds its capacity, and no longer books it."""
        booked, total = self.uses[requester].booked, self.booked
        for key, amount in amounts:
            total[key] -= amount
            booked[key] -= amount

    def vacate(self, requester: str, amounts: Amounts, preemptible: bool) -> None:
        """A grant on its way out is gone."""
        use = self.uses[requester]
        for key, amount in amounts:
            self.held[key] -= amount
            use.claimed[key] -= amount
            if not preemptible:
                self.pinned[key] -= amount
                use.pinned[key] -= amount

    # --- the judgements

    def in_share(self, need: Need, use: Use, preemptible: bool, *, nominated: bool = False) -> bool:
        """Every amount fits in the requester's headroom (section 4); a nominated request leaves itself out."""
        spent = use.booked if preemptible else use.pinned
        for key, amount, _, _, share_room in need:
            if spent[key] - (amount if nominated else 0) > share_room:
                return False
        return True

    @staticmethod
    def policy_cause(need: Need, use: Use, preemptible: bool) -> str | None:
        """Why its own policy keeps the request waiting, or None: the first two lines of section 4."""
        claimed = use.claimed
        for key, _, _, limit_room, _ in need:
            if claimed[key] > limit_room:
                return AT_LIMIT
        if not preemptible:
            for key, _, _, _, share_room in need:
                if use.pinned[key] > share_room:
                    return RESERVED_IN_USE
        return None

    def capacity_cause(self, need: Need) -> str | None:
        """Why the pool's capacity keeps the request waiting, or None: the third line of section 4."""
        booked = self.booked
        for key, _, room, _, _ in need:
            if booked[key] > room:
                return WAITING_CAPACITY
        held, promised = self.held, self.promised
        for key, _, room, _, _ in need:
            if held[key] + promised[key] > room:
                return AWAITING_PREEMPTION
        return None

    def cause(self, need: Need, use: Use, preemptible: bool) -> str | None:
        """Why the request can't be granted, or None (section 4): the first line that fails gives the cause."""
        return self.policy_cause(need, use, preemptible) or self.capacity_cause(need)

    def nominated_cause(self, need: Need, use: Use, preemptible: bool) -> str | None:
        """The same for a nominated request, which is itself booked and claimed: it waits for what is held."""
        for key, amount, _, limit_room, _ in need:
            if use.claimed[key] - amount > limit_room:
                return AT_LIMIT
        if not preemptible and any(use.pinned[item.key] - item.amount > item.share_room for item in need):
            return RESERVED_IN_USE
        for key, _, room, _, _ in need:
            if self.held[key] + self.promised[key] > room:
                return AWAITING_PREEMPTION
        return None

    def fits_beside_pinned(self, need: Need) -> bool:
        """It would fit beside what non-preemptible grants hold, so waiting for the rest has a point (section 5)."""
        pinned = self.pinned
        for key, _, room, _, _ in need:
            if pinned[key] > room:
                return False
        return True

    def short_of_capacity(self, need: Need) -> dict[str, int]:
        """Per key: how much more must be unbooked for the request to fit (section 6)."""
        booked = self.booked
        return {key: booked[key] - room for key, _, room, _, _ in need if booked[key] > room}

    @staticmethod
    def short_of_limit(need: Need, use: Use) -> dict[str, int]:
        """Per key: how much its requester must have booked less to stay within its limit (section 6)."""
        booked = use.booked
        return {
            key: booked[key] - limit_room for key, _, _, limit_room, _ in need if booked[key] > limit_room
        }

    def borrows(self, use: Use, reserved: Mapping[str, int], capacity: Mapping[str, int]) -> bool:
        """The requester uses more than its share of some metered key."""
        booked = use.booked
        for key in capacity:
            if booked[key] > reserved.get(key, 0):
                return True
        return False


def need_of(amounts: Amounts, capacity: Mapping[str, int], policy: PolicyConfig | None) -> Need:
    """The metered keys of a request in a pool, with the policy's numbers beside them."""
    limit: Mapping[str, int] = policy.limit if policy else {}
    reserved: Mapping[str, int] = policy.reserved if policy else {}
    return tuple(
        Item(
            key,
            amount,
            capacity[key] - amount,
            limit[key] - amount if key in limit else NO_LIMIT,
            reserved.get(key, 0) - amount,
        )
        for key, amount in amounts
        if key in capacity
    )


def admission_cause(
    amounts: Amounts, preemptible: bool, capacity: Mapping[str, int], policy: PolicyConfig | None
) -> str | None:
    """Why a pool does not admit a request, or None (section 3). `amounts`: positive ones, sorted by key."""
    if policy is None:
        return NO_POLICY
    for key, amount in amounts:
        if key not in capacity:
            if key in UNMETERED_IF_ABSENT:
                continue
            return "no_capacity_for_key"
        if amount > capacity[key]:
            return "exceeds_capacity"
        if key in policy.limit and amount > policy.limit[key]:
            return "exceeds_limit"
        if not preemptible and amount > policy.reserved.get(key, 0):
            return "exceeds_reserved"
    return None
