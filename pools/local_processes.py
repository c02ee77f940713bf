"""The processes of one local Ray cluster: which they are, how they end; and free ports to start one on.

`ray stop` ends every Ray on the machine, so this project never calls it. A process belongs to a cluster if
- its environment carries the cluster's marker (everything that Ray starts inherits it, jobs and the commands
  that they run too), or
- it is in the session (setsid) that the head was started in, and its command line or an open file is under
  the cluster's directory: Ray's workers overwrite their own environment block when they set their title.
A driver that somebody connects from outside has neither: it writes a log under the directory, but in a
session of its own, and is left alone. Linux only, since it reads /proc.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .errors import PoolsError

MARKER = "POOLS_LOCAL_CLUSTER_DIR"
"""Environment variable that marks what a local cluster started; its value is the cluster's directory."""

TERM_WAIT_S = 1.0
"""Short: most of Ray ends at once, the rest (the GCS, the agents) not at all by SIGTERM."""

KILL_WAIT_S = 10.0
POLL_S = 0.05
PORT_RANGE = range(20_000, 32_000)
"""Below Linux's ephemeral ports, so that no outgoing connection takes one between the test and its use."""


def check_platform() -> None:
    """PoolsError where a local cluster can't work."""
    if not sys.platform.startswith("linux"):
        raise PoolsError(
            f"a local cluster needs Linux (its processes are found through /proc), this is {sys.platform}: "
            "connect to a running cluster instead"
        )


def cluster_pids(directory: Path, session: int | None) -> list[int]:
    """The living processes of the cluster in `directory`, this process and its ancestors left out.

    `session` is the session id that the head was started in, None if it isn't known.
    """
    spared = _self_and_ancestors()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in spared and belongs(int(entry), directory, session):
            found.append(int(entry))
    return found


def belongs(pid: int, directory: Path, session: int | None) -> bool:
    """Whether the process belongs to the cluster, by the rules in the module's text."""
    marker = f"{MARKER}={directory}".encode()
    if marker in _read(pid, "environ").split(b"\0"):
        return True
    if session is None or _session_of(pid) != session:
        return False
    prefix = f"{directory}/"
    return prefix.encode() in _read(pid, "cmdline") or any(
        name.startswith(prefix) for name in _open_files(pid)
    )


def end_processes(
    find: Callable[[], Iterable[int]], still_ours: Callable[[int], bool], term_wait_s: float = TERM_WAIT_S
) -> list[int]:
    """End all that `find` finds, until it finds none: SIGTERM, `term_wait_s` seconds, SIGKILL.

    It asks again each round: a dying cluster may still start processes. Returns the ended pids; PoolsError if
    some can't be ended.
    """
    told: dict[int, int] = {}  # pid -> the strongest signal that it was sent
    started = time.monotonic()
    while True:
        left = list(find())
        if not left:
            return list(told)
        waited_s = time.monotonic() - started
        if waited_s > term_wait_s + KILL_WAIT_S:
            raise PoolsError(f"processes of the local cluster did not end: {sorted(left)}")
        wanted = signal.SIGTERM if waited_s <= term_wait_s else signal.SIGKILL
        for pid in left:
            if told.get(pid) != wanted:
                _send(pid, wanted, still_ours)
                told[pid] = wanted
        time.sleep(POLL_S)


def dead_children(pid: int) -> set[str]:
    """Names of children of `pid` that are part of a Ray head, died, and were not waited for."""
    names = set()
    for entry in os.listdir("/proc"):
        fields = _stat_fields(int(entry)) if entry.isdigit() else []
        if len(fields) > 1 and fields[0] == "Z" and int(fields[1]) == pid:
            name = _read(int(entry), "comm").decode(errors="replace").strip()
            if name in ("gcs_server", "raylet") or name.startswith("python"):
                names.add(name)
    return names


def process_start(pid: int) -> str:
    """What tells it from a later process with the same pid (its start in clock ticks); "" if it is gone."""
    fields = _stat_fields(pid)
    return fields[19] if len(fields) > 19 else ""


def free_ports(count: int) -> list[int]:
    """`count` ports that nothing listens on now. Somebody may still be faster: retry the start then."""
    ports: list[int] = []
    for _ in range(1000):
        if len(ports) == count:
            return ports
        port = random.choice(PORT_RANGE)
        if port not in ports and port_is_free(port):
            ports.append(port)
    raise PoolsError(f"no {count} free ports between {PORT_RANGE.start} and {PORT_RANGE.stop}")


def port_is_free(port: int) -> bool:
    """Whether a server could listen on the port, on all interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as Ray's servers do: connections that are merely winding down don't count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _send(pid: int, signal_number: int, still_ours: Callable[[int], bool]) -> None:
    # a pidfd names this very process: between the look and the signal the pid can't become somebody else's
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if still_ours(pid):
            signal.pidfd_send_signal(handle, signal_number)
    except OSError:
        pass
    finally:
        os.close(handle)


def _self_and_ancestors() -> set[int]:
    spared = set()
    pid = os.getpid()
    while pid > 0 and pid not in spared:
        spared.add(pid)
        fields = _stat_fields(pid)
        pid = int(fields[1]) if len(fields) > 1 else 0
    return spared


def _stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat after the command's name: state, parent, process group, session, ..., [19] the start."""
    _, _, rest = _read(pid, "stat").decode(errors="replace").rpartition(")")
    return rest.split()


def _session_of(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[3]) if len(fields) > 3 else None


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it ended, or is another user's
        return b""


def _open_files(pid: int) -> list[str]:
    names = []
    try:
        for handle in os.listdir(f"/proc/{pid}/fd"):
            names.append(os.readlink(f"/proc/{pid}/fd/{handle}"))
    except OSError:
        pass
    return names
