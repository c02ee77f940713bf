"""The local cluster: it starts, grows by the type that is asked for, and goes without a trace.

Faults it stands for: a head that is up while its autoscaler is dead, a node of the wrong type, a request for
memory that never brings up a node, processes left behind, two clusters that end each other, a cluster that only
its starter could stop, a start that fails half-way, a port that somebody else took, a driver ended with it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_pools import local_cluster, local_processes, local_provider, local_registry
from ray_pools.errors import BadInput, Unreachable
from ray_pools.local_cluster import LocalCluster, find_local_clusters, stop_local

CLUSTER_YAML = Path(__file__).parent.parent / "cluster.yaml"
DRIVER_LIMIT_S = 60
GUARD_LIMIT_S = 60

GROW = """
import json, subprocess, time, ray
from ray.util.placement_group import placement_group, remove_placement_group
ray.init(address="{address}", log_to_driver=False)
group = placement_group(
    [{{"GPU": 4, "CPU": 1, "memory": 64 * 2**30}}], bundle_label_selector=[{{"ray.io/market-type": "spot"}}]
)
assert group.wait(40), "no node came up"
labels = [n["Labels"] for n in ray.nodes() if n["Alive"] and "ray-pools.io/node-type" in n["Labels"]]
remove_placement_group(group)
while sum(n["Alive"] for n in ray.nodes()) > 1:
    time.sleep(0.1)
@ray.remote(num_cpus=1)
def leave_a_child():
    # in a session of its own, nothing of the cluster open, deaf to SIGTERM
    subprocess.Popen(
        ["sh", "-c", "trap '' TERM; sleep 600"], start_new_session=True, cwd="/",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
ray.get(leave_a_child.remote())
print(json.dumps(labels))
"""

STAY = """
import sys, ray
ray.init(address="{address}", log_to_driver=False)
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOLS_STATE_DIR", str(tmp_path / "state"))


def make(**options: object) -> LocalCluster:
    settings: dict[str, object] = {"idle_timeout_s": 1.0, "dashboard": False, **options}
    return LocalCluster.from_cluster_yaml(CLUSTER_YAML, **settings)


def driver_env(cluster: LocalCluster) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}, **cluster.driver_env()}


def run_driver(cluster: LocalCluster, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code.format(address=cluster.address)],
        env=driver_env(cluster),
        capture_output=True,
        text=True,
        timeout=DRIVER_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def left_of(directory: Path, session: int | None) -> list[int]:
    return local_processes.cluster_pids(directory, session)


@pytest.mark.ray
def test_grows_by_the_type_asked_for_and_goes_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    # what the caller's own Ray was told must not reach this cluster
    monkeypatch.setenv("RAY_ADDRESS", "203.0.113.1:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    events: list[str] = []
    with make(on_event=events.append) as cluster:
        directory = cluster.directory
        session = json.loads((directory / "cluster.json").read_text())["session"]
        assert len(str(directory)) <= local_registry.DIRECTORY_MAX_CHARS
        assert directory.stat().st_mode & 0o077 == 0, "the description is its owner's alone"
        assert [found.address for found in find_local_clusters()] == [cluster.address]

        grown = json.loads(run_driver(cluster, GROW))

        assert [labels["ray-pools.io/node-type"] for labels in grown] == ["gpu_spot"]
        assert [labels["ray.io/node-group"] for labels in grown] == ["gpu_spot"]
        assert cluster.pids()

    assert left_of(directory, session) == []
    assert not directory.exists()
    assert find_local_clusters() == []
    assert cluster.stop() == []
    with pytest.raises(Unreachable):
        _ = cluster.address
    assert "gpu_spot" in events[0]
    assert "Ray answers at" in events[1]
    assert "is gone" in events[-1]


STARTS = """
import sys
from ray_pools.local_cluster import LocalCluster
with LocalCluster({}, dashboard=False) as cluster:
    print(cluster.directory, cluster._guard.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_private_cluster_ends_with_a_starter_that_is_killed() -> None:
    """Fault: SIGKILL of a demo, a replay or a test. Nobody else knows of its cluster."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        name, guard = starter.stdout.readline().split()
        directory = Path(name)
        session = json.loads((directory / "cluster.json").read_text())["session"]
        assert left_of(directory, session)
        watched = os.pidfd_open(int(guard))
        starter.kill()
    ready, _, _ = select.select([watched], [], [], GUARD_LIMIT_S)
    os.close(watched)
    assert ready, "the guard has not done its work"
    assert left_of(directory, session) == []
    assert not directory.exists()


@pytest.fixture
def two_clusters() -> Iterator[tuple[LocalCluster, LocalCluster]]:
    with make() as one, make() as other:
        yield one, other


@pytest.mark.slow
@pytest.mark.ray
def test_two_side_by_side_and_a_stop_from_another_process(
    two_clusters: tuple[LocalCluster, LocalCluster],
) -> None:
    one, other = two_clusters
    assert [found.address for found in find_local_clusters()] == [one.address, other.address]
    assert not set(one.pids()) & set(other.pids())
    with pytest.raises(BadInput, match=one.address):
        stop_local()
    untouched = set(other.pids())

    with subprocess.Popen(
        [sys.executable, "-c", STAY.format(address=one.address)],
        env=driver_env(one),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline().strip() == "connected"
        stopper = "from ray_pools.local_cluster import stop_local; print(len(stop_local({address!r})))"
        ended = int(run_driver(one, stopper.replace("{address!r}", repr("{address}"))))

        assert ended > 2
        assert one.pids() == []
        assert driver.poll() is None, "a driver from outside is its owner's, not the cluster's"
        driver.kill()

    assert untouched <= set(other.pids())
    assert [found.address for found in find_local_clusters()] == [other.address]
    assert json.loads(run_driver(other, "import ray; ray.init('{address}'); print(len(ray.nodes()))")) == 1
    assert stop_local(str(other.directory))


@pytest.mark.slow
@pytest.mark.ray
def test_a_port_that_was_taken_meanwhile_costs_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    with socket.socket() as taken:
        taken.bind(("", local_processes.free_ports(1)[0]))
        taken.listen(1)
        tries = iter([[taken.getsockname()[1], *local_processes.free_ports(2)]])
        monkeypatch.setattr(
            local_cluster, "_pick_ports", lambda n: next(tries, local_processes.free_ports(n))
        )

        with make(on_event=events.append) as cluster:
            assert not cluster.address.endswith(f":{taken.getsockname()[1]}")

    assert any("took one of the ports" in event for event in events)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    ("options", "provider", "problem"),
    [
        # Python itself can't start; then one whose head runs when its autoscaler dies without a word
        ({"env": {"PYTHONHOME": "nowhere"}}, "", r"it ended with code 1\nhead\.log ends with:\n"),
        ({}, "raise ImportError('no such provider')", "it lost its process python.*no such provider"),
    ],
)
def test_a_start_that_fails_shows_the_log_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], provider: str, problem: str
) -> None:
    made: list[Path] = []
    make_directory = local_registry.make_directory
    monkeypatch.setattr(local_registry, "make_directory", lambda: made.append(make_directory()) or made[-1])
    monkeypatch.setattr(local_provider, "CODE", provider)
    cluster = make(**options)

    try:
        with pytest.raises(Unreachable, match=f"(?s)did not start: {problem}"):
            cluster.start()
    finally:
        cluster.stop()

    assert [path.exists() for path in made] == [False]
    assert left_of(made[0], None) == []
    assert find_local_clusters() == []


@pytest.mark.parametrize(("lost", "starts"), [("raylet", 2), ("python", 1)])
def test_a_head_whose_raylet_gave_up_is_started_once_again(
    monkeypatch: pytest.MonkeyPatch, lost: str, starts: int
) -> None:
    """On a machine that is too busy the raylet ends by itself; whatever else ends would do so again."""
    problem = local_cluster._StartProblem(f"lost its process {lost}", lost=frozenset({lost}))
    made: list[Path] = []

    def run_head(cluster: LocalCluster, directory: Path, ports: object) -> local_cluster._StartProblem:
        made.append(directory)
        return problem

    monkeypatch.setattr(LocalCluster, "_run_head", run_head)
    said: list[str] = []

    with pytest.raises(Unreachable, match=f"lost its process {lost}"):
        make(on_event=said.append).start()

    assert len(made) == starts
    assert not any(directory.exists() for directory in made)
    assert sum("starting once again" in text for text in said) == starts - 1


def test_the_guard_outlives_a_starter_that_is_killed_while_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the guard is among the first to be ended, and nobody ends the rest."""
    cluster, found = LocalCluster({}), []

    def killed(find: Callable[[], list[int]], **_: object) -> list[int]:
        found.extend(find())
        raise SystemExit

    monkeypatch.setattr(local_processes, "end_processes", killed)
    with subprocess.Popen(["sleep", "600"]) as guard:
        try:
            cluster._state = local_registry.State(str(tmp_path), 1, "1", 0.0, "v2", address="127.0.0.1:1")
            cluster._guard = guard  # type: ignore[assignment]
            monkeypatch.setattr(LocalCluster, "pids", lambda self: [guard.pid, 7])
            with pytest.raises(SystemExit):
                cluster.stop()
            assert found == [7]
            assert guard.poll() is None
        finally:
            guard.kill()


def test_stopping_what_is_not_there_says_so() -> None:
    with pytest.raises(Unreachable, match="no local cluster is running"):
        stop_local()
    with pytest.raises(Unreachable, match=r"at 127\.0\.0\.1:1"):
        stop_local("127.0.0.1:1")


def test_an_entry_of_a_cluster_that_is_gone_is_removed(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    local_registry.State(str(gone), 2**22 + 1, "1", 0.0, "v2", address="127.0.0.1:1").write()
    local_registry.register(gone)
    local_registry.register(tmp_path / "never-was")
    (tmp_path / "state" / "local" / "broken.json").write_text("{")

    assert find_local_clusters() == []

    assert list((tmp_path / "state" / "local").iterdir()) == []
    assert not gone.exists()


def test_a_cluster_that_is_just_being_started_is_neither_found_nor_removed(tmp_path: Path) -> None:
    local_registry.State(
        str(tmp_path), os.getpid(), local_processes.process_start(os.getpid()), 0.0, "v2"
    ).write()
    local_registry.register(tmp_path)

    assert find_local_clusters() == []

    assert (tmp_path / "cluster.json").exists()
    assert len(list((tmp_path / "state" / "local").iterdir())) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("autoscaler", "v3"), ("auth_mode", "maybe"), ("tick_s", 0.5), ("idle_timeout_s", float("nan"))],
)
def test_a_bad_option_is_named(option: str, value: object) -> None:
    with pytest.raises(BadInput) as caught:
        make(**{option: value})
    assert caught.value.field == option
