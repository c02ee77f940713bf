"""`pools replay`: the way of each job, and the whole of it on a live cluster.

Faults it stands for: a thread per job, a job that runs on in a slot that is gone, one that loses its work when it is
preempted, a worker that died, a replay that ends before its jobs or never, Ctrl-C that leaves requests or processes,
bad input that is found only when a cluster runs, and a pool's actor and the coordinator killed in the middle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_pools import FakePools

from ray_pools.cli.app import pools as cli
from ray_pools.client import replay
from ray_pools.client.slot import Slot
from ray_pools.config import load_config
from ray_pools.errors import SlotOver, Unreachable
from ray_pools.local_cluster import find_local_clusters
from ray_pools.log_check import check_logs
from ray_pools.trace import TraceJob, read_trace

TOP = Path(__file__).parent.parent
CONFIG, SAMPLE = TOP / "examples" / "itp.yaml", TOP / "examples" / "itp_sample.csv"
TRACES = Path(os.environ.get("RAY_POOLS_TRACES") or TOP.parent / "shared" / "traces")
LIMIT_S = 150

Step = Callable[[replay.Progress], object]


class PaperPart:
    def __init__(self, slot: Slot, seconds: float) -> None:
        self.slot, self.seconds = slot, seconds
        self.ended: Future[Any] = Future()

    def cancel(self) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError("cancelled"))


class PaperWork:
    """Tasks that end when a test says so."""

    def __init__(self) -> None:
        self.parts: list[PaperPart] = []
        self.refuse_once = False

    def start(self, slot: Slot, seconds: float) -> Sequence[PaperPart]:
        if self.refuse_once:
            self.refuse_once = False
            raise SlotOver(slot.id, "gone")
        part = PaperPart(slot, seconds)
        self.parts.append(part)
        return [part]

    def nodes(self) -> int:
        return 1

    def running(self) -> list[PaperPart]:
        return [part for part in self.parts if not part.ended.done()]


def jobs(count: int, duration_s: float = 100.0) -> list[TraceJob]:
    return [TraceJob(str(row), 0.0, duration_s, 1, "ml") for row in range(1, count + 1)]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress at each turn of the loop, so that a test can act between any two."""
    monkeypatch.setattr(replay, "_PROGRESS_S", 0.0)
    monkeypatch.setattr(replay, "TICK_S", 0.002)


def played(
    fake: FakePools, work: PaperWork, given: list[TraceJob], step: Step, **options: Any
) -> replay.Played:
    with fake.client() as client:
        return replay.play(client, given, work=work, on_progress=step, **options)


def row_of(id: str) -> str:
    return id.rsplit("-", 1)[1]


# --- a job's way


def test_thousands_wait_in_a_few_threads_and_all_end_in_their_own_way() -> None:
    fake, work = FakePools(), PaperWork()
    threads, before = [], threading.active_count()

    def step(seen: replay.Progress) -> None:
        threads.append(threading.active_count())
        queued = [id for id, view in fake.views.items() if view["state"] == "queued"]
        if len(fake.views) < 2000:
            return
        for id in queued[:200]:
            if row_of(id) == "7":
                fake.finish(id, "rejected", causes={"a": "exceeds_capacity"})
            else:
                fake.grant(id)
        for part in work.running():
            part.ended.set_result(None)

    result = played(fake, work, jobs(2000), step)
    assert len(result.outcomes) == 2000
    assert result.outcomes["7"] == "rejected"
    assert sum(outcome == "done" for outcome in result.outcomes.values()) == 1999
    assert max(threads) - before < 40
    assert not result.timed_out


def test_a_preempted_job_says_stopped_and_goes_on_with_what_is_left() -> None:
    fake, work = FakePools(), PaperWork()

    def step(seen: replay.Progress) -> None:
        for id, view in list(fake.views.items()):
            if view["state"] == "queued":
                fake.grant(id)
            elif view["state"] == "allocated" and view["k"] == 1 and work.running():
                fake.preempt(id)
            elif view["state"] == "allocated" and view["k"] == 2 and work.running():
                work.running()[0].ended.set_result(None)

    result = played(fake, work, jobs(1), step, retries=1)
    assert result.outcomes == {"1": "done"}
    first, second = work.parts
    assert isinstance(first.ended.exception(), RuntimeError)
    assert 0 < second.seconds < first.seconds == 100.0
    assert len(fake.ops("stopped")) == 1


def test_work_that_ended_before_the_job_heard_that_it_must_stop_is_done() -> None:
    fake, work = FakePools(), PaperWork()

    def step(seen: replay.Progress) -> None:
        for id, view in list(fake.views.items()):
            if view["state"] == "queued":
                fake.grant(id)
            elif view["state"] == "allocated" and work.running():
                part = work.running()[0]
                fake.preempt(id)
                assert part.slot.preempting.wait(30)
                part.ended.set_result(None)
                # what the loop has not looked at yet: both at once

    result = played(fake, work, jobs(1), step, retries=0)
    assert result.outcomes["1"] in ("done", "preempted")
    assert len(fake.ops("release")) + len(fake.ops("stopped")) == 1


def test_without_retries_a_preempted_job_is_over() -> None:
    fake, work = FakePools(), PaperWork()

    def step(seen: replay.Progress) -> None:
        for id, view in list(fake.views.items()):
            if view["state"] == "queued":
                fake.grant(id)
            elif view["state"] == "allocated" and work.running():
                fake.preempt(id)

    assert played(fake, work, jobs(1), step, retries=0).outcomes == {"1": "preempted"}


def test_a_worker_that_dies_is_tried_again_and_then_the_job_fails() -> None:
    fake, work = FakePools(), PaperWork()

    def step(seen: replay.Progress) -> None:
        for id, view in list(fake.views.items()):
            if view["state"] == "queued":
                fake.grant(id)
        for part in work.running():
            part.ended.set_exception(RuntimeError("the worker died"))

    result = played(fake, work, jobs(1), step)
    assert result.outcomes == {"1": "failed"}
    assert result.failures == {"1": "RuntimeError: the worker died"}
    assert len(work.parts) == replay.LAUNCHES_MAX
    assert [op["op"] for op in fake.calls if op["op"] in ("release", "cancel")] == ["release"]


def test_a_slot_that_is_over_at_the_start_of_its_work_is_asked_about() -> None:
    fake, work = FakePools(), PaperWork()
    work.refuse_once = True

    def step(seen: replay.Progress) -> None:
        for id, view in list(fake.views.items()):
            if view["state"] == "queued":
                fake.grant(id)
        for part in work.running():
            part.ended.set_result(None)

    assert played(fake, work, jobs(1), step).outcomes == {"1": "done"}


def test_submissions_follow_the_trace_and_its_speed() -> None:
    fake, work = FakePools(), PaperWork()
    seen_rows: list[int] = []

    def step(seen: replay.Progress) -> None:
        seen_rows.append(seen.submitted)
        for id, view in list(fake.views.items()):
            if view["state"] == "queued":
                fake.grant(id)
        for part in work.running():
            part.ended.set_result(None)

    trace = [
        TraceJob("1", 50.0, 10.0, 1, "ml"),
        TraceJob("2", 50.0, 10.0, 1, "x"),
        TraceJob("3", 90.0, 4.0, 1, "ml"),
    ]
    result = played(fake, work, trace, step, speed=200.0)
    assert seen_rows[0] == 2
    assert result.seconds >= (90.0 - 50.0) / 200.0
    assert [op["requester"] for op in fake.ops("submit")] == ["ml", "x", "ml"]
    assert [part.seconds for part in work.parts] == [0.05, 0.05, 0.02]


def test_a_timeout_and_an_interrupt_cancel_what_is_not_over() -> None:
    for reason in ("timeout", "interrupt"):
        fake, work = FakePools(), PaperWork()

        def step(
            seen: replay.Progress, fake: FakePools = fake, work: PaperWork = work, reason: str = reason
        ) -> None:
            ids = list(fake.views)
            if ids and fake.views[ids[0]]["state"] == "queued":
                fake.grant(ids[0])
            if work.running() and reason == "interrupt":
                raise KeyboardInterrupt

        if reason == "timeout":
            result = played(fake, work, jobs(3), step, timeout_s=0.2)
            assert result.timed_out
            assert result.outcomes == {}
        else:
            with pytest.raises(KeyboardInterrupt):
                played(fake, work, jobs(3), step)
        assert {view["state"] for view in fake.views.values()} == {"cancelled"}
        assert work.running() == []


def test_a_coordinator_that_is_gone_for_good_ends_the_replay() -> None:
    fake, work = FakePools(), PaperWork()

    def step(seen: replay.Progress) -> None:
        if fake.views:
            fake.down = Unreachable("no coordinator")
            fake.break_waits()

    with fake.client(give_up_s=0.1) as client, pytest.raises(Unreachable):
        replay.play(client, jobs(1), work=work, on_progress=step)


# --- the examples, and bad input


def test_the_example_and_its_trace_fit_each_other() -> None:
    config = load_config(CONFIG)
    teams = {policy.requester for policy in config.policies}
    assert teams >= {f"c{number:02}" for number in range(1, 11)}
    trace = read_trace(SAMPLE)
    assert {job.requester for job in trace} <= teams
    largest = max(pool.capacity["gpu"] or 0 for pool in config.pools.values())
    assert any(job.gpus > largest for job in trace), "one that every pool rejects"


def test_a_requester_without_a_policy_is_found_before_anything_starts(tmp_path: Path) -> None:
    trace = tmp_path / "ghost.csv"
    trace.write_text("submit_s,duration_s,gpus,requester\n0,10,1,c01\n1,10,1,ghost\n")
    result = invoke(str(CONFIG), str(trace), "--local")
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert "requester = 'ghost': a requester with a policy in" in result.output
    assert f"{trace}, row 2" in result.output


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli, ["replay", *args])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["missing.yaml", str(SAMPLE)], "missing.yaml"),
        ([str(CONFIG), "missing.csv"], "missing.csv"),
        ([str(CONFIG), str(SAMPLE), "--speed", "0"], "--speed = 0.0: a number above 0"),
        ([str(CONFIG), str(SAMPLE), "--speed", "nan"], "--speed = nan: a number above 0"),
        ([str(CONFIG), str(SAMPLE), "--limit", "0"], "--limit = 0: an integer from 1"),
        ([str(CONFIG), str(SAMPLE), "--skip", "25"], "--skip = 25: fewer than the 25 rows"),
        ([str(CONFIG), str(SAMPLE), "--retries", "-1"], "--retries = -1"),
        ([str(CONFIG), str(SAMPLE), "--timeout", "0"], "--timeout = 0.0"),
        ([str(CONFIG), str(SAMPLE), "--store", "redis://host:1/0"], "--store"),
        ([str(CONFIG), str(SAMPLE), "--local", "--address", "127.0.0.1:1"], "leave --address out"),
    ],
)
def test_bad_input_ends_with_one_line_before_anything_starts(args: list[str], said: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "Traceback" not in result.output
    assert find_local_clusters() == []


def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text(SAMPLE.read_text().replace("20,1200,8,c04", "20,1200,eight,c04"))
    result = invoke(str(CONFIG), str(bad))
    assert result.exit_code == 2
    assert f"gpus = 'eight': an integer from 0 to {2**53} ({bad}:4)" in result.output.replace("\n", " ")


def test_without_a_cluster_and_without_starting_one(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(str(CONFIG), str(SAMPLE), "--address", "127.0.0.1:1")
    assert result.exit_code == 3, result.output
    assert "127.0.0.1:1" in result.output


# --- live

DRIVE = """
import os, signal, sys
import ray_pools.cli.replay as replay
from ray_pools.cli.app import pools

plain, state = replay.run, {"killed": False, "before": {}}

def kill(client):
    asks = {"coordinator": client.coordinator, "ondemand": None, "spot": None}
    for name in asks:
        pid = (client.ping() if name == "coordinator" else client.pool(name, {"op": "ping"}))["pid"]
        print("killing", name, pid, file=sys.stderr)
        os.kill(pid, signal.SIGKILL)

def run(plan, client):
    def look(seen):
        if MODE == "kill" and seen.done >= 3 and seen.running and not state["killed"]:
            state["killed"] = True
            kill(client)
        if MODE == "interrupt" and seen.running >= 2 and not state["killed"]:
            state["killed"] = True
            signal.raise_signal(signal.SIGINT)
    result = plain(plan, client, look)
    assert state["killed"], "the replay was over before its moment"
    return result

MODE, replay.run = sys.argv[1], run
pools(["replay", *sys.argv[2:]], prog_name="pools")
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    """The example's teams on half the nodes: a start takes the time of these tests."""
    text = "namespace: small\npools:\n"
    for pool in ("ondemand", "spot"):
        labels = f"{{ray-pools.io/node-type: gpu_{pool}}}"
        text += f"  {pool}: {{capacity: {{gpu: 8}}, grace_s: 2, placement: {{labels: {labels}, node: {{gpu: 4}}}}}}\n"
    text += "policies:\n"
    for number in range(1, 11):
        share = "{gpu: 2}" if number in (2, 4, 7) else "{}"
        text += f"  - {{pool: ondemand, requester: c{number:02}, reserved: {share}, priority: 2}}\n"
        text += f"  - {{pool: spot, requester: c{number:02}, priority: {number % 3}}}\n"
    (tmp_path / "small.yaml").write_text(text)
    return str(tmp_path / "small.yaml")


@pytest.fixture
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLS_STATE_DIR", str(tmp_path / "state"))


def drive(mode: str, *args: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-c", DRIVE, mode, *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        cwd=TOP,
    )


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("own_registry")
def test_a_replay_outlives_the_kill_of_both_pools_and_of_the_coordinator(tmp_path: Path, small: str) -> None:
    done = drive(
        "kill",
        small,
        str(SAMPLE),
        "--local",
        "--speed",
        "200",
        "--json",
        "--store",
        str(tmp_path / "logs"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["log_check"]["ok"] is True
    outcomes: dict[str, int] = {}
    for team in told["teams"].values():
        for outcome, count in team["outcomes"].items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    assert outcomes == {"done": 24, "rejected": 1}
    assert sum(team["gpu_s_in_share"] for team in told["teams"].values()) > 0
    # the pools' logs that stayed give what the actors answered at the end; the coordinator's has the taking down, too
    report = check_logs(str(tmp_path / "logs"), ["ondemand", "spot"])
    assert report.ok
    assert report.open == 0
    digests = told["log_check"]["digests"]
    assert report.digests.keys() == digests.keys()
    for log in ("pool:ondemand", "pool:spot"):
        assert report.digests[log] == digests[log]
    assert find_local_clusters() == []


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("own_registry")
def test_ctrl_c_ends_every_request_and_every_process(tmp_path: Path, small: str) -> None:
    done = drive(
        "interrupt",
        small,
        str(SAMPLE),
        "--local",
        "--speed",
        "50",
        "--json",
        "--store",
        str(tmp_path / "logs"),
    )
    assert done.returncode == 130, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    report = check_logs(str(tmp_path / "logs"), ["ondemand", "spot"])
    assert report.ok, report.problems
    assert report.open == 0
    assert report.final["cancelled"] >= 2
    assert find_local_clusters() == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("own_registry")
def test_a_replay_on_a_cluster_with_authentication(tmp_path: Path, small: str) -> None:
    """The cluster has a token of its own: nothing of the user's is needed, or written."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    options = ["--limit", "6", "--speed", "300", "--local", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "ray_pools.cli", "replay", small, str(SAMPLE), *options],
        env=env,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
        cwd=TOP,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["log_check"]["ok"] is True
    assert sum(team["outcomes"].get("done", 0) for team in told["teams"].values()) == 6
    assert not (tmp_path / ".ray").exists()
    assert find_local_clusters() == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("own_registry")
def test_sixty_real_jobs_of_the_itp_trace() -> None:
    trace = TRACES / "itp2021.csv.gz"
    if not trace.exists():
        pytest.skip(f"the trace is not here: {trace} (RAY_POOLS_TRACES names its folder)")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "ray_pools.cli", "replay", str(CONFIG), str(trace)]
    options = ["--limit", "60", "--speed", "3000", "--local", "--json"]
    done = subprocess.run(
        [*command, *options], env=env, capture_output=True, text=True, timeout=600, check=False, cwd=TOP
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["log_check"]["ok"] is True
    assert len(told["teams"]) >= 3
    assert sum(team["outcomes"].get("done", 0) for team in told["teams"].values()) == 60
