"""Redis servers that die, files that are cut or damaged, and connections that break, under the log on streams.

Stands for: a turn cut by the server's death, an acknowledged turn that is lost, an answer that never comes, two
writers at once.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer
from test_contract import NAME, at_once, bodies, turn

import ray_pools.store.redis as redis_store
from ray_pools.store import (
    AppendFailed,
    Corrupt,
    Fenced,
    ForeignStore,
    NoLog,
    Store,
    StoreError,
    SyncFailed,
    open_reader,
    open_store,
)
from ray_pools.store.redis import RedisStore


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may do anything to."""
    server = RedisServer(tmp_path / "redis")
    assert server.start()
    yield server
    server.kill()


def test_what_was_acknowledged_outlives_the_server(server: RedisServer) -> None:
    """SIGKILL between appends, twenty times: every acknowledged event is there, and the same writer goes on."""
    store = open_store(server.url, NAME)
    assert store.open() == 1
    seq = 0
    for number in range(1, 21):
        for count in (1, number):
            seq = store.append(at_once(seq + 1, count), seq)
        if number == 10:
            store.snapshot(seq - 3, b"state")
            store.prune(5)
        server.kill()
        assert server.start()
    first = store.first_seq()
    assert bodies(store.read(first)) == [b"body %d" % each for each in range(first, seq + 1)]
    snapshot = store.latest_snapshot()
    assert snapshot is not None
    assert snapshot.state == b"state"
    store.close()
    assert store.open() == 2
    store.close()


def test_a_server_that_is_away_fails_an_append_and_serves_again_when_it_is_back(server: RedisServer) -> None:
    store = open_store(server.url, NAME)
    store.open()
    store.append(turn(1, 1), 0)
    server.kill()
    for write in (lambda: store.append(turn(2, 1), 1), lambda: store.append([], 1), lambda: store.prune(1)):
        with pytest.raises(AppendFailed, match="nothing was"):
            write()
    with pytest.raises(StoreError, match="can't be reached"):
        store.head()
    assert server.start()
    assert store.append(turn(2, 1), 1) == 2
    assert bodies(store.read()) == [b"body 1", b"body 2"]
    store.close()


def test_a_turn_is_whole_or_not_there_wherever_the_file_is_cut(server: RedisServer, tmp_path: Path) -> None:
    """What a server that dies in the middle of writing leaves behind."""
    store = open_store(server.url, NAME)
    store.open()
    ends: list[tuple[int, int]] = [(0, 0)]
    seq = 0
    for number in range(8):
        seq = store.append([*at_once(seq + 1, number), *turn(seq + number + 1, 2)], seq)
        ends.append((server.written.stat().st_size, seq))
    store.close()
    server.kill()
    data, name = server.written.read_bytes(), server.written.name
    assert ends[-1][0] == len(data)
    again = RedisServer(tmp_path / "again")
    for cut in [
        *range(len(data), ends[1][0], -61),
        *(end for end, _ in ends[2:]),
        *(end - 1 for end, _ in ends[2:]),
    ]:
        shutil.rmtree(again.folder)
        shutil.copytree(server.folder, again.folder)
        (again.folder / "appendonlydir" / name).write_bytes(data[:cut])
        assert again.start()
        try:
            whole = max(last for end, last in ends if end <= cut)
            log = open_store(again.url, NAME)
            assert log.open() == 2
            assert log.head() == (2, whole)
            assert bodies(log.read()) == [b"body %d" % each for each in range(1, whole + 1)]
            log.close()
        finally:
            again.kill()


def test_a_flipped_byte_of_the_file_loses_nothing_silently(server: RedisServer, tmp_path: Path) -> None:
    """The server checks its file's form only. A whole log that is gone is left to the peers' memory."""
    store = open_store(server.url, NAME)
    store.open()
    made = server.written.stat().st_size
    for number in range(4):
        store.append(at_once(3 * number + 1, 3), 3 * number)
    everything = list(store.read())
    store.close()
    server.kill()
    data, name = server.written.read_bytes(), server.written.name
    again = RedisServer(tmp_path / "again")
    outcomes = {"exact": 0, "found": 0, "no server": 0, "no log": 0}
    for place in range(3, len(data), 23):
        shutil.rmtree(again.folder)
        shutil.copytree(server.folder, again.folder)
        flipped = data[:place] + bytes([data[place] ^ 0x01]) + data[place + 1 :]
        (again.folder / "appendonlydir" / name).write_bytes(flipped)
        outcome = "no server"
        if again.start():
            try:
                with contextlib.closing(open_reader(again.url, NAME)) as reader:
                    outcome = "exact" if list(reader.read()) == everything else f"lost something at {place}"
            except NoLog:
                assert place < made, f"a log that had rows is gone, by byte {place} of {len(data)}"
                outcome = "no log"
            except (Corrupt, ForeignStore):
                outcome = "found"
            finally:
                again.kill()
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert set(outcomes) == {"exact", "found", "no server", "no log"}, outcomes
    assert outcomes["found"] > 0


WRITES = (redis_store._APPEND, redis_store._SNAP, redis_store._PRUNE)


class Between:
    """A connection's way to the server that can be cut where a test wants it."""

    def __init__(self, port: int) -> None:
        self.to_port = port
        self.cut_answers = 0
        """So many answers to writes are swallowed, and their connections broken."""
        self.cut_requests = 0
        """So many writes are swallowed before they reach the server."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        swallow = threading.Event()
        with near, socket.create_connection(("127.0.0.1", self.to_port)) as far:
            answers = threading.Thread(target=self._answer, args=(far, near, swallow), daemon=True)
            answers.start()
            with contextlib.suppress(OSError):
                while request := near.recv(2**20):
                    if any(script.sha.encode() in request for script in WRITES):
                        if self.cut_requests:
                            self.cut_requests -= 1
                            break
                        if self.cut_answers:
                            self.cut_answers -= 1
                            swallow.set()
                    far.sendall(request)
            with contextlib.suppress(OSError):
                far.shutdown(socket.SHUT_RDWR)
            answers.join()
            with contextlib.suppress(OSError):
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _answer(self, far: socket.socket, near: socket.socket, swallow: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while (answer := far.recv(2**20)) and not swallow.is_set():
                near.sendall(answer)
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def between(server: RedisServer) -> Iterator[Between]:
    between = Between(server.port)
    yield between
    between.close()


@pytest.mark.parametrize("which", ["cut_answers", "cut_requests"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_turn_of_unknown_fate_is_there_once(
    server: RedisServer, between: Between, which: str, times: int
) -> None:
    store = open_store(f"redis://127.0.0.1:{between.port}/0", NAME)
    store.open()
    store.append(at_once(1, 2), 0)
    setattr(between, which, times)
    assert store.append(at_once(3, 2), 2) == 4
    assert getattr(between, which) == 0
    setattr(between, which, times)
    store.snapshot(4, b"state")
    setattr(between, which, times)
    assert store.prune(3) == 2
    assert store.append(at_once(5, 1), 4) == 5
    assert bodies(store.read(3)) == [b"body 3", b"body 4", b"body 5"]
    store.close()


@pytest.mark.parametrize(("which", "left"), [("cut_answers", 3), ("cut_requests", 1)])
def test_a_turn_whose_fate_stays_unknown_ends_the_writer(
    server: RedisServer, between: Between, monkeypatch: pytest.MonkeyPatch, which: str, left: int
) -> None:
    monkeypatch.setattr(redis_store, "RESEND_WAIT_S", 0.3)
    store = open_store(f"redis://127.0.0.1:{between.port}/0", NAME)
    store.open()
    store.append(at_once(1, 1), 0)
    setattr(between, which, 1_000_000)
    with pytest.raises(SyncFailed, match="not known"):
        store.append(at_once(2, 2), 1)
    setattr(between, which, 0)
    with pytest.raises(SyncFailed):
        store.append(at_once(2, 2), 1)
    store.close()
    successor = open_store(server.url, NAME)
    assert successor.open() == 2
    assert successor.head() == (2, left)
    successor.close()


def test_one_who_was_fenced_while_an_answer_was_lost_does_not_say_that_nothing_was_written(
    server: RedisServer, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"redis://127.0.0.1:{between.port}/0", NAME)
    store.open()
    store.append(at_once(1, 1), 0)
    again = RedisStore._sent_again
    successor = open_store(server.url, NAME)

    def overtaken(self: RedisStore, *arguments: Any) -> Any:
        assert successor.open() == 2
        return again(self, *arguments)

    monkeypatch.setattr(RedisStore, "_sent_again", overtaken)
    between.cut_answers = 1
    with pytest.raises(SyncFailed):
        store.append(at_once(2, 2), 1)
    assert successor.head() == (2, 3), "it was written all the same"
    for log in (store, successor):
        log.close()


def test_the_second_opener_fences_the_first_in_the_middle_of_its_work(server: RedisServer) -> None:
    """Two writers at once, a hundred times: every acknowledged turn is there, none of a fenced one."""
    first = open_store(server.url, NAME)
    first.open()
    acknowledged: list[bytes] = []
    for number in range(100):
        second = open_store(server.url, NAME)
        fenced = threading.Event()

        def work(store: Store = first, fenced: threading.Event = fenced) -> None:
            seq = store.head()[1]
            with contextlib.suppress(Fenced):
                while True:
                    body = b"%d" % (seq + 1)
                    seq = store.append([(1.0, body)], seq)
                    acknowledged.append(body)
            fenced.set()

        worker = threading.Thread(target=work)
        worker.start()
        assert second.open() == number + 2
        seq = second.head()[1]
        worker.join(30)
        assert fenced.is_set()
        assert second.head()[1] == seq == len(acknowledged)
        first.close()
        first = second
    assert bodies(first.read()) == acknowledged
    first.close()
