"""What live benchmarks share: a cluster (one on this machine, or the one that is named) with pools in it, bare calls
to compare with, and client processes.

On a cluster of your own (`--address auto`) run it on the head, where the logs are: the pools of a benchmark have a
namespace of their own there, and are taken down at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_pools.client import Client, connect, connect_ray, disconnect_ray
from ray_pools.local_cluster import LocalCluster

NAMESPACE_ENV = "RAY_POOLS_BENCH_NAMESPACE"
_HEAD = {"node:__internal_head__": 0.001}
_END_S = 10.0
_TOP = Path(__file__).parent.parent


class Cluster:
    """The Ray cluster of a run, this process connected to it: started, or joined, when a benchmark first needs one."""

    def __init__(self) -> None:
        self.address: str | None = None
        self._stack: contextlib.ExitStack | None = None

    def join(self) -> None:
        """Of the address that was named; else one on this machine, which ends with this process."""
        if self._stack is not None:
            return
        self._stack = stack = contextlib.ExitStack()
        address = self.address
        if address is None:
            # its own registry: no other command finds this cluster and joins it
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-pools-bench-"))
            os.environ["POOLS_STATE_DIR"] = str(Path(folder) / "state")
            local = LocalCluster.from_cluster_yaml(
                dashboard=False, idle_timeout_s=600.0, ends_with_starter=True
            )
            stack.enter_context(local)
            os.environ.update(local.driver_env())
            address = local.address
        connect_ray(address, quiet=True)
        stack.callback(disconnect_ray)
        import ray

        os.environ["RAY_ADDRESS"] = str(ray.get_runtime_context().gcs_address)

    def leave(self) -> None:
        """Stops it if it was started here. Harmless twice."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()


CLUSTER = Cluster()


class Live:
    """Pools in the cluster, and a client of them in this process."""

    def __init__(self, client: Client, store: str, namespace: str) -> None:
        self.client, self.store, self.namespace = client, store, namespace

    def process(self, module: str, *arguments: str) -> Worker:
        """`python -m MODULE` connected to the same pools."""
        return Worker(module, *arguments, env={NAMESPACE_ENV: self.namespace})

    def pid(self, pool: str = "") -> int:
        """The process of a pool's actor, or of the coordinator's."""
        said = self.client.pool(pool, {"op": "ping"}) if pool else self.client.ping()
        return int(said["pid"])


@contextlib.contextmanager
def live(config: str, store: Path | None = None) -> Iterator[Live]:
    """The pools of a configuration, up for the time of a benchmark, on the durable store of a default installation.
    store: a folder with logs to go on from, instead of an empty one.
    """
    CLUSTER.join()
    namespace = f"ray-pools-benchmark-{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-pools-bench-")))
        where = f"sqlite://{store or folder / 'store'}"
        stack.callback(_down, namespace)
        up(config, folder, where, namespace, {"prewarm": False})
        client = connect(namespace=namespace, quiet=True)
        stack.callback(client.close)
        yield Live(client, where, namespace)


def up(config: str, folder: Path, store: str, namespace: str, options: Mapping[str, Any]) -> None:
    """Brings up the pools of a configuration, with options of the coordinator besides its own."""
    from ray_pools.actors import deploy
    from ray_pools.config import load_config

    file = folder / "pools.yaml"
    file.write_text(config)
    wanted = load_config(file, {})
    with deploy.empty_directory():
        deploy.up(
            wanted.core_pools(),
            wanted.core_policies(),
            namespace=namespace,
            store=store,
            access=wanted.access(),
            options={**wanted.timing_options(), **options},
        )


def _down(namespace: str) -> None:
    from ray_pools.actors import deploy
    from ray_pools.errors import PoolsError

    with contextlib.suppress(PoolsError):  # none came up
        deploy.down(namespace, force=True)


class Bare:
    """A no-op sync actor on the head: what one call costs on this cluster at this moment."""

    def __init__(self, name: str | None = None) -> None:
        import ray

        class Nothing:
            def call(self, data: bytes) -> bytes:
                return data

            def pid(self) -> int:
                return os.getpid()

        CLUSTER.join()
        self._get, self._kill = ray.get, ray.kill
        options: dict[str, Any] = {"num_cpus": 0, "resources": _HEAD, "max_restarts": -1}
        if name is not None:
            options |= {"name": name, "namespace": name}
        self.actor: Any = ray.remote(Nothing).options(**options).remote()
        self.times(20)

    def times(self, count: int) -> list[float]:
        """Seconds of so many calls, one after the other."""
        found = []
        for _ in range(count):
            begun = time.perf_counter()
            self._get(self.actor.call.remote(b"x" * 100))
            found.append(time.perf_counter() - begun)
        return found

    def p50(self, count: int = 150) -> float:
        """The median of so many."""
        return quantile(self.times(count), 0.5)

    def pid(self) -> int:
        """Of its process."""
        return int(self._get(self.actor.pid.remote()))

    def close(self) -> None:
        """Ends it."""
        self._kill(self.actor)


class Worker:
    """A process beside the benchmark that is told by lines of JSON what to do, and answers likewise."""

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_TOP,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, what: Any) -> None:
        """One line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        """Its next line that is JSON; Ray says this and that in between."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                return json.loads(line)
        raise RuntimeError(f"a process of the benchmark ended with {self._process.wait()} and no word")

    def close(self) -> None:
        """Ends it: by the end of its input, and by force if that takes long."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def workers(made: Sequence[Worker]) -> Iterator[Sequence[Worker]]:
    """Processes, once each has said that it is ready; they end with the block."""
    try:
        for each in made:
            each.read()
        yield made
    finally:
        for each in made:
            each.close()


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process of this machine has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Memory that a process of this machine holds, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
