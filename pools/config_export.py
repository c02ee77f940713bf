"""The configuration that runs as a file: one that applies to no change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .config import (
    Config,
    LeaseModel,
    LimitsModel,
    PlacementModel,
    PoolModel,
    PrewarmModel,
    default_store,
    parse_config,
)
from .core.config_rules import DEFAULT_RESOURCES, OPEN
from .errors import PoolsError
from .store.redis_wire import masked
from .yaml_lines import parse_yaml

_LINE_CHARS = 110


def export_text(running: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """YAML for what the coordinator's operation `config` says. Values that are as by default are left out.

    Raises:
        PoolsError: it can't be said in a file, which would be a fault here.
    """
    wanted = _file(running, environ)
    text = "# As it runs: `pools apply` of this file changes nothing.\n" + _notes(running) + _yaml(wanted)
    read = parse_config(parse_yaml(text, "export"), Path(), environ)
    if _said(read) != _running(running):
        raise PoolsError("what runs can't be written as a file of this version: upgrade, and export again")
    return text


def _file(running: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"namespace": running["namespace"]}
    store = running["store"]
    if store != default_store(running["namespace"], environ) and masked(store) == store:
        found["store"] = store
    found["pools"] = {pool["name"]: _pool(pool) for pool in running["pools"]}
    found["policies"] = [_policy(policy) for policy in running["policies"]]
    for section, model in (("prewarm", PrewarmModel), ("lease", LeaseModel)):
        found[section] = _other_than(running.get("timings", {}).get(section, {}), model().model_dump())
    found["requesters"] = dict(running.get("requesters", {}))
    found["operators"] = dict(running.get("operators", {}))
    found["limits"] = _other_than(running.get("limits", {}), LimitsModel().model_dump())
    return {name: value for name, value in found.items() if value or name == "pools"}


def _other_than(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in values.items() if defaults.get(name) != value}


def _pool(wire: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"capacity": dict(wire["capacity"])}
    defaults = PoolModel(capacity={})
    for name in ("queueing", "starvation_after_s", "grace_s", "min_runtime_s"):
        if wire[name] != getattr(defaults, name):
            found[name] = _number(wire[name])
    if wire["placement"] is None:
        found["placement"] = "none"
    elif placement := _placement(wire["placement"]):
        found["placement"] = placement
    return found


def _placement(wire: Mapping[str, Any]) -> dict[str, Any]:
    defaults = PlacementModel().model_dump()
    found = {
        name: _number(value)
        for name, value in wire.items()
        if name != "resources" and value != defaults[name]
    }
    resources = {key: [*pair] for key, pair in wire["resources"].items()}
    default = {key: [*pair] for key, pair in DEFAULT_RESOURCES.items()}
    if resources != default:
        found["resources"] = {
            **{key: "none" for key in default if key not in resources},
            **{key: pair for key, pair in resources.items() if default.get(key) != pair},
        }
    return found


def _policy(wire: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"requester": wire["requester"], "pool": wire["pool"]}
    if wire["priority"]:
        found["priority"] = wire["priority"]
    return {**found, **{name: dict(wire[name]) for name in ("reserved", "limit") if wire[name]}}


def _number(value: Any) -> Any:
    """30.0 is written 30."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _notes(running: Mapping[str, Any]) -> str:
    """What is no part of a file, and that the reader should know."""
    lines = [
        f"# Pool {pool['name']} is {pool['state']}, which is no part of a configuration and stays as it is.\n"
        for pool in running["pools"]
        if pool.get("state", OPEN) != OPEN
    ]
    if masked(running["store"]) != running["store"]:
        lines.append(f"# The store is {masked(running['store'])}; its password is not shown.\n")
    return "".join(lines)


def _yaml(wanted: Mapping[str, Any]) -> str:
    """Each pool, policy and section on lines of its own; what is inside, in one line where it fits."""
    out = []
    for name, value in wanted.items():
        if name == "policies":
            out.append("policies:\n" + "".join(f"  - {inline_yaml(policy)}\n" for policy in value))
        elif name == "pools":
            pools = "".join(f"  {inline_yaml(pool)}:\n{_block(options)}" for pool, options in value.items())
            out.append(f"pools:\n{pools}" if pools else "pools: {}\n")
        else:
            out.append(f"{name}: {inline_yaml(value)}\n")
    return "\n".join(out)


def _block(options: Mapping[str, Any]) -> str:
    return "".join(f"    {name}: {inline_yaml(value)}\n" for name, value in options.items())


def inline_yaml(value: Any) -> str:
    """The value in one line, as YAML reads it back."""
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=float("inf")
    )
    return text.removesuffix("...\n").strip()


# --- the same on both sides


def _said(config: Config) -> dict[str, Any]:
    return {
        "pools": {name: pool.to_wire() for name, pool in config.core_pools().items()},
        "policies": [policy.to_wire() for policy in config.core_policies()],
        "timings": config.timings(),
        **config.access(),
    }


def _running(running: Mapping[str, Any]) -> dict[str, Any]:
    pools = {
        wire["name"]: {name: value for name, value in wire.items() if name != "state"}
        for wire in running["pools"]
    }
    return {
        "pools": pools,
        "policies": list(running["policies"]),
        "timings": {"lease": LeaseModel().model_dump(), "prewarm": PrewarmModel().model_dump()}
        | running.get("timings", {}),
        "requesters": dict(running.get("requesters", {})),
        "operators": dict(running.get("operators", {})),
        "limits": LimitsModel().model_dump() | running.get("limits", {}),
    }
