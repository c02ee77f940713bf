"""Every error that this project raises on purpose, and the exit code that each means on the command line.

An error says whose fault it was and what would be right. Exit codes: 0 done, 1 the answer is no, 2 wrong use,
3 the cluster can't be reached. Errors travel between processes as (code, message, details), never as pickled
classes; they can be pickled all the same, since a task inside a slot may raise one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

SHOWN_MAX_CHARS = 80


class Missing(enum.Enum):
    """Stands for a value that is not there; an enum, so that it stays itself over pickling."""

    MISSING = "missing"


MISSING = Missing.MISSING


def shown(value: object, max_chars: int = SHOWN_MAX_CHARS) -> str:
    """A value as an error may show it: its repr, all printable, cut to about `max_chars` characters.

    Long text is cut before it is written out, so that a huge value costs nothing.
    """
    if isinstance(value, (str, bytes)) and len(value) > max_chars:
        return f"{_escaped(repr(value[: max_chars // 2]))[:max_chars]}... ({len(value)} characters)"
    if isinstance(value, int) and value.bit_length() > 4 * max_chars:
        return f"an integer of {value.bit_length()} bits"
    text = _escaped(repr(value))
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


class PoolsError(Exception):
    """The base of all errors here. `exit_code` is what the command line ends with."""

    exit_code = 1


class BadInput(PoolsError):
    """Wrong use: a value that can't be right, whatever the state of the pools. Nothing has changed.

    `field` is the key path or argument, `expected` says what would be right, `where` is the place
    (file:line). A `value` of MISSING says that the field is not there.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, expected: str, where: str = "") -> None:
        self.field, self.value, self.expected, self.where = field, value, expected, where
        said = f"{field} is missing" if value is MISSING else f"{field} = {shown(value)}"
        super().__init__(f"{said}: {expected}" + (f" ({where})" if where else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.expected, self.where)


class Refused(PoolsError):
    """A well-formed command that is refused as things stand. `code` is for programs, `details` for both."""

    exit_code = 1

    def __init__(self, code: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        self.code, self.message, self.details = code, message, dict(details or {})
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.message, self.details)


class Unreachable(PoolsError):
    """No running cluster, or none that answers with pools in this namespace."""

    exit_code = 3


class ProtocolMismatch(PoolsError):
    """Two processes of different protocol versions met; no command was carried out."""

    exit_code = 2

    def __init__(self, ours: object, theirs: object, peer: str = "the other side") -> None:
        self.ours, self.theirs, self.peer = ours, theirs, peer
        super().__init__(
            f"this process speaks protocol {shown(ours)}, {peer} speaks {shown(theirs)}: "
            "install the same version of ray-pools on both"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ours, self.theirs, self.peer)


class WaitTimeout(PoolsError):
    """The caller's own time to wait ran out. The request itself goes on as it was."""


class NoSlot(PoolsError):
    """`current_slot()` outside of a slot."""

    exit_code = 2


class SlotError(PoolsError):
    """A slot can't be used, or no longer. `request_id` names it, `cause` says why in a word or two."""

    summary = "the slot can't be used"

    def __init__(self, request_id: str, cause: str = "") -> None:
        self.request_id, self.cause = request_id, cause
        super().__init__(f"request {shown(request_id)}: {self.summary}" + (f" ({cause})" if cause else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.request_id, self.cause)


class SlotPreempted(SlotError):
    """The grant was stopped for another request, and no retries are left."""

    summary = "preempted"


class SlotCancelled(SlotError):
    """The request was cancelled, by its holder or by an operator."""

    summary = "cancelled"


class LeaseExpired(SlotError):
    """The lease ran out before it was renewed; the capacity may be somebody else's by now."""

    summary = "the lease ran out"


class SlotLost(SlotError):
    """The capacity behind the slot is gone: its node died or its placement group was removed."""

    summary = "the capacity behind the slot is gone"


class SlotOver(SlotError):
    """The slot was given back; it hands out no scheduling strategy any more (work sent there would hang)."""

    summary = "the slot is over"


class SlotRejected(SlotError):
    """No pool can ever grant the request. `causes` has each pool's cause (docs/rules.md section 3)."""

    summary = "rejected by every pool"

    def __init__(self, request_id: str, causes: Mapping[str, str] | None = None) -> None:
        self.causes = dict(causes or {})
        super().__init__(
            request_id, ", ".join(f"{pool}: {cause}" for pool, cause in sorted(self.causes.items()))
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.request_id, self.causes)
