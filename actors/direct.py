"""Direct connections to an actor: the calls of docs/protocol.md, without Ray in between.

A call of a Ray actor costs about a millisecond, most of it Ray's own way to and from an asynchronous method. An
actor therefore listens on a port of its node as well, and says where in its answer to `ping`, with a secret that is
new in each run: who may call the actor by Ray learns it, nobody else does. The bytes are the same, and so is all
that is done with them; whoever has no connection, or loses it, calls by Ray. Nothing is encrypted: where Ray's own
calls are (RAY_USE_TLS), nobody listens.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from ray_pools.frames import ANSWER, CALL, FAILED, HELLO, METHODS, SECRET_BYTES, BadFrame, Frames, frame

log = logging.getLogger("ray_pools")

Answer = Callable[[bytes], Awaitable[bytes]]

_HELLO_S = 5.0
_CALLS_MAX = 20_000
"""Of one connection that are not answered yet."""
_UNREAD_MAX_BYTES = 256 * 2**20
"""Answers that a caller does not read: it is cut off."""
_CONNECT_S = 2.0


def allowed() -> bool:
    """Not where calls by Ray are encrypted (RAY_USE_TLS): nothing may go past that. Nor where RAY_POOLS_DIRECT is 0."""
    encrypted = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    return not encrypted and os.environ.get("RAY_POOLS_DIRECT", "1") != "0"


class Listener:
    """Answers direct calls. `methods`: what `call` and `wait` of the actor do."""

    def __init__(self, methods: Mapping[str, Answer]) -> None:
        self.methods = methods
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.connections: set[_Served] = set()
        self._server: asyncio.Server | None = None
        self._place: dict[str, Any] | None = None

    async def start(self, host: str) -> None:
        """Listens at a free port of this address. Where that can't be, everybody calls by Ray."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Served(self), host, 0, backlog=1024)
        except OSError as problem:
            log.warning("no direct connections at %s: %s", host, problem)
            return
        port = self._server.sockets[0].getsockname()[1]
        self._place = {"host": host, "port": port, "secret": self.secret}

    @property
    def place(self) -> dict[str, Any] | None:
        """What `ping` says of it; None: nobody listens."""
        return self._place

    def close(self) -> None:
        """Nobody is listened to any more."""
        self._place = None
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.cut()


class _Served(asyncio.Protocol):
    """One connection, at the actor."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._hello = b""
        self._trusted = False
        self._deadline: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # long polls: nobody is there to hear them once the connection is gone
        self._waits: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._listener.connections.add(self)
        self._deadline = asyncio.get_running_loop().call_later(_HELLO_S, self.cut)

    def connection_lost(self, problem: Exception | None) -> None:
        self._transport = None
        self._listener.connections.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
        for task in self._waits:
            task.cancel()

    def cut(self) -> None:
        """Ends the connection now."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._trusted:
            data = self._greeted(data)
        try:
            for number, kind, payload in self._frames.feed(data) if self._trusted else ():
                if kind not in METHODS or len(self._tasks) >= _CALLS_MAX:
                    self.cut()
                    return
                task = asyncio.get_running_loop().create_task(self._answer(number, kind, payload))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                if kind != CALL:
                    self._waits.add(task)
                    task.add_done_callback(self._waits.discard)
        except BadFrame:
            self.cut()

    def _greeted(self, data: bytes) -> bytes:
        """What comes behind the hello, once that is whole and right."""
        self._hello += data
        whole = len(HELLO) + SECRET_BYTES
        if len(self._hello) < whole:
            return b""
        said, rest, self._hello = self._hello[:whole], self._hello[whole:], b""
        if not hmac.compare_digest(said, HELLO + self._listener.secret):
            self.cut()
            return b""
        self._trusted = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._transport.write(HELLO)
        return rest

    async def _answer(self, number: int, kind: int, payload: bytes) -> None:
        try:
            found = frame(number, ANSWER, await self._listener.methods[METHODS[kind]](payload))
        except Exception as problem:  # what a call by Ray would raise at its caller
            log.exception("a direct call failed")
            found = frame(number, FAILED, f"{type(problem).__name__}: {problem}".encode()[:2000])
        if self._transport is None:
            return
        self._transport.write(found)
        if self._transport.get_write_buffer_size() > _UNREAD_MAX_BYTES:
            self.cut()


class Line(asyncio.Protocol):
    """One connection, at another actor that calls (`connect` makes it)."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._greeting = b""
        self._number = 0
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self.ready: asyncio.Future[None] = self._loop.create_future()

    @property
    def up(self) -> bool:
        return self._transport is not None

    async def call(self, payload: bytes, timeout_s: float) -> bytes:
        """The answer of `call`. ConnectionError, asyncio.TimeoutError: nobody knows whether it was carried out."""
        if self._transport is None:
            raise ConnectionError("the connection is gone")
        self._number += 1
        number = self._number
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._pending[number] = answer
        # no wait_for: it would make a task, and two more rounds of the loop
        late = self._loop.call_later(timeout_s, self._late, answer)
        try:
            self._transport.write(frame(number, CALL, payload))
            return await answer
        finally:
            late.cancel()
            self._pending.pop(number, None)

    @staticmethod
    def _late(answer: asyncio.Future[bytes]) -> None:
        if not answer.done():
            answer.set_exception(asyncio.TimeoutError("no answer yet"))

    def close(self) -> None:
        """Ends it; who waits for an answer gets none."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, problem: Exception | None) -> None:
        self._transport = None
        if not self.ready.done():
            self.ready.cancel()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the connection is gone"))

    def data_received(self, data: bytes) -> None:
        if len(self._greeting) < len(HELLO):
            missing = len(HELLO) - len(self._greeting)
            self._greeting += data[:missing]
            data = data[missing:]
            if self._greeting == HELLO and not self.ready.done():
                self.ready.set_result(None)
        try:
            for number, kind, payload in self._frames.feed(data):
                answer = self._pending.get(number)
                if answer is not None and not answer.done():
                    if kind == ANSWER:
                        answer.set_result(payload)
                    else:
                        answer.set_exception(RuntimeError(payload.decode(errors="replace")))
        except BadFrame:
            self.close()


async def connect(place: Mapping[str, Any]) -> Line | None:
    """To an actor that said so of itself; None where that does not work: call by Ray."""
    line = Line()
    try:
        opening = asyncio.get_running_loop().create_connection(
            lambda: line, str(place["host"]), int(place["port"])
        )
        transport, _ = await asyncio.wait_for(opening, _CONNECT_S)
        transport.write(HELLO + bytes(place["secret"]))
        await asyncio.wait([line.ready], timeout=_CONNECT_S)
    except (OSError, asyncio.TimeoutError, KeyError, TypeError, ValueError, OverflowError) as problem:
        log.debug("no direct connection: %s", problem)
    except BaseException:  # cancelled
        line.close()
        raise
    if line.ready.done() and not line.ready.cancelled():
        return line
    line.close()
    return None
