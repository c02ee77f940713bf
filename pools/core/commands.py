"""What enters from outside, checked before anything changes: submissions as plain values of a message."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.errors import BadInput
from ray_pools.limits import (
    CHANGES_MAX,
    KEYS_MAX,
    OPTIONS_MAX_CHARS,
    RETRIES_MAX,
    TOKEN_MAX_BYTES,
    check_integer,
    check_name,
    check_seconds,
    name_problem,
)

# kinds of a change -> the types of what follows, and how that is written
_SHAPES: dict[str, tuple[list[type], str]] = {
    "pool": ([dict, str], "config, uid"),
    "policy": ([dict], "policy"),
    "unpool": ([str], "name"),
    "unpolicy": ([str, str], "requester, pool"),
    "requester": ([str, dict], "name, {key_sha256}"),
    "unrequester": ([str], "name"),
    "operators": ([dict], "{key_sha256} or {}"),
    "limits": ([dict], "{name: number}"),
    "lease": ([dict], "{name: seconds}"),
    "prewarm": ([dict], "{name: seconds}"),
}


class Submission(NamedTuple):
    """A request as it was sent; `token` is already the hash that the log holds."""

    id: str
    requester: str
    amounts: dict[str, int]
    preemptible: bool
    retries: int
    lease_s: float
    options: dict[str, Any]
    token: bytes
    client: str
    made_at: float | None


def token_hash(token: object) -> bytes:
    """What the log holds of a client's secret; b"" for none. BadInput for what is no secret."""
    if token is None or token == b"":
        return b""
    if not isinstance(token, bytes) or len(token) > TOKEN_MAX_BYTES:
        raise BadInput("token", type(token).__name__, f"the request's secret, up to {TOKEN_MAX_BYTES} bytes")
    return hashlib.blake2b(token, digest_size=16).digest()


def submission(op: Mapping[str, Any]) -> Submission:
    """The submission that a message holds (docs/rules.md section 2).

    Raises:
        BadInput: names the field, its value and what would be right.
    """
    amounts = op.get("amounts")
    if not isinstance(amounts, dict) or not 0 < len(amounts) <= KEYS_MAX:
        raise BadInput("amounts", amounts, f"a mapping of 1 to {KEYS_MAX} keys to integers")
    for key, amount in amounts.items():
        check_name("amounts key", key)
        check_integer(f"amounts.{key}", amount)
    if amounts.get("step_run") != 1:
        raise BadInput("amounts.step_run", amounts.get("step_run"), "1: one concurrent slot for each request")
    preemptible = op.get("preemptible", True)
    if not isinstance(preemptible, bool):
        raise BadInput("preemptible", preemptible, "true or false")
    options = op.get("options") or {}
    if not isinstance(options, dict) or len(repr(options)) > OPTIONS_MAX_CHARS:
        raise BadInput("options", options, f"a mapping of at most {OPTIONS_MAX_CHARS} characters")
    client = op.get("client", "")
    if client != "":
        check_name("client", client)
    return Submission(
        check_name("id", op.get("id")),
        check_name("requester", op.get("requester")),
        dict(amounts),
        preemptible,
        check_integer("retries", op.get("retries", 0), 0, RETRIES_MAX),
        check_seconds("lease_s", op.get("lease_s") or 0.0),
        options,
        token_hash(op.get("token")),
        client,
        _made_at(op.get("made_at")),
    )


def _made_at(made_at: object) -> float | None:
    """When its client made it, by its own wall clock; older clients don't say."""
    if made_at is None:
        return None
    if isinstance(made_at, bool) or not isinstance(made_at, (int, float)) or not 0 <= made_at < 1e11:
        raise BadInput("made_at", made_at, "seconds since 1970")
    return float(made_at)


def caller(op: Mapping[str, Any]) -> str:
    """Who says to be calling, for the log; a claim and no proof. "" where nobody does, or nobody can be called so."""
    for field in ("operator", "by", "requester"):
        said = op.get(field)
        if said and name_problem(said) is None:
            return str(said)
    return ""


def about(op: Mapping[str, Any]) -> str:
    """The request that an operation is about, for the log."""
    id = op.get("id")
    return str(id) if name_problem(id) is None and op.get("op") != "change" else ""


def coming(op: Mapping[str, Any]) -> dict[str, list[str]]:
    """Requester to ids of the requests that a client is about to submit."""
    requesters = op.get("requesters")
    if not isinstance(requesters, dict):
        raise BadInput("requesters", requesters, "a mapping of requesters to lists of ids")
    for requester, sent in requesters.items():
        check_name("requesters", requester)
        ids({"ids": sent})
    return requesters


def ids(op: Mapping[str, Any]) -> list[str]:
    """The ids that an operation asks about."""
    sent = op["ids"]
    if not isinstance(sent, list) or not all(isinstance(id, str) for id in sent):
        raise BadInput("ids", sent, "a list of requests' ids")
    return sent


def renewals(op: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """(id, hash of its token) of the requests whose leases are to be renewed."""
    sent = op["items"]
    if not isinstance(sent, list) or not all(
        isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in sent
    ):
        raise BadInput("items", sent, "a list of [id, token]")
    return [(id, token_hash(token)) for id, token in sent]


def changes(sent: object) -> list[tuple[Any, ...]]:
    """The changes of pools and policies that a message holds; their values are judged by `check_config`."""
    if not isinstance(sent, list) or not 0 < len(sent) <= CHANGES_MAX:
        raise BadInput("changes", sent, f"a list of 1 to {CHANGES_MAX} changes")
    found: list[tuple[Any, ...]] = []
    for index, change in enumerate(sent):
        field = f"changes[{index}]"
        kind = change[0] if isinstance(change, list) and change and isinstance(change[0], str) else ""
        types, _ = _SHAPES.get(kind, ([], ""))
        if not types or [type(part) for part in change[1:]] != types:
            shapes = (f'["{kind}", {written}]' for kind, (_, written) in _SHAPES.items())
            raise BadInput(field, change, f"one of {', '.join(shapes)}")
        if kind == "pool":
            found.append(
                ("pool", PoolConfig.from_wire(change[1], field), check_name(f"{field} uid", change[2]))
            )
        elif kind == "policy":
            found.append(("policy", PolicyConfig.from_wire(change[1], field)))
        else:
            found.append(tuple(change))
    return found


def since(op: Mapping[str, Any]) -> int | None:
    """The version of the configuration that changes were made for; None where it does not matter."""
    return None if op.get("since") is None else check_integer("since", op["since"])
