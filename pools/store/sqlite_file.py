"""The database file of a sqlite log: its name, how it is made, and whether an existing one is ours."""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
from contextlib import closing
from hashlib import blake2b
from urllib.parse import quote

from ray_pools.store.base import AppendFailed, Corrupt, ForeignStore, StoreError
from ray_pools.store.chain import genesis, seal

APPLICATION_ID = 0x52504C47
FORMAT_VERSION = 1
FILE_NAME_MAX_CHARS = 180
"""Below the usual 255, with room for a suffix and for names of temporary files."""

_SCHEMA = """
CREATE TABLE head (
    one INTEGER PRIMARY KEY CHECK (one = 1), name TEXT NOT NULL, epoch INTEGER NOT NULL,
    base_seq INTEGER NOT NULL, base_chain BLOB NOT NULL, seal BLOB NOT NULL);
CREATE TABLE log (
    seq INTEGER PRIMARY KEY, first INTEGER NOT NULL, epoch INTEGER NOT NULL, at REAL NOT NULL,
    sizes BLOB NOT NULL, chain BLOB NOT NULL, body BLOB NOT NULL);
CREATE TABLE snapshot (
    seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, chain BLOB NOT NULL,
    seal BLOB NOT NULL, state BLOB NOT NULL);
"""

_TABLES = [("head", 2), ("log", 3), ("snapshot", 4)]
"""Each table and its first page. A changed page number would show some other table, such as an empty log."""


_COLUMNS_AT_FIRST = ["seq", "epoch", "at", "chain", "body"]
"""Of the log's table before the first release. The format's version was 1 already."""


def database_path(directory: str, name: str) -> str:
    """Where the log of this name is. No two names share a file; the file says its name too."""
    safe = re.sub("[.~]", lambda found: f"%{ord(found[0]):02X}", quote(name, safe=""))
    if len(safe) > FILE_NAME_MAX_CHARS:
        safe = f"{safe[: FILE_NAME_MAX_CHARS - 33]}~{blake2b(name.encode(), digest_size=16).hexdigest()}"
    return os.path.join(directory, safe + ".sqlite")


def read_only_uri(path: str) -> str:
    """As SQLite takes it; with an empty host, so that no path can be taken for one."""
    return f"file://{quote(os.path.abspath(path))}?mode=ro"


def create(path: str, name: str) -> None:
    """Makes the log, complete and durable, unless another process was quicker. Else AppendFailed."""
    draft = f"{path}.new-{secrets.token_hex(8)}"
    try:
        make_directory(os.path.dirname(path))
        try:
            _write(draft, name)
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            if os.path.exists(draft):
                os.unlink(draft)
        sync_directory(os.path.dirname(path))
    except (OSError, sqlite3.Error) as error:
        raise AppendFailed(path, f"the log can't be made: {error}") from error


def _write(path: str, name: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA fullfsync = ON")
        db.execute("PRAGMA auto_vacuum = NONE")  # else pages are numbered otherwise than in _TABLES
        base_chain = genesis(name)
        db.executescript(
            f"BEGIN; PRAGMA application_id = {APPLICATION_ID};"
            f"PRAGMA user_version = {FORMAT_VERSION}; {_SCHEMA}"
        )
        db.execute(
            "INSERT INTO head VALUES (1, ?, 0, 0, ?, ?)", (name, base_chain, seal(name, 0, 0, base_chain))
        )
        db.execute("COMMIT")


def make_directory(directory: str) -> None:
    """Makes it and what is missing above it, for this user only, and each durable in the one above."""
    if os.path.isdir(directory):
        return
    above = os.path.dirname(directory)
    make_directory(above)
    try:
        os.mkdir(directory, mode=0o700)
    except FileExistsError:
        return
    sync_directory(above)


def sync_directory(directory: str) -> None:
    """Makes the names in a directory durable."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def refuse_foreign(db: sqlite3.Connection, where: str) -> None:
    """ForeignStore unless this is a log of a format that we know; Corrupt if its frame is damaged."""
    if os.path.getsize(where) == 0:
        raise Corrupt(where, 0, "the file is empty; logs are never made that way")
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise ForeignStore(
            where, f"this is another application's file (application_id {application}, not {APPLICATION_ID})"
        )
    if version > FORMAT_VERSION:
        raise ForeignStore(
            where,
            f"its format is version {version}, this program knows {FORMAT_VERSION}: "
            "install a newer ray-pools",
        )
    if version != FORMAT_VERSION:
        raise ForeignStore(where, f"its format is version {version}, which no program wrote")
    if [column for _, column, *_ in db.execute("PRAGMA table_info(log)")] == _COLUMNS_AT_FIRST:
        raise ForeignStore(
            where,
            "it is of an older release, before 0.1, whose logs had a row for each event and can't be read by this one:"
            " use that release, or begin with a new store",
        )
    if db.execute("SELECT name, rootpage FROM sqlite_master ORDER BY rowid").fetchall() != _TABLES:
        raise Corrupt(where, 0, "its tables are not where they were made")


def meaning(error: Exception, where: str, seq: int) -> StoreError:
    """What an error of SQLite while reading means: not ours, not reachable, or damaged at row `seq`."""
    text = str(error)
    if "not a database" in text:
        return ForeignStore(where, "this is not a SQLite database, or its first page is damaged")
    if any(cause in text for cause in ("locked", "disk I/O", "unable to open", "readonly", "denied", "full")):
        return StoreError(where, f"it can't be read: {text}")
    return Corrupt(where, seq, text)
