"""Logs of live actors that are put back from old copies, requests that are only ever in one pool: it is reported,
no promise rests on it, and `pools pool declare-lost` brings service back (docs/operations.md, "A log that lost
something").
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from test_maintenance import Place

from ray_pools.store.sqlite_file import database_path

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PID = """
import sys
import ray_pools as pools
client = pools.connect(namespace="kept", quiet=True)
ping = {"op": "ping"}
print("pid", (client.coordinator(ping) if sys.argv[1] == "coordinator" else client.pool("spot", ping))["pid"])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("lost"))
    made.up("kept", "store")
    yield made
    made.pools("down", "--force", "--local")


def copied(place: Place, log: str) -> Path:
    """The log as it is now."""
    to = place.folder / f"{log.replace(':', '-')}.old"
    path = database_path(str(place.folder / "store"), log)
    with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(to)) as copy:
        db.backup(copy)
    return to


def put_back(place: Place, log: str, old: Path) -> None:
    """The old copy stands there before Ray starts the actor again; the one that runs writes on to what is no more."""
    done = subprocess.run(
        [sys.executable, "-c", PID, log],
        env={**place.env, **place.driver},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    pid = int(next(line for line in done.stdout.splitlines() if line.startswith("pid")).split()[1])
    path = Path(database_path(str(place.folder / "store"), log))
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    os.replace(old, path)
    os.kill(pid, signal.SIGKILL)


def until(look: Callable[[], bool], within_s: float = 60.0) -> None:
    ends_at = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < ends_at
        time.sleep(0.5)


def submit(place: Place, id: str, *more: str, code: int = 0) -> str:
    done = place.run("submit", "-r", "team", "-g", "1", "--id", id, *more, code=code)
    return done.stdout + done.stderr


WAIT = ("--wait", "--timeout", "90")


def test_a_pool_with_an_old_copy_of_its_log_is_reported_and_can_be_declared_lost(place: Place) -> None:
    submit(place, "before", *WAIT)
    old = copied(place, "pool:spot")
    submit(place, "held", "--retries", "1", *WAIT)
    put_back(place, "pool:spot", old)
    until(lambda: "the log of pool:spot lost something" in place.pools("status"))
    submit(place, "after")
    said = place.json("status")
    assert "pools pool declare-lost spot" in said["coordinator"]["trouble"]["spot"]
    assert said["pools"]["spot"]["waiting"] == 0, "it takes nothing in"
    assert "was declared lost" in place.pools("pool", "declare-lost", "spot", "--yes", "--operator", "me")
    submit(place, "after", *WAIT)
    submit(place, "held", "--retries", "1", *WAIT)  # its second attempt
    assert [r["state"] for r in place.json("requests") if r["id"] == "before"] == ["preempted"]
    place.pools("log", "coordinator", "--verify")


def test_a_coordinator_with_an_old_copy_of_its_log_promises_nothing(place: Place) -> None:
    old = copied(place, "coordinator")
    submit(place, "forgotten", *WAIT)
    put_back(place, "coordinator", old)
    until(lambda: "the log of coordinator lost something" in place.pools("status"))
    assert "lost something" in submit(place, "new", code=1)
    place.pools("pool", "declare-lost", "spot", "--yes")
    for pool in ("left", "right"):
        if pool in place.json("status")["coordinator"]["trouble"]:
            place.pools("pool", "declare-lost", pool, "--yes")
    submit(place, "new", *WAIT)
