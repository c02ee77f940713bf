"""Reads every row of all logs at the moment it becomes durable, and checks docs/rules.md 10.1 to 10.3 and
docs/protocol.md ("Attempts") by a bookkeeping of its own, without asking any core.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ray_pools.core import records as ev


class _Facts:
    """What the coordinator's log says of a request."""

    def __init__(self) -> None:
        self.k = 0
        self.final = ""
        # attempt -> the pool that took it
        self.owner: dict[int, str] = {}


class _Hold:
    """What a pool's log says of the attempt that it runs."""

    def __init__(self, k: int, requester: str, amounts: dict[str, int], preemptible: bool) -> None:
        self.k, self.requester, self.amounts, self.preemptible = k, requester, amounts, preemptible
        self.state = "queued"
        # its holder may have been told
        self.ready = False


class Auditor:
    """See the module's docstring. `problems` is what it found."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.requests: dict[str, _Facts] = defaultdict(_Facts)
        # pool -> id -> what it runs
        self.at: dict[str, dict[str, _Hold]] = defaultdict(dict)
        self.capacity: dict[str, dict[str, int]] = {}
        self.policies: dict[str, dict[str, dict[str, Any]]] = {}
        # pools whose grants are placement groups
        self.places: dict[str, bool] = {}
        # (id, k, pool) whose end is durable
        self.ended: set[tuple[str, int, str]] = set()

    def hear(self, who: str, event: Any) -> None:
        """A row became durable."""
        check = getattr(self, "_" + type(event).__name__.lower(), None)
        if check is not None:
            check(who, event)

    def still_held(self) -> list[str]:
        """What holds or is nominated now."""
        return [
            f"{id} is {h.state} at {p}"
            for p, holds in self.at.items()
            for id, h in holds.items()
            if h.state != "queued"
        ]

    def _says(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    def _where(self, id: str) -> list[str]:
        return [pool for pool, holds in self.at.items() if id in holds and holds[id].state != "queued"]

    # --- the coordinator's rows

    def _submitted(self, who: str, event: ev.Submitted) -> None:
        self._says(event.id not in self.requests, f"{event.id} was submitted twice")
        self._begin(event.id, 1, event.pools)
        if not event.pools:
            self.requests[event.id].final = "rejected"

    def _begin(self, id: str, k: int, pools: list[str]) -> None:
        facts = self.requests[id]
        facts.k = k
        if len(pools) == 1:
            facts.owner[k] = pools[0]

    def _opened(self, who: str, event: ev.Opened) -> None:
        facts = self.requests[event.id]
        owner = facts.owner.get(facts.k)
        self._says(event.k == facts.k + 1, f"{event.id}: attempt {event.k} after {facts.k}")
        self._says(not facts.final, f"{event.id} is {facts.final}, and attempt {event.k} opens")
        over = owner is None or (event.id, facts.k, owner) in self.ended
        self._says(over, f"{event.id}: attempt {event.k} opens before {owner} has ended {facts.k}")
        self._begin(event.id, event.k, event.pools)

    def _taken(self, who: str, event: ev.Taken) -> None:
        facts = self.requests[event.id]
        self._says(event.k == facts.k and event.k not in facts.owner, f"{event} is not what is open")
        facts.owner[event.k] = event.pool

    def _finished(self, who: str, event: ev.Finished) -> None:
        facts = self.requests[event.id]
        self._says(not facts.final, f"{event.id} is {facts.final}, and then {event.state}")
        self._says(
            not self._where(event.id), f"{event.id} is {event.state}, and stands in {self._where(event.id)}"
        )
        facts.final = event.state

    # --- the pools' rows

    def _configured(self, who: str, event: ev.Configured) -> None:
        self.capacity[who] = event.config["capacity"]
        self.places[who] = bool(event.config["placement"])
        self.policies[who] = {policy["requester"]: policy for policy in event.policies}

    def _queued(self, who: str, event: ev.Queued) -> None:
        before = self.at[who].get(event.id)
        over = (event.id, event.k, who) in self.ended
        self._says(not over, f"{event.id}: attempt {event.k} has ended at {who}, and queues again")
        self._says(before is None, f"{event.id} queues at {who}, where it is {before and before.state}")
        amounts = {key: amount for key, amount in event.amounts if amount}
        self.at[who][event.id] = _Hold(event.k, event.requester, amounts, event.preemptible)

    def _granted(self, who: str, event: ev.Granted) -> None:
        self._starts(who, event, "granted")
        hold = self.at[who][event.id]
        policy = self.policies[who].get(hold.requester)
        for key in hold.amounts:
            if key not in self.capacity[who]:
                continue
            total = self._held(who, key)
            self._says(total <= self.capacity[who][key], f"{who} holds {total} {key} with {event.id}")  # 10.2
            mine = self._held(who, key, hold.requester)
            limit = (policy or {"limit": {key: 0}})["limit"].get(key)
            self._says(
                limit is None or mine <= limit, f"{hold.requester} holds {mine} {key} of {who}"
            )  # 10.3
            if not hold.preemptible:
                pinned = self._held(who, key, hold.requester, pinned=True)
                share = (policy or {"reserved": {}})["reserved"].get(key, 0)
                self._says(pinned <= share, f"{hold.requester} holds {pinned} {key} of {who} for good")

        if not self.places[who]:
            hold.ready = True

    def _placed(self, who: str, event: ev.Placed) -> None:
        hold = self.at[who].get(event.id)
        self._says(hold is not None and hold.k == event.k, f"{event} of nothing")
        if hold is not None:
            hold.ready = True

    def _ending(self, who: str, event: ev.Ending) -> None:
        self._gives_back(who, event)

    def _gives_back(self, who: str, event: ev.Ending | ev.Ended) -> None:
        hold = self.at[who].get(event.id)
        back = (
            event.how in ("returned", "withdrawn") and hold is not None and hold.k == event.k and hold.ready
        )
        self._says(not back, f"{event}, which its holder may use")

    def _starts(self, who: str, event: ev.Granted | ev.Nominated, state: str) -> None:
        elsewhere = [pool for pool in self._where(event.id) if pool != who]
        self._says(not elsewhere, f"{event.id} is {state} at {who}, and stands in {elsewhere}")  # 10.1
        owner = self.requests[event.id].owner.get(event.k)
        self._says(
            owner == who, f"{event.id}: attempt {event.k} is {state} at {who}, and {owner} has taken it"
        )
        hold = self.at[who].get(event.id)
        fits = hold is not None and hold.k == event.k and hold.state in ("queued", "nominated")
        self._says(fits, f"{event} of what is {hold and (hold.k, hold.state)} there")
        if hold is not None:
            hold.state = state

    def _held(self, pool: str, key: str, requester: str = "", *, pinned: bool = False) -> int:
        return sum(
            hold.amounts.get(key, 0)
            for hold in self.at[pool].values()
            if hold.state in ("granted", "preempting")
            and requester in ("", hold.requester)
            and not (pinned and hold.preemptible)
        )

    def _nominated(self, who: str, event: ev.Nominated) -> None:
        self._starts(who, event, "nominated")
        for id, k in event.victims:
            victim = self.at[who].get(id)
            fits = victim is not None and (victim.k, victim.state) == (k, "granted") and victim.preemptible
            self._says(fits, f"{id} can't be a victim at {who}")
            if victim is not None:
                victim.state = "preempting"

    def _evicted(self, who: str, event: ev.Evicted) -> None:
        hold = self.at[who].get(event.id)
        fits = hold is not None and (hold.k, hold.state) == (event.k, "granted")
        self._says(fits, f"{event.id} can't be called back at {who}")
        if hold is not None:
            hold.state = "preempting"

    def _ended(self, who: str, event: ev.Ended) -> None:
        self._gives_back(who, event)
        hold = self.at[who].get(event.id)
        if hold is not None and (hold.k == event.k or hold.state == "queued"):
            del self.at[who][event.id]
        elif hold is not None:
            self.problems.append(f"{event} while {hold.k} is {hold.state}")
        self.ended.add((event.id, event.k, who))
