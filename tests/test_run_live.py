"""`pools run` and `pools job submit` on live Ray: a command in its slot, from the queue to its end.

What they promise (docs/commands.md): the command sees its slot's GPUs and finds its slot; called back it is told, has
its grace, queues and goes on from its checkpoint, while who called runs in between; one that does not listen is gone at
the deadline with all that it started; nothing of it is left, whoever is killed; `ray job stop` gives the slot back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_live import DESK, LIMIT_S, POOLS, STUBBORN, Desk, Place, eventually, holders, line_with

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parent.parent
CONFIG = """
pools:
  main: {capacity: {gpu: 4}, grace_s: 30, placement: {labels: {ray-pools.io/node-type: gpu_ondemand}}}
  brief: {capacity: {seat: 1, gpu: 4}, grace_s: 3, placement: {labels: {ray-pools.io/node-type: gpu_ondemand}}}
  counted: {capacity: {licence: 1}, placement: none, grace_s: 3}
policies:
  - {requester: owner, pool: main, reserved: {gpu: 4}}
  - {requester: guest, pool: main}
  - {requester: boss, pool: brief, priority: 9}
  - {requester: hand, pool: brief}
  - {requester: office, pool: counted}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "pools.yaml").write_text(CONFIG)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"POOLS_STATE_DIR": str(folder / "state"), "RAY_POOLS_STORE": f"sqlite://{folder / 'store'}"}

    def pools(*arguments: str) -> str:
        command = [POOLS, *arguments]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    up = json.loads(pools("up", "pools.yaml", "--local", "--cluster", str(ROOT / "cluster.yaml"), "--json"))
    env |= up["env"]
    process = subprocess.Popen(
        [sys.executable, "-c", DESK], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Place(folder, env, up["dashboard"], Desk(process))
    finally:
        process.kill()
        process.communicate()
        pools("down", "--force", "--local")


@pytest.fixture(autouse=True)
def _nothing_left(place: Place) -> Iterator[None]:
    """Each test ends all that it started, and leaves nothing held."""
    yield
    for process in place.running:
        process.kill()
        process.communicate()
    place.running.clear()


@pytest.fixture
def lock(place: Place, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "lock"
    path.touch()
    yield path
    for pid in holders(path):
        os.kill(pid, signal.SIGKILL)


def nothing_held(place: Place) -> bool:
    return all(not any(held.values()) for held in place.desk("held").values())


def almost_done(checkpoint: Path) -> None:
    """What the command goes on from; so nobody has to wait for all of it."""
    checkpoint.write_text(json.dumps({"step": 298}))


# --- pools run


INSIDE = """
import os, sys
import ray
import ray_pools as pools
slot = pools.current_slot()
assert (slot.id, slot.pool, slot.k) == ("inside", "main", 1)
assert not slot.preempting.is_set() and slot.grace_left_s() is None
token = open(os.environ["RAY_POOLS_TOKEN_FILE"])
assert os.stat(token.fileno()).st_mode & 0o777 == 0o600

@ray.remote(num_gpus=1, num_cpus=0)
def part():
    found = pools.current_slot()
    here = found.id, found.placement_group.id.hex(), ray.get_gpu_ids()
    try:
        found.release()
    except pools.Refused as problem:
        return *here, problem.code

found = ray.get([part.options(**slot.options()).remote() for _ in range(2)])
group = os.environ["RAY_POOLS_PLACEMENT_GROUP"]
gpus = {str(gpu) for each in found for gpu in each[2]}
assert [each[:2] + each[3:] for each in found] == [("inside", group, "wrong_token")] * 2, found
assert gpus <= set(os.environ["CUDA_VISIBLE_DEVICES"].split(",")), (found, os.environ["CUDA_VISIBLE_DEVICES"])
print("inside", os.getcwd(), os.environ["NAME"], sys.stdin.read())
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.slow
def test_a_command_in_its_slot(place: Place) -> None:
    """Its GPUs and its tasks' are the slot's; output, code and folder are as if it had run here."""
    arguments = ("run", "-r", "guest", "-g", "2", "--id", "inside", "--env", "NAME=value")
    out, said = place.run(*arguments, "--", sys.executable, "-c", INSIDE, code=7)
    assert out.splitlines()[-1] == f"inside {place.folder} value "
    assert "to stderr" in said
    for line in ("pools: granted in main, attempt 1", "pools: ended with code 7"):
        assert line in said
    assert place.desk("get", "inside")["state"] == "released"


def test_preempted_it_resumes_from_its_checkpoint(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Told, saved, queued again, gone on with; who called it back had the slot in between."""
    checkpoint = place.folder / "checkpoint.json"
    arguments = ("run", "-r", "guest", "-g", "4", "--retries", "1", "--id", "trainer", "--")
    script = str(ROOT / "examples" / "resume.py")
    trainer = place.start(*arguments, "python", script, str(checkpoint), "300")
    line_with(trainer, "from step 0")
    decided_at = time.time()
    assert place.desk("hold", {"id": "owner", "requester": "owner", "gpus": 4}) == "main"
    saved = json.loads(checkpoint.read_text())
    assert 0 <= saved["step"] < 300
    assert place.desk("get", "trainer")["state"] == "queued"
    assert trainer.poll() is None
    almost_done(checkpoint)
    assert place.desk("release", "owner") == "released"
    out, said = trainer.communicate(timeout=LIMIT_S)
    assert trainer.returncode == 0, said
    assert "from step 298 " in out
    assert json.loads(checkpoint.read_text())["step"] == 300
    steps = [line for line in said.splitlines() if line.startswith("pools: ")]
    wanted = ("attempt 1", "running", "preempted: SIGTERM now", "queued again, 0 retries left", "attempt 2")
    where = [next(at for at, line in enumerate(steps) if word in line) for word in wanted]
    assert where == sorted(where), said
    with capsys.disabled():
        print(f"\nthe command was told {saved['told'][0] - decided_at:.3f} s after the submission that wins")


@pytest.mark.slow
def test_one_that_does_not_listen_is_gone_at_the_deadline(place: Place, lock: Path) -> None:
    arguments = ("run", "-r", "hand", "-g", "4", "--id", "deaf", "--")
    deaf = place.start(*arguments, sys.executable, "-c", STUBBORN, str(lock))
    line_with(deaf, "up")
    assert len(holders(lock)) == 3
    assert place.desk("hold", {"id": "boss", "requester": "boss", "gpus": 4}) == "brief"
    assert holders(lock) == []
    assert place.desk("release", "boss") == "released"
    _, said = deaf.communicate(timeout=LIMIT_S)
    assert deaf.returncode == 1
    for word in ("preempted: SIGTERM now, SIGKILL in", "time is over: SIGKILL", "ended by SIGKILL"):
        assert word in said
    assert "no retries left" in said.splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_is_passed_on_and_the_slot_given_back(place: Place, lock: Path) -> None:
    arguments = ("run", "-r", "hand", "-g", "1", "--stop-timeout", "600", "--")
    stopped = place.start(*arguments, sys.executable, "-c", STUBBORN, str(lock))
    line_with(stopped, "up")
    stopped.send_signal(signal.SIGINT)
    line_with(stopped, "SIGINT: SIGTERM to the command", "stderr")
    assert len(holders(lock)) == 3
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(LIMIT_S) == 137
    assert holders(lock) == []
    assert nothing_held(place)


@pytest.mark.slow
def test_where_a_pool_only_counts_the_command_runs_here(place: Place, lock: Path) -> None:
    """And ends with `pools run`, whatever ends that."""
    arguments = ("run", "-r", "office", "--resource", "licence=1", "--id", "here", "--lease", "2", "--")
    here = place.start(*arguments, sys.executable, "-c", STUBBORN, str(lock))
    line_with(here, "up")
    assert place.desk("get", "here")["pool"] == "counted"
    here.kill()
    eventually(lambda: not holders(lock), "it outlived `pools run`")
    assert place.desk("wait_for", ["here", "expired"])["state"] == "expired"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["pools run", "runner", "guard"])
def test_a_sigkill_leaves_nothing_of_the_command(place: Place, lock: Path, victim: str) -> None:
    arguments = (
        "run",
        "-r",
        "hand",
        "-g",
        "1",
        "--lease",
        "5",
        "--",
        sys.executable,
        "-c",
        STUBBORN,
        str(lock),
    )
    killed = place.start(*arguments)
    keeper = int(line_with(killed, "up").split()[1])
    outer = parent_of(keeper)
    os.kill({"pools run": killed.pid, "runner": parent_of(outer), "guard": keeper}[victim], signal.SIGKILL)
    eventually(lambda: not holders(lock), f"it outlived its {victim}")
    code = killed.wait(LIMIT_S)
    assert code == (-9 if victim == "pools run" else 137)
    eventually(lambda: nothing_held(place), "the slot was not given back")


@pytest.mark.slow
def test_a_killed_pools_run_makes_room_for_the_next_in_the_queue(
    place: Place, lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL of the command line itself. Ray knows of the death of its driver: the lease of 60 s is not waited for."""
    arguments = ("run", "-r", "hand", "-g", "4", "--id", "killed", "--", sys.executable, "-c", STUBBORN)
    killed = place.start(*arguments, str(lock))
    line_with(killed, "up")
    assert place.desk("ask", {"id": "next", "requester": "hand", "gpus": 4}) == "queued"
    assert len(holders(lock)) == 3
    killed_at = time.time()
    killed.kill()
    assert place.desk("wait_for", ["next", "allocated"])["pool"] == "brief"
    eventually(lambda: not holders(lock), "it outlived `pools run`")
    assert place.desk("get", "killed")["state"] == "expired"

    def rows(log: str) -> list[tuple[str, Any, float]]:
        said = json.loads(place.run("log", log, "--json")[0])
        return [(row["event"], row["request"] or row["fields"].get("ids"), row["at"]) for row in said]

    def where(log: list[tuple[str, Any, float]], *wanted: Any) -> int:
        return next(index for index, row in enumerate(log) if row[:2] == wanted)

    told, brief = rows("coordinator"), rows("brief")
    assert (
        where(told, "HolderGone", ["killed"])
        < where(told, "Asked", "killed")
        < where(told, "Finished", "killed")
    )
    granted = where(brief, "Granted", "next")
    assert where(brief, "Queued", "next") < where(brief, "Ended", "killed") < granted
    assert place.desk("release", "next") == "released"
    with capsys.disabled():
        print(f"\nthe next was granted {brief[granted][2] - killed_at:.3f} s after `pools run` was killed")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- pools job submit


def submit(place: Place, id: str, *arguments: str, requester: str = "guest") -> None:
    common = ("job", "submit", "--no-wait", "--submission-id", id, "-r", requester)
    out, _ = place.run(*common, *arguments)
    assert out == f"{id}\n"


@pytest.mark.slow
def test_a_job_that_finishes(place: Place, tmp_path: Path) -> None:
    """In its working directory, on its slot's node; the job says whose it is and where it ran."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(
        "import os, ray, ray_pools\n"
        "where = ray.remote(num_gpus=1, num_cpus=0)(lambda: __import__('part').NAME)\n"
        "slot = ray_pools.current_slot()\n"
        "print(slot.id, ray.get(where.options(**slot.options()).remote()), os.environ['NAME'])\n"
    )
    (tmp_path / "work" / "part.py").write_text("NAME = 'from the working directory'\n")
    arguments = (
        "job",
        "submit",
        "-r",
        "guest",
        "-g",
        "2",
        "--submission-id",
        "finishes",
        "--env",
        "NAME=value",
    )
    out, _ = place.run(
        *arguments,
        "--working-dir",
        str(tmp_path / "work"),
        "--metadata",
        "team=x",
        "--",
        "python",
        "train.py",
    )
    said = "finishes from the working directory value"
    assert said in out
    assert said in place.ray_job("logs", "finishes")
    assert "'ray_pools.request_id': 'finishes'" in place.ray_job("list")
    job = place.job("finishes")
    assert job["status"] == "SUCCEEDED"
    assert (
        job["metadata"].items()
        >= {
            "ray_pools.request_id": "finishes",
            "ray_pools.requester": "guest",
            "ray_pools.pool": "main",
            "ray_pools.attempt": "1",
            "team": "x",
        }.items()
    )
    assert place.desk("get", "finishes")["state"] == "released"


@pytest.mark.slow
def test_a_job_that_fails(place: Place) -> None:
    arguments = ("job", "submit", "--submission-id", "fails", "-r", "guest", "-g", "1", "--")
    out, _ = place.run(*arguments, "sh", "-c", "echo so far; exit 5", code=5)
    assert "so far" in out
    job = place.job("fails")
    assert (job["status"], job["driver_exit_code"]) == ("FAILED", 5)
    assert place.desk("get", "fails")["state"] == "released"
    place.run("job", "submit", "--submission-id", "fails", "-r", "guest", "-g", "1", "true", code=1)


@pytest.mark.slow
def test_a_job_that_is_stopped_while_it_runs_and_while_it_waits(place: Place, lock: Path) -> None:
    """`ray job stop` ends it in both states, and the slot goes back at once; all that it started goes."""
    submit(place, "runs", "-g", "4", "--", sys.executable, "-c", STUBBORN, str(lock))
    eventually(lambda: len(holders(lock)) == 3, "it does not run")
    submit(place, "waits", "-g", "4", "--", "true")
    assert place.desk("wait_for", ["runs", "allocated"])["pool"] == "main"
    eventually(lambda: place.desk("get", "waits") is not None, "it does not wait")
    assert place.job("waits")["status"] == "RUNNING"
    place.ray_job("stop", "waits")
    assert place.job_ended("waits")["status"] == "STOPPED"
    assert place.desk("wait_for", ["waits", "cancelled"])["state"] == "cancelled"
    place.ray_job("stop", "runs")
    assert place.job_ended("runs")["status"] == "STOPPED"
    eventually(lambda: not holders(lock), "it outlived its job")
    assert place.desk("wait_for", ["runs", "released"])["state"] == "released"


@pytest.mark.slow
def test_a_job_that_is_preempted_and_retried(place: Place) -> None:
    """The same job goes on from its checkpoint."""
    checkpoint = place.folder / "job-checkpoint.json"
    script = str(ROOT / "examples" / "resume.py")
    submit(place, "resumes", "-g", "4", "--retries", "1", "--", "python", script, str(checkpoint), "300")
    eventually(lambda: "from step 0" in place.ray_job("logs", "resumes"), "it does not begin")
    assert place.desk("hold", {"id": "caller", "requester": "owner", "gpus": 4}) == "main"
    almost_done(checkpoint)
    assert place.desk("release", "caller") == "released"
    job = place.job_ended("resumes")
    assert (job["status"], job["metadata"]["ray_pools.attempt"]) == ("SUCCEEDED", "2")
    assert "from step 298 " in place.ray_job("logs", "resumes")


@pytest.mark.slow
def test_a_job_whose_driver_is_killed(place: Place, lock: Path) -> None:
    submit(place, "killed", "-g", "1", "--lease", "20", "--", sys.executable, "-c", STUBBORN, str(lock))
    eventually(lambda: len(holders(lock)) == 3, "it does not run")
    os.kill(int(place.job("killed")["driver_info"]["pid"]), signal.SIGKILL)
    eventually(lambda: not holders(lock), "it outlived its job's driver")
    assert place.job_ended("killed")["status"] == "FAILED"
    eventually(lambda: nothing_held(place), "the slot was not given back")
