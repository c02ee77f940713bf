"""Pools on a local cluster for tests that connect from the test process itself, and processes beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray_pools as pools
from ray_pools.actors import deploy
from ray_pools.client import connect_ray, disconnect_ray
from ray_pools.config import load_config
from ray_pools.core import records as ev
from ray_pools.local_cluster import LocalCluster
from ray_pools.store import open_reader

CLUSTER_YAML = Path(__file__).parent.parent / "cluster.yaml"
WAIT_S = 120.0


class LivePools:
    """A cluster with pools in it, and this process connected to them."""

    def __init__(self, folder: Path, cluster: LocalCluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.store = f"sqlite://{folder / 'store'}"
        self.env = {**os.environ, **cluster.driver_env()}
        self.client: pools.Client

    def up(self, config: str, options: Mapping[str, Any]) -> None:
        file = self.folder / "pools.yaml"
        file.write_text(config)
        wanted = load_config(file, {"RAY_POOLS_STORE": self.store})
        with deploy.empty_directory():
            connect_ray(self.cluster.address, quiet=True)
            deploy.up(
                wanted.core_pools(),
                wanted.core_policies(),
                namespace=wanted.namespace,
                store=wanted.store,
                options=options,
            )
        self.client = pools.connect(self.cluster.address, wanted.namespace, quiet=True)

    def events(self, log: str) -> list[tuple[float, Any]]:
        """The core's time and the event of each row of a log."""
        reader = open_reader(self.store, log)
        try:
            return [(row.at, ev.unpack(row.body)) for row in reader.read(1)]
        finally:
            reader.close()

    def ask(self, actor: str, op: str) -> Any:
        return (
            self.client.coordinator({"op": op})
            if actor == "coordinator"
            else self.client.pool(actor, {"op": op})
        )


@contextmanager
def live_pools(
    folder: Path, config: str, options: Mapping[str, Any] | None = None, **cluster_options: Any
) -> Iterator[LivePools]:
    """Starts a cluster and the pools of `config`; stops both."""
    state_before = os.environ.get("POOLS_STATE_DIR")
    os.environ["POOLS_STATE_DIR"] = str(folder / "state")
    try:
        given = {"idle_timeout_s": 60.0, "dashboard": False, **cluster_options}
        types = given.pop("cluster_yaml", CLUSTER_YAML)
        with LocalCluster.from_cluster_yaml(types, **given) as cluster:
            live = LivePools(folder, cluster)
            try:
                live.up(config, options or {})
                yield live
            finally:
                if hasattr(live, "client"):
                    live.client.close()
                disconnect_ray()
    finally:
        os.environ.pop("POOLS_STATE_DIR")
        if state_before is not None:
            os.environ["POOLS_STATE_DIR"] = state_before


class Process:
    """A process beside the test, told what to do line by line; ended at the latest with its test."""

    def __init__(self, live: LivePools, script: str, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / script), *arguments],
            env=live.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.noise: list[str] = []
        self._too_late = threading.Timer(WAIT_S, self.popen.kill)
        self._too_late.daemon = True
        self._too_late.start()

    def line(self, starts: str = "") -> str:
        """Its next line that starts so; Ray says this and that in between."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith(starts):
                return line.strip()
            self.noise.append(line)
        raise AssertionError(f"it ended, and said {''.join(self.noise)[-3000:]}")

    def tell(self, what: str) -> None:
        """Says it, and does not wait for what comes of it."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(what + "\n")
        self.popen.stdin.flush()

    def do(self, what: str) -> None:
        """Says it, and waits until it is done."""
        self.tell(what)
        self.line("done")

    def close(self) -> None:
        self._too_late.cancel()
        self.popen.kill()
        self.popen.communicate()
