"""The command line and drivers on a live cluster, all from folders whose modules have the names of ours.

Faults it stands for: a user's actors.py, pools.py or actors/ that is loaded instead of ours, by a command, by a driver,
by a job or by an actor that Ray starts again; `pools up` that is not safe to repeat; a `pools down` that stops what is
in use, or leaves processes behind; other output than JSON on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ray_pools import local_processes

pytestmark = pytest.mark.ray

BIN = Path(sys.executable).parent
LIMIT_S = 120
CLUSTER_YAML = Path(__file__).parent.parent / "cluster.yaml"

CONFIG = """
namespace: hostile
store: store
pools:
  spot:
    capacity: {gpu: 4}
    placement: {labels: {ray.io/market-type: spot}}
  counted:
    capacity: {licence: 2}
    placement: none
policies:
  - {pool: spot, requester: team, reserved: {gpu: 2}}
  - {pool: counted, requester: office, limit: {licence: 2}}
prewarm: {linger_s: 0}
"""

DRIVER = """
import os, signal, sys
import ray
import ray_pools as pools

client = pools.connect(namespace="hostile")
if "--kill" in sys.argv:
    for ask in (client.coordinator, lambda op: client.pool("spot", op)):
        os.kill(ask({"op": "ping"})["pid"], signal.SIGKILL)

@ray.remote
def work():
    return ray.util.get_current_placement_group().id.hex()

with client.slot(requester="team", gpus=1, timeout_s=90) as slot:
    group = ray.get(work.options(scheduling_strategy=slot.scheduling_strategy).remote())
    inside = client.get(slot.id)
after = client.get(slot.id)
print("driver:", group == inside["placement"]["pg"], inside["state"], after["state"])
"""

EXPECTED = "driver: True allocated released"


@dataclass
class Place:
    """Where the commands run, and with what environment."""

    folder: Path
    env: dict[str, str]

    def run(self, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr + done.stdout
        return done

    def pools(self, *arguments: str, code: int = 0) -> str:
        return self.run("pools", *arguments, code=code).stdout

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.pools(*arguments, "--json", code=code))


def hostile(folder: Path, *more: str) -> Path:
    """A folder of modules that raise when they are imported."""
    (folder / "actors").mkdir(parents=True)
    for name in ("actors.py", "pools.py", "actors/__init__.py", *more):
        (folder / name).write_text(f"raise RuntimeError('the user''s own {name} was imported')\n")
    return folder


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """`pools up --local` from a hostile folder, and `pools down` at the end, whatever happened."""
    base = tmp_path_factory.mktemp("cli")
    folder = hostile(base / "operator", "msgpack.py", "click.py", "ray.py", "config.py")
    (folder / "pools.yaml").write_text(CONFIG)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"POOLS_STATE_DIR": str(base / "state"), "RAY_POOLS_NAMESPACE": "hostile"}
    place = Place(folder, env)
    up = place.json("up", "pools.yaml", "--local", "--cluster", str(CLUSTER_YAML))
    assert up["pools"] == ["counted", "spot"]
    (note,) = (base / "state" / "local").glob("*.json")
    cluster = json.loads((Path(json.loads(note.read_text())["directory"]) / "cluster.json").read_text())
    yield place
    place.pools("down", "--force", "--local")
    assert local_processes.cluster_pids(Path(cluster["directory"]), cluster["session"]) == []
    assert not Path(cluster["directory"]).exists()
    place.pools("down", "--address", up["address"], code=3)


@pytest.fixture(scope="module")
def user(operator: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A folder with a driver; it knows what `pools up` printed."""
    folder = hostile(tmp_path_factory.mktemp("user") / "work")
    (folder / "driver.py").write_text(DRIVER)
    return Place(folder, operator.env | operator.json("up", "pools.yaml")["env"])


def test_up_is_safe_to_repeat_and_applies_what_changed(operator: Place) -> None:
    assert operator.json("up", "pools.yaml")["changes"] == 0
    assert operator.json("up", "pools.yaml", "--local")["changes"] == 0
    config = operator.folder / "pools.yaml"
    config.write_text(CONFIG.replace("limit: {licence: 2}", "limit: {licence: 1}"))
    assert operator.json("up", "pools.yaml")["changes"] == 1
    config.write_text(CONFIG.replace("reserved: {gpu: 2}", "reserved: {gpu: 5}"))
    assert "reserved" in operator.run("pools", "up", "pools.yaml", code=2).stderr
    config.write_text(CONFIG + "lease: {default_s: 90}\n")
    assert operator.json("up", "pools.yaml")["changes"] == 2
    assert operator.json("up", "pools.yaml")["changes"] == 0
    config.write_text(CONFIG)
    assert operator.json("up", "pools.yaml")["changes"] == 1


def test_requests_by_hand(operator: Place) -> None:
    one = operator.json("submit", "-r", "office", "--resource", "licence=2", "--id", "one", "--wait")
    assert (one["state"], one["pool"], one["lease_s"]) == ("allocated", "counted", 0)
    again = operator.json("submit", "-r", "office", "--resource", "licence=2", "--id", "one", "--wait")
    assert again["age"] == one["age"]
    two = operator.json("submit", "-r", "office", "--resource", "licence=1", "--id", "two")
    assert two["state"] == "queued"
    waited = operator.run(
        *("pools", "submit", "-r", "office", "--resource", "licence=1", "--id", "three"),
        *("--wait", "--timeout", "0.5"),
        code=1,
    )
    assert "three" in waited.stdout
    assert "`pools cancel three`" in waited.stderr
    rejected = operator.run("pools", "submit", "-r", "nobody", "-g", "1", "--id", "four", code=1)
    assert rejected.stdout == "four rejected\n"
    assert "no_policy: requester nobody has no policy" in rejected.stderr

    status = operator.json("status")
    assert status["pools"]["counted"]["held"] == {"licence": 2}
    assert status["pools"]["counted"]["waiting"] == 2
    table = operator.pools("status")
    assert max(map(len, table.splitlines())) <= 80
    assert [view["id"] for view in operator.json("requests", "--state", "queued")] == ["three", "two"]
    listed = operator.pools("requests", "--requester", "office")
    assert "queued in counted" in listed
    assert "four" not in listed

    refused = operator.run("pools", "down", code=1)
    assert "1 in counted" in refused.stderr

    gone = operator.run("pools", "cancel", "three", "unknown", code=1)
    assert "three cancelled" in gone.stdout
    assert "unknown" in gone.stderr
    assert [view["state"] for view in operator.json("release", "one", "one")] == ["released", "released"]
    assert operator.json("release", "two")[0]["state"] in ("released", "cancelled")
    assert operator.json("status")["pools"]["counted"]["held"] == {"licence": 0}


@pytest.mark.slow
def test_a_wait_that_is_terminated_says_that_the_request_stays(operator: Place) -> None:
    operator.pools("submit", "-r", "office", "--resource", "licence=1", "--id", "blocks", "--wait")
    waiting = subprocess.Popen(
        [BIN / "pools", "submit", "-r", "office", "--resource", "licence=2", "--id", "stays", "--wait"],
        cwd=operator.folder,
        env=operator.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while "stays" not in [view["id"] for view in operator.json("requests")]:
            assert waiting.poll() is None
        waiting.terminate()
        _, said = waiting.communicate(timeout=LIMIT_S)
    finally:
        waiting.kill()
        waiting.wait()
    assert said == "pools: error: terminated: request stays waits on: `pools cancel stays` ends it\n"
    assert waiting.returncode == 143
    assert [view["state"] for view in operator.json("release", "stays", "blocks")] == [
        "cancelled",
        "released",
    ]


@pytest.mark.slow
def test_a_driver_among_hostile_modules(user: Place) -> None:
    assert EXPECTED in user.run("python", "driver.py").stdout


@pytest.mark.slow
def test_a_driver_after_both_actors_were_killed(user: Place) -> None:
    assert EXPECTED in user.run("python", "driver.py", "--kill").stdout


@pytest.mark.slow
def test_a_job_with_hostile_modules_in_its_working_directory(operator: Place, user: Place) -> None:
    dashboard = operator.json("up", "pools.yaml")["dashboard"]
    submit = ("ray", "job", "submit", "--address", dashboard, "--working-dir", ".", "--")
    place = Place(user.folder, {k: v for k, v in user.env.items() if k != "RAY_ADDRESS"})
    done = place.run(*submit, "sh", "-c", "python driver.py && pools status -n hostile --json")
    assert EXPECTED in done.stdout
    assert '"namespace": "hostile"' in done.stdout
    assert '"spot"' in done.stdout
