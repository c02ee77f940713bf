"""What a client submits, checked before anything is sent: BadInput names the argument, its value, what is right."""

from __future__ import annotations

import inspect
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any, TypedDict, TypeVar

from .. import wire
from ..core.bundles import validate_options
from ..errors import BadInput
from ..limits import (
    RETRIES_MAX,
    SUBMIT_MANY_MAX,
    TOKEN_MAX_BYTES,
    TOKEN_MIN_BYTES,
    check_integer,
    check_name,
    check_seconds,
    lease_problem,
)
from ..settings import ResourceSettings, unknown_key

DEFAULT_LEASE_S = 60.0
"""Survives a restart of any actor, and an outage of Ray's GCS, several times over."""

TOKEN_BYTES = 16

_FIELD_OF_SETTING = {"gpu_count": "gpus", "cpu_count": "cpus"}
_AMOUNT_ARGUMENTS = ("gpus", "cpus", "memory", "pool_resources")

BundleSettings = ResourceSettings | Mapping[str, Any]


def check_token(field: str, token: object) -> None:
    """BadInput if it can't be a request's secret; it is not shown. None is none."""
    if token is not None and not (
        isinstance(token, bytes) and TOKEN_MIN_BYTES <= len(token) <= TOKEN_MAX_BYTES
    ):
        expected = f"{TOKEN_MIN_BYTES} to {TOKEN_MAX_BYTES} bytes that nobody can guess"
        raise BadInput(field, type(token).__name__, expected)


@dataclass(frozen=True)
class Submission:
    """One request as its user writes it. Checked when made.

    requester: who asks. Either settings, or any of gpus, cpus (fractions allowed), memory ("16GiB"),
    pool_resources (licences and the like). preemptible: None means as the settings say, else true.
    retries: how often it queues again after a preemption. lease_s: seconds within which this client must renew
    it, which it does by itself while it lives, at least 1; None means what the pools' configuration says (60), 0 none:
    such a request outlives its client. bundles: for a gang, the parts of the request, each as settings or as a
    mapping of gpus, cpus, memory, pool_resources; without amounts of its own the request is their sum. strategy: how
    bundles lie on nodes (PACK, SPREAD, STRICT_PACK, STRICT_SPREAD). placement: "none" for a grant that only counts. id:
    made when left out; the same id with the same content is the same request. token: the request's secret, made
    when left out. expected_run_s: how long it will hold its slot, for estimates of waits; nothing is decided by it.
    """

    requester: str
    settings: ResourceSettings | None = None
    gpus: int | None = None
    cpus: int | float | str | Decimal | None = None
    memory: int | str | None = None
    pool_resources: Mapping[str, int] | None = None
    preemptible: bool | None = None
    retries: int = 0
    lease_s: float | None = None
    bundles: Sequence[BundleSettings] | None = None
    strategy: str | None = None
    placement: str | None = None
    id: str | None = None
    token: bytes | None = field(default=None, repr=False)
    expected_run_s: float | None = None

    def __post_init__(self) -> None:
        check_name("requester", self.requester)
        _check_settings(self.settings, {name: getattr(self, name) for name in _AMOUNT_ARGUMENTS})
        if self.preemptible is not None and not isinstance(self.preemptible, bool):
            raise BadInput("preemptible", self.preemptible, "true or false")
        check_integer("retries", self.retries, 0, RETRIES_MAX)
        if self.lease_s is not None and (expected := lease_problem(self.lease_s)) is not None:
            raise BadInput("lease_s", self.lease_s, expected)
        if self.expected_run_s is not None:
            check_seconds("expected_run_s", self.expected_run_s)
        check_token("token", self.token)
        if self.token is None:
            object.__setattr__(self, "token", secrets.token_bytes(TOKEN_BYTES))
        # what follows is kept, so that it is worked out once and is what was checked
        object.__setattr__(self, "id", uuid.uuid4().hex if self.id is None else check_name("id", self.id))
        object.__setattr__(self, "_made_at", time.time())
        object.__setattr__(self, "_parts", self._bundle_amounts())
        object.__setattr__(self, "_amounts", self._all_amounts())
        validate_options(self.amounts, self.options)

    @property
    def request_id(self) -> str:
        """The id, given or made."""
        assert self.id is not None
        return self.id

    @property
    def secret(self) -> bytes:
        """Who has it may release, cancel and renew the request, and confirm its stop."""
        assert self.token is not None
        return self.token

    @property
    def amounts(self) -> dict[str, int]:
        """Integer amounts per key (docs/rules.md section 2)."""
        found: dict[str, int] = self._amounts  # type: ignore[attr-defined]
        return found

    @property
    def options(self) -> dict[str, Any]:
        """What the request says about its placement, and how long it expects to run."""
        parts: list[dict[str, int]] = self._parts  # type: ignore[attr-defined]
        said = {
            "bundles": parts or None,
            "strategy": self.strategy,
            "placement": self.placement,
            "expected_run_s": self.expected_run_s,
        }
        return {name: value for name, value in said.items() if value is not None}

    @property
    def lease(self) -> float:
        """Seconds; 0 for none."""
        return self.lease_or(DEFAULT_LEASE_S)

    def lease_or(self, default_s: float) -> float:
        """Seconds, `default_s` where the request does not say; 0 for none."""
        return default_s if self.lease_s is None else float(self.lease_s)

    def operation(
        self, client_id: str, token: bytes, default_lease_s: float = DEFAULT_LEASE_S
    ) -> dict[str, Any]:
        """The coordinator's operation."""
        preemptible = self.preemptible
        if preemptible is None:
            preemptible = self.settings.preemptible if self.settings else True
        return {
            "op": "submit",
            "id": self.request_id,
            "requester": self.requester,
            "amounts": self.amounts,
            "preemptible": preemptible,
            "retries": self.retries,
            "lease_s": self.lease_or(default_lease_s),
            "options": self.options,
            "token": token,
            "client": client_id,
            # one that comes again long after it may not run again (docs/protocol.md, "Age")
            "made_at": self._made_at,  # type: ignore[attr-defined]
        }

    def _all_amounts(self) -> dict[str, int]:
        if self.settings is not None:
            return self.settings.amounts()
        if all(getattr(self, name) is None for name in _AMOUNT_ARGUMENTS):
            total: dict[str, int] = {"step_run": 1}
            parts: list[dict[str, int]] = self._parts  # type: ignore[attr-defined]
            for part in parts:
                for key, amount in part.items():
                    total[key] = total.get(key, 0) + amount
            return dict(sorted(total.items()))
        return _amounts(self.gpus, self.cpus, self.memory, self.pool_resources)

    def _bundle_amounts(self) -> list[dict[str, int]]:
        bundles = self.bundles
        if bundles is None:
            return []
        if isinstance(bundles, (str, bytes, Mapping)) or not isinstance(bundles, Sequence) or not bundles:
            raise BadInput("bundles", bundles, "a list of settings, one for each bundle, or left out")
        return [_one_bundle(f"bundles[{index}]", bundle) for index, bundle in enumerate(bundles)]


class RequestArguments(TypedDict, total=False):
    """What may be said of a request by keyword, wherever one is made (`Unpack[RequestArguments]`); the meaning is
    in `Submission`, of which these are the fields.
    """

    gpus: int | None
    cpus: int | float | str | Decimal | None
    memory: int | str | None
    pool_resources: Mapping[str, int] | None
    preemptible: bool | None
    retries: int
    lease_s: float | None
    bundles: Sequence[BundleSettings] | None
    strategy: str | None
    placement: str | None
    id: str | None
    token: bytes | None
    expected_run_s: float | None


_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_request_arguments(function: _Function) -> _Function:
    """Decorates a function with `**arguments: Unpack[RequestArguments]`: its help says which arguments that are."""
    signature = inspect.signature(function)
    shown = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    taken = {each.name for each in shown}
    shown += [
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type
        )
        for each in fields(Submission)
        if each.name in RequestArguments.__annotations__ and each.name not in taken
        # the secret is made here; whoever brings one knows of it
        if each.name != "token"
    ]
    shown.sort(key=lambda each: each.kind)
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    _, _, said = inspect.cleandoc(Submission.__doc__ or "").partition("\n\n")
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOf the request:\n\n{said}"
    return function


def submission_of(
    requester: str, settings: ResourceSettings | None, arguments: Mapping[str, Any]
) -> Submission:
    """The submission that a caller's arguments make. BadInput names the argument, one that there is not among them."""
    for name in arguments:
        if name not in RequestArguments.__annotations__:
            known = ["requester", "settings", *RequestArguments.__annotations__]
            raise BadInput(f"{name:.40}", arguments[name], unknown_key(name, known))
    return Submission(requester, settings, **arguments)


def as_submissions(given: Iterable[Submission | Mapping[str, Any]]) -> list[Submission]:
    """All of a batch. BadInput for the first that can't be one, or for more than one batch may have."""
    found = [as_submission(each, f"submissions[{index}]") for index, each in enumerate(given)]
    if len(found) > SUBMIT_MANY_MAX:
        raise BadInput("submissions", f"{len(found)} requests", f"at most {SUBMIT_MANY_MAX} in one call")
    return found


def room_op(given: Sequence[Submission]) -> dict[str, Any]:
    """Can all of them come? Asked before the first is sent."""
    ids: dict[str, list[str]] = {}
    for each in given:
        ids.setdefault(each.requester, []).append(each.request_id)
    return {"op": "room", "requesters": ids}


def check_room(results: Sequence[wire.Wire]) -> None:
    """Raises Refused if not. A coordinator of before can't tell: it refuses one by one."""
    try:
        wire.value_of(results[0])
    except BadInput as problem:
        if problem.field != "op":
            raise


def as_submission(given: Submission | Mapping[str, Any], place: str) -> Submission:
    """A submission, or the arguments of one as a mapping. BadInput names the place in the batch."""
    if isinstance(given, Submission):
        return given
    if not isinstance(given, Mapping):
        raise BadInput(place, given, "a Submission, or a mapping of its arguments")
    known = [each.name for each in fields(Submission)]
    for key in given:
        if key not in known:
            raise BadInput(f"{place}.{key!s:.40}", given[key], unknown_key(key, known))
    if "requester" not in given:
        raise BadInput(f"{place}.requester", None, "who asks")
    try:
        return Submission(**given)
    except BadInput as problem:
        raise BadInput(f"{place}.{problem.field}", problem.value, problem.expected) from None


def _check_settings(settings: object, amounts: Mapping[str, Any]) -> None:
    if settings is None:
        return
    if not isinstance(settings, ResourceSettings):
        raise BadInput("settings", settings, "a ResourceSettings")
    for name, value in amounts.items():
        if value is not None:
            raise BadInput(name, value, "left out where settings are given")


def amounts_of(
    settings: ResourceSettings | None, gpus: Any, cpus: Any, memory: Any, pool_resources: Any
) -> dict[str, int]:
    """Integer amounts per key, of settings or else of the single arguments. BadInput names the argument."""
    given = dict(zip(_AMOUNT_ARGUMENTS, (gpus, cpus, memory, pool_resources), strict=True))
    _check_settings(settings, given)
    return dict(settings.amounts()) if settings is not None else _amounts(*given.values())


def _amounts(gpus: Any, cpus: Any, memory: Any, pool_resources: Any) -> dict[str, int]:
    try:
        return ResourceSettings(gpus, cpus, memory, pool_resources).amounts()
    except BadInput as problem:
        argument = _FIELD_OF_SETTING.get(problem.field, problem.field)
        raise BadInput(argument, problem.value, problem.expected) from None


def _one_bundle(place: str, bundle: BundleSettings) -> dict[str, int]:
    """The amounts of one bundle. The slot that each request takes is the request's, not the bundle's."""
    if isinstance(bundle, ResourceSettings):
        found = bundle.amounts()
    elif isinstance(bundle, Mapping):
        for key in bundle:
            if key not in _AMOUNT_ARGUMENTS:
                raise BadInput(f"{place}.{key!s:.40}", bundle[key], unknown_key(key, _AMOUNT_ARGUMENTS))
        try:
            found = _amounts(*(bundle.get(name) for name in _AMOUNT_ARGUMENTS))
        except BadInput as problem:
            raise BadInput(f"{place}.{problem.field}", problem.value, problem.expected) from None
    else:
        raise BadInput(place, bundle, f"a mapping of {', '.join(_AMOUNT_ARGUMENTS)}, or ResourceSettings")
    found.pop("step_run")
    if not found:
        raise BadInput(place, bundle, "at least one amount above 0")
    return found
