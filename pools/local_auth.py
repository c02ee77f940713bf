"""Ray's token authentication of a local cluster: on or off, and where its token is.

With it on, each process that talks to the cluster needs the token. It lies in a file in the cluster's directory, which
only its user can read, and the environment of a driver names the file: so nothing is written to ~/.ray, and the token
is in no environment that somebody prints.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from .errors import BadInput

TOKEN_FILE = "auth_token"


def make(mode: str, token: str, directory: Path) -> dict[str, str]:
    """The file with the token, if there is to be one; what a driver needs in its environment (`env_of`)."""
    if mode == "token":
        path = directory / TOKEN_FILE
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
    return env_of(mode, directory)


def env_of(mode: str, directory: Path) -> dict[str, str]:
    """What a process of the cluster, or a driver, needs in its environment before it imports ray."""
    if mode != "token":
        return {"RAY_AUTH_MODE": mode}
    return {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN_PATH": str(directory / TOKEN_FILE)}


def token() -> str:
    """The token for a new cluster: that of this process's environment, else a new one.

    Raises:
        BadInput: RAY_AUTH_TOKEN_PATH names a file that can't be read, or an empty one.
    """
    if given := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return given
    path = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    if not path:
        return secrets.token_hex(32)
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as problem:
        raise BadInput(
            "RAY_AUTH_TOKEN_PATH", path, f"a file with a token: {type(problem).__name__}"
        ) from None
    if not text:
        raise BadInput("RAY_AUTH_TOKEN_PATH", path, "a file with a token, not an empty one")
    return text
