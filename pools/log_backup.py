"""Backup and restore of the logs of a coordinator and its pools: copies that belong together (sqlite stores).

What must hold of a set of copies. Each side's log remembers how long the other's was (`Peer`): whoever comes back
shorter than that is refused (docs/protocol.md, "Links"). So a set is whole if no copy remembers more of another than
that other's copy holds. No order of copying gives that by itself: what is copied first is older than what the later one
may have heard of it. But logs only grow. So all of them are looked at in the same moment, in one read transaction each,
and if one of them remembers more of another than is seen of it (two turns and a message came in between), they are let
go and looked at again. Then these transactions are copied: the actors write on meanwhile.

Whatever was acknowledged before that moment was durable, and is in the copies. What the actors know and did not write
(bids, leases, messages on their way) is made anew after any restart.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from . import __version__
from .core import records as ev
from .errors import BadInput, PoolsError
from .log_check import check_logs
from .log_story import COORDINATOR, pool_log
from .log_view import base_state, events, pools_in
from .store import NoLog, Reader, open_reader
from .store.address import parse_address
from .store.chain import seal
from .store.sqlite import SqliteReader, SqliteStore
from .store.sqlite_file import FORMAT_VERSION, database_path, make_directory, sync_directory

MANIFEST = "manifest.json"
MANIFEST_FORMAT = "ray-pools-backup"
MANIFEST_VERSION = 1
LOOKS_MAX = 500
LOOK_AGAIN_S = 0.003
_AHEAD_MS = 24 * 3600 * 1000


class Copied(NamedTuple):
    """A set of copies, as its manifest tells."""

    directory: str
    logs: dict[str, dict[str, Any]]
    looks: int
    made_at: str


# --- what logs remember of each other


class Memory:
    """What one log remembers of the others: name -> the newest `Peer`. Reads on from where it stopped."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.seq = -1
        self.of: dict[str, ev.Peer] = {}

    def read(self, reader: Reader) -> None:
        """Up to the row that is last now."""
        if self.seq < 0:
            state = base_state(reader, self.log)
            self.seq = state.seq
            peers = state.peers if self.log == COORDINATOR else {COORDINATOR: state.peer}
            self.of = {name: peer for name, peer in peers.items() if peer.epoch}
        for row, event in events(reader, self.seq + 1):
            self.seq = row.seq
            if isinstance(event, ev.Peer):
                self.of[event.name] = event
            elif isinstance(event, ev.DeclaredLost):
                self.of.pop(event.pool, None)
            elif isinstance(event, ev.BegunAnew):
                self.of = {COORDINATOR: ev.Peer(COORDINATOR, event.epoch, event.head, 0, 0)}
            elif isinstance(event, ev.Changed):
                for kind, *rest in event.changes:
                    if kind == "unpool":
                        self.of.pop(rest[0], None)


def _remembers_more(memories: Mapping[str, Memory], heads: Mapping[str, tuple[int, int]]) -> list[str]:
    """Where a log remembers more of another than there is of it; heads: log -> (epoch, rows)."""
    problems = []
    for log, memory in memories.items():
        for name, peer in memory.of.items():
            other = COORDINATOR if log != COORDINATOR else pool_log(name)
            if log == COORDINATOR and other not in heads and peer.head == 0:
                continue
            epoch, rows = heads.get(other, (0, 0))
            if peer.head > rows:
                problems.append(
                    f"{log} remembers {peer.head} rows of {other} (epoch {peer.epoch}), which has only {rows}"
                )
            elif peer.epoch > epoch:
                problems.append(f"{log} remembers epoch {peer.epoch} of {other}, which is only in {epoch}")
    return problems


def memory_problems(store: str, pools: Iterable[str]) -> list[str]:
    """Of the coordinator's log and these pools': where one remembers more of another than there is.

    They may be live. A pool that was never up has no log, which is no problem unless somebody remembers it.
    """
    logs = [COORDINATOR, *map(pool_log, sorted(set(pools)))]
    readers: dict[str, Reader] = {}
    try:
        for log in logs:
            try:
                readers[log] = open_reader(store, log)
            except NoLog:
                if log == COORDINATOR:
                    raise
        memories = {log: Memory(log) for log in readers}
        for log, reader in readers.items():
            memories[log].read(reader)
        asked, memory = {log.removeprefix("pool:") for log in logs[1:]}, memories[COORDINATOR]
        memory.of = {name: peer for name, peer in memory.of.items() if name in asked}
        # read after what is remembered of them: a live log only grows
        return _remembers_more(memories, {log: reader.head() for log, reader in readers.items()})
    finally:
        for reader in readers.values():
            reader.close()


# --- backup


def backup(store: str, to: str | Path) -> Copied:
    """Copies all logs at a store's address, which may be in use, into a new directory with a manifest.

    Raises:
        BadInput: the store is none of sqlite, or the directory is not empty.
        NoLog: there is no coordinator's log.
        PoolsError: the copies don't keep the rules, or could not be made.
    """
    kind, place = parse_address(store)
    if kind != "sqlite":
        raise BadInput("--store", store, "a sqlite store; others are saved by their own servers' means")
    directory = Path(to).absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise BadInput("DIR", str(to), "a directory that is empty, or not there yet")
    pools = pools_in(store)
    draft = directory.with_name(f".{directory.name}.new-{secrets.token_hex(4)}")
    readers = {log: SqliteReader(place, log) for log in (COORDINATOR, *map(pool_log, pools))}
    try:
        make_directory(str(draft))
        looks = _look(readers)
        logs = {log: _copy(reader, draft) for log, reader in readers.items()}
        made_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        logs = _checked(draft, logs, pools)
        _write_manifest(draft, made_at, logs)
        if directory.exists():
            directory.rmdir()
        os.rename(draft, directory)
        sync_directory(str(directory.parent))
    except (OSError, sqlite3.Error) as problem:
        raise PoolsError(f"the backup could not be made: {problem}") from None
    finally:
        for reader in readers.values():
            reader.close()
        _remove(draft)
    return Copied(str(directory), logs, looks, made_at)


def _look(readers: Mapping[str, SqliteReader]) -> int:
    """Begins a read transaction of each log, so that they belong together. Returns how many looks it took."""
    memories = {log: Memory(log) for log in readers}
    for log, reader in readers.items():  # what is long was read before the moment that counts
        memories[log].read(reader)
    problems: list[str] = []
    for look in range(1, LOOKS_MAX + 1):
        heads = {}
        for log, reader in readers.items():
            reader._open_db().execute("BEGIN")
            heads[log] = reader.head()  # the first look at the file is what the transaction sees
        for log, reader in readers.items():
            memories[log].read(reader)
        problems = _remembers_more(memories, heads)
        if not problems:
            return look
        for reader in readers.values():
            reader._open_db().execute("ROLLBACK")
        time.sleep(LOOK_AGAIN_S)
    raise PoolsError(f"no moment in which all logs belong together: {problems[0]}")


def _copy(reader: SqliteReader, to: Path) -> dict[str, Any]:
    """Copies what the reader's transaction sees."""
    name = Path(reader.where).name
    source = reader._open_db()
    epoch, rows = reader.head()
    first = reader.first_seq()
    with closing(sqlite3.connect(to / name, isolation_level=None)) as copy:
        source.backup(copy)
        copy.execute(
            "PRAGMA journal_mode = DELETE"
        )  # one file, without -wal, that needs no writing to be read
    source.execute("ROLLBACK")
    _sync_file(to / name)
    return {"file": name, "epoch": epoch, "rows": rows, "first_seq": first}


def _checked(
    directory: Path, logs: Mapping[str, dict[str, Any]], pools: list[str]
) -> dict[str, dict[str, Any]]:
    """The copies keep the rules and belong together; what the manifest says of each."""
    address = f"sqlite://{directory}"
    report = check_logs(address, pools)
    problems = [str(problem) for problem in report.problems] or memory_problems(address, pools)
    if problems:
        more = f" ({len(problems)} problems)" if len(problems) > 1 else ""
        raise PoolsError(f"the logs don't keep the rules: {problems[0]}{more}")
    found = {}
    for log, said in logs.items():
        path = directory / said["file"]
        found[log] = {
            **said,
            "digest": report.digests[log],
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
        }
    return found


def _write_manifest(directory: Path, made_at: str, logs: Mapping[str, dict[str, Any]]) -> None:
    manifest = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "made_at": made_at,
        "ray_pools": __version__,
        "store_format": FORMAT_VERSION,
        "logs": logs,
    }
    path = directory / MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _sync_file(path)
    sync_directory(str(directory))


# --- restore


def restore(source: str | Path, store: str) -> Copied:
    """Puts the logs of a backup where a store is to be. Their epochs rise above all that anyone can have seen of them.

    Raises:
        BadInput: no backup, or there are logs at the store's address already.
        PoolsError: the backup is damaged, or does not keep the rules; nothing was written.
    """
    kind, place = parse_address(store)
    if kind != "sqlite":
        raise BadInput("--store", store, "a sqlite store: a backup holds its files")
    directory = Path(source).absolute()
    manifest = read_manifest(directory)
    logs = manifest["logs"]
    for log, said in logs.items():
        _verify_file(directory, log, said)
    pools = [log.removeprefix("pool:") for log in logs if log != COORDINATOR]
    _checked(directory, logs, pools)
    if os.path.isdir(place) and (there := sorted(n for n in os.listdir(place) if ".sqlite" in n)):
        raise BadInput("--store", store, f"a store without logs; {there[0]} is there")
    epochs = {log: max(said["epoch"] + 1, int(time.time() * 1000) + _AHEAD_MS) for log, said in logs.items()}
    drafts: dict[str, Path] = {}
    try:
        make_directory(place)
        for log, said in logs.items():
            drafts[log] = Path(f"{database_path(place, log)}.restored-{secrets.token_hex(4)}")
            _copy_file(directory / said["file"], drafts[log])
            _raise_epoch(drafts[log], epochs[log])
        for log, draft in drafts.items():  # fails, instead of overwriting, if somebody was quicker
            os.link(draft, database_path(place, log))
        sync_directory(place)
    except FileExistsError as problem:
        raise BadInput("--store", store, f"a store without logs; {problem.filename2} is there") from None
    except (OSError, sqlite3.Error) as problem:
        raise PoolsError(f"the backup could not be restored: {problem}") from None
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    restored = {}
    for log, said in logs.items():
        opened = SqliteStore(place, log)
        epoch = opened.open()  # proves that an actor can
        opened.close()
        restored[log] = {**said, "epoch": epoch}
    return Copied(place, restored, 0, str(manifest["made_at"]))


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a backup, if it is one that this version can read. BadInput otherwise."""
    try:
        found = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise BadInput("DIR", str(directory), f"a backup, with a {MANIFEST} ({problem})") from None
    if not isinstance(found, dict) or found.get("format") != MANIFEST_FORMAT:
        raise BadInput("DIR", str(directory), f"a backup; its {MANIFEST} is of something else")
    if found.get("version") != MANIFEST_VERSION or found.get("store_format") != FORMAT_VERSION:
        raise BadInput(
            "DIR",
            str(directory),
            f"a backup of version {MANIFEST_VERSION} with logs of format {FORMAT_VERSION};"
            f" it has {found.get('version')} and {found.get('store_format')}",
        )
    logs = found.get("logs")
    if not isinstance(logs, dict) or COORDINATOR not in logs:
        raise BadInput("DIR", str(directory), "a backup with the coordinator's log")
    return found


def _verify_file(directory: Path, log: str, said: Mapping[str, Any]) -> None:
    path = directory / str(said.get("file"))
    if path.parent != directory or not path.is_file():
        raise PoolsError(f"the backup lacks the log of {log!r}: {path}")
    if _sha256(path) != said.get("sha256"):
        raise PoolsError(f"{path}: its SHA-256 is not the one in {MANIFEST}: the backup is damaged")


def _raise_epoch(path: Path, epoch: int) -> None:
    """The log's epoch becomes this one.

    It is the time in milliseconds, as actors take it when they open a log, a day from now: above whatever those who
    still write to the log that was backed up get within that day, however often they start, and above that of an
    earlier restore. So what such a zombie says is refused by all who were restored.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = FULL")
        name, base_seq, base_chain = db.execute("SELECT name, base_seq, base_chain FROM head").fetchone()
        db.execute("UPDATE head SET epoch = ?, seal = ?", (epoch, seal(name, epoch, base_seq, base_chain)))
    _sync_file(path)


def _copy_file(source: Path, to: Path) -> None:
    with (
        open(source, "rb") as old,
        open(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new,
    ):
        while block := old.read(2**20):
            new.write(block)


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _remove(directory: Path) -> None:
    if directory.is_dir():
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
