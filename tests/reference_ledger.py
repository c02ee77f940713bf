"""The ledger of tests/reference.py: requests, pools, policies, and docs/rules.md sections 3 and 4.

Admission and accounting, each question answered by looking at all requests. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.errors import BadInput

EXEMPT_KEYS = ("mcpu", "memory_mb", "step_run")


@dataclass
class Request:
    id: str
    requester: str
    amounts: dict[str, int]
    preemptible: bool
    retries: int  # as submitted
    lease_s: float | None
    age: int  # sequence number of the first submission
    submitted_at: float
    state: str = "queued"
    retries_left: int = 0
    queues: list[str] = field(default_factory=list)  # pools it waits in; only one when it is nominated
    nominated: str | None = None
    pool: str | None = None  # that it holds capacity of
    granted_at: float = 0.0
    grant_number: int = 0
    deadline: float | None = None  # of a victim
    lease_end: float | None = None
    causes: dict[str, str] = field(default_factory=dict)  # of a rejection, per pool

    def content(self) -> tuple[object, ...]:
        return (self.requester, self.amounts, self.preemptible, self.retries, self.lease_s)


class Ledger:
    """What is known: the clock, the configuration, every request that ever came."""

    def __init__(self, pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig]) -> None:
        self.now = 0.0
        self.options = dict(pools)
        # pool -> cordoned or draining; it is open otherwise
        self.gates: dict[str, str] = {}
        self.capacity = {name: dict(pool.capacity) for name, pool in pools.items()}
        self.policies: dict[tuple[str, str], PolicyConfig] = {}
        self.requests: dict[str, Request] = {}
        self.grants_made = 0
        for policy in policies:
            if (policy.pool, policy.requester) in self.policies:
                raise BadInput(
                    "policies", f"{policy.requester} on {policy.pool}", "one per requester and pool"
                )
            self.policies[policy.pool, policy.requester] = policy
        self.refuse_bad_configuration(self.capacity, self.policies)

    # ------------------------------------------------------------ section 3: admission

    def admission_failure(self, pool: str, request: Request) -> str | None:
        policy = self.policies.get((pool, request.requester))
        if policy is None:
            return "no_policy"
        if self.gates.get(pool) == "draining":
            return "draining"
        for key in sorted(request.amounts):
            amount = request.amounts[key]
            if amount == 0:
                continue
            if key not in self.capacity[pool]:
                if key in EXEMPT_KEYS:
                    continue
                return "no_capacity_for_key"
            if amount > self.capacity[pool][key]:
                return "exceeds_capacity"
            if key in policy.limit and amount > policy.limit[key]:
                return "exceeds_limit"
            if not request.preemptible and amount > policy.reserved.get(key, 0):
                return "exceeds_reserved"
        return None

    def enter_queues(self, request: Request) -> None:
        """Queue in every pool that admits it; rejected when none does."""
        causes = {pool: self.admission_failure(pool, request) for pool in sorted(self.capacity)}
        request.nominated = None
        request.queues = [pool for pool, cause in causes.items() if cause is None]
        request.state = "queued"
        if not request.queues:
            request.state = "rejected"
            request.causes = {pool: cause for pool, cause in causes.items() if cause is not None}

    def own_order(self, request: Request) -> list[str]:
        """Its pools by policy priority, highest first, then by name."""
        return sorted(request.queues, key=lambda pool: (-self.priority(pool, request), pool))

    def priority(self, pool: str, request: Request) -> int:
        return self.policies[pool, request.requester].priority

    # ------------------------------------------------------------ section 4: accounting

    def keys(self, pool: str, request: Request) -> list[str]:
        """Keys that the pool meters and the request asks for with a positive amount."""
        return [
            key for key in sorted(request.amounts) if request.amounts[key] > 0 and key in self.capacity[pool]
        ]

    def holders(self, pool: str) -> list[Request]:
        return [one for one in self.requests.values() if one.pool == pool]

    def nominees(self, pool: str) -> list[Request]:
        return [one for one in self.requests.values() if one.nominated == pool]

    def held(self, pool: str, key: str) -> int:
        return total(self.holders(pool), key)

    def bookers(self, pool: str) -> list[Request]:
        return [one for one in self.holders(pool) if one.state == "allocated"] + self.nominees(pool)

    def booked(self, pool: str, key: str) -> int:
        return total(self.bookers(pool), key)

    def reserved(self, pool: str, requester: str, key: str) -> int:
        policy = self.policies.get((pool, requester))
        reserved: int = policy.reserved.get(key, 0) if policy else 0
        return reserved

    def headroom(self, pool: str, request: Request, key: str) -> int:
        booked_by_it = total(
            [
                one
                for one in self.bookers(pool)
                if one.requester == request.requester
                and one is not request
                and (request.preemptible or not one.preemptible)
            ],
            key,
        )
        return self.reserved(pool, request.requester, key) - booked_by_it

    def in_share(self, pool: str, request: Request) -> bool:
        return all(
            request.amounts[key] <= self.headroom(pool, request, key) for key in self.keys(pool, request)
        )

    def cause(self, pool: str, request: Request) -> str | None:
        """Why it can't be granted; None when it can. The first line that fails."""
        gate = self.gates.get(pool, "open")
        if gate != "open":
            return gate
        policy = self.policies[pool, request.requester]
        keys = self.keys(pool, request)
        mine = [
            one
            for one in self.holders(pool) + self.nominees(pool)
            if one.requester == request.requester and one is not request
        ]
        mine_for_good = [one for one in mine if not one.preemptible]
        for key in keys:
            if key in policy.limit and total(mine, key) + request.amounts[key] > policy.limit[key]:
                return "at_limit"
        if not request.preemptible:
            for key in keys:
                if total(mine_for_good, key) + request.amounts[key] > policy.reserved.get(key, 0):
                    return "reserved_in_use"
        if request.nominated != pool:
            for key in keys:
                if self.booked(pool, key) + request.amounts[key] > self.capacity[pool][key]:
                    return "waiting_capacity"
        for key in keys:
            if self.held(pool, key) + request.amounts[key] > self.capacity[pool][key]:
                return "awaiting_preemption"
        return None

    # ------------------------------------------------------------ section 9: what may be configured

    def refuse_bad_configuration(
        self, capacity: dict[str, dict[str, int]], policies: dict[tuple[str, str], PolicyConfig]
    ) -> None:
        for (pool, requester), policy in policies.items():
            field_name = f"policy of {requester} on {pool}"
            if pool not in capacity:
                raise BadInput(field_name, pool, "the name of a pool")
            for key in (*policy.reserved, *policy.limit):
                if key not in capacity[pool]:
                    raise BadInput(field_name, key, "a key of the pool")
            for key, amount in policy.reserved.items():
                if key in policy.limit and amount > policy.limit[key]:
                    raise BadInput(field_name, amount, f"reserved {key} up to the limit")
        for pool, totals in capacity.items():
            for key, amount in totals.items():
                promised = sum(
                    policy.reserved.get(key, 0) for (where, _), policy in policies.items() if where == pool
                )
                if promised > amount:
                    raise BadInput(f"reserved {key} on {pool}", promised, f"up to {amount} in all")


def total(requests: Iterable[Request], key: str) -> int:
    amounts = [one.amounts.get(key, 0) for one in requests]
    return sum(amounts)
