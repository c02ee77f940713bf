"""What leads from a running configuration to the one that is wanted: a list of changes, and the same in words."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from .core.access import LIMITS
from .core.config_rules import DRAINING, OPEN, PolicyConfig, PoolConfig
from .core.timings import TIMINGS
from .errors import Refused
from .store.redis_wire import masked

LIMITS_BY_DEFAULT = {name: default for name, (default, _) in LIMITS.items()}


def difference(
    before: Mapping[str, Any], pools: Mapping[str, PoolConfig], policies: list[PolicyConfig]
) -> list[list[Any]]:
    """The changes that lead from the running configuration to the given one.

    Whether a pool is cordoned or draining is no part of a configuration: it stays as it is. A pool that is draining may
    be missing.

    Raises:
        Refused: a running pool is missing in the given one.
    """
    running = {wire["name"]: wire for wire in before["pools"]}
    extra = sorted(name for name in set(running) - set(pools) if running[name].get("state") != DRAINING)
    if extra:
        raise Refused(
            "pool_missing",
            f"pool {extra[0]!r} is running and not in the configuration: add it, use another namespace, or take the"
            f" pool away: pools pool delete {extra[0]}",
        )
    changes: list[list[Any]] = []
    for name, pool in pools.items():
        state = running.get(name, {}).get("state", pool.state)
        wanted = pool._replace(state=state).to_wire()
        if running.get(name) != wanted:
            changes.append(["pool", wanted, before["uids"].get(name) or uuid.uuid4().hex])
    attached = {(p["requester"], p["pool"]): p for p in before["policies"] if p["pool"] in pools}
    for policy in policies:
        if attached.pop((policy.requester, policy.pool), None) != policy.to_wire():
            changes.append(["policy", policy.to_wire()])
    # those that go come first: their reserved amounts may be needed by those that come
    return [*(["unpolicy", requester, pool] for requester, pool in sorted(attached)), *changes]


def access_difference(before: Mapping[str, Any], access: Mapping[str, Any] | None) -> list[list[Any]]:
    """The changes of keys and limits that lead from the running configuration to the given one."""
    if access is None:
        return []
    changes: list[list[Any]] = []
    running = before.get("requesters", {})  # an older coordinator knows of none
    changes += [["unrequester", name] for name in sorted(set(running) - set(access["requesters"]))]
    changes += [
        ["requester", name, key] for name, key in access["requesters"].items() if running.get(name) != key
    ]
    if before.get("limits", LIMITS_BY_DEFAULT) != access["limits"]:
        changes.append(["limits", access["limits"]])
    if before.get("operators", {}) != access["operators"]:
        changes.append(["operators", access["operators"]])
    return changes


def timings_difference(before: Mapping[str, Any], options: Mapping[str, Any]) -> list[list[Any]]:
    """The changes of times that lead from the running configuration to the given options."""
    running = before.get("timings", {})  # an older coordinator keeps those that it was made with
    changes: list[list[Any]] = []
    for section, values in running.items():
        wanted = {
            name: float(options[f"{section}_{name}"])
            for name in TIMINGS.get(section, ())
            if f"{section}_{name}" in options
        }
        if wanted and {**values, **wanted} != values:
            changes.append([section, {**values, **wanted}])
    return changes


def store_note(before: Mapping[str, Any], store: str) -> str:
    """What is to be said of a store that is not the running one, which no change reaches; "" where it is the same."""
    running = before.get("store")  # an older coordinator does not say it
    if not running or masked(running) == masked(store):
        return ""
    return (
        f"store {masked(store)} is not used: the pools that run keep their logs at {masked(running)} until `pools down`"
        " and `pools up`"
    )


# --- in words

_TOLD = ("capacity", "priority", "reserved", "limit", "queueing", "grace_s")
"""What is said of a pool or a policy that is new; of one that changes, whatever changes."""


def difference_words(before: Mapping[str, Any], changes: Iterable[list[Any]]) -> list[str]:
    """One line per change: `+` is new, `~` another than before, `-` goes."""
    pools = {wire["name"]: {"state": OPEN, **wire} for wire in before["pools"]}
    policies = {(wire["requester"], wire["pool"]): wire for wire in before["policies"]}
    lines = []
    for kind, *rest in changes:
        if kind == "pool":
            wanted = {"state": OPEN, **rest[0]}
            lines.append(_changed(f"pool {wanted['name']}", pools.get(wanted["name"]), wanted))
        elif kind == "policy":
            key = rest[0]["requester"], rest[0]["pool"]
            lines.append(_changed(f"policy of {key[0]} on {key[1]}", policies.get(key), rest[0]))
        elif kind == "unpool":
            lines.append(f"- pool {rest[0]}")
        elif kind == "unpolicy":
            lines.append(f"- policy of {rest[0]} on {rest[1]}")
        elif kind == "requester":
            known = rest[0] in before.get("requesters", {})
            lines.append(f"{'~' if known else '+'} key of requester {rest[0]}")
        elif kind == "unrequester":
            lines.append(f"- key of requester {rest[0]}")
        elif kind == "operators":
            lines.append("~ key of operators" if rest[0] else "- key of operators")
        else:
            was = before.get("limits", {}) if kind == "limits" else before.get("timings", {}).get(kind, {})
            lines.append(_changed(kind, was, rest[0]))
    return lines


def _changed(what: str, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    if before is None:
        said = [
            f"{field} {_value(value)}"
            for field, value in now.items()
            if field in _TOLD and value not in ({}, None)
        ]
        return f"+ {what}: " + ", ".join(said)
    said = []
    for field in {**before, **now}:
        was, is_now = before.get(field), now.get(field)
        if was == is_now:
            continue
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            for key in sorted({*was, *is_now}):
                if was.get(key) != is_now.get(key):
                    said.append(f"{field} {key} {_value(was.get(key))} -> {_value(is_now.get(key))}")
        else:
            said.append(f"{field} {_value(was)} -> {_value(is_now)}")
    return f"~ {what}: " + ", ".join(said)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_value(part)}" for key, part in value.items()) or "none"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
