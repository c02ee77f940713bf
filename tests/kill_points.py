"""Real processes of coordinator and pools that SIGKILL themselves at a named point; their supervisor.

Run as a program, this file is the supervisor: it forks one process per actor, each with the real shell over a sqlite
log and a Unix socket in place of Ray's calls, and forks it anew whenever it ends, until its standard input closes. The
log of all ends is the file `deaths` (a line each: the actor, its life, the signal or code).

The points, each with a moment before and one after: `append` (the whole call of the store), `sync` (the COMMIT, also
that which opens the log), `reply` (a caller's answer), `bid`, `outcome` (a pool's message, or answer, that has one in
it), `take`, `close` (the coordinator's, likewise) and `snapshot`.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from ray_pools import wire
from ray_pools.actors import shell as shell_module
from ray_pools.actors.coordinator import CoordinatorShell
from ray_pools.actors.peer import PeerCaller
from ray_pools.actors.pool import PoolShell
from ray_pools.core.link import Message
from ray_pools.errors import PoolsError
from ray_pools.store.address import parse_address
from ray_pools.store.base import Store
from ray_pools.store.sqlite import SqliteStore

COORDINATOR = "coordinator"
POINTS = {
    COORDINATOR: ("append", "sync", "reply", "take", "close", "snapshot"),
    "pool:p": ("append", "sync", "reply", "bid", "outcome", "snapshot"),
}
SNAPSHOT_EVERY = 4
# A process that ends more often than this is broken, not killed.
_ENDS_MAX = 60
_ANSWER_TIMEOUT_S = 90.0


class Plan(NamedTuple):
    """Who is killed where. nth: in its first life at the nth[0]-th time, in its second at the nth[1]-th, ..."""

    actor: str
    point: str
    after: bool
    nth: tuple[int, ...]


class Killer:
    """Counts how often this life comes to the point of the plan, and ends it there."""

    def __init__(self, plan: Plan | None, life: int) -> None:
        self._plan = plan if plan is not None and life < len(plan.nth) else None
        self._nth = self._plan.nth[life] if self._plan is not None else 0
        self._times = 0

    def at(self, point: str, after: bool) -> None:
        """Here it is: nothing of this process runs after this line if it is its end."""
        if self._plan is None or point != self._plan.point:
            return
        self._times += not after
        if after == self._plan.after and self._times == self._nth:
            os.kill(os.getpid(), signal.SIGKILL)


def said_in(message: Sequence[Any]) -> list[str]:
    """The points that sending this message is."""
    sent = Message(*message)
    kinds = {item[2] for item in sent.items} if sent.sender == COORDINATOR else set()
    found = [kind for kind in ("take", "close") if kind in kinds]
    if sent.sender != COORDINATOR:
        found += ["bid"] * bool(sent.bids) + ["outcome"] * any("ended" in item for item in sent.items)
    return found


def socket_path(folder: str, actor: str) -> str:
    return os.path.join(folder, actor.replace(":", "-"))


# --- one actor's process


def killing_store(killer: Killer, address: str, name: str) -> Store:
    """The sqlite store with the points in it."""

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql != "COMMIT":
                return super().execute(sql, *values)
            killer.at("sync", after=False)
            done = super().execute(sql, *values)
            killer.at("sync", after=True)
            return done

    class KillingStore(SqliteStore):
        def append(self, records: Sequence[tuple[float, bytes]], expected_seq: int) -> int:
            killer.at("append", after=False)
            seq = super().append(records, expected_seq)
            killer.at("append", after=True)
            return seq

        def snapshot(self, seq: int, state: bytes) -> None:
            killer.at("snapshot", after=False)
            super().snapshot(seq, state)
            killer.at("snapshot", after=True)

    return KillingStore(parse_address(address)[1], name, connection=Connection)


class ActorProcess:
    """One life of one actor."""

    def __init__(self, folder: str, actor: str, killer: Killer) -> None:
        self.folder, self.actor, self.killer = folder, actor, killer
        self.shell: Any = None

    async def run(self) -> None:
        """Serves until it is killed."""
        killer, store = self.killer, f"sqlite://{self.folder}/store"
        shell_module.SNAPSHOT_EVERY = SNAPSHOT_EVERY
        shell_module.open_store = lambda address, name: killing_store(killer, address, name)
        PeerCaller._exchange = self._exchange_of_peer()  # type: ignore[method-assign]
        options = {"prewarm": False, "resend_s": 0.05}
        if self.actor == COORDINATOR:
            self.shell = CoordinatorShell(store, "ns", options)
        else:
            self.shell = PoolShell(store, "ns", self.actor.removeprefix("pool:"), options)
        path = socket_path(self.folder, self.actor)
        Path(path).unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, path)
        await server.serve_forever()

    def _exchange_of_peer(self) -> Any:
        folder, killer = self.folder, self.killer

        async def exchange(caller: PeerCaller, message: Message) -> Message:
            request = wire.encode_request([{"op": "exchange", "from": caller.me, "message": list(message)}])
            peer = caller.actor_name.removeprefix("ray-pools:")
            reader, writer = await asyncio.open_unix_connection(socket_path(folder, peer))
            try:
                await _write(writer, request, killer, said_in(message))
                response = await reader.read()
            finally:
                writer.close()
            if not response:
                raise ConnectionError(f"{peer} went away")
            (result,) = wire.decode_response(response, 1, peer)
            return Message(*wire.value_of(result))

        return exchange

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.read()
        try:
            response = await self.shell.call(request)
            await _write(writer, response, self.killer, ["reply", *self._said(request, response)])
        except OSError:  # the caller is gone
            pass
        finally:
            writer.close()

    @staticmethod
    def _said(request: bytes, response: bytes) -> list[str]:
        try:
            ops = wire.decode_request(request)
            if ops[0]["op"] != "exchange":
                return []
            return said_in(wire.value_of(wire.decode_response(response, 1)[0]))
        except PoolsError:
            return []


async def _write(writer: asyncio.StreamWriter, data: bytes, killer: Killer, points: list[str]) -> None:
    for point in points:
        killer.at(point, after=False)
    writer.write(data)
    writer.write_eof()
    await writer.drain()
    for point in points:
        killer.at(point, after=True)


# --- the supervisor


class Supervisor:
    """Keeps one process per actor."""

    def __init__(self, folder: str, actors: list[str], plan: Plan | None) -> None:
        self.folder, self.plan = folder, plan
        self.lives = dict.fromkeys(actors, 0)
        self.pids: dict[int, str] = {}

    def run(self) -> None:
        """Until the standard input closes."""
        for actor in self.lives:
            self._start(actor)
        with open(os.path.join(self.folder, "deaths"), "a", buffering=1) as deaths:
            while not select.select([sys.stdin], [], [], 0.005)[0]:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    continue
                actor = self.pids.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                deaths.write(json.dumps([actor, self.lives[actor], code]) + "\n")
                self.lives[actor] += 1
                if self.lives[actor] > _ENDS_MAX:
                    break
                self._start(actor)
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _start(self, actor: str) -> None:
        pid = os.fork()
        if pid:
            self.pids[pid] = actor
            return
        code = 1
        try:
            plan = self.plan if self.plan is not None and self.plan.actor == actor else None
            asyncio.run(ActorProcess(self.folder, actor, Killer(plan, self.lives[actor])).run())
        finally:
            sys.stderr.flush()
            os._exit(code)


# --- a client


def answer(folder: str, actor: str, op: dict[str, Any]) -> Any:
    """One operation, said until it is answered; raises what refused it."""
    request = wire.encode_request([op])
    ends_at = time.monotonic() + _ANSWER_TIMEOUT_S
    while time.monotonic() < ends_at:
        response = _once(socket_path(folder, actor), request)
        if response:
            return wire.value_of(wire.decode_response(response, 1)[0])
        time.sleep(0.005)  # it is away
    raise AssertionError(f"{actor} does not answer {op}")


def _once(path: str, request: bytes) -> bytes:
    response = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.connect(path)
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                response += piece
        except OSError:
            return b""
    return response


def deaths(folder: str) -> list[tuple[str, int, int]]:
    """(actor, life, exit code, negative for a signal) of each that ended."""
    lines = Path(folder, "deaths").read_text().splitlines()
    return [cast("tuple[str, int, int]", tuple(json.loads(line))) for line in lines]


if __name__ == "__main__":
    _folder, _actors, _plan = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    Supervisor(_folder, _actors, Plan(*_plan) if _plan else None).run()
