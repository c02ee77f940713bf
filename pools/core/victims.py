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
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ray_pools.core.config_rules import PolicyConfig
from ray_pools.core.queue import Attempt
from ray_pools.core.quota import BELOW_ALL, Ledger, Need

# per requester its grants that may be preempted, oldest first
Holders = Mapping[str, dict[str, Attempt]]


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
    for grant in _in_order(groups, asker, now, min_runtime_s):
        own = grant.requester == asker.requester
        policy = policies.get(grant.requester)
        booked, gone = ledger.uses[grant.requester].booked, freed[grant.requester]
        for key, _ in grant.amounts:
            wanted = short.get(key, 0) > 0 or (own and short_of_limit.get(key, 0) > 0)
            beside = asked.get(key, 0) if own else 0
            if wanted and booked[key] + beside - gone[key] > (policy.reserved.get(key, 0) if policy else 0):
                chosen.append(grant)
                _count(grant, short, short_of_limit if own else {}, -1)
                for each, amount in grant.amounts:
                    gone[each] += amount
                break
        if _covered(short) and _covered(short_of_limit):
            return _spare(chosen, asker, short, short_of_limit)
    return []


def _groups(
    ledger: Ledger,
    holders: Holders,
    policies: Mapping[str, PolicyConfig],
    asker: Asker,
    short: Mapping[str, int],
) -> dict[float, list[dict[str, Attempt]]]:
    """Candidates by their requester's priority: only of requesters that borrow a short key and may be asked."""
    groups: dict[float, list[dict[str, Attempt]]] = {}
    asked = {item.key: item.amount for item in asker.need}
    for requester, grants in holders.items():
        policy = policies.get(requester)
        priority = policy.priority if policy else BELOW_ALL
        own = requester == asker.requester
        if (
            not grants
            or (own and not asker.may_stop_own)
            or not (asker.in_share or priority < asker.priority)
        ):
            continue
        booked = ledger.uses[requester].booked
        for key in short:
            if booked[key] + (asked.get(key, 0) if own else 0) > (
                policy.reserved.get(key, 0) if policy else 0
            ):
                group = groups.setdefault(priority, [])
                group.insert(0 if own else len(group), grants)
                break
    return groups


def _enough(
    ledger: Ledger, groups: Mapping[float, list[dict[str, Attempt]]], short: Mapping[str, int]
) -> bool:
    """A quick no: even all that the candidates' requesters have booked would not cover what is short."""
    for key, lack in short.items():
        most = 0
        for group in groups.values():
            for grants in group:
                first = next(iter(grants.values()))
                most += ledger.uses[first.requester].booked[key]
        if most < lack:
            return False
    return True


def _in_order(
    groups: Mapping[float, list[dict[str, Attempt]]], asker: Asker, now: float, min_runtime_s: float
) -> Iterator[Attempt]:
    for priority in sorted(groups):
        own = [g for g in groups[priority] if next(iter(g.values())).requester == asker.requester]
        for grants in own:  # no shield against one's own requester
            yield from reversed(grants.values())
        others = [_ripe(g, now, min_runtime_s) for g in groups[priority] if g not in own]
        yield from others[0] if len(others) == 1 else heapq.merge(*others, key=_newest_first)


def _ripe(grants: dict[str, Attempt], now: float, min_runtime_s: float) -> Iterator[Attempt]:
    """Newest first, without those that have not run for `min_runtime_s` yet."""
    for grant in reversed(grants.values()):
        if now >= grant.granted_at + min_runtime_s:
            yield grant


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
