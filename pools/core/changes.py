"""Changes of pools and policies: what would come of them, judged before anything happens (docs/rules.md section 9)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray_pools.core.config_rules import PolicyConfig, PoolConfig, check_config
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.errors import Refused


def merge(state: CoordinatorState, changes: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The changes as the log holds them, if all of them together keep the rules.

    Changes: ("pool", PoolConfig, uid), ("unpool", name), ("policy", PolicyConfig), ("unpolicy", requester, pool).

    Raises:
        BadInput: what would come out breaks a rule of section 9; names field, value and what would be right.
        Refused: there is no such pool or policy to take away.
    """
    pools = dict(state.pools)
    policies = {(p.requester, p.pool): p for of in state.policies.values() for p in of.values()}
    wire: list[list[Any]] = []
    for kind, *rest in changes:
        if kind == "pool":
            pools[rest[0].name] = rest[0]
            wire.append(["pool", rest[0].to_wire(), rest[1]])
        elif kind == "policy":
            policies[rest[0].requester, rest[0].pool] = rest[0]
            wire.append(["policy", rest[0].to_wire()])
        elif kind == "unpool":
            if pools.pop(rest[0], None) is None:
                raise Refused("unknown_pool", f"there is no pool {rest[0]!r}", {"pool": rest[0]})
            using = [r.id for r in state.waiting_or_holding.values() if rest[0] in (r.owner, *r.pools)]
            if using:
                raise Refused(
                    "in_use", f"pool {rest[0]!r} is in use by {len(using)} requests, {using[0]!r} first"
                )
            policies = {key: p for key, p in policies.items() if key[1] != rest[0]}
            wire.append(["unpool", rest[0]])
        else:
            if policies.pop((rest[0], rest[1]), None) is None:
                raise Refused("unknown_policy", f"requester {rest[0]!r} has no policy on pool {rest[1]!r}")
            wire.append(["unpolicy", *rest])
    raise_first(pools, policies.values())
    return wire


def raise_first(pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig]) -> None:
    """Raises BadInput for the first broken rule of section 9."""
    problems = check_config(pools, policies)
    if problems:
        raise problems[0].error()
