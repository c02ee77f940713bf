"""Is the place where the logs are fit for them? Settings, disk space, and how long a sync takes there."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from .errors import PoolsError
from .log_story import COORDINATOR
from .store import open_store
from .store.address import parse_address
from .store.sqlite import keep_promises
from .store.sqlite_file import database_path, read_only_uri

Add = Callable[[str, str, str], None]

SYNCS = 200
SYNC_WARN_S = 0.05
FREE_WARN_BYTES, FREE_FAIL_BYTES = 2**30, 100 * 2**20
NETWORK = ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "lustre", "gluster", "beegfs")
"""WAL mode needs shared memory between processes, which these don't give over machines."""


def look_at_store(address: str, add: Add, *, measure: bool = True) -> dict[str, Any]:
    """Says by `add(level, what, text)` what there is to say; returns the figures."""
    try:
        kind, place = parse_address(address)
    except PoolsError as problem:
        add("FAIL", "store", str(problem))
        return {"address": address}
    facts: dict[str, Any] = {"address": address, "kind": kind, "place": place}
    if kind != "sqlite":
        add("warn", "store", f"{address} is of kind {kind}: nothing to look at on this machine")
        return facts
    log = database_path(place, COORDINATOR)
    here = os.path.exists(log)
    add("ok" if here else "warn", "store", f"sqlite in {place}" + ("" if here else ", where no log is yet"))
    above = _existing(Path(place))
    _look_at_disk(above, facts, add)
    if here:
        _look_at_journal(log, facts, add)
    if measure:
        _measure(above, facts, add)
    return facts


def _existing(path: Path) -> Path:
    while not path.is_dir():
        path = path.parent
    return path


def _look_at_disk(place: Path, facts: dict[str, Any], add: Add) -> None:
    free = shutil.disk_usage(place).free
    facts["free_bytes"] = free
    level = "FAIL" if free < FREE_FAIL_BYTES else "warn" if free < FREE_WARN_BYTES else "ok"
    add(level, "disk", f"{free / 2**30:.1f} GiB free")
    kind = file_system(place)
    facts["file_system"] = kind
    if kind.startswith(NETWORK):
        add("warn", "file system", f"{kind}: of a network; one machine only may use the logs at a time")
    elif kind in ("tmpfs", "ramfs"):
        add("warn", "file system", f"{kind}: in memory, gone with the machine's next start")
    elif kind:
        add("ok", "file system", kind)


def file_system(place: Path) -> str:
    """The kind of file system, as Linux tells it; "" elsewhere."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    best, kind, path = "", "", str(place.resolve())
    for line in mounts:
        parts = line.split(" ")
        mount = parts[1].replace("\\040", " ")
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, parts[2]
    return kind


def _look_at_journal(log: str, facts: dict[str, Any], add: Add) -> None:
    try:
        with closing(sqlite3.connect(read_only_uri(log), uri=True)) as db:
            (mode,) = db.execute("PRAGMA journal_mode").fetchone()
    except sqlite3.Error as problem:
        add("FAIL", "journal", f"{log}: {problem}")
        return
    facts["journal_mode"] = mode
    # a log that was restored and not opened since is in mode delete until an actor opens it
    add("ok" if mode == "wal" else "warn", "journal", f"mode {mode}, {os.path.getsize(log)} bytes")


def _measure(place: Path, facts: dict[str, Any], add: Add) -> None:
    """Turns of one event in a scratch log beside the store, on the same disk, gone afterwards."""
    try:
        with tempfile.TemporaryDirectory(prefix=".pools-doctor-", dir=place) as scratch:
            store = open_store(f"sqlite://{scratch}", "scratch")
            store.open()  # UnsafeStore unless WAL and synchronous=FULL were read back
            with closing(sqlite3.connect(Path(scratch) / "settings.sqlite", isolation_level=None)) as db:
                keep_promises(db, scratch)
                (level,) = db.execute("PRAGMA synchronous").fetchone()
            facts["synchronous"] = {2: "FULL", 3: "EXTRA"}.get(level, str(level))
            add("ok", "settings", f"synchronous {facts['synchronous']} and WAL are kept here")
            took = []
            for seq in range(SYNCS):
                started = time.perf_counter()
                store.append([(0.0, b"x" * 200)], seq)
                took.append(time.perf_counter() - started)
            store.close()
    except (PoolsError, OSError, sqlite3.Error) as problem:
        add("FAIL", "settings", f"no log can be kept in {place}: {problem}")
        return
    took.sort()
    p50_s, p99_s = took[len(took) // 2], took[int(len(took) * 0.99)]
    facts["sync_p50_s"], facts["sync_p99_s"] = p50_s, p99_s
    text = f"p50 {1000 * p50_s:.2f} ms, p99 {1000 * p99_s:.2f} ms over {SYNCS} turns"
    add("ok" if p99_s <= SYNC_WARN_S else "warn", "sync", text)
