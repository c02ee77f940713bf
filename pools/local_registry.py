"""Where the local clusters of this user are noted, so that any later process finds and stops them.

Each cluster's directory has a description of it, `cluster.json` (State). The registry is a folder with one
small file per cluster that leads to its directory; what it says counts only if the directory agrees.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .errors import PoolsError

DIRECTORY_MAX_CHARS = 45
"""Ray appends up to 55 characters for its sockets; the system's limit is 107."""


@dataclass
class State:
    """What cluster.json holds. `session` and `address` are None until the head was started, or answers."""

    directory: str
    starter_pid: int
    starter_start: str
    created_s: float
    autoscaler: str
    ports: dict[str, int] = field(default_factory=dict)
    session: int | None = None
    address: str | None = None
    driver_env: dict[str, str] = field(default_factory=dict)
    node_types: list[str] = field(default_factory=list)

    def path(self) -> Path:
        return Path(self.directory) / "cluster.json"

    def write(self) -> None:
        fresh = self.path().with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self), indent=1))
        fresh.replace(self.path())  # a reader sees the old or the new, never a half

    @classmethod
    def read(cls, directory: Path) -> State | None:
        """None if the directory holds no cluster of ours."""
        try:
            state = cls(**json.loads((directory / "cluster.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return state if state.directory == str(directory) else None


def make_directory() -> Path:
    """A new directory for a cluster, of a path short enough for Ray's sockets."""
    root = tempfile.gettempdir()
    if len(root) > DIRECTORY_MAX_CHARS - len("/pools-12345678"):
        root = "/tmp"
    return Path(tempfile.mkdtemp(prefix="pools-", dir=root)).resolve()


def registry() -> Path:
    """The registry's folder: in $POOLS_STATE_DIR, else in the user's state directory, else a temporary one."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    chosen = os.environ.get("POOLS_STATE_DIR") or f"{home}/ray-pools"
    for folder in (Path(chosen), Path(tempfile.gettempdir()) / f"ray-pools-{os.getuid()}"):
        try:
            (folder / "local").mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder / "local", os.W_OK):
            return folder / "local"
    raise PoolsError(
        f"can't write to {chosen}: set POOLS_STATE_DIR to a folder where local clusters are noted"
    )


def register(directory: Path) -> None:
    """Note a cluster."""
    (registry() / f"{directory.name}.json").write_text(json.dumps({"directory": str(directory)}))


def forget(directory: Path) -> None:
    """Remove a cluster's files and its note."""
    (registry() / f"{directory.name}.json").unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
