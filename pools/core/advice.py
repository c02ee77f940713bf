"""What is legal in a configuration and surely not meant (docs/rules.md sections 4, 7 and 9), as warnings.

A share counts only for a request all of whose metered amounts fit in it, so a key that is metered and that nobody
reserves takes the share from everybody who asks for it; and every request asks for one `step_run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .config_rules import Path, PolicyConfig, PoolConfig

STEP_RUN = "step_run"


class Advice(NamedTuple):
    """One warning: the key path that it is about (as of `Problem`), and what is to be known."""

    path: Path
    text: str


def advice(pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig]) -> list[Advice]:
    """The warnings of a configuration that keeps the rules: pools first, then policies, each in the order given."""
    numbered = list(enumerate(policies))
    found: list[Advice] = []
    of_policies: list[Advice] = []
    for name, pool in pools.items():
        own = [(index, policy) for index, policy in numbered if policy.pool == name]
        unreserved = _unreserved_keys(pool, [policy for _, policy in own])
        found += [Advice(("pools", name, "capacity", key), text) for key, text in unreserved.items()]
        for index, policy in own:
            text = _useless_share(pool, policy, known=STEP_RUN in unreserved)
            if text:
                of_policies.append(Advice(("policies", index, "reserved"), text))
    of_policies += _shares_elsewhere(numbered)
    return found + sorted(of_policies, key=lambda each: int(each.path[1]))


def _reserves(policy: PolicyConfig) -> bool:
    return any(amount > 0 for amount in policy.reserved.values())


def _unreserved_keys(pool: PoolConfig, policies: list[PolicyConfig]) -> dict[str, str]:
    """Keys that are metered, that no policy reserves, in a pool that has shares at all."""
    if not any(map(_reserves, policies)):
        return {}
    found: dict[str, str] = {}
    for key in pool.capacity:
        if any(policy.reserved.get(key, 0) > 0 for policy in policies):
            continue
        if key == STEP_RUN:
            found[key] = (
                f"pool {pool.name} meters {key} and no policy reserves any; every request asks for one, so nothing is"
                " ever in its share: reserve some, or leave it out of the capacity"
            )
        else:
            found[key] = (
                f"pool {pool.name} meters {key} and no policy reserves any: a request that asks for {key} is never in"
                " its share"
            )
    return found


def _useless_share(pool: PoolConfig, policy: PolicyConfig, known: bool) -> str:
    """Why no request can ever use the policy's share, or ""."""
    if not _reserves(policy) or STEP_RUN not in pool.capacity:
        return ""
    share = policy.reserved.get(STEP_RUN, 0)
    most = min(pool.capacity[STEP_RUN], policy.limit.get(STEP_RUN, pool.capacity[STEP_RUN]))
    whose = f"the share of {policy.requester} on {pool.name} can't be used"
    if most == 0:
        return f"{whose}: every request asks for one {STEP_RUN}, and it may have none"
    if share == 0:
        return "" if known else f"{whose}: every request asks for one {STEP_RUN}, and none is reserved"
    others = [key for key in pool.capacity if key != STEP_RUN]
    if others and not any(policy.reserved.get(key, 0) for key in others):
        return f"{whose} by a request that asks for {' or '.join(others)}: only {STEP_RUN} is reserved"
    return ""


def _shares_elsewhere(policies: list[tuple[int, PolicyConfig]]) -> list[Advice]:
    """Requesters without a share in the pool that they try first, and with one in a later pool."""
    of: dict[str, list[tuple[int, PolicyConfig]]] = {}
    for index, policy in policies:
        of.setdefault(policy.requester, []).append((index, policy))
    found = []
    for requester, own in of.items():
        order = sorted(own, key=lambda each: (-each[1].priority, each[1].pool))
        (index, first), later = order[0], [policy for _, policy in order[1:] if _reserves(policy)]
        if later and not _reserves(first):
            text = (
                f"{requester} tries pool {first.pool} first (priority {first.priority}) and has no share there, but one"
                f" on {later[0].pool}: it borrows in {first.pool} before it uses what is its own"
            )
            found.append(Advice(("policies", index), text))
    return found
