"""Keys of requesters and of operators: made, read from where the user keeps them, and never shown.

What a key is for and what it protects from: docs/protocol.md, "Who may do what". A key comes by the environment or by
a file that the environment names, never by the command line, which every user of the machine can read.
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .core.access import key_problem
from .errors import BadInput
from .limits import NAME_MAX_CHARS

KEY_ENV = "RAY_POOLS_KEY"
OPERATOR_KEY_ENV = "RAY_POOLS_OPERATOR_KEY"
KEY_BYTES = 32


def new_key() -> str:
    """256 random bits, in characters that need no quotes anywhere."""
    return "rpk_" + secrets.token_urlsafe(KEY_BYTES)


def check_key(field: str, key: object) -> str:
    """The key itself; BadInput, which does not show it, if it can't be one."""
    problem = key_problem(key)
    if problem is not None or not isinstance(key, str):
        told = f"{len(key)} characters" if isinstance(key, str) else type(key).__name__
        raise BadInput(field, told, str(problem))
    return key


def key_in_file(path: str, field: str) -> str:
    """The key that a file holds, with or without a line end. BadInput if it can't be read."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise BadInput(field, path, f"a file with a key that can be read: {type(problem).__name__}") from None
    return check_key(field, text.strip())


def key_of_environment(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The key in NAME, else in the file that NAME_FILE names; None where neither is set."""
    env = os.environ if environ is None else environ
    if env.get(name):
        return check_key(name, env[name].strip())
    if env.get(f"{name}_FILE"):
        return key_in_file(env[f"{name}_FILE"], f"{name}_FILE")
    return None


def caller_name() -> str:
    """`user@host`, for the log: who says to be calling."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user id without a name, as in some containers
        user = f"uid {os.getuid()}"
    said = "".join(char for char in f"{user}@{socket.gethostname()}" if char.isprintable())
    return said.strip()[:NAME_MAX_CHARS].strip() or "somebody"


class Keys(NamedTuple):
    """What a client has: the key of its requester and that of operators; None where it has none."""

    requester: str | None = None
    operator: str | None = None

    def __repr__(self) -> str:
        return "<keys>"

    def of_requester(self) -> dict[str, str]:
        """What a submission carries."""
        return {} if self.requester is None else {"key": self.requester}

    def of_operator(self, name: str | None = None) -> dict[str, str]:
        """What an operator's operation carries: the name, by default the caller's, and the key."""
        fields = {"operator": caller_name() if name is None else name}
        return fields if self.operator is None else {**fields, "operator_key": self.operator}


def client_keys(key: str | None = None, operator_key: str | None = None) -> Keys:
    """The keys that are given, else those of the environment. BadInput for what can be no key."""
    return Keys(
        key_of_environment(KEY_ENV) if key is None else check_key("key", key),
        key_of_environment(OPERATOR_KEY_ENV)
        if operator_key is None
        else check_key("operator_key", operator_key),
    )


def operator_fields() -> dict[str, str]:
    """What an operator's operation carries, by this process's user and environment."""
    return Keys(None, key_of_environment(OPERATOR_KEY_ENV)).of_operator()
