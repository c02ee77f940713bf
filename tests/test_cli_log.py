"""`pools log` on logs in sqlite, without Ray: lines, a request's story, the check, the state at some row, the export.

Faults it stands for: a reader that disturbs or misses a live writer, an effect told before its cause, a state that is
not the fold of the rows before it, a damaged log that is shown as if it were whole, an export that can't be verified.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sqlite3
import struct
import threading
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
from click.testing import CliRunner, Result

from ray_pools import log_tale, log_view
from ray_pools.cli.app import pools
from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.system import System
from ray_pools.errors import BadInput, Unreachable
from ray_pools.log_story import CoordinatorStory, PoolStory
from ray_pools.log_tale import tale
from ray_pools.log_words import words
from ray_pools.store import open_reader, open_store
from ray_pools.store.sqlite_file import database_path

Logs = dict[str, list[tuple[float, bytes]]]


def played() -> System:
    """`low` works in a and in b, until `high` takes its share of a back; some wait, one is rejected."""
    pools_ = {name: PoolConfig(name, {"gpu": 4}, grace_s=5.0) for name in ("a", "b")}
    policies = [
        PolicyConfig("a", "low", 1, {}, {"gpu": 4}),
        PolicyConfig("b", "low", 0, {}, {"gpu": 2}),
        PolicyConfig("a", "high", 5, {"gpu": 4}),
    ]
    world = System(pools_, policies)
    world.submit("first", "low", {"gpu": 4}, retries=1)
    world.advance(1.0)
    world.submit("second", "low", {"gpu": 2})
    world.submit("third", "low", {"gpu": 2})
    world.advance(2.0)
    world.submit("owner", "high", {"gpu": 3})
    world.advance(3.0)
    world.stopped("first")
    world.advance(4.0)
    world.submit("too-large", "high", {"gpu": 64})
    world.cancel("third")
    world.advance(5.0)
    world.release("owner")
    return world


@pytest.fixture(scope="module")
def world() -> System:
    return played()


@pytest.fixture(scope="module")
def written(world: System, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its logs, written once: each row is synced."""
    folder = tmp_path_factory.mktemp("written")
    for name, rows in world.logs.items():
        log = open_store(f"sqlite://{folder}", name if name == "coordinator" else f"pool:{name}")
        log.open()
        seq = 0
        for row in rows:
            seq = log.append([row], seq)
        log.close()
    return folder


@pytest.fixture
def store(written: Path, tmp_path: Path) -> str:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return f"sqlite://{tmp_path}"


def run(*arguments: str, code: int = 0, command: str = "log") -> Result:
    result = CliRunner().invoke(pools, [*command.split(), *arguments])
    assert result.exit_code == code, result.output
    if code:
        assert "Traceback" not in result.output
        assert result.stderr.count("\n") <= 1, "one clear line"
    return result


def rows_of(result: Result) -> list[Any]:
    found: list[Any] = json.loads(result.stdout)
    return found


# ---------------------------------------------------------------- lines


@pytest.mark.parametrize("log", ["coordinator", "a", "pool:b"])
def test_one_line_per_event_in_plain_words(world: System, store: str, log: str) -> None:
    lines = run(log, "--store", store).stdout.splitlines()
    events = [ev.unpack(body) for _, body in world.logs[log.removeprefix("pool:")]]
    assert len(lines) == len(events)
    for seq, (line, event) in enumerate(zip(lines, events, strict=True), 1):
        assert line.split()[0] == str(seq)
        assert type(event).__name__ in line
        assert getattr(event, "id", "") in line
        assert line.endswith(words(event))


def test_from_and_limit_cut_and_json_holds_the_fields(world: System, store: str) -> None:
    found = rows_of(run("a", "--store", store, "--from", "3", "--limit", "2", "--json"))
    assert [row["seq"] for row in found] == [3, 4]
    event = ev.unpack(world.logs["a"][2][1])
    assert (found[0]["event"], found[0]["fields"]["id"]) == (type(event).__name__, event.id)  # type: ignore[union-attr]
    run("a", "--store", store, "--from", "999", code=2)


@pytest.mark.parametrize("n", [1, 3, 9999])
def test_tail_shows_the_newest(world: System, store: str, n: int) -> None:
    rows = len(world.logs["a"])
    found = rows_of(run("a", "--store", store, "--tail", str(n), "--json"))
    assert [row["seq"] for row in found] == list(range(max(rows - n, 0) + 1, rows + 1))
    story = run("--request", "first", "--store", store).stdout.splitlines()
    assert run("--request", "first", "--store", store, "--tail", str(n)).stdout.splitlines() == story[-n:]
    followed = run("a", "--store", store, "--tail", "2", "--limit", "2", code=2)
    assert "--tail and --limit don't go together" in followed.stderr


def test_the_tail_of_a_log_without_rows_is_empty(tmp_path: Path) -> None:
    for name in ("coordinator", "pool:a"):
        log = open_store(f"sqlite://{tmp_path}", name)
        log.open()
        log.close()
    assert run("a", "--store", str(tmp_path), "--tail", "3").stdout == ""


def test_every_event_has_its_words() -> None:
    """Fault: a new event that nobody can read."""
    seen = {type(ev.unpack(body)) for rows in played().logs.values() for _, body in rows}
    for cls in ev.Event.__args__:
        if cls not in seen:
            fields = {"victims": [["v", 1]], "detail": {"pg": "ab" * 14}, "ids": ["x"], "id": "x", "k": 1}
            fields |= {"holder": {"job": "01000000"}, "amounts": [["gpu", 1]], "for_s": 1.0}
            event = cls(*(fields.get(name, "text") for name in cls._fields))
            assert words(event)


def test_a_log_is_read_while_its_writer_lives(store: str) -> None:
    """Fault: the reader raises the epoch, holds a lock, or sees half of what is there."""
    writer = open_store(store, "pool:a")
    epoch = writer.open()
    seq = writer.head()[1]
    for _ in range(3):
        shown = rows_of(run("a", "--store", store, "--json"))
        assert shown[-1]["seq"] == seq
        seq = writer.append([(9.0, ev.pack(ev.Granted("x", 1)))], seq)
    assert writer.head() == (epoch, seq)
    writer.close()


def test_follow_goes_on_with_what_is_logged_later(store: str) -> None:
    writer = open_store(store, "pool:a")
    writer.open()
    seq = writer.head()[1]
    result: list[Result] = []
    reading = threading.Thread(
        target=lambda: result.append(
            run("a", "--store", store, "--follow", "--from", "1", "--limit", str(seq + 2), "--json")
        )
    )
    reading.start()
    for _ in range(2):
        seq = writer.append([(9.0, ev.pack(ev.Granted("late", 1)))], seq)
    reading.join(60)
    assert not reading.is_alive()
    found = [json.loads(line) for line in result[0].stdout.splitlines()]
    assert [row["seq"] for row in found] == list(range(1, seq + 1))
    writer.close()


# ---------------------------------------------------------------- a request's story


def position(told: list[log_tale.Told], log: str, name: str, k: int) -> int:
    return next(
        i
        for i, line in enumerate(told)
        if (line.log, line.name) == (log, name) and f"attempt {k}" in line.text
    )


def test_the_story_of_a_request_over_all_logs_with_reasons(store: str) -> None:
    told = tale(store, "first")
    text = "\n".join(map(str, told))
    granted, stop = position(told, "pool:a", "Granted", 1), position(told, "pool:a", "Nominated", 1)
    confirmed, ended = position(told, "coordinator", "Asked", 1), position(told, "pool:a", "Ended", 1)
    again = position(told, "coordinator", "Opened", 2)
    assert granted < stop < confirmed < ended < again < len(told) - 1
    assert position(told, "coordinator", "Submitted", 1) < granted < position(told, "coordinator", "Told", 1)
    assert "request owner of high (gpu 3, priority 5) needs its capacity; it has 5 s of grace" in text
    assert "its holder has stopped" in text
    assert "waits" in text
    assert "waiting_capacity" in text
    shown = run("--request", "first", "--store", store).stdout
    assert shown == text + "\n"


def test_no_line_of_a_story_comes_before_what_it_needs(world: System, store: str) -> None:
    """Fault: logs whose clocks differ, or whose rows have the same time, are merged so that effects precede causes."""
    for id in ("first", "second", "third", "owner", "too-large"):
        told = tale(store, id)
        given: set[Any] = set()
        later = [fact for line in told for fact in line.gives]
        for line in told:
            assert all(fact in given or fact not in later for fact in line.needs), (id, str(line))
            given |= line.gives
        for log in {line.log for line in told}:
            seqs = [line.seq for line in told if line.log == log and line.seq]
            assert seqs == sorted(seqs)
        assert len([line for line in told if line.seq]) == sum(
            id in repr(event)
            for name, rows in world.logs.items()
            for event in (ev.unpack(body) for _, body in rows)
            if name == "coordinator" or name in ("a", "b")
        )


def test_a_story_tells_that_the_log_of_its_pool_was_lost(world: System, tmp_path: Path) -> None:
    """Fault: a request that only waited there has no event of its own, and nobody says why it waits anew."""
    rows = [row for row in world.logs["coordinator"] if row[0] < 3.0]
    lost = [(3.0, ev.pack(ev.DeclaredLost(9, pool, f"{pool}#2", "eve@host", "c1"))) for pool in ("a", "c")]
    log = open_store(f"sqlite://{tmp_path}", "coordinator")
    log.open()
    log.append([*rows, *lost], 0)
    log.close()

    def told(id: str) -> list[str]:
        return [line.text for line in tale(f"sqlite://{tmp_path}", id) if line.name == "DeclaredLost"]

    for id in ("first", "third"):  # one holds in a, one waits there
        (text,) = told(id)
        assert "eve@host says that the log of pool a is lost for good" in text
    assert told("second") == []  # in b
    shown = run("--request", "third", "--store", str(tmp_path)).stdout
    assert "the log of pool a is lost for good" in shown


# ---------------------------------------------------------------- the check, the state, the export


def test_verify_passes_good_logs_and_finds_a_grant_that_nobody_took(store: str) -> None:
    assert "log check: ok" in run("coordinator", "--verify", "--store", store).stdout
    assert rows_of(run("a", "--verify", "--store", store, "--json"))["ok"] is True  # type: ignore[call-overload]
    log = open_store(store, "pool:b")
    log.open()
    seq = log.head()[1]
    queued = ev.Queued("stray", 1, True, "low", [["gpu", 1]], True, 99, 9.0, 0.0, {})
    log.append([(9.0, ev.pack(queued)), (9.0, ev.pack(ev.Granted("stray", 1)))], seq)
    log.close()
    shown = run("coordinator", "--verify", "--store", store, code=1).stdout
    assert "stray" in shown
    assert "docs/rules.md section 10.1" in shown


def test_verify_finds_a_log_that_is_shorter_than_another_remembers(world: System, tmp_path: Path) -> None:
    """Fault: rows lost from the end, which no chain shows."""
    for name, rows in world.logs.items():
        log = open_store(f"sqlite://{tmp_path}", name if name == "coordinator" else f"pool:{name}")
        log.open()
        log.append(rows[:-4] if name == "a" else rows, 0)
        log.close()
    shown = run("coordinator", "--verify", "--store", str(tmp_path), code=1).stdout
    assert "pool:a" in shown


def folded(log: str, rows: list[tuple[float, bytes]], upto: int) -> Any:
    state: Any = (CoordinatorStory() if log == "coordinator" else PoolStory(log)).state
    for at, body in rows[:upto]:
        state.apply(ev.unpack(body), at)
    return state


def test_the_state_at_every_row_is_the_fold_of_the_rows_up_to_it(world: System, store: str) -> None:
    for log, rows in world.logs.items():
        for seq in range(1, len(rows) + 1, 3):
            shown: Any = rows_of(run(log, "--at", str(seq), "--store", store, "--json"))
            assert (shown["seq"], shown["digest"]) == (seq, folded(log, rows, seq).digest())


def test_the_state_at_a_time_has_what_was_held_and_why_who_waited(store: str) -> None:
    shown: Any = rows_of(run("a", "--at", "@1.5", "--store", store, "--json"))
    assert shown["held"] == {"gpu": 4}
    assert [grant["id"] for grant in shown["grants"]] == ["first"]
    assert {entry["id"]: entry["cause"] for entry in shown["queue"]} == {"third": "at_limit"}
    text = run("a", "--at", "@1.5", "--store", store).stdout
    assert "first" in text
    assert "at_limit" in text
    requests: Any = rows_of(run("coordinator", "--at", "@3.5", "--store", store, "--json"))
    assert requests["requests"] == {"allocated": 1, "preempting": 1, "queued": 2}
    assert "preempting" in run("coordinator", "--at", "@3.5", "--store", store).stdout


def test_the_export_is_whole_and_can_be_verified_by_itself(world: System, store: str, tmp_path: Path) -> None:
    """As docs/operations.md tells a reader to do it, with nothing of ours."""
    target = tmp_path / "a.jsonl"
    run("a", "--export", str(target), "--store", store)
    raw = target.read_text(encoding="utf-8").splitlines(keepends=True)
    first, *rows, end = [json.loads(line) for line in raw]
    assert (first["format"], first["version"], first["log"], first["first_seq"]) == (
        "ray-pools-log",
        1,
        "pool:a",
        1,
    )
    hash = hashlib.blake2b(b"pool:a", digest_size=16).digest()
    for seq, (row, (at, body)) in enumerate(zip(rows, world.logs["a"], strict=True), 1):
        assert (row["seq"], row["at"], base64.b64decode(row["body"])) == (seq, at, body)
        packed = hash + struct.pack("<QQd", row["seq"], row["epoch"], row["at"]) + body
        hash = hashlib.blake2b(packed, digest_size=16).digest()
        assert row["hash"] == hash.hex()
        assert list(row["fields"].values()) == json.loads(json.dumps(msgpack.unpackb(body)[2:]))
    assert end["end"] == len(rows)
    assert end["digest"] == world.pools["a"].state.digest()
    assert end["blake2b"] == hashlib.blake2b("".join(raw[:-1]).encode(), digest_size=32).hexdigest()


# ---------------------------------------------------------------- what can't be


@pytest.fixture
def damaged(store: str, tmp_path: Path) -> str:
    with sqlite3.connect(database_path(str(tmp_path), "pool:a")) as db:
        db.execute("UPDATE log SET at = at + 1 WHERE seq = 4")
    db.close()
    return store


@pytest.mark.parametrize(
    "arguments", [["a"], ["a", "--at", "9"], ["a", "--export", "x.jsonl"], ["--request", "first"]], ids=str
)
def test_a_damaged_log_is_one_clear_line(
    damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, "--store", damaged, code=1)
    assert "the log is damaged at row 4" in result.stderr
    assert not list(tmp_path.glob("x.jsonl*"))


def test_verify_tells_of_a_damaged_log(damaged: str) -> None:
    assert "damaged at row 4" in run("a", "--verify", "--store", damaged, code=1).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["zz"], 2, "one of coordinator, a, b"),
        (["--request", "nobody"], 1, "know no request 'nobody'"),
        (["a", "--at", "yesterday"], 2, "--at = 'yesterday'"),
        (["a", "--at", "999"], 2, "--at = 999: a row of pool:a, from 1 to "),
        (["a", "--at", "0"], 2, "--at = 0: a row of pool:a, from 1 to "),
        (["a", "--at", "@-1"], 2, "--at = '-1.000 s': a time from 0.000 s (row 1) to "),
        (["a", "--at", "@99"], 2, "--at = '99.000 s': a time from 0.000 s (row 1) to "),
        (["a", "--at", "@nan"], 2, "--at = 'nan s': a time from"),
        (["a", "--at", "@inf"], 2, "--at = '@inf': a time from"),
        (["a", "--at", "2999-01-01"], 2, "--at = '2999-01-01 00:00:00.000': a time from"),
        (["a", "--at", "1", "--tail", "1"], 2, "--tail and --at don't go together"),
        (["a", "--verify", "--at", "1"], 2, "don't go together"),
        ([], 2, "whose log?"),
        (["a", "--export", "no/such/place"], 2, "a file that can be written"),
    ],
)
def test_wrong_use_is_one_clear_line(store: str, arguments: list[str], code: int, said: str) -> None:
    assert said in run(*arguments, "--store", store, code=code).stderr


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("log", ("a",)),
        ("log", ("--request", "r1")),
        ("log", ("coordinator", "--verify")),
        ("history", ()),
        ("history", ("--request", "r1")),
        ("events", ("--once",)),
        ("backup", ("no/such/place",)),
        ("key reset-operators", ("--yes",)),
    ],
)
def test_no_logs_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, what: tuple[str, ...]
) -> None:
    """At a place that was named: wrong use. Where no cluster says the place: it can't be reached."""
    none = str(tmp_path / "none")
    named = run(*what, "--store", none, code=2, command=command).stderr
    assert f"--store = '{none}': where logs are: there are none" in named

    def unreachable(*_: object, **__: object) -> None:
        raise Unreachable("no Ray cluster answers")

    monkeypatch.setattr("ray_pools.cli.connection.connect", unreachable)
    said = run(*what, code=3, command=command).stderr
    assert "no running coordinator says where its logs are" in said
    assert "--store" in said
    there = run(*what, "--address", "127.0.0.1:1", code=3, command=command).stderr
    assert "no Ray cluster answers" in there


def test_a_time_after_the_last_row_is_none_of_a_log_s_unless_it_is_now(tmp_path: Path) -> None:
    """Where the log's time is a clock's, what was last is so until now; what is to come nobody knows."""
    place, now = f"sqlite://{tmp_path}", time.time()
    for name in ("coordinator", "pool:a"):
        log = open_store(place, name)
        log.open()
        log.append([(now - 100, ev.pack(ev.Granted("x", 1)))] if name == "coordinator" else [], 0)
        log.close()
    reader = open_reader(place, "coordinator")
    log_view._check_time(reader, "coordinator", now - 1)
    for moment in (now - 101, now + 3600):
        with pytest.raises(BadInput, match="row 1"):
            log_view._check_time(reader, "coordinator", moment)
    reader.close()


def test_an_event_of_a_newer_version_is_refused_with_both_numbers(store: str) -> None:
    log = open_store(store, "pool:a")
    log.open()
    log.append([(9.0, msgpack.packb([3, 7, "x", 1]))], log.head()[1])
    log.close()
    said = run("a", "--store", store, code=1).stderr
    assert "Granted in version 7" in said
    assert "newest known here is 1" in said
    reader = open_reader(store, "pool:a")
    reader.close()


def test_history_of_a_name_that_no_log_knows_is_no_empty_answer(store: str) -> None:
    """A script, or who mistyped a name, would take silence for "nothing happened" (docs/commands.md)."""
    for what, code, answer in (
        (("--pool", "nopool"), 2, "--pool = 'nopool': one of a"),
        (("--request", "nothere"), 1, "nothere"),
        (("--requester", "nobody"), 1, "requester 'nobody' has no policy on any pool, and no requests"),
    ):
        assert answer in run(*what, "--store", store, code=code, command="history").stderr
    ended = run("--since", "2099-01-01T00:00", "--store", store, command="history").stdout
    assert ended == "nothing was decided\n"


def test_a_page_of_logs_that_are_not_there_is_wrong_use(tmp_path: Path) -> None:
    said = run("--store", str(tmp_path / "none"), code=2, command="dashboard").stderr
    assert "--store = " in said
