"""The log on Redis streams, for clusters whose head can move: each turn one script, carried out as a whole.

Keys of a log, with the name percent-encoded in NAME; the braces keep them together in a sharded service:

    PREFIX:{NAME}:head      hash: format, name, epoch, base_seq, base_chain, seal (BLAKE2b-128 over name, epoch,
                            base_seq, base_chain), and of the last row seq and chain
    PREFIX:{NAME}:log       stream: one entry per batch, its id is <epoch>-<seq of its last row>; fields first,
                            at (as text that gives the same double), sizes, body, chain
    PREFIX:{NAME}:snapshot  hash: seq, epoch, chain, state, seal

Why it is safe: every write is a script that first reads the head's epoch, so that a fenced writer writes
nothing, and Redis itself refuses an id that is not above the last. Redis appends what a script wrote to its
file as one transaction and drops one that is cut off. With appendfsync=always it answers only after the sync.
Last row and head are written together and compared when read: when Redis reads its file it passes over
commands that fail, so that a damaged one could cut a stream short.

What errors mean: a server that refuses has not begun (`NOTHING_DONE`). When a connection breaks after something
was sent, the fate of the turn is not known, and the head does not tell it either: what was sent may still be on
its way. So the same turn is sent again, and the script knows one that it has; what comes later on the old
way finds the turn done. If nobody answers for RESEND_WAIT_S: SyncFailed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ray_pools.store.base import (
    AppendFailed,
    Corrupt,
    Fenced,
    ForeignStore,
    SequenceGap,
    Store,
    StoreError,
    SyncFailed,
    UnsafeStore,
    cannot_prune,
    opened_epoch,
)
from ray_pools.store.chain import genesis, seal, stored, verified
from ray_pools.store.redis_read import FORMAT, Head, RedisReader
from ray_pools.store.redis_wire import PAUSE_S, Lost, NotSynced, Refusal, Script, Wire, keep_promises

RESEND_WAIT_S = 10.0
"""How long a server may be away in the middle of an append before the process gives up."""
TURN_MAX_BYTES = 256 * 2**20
TURN_MAX_BATCHES = 100_000
"""Below what a server takes as one command."""
OPEN_TRIES = 20
NOTHING_DONE = {
    "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN",
}  # fmt: skip
"""Refusals of a server that has carried out nothing of a script; within one they come at its first write."""

_OPEN = Script("""
if (redis.call('HGET', KEYS[1], 'seal') or '') ~= ARGV[1] then return {'moved'} end
if ARGV[1] == '' then
  redis.call('HSET', KEYS[1], 'format', ARGV[4], 'name', ARGV[5], 'epoch', ARGV[2], 'seal', ARGV[3],
    'base_seq', '0', 'base_chain', ARGV[6], 'seq', '0', 'chain', ARGV[6])
else
  redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'seal', ARGV[3])
end
return {'ok'}
""")
"""Compared is the seal: it stands for everything that goes into the new one."""

_CHECK = """
local head = redis.call('HMGET', KEYS[1], 'epoch', 'seq', 'chain', 'base_seq')
if not head[1] then return {'gone'} end
if head[1] ~= ARGV[1] then return {'fenced', head[1]} end
"""

_LOOK = Script(
    _CHECK
    + """
if head[2] ~= ARGV[2] or head[3] ~= ARGV[3] then return {'moved', head[2]} end
return {'ok'}
"""
)

_APPEND = Script(
    _CHECK
    + """
if head[2] == ARGV[4] and head[3] == ARGV[5] then return {'ok'} end
if head[2] ~= ARGV[2] or head[3] ~= ARGV[3] then return {'moved', head[2]} end
for i = 6, #ARGV, 6 do
  redis.call('XADD', KEYS[2], ARGV[i], 'first', ARGV[i + 1], 'at', ARGV[i + 2],
    'sizes', ARGV[i + 3], 'body', ARGV[i + 4], 'chain', ARGV[i + 5])
end
redis.call('HSET', KEYS[1], 'seq', ARGV[4], 'chain', ARGV[5])
return {'ok'}
"""
)

_SNAP = Script(
    _CHECK
    + """
local later = redis.call('HGET', KEYS[3], 'seq')
if later and tonumber(later) > tonumber(ARGV[2]) then return {'later', later} end
redis.call('HSET', KEYS[3], 'seq', ARGV[2], 'epoch', ARGV[3], 'chain', ARGV[4], 'state', ARGV[5], 'seal', ARGV[6])
return {'ok'}
"""
)

_PRUNE = Script(
    _CHECK
    + """
if tonumber(head[4]) >= tonumber(ARGV[2]) then return {'ok'} end
redis.call('XTRIM', KEYS[2], 'MINID', '=', ARGV[5])
redis.call('HSET', KEYS[1], 'base_seq', ARGV[2], 'base_chain', ARGV[3], 'seal', ARGV[4])
return {'ok'}
"""
)


class RedisStore(RedisReader, Store):
    """Writes a log; see `Store`."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(address, name)
        self._opened = False
        self._epoch = 0
        self._seq = 0
        self._chain = b""
        self._broken: StoreError | None = None

    def open(self, at_least: int = 0) -> int:
        self.close()
        self._broken = None
        self._opened = True
        try:
            self._open(at_least)
        except BaseException:
            self.close()
            raise
        return self._epoch

    def _open(self, at_least: int) -> None:
        head: Head | None
        self._may_write()
        for _ in range(OPEN_TRIES):
            head = self._found()
            if head is None:
                last, base_seq, base_chain, before = 0, 0, genesis(self.name), b""
            else:
                self._check_last(head)
                last, base_seq, base_chain, before = (
                    head.epoch,
                    head.base_seq,
                    head.base_chain,
                    head.seal,
                )
            epoch = opened_epoch(last, at_least)
            sealed = seal(self.name, epoch, base_seq, base_chain)
            values = (before, epoch, sealed, FORMAT, self.name, base_chain)
            try:
                # not by _ask: sent twice, it would find its own epoch and take it for another's
                (said, *_) = self._live().run(_OPEN, self._keys, values)
            except Lost as error:
                raise StoreError(self.where, f"the server can't be reached: {error}") from None
            except (Refusal, NotSynced) as error:
                raise AppendFailed(self.where, f"it can't be opened: {error}") from None
            if said == b"ok":
                break
        else:
            raise AppendFailed(self.where, "others keep opening it")
        head = self._head()  # only now nobody else can append any more
        self._check_last(head)
        self._epoch, self._seq, self._chain = epoch, head.seq, head.chain

    def _may_write(self) -> None:
        """A user who may not append hears it now, and not in the middle of a turn: both commands do nothing."""
        probes: list[tuple[str | int, ...]] = [
            ("XADD", self._keys[1], "0-0", "first", 0),
            ("XTRIM", self._keys[1], "MINID", "=", "0-0"),
        ]
        added, trimmed = self._ask(lambda wire: wire.many(probes))
        for answer in (added, trimmed):
            if isinstance(answer, Refusal) and answer.code == "NOPERM":
                raise StoreError(self.where, f"the server does not let this user append: {answer}")
            if isinstance(answer, Refusal) and answer.code == "WRONGTYPE":
                raise ForeignStore(self.where, "its keys are of another application")
        if isinstance(trimmed, Refusal):
            raise StoreError(self.where, f"Redis 6.2 or newer is needed ({trimmed})")

    def _check_last(self, head: Head) -> None:
        """What is to be appended hangs on the last batch: it must be sound."""
        self._check_end(head)
        if head.last is not None:
            before = self._before(head.last)
            before_seq, chain = (before.seq, before.chain) if before else (head.base_seq, head.base_chain)
            for _ in verified(self.where, before_seq, chain, [head.last]):
                pass

    def append(self, records: Sequence[tuple[float, bytes]], expected_seq: int) -> int:
        if expected_seq != self._seq or not records:
            self._look()
            if expected_seq != self._seq:
                raise SequenceGap(self.where, expected_seq, self._seq)
            return self._seq
        self._must_be_sound()
        batches = stored(self.where, self._seq, self._chain, self._epoch, records)
        if len(batches) > TURN_MAX_BATCHES or sum(len(each.body) for each in batches) > TURN_MAX_BYTES:
            raise AppendFailed(self.where, f"a turn must be at most {TURN_MAX_BYTES} bytes here")
        last = batches[-1]
        values: list[bytes | str | int] = [self._epoch, self._seq, self._chain, last.seq, last.chain]
        for seq, first, epoch, at, sizes, body, chain in batches:
            values += (f"{epoch}-{seq}", first, repr(at), sizes, body, chain)
        self._write(_APPEND, values)
        self._seq, self._chain = last.seq, last.chain
        return self._seq

    def snapshot(self, seq: int, state: bytes) -> None:
        self._look()
        with self._before_writing():
            if not self._head().base_seq < seq <= self._seq:
                raise SequenceGap(self.where, seq, self._seq)
            entry = self._find(seq)
        if entry is None or not isinstance(entry.chain, bytes):
            raise Corrupt(self.where, seq, "the row is missing, but later ones are there")
        epoch, chain = entry.epoch, entry.chain
        said = self._write(_SNAP, [self._epoch, seq, epoch, chain, state, seal(seq, epoch, chain, state)])
        if said[0] == b"later":
            raise AppendFailed(self.where, f"there is a snapshot of row {int(said[1])}, after row {seq}")

    def prune(self, before_seq: int) -> int:
        self._look()
        with self._before_writing():
            latest = self.latest_snapshot()
            if before_seq > (latest.seq if latest else 0):
                raise AppendFailed(self.where, cannot_prune(before_seq, latest))
            head = self._head()
            stays = self._find(before_seq) if before_seq > head.base_seq + 1 else None
            last = self._before(stays) if stays else None
        if stays is None or last is None:
            return 0
        base_seq, base_chain = last.seq, last.chain
        sealed = seal(self.name, self._epoch, base_seq, base_chain)
        self._write(_PRUNE, [self._epoch, base_seq, base_chain, sealed, f"{stays.epoch}-{stays.seq}"])
        return base_seq - head.base_seq

    def close(self) -> None:
        self._opened = False
        super().close()

    def _connect(self) -> Wire:
        """Looks at the settings each time: another server, or the same with others, may stand there by now."""
        if not self._opened:
            raise StoreError(self.where, "the store is not open")
        wire = super()._connect()
        if not self.place.unsafe:
            try:
                keep_promises(wire, self.where)
            except BaseException:
                wire.close()
                raise
        return wire

    def _must_be_sound(self) -> None:
        if self._broken is not None:
            raise self._broken
        if not self._opened:
            raise StoreError(self.where, "the store is not open")

    def _look(self) -> None:
        """This writer is not fenced, and the log is as it left it."""
        self._must_be_sound()
        mine = (self._epoch, self._seq, self._chain)
        with self._before_writing():
            said = self._ask(lambda wire: wire.run(_LOOK, self._keys, mine, sync=False))
        self._refuse(said)

    def _refuse(self, said: Sequence[Any]) -> None:
        if said[0] == b"fenced":
            self._broken = Fenced(self.where, self._epoch, int(said[1]))
            raise self._broken
        if said[0] == b"gone":
            raise Corrupt(self.where, 0, "the log is gone")
        if said[0] == b"moved":
            seq = int(said[1])
            raise Corrupt(self.where, seq, f"this should not be the last row; row {self._seq} was written")

    def _live(self) -> Wire:
        """A connection that is not known to be broken. Raises Lost, StoreError: then nothing was sent."""
        if self._wire is not None and self._wire.is_gone():
            self._drop()
        if self._wire is None:
            self._wire = self._connect()
        return self._wire

    def _write(self, script: Script, values: Sequence[bytes | str | int]) -> list[Any]:
        """Carries out a script that may be sent any number of times, and is durable when this returns."""
        self._must_be_sound()
        try:
            wire = self._live()
        except Lost as error:
            raise AppendFailed(
                self.where, f"the server can't be reached ({error}); nothing was sent"
            ) from None
        except UnsafeStore as error:
            raise AppendFailed(self.where, f"{error.why}; nothing was sent") from None
        try:
            said: list[Any] = wire.run(script, self._keys, values)
        except Lost as error:
            return self._sent_again(script, values, error)
        except Refusal as error:
            if error.code in NOTHING_DONE:
                raise AppendFailed(self.where, f"{error}; nothing was written") from None
            self._break(str(error))
        except NotSynced as error:
            self._break(str(error))
        except BaseException as error:
            self._drop()
            self._broken = SyncFailed(self.where, f"{error!r} at the commit; what is on disk is not known")
            raise self._broken from error
        self._refuse(said)
        return said

    def _sent_again(self, script: Script, values: Sequence[bytes | str | int], lost: Lost) -> list[Any]:
        """After a connection broke with something sent: done now, or nobody knows."""
        deadline = time.monotonic() + RESEND_WAIT_S
        while True:
            self._drop()
            try:
                said: list[Any] = self._live().run(script, self._keys, values)
                break
            except Lost as error:
                lost = error
            except (Refusal, NotSynced, StoreError) as error:
                self._break(f"the connection broke at the commit, and then: {error}")
            if time.monotonic() > deadline:
                self._break(f"the connection broke at the commit, and the server is away since ({lost})")
            time.sleep(PAUSE_S)
        if said[0] in (b"fenced", b"gone", b"moved"):  # the first sending may have been in time all the same
            self._break(f"the connection broke at the commit, and now the log is {said[0].decode()}")
        return said

    def _break(self, why: str) -> NoReturn:
        self._broken = SyncFailed(self.where, f"{why}; what is on disk is not known")
        raise self._broken

    @contextlib.contextmanager
    def _before_writing(self) -> Iterator[None]:
        """What goes wrong while a write is only prepared has written nothing."""
        try:
            yield
        except StoreError as error:
            if type(error) in (StoreError, UnsafeStore):
                raise AppendFailed(self.where, f"{error.why}; nothing was written") from None
            raise


__all__ = ["RedisReader", "RedisStore"]
