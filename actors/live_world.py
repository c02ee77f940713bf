"""Scenario files on real actors: the world of `ray_pools.scenario` in a Ray cluster, with a clock that it moves.

Each world has a namespace and logs of its own. A restart is a SIGKILL of the actor's process.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray

from ray_pools import wire
from ray_pools.actors import deploy
from ray_pools.core.changes import raise_first
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.errors import BadInput, PoolsError, Refused, Unreachable

_SETTLE_TIMEOUT_S = 60.0
_PAUSE_S = 0.002
_OPTIONS = {"prewarm": False, "resend_s": 0.01}
_COORDINATOR = "coordinator"
_numbers = itertools.count(1)


class LiveWorld:
    """See the module's docstring; the verbs are those of `ray_pools.scenario.World`."""

    def __init__(self, pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig]) -> None:
        policies = list(policies)
        raise_first(pools, policies)
        self.namespace = f"ray-pools-scenario-{os.getpid()}-{next(_numbers)}"
        self.directory = tempfile.mkdtemp(prefix="ray-pools-scenario-")
        self.now = 0.0
        self.names = sorted(pools)
        self._handles: dict[str, Any] = {}
        self._clock = Path(self.directory, "now")
        self._clock.write_text(repr(self.now))
        options = {**_OPTIONS, "clock": f"manual:{self._clock}"}
        deploy.up(pools, policies, namespace=self.namespace, store=self.directory, options=options)
        self.settle()

    # --- asking

    def _actor(self, who: str) -> Any:
        if who not in self._handles:
            name = wire.coordinator_actor_name() if who == _COORDINATOR else wire.pool_actor_name(who)
            self._handles[who] = ray.get_actor(name, namespace=self.namespace)
        return self._handles[who]

    def _ask(self, who: Iterable[str], op: Mapping[str, Any]) -> dict[str, Any]:
        """The same operation at several actors at once; one that restarts is asked again."""
        found: dict[str, Any] = {}
        missing = list(who)
        until = time.monotonic() + _SETTLE_TIMEOUT_S
        while missing:
            refs = {name: self._actor(name).call.remote(wire.encode_request([op])) for name in missing}
            missing = []
            for name, ref in refs.items():
                try:
                    (result,) = wire.decode_response(ray.get(ref, timeout=_SETTLE_TIMEOUT_S), 1)
                except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                    if time.monotonic() > until:
                        raise Unreachable(f"{name} does not answer: {error}") from None
                    missing.append(name)
                    time.sleep(0.05)
                else:
                    found[name] = wire.value_of(result)
        return found

    def _coordinator(self, op: Mapping[str, Any]) -> Any:
        return self._ask([_COORDINATOR], op)[_COORDINATOR]

    # --- settling

    def settle(self) -> None:
        """Until twice in a row nobody has news and no log has grown."""
        everyone = [_COORDINATOR, *self.names]
        before: Any = None
        until = time.monotonic() + _SETTLE_TIMEOUT_S
        while True:
            said = self._ask(everyone, {"op": "quiet"})
            now = {name: (each["seq"], each["epoch"]) for name, each in said.items()}
            if all(each["quiet"] for each in said.values()) and now == before:
                return
            if time.monotonic() > until:
                raise PoolsError(f"the pools did not settle: {said}")
            before = now
            time.sleep(_PAUSE_S)

    def _set_time(self, now: float) -> list[float]:
        """Everybody's clock: leases first, then deadlines, then walks. Returns when something is due next."""
        self.now = now
        self._clock.write_text(repr(now))
        self._ask(self.names, {"op": "clock", "now": now, "hold": True})
        self._coordinator({"op": "clock", "now": now})
        self.settle()
        self._ask(self.names, {"op": "clock", "now": now})
        self.settle()
        said = self._ask([_COORDINATOR, *self.names], {"op": "clock", "now": now})
        return [each["next"] for each in said.values() if each["next"] is not None]

    # --- verbs

    def submit(
        self,
        id: str,
        requester: str,
        amounts: dict[str, int],
        preemptible: bool,
        retries: int,
        lease_s: float | None,
    ) -> None:
        """A request enters."""
        self._coordinator(
            {
                "op": "submit",
                "id": id,
                "requester": requester,
                "amounts": amounts,
                "preemptible": preemptible,
                "retries": retries,
                "lease_s": lease_s or 0.0,
            }
        )
        self.settle()

    def _command(self, op: str, id: str) -> None:
        self._coordinator({"op": op, "id": id})
        self.settle()

    def release(self, id: str) -> None:
        """Its holder is done."""
        self._command("release", id)

    def cancel(self, id: str) -> None:
        """It is not wanted any more."""
        self._command("cancel", id)

    def stopped(self, id: str) -> None:
        """The holder of a preempting grant has stopped; of an unknown one: nothing."""
        try:
            self._command("stopped", id)
        except Refused as error:
            if error.code != "unknown_id":
                raise

    def renew(self, id: str) -> None:
        """Its holder is alive."""
        if self._coordinator({"op": "renew", "items": [[id, b""]]})["unknown"]:
            raise Refused("unknown_id", f"there is no request {id!r}", {"id": id})
        self.settle()

    def advance(self, seconds: float) -> None:
        """Time passes, and stops wherever it changes something."""
        until = self.now + seconds
        due = self._set_time(self.now)
        while due and min(due) <= until:
            due = self._set_time(max(self.now, min(due)))
        self._set_time(until)

    def _change(self, *changes: list[Any]) -> None:
        self._coordinator({"op": "change", "changes": list(changes)})
        self.settle()

    def attach(self, policy: PolicyConfig) -> None:
        """The policy is in force, in place of the one before."""
        self._change(["policy", policy.to_wire()])

    def detach(self, requester: str, pool: str) -> None:
        """The requester has no policy on the pool any more."""
        self._change(["unpolicy", requester, pool])

    def set_capacity(self, pool: str, capacity: dict[str, int | None]) -> None:
        """The pool's totals change; keys that are not named stay, None takes a key out."""
        found, uid = self._pool_config(pool)
        merged = {**found["capacity"], **capacity}
        now = {key: amount for key, amount in merged.items() if amount is not None}
        self._change(["pool", {**found, "capacity": now}, uid])

    def cordon(self, pool: str, state: str) -> None:
        """The pool is cordoned, draining or open from here on."""
        found, uid = self._pool_config(pool)
        self._change(["pool", {**found, "state": state}, uid])

    def evict(self, pool: str) -> None:
        """What the draining pool has granted is called back."""
        self._coordinator({"op": "evict", "pool": pool})
        self.settle()

    def _pool_config(self, pool: str) -> tuple[dict[str, Any], str]:
        config = self._coordinator({"op": "config"})
        found = next((each for each in config["pools"] if each["name"] == pool), None)
        if found is None:
            raise Refused("unknown_pool", f"there is no pool {pool!r}", {"pool": pool})
        return found, config["uids"][pool]

    def restart(self, who: str) -> None:
        """SIGKILL: `coordinator`, a pool, or `all`; Ray starts it again, and it reads its log."""
        everyone = [_COORDINATOR, *self.names]
        killed = everyone if who == "all" else [who]
        if not set(killed) <= set(everyone):
            raise BadInput("restart", who, f"all, {', '.join(everyone)}")
        before = self._ask(killed, {"op": "ping"})
        for name in killed:
            os.kill(before[name]["pid"], signal.SIGKILL)
        until = time.monotonic() + _SETTLE_TIMEOUT_S
        while any(
            each["epoch"] == before[name]["epoch"] for name, each in self._ask(killed, {"op": "ping"}).items()
        ):
            if time.monotonic() > until:
                raise PoolsError(f"{who} did not come back")
            time.sleep(_PAUSE_S)
        self._set_time(self.now)

    # --- what is to be seen

    def _views(self) -> dict[str, dict[str, Any]]:
        listed = self._coordinator({"op": "list"})["requests"]
        return {view["id"]: view for view in reversed(listed)}

    def _statuses(self) -> dict[str, Any]:
        return self._ask(self.names, {"op": "status", "queue_limit": 10_000})

    def states(self) -> dict[str, str]:
        """Id to state, with `@pool` where it holds."""
        return {
            id: f"{view['state']}@{view['pool']}"
            if view["state"] in ("allocated", "preempting")
            else view["state"]
            for id, view in self._views().items()
        }

    def usage(self) -> dict[str, dict[str, int]]:
        """Pool to metered key to what is held."""
        return {name: status["held"] for name, status in self._statuses().items()}

    def queue(self) -> dict[str, list[str]]:
        """Pool to the ids that wait there, in order."""
        return {name: [each["id"] for each in status["queue"]] for name, status in self._statuses().items()}

    def reasons(self, id: str) -> dict[str, str]:
        """Pool to cause: of a rejected request each pool's, of a waiting one those of the pools that it waits in."""
        view = self._views()[id]
        if view["state"] != "queued":
            return dict(view["causes"])
        said = self._ask(self.names, {"op": "explain", "ids": [id]})
        return {name: each[id]["cause"] for name, each in said.items() if id in each and each[id]["cause"]}

    def amounts(self, id: str) -> dict[str, int]:
        """What the request asks for."""
        return dict(self._views()[id]["amounts"])

    def close(self) -> None:
        """The actors end, their logs go."""
        for name in [_COORDINATOR, *self.names]:
            ray.kill(self._actor(name))
        shutil.rmtree(self.directory, ignore_errors=True)


def make_world(pools: dict[str, PoolConfig], policies: list[PolicyConfig]) -> LiveWorld:
    """The factory that the scenario runner asks for, in a process that is connected to a cluster."""
    return LiveWorld(pools, policies)
