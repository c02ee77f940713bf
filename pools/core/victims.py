"""Whom a pool stops for a waiting request (docs/rules.md section 6). A pure search: it changes nothing.

The order in which grants become victims:
  1. ascending policy priority of their requester (one without a policy stands below every priority),
  2. then the waiting request's own requester before others,
  3. then the newest grant first (least work lost),
until every short key is covered. Then, from the last chosen to the first, each that is not needed after all is spared.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ray_pools.core.config_rules import PolicyConfig
from ray_pools.core.queue import Attempt, Grants
from ray_pools.core.quota import BELOW_ALL, Ledger, Need

Holders = Mapping[str, Grants]

RECLAIM, PRIORITY, OWN = "reclaim", "priority", "own"
"""Why a victim stops: the asker takes its share back, has the higher priority, or is of the victim's own requester."""
OPERATOR = "operator"
"""Of what is told to stop for nobody, as a pool is emptied (section 9)."""


class Asker(NamedTuple):
    """The waiting request that victims are looked for."""

    requester: str
    need: Need
    preemptible: bool
    in_share: bool
    priority: int

    @property
    def may_stop_own(self) -> bool:
        """Only a non-preemptible request in its share takes the share back from its requester's own work."""
        return not self.preemptible and self.in_share


def reason(asker: str, in_share: bool, victim: str) -> str:
    """One of `RECLAIM`, `PRIORITY`, `OWN`, by the requesters; `in_share`: the asker, before it is nominated."""
    return OWN if asker == victim else RECLAIM if in_share else PRIORITY


def shortage(ledger: Ledger, asker: Asker) -> tuple[dict[str, int], dict[str, int]]:
    """What is short: of the pool's capacity, and of the requester's own limit, which only its own grants cure."""
    of_limit = ledger.short_of_limit(asker.need, ledger.uses[asker.requester]) if asker.may_stop_own else {}
    return ledger.short_of_capacity(asker.need), of_limit


def find_victims(
    ledger: Ledger,
    holders: Holders,
    policies: Mapping[str, PolicyConfig],
    asker: Asker,
    now: float,
    min_runtime_s: float,
) -> list[Attempt]:
    """The grants to stop so that the request fits; empty when nothing is short or no set of them is enough."""
    short, short_of_limit = shortage(ledger, asker)
    if not short and not short_of_limit:
        return []
    groups = _groups(ledger, holders, policies, asker, {**short_of_limit, **short})
    if not _enough(ledger, groups, short):
        return []
    asked = {item.key: item.amount for item in asker.need}
    freed: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    chosen: list[Attempt] = []

    def borrowed_and_short(requester: str, key: str) -> bool:
        """At this point: the key is still short, and the requester still borrows it."""
        own = requester == asker.requester
        if not (short.get(key, 0) > 0 or (own and short_of_limit.get(key, 0) > 0)):
            return False
        policy = policies.get(requester)
        booked = ledger.uses[requester].booked[key] + (asked.get(key, 0) if own else 0)
        return booked - freed[requester][key] > (policy.reserved.get(key, 0) if policy else 0)

    def candidates(grants: Grants) -> Iterator[Attempt]:
        """A requester's grants, newest first, as long as there is something to take back from it."""
        own = grants.requester == asker.requester  # no shield against one's own requester
        for grant in grants.newest_first(now if own else now - min_runtime_s):
            if not any(borrowed_and_short(grants.requester, key) for key in (*short, *short_of_limit)):
                return
            yield grant

    for grant in _in_order(groups, asker, candidates):
        if any(borrowed_and_short(grant.requester, key) for key, _ in grant.amounts):
            chosen.append(grant)
            _count(grant, short, short_of_limit if grant.requester == asker.requester else {}, -1)
            for key, amount in grant.amounts:
                freed[grant.requester][key] += amount
            if _covered(short) and _covered(short_of_limit):
                return _spare(chosen, asker, short, short_of_limit)
    return []


def _groups(
    ledger: Ledger,
    holders: Holders,
    policies: Mapping[str, PolicyConfig],
    asker: Asker,
    short: Mapping[str, int],
) -> dict[float, list[Grants]]:
    """Candidates by their requester's priority, its own first: only of requesters that borrow a short key."""
    groups: dict[float, list[Grants]] = {}
    asked = {item.key: item.amount for item in asker.need}
    for requester, grants in holders.items():
        policy = policies.get(requester)
        priority = policy.priority if policy else BELOW_ALL
        own = requester == asker.requester
        if (own and not asker.may_stop_own) or not (asker.in_share or priority < asker.priority):
            continue
        booked, reserved = ledger.uses[requester].booked, policy.reserved if policy else {}
        if any(booked[key] + (asked.get(key, 0) if own else 0) > reserved.get(key, 0) for key in short):
            group = groups.setdefault(priority, [])
            group.insert(0 if own else len(group), grants)
    return groups


def _enough(ledger: Ledger, groups: Mapping[float, list[Grants]], short: Mapping[str, int]) -> bool:
    """A quick no: even all that the candidates' requesters have booked would not cover what is short."""
    every = [ledger.uses[grants.requester].booked for group in groups.values() for grants in group]
    return all(sum(booked[key] for booked in every) >= lack for key, lack in short.items())


def _in_order(
    groups: Mapping[float, list[Grants]], asker: Asker, candidates: Callable[[Grants], Iterator[Attempt]]
) -> Iterator[Attempt]:
    """Every candidate, in the order of the module's list."""
    for priority in sorted(groups):
        group = groups[priority]
        if group[0].requester == asker.requester:
            yield from candidates(group[0])
            group = group[1:]
        if len(group) == 1:
            yield from candidates(group[0])
        elif group:
            yield from heapq.merge(*map(candidates, group), key=_newest_first)


def _newest_first(grant: Attempt) -> int:
    return -grant.grant_number


def _count(grant: Attempt, short: dict[str, int], short_of_limit: dict[str, int], sign: int) -> None:
    for key, amount in grant.amounts:
        if key in short:
            short[key] += sign * amount
        if key in short_of_limit:
            short_of_limit[key] += sign * amount


def _covered(short: Mapping[str, int]) -> bool:
    return all(lack <= 0 for lack in short.values())


def _spare(
    chosen: list[Attempt], asker: Asker, short: dict[str, int], short_of_limit: dict[str, int]
) -> list[Attempt]:
    """From the last chosen to the first, those that are not needed after all go on."""
    needed: list[Attempt] = []
    for grant in reversed(chosen):
        of_limit = short_of_limit if grant.requester == asker.requester else {}
        _count(grant, short, of_limit, +1)
        if not (_covered(short) and _covered(of_limit)):
            _count(grant, short, of_limit, -1)
            needed.append(grant)
    needed.reverse()
    return needed
