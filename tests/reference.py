"""The rules once more, as plainly as they can be written: docs/rules.md sections 2 to 9, in one global state.

It exists to be compared with the real system (tests/random_cases.py) and shares no rule with it. Nothing is
cached and nothing is clever: each question is answered by looking at all requests, and where the rules say
"then all is walked anew", it is walked anew. Section numbers below are those of docs/rules.md; 3 and 4 are in
tests/reference_ledger.py.
"""

from __future__ import annotations

from reference_ledger import Ledger, Request, total

from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.errors import BadInput, Refused

FINAL_STATES = ("released", "rejected", "cancelled", "preempted", "expired")
WAITING_FOR_CAPACITY = ("waiting_capacity", "awaiting_preemption")
SETTLE_STEPS_MAX = 100_000


class Reference(Ledger):
    """A World (ray_pools.scenario) in one piece."""

    # ------------------------------------------------------------ section 2: request creation

    def submit(
        self,
        id: str,
        requester: str,
        amounts: dict[str, int],
        preemptible: bool,
        retries: int,
        lease_s: float | None,
    ) -> None:
        request = Request(
            id=id,
            requester=requester,
            amounts=dict(amounts),
            preemptible=preemptible,
            retries=retries,
            lease_s=lease_s,
            age=len(self.requests),
            submitted_at=self.now,
            retries_left=retries,
        )
        if id in self.requests:
            if self.requests[id].content() != request.content():
                raise Refused("id_taken", f"{id} was submitted before with other content")
            return
        if lease_s is not None:
            request.lease_end = self.now + lease_s
        self.requests[id] = request
        self.enter_queues(request)
        self.settle()

    def known(self, id: str) -> Request:
        if id not in self.requests:
            raise Refused("unknown_request", f"there is no request {id}")
        return self.requests[id]

    # ------------------------------------------------------------ section 5: queue

    def queue_of(self, pool: str) -> list[Request]:
        def place(request: Request) -> tuple[bool, bool, int, int]:
            return (
                request.nominated != pool,  # 1. nominated first
                not self.in_share(pool, request),  # 2. in its share before not
                -self.priority(pool, request),  # 3. higher priority
                request.age,  # 4. age
            )

        return sorted((one for one in self.requests.values() if pool in one.queues), key=place)

    def holds_back(self, pool: str, request: Request) -> str | None:
        """Whom it holds back behind it: None, "borrowers" or "all"."""
        if self.cause(pool, request) not in WAITING_FOR_CAPACITY or request.nominated is not None:
            return None
        pinned = [one for one in self.holders(pool) if not one.preemptible]
        for key in self.keys(pool, request):
            if total(pinned, key) + request.amounts[key] > self.capacity[pool][key]:
                return None
        if self.in_share(pool, request):
            return "borrowers"
        if self.options[pool].queueing == "strict":
            return "all"
        if self.now >= request.submitted_at + self.options[pool].starvation_after_s:
            return "all"
        return None

    def walked(self, pool: str) -> list[tuple[Request, bool]]:
        """The queue in order, and of each whether it is held back."""
        found: list[tuple[Request, bool]] = []
        holding: set[str] = set()
        for request in self.queue_of(pool):
            back = "all" in holding or ("borrowers" in holding and not self.in_share(pool, request))
            found.append((request, back))
            whom = self.holds_back(pool, request)
            if whom is not None:
                holding.add(whom)
        return found

    def is_held_back(self, pool: str, request: Request) -> bool:
        return {one.id: back for one, back in self.walked(pool)}[request.id]

    def could_be_granted(self, pool: str, request: Request) -> bool:
        return self.cause(pool, request) is None and not self.is_held_back(pool, request)

    def grant_one(self) -> bool:
        """The first request that can be granted, pools by name, each queue in order."""
        for pool in sorted(self.capacity):
            for request, held_back in self.walked(pool):
                if not held_back and self.cause(pool, request) is None:
                    # section 7: among pools that can grant, its own order decides
                    first = next(
                        one for one in self.own_order(request) if self.could_be_granted(one, request)
                    )
                    self.grant(first, request)
                    return True
        return False

    def grant(self, pool: str, request: Request) -> None:
        self.grants_made += 1
        request.state = "allocated"
        request.pool = pool
        request.queues = []
        request.nominated = None
        request.granted_at = self.now
        request.grant_number = self.grants_made

    # ------------------------------------------------------------ section 6: preemption

    def preempt_one(self) -> bool:
        """One preemption, for the first request found in the same order."""
        for pool in sorted(self.capacity):
            for request, held_back in self.walked(pool):
                if not held_back and self.victims(pool, request):
                    # section 7: pools in whose share it stands come first, then its own order
                    able = [one for one in self.own_order(request) if self.could_preempt(one, request)]
                    able.sort(key=lambda one: not self.in_share(one, request))  # stable
                    self.preempt(able[0], request)
                    return True
        return False

    def could_preempt(self, pool: str, request: Request) -> bool:
        return not self.is_held_back(pool, request) and bool(self.victims(pool, request))

    def preempt(self, pool: str, request: Request) -> None:
        for victim in self.victims(pool, request):
            victim.state = "preempting"
            victim.deadline = self.now + self.options[pool].grace_s
        request.nominated = pool
        request.queues = [pool]

    def takes_from_own(self, pool: str, request: Request) -> bool:
        """Own grants are candidates only for a non-preemptible request in its share."""
        return not request.preemptible and self.in_share(pool, request)

    def shortages(self, pool: str, request: Request, chosen: list[Request]) -> set[tuple[str, str]]:
        """(kind, key) of what is still booked too high, were the chosen stopped."""
        short: set[tuple[str, str]] = set()
        for key in self.keys(pool, request):
            amount = request.amounts[key]
            if self.booked(pool, key) - total(chosen, key) + amount > self.capacity[pool][key]:
                short.add(("capacity", key))
            limit = self.policies[pool, request.requester].limit.get(key)
            if self.takes_from_own(pool, request) and limit is not None:
                mine = [one for one in self.bookers(pool) if one.requester == request.requester]
                mine = [one for one in mine if one not in chosen]
                if total(mine, key) + amount > limit:
                    short.add(("limit", key))
        return short

    def victims(self, pool: str, request: Request) -> list[Request]:
        """Whom to stop so that it fits; nobody when that can't be done, or isn't needed."""
        if request.nominated is not None:
            return []
        cause = self.cause(pool, request)
        if cause != "waiting_capacity" and not (cause == "at_limit" and self.takes_from_own(pool, request)):
            return []
        chosen: list[Request] = []
        while short := self.shortages(pool, request, chosen):
            candidates = [
                one for one in self.holders(pool) if self.is_candidate(pool, request, one, chosen, short)
            ]
            if not candidates:
                return []
            chosen.append(min(candidates, key=lambda one: self.victim_place(pool, request, one)))
        for victim in reversed(list(chosen)):  # from the last chosen to the first
            others = [one for one in chosen if one is not victim]
            if not self.shortages(pool, request, others):
                chosen = others
        return chosen

    def victim_place(self, pool: str, request: Request, grant: Request) -> tuple[float, bool, int]:
        return (
            self.victim_priority(pool, grant),  # 1. ascending priority
            grant.requester != request.requester,  # 2. the requester's own before others'
            -grant.grant_number,  # 3. newest grant first
        )

    def victim_priority(self, pool: str, grant: Request) -> float:
        policy = self.policies.get((pool, grant.requester))
        return policy.priority if policy else float("-inf")

    def is_candidate(
        self, pool: str, request: Request, grant: Request, chosen: list[Request], short: set[tuple[str, str]]
    ) -> bool:
        own = grant.requester == request.requester
        if not grant.preemptible or grant.state != "allocated" or grant in chosen:
            return False
        if own and not self.takes_from_own(pool, request):
            return False
        if not own and self.now < grant.granted_at + self.options[pool].min_runtime_s:
            return False
        reclaim = self.in_share(pool, request)
        if not reclaim and not self.victim_priority(pool, grant) < self.priority(pool, request):
            return False
        for kind, key in short:
            if kind == "limit" and not own:
                continue
            if grant.amounts.get(key, 0) > 0 and self.borrows(pool, request, grant.requester, key, chosen):
                return True
        return False

    def borrows(self, pool: str, request: Request, requester: str, key: str, chosen: list[Request]) -> bool:
        theirs = [one for one in self.bookers(pool) if one.requester == requester and one not in chosen]
        booked = total(theirs, key)
        if requester == request.requester:
            booked += request.amounts[key]
        return booked > self.reserved(pool, requester, key)

    def victim_stops(self, request: Request) -> None:
        """It queues again with its old age if it has retries left; else it is preempted."""
        self.let_go(request)
        if request.retries_left > 0:
            request.retries_left -= 1
            self.enter_queues(request)
        else:
            request.state = "preempted"

    # ------------------------------------------------------------ section 8: states, leases, deadlines

    def let_go(self, request: Request) -> None:
        request.pool = None
        request.deadline = None
        request.queues = []
        request.nominated = None

    def finish(self, request: Request, holding: str, waiting: str) -> None:
        if request.state in FINAL_STATES:
            return
        request.state = holding if request.pool is not None else waiting
        self.let_go(request)

    def release(self, id: str) -> None:
        self.finish(self.known(id), "released", "cancelled")
        self.settle()

    def cancel(self, id: str) -> None:
        self.finish(self.known(id), "cancelled", "cancelled")
        self.settle()

    def stopped(self, id: str) -> None:
        request = self.requests.get(id)
        if request is not None and request.state == "preempting":
            self.victim_stops(request)
            self.settle()

    def renew(self, id: str) -> None:
        request = self.known(id)
        if request.lease_s is not None and request.state not in FINAL_STATES:
            request.lease_end = self.now + request.lease_s

    def with_lease(self) -> list[Request]:
        return [
            one
            for one in self.requests.values()
            if one.state not in FINAL_STATES and one.lease_end is not None
        ]

    def with_deadline(self) -> list[Request]:
        return [one for one in self.requests.values() if one.deadline is not None]

    def fire_what_is_due(self) -> None:
        """Leases before deadlines; several of a kind in order of time, then age."""
        for one in sorted(self.with_lease(), key=lambda one: (one.lease_end, one.age)):
            assert one.lease_end is not None
            if one.lease_end <= self.now:
                self.finish(one, "expired", "cancelled")
        for one in sorted(self.with_deadline(), key=lambda one: (one.deadline, one.age)):
            assert one.deadline is not None
            if one.deadline <= self.now:
                self.victim_stops(one)

    def settle(self) -> None:
        """Due leases and deadlines, then grants one by one, then one preemption, and all begins again."""
        for _ in range(SETTLE_STEPS_MAX):
            self.fire_what_is_due()
            if not self.grant_one() and not self.preempt_one():
                return
        raise AssertionError("preemptions do not end (section 10, item 5)")

    def advance(self, seconds: float) -> None:
        """The clock goes from one event to the next, and all settles at each."""
        until = self.now + seconds
        while True:
            later = [at for at in self.event_times() if self.now < at <= until]
            if not later:
                break
            self.now = min(later)
            self.settle()
        self.now = until
        self.settle()

    def event_times(self) -> list[float]:
        times = [one.lease_end for one in self.with_lease() if one.lease_end is not None]
        times += [one.deadline for one in self.with_deadline() if one.deadline is not None]
        for one in self.requests.values():
            if one.pool is not None:
                times.append(one.granted_at + self.options[one.pool].min_runtime_s)
        return times

    def restart(self, who: str) -> None:
        """Nothing but the soft deadlines changes: each gets one full term again."""
        if who not in ("all", "coordinator") and who not in self.capacity:
            raise BadInput("restart", who, "all, coordinator or the name of a pool")
        if who in ("all", "coordinator"):
            for one in self.with_lease():
                assert one.lease_s is not None
                one.lease_end = self.now + one.lease_s
        for one in self.with_deadline():
            assert one.pool is not None
            if who in ("all", one.pool):
                one.deadline = self.now + self.options[one.pool].grace_s

    # ------------------------------------------------------------ section 9: changing pools and policies

    def attach(self, policy: PolicyConfig) -> None:
        self.change(self.capacity, {**self.policies, (policy.pool, policy.requester): policy})

    def detach(self, requester: str, pool: str) -> None:
        if (pool, requester) not in self.policies:
            raise Refused("unknown_policy", f"{requester} has no policy on {pool}")
        self.change(
            self.capacity,
            {where: policy for where, policy in self.policies.items() if where != (pool, requester)},
        )

    def set_capacity(self, pool: str, capacity: dict[str, int | None]) -> None:
        if pool not in self.capacity:
            raise Refused("unknown_pool", f"there is no pool {pool}")
        totals = {
            key: value for key, value in {**self.capacity[pool], **capacity}.items() if value is not None
        }
        self.change({**self.capacity, pool: totals}, self.policies)

    def change(
        self, capacity: dict[str, dict[str, int]], policies: dict[tuple[str, str], PolicyConfig]
    ) -> None:
        self.refuse_bad_configuration(capacity, policies)
        self.capacity, self.policies = capacity, policies
        # 1. each waiting request is admitted anew; a nomination stays while its pool admits it
        for request in list(self.requests.values()):
            if request.state == "queued":
                pool = request.nominated
                if pool is None or self.admission_failure(pool, request) is not None:
                    self.enter_queues(request)
        # 2. nominations that ask for an overbooked key, or that together are more than their requester's limit (or
        # share, where they can't be preempted) and would wait for each other, are undone, the last submitted first
        for pool in sorted(self.capacity):
            while undone := self.overbooked_nominees(pool) + self.deadlocked_nominees(pool):
                self.enter_queues(max(undone, key=lambda one: one.age))
        # 3. the walk
        self.settle()

    def cordon(self, pool: str, state: str) -> None:
        if pool not in self.capacity:
            raise Refused("unknown_pool", f"there is no pool {pool}")
        self.gates[pool] = state
        self.change(self.capacity, self.policies)

    def evict(self, pool: str) -> None:
        """Its grants are called back, as victims are, for nobody."""
        if self.gates.get(pool) != "draining":
            raise Refused("not_draining", f"{pool} is not draining")
        for one in self.holders(pool):
            if one.state == "allocated":
                one.state = "preempting"
                one.deadline = self.now + self.options[pool].grace_s
        self.settle()

    def overbooked_nominees(self, pool: str) -> list[Request]:
        if self.gates.get(pool, "open") != "open":
            return self.nominees(pool)
        return [
            one
            for one in self.nominees(pool)
            if any(self.booked(pool, key) > self.capacity[pool][key] for key in self.keys(pool, one))
        ]

    def deadlocked_nominees(self, pool: str) -> list[Request]:
        found = []
        for one in self.nominees(pool):
            policy = self.policies[pool, one.requester]
            same = [other for other in self.nominees(pool) if other.requester == one.requester]
            fixed = [other for other in same if not other.preemptible]
            for key in self.keys(pool, one):
                beyond_limit = key in policy.limit and total(same, key) > policy.limit[key]
                beyond_share = not one.preemptible and total(fixed, key) > policy.reserved.get(key, 0)
                if beyond_limit or beyond_share:
                    found.append(one)
                    break
        return found

    # ------------------------------------------------------------ what a scenario may ask

    def states(self) -> dict[str, str]:
        return {
            one.id: one.state if one.pool is None else f"{one.state}@{one.pool}"
            for one in self.requests.values()
        }

    def usage(self) -> dict[str, dict[str, int]]:
        return {pool: {key: self.held(pool, key) for key in totals} for pool, totals in self.capacity.items()}

    def queue(self) -> dict[str, list[str]]:
        return {pool: [one.id for one in self.queue_of(pool)] for pool in self.capacity}

    def reasons(self, id: str) -> dict[str, str]:
        request = self.requests[id]
        if request.state == "rejected":
            return dict(request.causes)
        return {pool: self.cause(pool, request) or "behind_head" for pool in request.queues}

    def amounts(self, id: str) -> dict[str, int]:
        return dict(self.requests[id].amounts)

    def close(self) -> None:
        pass


def make_world(pools: dict[str, PoolConfig], policies: list[PolicyConfig]) -> Reference:
    return Reference(pools, policies)
