"""Pools in virtual time (`pools simulate`) against a whole system with a real coordinator, and against a real log.

Faults it stands for: a simulator with rules of its own (docs/rules.md sections 3 to 9, decision by decision, on random
worlds); time in share, waits or preemptions that are summed up wrongly; work that a preemption costs counted twice or
not at all; a share that is not met and nobody says so (10.4); another output for the same input.
"""

from __future__ import annotations

import csv
import heapq
import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ray_pools.cli.app import pools as cli
from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.system import System
from ray_pools.log_usage import team_usage
from ray_pools.simulate import play as playing
from ray_pools.simulate import plots
from ray_pools.simulate.play import Played, play
from ray_pools.simulate.report import JOB_COLUMNS, digest_of, job_lines, report_of
from ray_pools.store import open_store
from ray_pools.trace import TraceJob

EXAMPLES = Path(__file__).parent.parent / "examples"
TRACES = Path(os.environ.get("RAY_POOLS_TRACES") or EXAMPLES.parent.parent / "shared" / "traces")
Decision = tuple[float, str, tuple[Any, ...]]
World = tuple[dict[str, PoolConfig], list[PolicyConfig]]

_labels = itertools.count()


def random_world(rng: random.Random) -> World:
    names = ["p", "q", "r"][: rng.choice([1, 1, 2, 3])]
    pools = {
        name: PoolConfig(
            name,
            {"gpu": rng.randint(4, 12), **({"step_run": rng.randint(3, 6)} if rng.random() < 0.2 else {})},
            queueing=rng.choice(["backfill", "strict"]),
            starvation_after_s=rng.choice([0.0, 20.0, 300.0]),
            grace_s=rng.choice([0.0, 10.0, 30.0]),
            min_runtime_s=rng.choice([0.0, 0.0, 25.0]),
        )
        for name in names
    }
    policies = []
    for name, team in itertools.product(names, ("t1", "t2", "t3", "t4")):
        if rng.random() < 0.75:
            reserved = {"gpu": rng.randint(0, 1)} if rng.random() < 0.6 else {}
            limit = {"gpu": rng.randint(2, 8)} if rng.random() < 0.3 else {}
            policies.append(PolicyConfig(name, team, rng.choice([0, 0, 1, 5]), reserved, limit))
    return pools, policies


def random_trace(rng: random.Random, count: int) -> list[TraceJob]:
    at, trace = 0.0, []
    for row in range(1, count + 1):
        at += rng.choice([0.0, 1.0, 5.0, 17.0])
        duration_s = rng.choice([0.0, 10.0, 40.0, 90.0, 400.0])
        trace.append(
            TraceJob(str(row), at, duration_s, rng.choice([0, 1, 1, 2, 4, 9]), f"t{rng.randint(1, 4)}")
        )
    return trace


class Reference:
    """The same jobs on a whole system, without checkpoints, in the plainest way."""

    def __init__(self, pools: dict[str, PoolConfig], policies: list[PolicyConfig], stop_s: float) -> None:
        self.system = System(pools, policies)
        self.stop_s = {name: min(stop_s, pool.grace_s) for name, pool in pools.items()}
        self.heard = {name: len(log) for name, log in self.system.logs.items()}
        self.ahead: list[tuple[float, int, str, int, str]] = []
        self.counter = itertools.count()
        self.phase: dict[str, tuple[int, str]] = {}
        self.where: dict[str, tuple[str, int]] = {}
        self.decisions: list[Decision] = []

    def run(self, trace: list[TraceJob]) -> list[Decision]:
        system, rows, place = self.system, {row.id: row for row in trace}, 0
        while place < len(trace) or self.ahead:
            times = [trace[place].submit_s] if place < len(trace) else []
            times += [self.ahead[0][0]] if self.ahead else []
            times += [at for pool in system.pools.values() if (at := pool.next_event_at()) is not None]
            now = max(system.now, min(times))
            system.now = now
            for core in (system.coordinator, *system.pools.values()):
                core.set_time(now)
            while self.ahead and self.ahead[0][0] <= now:
                _, _, id, k, what = heapq.heappop(self.ahead)
                if self.phase.get(id) == (k, what):
                    request = system.coordinator.find(id)
                    if what == "runs":
                        system.coordinator.release(request)
                    else:
                        system.coordinator.stopped(request)
            while place < len(trace) and trace[place].submit_s <= now:
                row = trace[place]
                amounts = {"gpu": row.gpus, "step_run": 1}
                system.coordinator.submit(row.id, row.requester, amounts, retries=10**6)
                place += 1
            system.settle()
            self._hear(rows)
        return self.decisions

    def _hear(self, rows: dict[str, TraceJob]) -> None:
        now = self.system.now
        for name in self.system.pools:
            log = self.system.logs[name]
            for at, body in log[self.heard[name] :]:
                event = ev.unpack(body)
                if isinstance(event, (ev.Granted, ev.Nominated, ev.Ended)):
                    self.decisions.append((at, name, (type(event).__name__, *event)))
                if isinstance(event, ev.Granted):
                    self.where[event.id] = name, event.k
                    self._ahead(now + rows[event.id].duration_s, event.id, event.k, "runs")
                elif isinstance(event, ev.Nominated):
                    # one that has stopped without grace, and was granted elsewhere, runs there already
                    for id, k in (each for each in event.victims if self.where[each[0]] == (name, each[1])):
                        self._ahead(now + self.stop_s[name], id, k, "stops")
                elif isinstance(event, ev.Ended) and self.where.get(event.id) == (name, event.k):
                    self.phase.pop(event.id)
            self.heard[name] = len(log)

    def _ahead(self, at: float, id: str, k: int, what: str) -> None:
        self.phase[id] = k, what
        heapq.heappush(self.ahead, (at, next(self.counter), id, k, what))


def simulated(world: World, trace: list[TraceJob], stop_s: float) -> tuple[list[Decision], Played]:
    """What the simulator's pools decided, as their events say it."""
    decisions: list[Decision] = []
    player = playing._Player(*world, trace, math.inf, stop_s)
    heard = player._heard

    def hear(name: str, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, (ev.Granted, ev.Nominated, ev.Ended)):
                decisions.append((player.world.now, name, (type(event).__name__, *event)))
        heard(name, events)

    player.world.listener = hear
    return decisions, player.run()


def by_pool(decisions: list[Decision]) -> dict[str, list[Decision]]:
    """Each pool's own, in order; what ended at one instant in any order."""
    found: dict[str, list[Decision]] = {}
    for decision in sorted(decisions, key=lambda d: d[0]):
        found.setdefault(decision[1], []).append(decision)
    for lines in found.values():
        ends = [n for n, line in enumerate(lines) if line[2][0] == "Ended"]
        for n, line in zip(ends, sorted((lines[n] for n in ends), key=lambda d: (d[0], d[2])), strict=True):
            lines[n] = line
    return found


def check_seed(seed: int) -> int:
    rng = random.Random(seed)
    world, stop_s = random_world(rng), rng.choice([0.0, 5.0, 60.0])
    if not world[1]:
        return 0
    trace = random_trace(rng, 40)
    wanted = Reference(*world, stop_s).run(trace)
    found, _ = simulated(world, trace, stop_s)
    assert by_pool(found) == by_pool(wanted), f"seed {seed}"
    return sum(decision[2][0] == "Nominated" for decision in found)


@pytest.mark.parametrize("part", range(4))
def test_the_simulator_decides_as_a_whole_system_does(part: int) -> None:
    assert sum(check_seed(seed) for seed in range(part * 10, part * 10 + 10)) > 3


@pytest.mark.slow
def test_the_simulator_decides_as_a_whole_system_does_on_many_worlds() -> None:
    assert sum(check_seed(seed) for seed in range(100, 600)) > 300


# --- the sums


def test_sums_are_those_of_a_real_log() -> None:
    """Time in share and borrowed, first waits and preemptions: as `team_usage` reads them from the same world's log."""
    rng = random.Random(7)
    pools = {"p": PoolConfig("p", {"gpu": 8}, grace_s=10.0)}
    policies = [PolicyConfig("p", f"t{n}", 0, {"gpu": n - 1}) for n in (1, 2, 3, 4)]
    trace = random_trace(rng, 60)
    reference = Reference(pools, policies, 5.0)
    reference.run(trace)
    address = f"memory:simulated-{next(_labels)}"
    for name, rows in reference.system.logs.items():
        store = open_store(address, name if name == "coordinator" else f"pool:{name}")
        store.open()
        store.append(rows, 0)
        store.close()
    usage = team_usage(address, ["p"])
    played = play(pools, policies, trace, stop_s=5.0)
    preempted = 0
    for team in ("t1", "t2", "t3", "t4"):
        holding = played.holdings["p", team]
        assert holding.in_share_s == pytest.approx(usage[team].in_share_s)
        assert holding.borrowed_s == pytest.approx(usage[team].borrowed_s)
        assert sum(holding.bins.values()) == pytest.approx(usage[team].in_share_s + usage[team].borrowed_s)
        jobs = [job for job in played.jobs if job.trace.requester == team]
        waits = sorted(job.first_at - job.trace.submit_s for job in jobs if job.first_at >= 0)
        assert waits == pytest.approx(sorted(usage[team].waits_s))
        assert sum(job.preempted for job in jobs) == usage[team].suffered
        assert sum(job.caused for job in jobs) == usage[team].caused
        preempted += usage[team].suffered
    assert preempted > 2


TWO = {"p": PoolConfig("p", {"gpu": 4}, grace_s=30.0)}
OWNER_AND_GUEST = [PolicyConfig("p", "owner", 0, {"gpu": 4}), PolicyConfig("p", "guest")]
RECLAIM = [TraceJob("1", 0.0, 100.0, 4, "guest"), TraceJob("2", 70.0, 50.0, 4, "owner")]


@pytest.mark.parametrize(
    ("every_s", "stop_s", "lost_s", "end_s"),
    [
        (math.inf, 0.0, 70.0, 220.0),  # it begins anew at 120
        (30.0, 0.0, 10.0, 160.0),  # 60 of its 70 s are saved
        (0.0, 0.0, 0.0, 150.0),
        (30.0, 10.0, 20.0, 170.0),  # the time that it takes to stop is nobody's either
        (math.inf, 99.0, 100.0, 250.0),  # cut at the grace
    ],
)
def test_a_preempted_job_loses_what_no_checkpoint_has(
    every_s: float, stop_s: float, lost_s: float, end_s: float
) -> None:
    played = play(TWO, OWNER_AND_GUEST, RECLAIM, checkpoint_every_s=every_s, stop_s=stop_s)
    guest, owner = played.jobs
    assert (guest.lost_s, guest.ended_at, guest.preempted) == (lost_s, end_s, 1)
    assert owner.first_at == 70.0 + min(stop_s, 30.0)
    report = report_of(played)
    assert report["total"]["lost_gpu_h"] == pytest.approx(4 * lost_s / 3600, abs=1e-4)
    useful_s = 4 * 150.0
    assert report["total"]["goodput"] == pytest.approx(useful_s / (4 * end_s), abs=1e-3)
    assert report["total"]["utilisation"] == pytest.approx((useful_s + 4 * lost_s) / (4 * end_s), abs=1e-3)
    assert report["total"]["unmet_share_gpu_h"] == 0.0
    assert report["total"]["longest_wait_in_share_s"] == min(stop_s, 30.0)


def test_a_share_that_is_not_met_is_told() -> None:
    """No rule lets that happen; so the watch is shown a pool that does not decide."""
    played = play(TWO, OWNER_AND_GUEST, RECLAIM)
    assert played.shares.unmet == 0
    player = playing._Player(TWO, OWNER_AND_GUEST, RECLAIM, math.inf, 0.0)
    player.world.set_time(0.0)
    player._submit(RECLAIM[0])
    player.world.settle()
    player._submit(RECLAIM[1])
    player.shares.look(0.0)
    player.shares.close(100.0)  # two graces are 60 s
    assert (player.shares.unmet, player.shares.unmet_s) == (1, 4 * 40.0)


def test_the_examples_hold_what_they_say() -> None:
    """600 jobs over 10 hours, made up: shares are met, and nothing borrows in hard partitions."""
    rng = random.Random(1)
    trace = [
        TraceJob(
            str(n),
            n * 60.0,
            rng.choice([600.0, 7200.0]),
            rng.choice([1, 8, 32, 64]),
            f"c{rng.randint(1, 10):02}",
        )
        for n in range(600)
    ]
    from ray_pools.config import load_config

    folder = EXAMPLES / "itp_1152"
    reports = {}
    for path in sorted(folder.glob("*.yaml")):
        config = load_config(path)
        assert [pool.capacity for pool in config.pools.values()] == [{"gpu": 1152}]
        reports[path.stem] = report_of(play(config.core_pools(), config.core_policies(), trace))["total"]
    assert sorted(reports) == ["hard_partitions", "one_queue", "shares_with_borrowing"]
    assert reports["hard_partitions"]["borrowed_gpu_h"] == 0
    assert reports["hard_partitions"]["rejected"] > 0
    assert reports["one_queue"]["rejected"] == reports["one_queue"]["preemptions_suffered"] == 0
    assert reports["shares_with_borrowing"]["unmet_share_gpu_h"] == 0


# --- the command


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, arguments)])


CONFIG = """
pools:
  p: {capacity: {gpu: 4}, placement: none}
policies:
  - {pool: p, requester: owner, reserved: {gpu: 4}}
  - {pool: p, requester: guest}
"""
ROWS = "submit_s,duration_s,gpus,requester\n0,100,4,guest\n70,50,4,owner\n80,10,9,owner\n90,10,1,stranger\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "shares.yaml").write_text(CONFIG)
    (tmp_path / "queue.yaml").write_text(CONFIG.replace(", reserved: {gpu: 4}", ""))
    (tmp_path / "jobs.csv").write_text(ROWS)
    return tmp_path / "shares.yaml", tmp_path / "jobs.csv"


def test_configurations_side_by_side(files: tuple[Path, Path], tmp_path: Path) -> None:
    config, trace = files
    result = invoke(config, trace, "--against", tmp_path / "queue.yaml", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert [c["total"]["preemptions_suffered"] for c in said["configs"].values()] == [1, 0]
    assert said["admitted_by_all"]["jobs"] == 2
    assert said["admitted_by_all"]["wait_s"]["queue"]["max"] == 30.0
    text = invoke(config, trace, "--against", tmp_path / "queue.yaml").output
    assert "shares: rejected: 1 job of owner (up to 9 GPUs): exceeds_capacity in p" in text
    assert "queue: rejected: 1 job of stranger (up to 1 GPU): no_policy in p" in text
    lines = text.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80  # one line of all that is told is not to be read
    assert (
        sum(line.startswith("stranger ") for line in lines) >= 4
    )  # each part of both tables says whose line it is
    only = json.loads(invoke(config, trace, "--from", "1m", "--to", "75", "--json").output)
    assert only["trace"] == {"jobs": 1, "from_s": 70.0, "to_s": 70.0}


def test_what_is_missing_is_said(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plots where nothing can draw them, and a window without jobs in the words that it was given in."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(plots, "plot_all", lambda *_: iter(()))
    assert "no plots: matplotlib is not installed" in invoke(*files, "--out", tmp_path / "out").stderr
    result = invoke(*files, "--from", "90d")
    assert result.exit_code == 2
    assert "--from/--to = '90d to the end': a window with jobs: those of" in result.stderr
    assert "are from 0s to 90s" in result.stderr


def test_the_files_are_the_same_twice(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "plot_all", lambda *_: iter(()))
    config, trace = files
    found = []
    for name in ("one", "two"):
        result = invoke(config, trace, "--against", tmp_path / "queue.yaml", "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
        found.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
    assert found[0] == found[1]
    assert {"report.md", "report.json", "jobs-shares.csv", "jobs-queue.csv"} <= set(found[0])
    assert b"| shares | " in found[0]["report.md"]


def test_each_job_is_a_line_of_csv() -> None:
    """Times keep their milliseconds also after months, and a name may have any characters."""
    name = 'a,"b'
    trace = [TraceJob("1", 5173334.5, 10.0, 1, name), TraceJob("2", 5173334.75, 10.0, 4, name)]
    played = play(TWO, [PolicyConfig("p", name)], trace)
    text = JOB_COLUMNS + "\n" + "".join(job_lines(played.jobs))
    rows = list(csv.DictReader(io.StringIO(text), strict=True))
    assert [row["requester"] for row in rows] == [name, name]
    assert [(row["submit_s"], row["first_start_s"]) for row in rows] == [
        ("5173334.500", "5173334.500"),
        ("5173334.750", "5173344.500"),
    ]


@pytest.mark.slow
def test_plots(files: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    result = invoke(*files, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    drawn = [path for path in (tmp_path / "out").iterdir() if path.suffix == ".png"]
    assert {p.name for p in drawn} == {"utilisation-shares.png", "timeline-shares.png", "waits.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("submit_s,duration_s,gpus,requester\n", "at least one row under the heading"),
        ("", "at least one row"),
        (ROWS + "100,ten,1,owner\n", "duration_s = 'ten': seconds, a number from 0"),
        (ROWS + "10,10,1,owner\n", "rows sorted by submit_s; the row before has 90"),
        (ROWS + "100,10,1\n", "4 cells, as the heading has, and not 3"),
    ],
)
def test_a_trace_that_is_none_is_one_line(files: tuple[Path, Path], rows: str, said: str) -> None:
    config, trace = files
    trace.write_text(rows)
    result = invoke(config, trace)
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_other_bad_input(files: tuple[Path, Path], tmp_path: Path) -> None:
    config, trace = files
    for arguments, said in (
        (["--from", "200"], "a window with jobs: those of"),
        (["--from", "-1"], "seconds, or a number with s, m, h or d"),
        (["--against", config], "each configuration once"),
        (["--against", tmp_path / "none.yaml"], "none.yaml"),
        (["--out", trace], "a folder to write to"),
    ):
        result = invoke(config, trace, *arguments)
        assert result.exit_code == 2, result.output
        assert said in result.output.replace("\n", " "), result.output


def test_pools_that_meter_more_than_gpus(tmp_path: Path) -> None:
    """`mcpu`, `memory_mb` and the slots of `step_run` count where a pool has a total of them."""
    config = tmp_path / "metered.yaml"
    config.write_text(
        "pools:\n  p: {capacity: {gpu: 8, mcpu: 4000, step_run: 2}, placement: none}\n"
        "policies:\n  - {pool: p, requester: a}\n"
    )
    trace = tmp_path / "jobs.csv"
    trace.write_text(
        "submit_s,duration_s,gpus,requester,mcpu\n0,10,1,a,3000\n0,10,1,a,2000\n0,10,1,a,\n0,10,1,a,\n"
    )
    said = json.loads(invoke(config, trace, "--json").output)
    assert said["configs"]["metered"]["total"]["wait_s"]["max"] == 10.0
    assert said["configs"]["metered"]["span_h"] == pytest.approx(20 / 3600, abs=1e-4)
    config.write_text(config.read_text().replace("mcpu: 4000", "mcpu: 8000"))
    assert json.loads(invoke(config, trace, "--json").output)["configs"]["metered"]["span_h"] == 0.0056


# --- the whole trace


@pytest.mark.slow
def test_the_whole_itp_trace() -> None:
    """Twice in processes of their own, byte-identical; the figures are those of docs/itp.md."""
    trace = TRACES / "itp2021.csv.gz"
    if not trace.exists():
        pytest.skip("the ITP trace is not part of the repository: RAY_POOLS_TRACES names its folder")
    command = [
        sys.executable,
        "-m",
        "ray_pools.cli",
        "simulate",
        str(EXAMPLES / "itp_1152" / "shares_with_borrowing.yaml"),
    ]
    runs = [
        subprocess.run([*command, str(trace), "--json"], capture_output=True, check=True, text=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    total = json.loads(runs[0])["configs"]["shares_with_borrowing"]["total"]
    assert (total["jobs"], total["done"], total["unmet_share_gpu_h"]) == (69_351, 69_351, 0)
    assert total["preemptions_suffered"] == 3_176
    assert total["utilisation"] == pytest.approx(0.8955, abs=1e-4)


@pytest.mark.slow
def test_the_page_of_the_three_configurations_is_what_its_command_writes() -> None:
    trace = TRACES / "itp2021.csv.gz"
    if not trace.exists():
        pytest.skip("the ITP trace is not part of the repository: RAY_POOLS_TRACES names its folder")
    command = [sys.executable, str(EXAMPLES / "itp_1152" / "page.py"), str(trace)]
    page = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert page == (EXAMPLES.parent / "docs" / "itp.md").read_text()


def test_the_page_says_how_much_its_trace_asks_for(tmp_path: Path) -> None:
    trace = tmp_path / "jobs.csv"
    trace.write_text("submit_s,duration_s,gpus,requester\n0,50,40,c01\n0,100,8,c02\n100,1,1,c02\n")
    command = [sys.executable, str(EXAMPLES / "itp_1152" / "page.py"), str(trace)]
    page = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert "of which they would use 28 on average if nobody waited" in page


def test_a_digest_tells_two_simulations_apart() -> None:
    one = play(TWO, OWNER_AND_GUEST, RECLAIM)
    assert digest_of(one.jobs) == digest_of(play(TWO, OWNER_AND_GUEST, RECLAIM).jobs)
    assert digest_of(one.jobs) != digest_of(play(TWO, OWNER_AND_GUEST, RECLAIM, stop_s=1.0).jobs)
