"""A disk that fails at a chosen write or sync, beneath SQLite: a VFS of the tests' own, made of the default one.

SQLite's files keep their own methods but for three: writing, cutting and syncing are counted, and from the chosen
one on they fail as a full disk (after half of the data), a broken one, or one that can't sync. Needs a Python whose
sqlite3 module is linked with the shared library, else `available()` says why not.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FULL, IO_ERROR_WRITE, IO_ERROR_FSYNC, IO_ERROR_TRUNCATE = 13, 10 | 3 << 8, 10 | 4 << 8, 10 | 6 << 8

Pointer = ctypes.c_void_p
_write_type = ctypes.CFUNCTYPE(ctypes.c_int, Pointer, Pointer, ctypes.c_int, ctypes.c_int64)
_truncate_type = ctypes.CFUNCTYPE(ctypes.c_int, Pointer, ctypes.c_int64)
_sync_type = ctypes.CFUNCTYPE(ctypes.c_int, Pointer, ctypes.c_int)
_open_type = ctypes.CFUNCTYPE(ctypes.c_int, Pointer, Pointer, Pointer, ctypes.c_int, Pointer)


class Vfs(ctypes.Structure):
    """struct sqlite3_vfs, version 3."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("file_size", ctypes.c_int),
        ("path_max", ctypes.c_int),
        ("next", Pointer),
        ("name", ctypes.c_char_p),
        ("data", Pointer),
        ("open", Pointer),
        ("others", Pointer * 14),
    )


class Methods(ctypes.Structure):
    """struct sqlite3_io_methods, version 3."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("close", Pointer),
        ("read", Pointer),
        ("write", Pointer),
        ("truncate", Pointer),
        ("sync", Pointer),
        ("others", Pointer * 13),
    )


def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libsqlite3.so.0")
    except OSError:
        return None
    library.sqlite3_libversion.restype = ctypes.c_char_p
    library.sqlite3_sourceid.restype = ctypes.c_char_p
    library.sqlite3_vfs_find.restype = ctypes.POINTER(Vfs)
    (source,) = sqlite3.connect(":memory:").execute("SELECT sqlite_source_id()").fetchone()
    return library if library.sqlite3_sourceid().decode() == source else None


def available() -> str:
    """Why there can be no such disk here; empty if there can."""
    if _library() is None:
        return "this Python's sqlite3 module does not use a shared libsqlite3"
    return ""


class Disk:
    """Counts what is written, and fails from the `fails_at`-th on while `broken`."""

    def __init__(self) -> None:
        self.kind = ""
        self.fails_at = 0
        self.lasts = 1
        self.count = 0
        self.failed = 0

    def breaks(self, kind: str, fails_at: int, lasts: int = 1) -> None:
        """From the n-th on, so many writes ("full", "write") or syncs ("sync") fail."""
        self.kind, self.fails_at, self.lasts = kind, fails_at, lasts
        self.count = self.failed = 0

    def heals(self) -> None:
        self.kind = ""

    def meets(self, *kinds: str) -> bool:
        """Whether this call, which `kinds` concern, fails."""
        if self.kind not in kinds:
            return False
        self.count += 1
        if self.fails_at <= self.count < self.fails_at + self.lasts:
            self.failed += 1
            return True
        return False


@contextmanager
def failing_disk() -> Iterator[Disk]:
    """All databases opened inside are on such a disk."""
    library = _library()
    assert library is not None
    disk, kept = Disk(), []
    default = library.sqlite3_vfs_find(None)
    methods: dict[int, Methods] = {}

    def wrapped(address: int) -> Methods:
        if address not in methods:
            own = Methods.from_buffer_copy(ctypes.cast(address, ctypes.POINTER(Methods)).contents)
            write, truncate, sync = _write_type(own.write), _truncate_type(own.truncate), _sync_type(own.sync)

            def on_write(file: Any, data: Any, size: int, offset: int) -> int:
                if disk.meets("full", "write"):
                    write(file, data, size // 2, offset)
                    return FULL if disk.kind == "full" else IO_ERROR_WRITE
                return int(write(file, data, size, offset))

            def on_truncate(file: Any, size: int) -> int:
                return IO_ERROR_TRUNCATE if disk.meets("write") else int(truncate(file, size))

            def on_sync(file: Any, flags: int) -> int:
                return IO_ERROR_FSYNC if disk.meets("sync") else int(sync(file, flags))

            callbacks = _write_type(on_write), _truncate_type(on_truncate), _sync_type(on_sync)
            kept.append(callbacks)
            own.write, own.truncate, own.sync = (ctypes.cast(each, Pointer).value for each in callbacks)
            methods[address] = own
        return methods[address]

    open_ = _open_type(default.contents.open)

    def on_open(_vfs: Any, name: Any, file: Any, flags: int, out: Any) -> int:
        result = int(open_(ctypes.addressof(default.contents), name, file, flags, out))
        place = ctypes.cast(file, ctypes.POINTER(Pointer))
        if result == 0 and place.contents.value:
            place[0] = ctypes.addressof(wrapped(place.contents.value))
        return result

    vfs = Vfs.from_buffer_copy(default.contents)
    opener = _open_type(on_open)
    vfs.name, vfs.open = b"failing", ctypes.cast(opener, Pointer).value
    library.sqlite3_vfs_register(ctypes.byref(vfs), 1)
    try:
        yield disk
    finally:
        library.sqlite3_vfs_register(default, 1)
        library.sqlite3_vfs_unregister(ctypes.byref(vfs))
        _alive.append((vfs, opener, methods, kept))


# a connection that a failed sync left open still points to these
_alive: list[Any] = []
