"""A direct connection of this process to an actor (docs/protocol.md, "Direct connections"): faster than calls by Ray.

One thread reads; callers send themselves. Once anything is wrong with it, whatever is not answered fails with TryAgain,
and callers go by Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from .. import wire
from ..errors import PoolsError
from ..frames import ANSWER, HELLO, KINDS, BadFrame, Frames, frame

log = logging.getLogger("ray_pools")

_CONNECT_S = 2.0
_SEND_S = 10
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000))
"""A machine that is gone without a word shows after about ten seconds."""
_READ_BYTES = 2**18
_LOOK_FIRST_S, _LOOK_MAX_S = 1.0, 60.0


class TryAgain(Exception):
    """The call may or may not have been carried out; the same call again may get an answer."""


class Line:
    """Made by `connect`. `start` may be called from any thread."""

    def __init__(self, connection: socket.socket, actor: str) -> None:
        self._socket, self._actor = connection, actor
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[bytes]] = {}
        self._sending = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="ray-pools-line", daemon=True)
        self._thread.start()

    @property
    def up(self) -> bool:
        """It worked until now."""
        return not self._closed

    def start(self, method: str, data: bytes) -> Future[bytes]:
        """Sends to `call` or `wait`. Raises TryAgain, or fails the future with it, when the connection is gone."""
        answer: Future[bytes] = Future()
        with self._sending:
            if self._closed:
                raise TryAgain("the connection is gone")
            number = next(self._numbers)
            self._pending[number] = answer
            try:
                self._socket.sendall(frame(number, KINDS[method], data))
            except OSError as problem:
                self._pending.pop(number, None)
                self._shut()
                raise TryAgain(f"the connection is gone ({problem})") from None
        return answer

    def close(self) -> None:
        """Whoever waits for an answer gets none. Harmless twice."""
        with self._sending:
            self._shut()

    def _shut(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which does the rest

    def _read(self) -> None:
        frames = Frames()
        with contextlib.suppress(OSError, BadFrame):
            while data := self._socket.recv(_READ_BYTES):
                for number, kind, payload in frames.feed(data):
                    self._answered(number, kind, payload)
        with self._sending:
            self._closed = True
            self._socket.close()
            pending, self._pending = self._pending, {}
        for answer in pending.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(TryAgain("the connection is gone"))

    def _answered(self, number: int, kind: int, payload: bytes) -> None:
        answer = self._pending.pop(number, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if kind == ANSWER:
            answer.set_result(payload)
        else:
            why = payload.decode(errors="replace")
            answer.set_exception(PoolsError(f"an error inside {self._actor}: {why}"))


def connect(place: Mapping[str, Any], actor: str) -> Line | None:
    """To an actor that said so of itself; None where that does not work from here. `actor`: as messages call it."""
    made: socket.socket | None = None
    try:
        made = socket.create_connection((str(place["host"]), int(place["port"])), _CONNECT_S)
        made.sendall(HELLO + bytes(place["secret"]))
        greeting = b""
        while len(greeting) < len(HELLO) and (more := made.recv(len(HELLO) - len(greeting))):
            greeting += more
        if greeting == HELLO:
            _settle(made)
            return Line(made, actor)
    except (OSError, KeyError, TypeError, ValueError, OverflowError) as problem:
        log.debug("no direct connection to %s: %s", actor, problem)
    if made is not None:
        made.close()
    return None


def _settle(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    # who does not read must not hold up a caller for ever
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))


class Lines:
    """The direct connections of one transport. `ask`: an actor's answer to `ping`, by Ray, as a future of bytes."""

    def __init__(self, ask: Callable[[str], Future[bytes]]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._lines: dict[str, Line] = {}
        # actor -> when to look for one again, and how long after that if there is none
        self._next: dict[str, tuple[float, float]] = {}
        self._era = 0
        # nobody is looked for
        self._closed = os.environ.get("RAY_POOLS_DIRECT", "1") == "0"

    def get(self, actor: str) -> Line | None:
        """The connection, if there is one that works."""
        line = self._lines.get(actor)
        return line if line is not None and line.up else None

    def look(self, actor: str) -> None:
        """A call went by Ray, and so would more: finds out, beside it, whether there is a shorter way."""
        now = time.monotonic()
        with self._lock:
            at, pause_s = self._next.get(actor, (0.0, _LOOK_FIRST_S))
            if self._closed or now < at:
                return
            self._next[actor] = now + pause_s, min(2 * pause_s, _LOOK_MAX_S)
            era = self._era
        try:
            answer = self._ask(actor)
        except Exception as problem:  # noqa: BLE001 - the call that is made will say what is wrong
            log.debug("no direct connection to %s: %s", actor, problem)
            return
        answer.add_done_callback(lambda done: self._asked(actor, era, done))

    def _asked(self, actor: str, era: int, answer: Future[bytes]) -> None:
        """In a thread of Ray's, which must not be held up."""
        if not answer.cancelled() and answer.exception() is None:
            threading.Thread(
                target=self._connect,
                args=(actor, era, answer.result()),
                name="ray-pools-connect",
                daemon=True,
            ).start()

    def _connect(self, actor: str, era: int, said: bytes) -> None:
        try:
            place = wire.value_of(wire.decode_response(said, 1, actor)[0]).get("direct")
        except PoolsError:
            return
        line = connect(place, actor) if isinstance(place, Mapping) else None
        if line is None:
            return
        with self._lock:
            wanted = not self._closed and era == self._era and self.get(actor) is None
            if wanted:
                self._lines[actor] = line
                self._next.pop(actor, None)
        if not wanted:
            line.close()

    def drop(self) -> None:
        """All of them: they lead to another cluster than the one that this process is in now."""
        with self._lock:
            self._era += 1
            lines, self._lines, self._next = self._lines, {}, {}
        for line in lines.values():
            line.close()

    def close(self) -> None:
        """There are none any more."""
        self._closed = True
        self.drop()
