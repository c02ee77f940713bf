"""Ends a local cluster whose starter died: a private one has some thirty processes that nobody would ever end.

Run as a process of its own, `python -m ray_pools.local_guard DIRECTORY PID START`, which waits for the starter's end
and stops the cluster then. It carries the cluster's marker, so that a cluster that is stopped takes it along.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time

from . import local_processes
from .errors import PoolsError

_POLL_S = 1.0


def spawn(directory: str, pid: int, start: str) -> subprocess.Popen[bytes]:
    """Starts the guard of the cluster in `directory`, for the process with this pid and start (`process_start`)."""
    return subprocess.Popen(
        [sys.executable, "-m", "ray_pools.local_guard", directory, str(pid), start],
        env={**os.environ, local_processes.MARKER: directory},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # the Ctrl-C that ends its starter must not end it before it has done its work
    )


def wait_for_end(pid: int, start: str) -> None:
    """Returns when that process is gone."""
    try:
        watched = os.pidfd_open(pid)
    except (OSError, AttributeError):  # gone, or a kernel without it
        while local_processes.process_start(pid) == start:
            time.sleep(_POLL_S)
        return
    try:
        if local_processes.process_start(pid) == start:
            select.select([watched], [], [])
    finally:
        os.close(watched)


def main(directory: str, pid: str, start: str) -> None:
    wait_for_end(int(pid), start)
    from .local_cluster import LocalCluster

    with contextlib.suppress(PoolsError):  # it was stopped already, or what could be ended was
        LocalCluster.attach(directory).stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
