"""Changes of pools, policies, keys, limits and times: what would come of them, judged before it happens (rules 9)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray_pools.core.access import check_access
from ray_pools.core.config_rules import PolicyConfig, PoolConfig, check_config
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.link import took_the_place_of
from ray_pools.core.requests import OPEN
from ray_pools.core.timings import TIMINGS, check_timings
from ray_pools.errors import BadInput, Refused
from ray_pools.limits import REQUESTERS_MAX


def merge(state: CoordinatorState, changes: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The changes as the log holds them, if all of them together keep the rules.

    Changes: ("pool", PoolConfig, uid), ("unpool", name), ("policy", PolicyConfig), ("unpolicy", requester, pool),
    ("requester", name, {"key_sha256": hash}), ("unrequester", name), ("operators", {} or {"key_sha256": hash}),
    ("limits", {name: number}, those that are not named are as by default), ("lease" or "prewarm", {name: seconds},
    likewise).

    Raises:
        BadInput: what would come out breaks a rule of section 9; names field, value and what would be right.
        Refused: there is no such pool, policy or requester's key to take away; the change makes a pool whose name
            another one has got since (`changed_meanwhile`).
    """
    pools, uids = dict(state.pools), dict(state.uids)
    policies = {(p.requester, p.pool): p for of in state.policies.values() for p in of.values()}
    keys = dict(state.requester_keys)
    wire: list[list[Any]] = []
    for kind, *rest in changes:
        if kind == "pool":
            _check_it_is_the_same(uids, rest[0].name, rest[1])
            pools[rest[0].name] = rest[0]
            wire.append(["pool", rest[0].to_wire(), rest[1]])
        elif kind == "policy":
            policies[rest[0].requester, rest[0].pool] = rest[0]
            wire.append(["policy", rest[0].to_wire()])
        elif kind == "unpool":
            if pools.pop(rest[0], None) is None:
                raise Refused("unknown_pool", f"there is no pool {rest[0]!r}", {"pool": rest[0]})
            using = [
                r.id
                for r in state.waiting_or_holding.values()
                if r.owner == rest[0] or (r.phase == OPEN and rest[0] in r.pools)
            ]
            if using:
                raise Refused(
                    "in_use", f"pool {rest[0]!r} is in use by {len(using)} requests, {using[0]!r} first"
                )
            uids.pop(rest[0], None)
            policies = {key: p for key, p in policies.items() if key[1] != rest[0]}
            wire.append(["unpool", rest[0]])
        elif kind == "unpolicy":
            if policies.pop((rest[0], rest[1]), None) is None:
                raise Refused("unknown_policy", f"requester {rest[0]!r} has no policy on pool {rest[1]!r}")
            wire.append(["unpolicy", *rest])
        else:
            _merge_access(keys, kind, rest)
            wire.append([kind, *rest])
    raise_first(pools, policies.values())
    return wire


def _check_it_is_the_same(uids: dict[str, str], pool: str, uid: str) -> None:
    """A pool that runs keeps its uid: a change with another one is of somebody who knew of no pool, or of an older
    one, under this name. What runs would be taken for a stranger under the new uid.
    """
    runs = uids.setdefault(pool, uid)
    # whoever made the change need not know yet that the pool was declared lost
    if runs != uid and not took_the_place_of(runs, uid):
        raise Refused(
            "changed_meanwhile",
            f"there is a pool {pool!r} by now that this change does not know: read the configuration again",
            {"pool": pool},
        )


def _merge_access(keys: dict[str, str], kind: str, rest: list[Any]) -> None:
    """A change of who may do what, and how much; or of times."""
    if kind in TIMINGS:
        wrong = check_timings({kind: rest[0]})
        if wrong:
            raise wrong[0].error()
        return
    if kind == "unrequester":
        if keys.pop(rest[0], None) is None:
            raise Refused("unknown_requester", f"requester {rest[0]!r} has no key")
        return
    requesters = {rest[0]: rest[1]} if kind == "requester" else {}
    operators, limits = rest[0] if kind == "operators" else {}, rest[0] if kind == "limits" else {}
    problems = check_access(requesters, operators, limits)
    if problems:
        raise problems[0].error()
    if kind == "requester":
        keys[rest[0]] = rest[1]["key_sha256"]
        if len(keys) > REQUESTERS_MAX:
            raise BadInput(
                "requesters", f"{len(keys)} requesters", f"at most {REQUESTERS_MAX} requesters with a key"
            )


def raise_first(pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig]) -> None:
    """Raises BadInput for the first broken rule of section 9."""
    problems = check_config(pools, policies)
    if problems:
        raise problems[0].error()
