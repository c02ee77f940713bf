"""Log stores: where a pool and the coordinator keep what they must not forget.

One contract (`base.py`), several stores (`sqlite.py`, `memory.py`, `redis.py`), addresses (`address.py`), the checksum
chain (`chain.py`). Event bodies are opaque bytes here; what is in them is the core's affair.

What a log is, in every store
-----------------------------
A log belongs to one actor and is known by that actor's name. It is a sequence of rows, numbered from 1
without holes. A row is

    seq    its number
    epoch  the epoch of the opener that wrote it; never falls from one row to the next
    at     the core's time in seconds, a finite float
    body   one event, a msgpack array [tag, version, ...]

Rows are appended by turns: all rows of a turn become durable together or not at all. A reader only ever sees
whole turns. What is stored is batches: a turn is one, or several if its rows have different times, or if it
has more than 1,000 rows or 1 MiB. A batch is

    seq    of its last row
    first  the seq of its first row
    epoch, at   of all its rows
    sizes  the length of each body, unsigned 32 bit, little-endian; empty if there is one row only
    body   the bodies, one after the other
    chain  16 bytes of BLAKE2b over: chain of the batch before, seq, first and epoch (unsigned, 64 bit), at
           (IEEE double), all little-endian, then sizes, then body. Before row 1 stands BLAKE2b of the log's
           name, so that batches of one log are none of another.

Opening for writing raises the log's epoch durably, and from then
on whoever opened it before can append no more.

The chain finds what a disk can do: any changed byte in any column, batches missing from the middle, swapped
or taken from another log. It can't find that rows are missing from the *end*: a shorter log is as good a log.
That is found in two other ways: a snapshot newer than the last row is refused here, and peers remember the
highest (epoch, seq) of each other. The chain has no key: it is no proof against someone who means to
forge a log.

A snapshot is the folded state after row `seq`, with that row's epoch, the chain of its batch and a checksum
of its own over all of it. Only the latest is kept. Pruning removes whole batches, all before some row that is
not above the latest snapshot; the number and chain of the last removed row are kept, so that what is left
still hangs on something.

The file of the sqlite store
----------------------------
One SQLite database per log, `DIR/<name>.sqlite`, the name percent-encoded (letters, digits, `_` and `-`
stay; a long one is cut and ends in a hash). Journal mode WAL, so that `<name>.sqlite-wal` and `-shm` belong
to it while it is in use: a copy of the database file alone is no backup. application_id is 0x52504C47
("RPLG"), user_version is the version of this format, 1 (nothing older was ever released); any other is refused. Tables:

    head      one row: name, epoch, base_seq and base_chain (last pruned row, or 0 and the chain before row
              1), seal (BLAKE2b-128 over these)
    log       one row for each batch: seq INTEGER PRIMARY KEY, first, epoch, at, sizes, chain, body
    snapshot  seq INTEGER PRIMARY KEY, epoch, chain (of the batch of row seq), seal (BLAKE2b-128 over these and state),
              state

The file is made complete under another name and linked into place, so that an empty or half-made file of
the right name is a damaged log, never a new one.
"""

from ray_pools.store.address import open_reader, open_store
from ray_pools.store.base import (
    AppendFailed,
    Batch,
    Corrupt,
    Fenced,
    ForeignStore,
    NoLog,
    Pruned,
    Reader,
    Row,
    SequenceGap,
    Snapshot,
    Store,
    StoreError,
    SyncFailed,
    UnsafeStore,
)

__all__ = [
    "AppendFailed",
    "Batch",
    "Corrupt",
    "Fenced",
    "ForeignStore",
    "NoLog",
    "Pruned",
    "Reader",
    "Row",
    "SequenceGap",
    "Snapshot",
    "Store",
    "StoreError",
    "SyncFailed",
    "UnsafeStore",
    "open_reader",
    "open_store",
]
