"""The configuration file of `pools up`: YAML into a checked `Config` (docs/rules.md sections 1 and 9).

pydantic judges the form (known keys, types); `core.config_rules` judges the values and the rules between pools
and policies, as it does for a change at a running coordinator. The first thing that is wrong is told in one
error with file and line, key path, value, and what would be right.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from .core.access import check_access
from .core.advice import advice
from .core.config_rules import (
    DEFAULT_RESOURCES,
    POOL_SECONDS,
    PolicyConfig,
    PoolConfig,
    check_config,
    path_text,
)
from .core.timings import TIMINGS, check_timings
from .errors import MISSING, BadInput
from .limits import LIVE_REQUESTS, WAITING_PER_REQUESTER, check_name
from .settings import unknown_key
from .yaml_lines import YamlFile, read_yaml

STORE_ENV = "RAY_POOLS_STORE"
STORE_SCHEMES = ("sqlite", "redis", "rediss", "memory")

Seconds = Annotated[float, Field(strict=True)]
Amounts = dict[StrictStr, StrictInt]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _full_resources(value: object) -> object:
    """`GPU`, `[GPU]` and `[GPU, 1]` are one; `none` takes a default out; the defaults are filled in."""
    if not isinstance(value, Mapping):
        return value
    full: dict[Any, Any] = {key: list(pair) for key, pair in DEFAULT_RESOURCES.items()}
    for key, pair in value.items():
        if pair is None or pair == "none":
            full.pop(key, None)
        else:
            names = [pair] if isinstance(pair, str) else pair
            full[key] = [*names, 1] if isinstance(names, (list, tuple)) and len(names) == 1 else names
    return full


class PlacementModel(_Model):
    """How a pool's grants become placement groups.

    resources: key -> [Ray resource, divisor]; keys without one are only counted. labels: what nodes must carry.
    node: the most that one node has, per key: a request beyond it is split into bundles of at most that.
    strategy: of the bundles. provision_timeout_s: how long a group may wait for its nodes. warm: amounts that
    are kept up even when nobody asks.
    """

    resources: Annotated[dict[StrictStr, Any], BeforeValidator(_full_resources)] = Field(
        default_factory=dict, validate_default=True
    )
    labels: dict[StrictStr, StrictStr] = {}
    node: Amounts = {}
    strategy: StrictStr = "PACK"
    provision_timeout_s: Seconds = 900.0
    warm: Amounts = {}


def _none_word(value: object) -> object:
    return None if value == "none" else value


class PoolModel(_Model):
    """One pool as the file has it. A capacity of null takes the key out: it is not metered."""

    capacity: dict[StrictStr, StrictInt | None]
    queueing: StrictStr = "backfill"
    starvation_after_s: Seconds = 300.0
    grace_s: Seconds = 30.0
    min_runtime_s: Seconds = 0.0
    placement: Annotated[PlacementModel | None, BeforeValidator(_none_word)] = Field(
        default_factory=PlacementModel
    )

    def core(self, name: str) -> PoolConfig:
        """The same as the core holds it."""
        return PoolConfig(
            name=name,
            capacity={key: amount for key, amount in self.capacity.items() if amount is not None},
            queueing=self.queueing,
            starvation_after_s=self.starvation_after_s,
            grace_s=self.grace_s,
            min_runtime_s=self.min_runtime_s,
            placement=self.placement.model_dump() if self.placement else None,
        )


class PolicyModel(_Model):
    """One policy as the file has it."""

    pool: StrictStr
    requester: StrictStr
    priority: StrictInt = 0
    reserved: Amounts = {}
    limit: Amounts = {}

    def core(self) -> PolicyConfig:
        """The same as the core holds it."""
        return PolicyConfig(self.pool, self.requester, self.priority, dict(self.reserved), dict(self.limit))


class PrewarmModel(_Model):
    """period_s: how often the wish for nodes is sent again. linger_s: how long it stays after the demand ended."""

    period_s: Seconds = TIMINGS["prewarm"]["period_s"]
    linger_s: Seconds = TIMINGS["prewarm"]["linger_s"]


class LeaseModel(_Model):
    """default_s: a client's lease when it names none. renew_s: how often a client renews."""

    default_s: Seconds = TIMINGS["lease"]["default_s"]
    renew_s: Seconds = TIMINGS["lease"]["renew_s"]


class KeyModel(_Model):
    """key_sha256: of the key that is needed, as `pools key new` prints it. The key itself is in no configuration."""

    key_sha256: StrictStr


class OperatorsModel(_Model):
    """key_sha256: of the key that operators' commands need; none: they need none."""

    key_sha256: StrictStr | None = None


class LimitsModel(_Model):
    """waiting_per_requester: how many requests of one requester may wait. live_requests: how many may wait or hold."""

    waiting_per_requester: StrictInt = WAITING_PER_REQUESTER
    live_requests: StrictInt = LIVE_REQUESTS


class Config(_Model):
    """Everything `pools up` needs. `store` is a full address once loaded: sqlite:///directory, redis://..."""

    namespace: StrictStr = "pools"
    store: StrictStr = ""
    pools: dict[StrictStr, PoolModel]
    policies: list[PolicyModel] = []
    prewarm: PrewarmModel = Field(default_factory=PrewarmModel)
    lease: LeaseModel = Field(default_factory=LeaseModel)
    requesters: dict[StrictStr, KeyModel] = {}
    operators: OperatorsModel = Field(default_factory=OperatorsModel)
    limits: LimitsModel = Field(default_factory=LimitsModel)

    def access(self) -> dict[str, dict[str, Any]]:
        """Keys and limits as the coordinator takes them: `requesters`, `operators`, `limits`."""
        return {
            "requesters": {name: key.model_dump() for name, key in self.requesters.items()},
            "operators": self.operators.model_dump(exclude_none=True),
            "limits": self.limits.model_dump(),
        }

    def timings(self) -> dict[str, dict[str, float]]:
        """The sections `lease` and `prewarm`, as the coordinator takes them."""
        return {"lease": self.lease.model_dump(), "prewarm": self.prewarm.model_dump()}

    def timing_options(self) -> dict[str, float]:
        """The same as options of the coordinator: `lease_default_s` and so on."""
        return {
            f"{section}_{name}": at for section, found in self.timings().items() for name, at in found.items()
        }

    def core_pools(self) -> dict[str, PoolConfig]:
        """Name to pool, in the file's order."""
        return {name: pool.core(name) for name, pool in self.pools.items()}

    def core_policies(self) -> list[PolicyConfig]:
        """The policies, in the file's order."""
        return [policy.core() for policy in self.policies]


def load_config(path: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """Reads and checks one file. BadInput for whatever is wrong; nothing is created.

    The store is the file's, else the environment's RAY_POOLS_STORE, else a folder per namespace under the
    user's state directory. A relative folder counts from where it was named: the file's folder, the working one.
    """
    return load_with_warnings(path, environ)[0]


def load_with_warnings(
    path: str | Path, environ: Mapping[str, str] | None = None
) -> tuple[Config, list[str]]:
    """As `load_config`, with what is legal and surely not meant, each with file and line (`core.advice`)."""
    file = read_yaml(path, "CONFIG")
    config = parse_config(file, Path(path).parent, environ)
    found = advice(config.core_pools(), config.core_policies())
    return config, [f"{_where(file, each.path)}: {each.text}" for each in found]


def parse_config(file: YamlFile, base: Path, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration that a file holds; `base` is where a relative store counts from. BadInput as `load_config`."""
    env = os.environ if environ is None else environ
    if not isinstance(file.data, Mapping):
        raise BadInput(
            "CONFIG", file.data, f"a mapping with {', '.join(Config.model_fields)}", file.where(())
        )
    config = _config_of(file)
    _check_values(config, file)
    if config.store:
        store = store_address(config.store, base, "store", file.where(("store",)))
    elif env.get(STORE_ENV):
        store = store_address(env[STORE_ENV], Path(), STORE_ENV)
    else:
        store = default_store(config.namespace, env)
    return config.model_copy(update={"store": store})


def default_store(namespace: str, environ: Mapping[str, str]) -> str:
    """One folder per namespace: two namespaces on one machine never share a log."""
    state = environ.get("XDG_STATE_HOME", "")
    root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return f"sqlite://{root / 'ray-pools' / quote(namespace, safe='')}"


def store_address(store: str, base: Path, field: str = "store", where: str = "") -> str:
    """A full address out of an address or a folder; the actors' own working directory must not matter."""
    from .store.redis_wire import masked, parse_place

    scheme, colon, rest = store.partition("://")
    expected = "a folder, or an address such as sqlite:///var/lib/ray-pools or redis://host:6379/0"
    if not store.isprintable() or not store.strip() or len(store) > 4096:
        raise BadInput(field, masked(store), expected, where)
    if not colon:
        return f"sqlite://{_one_slash(os.path.abspath(base / Path(store).expanduser()))}"
    if scheme not in STORE_SCHEMES:
        raise BadInput(field, masked(store), f"{expected} (schemes: {', '.join(STORE_SCHEMES)})", where)
    if scheme == "sqlite" and not rest.startswith("/"):
        raise BadInput(
            field, store, "sqlite:// followed by a folder from the root on: sqlite:///var/...", where
        )
    if scheme == "sqlite":
        return f"sqlite://{_one_slash(rest)}"
    if scheme in ("redis", "rediss"):
        try:
            parse_place(store)
        except BadInput as problem:
            raise BadInput(field, problem.value, problem.expected, where) from None
    return store


def _one_slash(path: str) -> str:
    """From the root on by one slash; with two, which POSIX allows, a path could be taken for a host's."""
    return f"/{path.lstrip('/')}"


def pool_options(options: object, field: str = "pool") -> dict[str, Any]:
    """A pool's options under their full names: scenario files write `grace`, configurations `grace_s`; both are
    taken. Values are as they were; a key that is neither, or both spellings at once, is BadInput.
    """
    if not isinstance(options, Mapping):
        raise BadInput(field, options, f"a mapping with {', '.join(PoolModel.model_fields)}")
    short = {name.removesuffix("_s"): name for name in POOL_SECONDS}
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = short.get(key, key)
        if name not in PoolModel.model_fields:
            expected = unknown_key(key, list(PoolModel.model_fields))
            raise BadInput((f"{field}." if field else "") + str(key), value, expected)
        if name in found:
            raise BadInput(
                (f"{field}." if field else "") + str(key),
                value,
                f"one of {name} and {name.removesuffix('_s')}",
            )
        found[name] = value
    return found


def _config_of(file: YamlFile) -> Config:
    data = dict(file.data)
    if isinstance(data.get("pools"), Mapping):
        data["pools"] = {name: _pool_options_in(file, name, raw) for name, raw in data["pools"].items()}
    try:
        return Config.model_validate(data)
    except ValidationError as problem:
        raise _first_error(problem, file) from None


def _pool_options_in(file: YamlFile, name: str, raw: object) -> dict[str, Any]:
    """`pool_options`, with errors that name the place in the file."""
    path: tuple[str, ...] = ("pools", name)
    try:
        return pool_options(raw, "")
    except BadInput as problem:
        path = (*path, problem.field) if problem.field else path
        raise BadInput(path_text(path), problem.value, problem.expected, file.where(path)) from None


_EXPECTED_BY_TYPE = {
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "list_type": "a list",
    "string_type": "text (a number or a yes/no word needs quotes)",
    "int_type": "an integer",
    "float_type": "a number",
}


def _first_error(problem: ValidationError, file: YamlFile) -> BadInput:
    """An unknown key goes before a missing one: it usually is the missing one, misspelt."""
    errors = problem.errors(include_url=False, include_context=False)
    error = min(errors, key=lambda each: each["type"] != "extra_forbidden")
    path = tuple(part for part in error["loc"] if part != "[key]")
    where = _where(file, path)
    known = list(_model_at(path[:-1]).model_fields)
    if error["type"] == "missing":
        return BadInput(path_text(path), MISSING, f"needed; the keys here are {', '.join(known)}", where)
    if error["type"] == "extra_forbidden":
        return BadInput(path_text(path), error["input"], unknown_key(path[-1], known), where)
    if error["type"] == "float_type" and (number := _as_number(error["input"])):
        return BadInput(
            path_text(path), error["input"], f"a number, which YAML reads as one only as {number}", where
        )
    return BadInput(
        path_text(path), error["input"], _EXPECTED_BY_TYPE.get(error["type"], error["msg"]), where
    )


def _as_number(value: object) -> str:
    """How YAML wants what it took for text, such as `1e3`: with a point and a sign; "" for what is no number."""
    if not isinstance(value, str):
        return ""
    try:
        text = repr(float(value.replace("_", "")))
    except ValueError:
        return ""
    if not text[-1].isdecimal():  # nan and infinities are no seconds
        return ""
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}e{exponent if exponent[0] in '+-' else f'+{exponent}'}"


def _model_at(path: tuple[str | int, ...]) -> type[_Model]:
    """The model that stands at a key path; the top one where there is none."""
    if path[2:3] == ("placement",):
        return PlacementModel
    by_name: dict[str | int, type[_Model]] = {
        "pools": PoolModel,
        "policies": PolicyModel,
        "prewarm": PrewarmModel,
        "lease": LeaseModel,
        "requesters": KeyModel,
        "operators": OperatorsModel,
        "limits": LimitsModel,
    }
    return by_name.get(path[0], Config) if path else Config


def _check_values(config: Config, file: YamlFile) -> None:
    check_name("namespace", config.namespace, file.where(("namespace",)))
    for problem in [
        *check_timings(config.timings()),
        *check_access(**config.access()),
        *check_config(config.core_pools(), config.core_policies()),
    ]:
        raise problem.error(_where(file, problem.path))


def _where(file: YamlFile, path: tuple[str | int, ...]) -> str:
    """file:line of a key path, also where the file has the shorter name of an option."""
    if path and path not in file.lines:
        shorter = (*path[:-1], str(path[-1]).removesuffix("_s"))
        return file.where(shorter)
    return file.where(path)
