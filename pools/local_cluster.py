"""An autoscaling Ray cluster on this one machine, made of the node types of a cluster.yaml.

What lives here: the cluster's life (start, find, stop). A *real* Ray head is started; when work waits, Ray's own
autoscaler brings up nodes of the fitting type through Ray's fake node provider: real Ray nodes with real
workers, whose GPUs and memory are only figures. `pools up --local`, the demo and the tests use it. What does
not: which processes belong to a cluster and how they end (local_processes.py), the node types
(local_node_types.py), the notes by which a cluster is found (local_registry.py). This module never imports
ray: it starts subprocesses and reads files.

Files. Each cluster has a short directory of its own (Ray's sockets lie in it, and their paths may have 107
bytes): `cluster.json` is its description (State), `head.log` what the start said, `autoscaling.json` what the
autoscaler reads, `ray/session_latest/logs` Ray's logs. A registry, one small file per cluster in the user's state
directory, leads any later process to it; entries of clusters that are gone are removed by whoever meets them.

A process that connects needs `driver_env()` in its environment **before it imports ray**: Ray decides about
token authentication once per process, and a cluster with it and a driver without can't talk.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from . import local_auth, local_guard, local_processes, local_provider, local_registry
from .errors import BadInput, PoolsError, Unreachable
from .local_node_types import HEAD_TYPE, NodeType, autoscaling_config, load_node_types
from .local_registry import State

HEAD_NODE_ID = "f" * 51 + "00000"
"""The id that the fake provider gives the head; the head must be started under it."""

HEAD_OBJECT_STORE_BYTES = 200_000_000
DEFAULT_HEAD_CPUS = 2
RAY_FOLDER = "ray"
"""Ray's own part of the cluster's directory. Ray opens it to every user; what is above stays the owner's."""

START_ATTEMPTS = 3
START_LOOK_S = 0.5
LOG_LINES_SHOWN = 15
_COLOURS = re.compile("\x1b\\[[0-9;]*m")

# What the head's starting process runs: `ray start` and then, in the same process (importing ray twice would
# cost another second), a look whether the autoscaler has made its first round. It may die without a word in
# `ray start`'s output, and the cluster would then never grow.
_START_CODE = """
import sys, time
from ray.scripts.scripts import cli
cli(sys.argv[2:], standalone_mode=False)
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
gcs = GcsClient(address=sys.argv[1])
while True:
    reply = GetClusterStatusReply()
    reply.ParseFromString(gcs.get_cluster_status(timeout_s=5))
    if reply.autoscaling_state.autoscaler_state_version or gcs.internal_kv_get(b"__autoscaling_status", None):
        break
    time.sleep(0.05)
"""


class LocalCluster:
    """One local cluster: made and started here, or found (`find_local_clusters`, `attach`).

    `node_types` as `load_node_types` gives them. `idle_timeout_s`: a node without work goes after it.
    `tick_s`: the autoscaler looks that often (whole seconds). `autoscaler`: "v2", or "v1" (it ignores labels).
    `auth_mode`: "disabled" or "token", by default as RAY_AUTH_MODE has it here, else disabled. The token is that of
    RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, else one of the cluster's own; a file in its directory holds it. `env` is
    added to the head's environment, in which any other RAY_* of this process is left out. `on_event` is told in
    words what happens. As a context manager it stops at the end. `ends_with_starter`: it is stopped too when this
    process dies without a word; `keep` takes that back. `node_boot_s`: nodes pretend to take so long to boot.
    """

    def __init__(
        self,
        node_types: Mapping[str, NodeType],
        *,
        idle_timeout_s: float = 30.0,
        tick_s: int = 1,
        autoscaler: str = "v2",
        max_workers: int | None = None,
        auth_mode: str | None = None,
        dashboard: bool = True,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 90.0,
        on_event: Callable[[str], None] | None = None,
        ends_with_starter: bool = False,
        node_boot_s: float = 0.0,
    ) -> None:
        _check_choice("autoscaler", autoscaler, ("v1", "v2"))
        if auth_mode is None:
            auth_mode = "token" if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" else "disabled"
        _check_choice("auth_mode", auth_mode, ("disabled", "token"))
        self._token = local_auth.token() if auth_mode == "token" else ""
        if isinstance(tick_s, bool) or not isinstance(tick_s, int) or tick_s < 1:
            raise BadInput("tick_s", tick_s, "whole seconds, at least 1")
        if not 0 < idle_timeout_s < math.inf:
            raise BadInput("idle_timeout_s", idle_timeout_s, "seconds above 0")
        if not 0 <= node_boot_s < math.inf:
            raise BadInput("node_boot_s", node_boot_s, "seconds, 0 or more")
        self.node_types = dict(node_types)
        self.idle_timeout_s, self.tick_s, self.autoscaler = idle_timeout_s, tick_s, autoscaler
        self.max_workers = max_workers if max_workers is not None else _sum_of_max(node_types)
        self.auth_mode, self.dashboard, self.env = auth_mode, dashboard, dict(env or {})
        self.start_timeout_s, self._on_event = start_timeout_s, on_event
        self.ends_with_starter, self.node_boot_s = ends_with_starter, node_boot_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._state: State | None = None

    @classmethod
    def from_cluster_yaml(
        cls, path: str | Path | None = None, *, beside: str | Path | None = None, **options: Any
    ) -> LocalCluster:
        """From the node types of `path`, by default of `find_cluster_yaml(beside)`. BadInput for a bad file."""
        return cls(load_node_types(path, beside), **options)

    @classmethod
    def attach(cls, directory: str | Path) -> LocalCluster:
        """A running cluster, by its directory; to read from and to stop. Unreachable if there is none."""
        state = State.read(Path(directory))
        if state is None:
            raise Unreachable(f"{directory} is not the directory of a local cluster")
        cluster = cls({}, autoscaler=state.autoscaler)
        cluster._state = state
        return cluster

    @property
    def address(self) -> str:
        """host:port, for `ray.init(address=...)`. Raises Unreachable before `start` and after `stop`."""
        if self._state is None or self._state.address is None:
            raise Unreachable("the local cluster is not running")
        return self._state.address

    @property
    def name(self) -> str:
        """What to call it in a message: its address, or its directory while it has none."""
        return (self._state.address if self._state is not None else None) or str(self.directory)

    @property
    def directory(self) -> Path:
        """The cluster's own directory. Raises Unreachable before `start` and after `stop`."""
        if self._state is None:
            raise Unreachable("the local cluster is not running")
        return Path(self._state.directory)

    @property
    def created_s(self) -> float:
        """When it was started, in seconds of the epoch; 0 before."""
        return self._state.created_s if self._state is not None else 0.0

    @property
    def dashboard_address(self) -> str | None:
        """http://host:port, for the dashboard and `ray job submit --address`; None without it."""
        if self._state is None or "dashboard" not in self._state.ports:
            return None
        return f"http://127.0.0.1:{self._state.ports['dashboard']}"

    def driver_env(self) -> dict[str, str]:
        """What a process that connects needs in its environment before it imports ray (this one too)."""
        address = self.address
        assert self._state is not None
        return {**self._state.driver_env, "RAY_ADDRESS": address}

    def pids(self) -> list[int]:
        """The living processes of this cluster, without this process and its ancestors."""
        if self._state is None:
            return []
        return local_processes.cluster_pids(Path(self._state.directory), self._state.session)

    def start(self) -> LocalCluster:
        """Start the head and wait until it answers and the autoscaler has made its first round.

        Raises Unreachable with the end of the log if it can't be started; nothing is left running then.
        """
        local_processes.check_platform()
        if self._state is not None:
            raise PoolsError("this local cluster was started already")
        names = [name for name in self.node_types if name != HEAD_TYPE]
        self._tell(f"starting a local Ray cluster with node types {', '.join(names)}")
        started = time.monotonic()
        for attempt in range(1, START_ATTEMPTS + 1):
            problem = self._start_once()
            if problem is None:
                self._tell(f"Ray answers at {self.address} after {time.monotonic() - started:.1f} s")
                return self
            if problem.ports_taken and attempt < START_ATTEMPTS:
                self._tell("another process took one of the ports: starting again with others")
            elif "raylet" in problem.lost and attempt == 1:
                self._tell(
                    "the raylet gave up, as it does on a machine that is too busy: starting once again"
                )
            else:
                raise Unreachable(problem.text)
        raise AssertionError("unreachable")

    def stop(self) -> list[int]:
        """End all processes of this cluster, and only those; remove its files. Which pids were ended.

        Raises PoolsError if some can't be ended; its files then stay. A second call does nothing.
        """
        if self._state is None:
            return []
        state, directory = self._state, Path(self._state.directory)
        self._tell("stopping the local cluster")
        # the last to go: should this process die meanwhile, the guard does the rest
        guard = 0 if self._guard is None else self._guard.pid
        ended = local_processes.end_processes(
            find=lambda: [pid for pid in self.pids() if pid != guard],
            still_ours=lambda pid: local_processes.belongs(pid, directory, state.session),
        )
        local_registry.forget(directory)
        self._state = None
        self._end_guard()
        self._tell(f"the local cluster is gone ({len(ended)} processes ended)")
        return ended

    def keep(self) -> None:
        """It outlives this process."""
        self.ends_with_starter = False
        self._end_guard()

    def _end_guard(self) -> None:
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None

    def __enter__(self) -> LocalCluster:
        self.ends_with_starter = True
        return self if self._state is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- the start in its parts

    def _start_once(self) -> _StartProblem | None:
        directory = local_registry.make_directory()
        ports = dict(zip(_port_names(self.dashboard), _pick_ports(3 + self.dashboard), strict=True))
        self._state = State(
            directory=str(directory),
            starter_pid=os.getpid(),
            starter_start=local_processes.process_start(os.getpid()),
            created_s=time.time(),
            autoscaler=self.autoscaler,
            ports=ports,
            driver_env=local_auth.make(self.auth_mode, self._token, directory),
            node_types=sorted(self.node_types),
        )
        problem = None
        try:
            self._state.write()
            local_registry.register(directory)
            if self.ends_with_starter:
                self._guard = local_guard.spawn(
                    str(directory), self._state.starter_pid, self._state.starter_start
                )
            problem = self._run_head(directory, ports)
        except BaseException:  # Ctrl-C too must leave nothing behind
            self.stop()
            raise
        if problem is not None:
            self.stop()
            problem.ports_taken = not all(local_processes.port_is_free(port) for port in ports.values())
        return problem

    def _run_head(self, directory: Path, ports: Mapping[str, int]) -> _StartProblem | None:
        assert self._state is not None
        (directory / "work").mkdir()  # empty: nothing in the caller's folder may shadow what Ray imports
        (directory / "lib").mkdir()
        (directory / "lib" / f"{local_provider.MODULE}.py").write_text(local_provider.CODE)
        settings = directory / "autoscaling.json"
        settings.write_text(json.dumps(self._autoscaling_config(ports["gcs"]), indent=1))
        log = directory / "head.log"
        with log.open("wb") as output:
            head = subprocess.Popen(
                self._head_command(directory, ports, settings),
                env=self._head_env(directory),
                cwd=directory / "work",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # no Ctrl-C of this terminal; and see local_processes
            )
            self._state.session = head.pid
            self._state.write()
            try:
                problem = self._wait_for_head(head)
            finally:
                if head.poll() is None:
                    head.kill()
                    head.wait()
        address = directory / RAY_FOLDER / "ray_current_cluster"
        if problem is None and address.exists():
            self._state.address = address.read_text().strip()
            self._state.write()
            return None
        problem = problem or _StartProblem("left no address")
        problem.text = f"the local Ray head did not start: it {problem.text}{_log_end(directory)}"
        return problem

    def _wait_for_head(self, head: subprocess.Popen[bytes]) -> _StartProblem | None:
        """Wait for the starting process; None if all went well, else what went wrong."""
        deadline = time.monotonic() + self.start_timeout_s
        dead: set[str] = set()
        while time.monotonic() < deadline:
            try:
                code = head.wait(START_LOOK_S)
            except subprocess.TimeoutExpired:
                before, dead = dead, local_processes.dead_children(head.pid)
                if before & dead:  # seen dead twice: nobody waits for it, and Ray would for a minute
                    lost = frozenset(before & dead)
                    return _StartProblem(f"lost its process {', '.join(sorted(lost))}", lost=lost)
            else:
                return None if code == 0 else _StartProblem(f"ended with code {code}")
        return _StartProblem(f"took longer than {self.start_timeout_s:g} s")

    def _autoscaling_config(self, gcs_port: int) -> dict[str, Any]:
        provider = {
            "type": "external",
            "module": f"{local_provider.MODULE}.LocalProvider",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            # with it, the v1 autoscaler was seen to start more nodes than allowed; v2 starts too few without
            "launch_multiple": self.autoscaler == "v2",
            "head_node_id": HEAD_NODE_ID,
            "gcs_address": f"127.0.0.1:{gcs_port}",
            "boot_s": self.node_boot_s,
        }
        return autoscaling_config(self.node_types, provider, self.max_workers, self.idle_timeout_s)

    def _head_command(self, directory: Path, ports: Mapping[str, int], settings: Path) -> list[str]:
        head = self.node_types.get(HEAD_TYPE) or NodeType({"CPU": DEFAULT_HEAD_CPUS}, {}, 0, 0)
        amounts = dict(head.resources)
        cpus, gpus = amounts.pop("CPU", DEFAULT_HEAD_CPUS), amounts.pop("GPU", 0)
        memory = amounts.pop("memory", None)
        amounts.pop("object_store_memory", None)
        command = [
            *(sys.executable, "-c", _START_CODE, f"127.0.0.1:{ports['gcs']}", "start", "--head"),
            *(
                f"--port={ports['gcs']}",
                f"--temp-dir={directory / RAY_FOLDER}",
                f"--autoscaling-config={settings}",
            ),
            *(f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--object-store-memory={HEAD_OBJECT_STORE_BYTES}"),
            *(
                f"--ray-client-server-port={ports['client']}",
                f"--dashboard-agent-listen-port={ports['agent']}",
            ),
            *("--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"),
            f"--include-dashboard={'true' if self.dashboard else 'false'}",
        ]
        if self.dashboard:
            command.append(f"--dashboard-port={ports['dashboard']}")
        if memory is not None:
            command.append(f"--memory={memory}")
        if amounts:
            command.append(f"--resources={json.dumps(amounts)}")
        return command

    def _head_env(self, directory: Path) -> dict[str, str]:
        # a RAY_* of the caller (RAY_ADDRESS, RAY_JOB_..., a system setting) is about another cluster
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        # `python` and `pools` in a submitted job are this environment's, as on the nodes of a real cluster
        env["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), env.get("PATH")]))
        env.update(
            {
                local_processes.MARKER: str(directory),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(directory / "lib"), env.get("PYTHONPATH")])),
                **local_auth.env_of(self.auth_mode, directory),
                "RAY_FAKE_CLUSTER": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
                "AUTOSCALER_UPDATE_INTERVAL_S": str(self.tick_s),
            }
        )
        if self.autoscaler == "v2":
            env.update(
                {
                    "RAY_enable_autoscaler_v2": "1",
                    "RAY_CLOUD_INSTANCE_ID": HEAD_NODE_ID,
                    "RAY_NODE_TYPE_NAME": HEAD_TYPE,
                    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_NODE_ID,
                }
            )
        env.update(self.env)
        return env

    def _tell(self, text: str) -> None:
        if self._on_event is not None:
            self._on_event(text)


def find_local_clusters() -> list[LocalCluster]:
    """This user's running local clusters, the oldest first. Entries of clusters that are gone are removed."""
    found = []
    for entry in sorted(local_registry.registry().glob("*.json")):
        try:
            directory = Path(json.loads(entry.read_text())["directory"])
        except (OSError, ValueError, KeyError, TypeError):
            entry.unlink(missing_ok=True)
            continue
        state = State.read(directory)
        if state is None:
            entry.unlink(missing_ok=True)
        elif local_processes.cluster_pids(directory, state.session):
            found.append(LocalCluster.attach(directory))
        elif local_processes.process_start(state.starter_pid) != state.starter_start:
            local_registry.forget(directory)  # neither processes nor a starter that is about to make some
    return sorted(found, key=lambda cluster: cluster.created_s)


def stop_local(which: str | Path | None = None) -> list[int]:
    """Stop the local cluster with this address or directory; without one, the only one that runs.

    Returns the ended pids. Raises Unreachable if there is none, BadInput if there are several to choose from.
    """
    clusters = find_local_clusters()
    if which is not None:
        clusters = [c for c in clusters if str(which) in (str(c.directory), c.name)]
    if not clusters:
        raise Unreachable("no local cluster is running" + (f" at {which}" if which is not None else ""))
    if len(clusters) > 1:
        places = ", ".join(cluster.name for cluster in clusters)
        raise BadInput("address", None, f"one of the local clusters that run: {places}")
    return clusters[0].stop()


@dataclass
class _StartProblem:
    text: str
    ports_taken: bool = False
    lost: frozenset[str] = frozenset()
    """Names of processes of the head that died."""


def _pick_ports(count: int) -> list[int]:
    return local_processes.free_ports(count)


def _port_names(dashboard: bool) -> Sequence[str]:
    # the others are picked by Ray itself; these have a fixed default, on which two clusters would meet
    return ("gcs", "client", "agent", "dashboard")[: 3 + dashboard]


def _log_end(directory: Path) -> str:
    """The last lines of what the start said, and of what the autoscaler died of, if it did."""
    text = ""
    for log in (directory / "head.log", directory / RAY_FOLDER / "session_latest" / "logs" / "monitor.err"):
        try:
            text_of_log = _COLOURS.sub("", log.read_text(errors="replace"))
            lines = [line for line in text_of_log.splitlines() if line.strip()]
        except OSError:
            continue
        if lines:
            text += f"\n{log.name} ends with:\n  " + "\n  ".join(lines[-LOG_LINES_SHOWN:])
    return text


def _sum_of_max(node_types: Mapping[str, NodeType]) -> int:
    return sum(kind.max_workers for name, kind in node_types.items() if name != HEAD_TYPE)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise BadInput(name, value, f"one of {', '.join(choices)}")
