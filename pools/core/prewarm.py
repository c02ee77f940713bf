"""Which nodes should be up: the wish that the coordinator sends to Ray's autoscaler, as a pure function.

Per pool, in this order, each only as far as the pool's capacity goes:
1. what is held, 2. what is nominated, 3. what waits, in queue order, 4. what was announced ahead,
5. the warm floor: filled up to it, not added on top.
The autoscaler is asked for totals, use included: a wish for what is held keeps its nodes, and everything beyond is
new. `Lingering` keeps a wish that ended for a while, so that nodes do not go between two jobs.

Equal inputs give equal wishes, in order of the pools' names. What the cluster's node types can never provide is cut
before sending (`feasible.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import BadInput
from .bundles import Bundle, bundles_for, mapping_of, ray_amount, resource_totals, selector_for

WAITING_MAX = 2_000
"""So far down a queue the pass looks: beyond, nothing starts soon."""

Ask = tuple[Mapping[str, int], Mapping[str, Any]]
"""One request's (amounts, options)."""


class PoolView(NamedTuple):
    """One pool as the coordinator knows it. `waiting` is in queue order and may be lazy."""

    name: str
    capacity: Mapping[str, int]
    placement: Mapping[str, Any] | None
    held: Iterable[Ask] = ()
    nominated: Iterable[Ask] = ()
    waiting: Iterable[Ask] = ()
    announced: Iterable[Ask] = ()


class Wish(NamedTuple):
    """The nodes of one pool: bundles in Ray's resources, the labels that each needs, and the most it may be."""

    pool: str
    bundles: list[Bundle]
    selector: dict[str, str]
    cap: dict[str, float] = {}  # noqa: RUF012 - never changed

    def total(self, resource: str) -> float:
        """What the bundles ask of one Ray resource."""
        return sum(bundle.get(resource, 0.0) for bundle in self.bundles)


def target(pools: Iterable[PoolView]) -> list[Wish]:
    """What should be up now. A pool that only counts, or that nobody wants, has no wish."""
    wishes = []
    for pool in sorted(pools, key=lambda each: each.name):
        if pool.placement is None:
            continue
        bundles = _pool_bundles(pool, pool.placement)
        if bundles:
            wishes.append(Wish(pool.name, bundles, selector_for(pool.placement), _cap(pool)))
    return wishes


def _pool_bundles(pool: PoolView, placement: Mapping[str, Any]) -> list[Bundle]:
    left = dict(pool.capacity)
    bundles: list[Bundle] = []
    known: dict[tuple[tuple[str, int], ...], list[Bundle]] = {}
    waiting = itertools.islice(pool.waiting, WAITING_MAX)
    # what is announced is no request, which is granted whole or not at all: as much of it as there is room for
    announced = (
        ({key: min(amount, left.get(key, amount)) for key, amount in amounts.items()}, options)
        for amounts, options in pool.announced
    )
    for amounts, options in itertools.chain(pool.held, pool.nominated, waiting, announced):
        if any(amount > left[key] for key, amount in amounts.items() if key in left):
            continue
        shape = None if options else tuple(amounts.items())  # most requests are alike, and this runs often
        wanted = known.get(shape) if shape else None
        if wanted is None:
            wanted = _bundles_or_none(amounts, placement, options)
            if shape:
                known[shape] = wanted
        if wanted:
            bundles += wanted
            for key, amount in amounts.items():
                if key in left:
                    left[key] -= amount
    floor = {
        key: amount - (pool.capacity[key] - left[key])
        for key, amount in (placement.get("warm") or {}).items()
        if key in left
    }
    missing = {key: amount for key, amount in floor.items() if amount > 0}
    return bundles + _bundles_or_none(missing, placement, {})


def _bundles_or_none(
    amounts: Mapping[str, int], placement: Mapping[str, Any], options: Mapping[str, Any]
) -> list[Bundle]:
    """What can't become a group (its pool says why to its requester) wishes for no nodes, and stops no one's wish."""
    try:
        return bundles_for(amounts, placement, options)
    except BadInput:
        return []


def _cap(pool: PoolView) -> dict[str, float]:
    """The pool's capacity in Ray's resources. Not of CPU: bundles carry some that nobody is charged for."""
    cap: dict[str, float] = {}
    for key, (resource, divisor) in mapping_of(pool.placement).items():
        if resource != "CPU" and pool.capacity.get(key):
            cap[resource] = cap.get(resource, 0.0) + ray_amount(pool.capacity[key], divisor)
    return dict(sorted(cap.items()))


def clamp(wish: Wish) -> Wish:
    """The wish without the bundles that lead beyond its cap, and without amounts that are not positive: Ray takes
    a negative one, and then scales nothing any more.
    """
    left = dict(wish.cap)
    kept = []
    for bundle in wish.bundles:
        positive = {resource: amount for resource, amount in bundle.items() if amount > 0}
        if positive and all(amount <= left.get(name, amount) for name, amount in positive.items()):
            kept.append(positive)
            for name in left.keys() & positive.keys():
                left[name] -= positive[name]
    return wish._replace(bundles=kept)


class Lingering:
    """Wishes that ended stay for `linger_s`: per pool the highest totals of that time, not the sum of all.

    A smaller wish than lately is filled up with bundles of the larger one, cut to what is missing.
    """

    def __init__(self, linger_s: float) -> None:
        self.linger_s = linger_s
        self._now: dict[str, Wish] = {}
        self._past: dict[str, list[tuple[float, Wish]]] = {}  # per pool (until, wish), the latest first

    def update(self, wishes: Sequence[Wish], now: float) -> list[Wish]:
        """The wishes to send from `now` on, until the next update or `next_end`; in order of pools."""
        current = {wish.pool: wish for wish in wishes}
        for pool, before in self._now.items():
            if current.get(pool) != before and self.linger_s > 0:
                self._past.setdefault(pool, []).insert(0, (now + self.linger_s, before))
        self._now = current
        return self.wanted(now)

    def wanted(self, now: float) -> list[Wish]:
        """As `update`, with the same wishes as before."""
        found = []
        for pool in sorted({*self._now, *self._past}):
            past = [entry for entry in self._past.pop(pool, []) if entry[0] > now]
            start = self._now.get(pool) or past[0][1]._replace(bundles=[]) if past else self._now.get(pool)
            if start is None:
                continue
            wish, kept = _filled(start, past)
            if kept:
                self._past[pool] = kept
            if wish.bundles:
                found.append(wish)
        return found

    def next_end(self) -> float | None:
        """When the next lingering wish ends."""
        return min((until for past in self._past.values() for until, _ in past), default=None)


def _filled(start: Wish, past: list[tuple[float, Wish]]) -> tuple[Wish, list[tuple[float, Wish]]]:
    """The wish filled up from past ones, and the past ones that still add something (or will, once later
    ones end: they do not, since a later one also stays longer).
    """
    bundles, kept = list(start.bundles), []
    totals = resource_totals(bundles)
    for entry in past:
        added = _missing_bundles(totals, entry[1].bundles)
        if added:
            kept.append(entry)
            bundles += added
            totals = resource_totals(bundles)
    return start._replace(bundles=bundles), kept


def _missing_bundles(totals: Mapping[str, float], bundles: Sequence[Bundle]) -> list[Bundle]:
    had = resource_totals(bundles)
    missing = {name: amount - totals.get(name, 0.0) for name, amount in had.items()}
    added = []
    for bundle in bundles:
        part = {name: min(amount, missing[name]) for name, amount in bundle.items() if missing[name] > 0}
        part = {name: round(amount, 4) for name, amount in part.items() if amount > 0.00005}
        if part:
            added.append(part)
            for name, amount in part.items():
                missing[name] -= amount
    return added
