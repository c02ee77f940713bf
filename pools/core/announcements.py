"""Capacity announced ahead (`pools prewarm`): nodes that are to be up before anybody asks for them, for some time.

An announcement decides nothing of who gets what. It is a part of the wish for nodes (`prewarm.py`), as long as it
lasts, less what requests that came after it hold, are nominated for or wait for in its pool: announced for a sweep, the
same nodes are not wished for twice once the sweep runs, and stay up between its jobs. One that names a requester is
used up by this one's requests only. It ends by itself; `Unannounced` says so, or who took it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ray_pools.core import records as ev
from ray_pools.core.bundles import bundles_for, mapping_of
from ray_pools.core.config_rules import DRAINING
from ray_pools.errors import BadInput, Refused
from ray_pools.limits import (
    ANNOUNCED_MAX_S,
    ANNOUNCEMENTS_MAX,
    KEYS_MAX,
    check_integer,
    check_name,
)

if TYPE_CHECKING:
    from ray_pools.core.coordinator import Coordinator
    from ray_pools.core.coordinator_state import CoordinatorState

TIME_IS_OVER, TAKEN_BACK = "its time is over", "taken back"

# Of announcements that are over so many are kept: who repeats one has not heard of the answer yet.
KEPT = 1000


class Announcement(NamedTuple):
    """See the module's docstring. `age`: of the newest request when it came. `over`: why, "" as long as it lasts."""

    id: str
    pool: str
    amounts: ev.Amounts
    for_s: float
    until: float
    requester: str
    by: str
    age: int
    over: str = ""
    over_at: float = 0.0

    @classmethod
    def of(cls, event: ev.Announced, age: int) -> Announcement:
        """As it begins."""
        amounts = tuple((key, amount) for key, amount in event.amounts)
        return cls(event.id, event.pool, amounts, event.for_s, event.until, event.requester, event.by, age)

    @classmethod
    def load(cls, dumped: Sequence[Any]) -> Announcement:
        """What `dump_announcements` made of it."""
        id, pool, amounts, *rest = dumped
        return cls(id, pool, tuple((key, amount) for key, amount in amounts), *rest)

    @property
    def content(self) -> tuple[Any, ...]:
        """What its id belongs to."""
        return self.pool, self.amounts, self.for_s, self.requester

    def view(self, now: float) -> dict[str, Any]:
        """As the wire shows it (docs/protocol.md, "Wire")."""
        return {
            "id": self.id,
            "pool": self.pool,
            "amounts": dict(self.amounts),
            "for_s": self.for_s,
            "until": self.until,
            "left_s": 0.0 if self.over else max(0.0, self.until - now),
            "requester": self.requester,
            "by": self.by,
            "over": self.over,
        }


class Asked(NamedTuple):
    """An announcement that a message asks for; its amounts are by key, and above 0."""

    id: str
    pool: str
    amounts: ev.Amounts
    for_s: float
    requester: str


def asked(sent: object) -> list[Asked]:
    """The announcements that a message holds.

    Raises:
        BadInput: names the field, its value and what would be right.
    """
    if not isinstance(sent, list) or not 0 < len(sent) <= ANNOUNCEMENTS_MAX:
        told = f"{len(sent)} of them" if isinstance(sent, list) else sent
        raise BadInput("announcements", told, f"a list of 1 to {ANNOUNCEMENTS_MAX} announcements")
    several = len(sent) > 1
    return [_asked(each, f"announcements[{index}]." if several else "") for index, each in enumerate(sent)]


def _asked(sent: object, place: str) -> Asked:
    if not isinstance(sent, Mapping):
        raise BadInput(place.rstrip(".") or "announcement", sent, "a mapping with id, pool, amounts, for_s")
    amounts, for_s = sent.get("amounts"), sent.get("for_s")
    if not isinstance(amounts, Mapping) or not 0 < len(amounts) <= KEYS_MAX:
        raise BadInput(f"{place}amounts", amounts, f"a mapping of 1 to {KEYS_MAX} keys to integers")
    for key, amount in amounts.items():
        check_name(f"{place}amounts (a key)", key)
        check_integer(f"{place}amounts.{key}", amount)
    positive = ev.positive((key, amount) for key, amount in amounts.items() if key != "step_run")
    if not positive:
        raise BadInput(f"{place}amounts", dict(amounts), "at least one amount above 0")
    if problem := for_s_problem(for_s):
        raise BadInput(f"{place}for_s", for_s, problem)
    requester = sent.get("requester") or ""
    return Asked(
        check_name(f"{place}id", sent.get("id")),
        check_name(f"{place}pool", sent.get("pool")),
        positive,
        float(for_s),  # type: ignore[arg-type]
        check_name(f"{place}requester", requester) if requester else "",
    )


def for_s_problem(for_s: object) -> str | None:
    """What would be right if an announcement can't last so long, else None."""
    fine = isinstance(for_s, (int, float)) and not isinstance(for_s, bool) and 1 <= for_s <= ANNOUNCED_MAX_S
    return None if fine else f"seconds, from 1 to {ANNOUNCED_MAX_S} (a day)"


def announce(core: Coordinator, wanted: Sequence[Asked], by: str) -> list[Announcement]:
    """Announces all of them, or none. The same again, by its id, changes nothing: neither does it last longer, nor does
    one that is over begin anew.

    Raises:
        BadInput: more than its pool has, or what brings up no node; names the key.
        Refused: no such pool (`unknown_pool`), or one that only counts (`counts_only`) or is being emptied
            (`draining`); the requester has no policy there (`no_policy`); the id belongs to another announcement
            (`id_in_use`); too many last at the moment (`too_many_announced`).
    """
    end_due(core)  # what is over by now is over before it is answered
    state = core.state
    fresh: dict[str, Asked] = {}
    for each in wanted:
        known = state.announced.get(each.id) or state.announced_before.get(each.id)
        before = known.content if known is not None else fresh[each.id][1:] if each.id in fresh else None
        if before is None:
            _check(state, each)
            fresh[each.id] = each
        elif before != each[1:]:
            raise Refused("id_in_use", f"id {each.id!r} belongs to another announcement", {"id": each.id})
    lasting = len(state.announced)
    if lasting + len(fresh) > ANNOUNCEMENTS_MAX:
        raise Refused(
            "too_many_announced",
            f"{lasting} announcements last at the moment, and {len(fresh)} more would be over {ANNOUNCEMENTS_MAX}",
            {"lasting": lasting, "more": len(fresh), "limit": ANNOUNCEMENTS_MAX},
        )
    for each in fresh.values():
        amounts = [list(pair) for pair in each.amounts]
        until = core.now + each.for_s
        core._emit(ev.Announced(each.id, each.pool, amounts, each.for_s, until, each.requester, by))
    return [state.announced.get(each.id) or state.announced_before[each.id] for each in wanted]


def _check(state: CoordinatorState, wanted: Asked) -> None:
    config = state.pools.get(wanted.pool)
    if config is None:
        raise Refused("unknown_pool", f"there is no pool {wanted.pool!r}", {"pool": wanted.pool})
    if config.placement is None:
        raise Refused("counts_only", f"pool {wanted.pool!r} only counts: it brings up no nodes")
    if config.state == DRAINING:
        raise Refused(DRAINING, f"pool {wanted.pool!r} is being emptied: it brings up no nodes")
    policy = None
    if wanted.requester:
        policy = state.policies.get(wanted.requester, {}).get(wanted.pool)
        if policy is None:
            raise Refused(
                "no_policy", f"requester {wanted.requester!r} has no policy on pool {wanted.pool!r}"
            )
    mapped = mapping_of(config.placement)
    for key, amount in wanted.amounts:
        if key not in mapped:
            expected = f"a key for which pool {wanted.pool!r} has nodes: {', '.join(sorted(mapped))}"
            raise BadInput(f"amounts.{key}", amount, expected)
        most = config.capacity.get(key)
        if most is not None and amount > most:
            raise BadInput(f"amounts.{key}", amount, f"at most {most}, all that pool {wanted.pool!r} has")
        limit = policy.limit.get(key) if policy is not None else None
        if limit is not None and amount > limit:
            raise BadInput(
                f"amounts.{key}", amount, f"at most {limit}, the limit of {wanted.requester!r} there"
            )
    bundles_for(dict(wanted.amounts), config.placement)


def take_back(
    core: Coordinator, ids: Sequence[str], by: str, may: Callable[[Announcement], None]
) -> list[Announcement]:
    """They end now; one that is over stays so. `may` raises for one that the caller may not end; then none ends.

    Raises:
        Refused: there is no such announcement (`unknown_id`).
    """
    state = core.state
    for id in ids:
        found = state.announced.get(id) or state.announced_before.get(id)
        if found is None:
            raise Refused("unknown_id", f"there is no announcement {id!r}", {"id": id})
        may(found)
    lasting = [id for id in dict.fromkeys(ids) if id in state.announced]
    if lasting:
        core._emit(ev.Unannounced(lasting, TAKEN_BACK, by))
    return [state.announced_before[id] for id in ids]


def end_due(core: Coordinator) -> None:
    """Those whose time is over."""
    due = [each.id for each in core.state.announced.values() if each.until <= core.now]
    if due:
        core._emit(ev.Unannounced(due, TIME_IS_OVER, ""))


def next_end(state: CoordinatorState) -> float | None:
    """When the next one is over."""
    return min((each.until for each in state.announced.values()), default=None)


def not_used_yet(
    announced: Iterable[Announcement], served: Iterable[tuple[int, str, ev.Amounts]]
) -> list[dict[str, int]]:
    """What is left of one pool's announcements, the oldest first. `served`: (age, requester, amounts) of what holds,
    is nominated or waits in the pool. Each amount counts for one announcement only.
    """
    left = [(each, dict(each.amounts)) for each in announced]
    if not left:
        return []
    first = min(each.age for each, _ in left)
    for age, requester, amounts in served:
        if age <= first:
            continue
        for key, amount in amounts:
            for each, of_it in left:
                if amount and each.age < age and each.requester in ("", requester) and of_it.get(key):
                    used = min(of_it[key], amount)
                    of_it[key] -= used
                    amount -= used
    unused = ({key: amount for key, amount in of_it.items() if amount} for _, of_it in left)
    return [amounts for amounts in unused if amounts]


def forget_oldest(before: dict[str, Announcement]) -> None:
    """Only the last of those that are over are kept."""
    while len(before) > KEPT:
        del before[next(iter(before))]


def dump_announcements(
    announced: Mapping[str, Announcement], before: Mapping[str, Announcement]
) -> dict[str, list[list[Any]]]:
    """As plain values; left out where there are none: logs of before are the same states as ever."""
    found: dict[str, list[list[Any]]] = {}
    for name, each_of in (("announced", announced), ("announced_before", before)):
        if each_of:
            found[name] = [
                [each.id, each.pool, [list(pair) for pair in each.amounts], *each[3:]]
                for each in each_of.values()
            ]
    return found
