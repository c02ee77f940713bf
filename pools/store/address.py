"""Addresses of stores: where a log is, as configuration or environment says it.

memory:LABEL                 this process's memory (LABEL may be empty)
sqlite:///abs/dir            a directory with one database per log
sqlite:dir, dir, ~/dir       the same, relative to the working directory at the time of the call, or to home
redis://HOST:PORT/DB         a Redis server; rediss: over TLS. ?prefix=WORD: what its keys begin with,
                             ?unsafe=1: whatever its settings are. The rest: `redis_wire.py`
"""

from __future__ import annotations

import os
import re

from ray_pools.errors import BadInput
from ray_pools.limits import check_name
from ray_pools.store.base import Reader, Store
from ray_pools.store.memory import MemoryReader, MemoryStore
from ray_pools.store.redis import RedisReader, RedisStore
from ray_pools.store.redis_wire import SCHEMES as REDIS_SCHEMES
from ray_pools.store.redis_wire import masked, parse_place
from ray_pools.store.sqlite import SqliteReader, SqliteStore

EXPECTED = "a store's address: sqlite:///DIRECTORY, a plain directory, redis://HOST:PORT/DB, or memory:"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)


def open_store(address: str, name: str) -> Store:
    """The store of the log `name` at `address`, to be opened with `.open()`. BadInput for a wrong address."""
    kind, place = parse_address(address)
    check_name("name", name)
    if kind == "redis":
        return RedisStore(place, name)
    return MemoryStore(place, name) if kind == "memory" else SqliteStore(place, name)


def open_reader(address: str, name: str) -> Reader:
    """A reader of the log `name`, of a live one too. Raises NoLog if there is none, ForeignStore, Corrupt."""
    kind, place = parse_address(address)
    check_name("name", name)
    reader: Reader
    if kind == "redis":
        reader = RedisReader(place, name)
    else:
        reader = MemoryReader(place, name) if kind == "memory" else SqliteReader(place, name)
    try:
        reader.head()
    except BaseException:
        reader.close()
        raise
    return reader


def parse_address(address: str, where: str = "") -> tuple[str, str]:
    """("memory" or "redis", the address) or ("sqlite", an absolute directory). BadInput for anything else."""
    if not isinstance(address, str) or not address.strip() or "\0" in address:
        raise BadInput("store", address, EXPECTED, where)
    found = _SCHEME.fullmatch(address)
    if not found:
        return "sqlite", _directory(address, address, where)
    scheme, rest = found[1].lower(), found[2]
    if scheme in REDIS_SCHEMES:
        parse_place(address, where)
        return "redis", address
    if scheme == "memory":
        return "memory", address
    if scheme != "sqlite" or not rest:
        raise BadInput("store", masked(address), EXPECTED, where)
    if rest.startswith("//"):
        rest = rest[2:]
        if not rest.startswith("/"):
            raise BadInput("store", address, f"{EXPECTED} (three slashes; no host)", where)
    return "sqlite", _directory(rest, address, where)


def _directory(path: str, address: str, where: str) -> str:
    """Absolute, since an actor may change its working directory before it opens."""
    directory = os.path.abspath(os.path.expanduser(path))
    if directory.startswith("//"):  # which POSIX leaves alone, and an address of a file takes for a host
        directory = directory[1:]
    if os.path.exists(directory) and not os.path.isdir(directory):
        raise BadInput("store", address, f"{EXPECTED}; {directory} is not a directory", where)
    return directory
