"""The shells of coordinator and pools on an event loop of their own, without Ray: live actors for clients and commands.

All is real but the calls between processes, which are calls of `call` here, and placement groups. The store is sqlite,
so that commands that read logs find them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from click.testing import CliRunner, Result

from ray_pools import wire
from ray_pools.actors import deploy
from ray_pools.actors.coordinator import CoordinatorShell
from ray_pools.actors.peer import PeerCaller, exchange_op
from ray_pools.actors.pool import PoolShell
from ray_pools.client import Client
from ray_pools.config import load_config
from ray_pools.core.link import Message
from ray_pools.core.timings import TIMINGS

OPTIONS: dict[str, Any] = {
    "clock": "wall",
    "prewarm": False,
    "holder_watch": False,
    "resend_s": 0.01,
    **{f"{section}_{name}": value for section, values in TIMINGS.items() for name, value in values.items()},
}
SETTLE_S = 30.0


class NoGroups:
    """In the place of a pool's placer: a group is ready at once and gone at once, and no Ray is asked."""

    def __init__(self, namespace: str, pool: str, post: Callable[..., None]) -> None:
        self._post = post

    def configure(self, placement: object) -> None:
        pass

    def reconcile(self, expected: object, placed: object) -> None:
        self._post("cleared", "", 0)

    def place(self, id: str, k: int, amounts: object, options: object) -> None:
        self._post("placed", id, k, {"pg": f"{id}/{k}", "bundles": [], "strategy": "PACK"})

    def unplace(self, id: str, k: int) -> None:
        self._post("gone", id, k)

    def close(self) -> None:
        pass


class ShellPools:
    """A transport, and the actors behind it."""

    def __init__(self, store: str, namespace: str) -> None:
        self.store, self.namespace = store, namespace
        self.shells: dict[str, Any] = {}
        self._had_ray = ray.is_initialized()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shells", daemon=True)
        self._thread.start()
        self._made = [mock.patch.object(PeerCaller, "_exchange", self._exchanger())]
        self._made.append(mock.patch("ray_pools.actors.pool.Placer", NoGroups))
        for name in ("add_pools", "end_pools"):
            self._made.append(mock.patch.object(deploy, name, getattr(self, name)))
        for patch in self._made:
            patch.start()
        self._make(wire.coordinator_actor_name(), lambda: CoordinatorShell(store, namespace, dict(OPTIONS)))

    def _exchanger(self) -> Callable[..., Any]:
        async def exchange(caller: PeerCaller, message: Any) -> Any:
            shell = self.shells.get(caller.actor_name)
            if shell is None:
                raise RuntimeError(f"{caller.actor_name} is not there")
            response = await shell.call(wire.encode_request([exchange_op(caller.me, message)]))
            (result,) = wire.decode_response(response, 1, caller.actor_name)
            return Message(*wire.value_of(result))

        return exchange

    def _make(self, name: str, make: Callable[[], Any]) -> None:
        async def run() -> None:
            self.shells[name] = make()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(SETTLE_S)

    # --- what `deploy` does with Ray

    def add_pools(self, running: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        made = [name for name in names if wire.pool_actor_name(name) not in self.shells]
        for name in made:
            self._make(
                wire.pool_actor_name(name),
                lambda n=name: PoolShell(self.store, self.namespace, n, dict(OPTIONS)),
            )
        return made

    def end_pools(self, namespace: str, names: Iterable[str]) -> None:
        for name in names:
            shell = self.shells.pop(wire.pool_actor_name(name), None)
            if shell is not None:
                self._loop.call_soon_threadsafe(shell.coordinator.close)

    # --- the transport

    def holder(self) -> dict[str, str]:
        return {}

    def start(self, actor: str, method: str, data: bytes) -> Future[bytes]:
        shell = self.shells.get(actor)
        if shell is None:
            future: Future[bytes] = Future()
            future.set_result(wire.encode_failure(RuntimeError(f"there is no actor {actor}")))  # type: ignore[arg-type]
            return future
        return asyncio.run_coroutine_threadsafe(getattr(shell, method)(data), self._loop)

    def ask(self, actor: str, **op: Any) -> Any:
        """One operation at the coordinator ("") or a pool."""
        name = wire.pool_actor_name(actor) if actor else wire.coordinator_actor_name()
        (result,) = wire.decode_response(
            self.start(name, "call", wire.encode_request([op])).result(SETTLE_S), 1
        )
        return wire.value_of(result)

    def client(self) -> Client:
        return Client(self, give_up_s=5.0)

    # --- what a test does

    def up(self, config: Path) -> None:
        """The pools of a configuration."""
        wanted = load_config(config, {"RAY_POOLS_STORE": self.store})
        running = {"namespace": self.namespace}
        self.add_pools(running, wanted.pools)
        changes = [["pool", pool.to_wire(), name + "#1"] for name, pool in wanted.core_pools().items()]
        changes += [["policy", policy.to_wire()] for policy in wanted.core_policies()]
        self.ask("", op="change", changes=changes, operator="test")
        self.settle()

    def submit(self, id: str, requester: str, gpu: int, **fields: Any) -> None:
        self.ask(
            "",
            op="submit",
            id=id,
            requester=requester,
            amounts={"gpu": gpu, "step_run": 1},
            token=b"",
            **fields,
        )
        self.settle()

    def settle(self) -> None:
        """Until nobody has news, twice in a row with the same rows in each log."""
        names, before = [""], None
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            names = ["", *self.ask("", op="status")["pools"]]
            seen = {name: self.ask(name, op="quiet") for name in names}
            if before == seen and all(each["quiet"] for each in seen.values()):
                return
            before = seen
        raise AssertionError(f"they do not come to rest: {before}")

    def states(self) -> dict[str, str]:
        return {view["id"]: view["state"] for view in self.ask("", op="list")["requests"]}

    def until(self, **states: str) -> None:
        """Waits until these requests are in these states."""
        until = time.monotonic() + SETTLE_S
        while not states.items() <= (now := self.states()).items():
            assert time.monotonic() < until, f"it never happened: {now}"
            time.sleep(0.01)

    def seq(self) -> int:
        return int(self.ask("", op="status")["seq"])

    def run(self, *arguments: str, input: str | None = None) -> Result:
        """A command line, in this process, at these pools."""
        from ray_pools.cli.app import pools

        def connect(*_: Any, **__: Any) -> Client:
            return self.client()

        with (
            mock.patch("ray_pools.client.connect", connect),
            mock.patch("ray_pools.cli.connection.use_cluster", return_value=None),
            mock.patch("ray_pools.cli.connection._end_on_sigterm"),
        ):
            return CliRunner().invoke(pools, arguments, input=input, prog_name="pools")

    def stop(self) -> None:
        async def close() -> None:
            for shell in self.shells.values():
                for peer in getattr(shell, "_peers", {}).values():
                    peer.close()
                if isinstance(shell, PoolShell):
                    shell.coordinator.close()
                    shell.placer.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(SETTLE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SETTLE_S)
        self._loop.close()
        for shell in self.shells.values():
            shell.store.close()
        for patch in self._made:
            patch.stop()
        assert ray.is_initialized() == self._had_ray, "something here connected to a Ray cluster"


@contextmanager
def shell_pools(folder: Path, config: str, namespace: str = "pools") -> Iterator[ShellPools]:
    """The pools of a configuration, in a folder that has it as `pools.yaml`."""
    (folder / "pools.yaml").write_text(config)
    made = ShellPools(f"sqlite://{folder / 'store'}", namespace)
    try:
        made.up(folder / "pools.yaml")
        yield made
    finally:
        made.stop()
