"""Simulation beside live pools: a replay's log again, estimates against what came, `would` against what then happened.

Faults it stands for: real actors that turn, batch or wait in a way that the simulator does not know; an estimate that
has nothing to do with the wait that follows; an answer about a submission that the submission does not bear out.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from estimated_waits import estimated_waits
from live_pools import live_pools

from ray_pools.client import Slot, replay
from ray_pools.trace import TraceJob

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = """
namespace: tried
pools:
  p: {capacity: {gpu: 8}, placement: none, grace_s: 1, starvation_after_s: 4}
policies:
  - {pool: p, requester: vision, reserved: {gpu: 4}}
  - {pool: p, requester: language, priority: 1, reserved: {gpu: 2}}
  - {pool: p, requester: research}
"""
TEAMS = ("vision", "language", "research", "research")


class Timed:
    """A task that only takes its time."""

    def __init__(self, seconds: float) -> None:
        self.ended: Future[Any] = Future()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        if self.ended.set_running_or_notify_cancel():
            self.ended.set_result(None)

    def cancel(self) -> None:
        self._timer.cancel()
        if not self.ended.done():
            self.ended.set_exception(RuntimeError("cancelled"))


class TimedWork:
    """Work on paper: the actors, their logs and all messages are real."""

    def start(self, slot: Slot, seconds: float) -> Sequence[Timed]:
        return [Timed(seconds)]

    def nodes(self) -> int:
        return 1


def jobs(count: int) -> list[TraceJob]:
    rng, at, found = random.Random(5), 0.0, []
    for row in range(1, count + 1):
        at += rng.choice([0.0, 0.1, 0.3, 0.6])
        found.append(
            TraceJob(str(row), at, rng.choice([0.5, 1.5, 3.0]), rng.choice([1, 2, 2, 4]), rng.choice(TEAMS))
        )
    return found


def test_a_live_replay_again_and_its_waits_as_they_were_estimated(tmp_path: Path) -> None:
    with live_pools(tmp_path, CONFIG) as live:
        played = replay.play(live.client, jobs(60), work=TimedWork(), retries=20)
        assert set(played.outcomes.values()) == {"done"}
        command = [
            sys.executable,
            "-m",
            "ray_pools.cli",
            "simulate",
            str(tmp_path / "pools.yaml"),
            "--from-log",
        ]
        done = subprocess.run(
            [*command, "--store", str(tmp_path / "store"), "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        said = json.loads(done.stdout)
        assert said["decisions"]["identical"], said["decisions"]
        assert said["decisions"]["latest_by_s"] < 0.001
        assert said["changed"] == []
        assert said["total"]["was"]["preempted"] > 0
        waits = list(estimated_waits(live.store, ["p"], 0.1))
        assert len(waits) > 10
        # better than nothing: nearer to what came than 0 s is
        assert median(each.error_s for each in waits) < median(each.wait_s for each in waits)


def test_would_agrees_with_live_pools(tmp_path: Path) -> None:
    rng = random.Random(8)
    seen: set[str] = set()
    with live_pools(tmp_path, CONFIG) as live:
        tickets = []
        for n in range(25):
            requester, gpus = rng.choice(TEAMS), rng.choice([1, 2, 3, 9])
            found = live.client.would(requester, gpus=gpus)
            ticket = live.client.submit(requester, gpus=gpus, id=f"r{n}", retries=5)
            view = ticket.status()
            for _ in range(200):  # until the pool says where it stands, or has decided
                said = {} if view["state"] != "queued" else ticket.explain()
                view = ticket.status()
                if view["state"] != "queued" or (said and all(each.get("state") for each in said.values())):
                    break
            nominated = bool(view.get("nominated")) or bool(found.victims and view["state"] == "allocated")
            answer = {"rejected": "rejected", "allocated": "granted"}.get(view["state"], "waits")
            answer = "stops_others" if nominated else answer
            assert found.answer == answer, f"{n}: {found}, and it {view}"
            seen.add(answer)
            tickets.append(ticket)
            if rng.random() < 0.4:
                done = rng.choice(tickets)
                if not done.done:
                    done.release()
    assert len(seen) >= 3, seen
