"""Direct connections (docs/protocol.md): the same calls as by Ray, and by Ray again as soon as anything is wrong.

Faults they stand for: a connection that is cut at any moment, an actor that is replaced, a caller that is none of
ours, one that does not read, a port that can't be reached.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shell_pools import ShellPools, shell_pools

from ray_pools import frames, wire
from ray_pools.actors import direct
from ray_pools.client import line as lines
from ray_pools.client.line import Line, Lines, TryAgain
from ray_pools.errors import PoolsError
from ray_pools.log_check import check_logs

WAIT_S = 30.0
COORDINATOR = wire.coordinator_actor_name()


def until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends_at, "it never happened"
        time.sleep(0.005)


class Server:
    """A listener in a thread of its own: `call` says everything twice, `wait` never ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.cancelled = threading.Event()
        self.waiting = threading.Event()
        self.listener = direct.Listener({"call": self._call, "wait": self._wait})
        self.run(self.listener.start("127.0.0.1"))
        assert self.listener.place is not None
        self.place = self.listener.place

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    async def _call(self, data: bytes) -> bytes:
        if data == b"break":
            raise ValueError("broken")
        await asyncio.sleep(random.random() / 1000)  # answers come in any order
        return data + data

    async def _wait(self, data: bytes) -> bytes:
        self.waiting.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return data

    def close(self) -> None:
        # who is on the way here has arrived, or given up
        until(lambda: not any(each.name == "ray-pools-connect" for each in threading.enumerate()))

        async def end() -> None:
            self.listener.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            while self.listener.connections:  # those that were aborted are closed in the loop's next rounds
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)

        self.run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """On either loop: Ray's actors have uvloop's where it is installed."""
    made = Server(pytest.importorskip(request.param).new_event_loop())
    yield made
    made.close()


@pytest.fixture
def line(server: Server) -> Iterator[Line]:
    made = lines.connect(server.place, "the coordinator")
    assert made is not None
    yield made
    made.close()
    made._thread.join(WAIT_S)


# --- frames


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 4), st.binary(max_size=50)), max_size=5),
    st.lists(st.integers(1, 20), max_size=20),
)
def test_frames_are_the_same_however_the_stream_is_cut(
    sent: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(frames.frame(*each) for each in sent)
    reader, found = frames.Frames(), []
    for size in [*cuts, len(stream)]:
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert found == sent


@pytest.mark.parametrize("kind", [0, 5, 255])
def test_what_is_no_frame_is_refused(kind: int) -> None:
    with pytest.raises(frames.BadFrame):
        list(frames.Frames().feed(frames.frame(1, kind, b"")))
    with pytest.raises(frames.BadFrame):
        list(frames.Frames().feed(b"\xff" * 13))


# --- a connection


def test_each_caller_gets_its_own_answer(line: Line) -> None:
    found: dict[int, bytes] = {}

    def ask(number: int) -> None:
        for turn in range(20):
            data = f"{number}/{turn} ".encode()
            assert line.start("call", data).result(WAIT_S) == data + data
        found[number] = b"ok"

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(found) == 8
    large = b"x" * 5_000_000
    assert line.start("call", large).result(WAIT_S) == large + large


def test_an_error_inside_the_actor_is_one(line: Line) -> None:
    with pytest.raises(PoolsError, match="an error inside the coordinator: ValueError: broken"):
        line.start("call", b"break").result(WAIT_S)
    assert line.start("call", b"a").result(WAIT_S) == b"aa"


def test_calls_of_a_cut_connection_may_be_made_again(server: Server, line: Line) -> None:
    """Nobody knows whether they were carried out; a long poll of nobody is ended."""
    waiting = line.start("wait", b"")
    assert server.waiting.wait(WAIT_S)
    server.loop.call_soon_threadsafe(server.listener.close)
    with pytest.raises(TryAgain):
        waiting.result(WAIT_S)
    assert server.cancelled.wait(WAIT_S)
    until(lambda: not line.up)
    with pytest.raises(TryAgain):
        line.start("call", b"a")


def test_a_caller_that_goes_ends_its_long_poll(server: Server, line: Line) -> None:
    waiting = line.start("wait", b"")
    assert server.waiting.wait(WAIT_S)
    line.close()
    assert server.cancelled.wait(WAIT_S)
    with pytest.raises(TryAgain):
        waiting.result(WAIT_S)
    until(lambda: not server.listener.connections)


def all_of(connection: socket.socket) -> bytes:
    """What is said on it until it ends."""
    heard = b""
    with suppress(ConnectionError):
        while data := connection.recv(100):
            heard += data
    return heard


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nAccept: everything, really everything\r\n\r\n",
        frames.HELLO + b"x" * frames.SECRET_BYTES + frames.frame(1, frames.CALL, b"a"),
        None,  # the secret, and then what is no frame
    ],
)
def test_who_is_no_caller_is_cut_off(server: Server, said: bytes | None) -> None:
    with socket.create_connection((server.place["host"], server.place["port"]), WAIT_S) as stranger:
        stranger.sendall(frames.HELLO + server.place["secret"] + b"\xff" * 20 if said is None else said)
        heard = all_of(stranger)
    assert heard == (frames.HELLO if said is None else b"")


def test_who_says_nothing_is_cut_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_HELLO_S", 0.01)
    with socket.create_connection((server.place["host"], server.place["port"]), WAIT_S) as stranger:
        assert all_of(stranger) == b""


def test_no_connection_is_no_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that nobody listens at, another secret, a place that is none."""
    monkeypatch.setattr(lines, "_CONNECT_S", 5.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        closed = {**server.place, "port": taken.getsockname()[1]}
        places: list[dict[str, Any]] = [closed, {**server.place, "secret": b"x" * 32}, {}]
        for place in [*places, {**server.place, "port": "x"}, {**server.place, "secret": None}]:
            assert lines.connect(place, "a") is None
            assert server.run(direct.connect(place)) is None


def test_nobody_listens_where_calls_are_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert direct.allowed()
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert not direct.allowed()


def test_they_can_be_switched_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_POOLS_DIRECT", "0")
    assert not direct.allowed()
    actor = Actor(server.place)
    Lines(actor.ask).look(COORDINATOR)
    assert actor.asked == 0


# --- when they are made


class Actor:
    """What `ping` by Ray says of the direct way."""

    def __init__(self, place: Any) -> None:
        self.place, self.asked = place, 0

    def ask(self, actor: str) -> Future[bytes]:
        self.asked += 1
        answer: Future[bytes] = Future()
        said = {} if self.place is None else {"direct": self.place}
        answer.set_result(wire.encode_response([wire.ok(said)]))
        return answer


def test_a_connection_is_looked_for_beside_calls_and_replaced_when_it_breaks(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_LOOK_FIRST_S", 0.0)
    actor = Actor(server.place)
    ways = Lines(actor.ask)
    assert ways.get(COORDINATOR) is None
    ways.look(COORDINATOR)
    until(lambda: ways.get(COORDINATOR) is not None)
    first = ways.get(COORDINATOR)
    assert first is not None
    first.close()
    until(lambda: ways.get(COORDINATOR) is None)
    until(lambda: ways.look(COORDINATOR) or ways.get(COORDINATOR) is not None)
    ways.drop()  # this process is in another cluster now
    assert ways.get(COORDINATOR) is None
    until(lambda: ways.look(COORDINATOR) or ways.get(COORDINATOR) is not None)
    ways.close()
    ways.look(COORDINATOR)
    assert ways.get(COORDINATOR) is None


def test_where_there_is_no_other_way_it_is_not_looked_for_all_the_time() -> None:
    """Actors of an older version, or that do not listen."""
    actor = Actor(None)
    ways = Lines(actor.ask)
    for _ in range(100):
        ways.look(COORDINATOR)
    assert actor.asked == 1

    def fails(actor: str) -> Future[bytes]:
        raise TryAgain("it restarts")

    Lines(fails).look(COORDINATOR)  # the call beside it says so


# --- actors that use them

CONFIG = """
pools:
  a: {capacity: {gpu: 2}, placement: none}
  b: {capacity: {gpu: 2}, placement: none}
policies:
  - {requester: vision, pool: a, priority: 2}
  - {requester: vision, pool: b, priority: 1}
"""


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[ShellPools]:
    with shell_pools(tmp_path, CONFIG, direct=True) as made:
        yield made


def all_lines(shells: ShellPools) -> list[Any]:
    """The connections of peers."""
    coordinator = shells.shells[COORDINATOR]
    callers = [*coordinator._peers.values()]
    callers += [shell.coordinator for name, shell in shells.shells.items() if name != COORDINATOR]
    return [caller._line for caller in callers if caller._line is not None and caller._line.up]


def cut_all(shells: ShellPools) -> None:
    """All connections to all actors end at this moment."""

    def cut() -> None:
        for shell in shells.shells.values():
            for connection in list(shell._listener.connections):
                connection.cut()

    shells._loop.call_soon_threadsafe(cut)


def test_peers_and_clients_come_to_use_them(shells: ShellPools) -> None:
    with shells.client() as client:
        for _ in range(3):
            client.submit("vision", gpus=1).wait(WAIT_S).release()
        until(lambda: shells._lines.get(COORDINATOR) is not None and bool(all_lines(shells)))
        before = client.submit("vision", gpus=1).wait(WAIT_S)
        before.release()
    assert check_logs(shells.store, ["a", "b"]).ok


def test_connections_that_are_cut_all_the_time_cost_nobody_more_than_a_delay(
    shells: ShellPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was on its way is said again: no slot is granted twice, none is lost, and all are given back."""
    monkeypatch.setattr(lines, "_LOOK_FIRST_S", 0.001)
    monkeypatch.setattr(lines, "_LOOK_MAX_S", 0.001)
    monkeypatch.setattr("ray_pools.actors.peer._CONNECT_EVERY_S", 0.001)
    over = threading.Event()

    def keep_cutting() -> None:
        while not over.wait(random.random() / 50):
            cut_all(shells)

    cutter = threading.Thread(target=keep_cutting)
    with shells.client() as client:
        cutter.start()
        try:
            tickets = client.submit_many([{"requester": "vision", "gpus": 1}] * 12)
            for ticket in tickets:
                ticket.wait(WAIT_S).release()
        finally:
            over.set()
            cutter.join(WAIT_S)
        assert {ticket.state for ticket in tickets} == {"released"}
    shells.settle()
    report = check_logs(shells.store, ["a", "b"])
    assert report.ok, report.problems
