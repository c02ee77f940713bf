"""The tokens of requests that the command line submits.

A request's token is its submitter's secret. Here the submitter is a user, not a process: the same `pools submit --id`
typed again must be the same request. So a token is made of the id and of a key that the user's state directory keeps.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from ray_pools.errors import PoolsError
from ray_pools.local_registry import registry

_KEY_BYTES = 32


def token_of(namespace: str, request_id: str) -> bytes | None:
    """The user's token for a request; None (each call then has its own) where the key can't be kept."""
    try:
        key = _user_key(registry().parent / "token.key")
    except (OSError, PoolsError):
        return None
    return hmac.digest(key, f"{namespace}\n{request_id}".encode(), hashlib.sha256)


def _user_key(path: Path) -> bytes:
    """Made once, whole or not at all, readable by the user only."""
    try:
        key = path.read_bytes()
        if len(key) == _KEY_BYTES:
            return key
        path.unlink()
    except FileNotFoundError:
        pass
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_KEY_BYTES))
    try:
        os.link(fresh, path)  # fails if another process was first: its key counts
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
    return path.read_bytes()
