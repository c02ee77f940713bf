"""Looking ahead from where live pools are: what would become of a request, and how long those that wait will wait.

The simulator goes on from a picture of the actors' states (`ray_pools.core.picture`). What runs is taken to run for
what it declared (`expected_run_s`), else for its requester's median, else for everybody's; one that runs longer than
that, for half as long again as it has run already. Nothing new is taken to come.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..core import explain
from ..core import records as ev
from ..core.config_rules import PolicyConfig, PoolConfig
from ..core.pool import Pool
from ..core.pool_state import PoolState
from ..core.queue import ENDED, GRANTED, HOLDING, NOMINATED, PREEMPTING, QUEUED
from ..core.records import Amounts
from .world import Request, World

STEPS_MAX = 200_000
"""So many events are looked at; who still waits then waits for longer than anybody can say."""

GRANTED_AT_ONCE, STOPS_OTHERS, WAITS, REJECTED = "granted", "stops_others", "waits", "rejected"


class Outlook(NamedTuple):
    """What would become of a request if it were submitted now.

    answer: granted (in `pool`), stops_others (`victims`, ids of requests, are told to stop, then it is granted in
    `pool`), waits, or rejected. causes: per pool why it waits, or is rejected. wait_s: until it is granted, as
    estimated; None where nobody can say (or never).
    """

    answer: str
    pool: str
    victims: tuple[str, ...]
    causes: dict[str, str]
    wait_s: float | None

    def __str__(self) -> str:
        said = "; ".join(f"{pool}: {cause.replace('_', ' ')}" for pool, cause in sorted(self.causes.items()))
        if self.answer == GRANTED_AT_ONCE:
            return f"would be granted at once in {self.pool}"
        if self.answer == REJECTED:
            return f"would be rejected: {said}"
        wait = "for longer than can be told" if self.wait_s is None else f"about {self.wait_s:.0f} s"
        if self.answer == STOPS_OTHERS:
            return (
                f"would stop {len(self.victims)} in {self.pool} ({', '.join(self.victims)}) and wait {wait}"
            )
        return f"would wait {wait} ({said})"


class Ahead:
    """A world that goes on from a picture. It can be looked at once: it moves."""

    def __init__(self, coordinator: Mapping[str, Any], pools: Iterable[Mapping[str, Any]]) -> None:
        now = max([float(coordinator["now"]), *(float(picture["now"]) for picture in pools)])
        pictures = {picture["name"]: picture for picture in pools}
        # a pool that can't be reached decides nothing for now
        configs = [PoolConfig.from_wire(wire) for wire in coordinator["pools"] if wire["name"] in pictures]
        policies = [
            PolicyConfig.from_wire(wire) for wire in coordinator["policies"] if wire["pool"] in pictures
        ]
        self.began_at = now
        self.world = World({c.name: c for c in configs}, policies, self._heard, now=now, live=True)
        self.world.ages = int(coordinator["ages"])
        self.expected_s: dict[str, float] = {}
        runs = {team: list(values) for team, values in coordinator["runs_s"].items() if values}
        self._usual_s = {team: statistics.median(values) for team, values in runs.items()}
        every = [value for values in runs.values() for value in values]
        self._usual_of_all_s = statistics.median(every) if every else None
        self.ahead: list[tuple[float, int, str, int]] = []
        self.granted_at: dict[str, float] = {}
        self.victims: dict[str, tuple[str, ...]] = {}
        for name, picture in sorted(pictures.items()):
            if name in self.world.pools:
                self._take_over(name, picture)
        for row in coordinator["requests"]:
            self._request(row)
        self.world.settle()

    # --- where the actors are

    def _take_over(self, name: str, picture: Mapping[str, Any]) -> None:
        state = PoolState.load(picture["state"])
        pool = self.world.pools[name] = Pool(name, state, 1, self.began_at)
        pool.deadlines.update({id: at for id, at in picture["deadlines"].items() if id in pool.deadlines})

    def _request(self, row: Mapping[str, Any]) -> None:
        positive = tuple((key, amount) for key, amount in row["amounts"])
        request = Request(
            row["id"],
            row["requester"],
            positive,
            row["preemptible"],
            row["retries"],
            row["age"],
            row["submitted_at"],
        )
        self.expect(request.id, request.requester, row.get("expected_run_s"))
        pools = self.world.pools
        request.k, request.owner, request.asked = row["k"], row["owner"], bool(row["asked"])
        request.pools = tuple(name for name in row["pools"] if name in pools)
        if request.owner and request.owner not in pools:
            return
        self.world.requests[request.id] = request
        for name in [request.owner] if request.owner else request.pools:
            attempt = pools[name].state.attempt(request.id)
            if attempt is None or attempt.k < request.k:  # on its way there
                alone = len(row["pools"]) == 1
                pools[name].work_in([[0, request.id, "enqueue", request.k, alone, request.fields]])
            elif attempt.state in (GRANTED, PREEMPTING) and attempt.k == request.k:
                self._runs(request.id, request.k, attempt.granted_at)
            elif attempt.state == ENDED and attempt.k == request.k and request.owner == name:
                # its end is on its way to the coordinator: as if it were told now
                self.world.ended(name, ev.Ended(request.id, request.k, attempt.ended_as, ""))
            if request.owner and attempt is not None and attempt.state == QUEUED and not attempt.owned:
                pools[name].work_in([[0, request.id, "take", request.k, request.fields]])
        if row["asked"]:
            self.world.end(request.id, row["asked"])

    def expect(self, id: str, requester: str, declared_s: Any) -> None:
        """How long the request is taken to run."""
        if isinstance(declared_s, bool) or not isinstance(declared_s, (int, float)):
            declared_s = None
        usual_s = self._usual_s.get(requester, self._usual_of_all_s)
        found = declared_s if declared_s is not None else usual_s
        if found is not None:
            self.expected_s[id] = float(found)

    def waits(self, id: str) -> bool:
        """It is known, and holds nothing."""
        request = self.world.requests.get(id)
        if request is None:
            return False
        attempts = [self.world.pools[name].state.attempts.get(id) for name in request.pools]
        return id in self.granted_at or not any(a is not None and a.state in HOLDING for a in attempts)

    # --- going on

    def _heard(self, pool: str, events: Sequence[Any]) -> None:
        now = self.world.now
        for event in events:
            if isinstance(event, ev.Granted):
                self.granted_at.setdefault(event.id, now)
                self._runs(event.id, event.k, now)
            elif isinstance(event, ev.Nominated):
                self.victims.setdefault(event.id, tuple(id for id, _ in event.victims))

    def _runs(self, id: str, k: int, since: float) -> None:
        expected_s = self.expected_s.get(id)
        if expected_s is None:
            return
        ran_s = self.world.now - since
        left_s = expected_s - ran_s if expected_s > ran_s else ran_s / 2
        heapq.heappush(self.ahead, (self.world.now + left_s, len(self.ahead), id, k))

    def run(self, wanted: set[str]) -> dict[str, float]:
        """Goes on until all of these were granted, or nothing more can be said. Id to seconds from now."""
        world = self.world
        for _ in range(STEPS_MAX):
            if wanted <= self.granted_at.keys():
                break
            wake = world.next_event_at()
            at = min(self.ahead[0][0] if self.ahead else math.inf, math.inf if wake is None else wake)
            if at == math.inf:
                break
            world.set_time(max(at, world.now))
            while self.ahead and self.ahead[0][0] <= world.now:
                _, _, id, k = heapq.heappop(self.ahead)
                request = world.requests.get(id)
                if request is not None and request.k == k:
                    world.release(id)
            world.settle()
        return {id: at - self.began_at for id, at in self.granted_at.items() if id in wanted}


def would(
    coordinator: Mapping[str, Any],
    pools: Sequence[Mapping[str, Any]],
    requester: str,
    positive: Amounts,
    *,
    preemptible: bool = True,
    retries: int = 0,
    expected_run_s: float | None = None,
) -> Outlook:
    """What would become of such a request. Nothing is submitted.

    Raises:
        UnknownSnapshot: the actors are of another version, whose state this code can't go on from.
    """
    ahead = Ahead(coordinator, pools)
    world, id = ahead.world, "\0would"
    ahead.expect(id, requester, expected_run_s)
    request = world.submit(id, requester, positive, preemptible=preemptible, retries=retries)
    if request.rejected:
        return Outlook(REJECTED, "", (), request.causes, None)
    world.settle()
    states = {name: a for name in world.pools if (a := world.pools[name].state.attempts.get(id)) is not None}
    for name, attempt in states.items():
        if id in ahead.granted_at:
            victims = ahead.victims.get(id, ())
            return Outlook(STOPS_OTHERS if victims else GRANTED_AT_ONCE, name, victims, {}, 0.0)
        if attempt.state == NOMINATED:
            wait_s = ahead.run({id}).get(id)
            return Outlook(STOPS_OTHERS, name, ahead.victims[id], {}, wait_s)
    causes = {name: explain.cause(world.pools[name], attempt) or "" for name, attempt in states.items()}
    return Outlook(WAITS, "", (), causes, ahead.run({id}).get(id))


def estimates(
    coordinator: Mapping[str, Any], pools: Sequence[Mapping[str, Any]], ids: Iterable[str]
) -> dict[str, float | None]:
    """How many seconds each of these waiting requests will wait from now on; None where nobody can say."""
    ahead = Ahead(coordinator, pools)
    wanted = [id for id in ids if ahead.waits(id)]
    found = ahead.run(set(wanted))
    return {id: found.get(id) for id in wanted}
