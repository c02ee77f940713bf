"""Who may do what: keys of requesters and of operators, and what is logged of those who were refused.

Ray has no users, and whoever reaches a cluster can run code in it. So none of this stops someone who means harm and
knows Ray (docs/protocol.md, "Who may do what"); it stops accidents, scripts with another's id, and a team that submits
under another's name.

A key is a long random text that `pools key new` makes; the configuration and the log hold its SHA-256 only. A slow,
salted hash is for what people think up: of 128 random bits nobody finds the one that gives a hash, however fast it is.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Any

from ..errors import MISSING, BadInput, Refused
from ..limits import (
    KEY_MAX_CHARS,
    KEY_MIN_CHARS,
    LIVE_REQUESTS,
    LIVE_REQUESTS_MAX,
    REQUESTERS_MAX,
    WAITING_PER_REQUESTER,
    integer_problem,
    name_problem,
)
from .config_rules import Path, Problem

WRONG_TOKEN, WRONG_KEY, NOT_OPERATOR = "wrong_token", "wrong_key", "not_operator"
DENIALS = frozenset((WRONG_TOKEN, WRONG_KEY, NOT_OPERATOR))
"""The refusals that are logged: somebody tried what they may not."""

LIMITS = {
    "waiting_per_requester": (WAITING_PER_REQUESTER, LIVE_REQUESTS_MAX),
    "live_requests": (LIVE_REQUESTS, LIVE_REQUESTS_MAX),
}
"""Name of each limit that a configuration may set -> (what it is unless set, the most that it may be)."""

_HASH = re.compile("[0-9a-f]{64}")
_HASH_EXPECTED = "the SHA-256 of a key, 64 hexadecimal digits in lower case: `pools key new` prints it"

# Of one caller's refusals of one kind one event is logged at once, and then one a minute with their count.
DENIED_EVERY_S = 60.0
# So many kinds are told apart within a minute; what is beyond them is counted together.
DENIED_KINDS_MAX = 50


# --- keys


def key_hash(key: str) -> str:
    """What the configuration and the log hold of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_problem(key: object) -> str | None:
    """What would be right if `key` can't be one, else None. The key itself must not be shown."""
    fine = isinstance(key, str) and KEY_MIN_CHARS <= len(key) <= KEY_MAX_CHARS
    if fine and isinstance(key, str) and key.isprintable() and key == key.strip():
        return None
    return f"a key of {KEY_MIN_CHARS} to {KEY_MAX_CHARS} printable characters, as `pools key new` makes it"


def is_key(key: object, hashed: str) -> bool:
    """`key` is the one of which this is the hash. Takes as long for a near miss as for a far one."""
    return isinstance(key, str) and hmac.compare_digest(key_hash(key), hashed)


def check_requester(keys: Mapping[str, str], requester: str, key: object) -> None:
    """Who submits for a requester that is protected has its key.

    Raises:
        Refused: `wrong_key`.
    """
    hashed = keys.get(requester)
    if hashed is not None and not is_key(key, hashed):
        came = "none came" if key is None else "another one came"
        raise Refused(
            WRONG_KEY,
            f"requester {requester!r} is protected by a key, and {came}: give it by RAY_POOLS_KEY"
            " or RAY_POOLS_KEY_FILE",
            {"requester": requester},
        )


def check_operator(hashed: str, op: Mapping[str, Any]) -> str:
    """The operator who sent the operation, "" where none is named.

    Raises:
        BadInput: the name can't be one.
        Refused: operators have a key here, and it did not come with the operation (`not_operator`).
    """
    by = op.get("operator") or ""
    if by and (problem := name_problem(by)):
        raise BadInput("operator", by, problem)
    if hashed and not is_key(op.get("operator_key"), hashed):
        came = "none came" if op.get("operator_key") is None else "another one came"
        raise Refused(
            NOT_OPERATOR,
            f"operators have a key here, and {came}: give it by RAY_POOLS_OPERATOR_KEY or RAY_POOLS_OPERATOR_KEY_FILE",
            {"operation": str(op.get("op", ""))[:40]},
        )
    return str(by)


# --- what the configuration says


def check_access(
    requesters: Mapping[Any, Any], operators: Mapping[Any, Any], limits: Mapping[Any, Any]
) -> list[Problem]:
    """Every broken rule of the sections `requesters`, `operators` and `limits`; takes any values."""
    problems: list[Problem] = []
    if len(requesters) > REQUESTERS_MAX:
        expected = f"at most {REQUESTERS_MAX} requesters with a key"
        problems.append(Problem(("requesters",), f"{len(requesters)} requesters", expected))
    for name, found in requesters.items():
        expected_name = name_problem(name)
        if expected_name:
            problems.append(Problem(("requesters",), name, expected_name))
            continue
        problems += _check_key(found, ("requesters", name), needed=True)
    problems += _check_key(operators, ("operators",), needed=False)
    for name, value in limits.items():
        if name not in LIMITS:
            problems.append(Problem(("limits", str(name)), value, f"one of {', '.join(LIMITS)}"))
        elif wrong := integer_problem(value, 1, LIMITS[name][1]):
            problems.append(Problem(("limits", name), value, wrong))
    return problems


def _check_key(found: Any, path: Path, needed: bool) -> list[Problem]:
    if not isinstance(found, Mapping):
        return [Problem(path, found, "a mapping with key_sha256")]
    problems = [
        Problem((*path, str(name)), value, "key_sha256, and nothing else")
        for name, value in found.items()
        if name != "key_sha256"
    ]
    if "key_sha256" in found:
        value = found["key_sha256"]
        if not isinstance(value, str) or not _HASH.fullmatch(value):
            # it may be a key that was put there by mistake: not shown
            shown = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
            problems.append(Problem((*path, "key_sha256"), shown, _HASH_EXPECTED))
    elif needed:
        problems.append(Problem((*path, "key_sha256"), MISSING, f"needed: {_HASH_EXPECTED}"))
    return problems


# --- who was refused


class Denials:
    """Which refusals are logged: the first of a kind at once, then one event a minute that counts the others.

    Soft: counts that were not logged yet die with the process. A kind is (request, operation, who says to be calling,
    why), and a caller can make up as many as it likes, so there are at most `DENIED_KINDS_MAX` of them at a time.
    """

    def __init__(self) -> None:
        # kind -> (when it was last logged, how many since)
        self._kinds: dict[tuple[str, str, str, str], tuple[float, int]] = {}

    def note(
        self, now: float, id: str, what: str, by: str, why: str
    ) -> tuple[str, str, str, str, int] | None:
        """Somebody was refused: the event's fields if it is to be logged now."""
        kind = (id, what, by, why)
        if kind not in self._kinds and len(self._kinds) >= DENIED_KINDS_MAX:
            kind = ("", what, "", why)
        logged_at, more = self._kinds.get(kind, (now - DENIED_EVERY_S, 0))
        if now - logged_at < DENIED_EVERY_S:
            self._kinds[kind] = logged_at, more + 1
            return None
        self._kinds[kind] = now, 0
        return (*kind, more + 1)

    def due(self, now: float) -> list[tuple[str, str, str, str, int]]:
        """What was only counted and is a minute old; kinds that are quiet are dropped."""
        found = []
        for kind, (logged_at, more) in [*self._kinds.items()]:
            if now - logged_at < DENIED_EVERY_S:
                continue
            if more:
                found.append((*kind, more))
                self._kinds[kind] = now, 0
            else:
                del self._kinds[kind]
        return found
