"""What enters from outside, checked before anything changes: submissions as plain values of a message."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.errors import BadInput
from ray_pools.limits import KEYS_MAX, RETRIES_MAX, check_integer, check_name, check_seconds

OPTIONS_MAX_BYTES = 100_000
CHANGES_MAX = 200_000


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


def token_hash(token: object) -> bytes:
    """What the log holds of a client's secret; b"" for none. BadInput for what is no secret."""
    if token is None or token == b"":
        return b""
    if not isinstance(token, bytes) or len(token) > 1024:
        raise BadInput("token", type(token).__name__, "the request's secret, up to 1024 bytes")
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
    if not isinstance(options, dict) or len(repr(options)) > OPTIONS_MAX_BYTES:
        raise BadInput("options", options, f"a mapping of at most {OPTIONS_MAX_BYTES} characters")
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
    )


def changes(sent: object) -> list[tuple[Any, ...]]:
    """The changes of pools and policies that a message holds; their values are judged by `check_config`."""
    if not isinstance(sent, list) or not 0 < len(sent) <= CHANGES_MAX:
        raise BadInput("changes", sent, f"a list of 1 to {CHANGES_MAX} changes")
    found: list[tuple[Any, ...]] = []
    for index, change in enumerate(sent):
        field = f"changes[{index}]"
        shape = [type(part) for part in change] if isinstance(change, list) else []
        if shape == [str, dict, str] and change[0] == "pool":
            found.append(
                ("pool", PoolConfig.from_wire(change[1], field), check_name(f"{field} uid", change[2]))
            )
        elif shape == [str, dict] and change[0] == "policy":
            found.append(("policy", PolicyConfig.from_wire(change[1], field)))
        elif (shape == [str, str] and change[0] == "unpool") or (
            shape == [str, str, str] and change[0] == "unpolicy"
        ):
            found.append(tuple(change))
        else:
            raise BadInput(
                field,
                change,
                '["pool", config, uid], ["policy", policy], ["unpool", name] or ["unpolicy", requester, pool]',
            )
    return found
