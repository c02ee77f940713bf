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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ray_pools.client import Client, connect, connect_ray, disconnect_ray
from ray_pools.local_cluster import LocalCluster

NAMESPACE = "ray-pools-benchmark"
ADDRESS: str | None = None
"""Of `--address`; None: a cluster of its own on this machine."""


class Live:
    """Pools in a cluster, and a client of them in this process."""

    def __init__(self, client: Client, store: str, env: dict[str, str]) -> None:
        self.client, self.store, self.env = client, store, env

    def process(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        """`python -m MODULE` connected to the same cluster; talks by lines."""
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(
            command,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )


@contextlib.contextmanager
def live(config: str) -> Iterator[Live]:
    """The pools of a configuration, up for the time of a benchmark, on the durable store of a default installation."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-pools-bench-")))
        address, env = ADDRESS, dict(os.environ)
        if address is None:
            # its own registry: no other command finds this cluster and joins it
            os.environ["POOLS_STATE_DIR"] = str(folder / "state")
            cluster = stack.enter_context(
                LocalCluster.from_cluster_yaml(dashboard=False, idle_timeout_s=600.0)
            )
            os.environ.update(cluster.driver_env())
            address, env = cluster.address, dict(os.environ)
        connect_ray(address, quiet=True)
        stack.callback(disconnect_ray)
        env["RAY_ADDRESS"] = _connected_to()
        store = f"sqlite://{folder / 'store'}"
        _up(config, folder, store)
        stack.callback(_down)
        client = connect(namespace=NAMESPACE, quiet=True)
        stack.callback(client.close)
        yield Live(client, store, env)


def _connected_to() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _up(config: str, folder: Path, store: str) -> None:
    from ray_pools.actors import deploy
    from ray_pools.config import load_config

    file = folder / "pools.yaml"
    file.write_text(config)
    wanted = load_config(file, {})
    with deploy.empty_directory():
        deploy.up(
            wanted.core_pools(),
            wanted.core_policies(),
            namespace=NAMESPACE,
            store=store,
            options={"prewarm": False},
        )


def _down() -> None:
    from ray_pools.actors import deploy

    deploy.down(NAMESPACE, force=True)


class Bare:
    """A no-op sync actor: what one call costs on this cluster at this moment."""

    def __init__(self) -> None:
        import ray

        class Nothing:
            def call(self, data: bytes) -> bytes:
                return data

        self._get = ray.get
        self._actor = (
            ray.remote(Nothing).options(num_cpus=0, resources={"node:__internal_head__": 0.001}).remote()
        )
        self.times(20)

    def times(self, count: int) -> list[float]:
        """Seconds of so many calls, one after the other."""
        found = []
        for _ in range(count):
            begun = time.perf_counter()
            self._get(self._actor.call.remote(b"x" * 100))
            found.append(time.perf_counter() - begun)
        return found


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def read_json(process: subprocess.Popen[str]) -> Any:
    """The next line of the process that is JSON; Ray says this and that in between."""
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            return json.loads(line)
    raise RuntimeError(f"a client process ended with {process.wait()} and no word")
