"""Kills of real processes: what was acknowledged has exactly its effect, the logs hold (docs/rules.md section 10).

Faults it stands for: a SIGKILL of one actor at each point of a turn (before and after its append, its commit, its
answer, its messages, its snapshot); of random actors under the load of several client processes; and of a whole head,
after which the pools must come back to what was last acknowledged. The points without Ray are `kill_points.py`.

POOLS_KILL_S: how long the live test kills (20 s; 60 s for the full one). POOLS_HEAD_KILLS: how many heads (2; 20).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import kill_points
import pytest
from kill_points import COORDINATOR, POINTS, Plan

from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.local_cluster import LocalCluster
from ray_pools.log_check import LogReport, check_logs
from ray_pools.store import open_reader

pytestmark = [pytest.mark.faults, pytest.mark.slow]

KILL_S = float(os.environ.get("POOLS_KILL_S", "20"))
HEAD_KILLS = int(os.environ.get("POOLS_HEAD_KILLS", "2"))
NTH = (1, 2, 4, 7)
ACTORS = [COORDINATOR, "pool:p", "pool:q"]
WAIT_S = 90.0


def events(store: str, log: str) -> list[Any]:
    """A log without its pruned beginning."""
    reader = open_reader(store, log)
    try:
        return [ev.unpack(row.body) for row in reader.read(reader.first_seq())]
    finally:
        reader.close()


def outcomes(store: str) -> dict[str, str]:
    """Request -> its outcome; no request may have two, or be submitted twice."""
    logged = events(store, COORDINATOR)
    submitted = Counter(each.id for each in logged if isinstance(each, ev.Submitted))
    finished = Counter(each.id for each in logged if isinstance(each, ev.Finished))
    assert set(submitted.values()) <= {1}
    assert set(finished.values()) <= {1}
    rejected = [each.id for each in logged if isinstance(each, ev.Submitted) and not each.pools]
    assert not finished.keys() & rejected
    ended = {each.id: each.state for each in logged if isinstance(each, ev.Finished)}
    return {**ended, **dict.fromkeys(rejected, "rejected")}  # which is said in the submission's own row


def checked(store: str, pools: list[str], live: dict[str, Any] | None = None) -> LogReport:
    report = check_logs(store, pools, live)
    assert report.ok, "\n".join(str(problem) for problem in report.problems)
    return report


# --- at each point of a turn, without Ray


class Place:
    """The actors in their processes, and a client that says each command until it is answered."""

    def __init__(self, folder: str) -> None:
        self.folder, self.store = folder, f"sqlite://{folder}/store"
        self.acknowledged: dict[str, str] = {}
        self.versions: list[int] = []

    def ask(self, op: str, actor: str = COORDINATOR, **fields: Any) -> Any:
        return kill_points.answer(self.folder, actor, {"op": op, **fields})

    def change(self, id: str, *changes: list[Any]) -> None:
        version = self.ask("change", id=id, changes=list(changes))["version"]
        assert self.ask("change", id=id, changes=list(changes))["version"] == version
        self.versions.append(version)

    def submit(self, id: str, requester: str, gpu: int, **fields: Any) -> None:
        amounts = {"gpu": gpu, "step_run": 1}
        self.ask("submit", id=id, requester=requester, amounts=amounts, token=id.encode(), **fields)

    def own(self, op: str, id: str, **fields: Any) -> None:
        """A holder's command; what it is told of an end must stay so."""
        view = self.ask(op, id=id, token=id.encode(), **fields)
        if op in ("release", "cancel"):
            self.acknowledged[id] = view["state"]

    def views(self, *ids: str) -> dict[str, dict[str, Any]]:
        return dict(zip(ids, self.ask("get", ids=list(ids)), strict=True))

    def until(self, reached: Callable[[], bool], what: str) -> None:
        ends_at = time.monotonic() + WAIT_S
        while not reached():
            assert time.monotonic() < ends_at, f"not within {WAIT_S:g} s: {what}"
            time.sleep(0.01)

    def until_states(self, **states: str) -> None:
        self.until(
            lambda: {id: view["state"] for id, view in self.views(*states).items()} == states, str(states)
        )

    def until_quiet(self) -> dict[str, Any]:
        """Nobody has news, twice in a row and in the same life; what each log is then."""
        seen: list[list[Any]] = [[], []]

        def reached() -> bool:
            found = [self.ask("quiet", actor) for actor in ACTORS]
            seen[0], seen[1] = seen[1], found
            return seen[0] == found and all(each["quiet"] for each in found)

        self.until(reached, "quiet")
        return {actor: self.ask("digest", actor) for actor in ACTORS}


@contextmanager
def place(plan: Plan | None) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="ray-pools-kills-") as folder:  # short: sockets have short paths
        command = [sys.executable, kill_points.__file__, folder, json.dumps(ACTORS), json.dumps(plan)]
        with (
            open(os.path.join(folder, "said"), "w+") as said,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said) as supervisor,
        ):
            try:
                yield Place(folder)
            except AssertionError as problem:
                said.seek(0)
                raise AssertionError(f"{problem}\n{said.read()[-4000:]}") from problem
            finally:
                assert supervisor.stdin is not None
                supervisor.stdin.close()
                supervisor.wait(30)


def policy(pool: str, requester: str, priority: int = 0) -> list[Any]:
    return ["policy", PolicyConfig(pool, requester, priority).to_wire()]


def pool(name: str, gpu: int) -> list[Any]:
    return ["pool", PoolConfig(name, {"gpu": gpu}, grace_s=100_000.0).to_wire(), f"{name}#1"]


def story(at: Place) -> None:
    """Requests in two pools, a preemption with another attempt, changes, a rejection and a cancellation."""
    at.change(
        "c1", pool("p", 2), pool("q", 2), policy("p", "low"), policy("q", "low"), policy("p", "high", 1)
    )
    at.submit("a", "low", 2, retries=3)
    at.submit("b", "low", 2, retries=3)
    at.until_states(a="allocated", b="allocated")
    at.submit("c", "low", 1)
    at.submit("h", "high", 2)
    at.until(lambda: "preempting" in {view["state"] for view in at.views("a", "b").values()}, "a preemption")
    for id in ("a", "b"):  # without effect on the one that need not stop
        at.own("stopped", id, k=1)
    at.until_states(h="allocated")
    for id in ("a", "b"):
        at.own("stopped", id, k=1)
    at.submit("r", "low", 64)
    at.change("c2", pool("q", 3))
    at.own("release", "h")
    at.until_states(a="allocated", b="allocated", c="allocated")
    assert sorted(view["k"] for view in at.views("a", "b").values()) == [1, 2]
    at.own("release", "a")
    at.own("cancel", "c")
    at.own("release", "b")
    at.change("c3", ["unpolicy", "high", "p"])
    at.submit("e", "low", 1)
    at.own("cancel", "e")


ENDS = {
    "a": "released",
    "b": "released",
    "c": "cancelled",
    "e": "cancelled",
    "h": "released",
    "r": "rejected",
}


def played(plan: Plan | None) -> list[tuple[str, int, int]]:
    """The story, and all that must hold after it. Returns which processes ended."""
    with place(plan) as at:
        story(at)
        live = at.until_quiet()
        ended = kill_points.deaths(at.folder)
        assert outcomes(at.store) == ENDS
        assert at.acknowledged == {id: state for id, state in ENDS.items() if id != "r"}
        logged = events(at.store, COORDINATOR)
        changed = [each.command_id for each in logged if isinstance(each, ev.Changed)]
        assert changed == ["c1", "c2", "c3"]
        assert at.ask("config")["version"] == at.versions[-1]
        asked = Counter((each.id, each.k, each.what) for each in logged if isinstance(each, ev.Asked))
        assert set(asked.values()) == {1}
        assert sum(what == "stopped" for _, _, what in asked) == 1
        for name in ("p", "q"):
            assert at.ask("status", f"pool:{name}")["held"].get("gpu", 0) == 0
        checked(at.store, ["p", "q"], live)
    return ended


def test_without_a_kill_the_story_ends_as_told() -> None:
    assert played(None) == []


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("actor", "point"),
    [(actor, point) for actor, points in POINTS.items() for point in points],
)
def test_killed_at_a_point(actor: str, point: str, after: bool) -> None:
    """Fault: an answer before it is durable, a turn that is half there, a message that is lost or worked in twice."""
    ended = played(Plan(actor, point, after, NTH))
    print(f"killed {len(ended)} times {'after' if after else 'before'} {point} of {actor}")
    assert ended, "the point was never reached"
    assert {(who, code) for who, _, code in ended} == {(actor, -signal.SIGKILL)}


# --- on Ray

CONFIG = """
pools:
  alpha: {capacity: {seat: 3}, placement: none, grace_s: 3}
  beta: {capacity: {seat: 2}, placement: none, grace_s: 3}
  gamma: {capacity: {seat: 2}, placement: none, grace_s: 3}
policies:
  - {requester: vision, pool: alpha, reserved: {seat: 2}}
  - {requester: vision, pool: beta}
  - {requester: speech, pool: beta, reserved: {seat: 2}}
  - {requester: speech, pool: gamma}
  - {requester: text, pool: alpha}
  - {requester: text, pool: beta}
  - {requester: text, pool: gamma, reserved: {seat: 1}}
"""
POOLS = ["alpha", "beta", "gamma"]
CLIENTS = 8

PREAMBLE = """
import itertools, json, os, random, signal, sys, threading, time
import ray_pools as pools
from ray_pools.actors import deploy
from ray_pools.client import connect_ray
from ray_pools.config import load_config

POOLS = ["alpha", "beta", "gamma"]
chance = random.Random(sys.argv[1])
connect_ray(os.environ["RAY_ADDRESS"], quiet=True)

def up(path):
    config = load_config(path)
    with deploy.empty_directory():
        deploy.up(config.core_pools(), config.core_policies(), namespace=config.namespace, store=config.store,
                  options={"prewarm": False})

def ask(name, op):
    return client.coordinator({"op": op}) if name == "coordinator" else client.pool(name, {"op": op})

def digests():
    logs = {"coordinator": ask("coordinator", "digest")}
    return {**logs, **{"pool:" + name: ask(name, "digest") for name in POOLS}}

def say(what):
    print(json.dumps(what), flush=True)
"""

# Holds one slot after the other; says what it was told of each request.
CLIENT = """
client = pools.connect(quiet=True)
say("ready")
ends_at = float(sys.stdin.readline()) + time.monotonic()  # in this order: it begins when it is told
for number in itertools.count():
    if time.monotonic() >= ends_at:
        break
    requester, seats = chance.choice(["vision", "speech", "text"]), chance.randint(1, 2)
    ticket = client.submit(requester, pool_resources={"seat": seats}, retries=3, id=f"{sys.argv[1]}-{number}")
    say([ticket.id, "submitted"])
    if chance.random() < 0.1:
        ticket.cancel()
    while not ticket.done:
        try:
            slot = ticket.wait()
        except pools.SlotError:
            break
        if slot.preempting.wait(chance.random() / 2):
            slot.stopped()
        else:
            ticket.release()
    say([ticket.id, ticket.state])
"""

KILLER = """
up(sys.argv[2])
client = pools.connect(quiet=True)
say("ready")
ends_at = float(sys.stdin.readline()) + time.monotonic()  # in this order: it begins when it is told
pause = threading.Event()
while time.monotonic() < ends_at:
    name = chance.choice(["coordinator", *POOLS])
    os.kill(ask(name, "ping")["pid"], signal.SIGKILL)
    say(name)
    pause.wait(2.0)
sys.stdin.readline()  # the clients are done
while not all(ask(name, "quiet")["quiet"] for name in ["coordinator", *POOLS]):
    pause.wait(0.05)
say({"live": digests(), "held": [client.status()["pools"][name]["held"] for name in POOLS]})
"""

# What was acknowledged before must be there; then works on until it is killed, and says what it is told.
WORKER = """
up(sys.argv[2])
client = pools.connect(quiet=True)
came_back = digests()
found = {}
for id, state in json.loads(sys.stdin.readline()).items():
    found[id] = (client.get(id) or {"state": "lost"})["state"]
say({"live": came_back, "found": found})
for view in client.list(states=["queued", "allocated", "preempting"]):  # nobody is behind these any more
    client.coordinator({"op": "cancel", "id": view["id"], "operator": "test"})
for number in itertools.count():
    tickets = [
        client.submit(chance.choice(["vision", "speech", "text"]), pool_resources={"seat": 1}, retries=3,
                      id=f"{sys.argv[1]}-{number}-{each}")
        for each in range(4)
    ]
    for ticket in tickets:
        say({"id": ticket.id, "state": "submitted"})
    for ticket in tickets[:3]:
        if chance.random() < 0.7:
            ticket.release()
        else:
            ticket.cancel()
        say({"id": ticket.id, "state": ticket.state})
    tickets[3].wait()
    say({"live": digests()})
    tickets[3].release()
    say({"id": tickets[3].id, "state": tickets[3].state})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of one test: its clusters are registered there, its configuration and logs are there."""
    monkeypatch.setenv("POOLS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("RAY_POOLS_STORE", f"sqlite://{tmp_path / 'store'}")
    (tmp_path / "pools.yaml").write_text(CONFIG)
    return tmp_path


def local_cluster() -> LocalCluster:
    """A head and nothing else."""
    return LocalCluster({}, dashboard=False)


@contextmanager
def driver(code: str, cluster: LocalCluster, folder: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """A client process; killed at the end if it still runs."""
    env = {**os.environ, **cluster.driver_env(), "RAY_ADDRESS": cluster.address}
    command = [sys.executable, "-c", PREAMBLE + code, name, str(folder / "pools.yaml")]
    with (
        (folder / f"{name}.err").open("w") as errors,
        subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        # one that hangs must fail the test, not hold it up for ever: what waits for its words sees their end
        watchdog = threading.Timer(KILL_S + 2 * WAIT_S, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str], folder: Path, name: str) -> Any:
    """The next thing that a driver says; the test fails with what it died of."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line[0] in '"[{':  # else a notice of Ray's
            return json.loads(line)
    process.wait()
    raise AssertionError(
        f"{name} ended with {process.returncode}: {(folder / f'{name}.err').read_text()[-3000:]}"
    )


def rest_of(process: subprocess.Popen[str], folder: Path, name: str) -> list[Any]:
    """All that a driver still says; it must end well."""
    assert process.stdout is not None
    said = [json.loads(line) for line in process.stdout if line[0] in '"[{']
    code = process.wait()
    assert code == 0, f"{name} ended with {code}: {(folder / f'{name}.err').read_text()[-3000:]}"
    return said


@pytest.mark.ray
def test_random_actors_killed_under_the_load_of_several_processes(folder: Path) -> None:
    """Fault: a request that is acknowledged and has no outcome or two, holds in two pools, or above the capacity."""
    store = os.environ["RAY_POOLS_STORE"]
    acknowledged: dict[str, str] = {}
    with local_cluster() as cluster, ExitStack() as stack:
        killer = stack.enter_context(driver(KILLER, cluster, folder, "killer"))
        assert heard(killer, folder, "killer") == "ready"
        clients = {f"c{number}": CLIENT for number in range(CLIENTS)}
        running = {
            name: stack.enter_context(driver(code, cluster, folder, name)) for name, code in clients.items()
        }
        for name, process in running.items():
            assert heard(process, folder, name) == "ready"
        for process in (*running.values(), killer):
            tell(process, str(KILL_S))
        with ThreadPoolExecutor(CLIENTS) as threads:  # a full pipe would stop its writer
            for said in threads.map(lambda name: rest_of(running[name], folder, name), running):
                acknowledged.update(dict(said))
        tell(killer, "done")
        *kills, end = rest_of(killer, folder, "killer")
        assert not any(amount for held in end["held"] for amount in held.values())
        report = checked(store, POOLS, end["live"])
    found = outcomes(store)
    print(f"\n{len(kills)} kills in {KILL_S:g} s: {dict(Counter(kills))}")
    print(
        f"{len(acknowledged)} acknowledged requests: {dict(Counter(acknowledged.values()))}; {report.text()}"
    )
    assert kills
    assert {id: found.get(id) for id in acknowledged} == acknowledged


@pytest.mark.ray
def test_a_killed_head_comes_back_to_what_was_acknowledged_last(folder: Path) -> None:
    """Fault: an acknowledged event that only the killed processes knew; a log that a new cluster can't go on from."""
    store = os.environ["RAY_POOLS_STORE"]
    acknowledged: dict[str, str] = {}
    last: dict[str, Any] = {}
    chance = random.Random(0)
    for kills in range(HEAD_KILLS + 1):
        name = f"w{kills}"
        with local_cluster() as cluster, driver(WORKER, cluster, folder, name) as worker:
            tell(worker, json.dumps(acknowledged))
            back = heard(worker, folder, name)
            now = back["found"]
            # who was only told that it is submitted may have been on its way to an end
            assert {id: now[id] for id, state in acknowledged.items() if state != "submitted"} == {
                id: state for id, state in acknowledged.items() if state != "submitted"
            }
            assert "lost" not in now.values()
            for log, digest in last.items():
                assert back["live"][log]["seq"] >= digest["seq"]
            # the logs, folded up to there, must give the very digests that were told before and after the kill
            checked(store, POOLS, last)
            checked(store, POOLS, back["live"])
            if kills == HEAD_KILLS:
                break
            said = [heard(worker, folder, name) for _ in range(chance.randint(12, 60))]
            for pid in cluster.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            worker.kill()
            assert worker.stdout is not None
            # what it was told until then; its last line may be cut off
            said += [json.loads(line) for line in worker.stdout if line[0] == "{" and line[-1] == "\n"]
            for each in said:
                last = each.get("live", last)
                if "id" in each:
                    acknowledged[each["id"]] = each["state"]
    outcomes(store)
    rows = {log: digest["seq"] for log, digest in last.items()}
    print(
        f"\n{HEAD_KILLS} of {HEAD_KILLS} heads killed and come back; {len(acknowledged)} requests, rows {rows}"
    )
