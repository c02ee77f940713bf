"""Backup, restore, upgrade and doctor: looking after pools that run for long.

Faults it stands for: copies of logs that don't belong together, a backup that lacks what was acknowledged before it, a
restore over logs that are in use or of a damaged backup, a zombie of before the restore that is heard, an upgrade that
loses a grant or breaks a client's call, an older code that reads half of a newer log, a doctor that sees nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ray_pools import log_backup
from ray_pools.cli.app import pools
from ray_pools.core import records as ev
from ray_pools.core.config_rules import PoolConfig
from ray_pools.core.link import Link, Message, StalePeer
from ray_pools.errors import BadInput, PoolsError
from ray_pools.log_backup import MANIFEST, backup, restore
from ray_pools.log_view import folded
from ray_pools.store import Store, open_reader, open_store

CLUSTER_YAML = Path(__file__).parent.parent / "cluster.yaml"
LIMIT_S = 120


# ---------------------------------------------------------------- copies that belong together


class Actors:
    """The logs of a coordinator and of pool p, written by hand."""

    def __init__(self, place: Path) -> None:
        self.address = f"sqlite://{place}"
        self.logs: dict[str, Store] = {}
        for name in ("coordinator", "pool:p"):
            self.logs[name] = open_store(self.address, name)
            self.logs[name].open()
        self.coordinator(ev.Changed(1, [["pool", PoolConfig("p", {"gpu": 4}).to_wire(), "p#1"]]))
        self.pool(ev.Configured(1, "p#1", PoolConfig("p", {"gpu": 4}).to_wire(), []))

    def write(self, name: str, *events: Any) -> int:
        log = self.logs[name]
        return log.append([(1.0, ev.pack(event)) for event in events], log.head()[1])

    def coordinator(self, *events: Any) -> int:
        return self.write("coordinator", *events)

    def pool(self, *events: Any) -> int:
        return self.write("pool:p", *events)

    def submit(self, id: str) -> None:
        self.coordinator(
            ev.Submitted(id, "a", [["gpu", 1]], True, 0, 0.0, 1, {}, b"", "", ["p"], {}),
        )

    def heads(self) -> dict[str, int]:
        return {name: log.head()[1] for name, log in self.logs.items()}

    def close(self) -> None:
        for log in self.logs.values():
            log.close()


@pytest.fixture
def actors(tmp_path: Path) -> Iterator[Actors]:
    made = Actors(tmp_path / "store")
    yield made
    made.close()


def test_a_backup_holds_all_logs_as_they_were_at_one_moment(
    actors: Actors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: what is written while the copies are made is in one of them, and its cause is not in the other."""
    actors.submit("x")
    at_the_moment = actors.heads()
    look = log_backup._look

    def and_meanwhile(readers: Any) -> int:
        looks = look(readers)
        actors.submit("later")
        actors.pool(ev.Peer("coordinator", 1, 3, 3, 0))
        return looks

    monkeypatch.setattr(log_backup, "_look", and_meanwhile)
    made = backup(actors.address, tmp_path / "copy")
    assert {name: said["rows"] for name, said in made.logs.items()} == at_the_moment
    reader = open_reader(f"sqlite://{tmp_path / 'copy'}", "coordinator")
    state: Any = folded(reader, "coordinator")[0]
    reader.close()
    assert list(state.requests) == ["x"]


@pytest.mark.parametrize("who", ["coordinator", "pool:p"])
def test_a_moment_in_which_a_log_remembers_more_than_there_is_is_not_taken(
    actors: Actors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Fault: the side that comes back shorter than its peer remembers is refused, and the backup is worth nothing."""
    if who == "coordinator":  # heard of p's row 2, which its log, looked at before, did not have yet
        actors.coordinator(ev.Peer("p", 1, 2, 2, 0))
    else:
        actors.pool(ev.Peer("coordinator", 1, 2, 2, 0))

    def the_other_is_there_too(_: float) -> None:
        if who == "coordinator":
            actors.pool(ev.Ended("never-heard-of", 1, "withdrawn", ""))
        else:
            actors.submit("x")

    monkeypatch.setattr(log_backup.time, "sleep", the_other_is_there_too)
    made = backup(actors.address, tmp_path / "copy")
    assert made.looks == 2
    assert made.logs["coordinator" if who == "pool:p" else "pool:p"]["rows"] == 2


def test_logs_that_never_belong_together_are_no_backup(
    actors: Actors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors.coordinator(ev.Peer("p", 1, 9, 9, 0))
    monkeypatch.setattr(log_backup, "LOOKS_MAX", 3)
    with pytest.raises(PoolsError, match=r"coordinator remembers 9 rows of pool:p .* only 1"):
        backup(actors.address, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_backup_under_writers_that_never_stop(actors: Actors, tmp_path: Path) -> None:
    """Each side keeps hearing of the other's newest row, as under load; three backups, each whole."""
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            heard = actors.heads()["pool:p"]
            actors.coordinator(
                ev.Submitted(f"r{number}", "a", [["gpu", 1]], True, 0, 0.0, number, {}, b"", "", ["p"], {}),
                ev.Peer("p", 1, heard, heard, 0),
            )
            heard = actors.heads()["coordinator"]
            queued = ev.Queued(f"r{number}", 1, True, "a", [["gpu", 1]], True, number, 1.0, 0.0, {})
            actors.pool(queued, ev.Peer("coordinator", 1, heard, heard, 0))

    readers = {name: open_reader(actors.address, name) for name in actors.logs}
    writing = threading.Thread(target=write)
    writing.start()
    try:
        for number in range(3):
            before = {name: reader.head()[1] for name, reader in readers.items()}
            made = backup(actors.address, tmp_path / str(number))
            assert all(made.logs[name]["rows"] >= rows for name, rows in before.items())
            assert log_backup.memory_problems(f"sqlite://{made.directory}", ["p"]) == []
    finally:
        ended.set()
        writing.join(60)
        for reader in readers.values():
            reader.close()


# ---------------------------------------------------------------- restore


@pytest.fixture
def saved(actors: Actors, tmp_path: Path) -> Path:
    actors.submit("x")
    backup(actors.address, tmp_path / "copy")
    return tmp_path / "copy"


def test_what_is_restored_is_the_same_and_goes_on_above_every_zombie(
    actors: Actors, saved: Path, tmp_path: Path
) -> None:
    """Fault: who still runs on the old logs, restarted a hundred times since, is heard by those who were restored."""
    done = restore(saved, f"sqlite://{tmp_path / 'new'}")
    for name in ("coordinator", "pool:p"):
        old, new = (open_reader(place, name) for place in (actors.address, f"sqlite://{tmp_path / 'new'}"))
        assert folded(old, name)[0].digest() == folded(new, name)[0].digest()
        assert [row.body for row in old.read()] == [row.body for row in new.read()]
        old.close()
        new.close()
        assert done.logs[name]["epoch"] > actors.logs[name].head()[0] + 1000
        log = open_store(f"sqlite://{tmp_path / 'new'}", name)
        assert log.open() == done.logs[name]["epoch"] + 1
        log.append(
            [(2.0, ev.pack(ev.Peer("p" if name == "coordinator" else "coordinator", 1, 1, 1, 1)))],
            log.head()[1],
        )
        log.close()
    link = Link("pool:p", "coordinator", done.logs["coordinator"]["epoch"], 2)
    zombie = Message("coordinator", "", 101, 500, 0, 500, [], 0, [], 0, 0, 0)
    with pytest.raises(StalePeer):
        link.receive(zombie)


def test_nothing_is_restored_over_logs(actors: Actors, saved: Path, refuses: Callable[..., Any]) -> None:
    before = actors.heads()
    with refuses("--store", "without logs"):
        restore(saved, actors.address)
    assert actors.heads() == before
    actors.submit("y")  # its writer is not fenced


@pytest.mark.parametrize("how", ["changed", "cut", "gone", "manifest", "newer"])
def test_a_damaged_backup_is_not_restored(saved: Path, tmp_path: Path, how: str) -> None:
    path = saved / "pool%3Ap.sqlite"
    if how == "changed":
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:4096])
    elif how == "gone":
        path.unlink()
    elif how == "manifest":
        (saved / MANIFEST).write_text("{")
    else:
        manifest = json.loads((saved / MANIFEST).read_text())
        (saved / MANIFEST).write_text(json.dumps({**manifest, "version": 99}))
    result = CliRunner().invoke(pools, ["restore", str(saved), "--store", str(tmp_path / "new")])
    assert result.exit_code in (1, 2)
    assert result.stderr.startswith("pools: error: ")
    assert result.stderr.count("\n") == 1
    assert not list((tmp_path / "new").glob("*.sqlite")) if (tmp_path / "new").exists() else True


def test_a_backup_goes_into_an_empty_directory_only(actors: Actors, saved: Path) -> None:
    names = sorted(path.name for path in saved.iterdir())
    with pytest.raises(BadInput, match="empty"):
        backup(actors.address, saved)
    assert (
        sorted(path.name for path in saved.iterdir())
        == names
        == ["coordinator.sqlite", MANIFEST, "pool%3Ap.sqlite"]
    )


# ---------------------------------------------------------------- the doctor without a cluster


def test_the_doctor_looks_at_the_store_where_no_cluster_is(
    actors: Actors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOLS_STATE_DIR", str(tmp_path / "state"))
    arguments = ["doctor", "--store", actors.address, "--address", "127.0.0.1:1"]
    result = CliRunner().invoke(pools, [*arguments, "--json"])
    assert result.exit_code == 3
    said = json.loads(result.stdout)
    assert (said["ok"], said["cluster"]) == (False, False)
    store = said["store"]
    assert (store["kind"], store["journal_mode"], store["synchronous"]) == ("sqlite", "wal", "FULL")
    assert 0 < store["sync_p50_s"] <= store["sync_p99_s"]
    assert store["free_bytes"] > 0
    levels = {check["check"]: check["level"] for check in said["checks"]}
    assert levels["ray"] == "FAIL"
    assert levels["settings"] == "ok"
    assert sorted(p.name for p in (tmp_path / "store").iterdir() if "doctor" in p.name) == []
    text = CliRunner().invoke(pools, [*arguments, "--no-sync"])
    assert text.exit_code == 3
    assert "FAIL  ray: no Ray cluster answers" in text.stdout


# ---------------------------------------------------------------- live

CONFIG = """
namespace: {namespace}
store: {store}
pools:
  spot:
    capacity: {{gpu: 4}}
    placement: {{labels: {{ray.io/market-type: spot}}}}
  left:
    capacity: {{licence: 4}}
    placement: none
  right:
    capacity: {{licence: 4}}
    placement: none
policies:
  - {{pool: spot, requester: team}}
  - {{pool: left, requester: office}}
  - {{pool: right, requester: office}}
prewarm: {{linger_s: 0}}
"""

# Submits and releases until its stdin ends; each acknowledged id is a line, each error a line with "error".
LOAD = """
import itertools, sys, threading
import ray_pools as pools

ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
client = pools.connect(namespace="kept", quiet=True)
for number in itertools.count():
    if ended.is_set():
        break
    try:
        ticket = client.submit("office", pool_resources={"licence": 1}, id=f"load-{number}", lease_s=600)
        print(ticket.id, flush=True)
        if number % 2:
            ticket.release()
    except Exception as problem:
        print("error", type(problem).__name__, problem, flush=True)
"""


# `pools`, but the actors that it makes look after each other once an hour only.
QUIET = """
from ray_pools.actors import deploy
from ray_pools.cli import main

made = deploy.up
deploy.up = lambda *args, options, **more: made(*args, options={**options, "beat_s": 3600.0}, **more)
main()
"""


class Place:
    """A local cluster of its own, and commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env |= {"POOLS_STATE_DIR": str(folder / "state"), "RAY_POOLS_NAMESPACE": "kept"}
        self.driver: dict[str, str] = {}

    def run(self, *arguments: str, code: int = 0, quiet: bool = False) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *(("-c", QUIET) if quiet else ("-m", "ray_pools.cli")), *arguments],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr
        return done

    def pools(self, *arguments: str, code: int = 0) -> str:
        return self.run(*arguments, code=code).stdout

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.pools(*arguments, "--json", code=code))

    def up(self, namespace: str, store: str, *, quiet: bool = False) -> None:
        (self.folder / f"{namespace}.yaml").write_text(CONFIG.format(namespace=namespace, store=store))
        up = ("up", f"{namespace}.yaml", "--local", "--cluster", str(CLUSTER_YAML), "--json")
        self.driver = json.loads(self.run(*up, quiet=quiet).stdout)["env"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("kept"))
    made.up("kept", "store")
    yield made
    made.pools("down", "--force", "--local")


class Load:
    """A driver that submits without a pause, as a process of its own."""

    def __init__(self, place: Place) -> None:
        self.acknowledged: list[str] = []
        self.errors: list[str] = []
        self._more = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOAD],
            cwd=place.folder,
            env={**place.env, **place.driver},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._more:
                (self.errors if line.startswith("error") else self.acknowledged).append(line.strip())
                self._more.notify_all()

    def wait_for(self, more: int) -> None:
        with self._more:
            wanted = len(self.acknowledged) + more
            assert self._more.wait_for(lambda: len(self.acknowledged) >= wanted or self.errors, 60)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._reading.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.mark.ray
def test_the_doctor_finds_a_healthy_cluster_healthy(place: Place) -> None:
    said = place.json("doctor")
    assert said["ok"] is True
    levels = {check["check"]: check["level"] for check in said["checks"]}
    assert {levels[name] for name in ("ray", "coordinator", "pool:left", "pool:spot", "links", "store")} == {
        "ok"
    }
    assert any(name.startswith("node ") and "(head)" in name for name in levels)
    assert "clock of coordinator" in levels
    assert said["store"]["place"] == str(place.folder / "store")


@pytest.mark.slow
@pytest.mark.ray
def test_backup_under_load_upgrade_and_restore_lose_nothing(place: Place) -> None:
    """One story, since each step takes seconds: a grant held over an upgrade that clients hardly notice, a backup amid
    submissions, and a restore in which everything that was acknowledged before the backup is there.
    """
    place.pools("submit", "-r", "team", "-g", "1", "--id", "held", "--wait", "--timeout", "90")
    before = place.json("upgrade", "--check")["actors"]
    load = Load(place)
    try:
        load.wait_for(20)
        acknowledged = [*load.acknowledged]
        made = place.json("backup", "copy")
        assert made["store"] == f"sqlite://{place.folder / 'store'}"
        load.wait_for(10)
        (request,) = place.json("requests", "-r", "team")
        state = place.json("log", "spot", "--at", str(before["pool:spot"]["seq"]), "--store", "store")
        upgraded = place.json("upgrade")["actors"]
        load.wait_for(20)
    finally:
        load.end()
    assert load.errors == []
    assert [actor["name"] for actor in upgraded] == ["pool:left", "pool:right", "pool:spot", "coordinator"]
    assert all(actor["epoch"] > before[actor["name"]]["epoch"] for actor in upgraded)
    after = place.json("upgrade", "--check")["actors"]
    assert all(after[name]["pid"] != said["pid"] for name, said in before.items())
    again = place.json("log", "spot", "--at", str(before["pool:spot"]["seq"]), "--store", "store")
    assert again == state
    assert [grant["id"] for grant in again["grants"]] == ["held"]
    assert (request["state"], request["ready"]) == ("allocated", True)
    assert place.json("requests", "-r", "team") == [request]
    assert "log check: ok" in place.pools("log", "coordinator", "--verify")  # it asks where the logs are

    place.pools("restore", "copy", "--store", "restored")
    place.up("again", "restored")
    shown = place.json("requests", "-n", "again", "--limit", "10000")
    assert {*acknowledged, "held"} <= {view["id"] for view in shown}
    assert "log check: ok" in place.pools("log", "coordinator", "--verify", "--store", "restored")


@pytest.mark.slow
@pytest.mark.ray
def test_code_that_can_not_read_a_log_changes_nothing(place: Place) -> None:
    """An older version that meets an event of a newer one: here one that nobody knows, in the log of a quiet pool."""
    place.up("older", "older", quiet=True)
    before = place.json("upgrade", "--check", "-n", "older")["actors"]
    log = open_store(f"sqlite://{place.folder / 'older'}", "pool:left")
    log.open()
    log.append([(1e10, b"\x93\x63\x01\xa1x")], log.head()[1])
    log.close()
    said = place.run("upgrade", "-n", "older", code=1).stderr
    assert "nothing has changed: pool:left: UnknownEvent: the log holds an event with tag 99" in said
    after = place.json("upgrade", "--check", "-n", "older")["actors"]
    assert {name: actor["pid"] for name, actor in after.items()} == {n: a["pid"] for n, a in before.items()}
