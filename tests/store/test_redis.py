"""The log on Redis streams, against a real server: the contract, and what is special to a server.

Stands for: settings that keep no promises, a full memory, a user who may not, another application's keys, a
wrong address. Servers that die and connections that break are in test_redis_killed.py.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import BadInputReader
from redis_server import RedisServer
from test_contract import NAME, Contract, at_once, bodies, turn

from ray_pools.config import store_address
from ray_pools.store import (
    AppendFailed,
    Corrupt,
    ForeignStore,
    NoLog,
    Reader,
    Row,
    Store,
    StoreError,
    SyncFailed,
    UnsafeStore,
    open_reader,
    open_store,
)
from ray_pools.store.redis import RedisStore
from ray_pools.store.redis_wire import PASSWORD_ENV, Refusal, Wire, parse_place


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    assert server.start()
    yield server
    server.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may do anything to."""
    server = RedisServer(tmp_path / "redis")
    assert server.start()
    yield server
    server.kill()


def keys(address: str, name: str = NAME) -> tuple[str, str, str]:
    return RedisStore(address, name)._keys


@contextlib.contextmanager
def wire_to(address: str) -> Iterator[Wire]:
    wire = Wire(parse_place(address), address)
    try:
        yield wire
    finally:
        wire.close()


def raw(address: str, *command: bytes | str | int) -> Any:
    with wire_to(address) as wire:
        return wire.call(*command)


class TestRedis(Contract):
    """The contract. Damage is what damage to the server's file does: commands that fail are passed over."""

    @pytest.fixture
    def address(self, shared_server: RedisServer) -> Iterator[str]:
        yield shared_server.url
        raw(shared_server.url, "FLUSHDB")

    def rewrite(self, address: str, change: Any) -> None:
        """The stream anew; `change` gets (epoch, seq, fields) of all entries and returns those to put in."""
        key = keys(address)[1]
        with wire_to(address) as wire:
            entries = []
            for entry_id, fields in wire.call("XRANGE", key, "-", "+"):
                epoch, seq = (int(part) for part in entry_id.split(b"-"))
                entries.append((epoch, seq, dict(zip(fields[::2], fields[1::2], strict=True))))
            wire.call("DEL", key)
            wire.many(
                [
                    ("XADD", key, f"{epoch}-{seq}", *(part for pair in fields.items() for part in pair))
                    for epoch, seq, fields in change(entries)
                ]
            )

    def damage(self, address: str, seq: int, column: str, value: object) -> None:
        if column in ("epoch", "seq") and (not isinstance(value, int) or value < 0):
            pytest.skip("the two parts of a stream's id are unsigned integers")
        data = value if isinstance(value, bytes) else str(value).encode()

        def change(entries: list[Any]) -> list[Any]:
            changed = []
            for entry in entries:
                epoch, at_seq, fields = entry
                if at_seq != seq:
                    changed.append(entry)
                elif column == "epoch":
                    changed.append((value, at_seq, fields))
                elif column == "seq":
                    changed.append((epoch, value, fields))
                else:
                    if fields[column.encode()] == data and not isinstance(value, bytes):
                        pytest.skip("a server keeps bytes only: this changes nothing")
                    changed.append((epoch, at_seq, {**fields, column.encode(): data}))
            return changed

        self.rewrite(address, change)

    def remove(self, address: str, first: int, last: int) -> None:
        self.rewrite(address, lambda entries: [each for each in entries if not first <= each[1] <= last])

    def swap(self, address: str, one: int, other: int) -> None:
        def change(entries: list[Any]) -> list[Any]:
            found = {seq: fields for _, seq, fields in entries}
            changes = {one: found[other], other: found[one]}
            for seq, fields in list(changes.items()):
                changes[seq] = {**fields, b"first": found[seq][b"first"]}
            return [(epoch, seq, changes.get(seq, fields)) for epoch, seq, fields in entries]

        self.rewrite(address, change)

    def chain(self, address: str, name: str, seq: int = 1) -> bytes:
        ((_, fields),) = raw(address, "XRANGE", keys(address, name)[1], f"1-{seq}", f"1-{seq}")
        found = dict(zip(fields[::2], fields[1::2], strict=True))[b"chain"]
        assert isinstance(found, bytes)
        return found

    def damage_snapshot(self, address: str, column: str, value: object) -> None:
        data = value if isinstance(value, bytes) else str(value).encode()
        if raw(address, "HGET", keys(address)[2], column) == data:
            pytest.skip("a server keeps bytes only: this changes nothing")
        assert raw(address, "HSET", keys(address)[2], column, data) == 0

    def test_a_log_that_was_cut_at_its_end_is_found(self, store: Store, reader: Reader, address: str) -> None:
        for number in range(4):
            store.append(at_once(3 * number + 1, 3), 3 * number)
        self.remove(address, 10, 12)
        for log in (store, reader):
            with pytest.raises(Corrupt, match="the last row is 9, but 12 was written"):
                log.head()
            read: list[Row] = []
            with pytest.raises(Corrupt) as caught:
                read.extend(log.read())
            assert (caught.value.seq, len(read)) == (10, 9)
        with pytest.raises(Corrupt):
            open_store(address, NAME).open()

    @pytest.mark.parametrize(
        "field", ["format", "name", "epoch", "base_seq", "base_chain", "seal", "seq", "chain"]
    )
    @pytest.mark.parametrize("value", ["", "7", "x", None])
    def test_a_damaged_head_is_found(self, store: Store, address: str, field: str, value: str | None) -> None:
        store.append(turn(1, 3), 0)
        key = keys(address)[0]
        raw(address, "HDEL", key, field) if value is None else raw(address, "HSET", key, field, value)
        with pytest.raises((Corrupt, ForeignStore)):
            open_reader(address, NAME)
        with pytest.raises((Corrupt, ForeignStore)):
            open_store(address, NAME).open()

    def test_a_missing_head_is_no_new_log(self, store: Store, address: str) -> None:
        store.append(turn(1, 3), 0)
        raw(address, "DEL", keys(address)[0])
        with pytest.raises(Corrupt, match="head is missing"):
            open_store(address, NAME).open()
        with pytest.raises(Corrupt, match="gone"):
            store.append(turn(4, 1), 3)

    @pytest.mark.parametrize("key", [0, 1])
    def test_keys_of_another_application_are_left_alone(self, address: str, key: int) -> None:
        raw(address, "SET", keys(address)[key], "theirs")
        with pytest.raises(ForeignStore):
            open_store(address, NAME).open()
        assert raw(address, "GET", keys(address)[key]) == b"theirs"

    def test_two_prefixes_are_two_places(self, store: Store, address: str) -> None:
        store.append(turn(1, 1), 0)
        other = open_store(f"{address}?prefix=other", NAME)
        assert other.open() == 1
        assert other.head() == (1, 0)
        other.close()
        assert store.append(turn(2, 1), 1) == 2

    def test_rows_are_found_over_many_epochs(self, store: Store, address: str, opened: list[Reader]) -> None:
        """An id begins with the epoch, so that a row's place has to be searched; some epochs wrote nothing."""
        seq = 0
        for epoch in range(2, 60):
            assert store.open() == epoch
            if epoch % 3:
                seq = store.append(at_once(seq + 1, epoch % 5 + 1), seq)
        everything = list(store.read())
        assert [row.seq for row in everything] == list(range(1, seq + 1))
        for start in range(1, seq + 2):
            assert list(store.read(start)) == everything[start - 1 :]
        store.snapshot(seq - 20, b"state")
        pruned = store.prune(seq - 20)
        for start in range(pruned + 1, seq + 2):
            assert list(store.read(start)) == everything[start - 1 :]

    def test_redis_itself_refuses_an_id_of_an_earlier_epoch(self, store: Store, address: str) -> None:
        store.append(turn(1, 1), 0)
        store.open()
        store.append(turn(2, 1), 1)
        with pytest.raises(Refusal, match="equal or smaller"):
            raw(address, "XADD", keys(address)[1], "1-3", "body", "of a zombie")

    def test_scripts_that_the_server_forgot_are_sent_again(self, store: Store, address: str) -> None:
        store.append(turn(1, 1), 0)
        raw(address, "SCRIPT", "FLUSH")
        assert store.append(turn(2, 2), 1) == 3
        assert bodies(store.read()) == [b"body 1", b"body 2", b"body 3"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("appendonly", "no"), ("appendfsync", "everysec"), ("appendfsync", "no"),
        ("no-appendfsync-on-rewrite", "yes"), ("maxmemory-policy", "allkeys-lru"),
    ],
)  # fmt: skip
def test_settings_that_keep_no_promises_are_refused(server: RedisServer, setting: str, value: str) -> None:
    store = open_store(server.url, NAME)
    store.open()
    raw(server.url, "CONFIG", "SET", setting, value)
    with pytest.raises(UnsafeStore, match=f"{setting} is {value}, not"):
        open_store(server.url, NAME).open()
    unsafe = open_store(f"{server.url}?unsafe=1", NAME)
    assert unsafe.open() == 2, "refusing has not raised the epoch"
    assert unsafe.append(turn(1, 2), 0) == 2
    for log in (store, unsafe):
        log.close()


def test_a_server_that_came_back_with_other_settings_is_refused(server: RedisServer) -> None:
    store = open_store(server.url, NAME)
    store.open()
    server.kill()
    assert server.start(appendfsync="everysec")
    with pytest.raises(AppendFailed, match="appendfsync is everysec"):
        store.append(turn(1, 1), 0)
    store.close()


@pytest.mark.parametrize(
    "answer", [[1, 0], [0, 0], Refusal("ERR WAITAOF cannot be used: appendonly is disabled")]
)
def test_a_server_that_can_say_so_must_say_that_it_has_synced(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    """WAITAOF is as new as Redis 7.2, so that its answers are given here: settings may change behind our back."""
    many = Wire.many
    asked: list[Any] = []

    def with_waitaof(self: Wire, commands: Any) -> list[Any]:
        own = [each for each in commands if each[0] == "WAITAOF"]
        asked.extend(own)
        rest = [each for each in commands if each[0] != "WAITAOF"]
        return (many(self, rest) if rest else []) + [[0, 0] if each[1] == 0 else answer for each in own]

    store = open_store(server.url, NAME)
    store.open()
    store.close()
    monkeypatch.setattr(Wire, "many", with_waitaof)
    if answer == [1, 0]:
        assert store.open() == 2
        assert store.append(turn(1, 2), 0) == 2
        assert [each[1:3] for each in asked[-1:]] == [(1, 0)]
    else:
        with pytest.raises(AppendFailed, match="on disk"):
            store.open()
        monkeypatch.undo()
        store.open()
        monkeypatch.setattr(Wire, "many", with_waitaof)
        assert store._wire is not None
        store._wire._syncs = True
        for _ in range(2):
            with pytest.raises(SyncFailed, match="on disk"):
                store.append(turn(1, 2), 0)
    store.close()


def test_a_full_memory_fails_one_turn_as_a_whole(server: RedisServer) -> None:
    store = open_store(server.url, NAME)
    store.open()
    store.append(turn(1, 2), 0)
    raw(server.url, "CONFIG", "SET", "maxmemory", "1mb")
    with pytest.raises(AppendFailed, match="OOM"):
        store.append([*turn(3, 2), (1.0, b"x" * 1000)], 2)
    raw(server.url, "CONFIG", "SET", "maxmemory", "0")
    assert store.append(turn(3, 2), 2) == 4
    assert len(list(store.read())) == 4
    store.close()


def test_a_replica_is_refused(server: RedisServer) -> None:
    raw(server.url, "REPLICAOF", "127.0.0.1", 1)
    with pytest.raises(UnsafeStore, match="role is slave"):
        open_store(server.url, NAME).open()


def test_whoever_is_not_let_in_hears_it_without_the_password(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in (("requirepass", "sesame-7"),):
        raw(server.url, "CONFIG", "SET", *setting)
    host = f"127.0.0.1:{server.port}"
    for address in (f"redis://{host}", f"redis://:wrong-9@{host}/0", f"redis://nobody:wrong-9@{host}"):
        for use in (lambda at: open_store(at, NAME).open(), lambda at: open_reader(at, NAME)):
            with pytest.raises(StoreError, match="does not let us in") as caught:
                use(address)
            assert "wrong-9" not in str(caught.value)
            assert host in str(caught.value)
            assert str(caught.value).isprintable()
    store = open_store(f"redis://:sesame-7@{host}/0", NAME)
    assert store.open() == 1
    assert "sesame" not in store.where
    store.close()
    monkeypatch.setenv(PASSWORD_ENV, "sesame-7")
    store = open_store(f"redis://{host}/0", NAME)
    assert store.open() == 2
    store.close()


@pytest.mark.parametrize(
    ("missing", "words"),
    [("-config", "does not tell its settings"), ("-xadd", "append"), ("-evalsha", "can't be opened")],
)
def test_a_user_who_may_not_hears_it_at_opening(server: RedisServer, missing: str, words: str) -> None:
    raw(server.url, "ACL", "SETUSER", "pools", "on", ">secret-5", "~ray-pools:*", "+@all", missing)
    with pytest.raises(StoreError, match=words) as caught:
        open_store(f"redis://pools:secret-5@127.0.0.1:{server.port}/0", NAME).open()
    assert "secret-5" not in str(caught.value)
    with pytest.raises(NoLog):
        open_reader(server.url, NAME)


def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
        for use in (lambda: open_store(address, NAME).open(), lambda: open_reader(address, NAME)):
            with pytest.raises(StoreError, match=r"can't be reached.*refused"):
                use()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("redis:", "a host"), ("redis://", "a host"), ("redis:///0", "a host"), ("redis://h:port/0", "port"),
        ("redis://h/zero", "DB"), ("redis://h/0?saf=1", "'saf'"), ("redis://h/0?unsafe=yes", "unsafe=1"),
        ("redis://h/0?prefix={x}", "prefix"), ("redis://h/0?prefix", "options"), ("redis://h/0#x", "%23"),
        ("redis://u:hidden@h/zero", "DB"), ("redis://u:hid/den@h:1/0", ""), ("redis://h/0?password=hidden", "password"),
    ],
)  # fmt: skip
def test_a_wrong_address_is_refused_without_its_password(
    refuses: BadInputReader, address: str, words: str
) -> None:
    with refuses("store", "HOST", words):
        open_store(address, "x")
    if "://" in address:
        with refuses("--store", "HOST", words):
            store_address(address, Path(), "--store")
    with pytest.raises(Exception, match="store") as caught:
        open_store(address, "x")
    assert "hid" not in str(caught.value)


def test_addresses_lead_where_they_say() -> None:
    place = parse_place("redis://h", environ={})
    assert (place.host, place.port, place.db, place.user, place.password) == ("h", 6379, 0, "", "")
    assert place.shown == "redis://h:6379/0"
    place = parse_place("rediss://u:p%40%2F@[::1]:7/3?prefix=a:b&unsafe=1", environ={})
    assert (place.host, place.port, place.db, place.user, place.password) == ("::1", 7, 3, "u", "p@/")
    assert place.shown == "rediss://u@[::1]:7/3?prefix=a:b&unsafe=1"
    assert parse_place(place.shown, environ={PASSWORD_ENV: "p@/"}) == place
    assert store_address("redis://h:6379/0", Path("/x")) == "redis://h:6379/0"
