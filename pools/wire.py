"""The bytes between clients and actors: requests of operations, their results, the long poll, and errors.

Everything is msgpack of plain builtin types with a protocol version, never one of our classes: an actor runs the
code of the job that created it, which may be another than its caller's (docs/protocol.md). One request carries many
operations; each has its own result, in order. An error travels as a mapping and is raised again as the class of
`ray_pools.errors` that it was.

    request    {"v": 1, "ops": [{"op": name, ...}, ...]}
    response   {"v": 1, "results": [{"ok": value} | {"error": error}, ...]}, or {"v": v, "error": error} for all
    wait       {"v": 1, "client": id, "after": seq, "timeout_s": s} -> {"v": 1, "seq": n, "changes": [view, ...]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote, unquote

import msgpack

from . import errors
from .errors import MISSING, BadInput, PoolsError, ProtocolMismatch, Refused, SlotError, SlotRejected, shown
from .limits import BATCH_MAX, MESSAGE_MAX_BYTES

PROTOCOL = 1

Wire = dict[str, Any]

_SHOWN_AS_IT_IS_MAX_CHARS = 80
_GROUPS = "ray-pools/"


# --- names of actors and of placement groups


def coordinator_actor_name() -> str:
    """The coordinator's name in its Ray namespace."""
    return "ray-pools:coordinator"


def pool_actor_name(pool: str) -> str:
    """The name of a pool's actor in its Ray namespace."""
    return f"ray-pools:pool:{pool}"


def group_prefix(namespace: str, pool: str | None = None) -> str:
    """What the names of all placement groups of a namespace's pools, or of one of them, start with."""
    start = f"{_GROUPS}{quote(namespace, safe='')}/"
    return start if pool is None else f"{start}{quote(pool, safe='')}/"


def group_name(namespace: str, pool: str, id: str, k: int) -> str:
    """The name of one attempt's placement group, unique in the cluster."""
    return f"{group_prefix(namespace, pool)}{quote(id, safe='')}/{k}"


def group_of(name: str) -> tuple[str, str, str, int] | None:
    """(namespace, pool, request, attempt) of a group's name; None for one that is no pool's."""
    parts = name.removeprefix(_GROUPS).split("/")
    if not name.startswith(_GROUPS) or len(parts) != 4 or not parts[3].isdecimal():
        return None
    namespace, pool, id, k = (unquote(part) for part in parts)
    return namespace, pool, id, int(k)


# --- whole messages


def pack(message: Mapping[str, Any], field: str = "message") -> bytes:
    """One message as bytes. BadInput when it is too large, or holds what the wire can't carry."""
    try:
        packed: bytes = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise BadInput(
            field,
            f"{type(problem).__name__}: {problem}",
            "only text, bytes, numbers below 2**63, true, false, null, lists and mappings",
        ) from None
    return _within_limit(packed, field)


def unpack(data: bytes, field: str = "message") -> Wire:
    """The mapping that `pack` wrote. BadInput when it is too large, or is no such thing."""
    _within_limit(data, field)
    try:
        message = msgpack.unpackb(data)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as problem:
        raise BadInput(
            field, data[:40], f"one msgpack mapping ({type(problem).__name__}: {problem})"
        ) from None
    if not isinstance(message, dict):
        raise BadInput(field, message, "one msgpack mapping")
    return message


def _within_limit(data: bytes, field: str) -> bytes:
    if len(data) > MESSAGE_MAX_BYTES:
        raise BadInput(
            field, f"{len(data)} bytes", f"at most {MESSAGE_MAX_BYTES} bytes in one call: send less at a time"
        )
    return data


def _same_version(message: Wire, peer: str) -> None:
    theirs = message.get("v")
    if theirs != PROTOCOL or isinstance(theirs, bool):
        raise ProtocolMismatch(PROTOCOL, theirs, peer)


# --- requests and their results


def encode_request(ops: Iterable[Mapping[str, Any]]) -> bytes:
    """The operations of one call. BadInput over 64 MiB."""
    return pack({"v": PROTOCOL, "ops": [dict(op) for op in ops]}, "request")


def decode_request(data: bytes) -> list[Wire]:
    """The operations of a call. ProtocolMismatch for another version; BadInput for what is no request."""
    message = unpack(data, "request")
    _same_version(message, "the caller")
    ops = message.get("ops")
    if not isinstance(ops, list) or not 0 < len(ops) <= BATCH_MAX:
        raise BadInput("ops", ops if ops is not None else MISSING, f"a list of 1 to {BATCH_MAX} operations")
    for index, op in enumerate(ops):
        if not isinstance(op, dict) or not isinstance(op.get("op"), str):
            raise BadInput(f"ops[{index}]", op, "a mapping with the operation's name under op")
    return ops


def ok(value: Any) -> Wire:
    """The result of an operation that was done."""
    return {"ok": value}


def failed(problem: BaseException) -> Wire:
    """The result of an operation that was not."""
    return {"error": error_to_wire(problem)}


def encode_response(results: Sequence[Mapping[str, Any]]) -> bytes:
    """One result (`ok` or `failed`) per operation, in order."""
    return pack({"v": PROTOCOL, "results": list(results)}, "response")


def encode_failure(problem: BaseException) -> bytes:
    """The response when nothing of a request (or wait) could be looked at, such as one of another version."""
    return pack({"v": PROTOCOL, "error": error_to_wire(problem)}, "response")


def decode_response(data: bytes, count: int, peer: str = "the actor") -> list[Wire]:
    """The result of each of the `count` operations, `{"ok": value}` or `{"error": error}`.

    Raises what `encode_failure` was given; ProtocolMismatch for another version.
    """
    message = unpack(data, "response")
    _whole_failure(message, peer)
    results = message.get("results")
    if not isinstance(results, list) or len(results) != count:
        raise PoolsError(f"{peer} gave an answer that is none: {count} results were due")
    return results


def value_of(result: Wire) -> Any:
    """What an operation answered; raises the error if it was one."""
    if "error" in result:
        raise_error(result["error"])
    return result["ok"]


def _whole_failure(message: Wire, peer: str) -> None:
    """Raises the error of a response that has one for all; ProtocolMismatch first."""
    error = message.get("error")
    if isinstance(error, dict) and error.get("type") == "protocol":
        # seen from here, what the other side calls its own version is theirs
        details = error.get("details") or {}
        raise ProtocolMismatch(PROTOCOL, details.get("ours", message.get("v")), peer)
    _same_version(message, peer)
    if error is not None:
        raise_error(error)


# --- the long poll


class Wait(NamedTuple):
    """What a client waits for: changes after a sequence number, of its own requests and of those of others (ids)."""

    client: str
    after: int
    timeout_s: float
    ids: tuple[str, ...] = ()


def encode_wait(client: str, after: int, timeout_s: float, ids: Sequence[str] = ()) -> bytes:
    message = {"v": PROTOCOL, "client": client, "after": after, "timeout_s": timeout_s}
    return pack({**message, "ids": list(ids)} if ids else message, "wait")


def decode_wait(data: bytes) -> Wait:
    """What the caller waits for. ProtocolMismatch for another version; BadInput for what is no wait."""
    message = unpack(data, "wait")
    _same_version(message, "the caller")
    client, after, timeout_s = message.get("client"), message.get("after"), message.get("timeout_s")
    if not isinstance(client, str):
        raise BadInput("client", client, "the client's id")
    if isinstance(after, bool) or not isinstance(after, int) or after < 0:
        raise BadInput("after", after, "a sequence number, 0 or more")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 <= timeout_s <= 3600:
        raise BadInput("timeout_s", timeout_s, "seconds, from 0 to 3600")
    ids = message.get("ids", [])
    if not isinstance(ids, list) or len(ids) > BATCH_MAX or not all(isinstance(id, str) for id in ids):
        raise BadInput("ids", ids, f"a list of at most {BATCH_MAX} requests' ids, or left out")
    return Wait(client, after, float(timeout_s), tuple(ids))


def encode_changes(seq: int, changes: Sequence[Mapping[str, Any]]) -> bytes:
    return pack({"v": PROTOCOL, "seq": seq, "changes": list(changes)}, "response")


def decode_changes(data: bytes, peer: str = "the actor") -> tuple[int, list[Wire]]:
    """The sequence number to wait after next, and each changed request's view."""
    message = unpack(data, "response")
    _whole_failure(message, peer)
    seq, changes = message.get("seq"), message.get("changes")
    if not isinstance(seq, int) or not isinstance(changes, list):
        raise PoolsError(f"{peer} gave an answer that is none: a seq and changes were due")
    return seq, changes


# --- errors

# "slot" errors and the like are told apart by class name; these are the names that have their own form
_BY_CLASS_NAME: dict[str, type[PoolsError]] = {
    found.__name__: found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, PoolsError)
}


class _Shown:
    """A value that was only shown, not sent: it looks the same in a message."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def error_to_wire(problem: BaseException) -> Wire:
    """Any exception as plain values. One that is not ours becomes `internal`, with its class and text only."""
    if isinstance(problem, BadInput):
        sent: Wire = {"type": "bad_input", "field": problem.field, "expected": problem.expected}
        sent["where"] = problem.where
        if problem.value is not MISSING:
            sent.update(_value_to_wire(problem.value))
    elif isinstance(problem, Refused):
        sent = {"type": "refused", "code": problem.code, "details": _plain(problem.details)}
    elif isinstance(problem, ProtocolMismatch):
        sent = {"type": "protocol", "details": {"ours": problem.ours, "theirs": _plain(problem.theirs)}}
    elif isinstance(problem, SlotRejected):
        sent = {"type": "slot", "id": problem.request_id, "details": _plain(problem.causes)}
    elif isinstance(problem, SlotError):
        sent = {"type": "slot", "id": problem.request_id, "details": {"cause": problem.cause}}
    elif isinstance(problem, errors.Unreachable):
        sent = {"type": "unreachable"}
    elif isinstance(problem, PoolsError):
        sent = {"type": "error"}
    else:
        return {"type": "internal", "message": f"{type(problem).__name__}: {shown(str(problem), 500)}"}
    return {**sent, "class": type(problem).__name__, "message": str(problem)}


def error_from_wire(error: Mapping[str, Any]) -> PoolsError:
    """The error that `error_to_wire` wrote down; an unknown kind becomes a plain PoolsError with its message."""
    kind, message = error.get("type"), str(error.get("message", ""))
    details = error.get("details") or {}
    if kind == "bad_input":
        value = _Shown(error["shown"]) if "shown" in error else error.get("value", MISSING)
        return BadInput(
            str(error.get("field")), value, str(error.get("expected")), str(error.get("where", ""))
        )
    if kind == "refused":
        return Refused(str(error.get("code")), message, details)
    if kind == "protocol":
        return ProtocolMismatch(details.get("theirs"), details.get("ours"))
    found = _BY_CLASS_NAME.get(str(error.get("class")), PoolsError)
    if kind == "slot" and issubclass(found, SlotRejected):
        return found(str(error.get("id")), details)
    if kind == "slot" and issubclass(found, SlotError):
        return found(str(error.get("id")), str(details.get("cause", "")))
    if kind == "unreachable":
        return errors.Unreachable(message)
    if kind == "internal":
        return PoolsError(f"an error inside the actor: {message}")
    return PoolsError(message)


def raise_error(error: Mapping[str, Any]) -> NoReturn:
    """Raises the error that `error_to_wire` wrote down."""
    raise error_from_wire(error)


def _value_to_wire(value: object) -> Wire:
    """A short plain value as it is, anything else only as an error shows it."""
    if value is None or isinstance(value, (bool, float)):
        return {"value": value}
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return {"value": value}
    if isinstance(value, str) and len(value) <= _SHOWN_AS_IT_IS_MAX_CHARS and _packs(value):
        return {"value": value}
    return {"shown": shown(value)}


def _plain(value: Any) -> Any:
    """The value if the wire can carry it, else what an error shows of it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if _packs(value) else shown(value)


def _packs(value: object) -> bool:
    try:
        msgpack.packb(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True
