"""A coordinator and its pools without Ray and without rules: a test says what is granted, and what breaks.

It speaks the wire (`ray_pools.wire`), so a client's bytes are real; only Ray's calls are left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ray_pools import wire
from ray_pools.client import Client
from ray_pools.client.transport import TryAgain
from ray_pools.errors import BadInput, PoolsError, Refused

COORDINATOR = wire.coordinator_actor_name()
FINAL = ("released", "rejected", "cancelled", "preempted", "expired")


class FakePools:
    """Give it to a Client as its transport. `calls` has the operations that arrived, in order."""

    namespace = "fake"

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self.seq = 0
        self.views: dict[str, dict[str, Any]] = {}
        self.tokens: dict[str, bytes] = {}
        self.clients: dict[str, str] = {}
        self.calls: list[dict[str, Any]] = []
        self._waits: list[tuple[wire.Wait, Future[bytes]]] = []
        self._deferred: list[tuple[str, Future[bytes], list[Any], int]] = []
        # op name -> what happens instead of it, once: an exception to raise, or a function of the operation
        self.instead: dict[str, list[Any]] = {}
        self.down: Exception | None = None
        self.hold_ends = False
        self.waits_seen = 0

    def client(self, **options: Any) -> Client:
        return Client(self, **options)

    # --- what a test does

    def set(self, id: str, **fields: Any) -> None:
        """The request changes; its client is told."""
        with self._lock:
            self.seq += 1
            self.views[id].update(fields, changed_seq=self.seq)
            for deferred in [*self._deferred]:
                if deferred[0] == id and self.views[id]["state"] in FINAL:
                    self._deferred.remove(deferred)
                    _, future, results, index = deferred
                    results[index] = wire.ok(dict(self.views[id]))
                    future.set_result(wire.encode_response(results))
            self._tell()

    def grant(self, id: str, pool: str = "a", ready: bool = True, **more: Any) -> None:
        self.set(id, state="allocated", pool=pool, ready=ready, **more)

    def preempt(self, id: str, grace_s: float = 30.0) -> None:
        self.set(id, state="preempting", ready=False, grace_s=grace_s)

    def requeue(self, id: str) -> None:
        self.set(id, state="queued", pool="", ready=False, placement={}, k=self.views[id]["k"] + 1)

    def finish(self, id: str, state: str, **more: Any) -> None:
        self.set(id, state=state, ready=False, placement={}, **more)

    def break_waits(self) -> None:
        """The coordinator's process dies: who waits there hears that the connection is gone."""
        with self._lock:
            waits, self._waits = self._waits, []
        for _, future in waits:
            future.set_exception(TryAgain("ActorUnavailableError"))

    def until(self, holds: Callable[[], bool]) -> None:
        """Blocks until something that the client does in its own time has happened."""
        with self.changed:
            assert self.changed.wait_for(holds, 30), "it never happened"

    def ops(self, name: str) -> list[dict[str, Any]]:
        with self._lock:
            return [op for op in self.calls if op["op"] == name]

    # --- the transport

    def holder(self) -> dict[str, str]:
        return {}

    def start(self, actor: str, method: str, data: bytes) -> Future[bytes]:
        with self._lock:
            if self.down is not None:
                self.waits_seen += method == "wait"
                self.changed.notify_all()
                raise self.down
            if method == "wait":
                return self._wait(wire.decode_wait(data))
            future: Future[bytes] = Future()
            ops = wire.decode_request(data)
            results: list[Any] = []
            for index, op in enumerate(ops):
                try:
                    results.append(self._carry_out(actor, op, future, results, index))
                except PoolsError as problem:
                    results.append(wire.failed(problem))
                except TryAgain as problem:
                    future.set_exception(problem)
                    self.changed.notify_all()
                    return future
            if None not in results and not future.done():
                future.set_result(wire.encode_response(results))
            self.changed.notify_all()
            return future

    def _wait(self, wait: wire.Wait) -> Future[bytes]:
        self.waits_seen += 1
        future: Future[bytes] = Future()
        self._waits.append((wait, future))
        self._tell()
        self.changed.notify_all()
        return future

    def _tell(self) -> None:
        for wait, future in [*self._waits]:
            found = [
                dict(view)
                for id, view in self.views.items()
                if (self.clients[id] == wait.client or id in wait.ids) and view["changed_seq"] > wait.after
            ]
            if found or not wait.timeout_s:
                self._waits.remove((wait, future))
                future.set_result(
                    wire.encode_changes(self.seq, sorted(found, key=lambda v: v["changed_seq"]))
                )

    def _carry_out(
        self, actor: str, op: dict[str, Any], future: Future[bytes], results: list[Any], index: int
    ) -> Any:
        self.calls.append(op)
        planned = self.instead.get(op["op"])
        if planned:
            given = planned.pop(0)
            if isinstance(given, Exception):
                raise given
            return wire.ok(given(op))
        if actor != COORDINATOR:
            return wire.ok(
                {"explain": {id: {"cause": "waiting_capacity"} for id in op.get("ids", ())}}.get(op["op"], {})
            )
        if op["op"] in ("release", "cancel"):
            view = self._own(op)
            if view["state"] not in FINAL:
                if self.hold_ends:
                    self._deferred.append((op["id"], future, results, index))
                    return None
                held = view["state"] in ("allocated", "preempting")
                self.finish(op["id"], "released" if held and op["op"] == "release" else "cancelled")
            return wire.ok(dict(view))
        answer: Any = getattr(self, "_op_" + op["op"])(op)
        return wire.ok(answer)

    def _own(self, op: dict[str, Any]) -> dict[str, Any]:
        view = self.views.get(op["id"])
        if view is None:
            raise Refused("unknown_id", f"there is no request {op['id']!r}", {"id": op["id"]})
        if not op.get("operator") and op.get("token") != self.tokens[op["id"]]:
            raise Refused("wrong_token", "the token is another")
        return view

    # --- operations

    def _op_submit(self, op: dict[str, Any]) -> Any:
        id = op["id"]
        if id in self.views:
            return dict(self._own(op))
        self.tokens[id], self.clients[id] = op["token"], op["client"]
        self.views[id] = {
            "id": id, "requester": op["requester"], "state": "queued", "pool": "", "pools": ["a", "b"], "k": 1,
            "ready": False, "placement": {}, "amounts": op["amounts"], "retries": op["retries"], "causes": {},
            "lease_s": op["lease_s"], "grace_s": 0.0, "asked": "",
        }  # fmt: skip
        self.set(id)
        return dict(self.views[id])

    def _op_room(self, op: dict[str, Any]) -> Any:
        return {}

    def _op_stopped(self, op: dict[str, Any]) -> Any:
        view = self._own(op)
        if view["state"] == "preempting":
            self.requeue(op["id"]) if view["retries"] else self.finish(op["id"], "preempted")
        return dict(view)

    def _op_renew(self, op: dict[str, Any]) -> Any:
        final = [id for id, _ in op["items"] if self.views.get(id, {}).get("state") in FINAL]
        unknown = [id for id, _ in op["items"] if id not in self.views]
        return {"renewed": len(op["items"]) - len(final) - len(unknown), "final": final, "unknown": unknown}

    def _op_get(self, op: dict[str, Any]) -> Any:
        return [dict(self.views[id]) if id in self.views else None for id in op["ids"]]

    def _op_list(self, op: dict[str, Any]) -> Any:
        return {"requests": [dict(view) for view in self.views.values()], "total": len(self.views)}

    def _op_ping(self, op: dict[str, Any]) -> Any:
        return {"name": "coordinator", "seq": self.seq, "protocol": wire.PROTOCOL}

    def _op_status(self, op: dict[str, Any]) -> Any:
        return {"pools": ["a", "b"], "seq": self.seq}

    def _op_picture(self, op: dict[str, Any]) -> Any:
        raise BadInput("op", "picture", "one that this coordinator knows: it is of before")

    def _op_change(self, op: dict[str, Any]) -> Any:
        return {"version": 2}
