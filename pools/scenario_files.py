"""Scenario files (docs/rules.md section 11): YAML text into plain, checked data.

`load_scenarios` reads one file. It checks the *form*: known keys, one verb per step, words that exist. What a
configuration or a request may hold is not judged here: a scenario may well state that it must be refused, so
the runner (`ray_pools.scenario`) hands it on and sees. Every error names file, line and key, and what would
be right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from .errors import MISSING, BadInput
from .limits import CONFIG_MAX_BYTES

VERBS = (
    "submit",
    "release",
    "cancel",
    "stopped",
    "renew",
    "advance",
    "attach",
    "detach",
    "set_capacity",
    "cordon",
    "drain",
    "uncordon",
    "evict",
    "restart",
)
EXPECTATIONS = ("expect", "usage", "queue", "reason", "resources")
STATES = (
    "queued",
    "allocated",
    "preempting",
    "released",
    "rejected",
    "cancelled",
    "preempted",
    "expired",
)
POOLED_STATES = ("allocated", "preempting")  # these may name their pool: allocated@pool
_POOLED = "allocated and preempting may be followed by @pool"
CAUSES = (
    "no_policy",
    "no_capacity_for_key",
    "exceeds_capacity",
    "exceeds_limit",
    "exceeds_reserved",
    "at_limit",
    "reserved_in_use",
    "waiting_capacity",
    "awaiting_preemption",
    "behind_head",
    "cordoned",
    "draining",
)
SCENARIO_KEYS = ("name", "about", "source", "pools", "policies", "refused", "steps")
POOL_KEYS = ("capacity", "queueing", "starvation_after", "grace", "min_runtime")
POLICY_KEYS = ("pool", "requester", "priority", "reserved", "limit")

_ID_VERBS = ("release", "cancel", "stopped", "renew")
POOL_VERBS = ("cordon", "drain", "uncordon", "evict")
_MAPPING_VERBS: dict[str, tuple[str, ...]] = {
    "submit": (),  # a request's content is judged by the run: the step may be there to be refused
    "attach": (),
    "detach": ("requester", "pool"),
    "set_capacity": ("pool", "capacity"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One verb with its argument, and what must hold once everything has settled."""

    verb: str
    argument: Any  # an id, seconds, or a mapping, as the verb has it
    expect: Mapping[str, str] = field(default_factory=dict)  # id -> state, perhaps with @pool
    usage: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # pool -> key -> held
    queue: Mapping[str, list[str]] = field(default_factory=dict)  # pool -> ids in order
    reason: Mapping[str, str] = field(default_factory=dict)  # id -> cause
    resources: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # id -> amounts
    refused: bool = False
    note: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A configuration and the steps played on it; `pools` and `policies` are raw options, not yet judged."""

    name: str
    pools: Mapping[str, Mapping[str, Any]]
    policies: list[Mapping[str, Any]]
    steps: list[Step]
    about: str = ""
    source: str = ""
    refused: bool = False  # the configuration itself must be refused
    file: str = ""
    line: int = 0


def load_scenarios(path: str | Path) -> list[Scenario]:
    """The scenarios of one file. Raises BadInput, naming file, line and key, for one not of the form."""
    try:
        size = Path(path).stat().st_size
        if size > CONFIG_MAX_BYTES:
            raise BadInput(
                "file",
                f"{size} bytes",
                f"at most {CONFIG_MAX_BYTES} bytes",
                where=str(path),
            )
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput("file", str(path), f"a readable scenario file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadInput("file", str(path), "a text file in UTF-8", where=str(path)) from None
    return parse_scenarios(text, str(path))


def parse_scenarios(text: str, file: str) -> list[Scenario]:
    """As `load_scenarios`, from text; `file` only names it in errors."""
    try:
        loader = yaml.SafeLoader(text)  # refuses control characters here already
        try:
            return _scenarios(_Reader(file, loader), loader.get_single_node())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark else file
        raise BadInput("file", error.problem or "unreadable text", "valid YAML", where=where) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput("file", reason, "valid YAML", where=file) from None


def _scenarios(reader: _Reader, node: yaml.Node | None) -> list[Scenario]:
    if node is None:
        raise BadInput("file", "nothing", "a list of scenarios", where=reader.file)
    reader.refuse_duplicate_keys(node, set())
    items = reader.items(node, "file", "a list of scenarios")
    if not items:
        reader.fail(node, "file", [], "a list of at least one scenario")
    return [_scenario(reader, item) for item in items]


class _Reader:
    """YAML nodes to values, with the place of each one at hand for errors."""

    def __init__(self, file: str, loader: yaml.SafeLoader) -> None:
        self.file = file
        self._loader = loader

    def fail(self, node: yaml.Node, key: str, value: Any, expected: str) -> NoReturn:
        raise BadInput(key, value, expected, where=f"{self.file}:{self.line(node)}")

    @staticmethod
    def line(node: yaml.Node) -> int:
        return int(node.start_mark.line) + 1

    def value(self, node: yaml.Node) -> Any:
        return self._loader.construct_object(node, deep=True)

    def refuse_duplicate_keys(self, node: yaml.Node, seen: set[int]) -> None:
        """YAML keeps the last of two equal keys and says nothing; half of a step would vanish so."""
        if id(node) in seen:  # an alias
            return
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.refuse_duplicate_keys(item, seen)
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key_node, value_node in node.value:
                key = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
                if not isinstance(key_node, yaml.ScalarNode):
                    self.fail(key_node, "key", self.value(key_node), "a plain word as key")
                if key in keys:
                    self.fail(key_node, key, "given twice", "each key once")
                keys.add(key)
                self.refuse_duplicate_keys(value_node, seen)

    def entries(self, node: yaml.Node, key: str, what: str) -> dict[str, yaml.Node]:
        """The nodes of a mapping with string keys."""
        if not isinstance(node, yaml.MappingNode):
            self.fail(node, key, self.value(node), what)
        self._loader.flatten_mapping(node)  # merge keys: <<
        found: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            word = self.value(key_node)
            if not isinstance(word, str):
                self.fail(key_node, key, word, f'a string as key: write "{key_node.value}"')
            found[word] = value_node  # the last: what a merge brings stands first
        return found

    def known(self, node: yaml.Node, key: str, what: str, keys: tuple[str, ...]) -> dict[str, yaml.Node]:
        found = self.entries(node, key, what)
        for word, value_node in found.items():
            if word not in keys:
                self.fail(value_node, word, "unknown key", f"one of {', '.join(keys)}")
        return found

    def text(self, node: yaml.Node, key: str, what: str = "a string") -> str:
        value = self.value(node)
        if not isinstance(value, str):
            self.fail(
                node,
                key,
                value,
                f"{what}; quote it if it looks like a number or a truth value",
            )
        return value

    def flag(self, node: yaml.Node, key: str) -> bool:
        value = self.value(node)
        if not isinstance(value, bool):
            self.fail(node, key, value, "true or false")
        return value

    def items(self, node: yaml.Node, key: str, what: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            self.fail(node, key, self.value(node), what)
        return list(node.value)


def _scenario(reader: _Reader, node: yaml.Node) -> Scenario:
    parts = reader.known(
        node,
        "scenario",
        "a mapping with name, pools, policies and steps",
        SCENARIO_KEYS,
    )
    if "name" not in parts:
        reader.fail(node, "name", MISSING, "a name for the scenario")
    name = reader.text(parts["name"], "name")
    if not name.strip():
        reader.fail(parts["name"], "name", name, "a name that is not empty")
    refused = reader.flag(parts["refused"], "refused") if "refused" in parts else False
    if "pools" not in parts:
        reader.fail(node, "pools", MISSING, f"the pools of {name}: name to capacity and options")
    if "steps" not in parts and not refused:
        reader.fail(node, "steps", MISSING, f"the steps of {name} (a list)")
    pools = {
        pool: _options(reader, options, f"pools.{pool}", POOL_KEYS)
        for pool, options in reader.entries(parts["pools"], "pools", "a mapping of pool names").items()
    }
    policies: list[Mapping[str, Any]] = []
    if "policies" in parts:
        for item in reader.items(parts["policies"], "policies", "a list of policies"):
            policies.append(_options(reader, item, f"policies[{len(policies)}]", POLICY_KEYS))
    steps: list[Step] = []
    if "steps" in parts:
        steps = [_step(reader, item) for item in reader.items(parts["steps"], "steps", "a list of steps")]
    return Scenario(
        name=name,
        about=reader.text(parts["about"], "about") if "about" in parts else "",
        source=reader.text(parts["source"], "source") if "source" in parts else "",
        pools=pools,
        policies=policies,
        refused=refused,
        steps=steps,
        file=reader.file,
        line=reader.line(node),
    )


def _options(reader: _Reader, node: yaml.Node, key: str, keys: tuple[str, ...]) -> dict[str, Any]:
    known = reader.known(node, key, f"a mapping of {', '.join(keys)}", keys)
    return {word: reader.value(value_node) for word, value_node in known.items()}


def _step(reader: _Reader, node: yaml.Node) -> Step:
    words = (*VERBS, *EXPECTATIONS, "refused", "note")
    parts = reader.known(node, "step", "a mapping: one verb, then what must hold", words)
    verbs = [word for word in parts if word in VERBS]
    if len(verbs) != 1:
        got = " and ".join(verbs) if verbs else "no verb"
        reader.fail(node, "step", got, f"exactly one verb of {', '.join(VERBS)}")
    verb = verbs[0]
    expectations: dict[str, Any] = {
        word: _EXPECTATION_READERS[word](reader, parts[word]) for word in EXPECTATIONS if word in parts
    }
    return Step(
        verb=verb,
        argument=_argument(reader, verb, parts[verb]),
        refused=reader.flag(parts["refused"], "refused") if "refused" in parts else False,
        note=reader.text(parts["note"], "note") if "note" in parts else "",
        line=reader.line(node),
        **expectations,
    )


def _argument(reader: _Reader, verb: str, node: yaml.Node) -> Any:
    if verb in _ID_VERBS:
        return reader.text(node, verb, "a request's id")
    if verb in POOL_VERBS:
        return reader.text(node, verb, "the name of a pool")
    if verb == "restart":
        return reader.text(node, verb, "all, coordinator or the name of a pool")
    if verb == "advance":
        value = reader.value(node)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf"):
            reader.fail(node, verb, value, "seconds, 0 or more")
        return value
    needed = _MAPPING_VERBS[verb]
    if needed:
        parts = reader.known(node, verb, f"a mapping of {' and '.join(needed)}", needed)
        for word in needed:
            if word not in parts:
                reader.fail(
                    node,
                    f"{verb}.{word}",
                    MISSING,
                    f"a mapping of {' and '.join(needed)}",
                )
    return {word: reader.value(item) for word, item in reader.entries(node, verb, "a mapping").items()}


def _expected_states(reader: _Reader, node: yaml.Node) -> dict[str, str]:
    states: dict[str, str] = {}
    for request, item in reader.entries(node, "expect", "a mapping of ids to states").items():
        state = reader.text(item, f"expect.{request}", "a state")
        word, at, pool = state.partition("@")
        if word not in STATES or (at and (word not in POOLED_STATES or not pool)):
            reader.fail(
                item,
                f"expect.{request}",
                state,
                f"one of {', '.join(STATES)} ({_POOLED})",
            )
        states[request] = state
    return states


def _expected_reasons(reader: _Reader, node: yaml.Node) -> dict[str, str]:
    causes: dict[str, str] = {}
    for request, item in reader.entries(node, "reason", "a mapping of ids to causes").items():
        causes[request] = reader.text(item, f"reason.{request}", "a cause")
        if causes[request] not in CAUSES:
            reader.fail(
                item,
                f"reason.{request}",
                causes[request],
                f"one of {', '.join(CAUSES)}",
            )
    return causes


def _expected_queues(reader: _Reader, node: yaml.Node) -> dict[str, list[str]]:
    queues: dict[str, list[str]] = {}
    for pool, item in reader.entries(node, "queue", "a mapping of pools to ids in order").items():
        ids = reader.items(item, f"queue.{pool}", "a list of ids in order")
        queues[pool] = [reader.text(one, f"queue.{pool}", "a request's id") for one in ids]
    return queues


def _amounts_of(what: str, of: str) -> Callable[[_Reader, yaml.Node], dict[str, dict[str, int]]]:
    def read(reader: _Reader, node: yaml.Node) -> dict[str, dict[str, int]]:
        amounts: dict[str, dict[str, int]] = {}
        for owner, item in reader.entries(node, what, f"a mapping of {of} to amounts").items():
            amounts[owner] = {}
            for key, number in reader.entries(
                item, f"{what}.{owner}", "a mapping of keys to amounts"
            ).items():
                value = reader.value(number)
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    reader.fail(number, f"{what}.{owner}.{key}", value, "an integer, 0 or more")
                amounts[owner][key] = value
        return amounts

    return read


_EXPECTATION_READERS: dict[str, Callable[[_Reader, yaml.Node], Any]] = {
    "expect": _expected_states,
    "usage": _amounts_of("usage", "pools"),
    "queue": _expected_queues,
    "reason": _expected_reasons,
    "resources": _amounts_of("resources", "ids"),
}
