"""Pools and policies as the core holds them, and the rules that they obey (docs/rules.md section 9).

`check_config` is the one place that judges them: the configuration file, a scenario, and a command at a running
coordinator all go through it. It takes any values, wrong types included, raises nothing, and names what would
be right, so whoever asked can say where the wrong value stands. Also the wire form of both: plain builtin types,
keys in a fixed order, so that the same configuration always packs to the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import MISSING, BadInput, shown
from ..limits import (
    AMOUNT_MAX,
    KEYS_MAX,
    LABELS_MAX,
    POLICIES_MAX,
    POOLS_MAX,
    PRIORITY_ABS_MAX,
    integer_problem,
    name_problem,
    seconds_problem,
)

QUEUEINGS = ("backfill", "strict")
OPEN, CORDONED, DRAINING = "open", "cordoned", "draining"
POOL_STATES = (OPEN, CORDONED, DRAINING)
RESERVED_NAMES = ("coordinator", "all")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
POOL_SECONDS = ("starvation_after_s", "grace_s", "min_runtime_s")
PLACEMENT_OPTIONS = ("resources", "labels", "node", "strategy", "provision_timeout_s", "warm")

Path = tuple[str | int, ...]


class Problem(NamedTuple):
    """One broken rule: the key path from the top of the configuration, what stands there, what would be right."""

    path: Path
    value: object
    expected: str
    # the section of docs/rules.md, where it is one of its rules
    section: int = 0

    @property
    def field(self) -> str:
        return path_text(self.path)

    def error(self, where: str = "") -> BadInput:
        rule = f" (docs/rules.md, section {self.section})" if self.section else ""
        return BadInput(self.field, self.value, self.expected + rule, where)


class PoolConfig(NamedTuple):
    """One pool. `capacity` holds metered keys only: a key that is not in it is not metered here.

    `placement` None: grants only count. Else the options of `pools.config.PlacementModel`, all filled in. `state`:
    `cordoned` pools grant nothing, `draining` ones admit nothing either (section 9).
    """

    name: str
    capacity: dict[str, int]
    queueing: str = "backfill"
    starvation_after_s: float = 300.0
    grace_s: float = 30.0
    min_runtime_s: float = 0.0
    placement: dict[str, Any] | None = None
    state: str = OPEN

    def to_wire(self) -> dict[str, Any]:
        """Plain types with keys in a fixed order; the inverse of `from_wire`."""
        wire = self._asdict()
        wire["capacity"] = _sorted_deep(self.capacity)
        wire["placement"] = _sorted_deep(self.placement)
        wire.update({field: _as_float(wire[field]) for field in POOL_SECONDS})
        if self.state == OPEN:  # as it was before there were others
            del wire["state"]
        return wire

    @classmethod
    def from_wire(cls, wire: object, field: str = "pool") -> PoolConfig:
        """Checks the shape only (BadInput); `check_config` judges the values."""
        known = _known_fields(wire, cls._fields, ("name", "capacity"), field)
        known.update({name: _as_float(known[name]) for name in POOL_SECONDS if name in known})
        known["capacity"] = _copied(known["capacity"])
        return cls(**known)


class PolicyConfig(NamedTuple):
    """One requester's standing on one pool. No `limit` for a key: no limit beyond the pool's total."""

    pool: str
    requester: str
    priority: int = 0
    reserved: dict[str, int] = {}  # noqa: RUF012 - shared, but never changed: nothing here mutates a config
    limit: dict[str, int] = {}  # noqa: RUF012 - as above

    def to_wire(self) -> dict[str, Any]:
        """Plain types with keys in a fixed order; the inverse of `from_wire`."""
        return {**self._asdict(), "reserved": _sorted_deep(self.reserved), "limit": _sorted_deep(self.limit)}

    @classmethod
    def from_wire(cls, wire: object, field: str = "policy") -> PolicyConfig:
        """Checks the shape only (BadInput); `check_config` judges the values."""
        known = _known_fields(wire, cls._fields, ("pool", "requester"), field)
        for name in ("reserved", "limit"):
            known[name] = _copied(known.get(name, {}))
        return cls(**known)


def check_config(pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig]) -> list[Problem]:
    """Every broken rule, pools first, each in the order given; an empty list when all is right.

    Paths start at ("pools", name) and ("policies", index).
    """
    policies = list(policies)
    problems: list[Problem] = []
    if len(pools) > POOLS_MAX:
        problems.append(Problem(("pools",), f"{len(pools)} pools", f"at most {POOLS_MAX} pools"))
    if len(policies) > POLICIES_MAX:
        problems.append(
            Problem(("policies",), f"{len(policies)} policies", f"at most {POLICIES_MAX} policies")
        )
    for name, pool in pools.items():
        problems += check_pool(pool, ("pools", name))
        if name != pool.name:
            problems.append(Problem(("pools", name, "name"), pool.name, "the same name as the pool's key"))
    by_pool: dict[object, list[tuple[int, PolicyConfig]]] = {name: [] for name in pools}
    of_policies: list[Problem] = []
    for index, policy in enumerate(policies):
        of_policies += _check_policy_shape(policy, ("policies", index))
        if isinstance(policy.pool, str) and policy.pool in by_pool:
            by_pool[policy.pool].append((index, policy))
        elif name_problem(policy.pool) is None:
            expected = f"the name of a pool: {_listed(sorted(pools, key=str))}"
            of_policies.append(Problem(("policies", index, "pool"), policy.pool, expected, 9))
    for name, pool in pools.items():
        of_policies += _check_shares(pool, by_pool[name])
    return problems + sorted(of_policies, key=lambda problem: problem.path[1])


def check_pool(pool: PoolConfig, path: Path) -> list[Problem]:
    """What is wrong with one pool, its policies left aside."""
    problems: list[Problem | None] = [_named((*path, "name"), pool.name)]
    if pool.name in RESERVED_NAMES:
        taken = f"another name: commands use {' and '.join(RESERVED_NAMES)} for themselves"
        problems.append(Problem((*path, "name"), pool.name, taken))
    problems += _check_amounts((*path, "capacity"), pool.capacity)
    if pool.queueing not in QUEUEINGS:
        problems.append(Problem((*path, "queueing"), pool.queueing, " or ".join(QUEUEINGS)))
    if pool.state not in POOL_STATES:
        problems.append(Problem((*path, "state"), pool.state, " or ".join(POOL_STATES)))
    for field in POOL_SECONDS:
        expected = seconds_problem(getattr(pool, field))
        if expected:
            problems.append(Problem((*path, field), getattr(pool, field), expected))
    if pool.placement is not None:
        problems += _check_placement(pool, (*path, "placement"))
    return _found(problems)


def path_text(path: Path) -> str:
    """A key path as an error shows it: ("policies", 3, "reserved", "gpu") is policies[3].reserved.gpu."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        plain = part[:60] + ("..." if len(part) > 60 else "")
        plain = plain if plain.isprintable() and plain else repr(plain)
        text += f".{plain}" if text else plain
    return text


def _check_policy_shape(policy: PolicyConfig, path: Path) -> list[Problem]:
    expected = integer_problem(policy.priority, -PRIORITY_ABS_MAX, PRIORITY_ABS_MAX)
    return _found(
        [
            _named((*path, "pool"), policy.pool),
            _named((*path, "requester"), policy.requester),
            expected and Problem((*path, "priority"), policy.priority, expected),
            *_check_amounts((*path, "reserved"), policy.reserved),
            *_check_amounts((*path, "limit"), policy.limit),
        ]
    )


def _check_shares(pool: PoolConfig, policies: list[tuple[int, PolicyConfig]]) -> list[Problem]:
    """The rules between one pool and its policies, and among those. Wrong types are told elsewhere."""
    problems: list[Problem] = []
    pool_name = _listed([pool.name])
    capacity = _integers(pool.capacity)
    reserved_sum = dict.fromkeys(capacity, 0)
    first_with: dict[str, int] = {}
    for index, policy in policies:
        path = ("policies", index)
        requester: object = policy.requester
        if not isinstance(requester, str):
            continue
        if requester in first_with:
            earlier = path_text(("policies", first_with[requester]))
            expected = f"one policy per requester and pool; {earlier} is this requester's on pool {pool_name}"
            problems.append(Problem((*path, "requester"), requester, expected, 9))
            continue
        first_with[requester] = index
        reserved, limit = _integers(policy.reserved), _integers(policy.limit)
        for field, amounts in (("reserved", reserved), ("limit", limit)):
            for key in amounts:
                if isinstance(pool.capacity, Mapping) and key not in pool.capacity:
                    keys = ", ".join(map(str, pool.capacity)) or "it has none"
                    problems.append(
                        Problem((*path, field, key), amounts[key], f"a key of pool {pool.name}: {keys}", 9)
                    )
        for key, amount in reserved.items():
            if key not in capacity:
                continue
            if key in limit and amount > limit[key]:
                problems.append(
                    Problem((*path, "reserved", key), amount, f"at most the policy's limit {limit[key]}", 9)
                )
            if amount > capacity[key]:
                expected = f"at most the pool's capacity {capacity[key]}"
                problems.append(Problem((*path, "reserved", key), amount, expected, 9))
            elif reserved_sum[key] + amount > capacity[key]:
                others = _listed_shares(policies, index, key)
                expected = (
                    f"at most {max(0, capacity[key] - reserved_sum[key])}, since others reserve"
                    f" {reserved_sum[key]} of pool {pool_name}'s capacity {capacity[key]} before it: {others}"
                )
                problems.append(Problem((*path, "reserved", key), amount, expected, 9))
            reserved_sum[key] += amount
    return problems


def _listed_shares(policies: list[tuple[int, PolicyConfig]], before: int, key: str) -> str:
    """Who reserves how much of the key in the policies before this one."""
    shares = (
        f"{policy.requester} {amount}"
        for index, policy in policies
        if index < before and (amount := _integers(policy.reserved).get(key, 0))
    )
    return _listed(
        itertools.islice(shares, 11)
    )  # as many as are shown, for each of many policies may be wrong


def _check_placement(pool: PoolConfig, path: Path) -> list[Problem]:
    placement = pool.placement
    if not isinstance(placement, Mapping):
        return [Problem(path, placement, "a mapping of options, or none")]
    checks: dict[str, Callable[[Path, Any], list[Problem]]] = {
        "resources": _check_resources,
        "labels": _check_labels,
        "node": _check_positive_amounts,
        "strategy": _check_strategy,
        "provision_timeout_s": _check_provision_timeout,
        "warm": _check_amounts,
    }
    problems: list[Problem] = []
    for option, value in placement.items():
        if option in checks:
            problems += checks[option]((*path, option), value)
        else:
            problems.append(Problem((*path, option), value, f"one of {', '.join(PLACEMENT_OPTIONS)}"))
    for option in ("resources", "node", "warm"):
        for key in _mapping(placement.get(option)):
            if key not in _mapping(pool.capacity) and not (
                option == "resources" and key in DEFAULT_RESOURCES
            ):
                expected = f"a key of the pool: {_listed(_mapping(pool.capacity))}"
                problems.append(Problem((*path, option, key), placement[option][key], expected))
    capacity = _integers(pool.capacity)
    for key, amount in _integers(placement.get("warm")).items():
        if amount > capacity.get(key, amount):
            expected = f"at most the pool's capacity {capacity[key]}"
            problems.append(Problem((*path, "warm", key), amount, expected))
    return problems


DEFAULT_RESOURCES: dict[str, tuple[str, float]] = {
    "gpu": ("GPU", 1),
    "mcpu": ("CPU", 1000),
    "memory_mb": ("memory", 0.000001),
}
"""Resource key to (Ray's resource, divisor): Ray is asked for amount / divisor. Ray counts memory in bytes."""


def _check_resources(path: Path, value: Any) -> list[Problem]:
    if not isinstance(value, Mapping):
        return [Problem(path, value, "a mapping of resource keys to [Ray resource, divisor]")]
    problems = []
    for key, pair in value.items():
        fine = isinstance(pair, (list, tuple)) and len(pair) == 2 and name_problem(pair[0]) is None
        if (
            not fine
            or isinstance(pair[1], bool)
            or not isinstance(pair[1], (int, float))
            or not 0 < pair[1] < 1e18
        ):
            problems.append(
                Problem((*path, key), pair, "[Ray resource, divisor], such as [GPU, 1] or [CPU, 1000]")
            )
    return problems


def _check_labels(path: Path, value: Any) -> list[Problem]:
    if not isinstance(value, Mapping) or len(value) > LABELS_MAX:
        return [Problem(path, value, f"a mapping of at most {LABELS_MAX} node labels to their values")]
    problems = [_named(path, label) for label in value]
    return _found([*problems, *(_named((*path, str(label)), text) for label, text in value.items())])


def _check_strategy(path: Path, value: Any) -> list[Problem]:
    return [] if value in STRATEGIES else [Problem(path, value, f"one of {', '.join(STRATEGIES)}")]


def _check_provision_timeout(path: Path, value: Any) -> list[Problem]:
    expected = seconds_problem(value)
    return [Problem(path, value, expected)] if expected else []


def _check_positive_amounts(path: Path, value: Any) -> list[Problem]:
    return _check_amounts(path, value, low=1)


def _check_amounts(path: Path, amounts: Any, low: int = 0) -> list[Problem]:
    if not isinstance(amounts, Mapping):
        return [Problem(path, amounts, "a mapping of resource keys to integers")]
    if len(amounts) > KEYS_MAX:
        return [Problem(path, f"{len(amounts)} keys", f"at most {KEYS_MAX} keys")]
    problems: list[Problem | str | None] = []
    for key, amount in amounts.items():
        problems.append(_named(path, key))
        expected = integer_problem(amount, low, AMOUNT_MAX)
        problems.append(expected and Problem((*path, str(key)), amount, expected))
    return _found(problems)


def _named(path: Path, name: object) -> Problem | None:
    expected = name_problem(name)
    return Problem(path, name, expected) if expected else None


def _found(problems: Iterable[Problem | str | None]) -> list[Problem]:
    return [problem for problem in problems if isinstance(problem, Problem)]


def _listed(names: Iterable[object]) -> str:
    """Names as an error lists them, few and short: what is listed may itself be what is wrong."""
    listed = list(names)
    parts = [name if name_problem(name) is None else shown(name, 40) for name in listed[:10]]
    return ", ".join(map(str, parts + ["..."] * (len(listed) > 10))) or "there is none"


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _integers(amounts: Any) -> dict[str, int]:
    """Only what can be compared: amounts of the wrong type have a problem of their own."""
    return {key: amount for key, amount in _mapping(amounts).items() if integer_problem(amount) is None}


def _known_fields(
    wire: object, known: tuple[str, ...], required: tuple[str, ...], field: str
) -> dict[str, Any]:
    if not isinstance(wire, Mapping):
        raise BadInput(field, wire, f"a mapping with {', '.join(known)}")
    for key in wire:
        if key not in known:
            raise BadInput(
                f"{field}.{key}" if isinstance(key, str) else field, key, f"one of {', '.join(known)}"
            )
    for key in required:
        if key not in wire:
            raise BadInput(f"{field}.{key}", MISSING, f"needed; the fields are {', '.join(known)}")
    return dict(wire)


def _as_float(value: Any) -> Any:
    """30 and 30.0 are the same configuration and must pack the same; anything but a number stays."""
    return (
        float(value)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < AMOUNT_MAX
        else value
    )


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _sorted_deep(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted_deep(value[key]) for key in sorted(value, key=str)}
    return [_sorted_deep(item) for item in value] if isinstance(value, (list, tuple)) else value
