"""Kills of real processes: what was acknowledged has exactly its effect, the logs hold (docs/rules.md section 10).

Faults it stands for: a SIGKILL of one actor at each point of a turn (before and after its append, its commit, its
answer, its messages, its snapshot); of random actors under the load of several client processes; and of a whole head,
after which the pools must come back to what was last acknowledged. The points without Ray are `kill_points.py`.

POOLS_KILL_S: how long the live test kills (20 s; 60 s for the full one). POOLS_HEAD_KILLS: how many heads (2; 20).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kill_points
import pytest
from kill_points import COORDINATOR, POINTS, Plan

from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
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
