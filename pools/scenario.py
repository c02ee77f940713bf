"""The scenario runner (docs/rules.md section 11): plays scenarios on a World and says what did not hold.

A `World` is one complete system of pools in memory with a clock that moves only by `advance`. The runner
knows no rule; it turns a step into a call, compares what the world then says with what the step expects, and checks
that a refused step changed nothing. `run_files` is what the command line calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, TextIO

from .core.config_rules import CORDONED, DRAINING, OPEN, PolicyConfig, PoolConfig
from .errors import MISSING, BadInput, PoolsError, Refused
from .limits import (
    PRIORITY_ABS_MAX,
    RETRIES_MAX,
    check_integer,
    check_name,
    check_seconds,
)
from .scenario_files import POLICY_KEYS, POOL_KEYS, Scenario, Step, load_scenarios
from .settings import amounts_from_resources, amounts_from_settings, unknown_key

_SUBMIT_KEYS = (
    "id",
    "requester",
    "resources",
    "settings",
    "preemptible",
    "retries",
    "lease",
)
_QUEUEINGS = ("backfill", "strict")


class World(Protocol):
    """A system of pools. Each verb settles it fully; one that is refused raises Refused or BadInput and
    changes nothing. Times are seconds of the world's own clock."""

    def submit(
        self,
        id: str,
        requester: str,
        amounts: dict[str, int],
        preemptible: bool,
        retries: int,
        lease_s: float | None,
    ) -> None: ...
    def release(self, id: str) -> None: ...
    def cancel(self, id: str) -> None: ...
    def stopped(self, id: str) -> None: ...
    def renew(self, id: str) -> None: ...
    def advance(self, seconds: float) -> None: ...
    def attach(self, policy: PolicyConfig) -> None: ...
    def detach(self, requester: str, pool: str) -> None: ...
    def set_capacity(self, pool: str, capacity: dict[str, int | None]) -> None: ...
    def cordon(self, pool: str, state: str) -> None:
        """The pool is cordoned, draining or open from here on."""
        ...

    def evict(self, pool: str) -> None:
        """What the draining pool has granted is called back."""
        ...

    def restart(self, who: str) -> None: ...

    def states(self) -> dict[str, str]:
        """id to state; `allocated@pool` and `preempting@pool`, the others plain."""
        ...

    def usage(self) -> dict[str, dict[str, int]]:
        """pool to key to what is held, for every key that the pool meters."""
        ...

    def queue(self) -> dict[str, list[str]]:
        """pool to the ids that wait there, in order; a nominated request stands in its pool's only."""
        ...

    def reasons(self, id: str) -> dict[str, str]:
        """pool to cause: each pool's of a rejected request, of a queued one those that it queues in."""
        ...

    def amounts(self, id: str) -> dict[str, int]:
        """What the request asks for."""
        ...

    def close(self) -> None: ...


WorldFactory = Callable[[dict[str, PoolConfig], list[PolicyConfig]], World]


@dataclass(frozen=True, slots=True)
class Failure:
    """One expectation that did not hold. Steps count from 1; step 0 is the configuration."""

    scenario: str
    step: int
    what: str  # the expectation, as the file has it: "expect.a", "usage.shared.gpu", "refused"
    wanted: Any
    got: Any
    where: str = ""  # file:line
    why: str = field(default="", compare=False)  # what the pools say of the request, where the world can tell

    def text(self) -> str:
        place = f" ({self.where})" if self.where else ""
        step = f"step {self.step}" if self.step else "configuration"
        return (
            f"{self.scenario}, {step}{place}: {self.what}\n"
            f"    wanted {_shown(self.wanted)}\n    got    {_shown(self.got)}"
            + (f"\n    why    {self.why}" if self.why else "")
        )


@dataclass(slots=True)
class Report:
    """What became of all scenarios that were played."""

    scenarios: int = 0
    steps: int = 0
    failed: int = 0  # scenarios with at least one failure
    failures: list[Failure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures

    def text(self) -> str:
        lines = [failure.text() for failure in self.failures]
        held = self.scenarios - self.failed
        lines.append(
            f"{held} of {self.scenarios} scenarios hold ({self.steps} steps, {len(self.failures)} failures)"
        )
        return "\n".join(lines)


# ---------------------------------------------------------------- many scenarios


def run_files(
    paths: Iterable[str | Path],
    make_world: WorldFactory,
    *,
    trace_out: TextIO | None = None,
    select: Sequence[str] | None = None,
) -> Report:
    """Play all scenarios of the files; `select` are names or shell patterns of the scenarios to play.

    All files are read before anything is played: a malformed one raises BadInput and nothing is reported.
    With `trace_out`, one JSON line per step is written to it.
    """
    scenarios = [scenario for path in paths for scenario in load_scenarios(path)]
    if select:
        for pattern in select:
            if not any(fnmatchcase(scenario.name, pattern) for scenario in scenarios):
                raise BadInput(
                    "select",
                    pattern,
                    "the name, or a pattern of names, of scenarios in the files",
                )
        scenarios = [one for one in scenarios if any(fnmatchcase(one.name, pattern) for pattern in select)]

    def write_trace(line: str) -> None:
        assert trace_out is not None
        trace_out.write(line + "\n")

    report = Report()
    for scenario in scenarios:
        failures = run_scenario(scenario, make_world, write_trace if trace_out is not None else None)
        report.scenarios += 1
        report.steps += len(scenario.steps)
        report.failed += bool(failures)
        report.failures += failures
    return report


# ---------------------------------------------------------------- one scenario


def run_scenario(
    scenario: Scenario,
    make_world: WorldFactory,
    on_trace: Callable[[str], None] | None = None,
) -> list[Failure]:
    """Play one scenario on a new world. Failures by step; `on_trace` gets one JSON line per step."""
    where = f"{scenario.file}:{scenario.line}" if scenario.file else ""
    try:
        world = build_world(scenario, make_world)
    except PoolsError as error:
        if scenario.refused:
            return []
        return [
            Failure(
                scenario.name,
                0,
                "refused",
                "the configuration accepted",
                f"refused: {error}",
                where,
            )
        ]
    try:
        if scenario.refused:
            return [
                Failure(
                    scenario.name,
                    0,
                    "refused",
                    "the configuration refused",
                    "accepted",
                    where,
                )
            ]
        failures: list[Failure] = []
        for number, step in enumerate(scenario.steps, 1):
            where = f"{scenario.file}:{step.line}" if scenario.file else ""
            before = _view(world)
            refusal = play_step(world, step)
            after = _view(world)
            if on_trace is not None:
                on_trace(trace_line(scenario.name, number, refusal is not None, after))
            for what, wanted, got in _differences(world, step, refusal, before, after):
                failures.append(Failure(scenario.name, number, what, wanted, got, where, _why(world, what)))
        return failures
    finally:
        world.close()


def _why(world: World, what: str) -> str:
    """What the pools say of the request that an expectation is of; a world need not be able to."""
    kind, _, request = what.partition(".")
    explain = getattr(world, "explain", None)
    if kind not in ("expect", "reason") or explain is None or request not in world.states():
        return ""
    return "; ".join(f"{pool}: {text}" for pool, text in explain(request).items())


def build_world(scenario: Scenario, make_world: WorldFactory) -> World:
    """The scenario's configuration as a world. Raises BadInput or Refused for one that is refused."""
    pools = {name: pool_config(name, options) for name, options in scenario.pools.items()}
    policies = [
        policy_config(options, f"policies[{index}].") for index, options in enumerate(scenario.policies)
    ]
    return make_world(pools, policies)


def play_step(world: World, step: Step) -> PoolsError | None:
    """Play one step; the refusal if it was refused."""
    try:
        _VERBS[step.verb](world, step.argument)
    except (BadInput, Refused) as refusal:
        return refusal
    return None


def trace_line(scenario: str, step: int, refused: bool, view: Mapping[str, Any]) -> str:
    """One JSON line: the whole visible state after a step, keys in order."""
    line: dict[str, Any] = {"scenario": scenario, "step": step, "refused": refused}
    for name in ("states", "usage", "queue"):
        part: dict[str, Any] = view[name]
        line[name] = {key: _in_order(part[key]) for key in sorted(part)}
    return json.dumps(line, ensure_ascii=False)


def _in_order(value: Any) -> Any:
    return {key: value[key] for key in sorted(value)} if isinstance(value, Mapping) else value


def _view(world: World) -> dict[str, Any]:
    return {
        "states": dict(world.states()),
        "usage": {pool: dict(held) for pool, held in world.usage().items()},
        "queue": {pool: list(ids) for pool, ids in world.queue().items()},
    }


# ---------------------------------------------------------------- what must hold


def _differences(
    world: World,
    step: Step,
    refusal: PoolsError | None,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> Iterable[tuple[str, Any, Any]]:
    """(what, wanted, got) for each expectation that does not hold."""
    if refusal is not None and not step.refused:
        yield "refused", f"{step.verb} accepted", f"refused: {refusal}"
    if refusal is None and step.refused:
        yield "refused", f"{step.verb} refused", "accepted"
    if refusal is not None:
        for part in ("states", "usage", "queue"):
            if before[part] != after[part]:
                yield f"{part} after a refused step", before[part], after[part]
    states = after["states"]
    for request, wanted in step.expect.items():
        got = states.get(request)
        if got is None:
            yield f"expect.{request}", wanted, f"no such request{_among(states)}"
        elif got != wanted and got.partition("@")[0] != wanted:  # bare `allocated`: in any pool
            yield f"expect.{request}", wanted, got
    for pool, amounts in step.usage.items():
        yield from _usage_differences(pool, amounts, after["usage"])
    for pool, ids in step.queue.items():
        if pool not in after["queue"]:
            yield f"queue.{pool}", ids, f"no such pool{_among(after['queue'])}"
        elif after["queue"][pool] != ids:
            yield f"queue.{pool}", ids, after["queue"][pool]
    for request, cause in step.reason.items():
        if request not in states:
            yield f"reason.{request}", cause, f"no such request{_among(states)}"
            continue
        reasons = world.reasons(request)
        if cause not in reasons.values():
            yield (
                f"reason.{request}",
                cause,
                dict(reasons) or f"none: it is {states[request]}",
            )
    for request, asked in step.resources.items():
        if request not in states:
            yield (
                f"resources.{request}",
                dict(asked),
                f"no such request{_among(states)}",
            )
        elif dict(world.amounts(request)) != dict(asked):
            yield f"resources.{request}", dict(asked), dict(world.amounts(request))


def _usage_differences(
    pool: str, amounts: Mapping[str, int], usage: Mapping[str, Mapping[str, int]]
) -> Iterable[tuple[str, Any, Any]]:
    if pool not in usage:
        yield f"usage.{pool}", dict(amounts), f"no such pool{_among(usage)}"
        return
    for key, wanted in amounts.items():
        if key not in usage[pool]:
            yield (
                f"usage.{pool}.{key}",
                wanted,
                f"the pool does not meter it{_among(usage[pool])}",
            )
        elif usage[pool][key] != wanted:
            yield f"usage.{pool}.{key}", wanted, usage[pool][key]


def _among(names: Iterable[str]) -> str:
    known = sorted(names)
    shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
    return f" (there are {shown})" if known else " (there is none)"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---------------------------------------------------------------- raw options to what a world takes


def pool_config(name: str, options: Mapping[str, Any]) -> PoolConfig:
    """A pool of a scenario file. Raises BadInput for a wrong type or an unknown option."""
    check_name("pools (a name)", name)
    where = f"pools.{name}."
    _only(options, POOL_KEYS, where)
    amounts = _amounts(options.get("capacity", MISSING), f"{where}capacity", null_allowed=True)
    given: dict[str, Any] = {}
    if "queueing" in options:
        if options["queueing"] not in _QUEUEINGS:
            raise BadInput(
                f"{where}queueing",
                options["queueing"],
                f"one of {', '.join(_QUEUEINGS)}",
            )
        given["queueing"] = options["queueing"]
    for key in ("starvation_after", "grace", "min_runtime"):
        if key in options:
            given[f"{key}_s"] = check_seconds(where + key, options[key])
    return PoolConfig(name=name, capacity=_without_nulls(amounts), **given)


def policy_config(options: Any, where: str = "") -> PolicyConfig:
    """A policy of a scenario file. Raises BadInput for a wrong type or an unknown or missing key."""
    if not isinstance(options, Mapping):
        raise BadInput(
            where.rstrip(".") or "policy",
            options,
            f"a mapping of {', '.join(POLICY_KEYS)}",
        )
    _only(options, POLICY_KEYS, where)
    return PolicyConfig(
        pool=check_name(f"{where}pool", options.get("pool", MISSING)),
        requester=check_name(f"{where}requester", options.get("requester", MISSING)),
        priority=check_integer(
            f"{where}priority",
            options.get("priority", 0),
            -PRIORITY_ABS_MAX,
            PRIORITY_ABS_MAX,
        ),
        reserved=_without_nulls(
            _amounts(options.get("reserved", {}), f"{where}reserved", null_allowed=False)
        ),
        limit=_without_nulls(_amounts(options.get("limit", {}), f"{where}limit", null_allowed=False)),
    )


def _submit(world: World, argument: Mapping[str, Any]) -> None:
    _only(argument, _SUBMIT_KEYS, "submit.")
    request = check_name("submit.id", argument.get("id", MISSING))
    requester = check_name("submit.requester", argument.get("requester", MISSING))
    if ("resources" in argument) == ("settings" in argument):
        given = "both" if "resources" in argument else "neither"
        raise BadInput("submit.resources, submit.settings", given, "exactly one of the two")
    if "resources" in argument:
        amounts = amounts_from_resources(argument["resources"], "submit.resources")
        preemptible = argument.get("preemptible", True)
    else:
        settings = argument["settings"]
        preemptible = argument.get("preemptible", True)
        if isinstance(settings, Mapping) and "preemptible" in settings:  # a field of ResourceSettings too
            preemptible = argument.get("preemptible", settings["preemptible"])
            settings = {key: value for key, value in settings.items() if key != "preemptible"}
        amounts = amounts_from_settings(settings, "submit.settings")
    if not isinstance(preemptible, bool):
        raise BadInput("submit.preemptible", preemptible, "true or false")
    retries = check_integer("submit.retries", argument.get("retries", 0), 0, RETRIES_MAX)
    lease_s = None
    if argument.get("lease") is not None:
        lease_s = check_seconds("submit.lease", argument["lease"])
        if lease_s == 0:
            raise BadInput("submit.lease", argument["lease"], "seconds, more than 0")
    world.submit(request, requester, amounts, preemptible, retries, lease_s)


def _set_capacity(world: World, argument: Mapping[str, Any]) -> None:
    pool = check_name("set_capacity.pool", argument["pool"])
    world.set_capacity(pool, _amounts(argument["capacity"], "set_capacity.capacity", null_allowed=True))


def _detach(world: World, argument: Mapping[str, Any]) -> None:
    requester = check_name("detach.requester", argument["requester"])
    world.detach(requester, check_name("detach.pool", argument["pool"]))


_VERBS: dict[str, Callable[[World, Any], None]] = {
    "submit": _submit,
    "release": lambda world, id: world.release(id),
    "cancel": lambda world, id: world.cancel(id),
    "stopped": lambda world, id: world.stopped(id),
    "renew": lambda world, id: world.renew(id),
    "advance": lambda world, seconds: world.advance(seconds),
    "attach": lambda world, options: world.attach(policy_config(options, "attach.")),
    "detach": _detach,
    "set_capacity": _set_capacity,
    "cordon": lambda world, pool: world.cordon(pool, CORDONED),
    "drain": lambda world, pool: world.cordon(pool, DRAINING),
    "uncordon": lambda world, pool: world.cordon(pool, OPEN),
    "evict": lambda world, pool: world.evict(pool),
    "restart": lambda world, who: world.restart(who),
}


def _only(options: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in options:
        if key not in known:
            raise BadInput(f"{where}{key}", options[key], unknown_key(key, known))


def _amounts(value: Any, field_name: str, null_allowed: bool) -> dict[str, int | None]:
    if not isinstance(value, Mapping):
        raise BadInput(field_name, value, "a mapping of resource keys to integers")
    found: dict[str, int | None] = {}
    for key, amount in value.items():
        check_name(f"{field_name} (a key)", key)
        unmetered = amount is None and null_allowed
        found[key] = None if unmetered else check_integer(f"{field_name}.{key}", amount)
    return found


def _without_nulls(amounts: Mapping[str, int | None]) -> dict[str, int]:
    return {key: amount for key, amount in amounts.items() if amount is not None}
