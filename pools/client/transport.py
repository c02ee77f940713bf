"""The only place that calls Ray: finding the cluster, an actor by name, and sending it bytes.

A call is sent again when its fate is unknown (the actor restarts, the connection is gone): every command is safe to
repeat by its id. Answers come as futures, so that no thread of ours is ever stuck inside Ray.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol

from .. import wire
from ..errors import BadInput, PoolsError, Unreachable
from ..keys import caller_name
from .authentication import check_token, one_line, refused_by_ray
from .runtime_env import check_runtime_env

GIVE_UP_S = 60.0
ATTEMPT_S = 30.0
REPLACED_WITHIN_S = 20.0
"""An actor that was there and is not is waited for so long; it was taken down if it does not come back."""
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 1.0
_PROBE_S = 3.0
# These say who is calling, for the log of those who are refused.
_REFUSALS_ARE_LOGGED = frozenset(("submit", "release", "cancel", "stopped", "renew"))


log = logging.getLogger("ray_pools")


class TryAgain(Exception):
    """The call may or may not have been carried out; the same call again may get an answer."""


class Transport(Protocol):
    """Sends bytes to an actor."""

    namespace: str

    def start(self, actor: str, method: str, data: bytes) -> Future[bytes]:
        """Sends to `call` or `wait` of a named actor.

        Raises, or fails the future with: TryAgain; Unreachable when another try is in vain.
        """
        ...

    def holder(self) -> dict[str, str]:
        """This process as its cluster knows it (`ray_pools.core.holders`); {} where that can't be said."""
        ...


class Caller:
    """Calls that are repeated until they are answered, or their time is over."""

    def __init__(self, transport: Transport, give_up_s: float = GIVE_UP_S) -> None:
        self.transport, self.give_up_s = transport, give_up_s
        self._by = {"by": caller_name()}
        self.closed = threading.Event()

    def call(
        self,
        actor: str,
        ops: Iterable[Mapping[str, Any]],
        give_up_s: float | None = None,
        attempt_s: float = ATTEMPT_S,
    ) -> list[wire.Wire]:
        """The result of each operation (`wire.value_of` reads one). It is sent again after `attempt_s` without answer.

        Raises:
            Unreachable: no such actor, or no answer within `give_up_s`.
            ProtocolMismatch, BadInput: of the call as a whole.
        """
        sent = self.signed(ops)
        data = wire.encode_request(sent)
        limit_s = self.give_up_s if give_up_s is None else give_up_s
        ends_at = time.monotonic() + limit_s
        backoff_s = _BACKOFF_FIRST_S
        while True:
            left_s = max(ends_at - time.monotonic(), 0.0)
            try:
                future = self.transport.start(actor, "call", data)
                answer = future.result(min(left_s, attempt_s))
                return wire.decode_response(answer, len(sent), shown_actor(actor))
            except (TryAgain, FutureTimeout, TimeoutError) as problem:
                why = str(problem) or "no answer yet"
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                raise Unreachable(no_answer(actor, self.transport.namespace, limit_s, why))
            if self.closed.wait(min(backoff_s, left_s)):
                raise PoolsError("the client was closed")
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    def signed(self, ops: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The operations as they are sent: those whose refusal is logged say who is calling."""
        return [{**op, **self._by} if op["op"] in _REFUSALS_ARE_LOGGED else dict(op) for op in ops]

    def value(self, actor: str, op: Mapping[str, Any], give_up_s: float | None = None) -> Any:
        """What one operation answers; raises the error if it was refused."""
        return wire.value_of(self.call(actor, [op], give_up_s)[0])


def shown_actor(actor: str) -> str:
    """An actor as a message calls it."""
    if actor == wire.coordinator_actor_name():
        return "the coordinator"
    return f"pool {actor.removeprefix(wire.pool_actor_name(''))!r}"


def no_answer(actor: str, namespace: str, limit_s: float, why: str) -> str:
    """One line for an actor that is there and does not answer."""
    return f"{shown_actor(actor)} of namespace {namespace!r} did not answer within {limit_s:g} s: {one_line(why)}"


# --- Ray


class RayTransport:
    """Sends bytes to actors of the Ray cluster that this process is connected to."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._handles: dict[str, Any] = {}
        # the Ray job, one for each connection of a driver, of which the handles are
        self._job = ""
        # actors that were there once -> since when they are not
        self._missing: dict[str, float | None] = {}
        self._lock = threading.Lock()

    def start(self, actor: str, method: str, data: bytes) -> Future[bytes]:
        import ray

        outcome: Future[bytes] = Future()
        if not ray.is_initialized():
            raise Unreachable("this process is no longer connected to a Ray cluster: connect again")
        try:
            ref = getattr(self._handle(actor), method).remote(data)
            answer = ref.future()
        except (PoolsError, TryAgain):
            raise
        except Exception as problem:  # whatever Ray raises here, a GCS that is away among it
            raise self._translated(actor, problem) from problem

        def done(ended: Future[Any]) -> None:
            problem = ended.exception()
            if outcome.cancelled():
                return
            if problem is None:
                outcome.set_result(ended.result())
            else:
                outcome.set_exception(self._translated(actor, problem))

        answer.add_done_callback(done)
        return outcome

    def holder(self) -> dict[str, str]:
        """Ray's ids of this process. Its parts are not all public: without them only the lease tells of its death."""
        try:
            import ray
            from ray._private.worker import SCRIPT_MODE, global_worker

            context = ray.get_runtime_context()
            said = {
                "cluster": global_worker.node.cluster_id.hex(),
                "job": context.get_job_id(),
                "node": context.get_node_id(),
                "worker": context.get_worker_id(),
                "actor": context.get_actor_id() or "",
                "kind": "driver" if global_worker.mode == SCRIPT_MODE else "worker",
                "pid": str(os.getpid()),
            }
        except Exception:  # noqa: BLE001 - whatever Ray has moved or is not connected to
            return {}
        return {key: value for key, value in said.items() if value}

    def _handle(self, actor: str) -> Any:
        import ray

        job = ray.get_runtime_context().get_job_id()
        with self._lock:
            if job != self._job:  # it left its cluster and came back: a handle of before finds nobody
                self._job = job
                self._handles.clear()
            handle = self._handles.get(actor)
            if handle is None:
                try:
                    handle = self._handles[actor] = ray.get_actor(actor, namespace=self.namespace)
                except ValueError:
                    if self._may_come_back(actor):
                        raise TryAgain(f"{shown_actor(actor)} is not there") from None
                    raise Unreachable(self._not_there(actor)) from None
                self._missing[actor] = None
            return handle

    def _may_come_back(self, actor: str) -> bool:
        """It was there, not long ago: `pools upgrade` puts another in its place."""
        if actor not in self._missing:
            return False
        since = self._missing[actor] or time.monotonic()
        self._missing[actor] = since
        return time.monotonic() - since < REPLACED_WITHIN_S

    def _not_there(self, actor: str) -> str:
        if actor == wire.coordinator_actor_name():
            return (
                f"no pools run in namespace {self.namespace!r} of this Ray cluster: start them with "
                "`pools up CONFIG`, or connect with their namespace"
            )
        return f"{shown_actor(actor)} does not run in namespace {self.namespace!r}: see `pools status`"

    def _translated(self, actor: str, problem: BaseException) -> Exception:
        from ray import exceptions

        if isinstance(problem, getattr(exceptions, "AuthenticationError", ())):
            return Unreachable(refused_by_ray(problem))
        if isinstance(problem, exceptions.RayTaskError):
            return PoolsError(f"an error inside {shown_actor(actor)}: {one_line(str(problem.cause))}")
        if isinstance(problem, exceptions.ActorDiedError):
            # for good, by this handle; the name may belong to another one by now
            self._handles.pop(actor, None)
        if isinstance(problem, (exceptions.RayError, OSError, TimeoutError, RuntimeError)):
            # Ray's own words are long, and nobody who waits can do anything about them
            log.debug("%s: %s: %s", shown_actor(actor), type(problem).__name__, one_line(str(problem)))
            if isinstance(problem, exceptions.RayActorError):
                return TryAgain(_why_it_is_away(problem))
            return TryAgain(f"Ray does not reach it just now ({type(problem).__name__})")
        return PoolsError(f"{shown_actor(actor)}: {type(problem).__name__}: {one_line(str(problem))}")


def _why_it_is_away(problem: Exception) -> str:
    """An actor that fails as it starts says why in the last line of what it raised; else it is on its way back."""
    lines = str(problem).strip().splitlines()
    if lines and "creation task" in lines[0]:
        return f"it can't start: {one_line(lines[-1])}"
    return "it restarts"


def connect_ray(
    address: str | None = None, quiet: bool = False, runtime_env: Mapping[str, Any] | None = None
) -> None:
    """Connects this process to a running Ray cluster, unless it is connected; never starts one.

    runtime_env: Ray's, of this driver's job.

    Raises:
        BadInput: an address that can't be right (`ray://`, "local", another than the one connected to); a runtime
            environment likewise.
        Unreachable: no cluster there.
    """
    given = _given_address(address)
    try:
        import ray
    except ImportError as problem:
        raise Unreachable(f"ray can't be imported here: {one_line(str(problem))}") from None
    if ray.is_initialized():
        _check_connected(address)
        return
    check_runtime_env(runtime_env or {})
    where = reachable_address(address)
    options: dict[str, Any] = {"logging_level": "WARNING", "log_to_driver": False} if quiet else {}
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    try:
        ray.init(address=where, **options)
    except Exception as problem:  # noqa: BLE001 - ConnectionError, RuntimeError, Ray's own: all mean the same
        if "uthentication" in f"{type(problem).__name__} {problem}":
            raise Unreachable(refused_by_ray(problem)) from None
        if runtime_env and isinstance(problem, (TypeError, ValueError)):
            expected = f"an environment that Ray can make: {one_line(str(problem))}"
            raise BadInput("runtime_env", dict(runtime_env), expected) from None
        raise Unreachable(f"no Ray cluster answers at {given!r}: {one_line(str(problem))}") from None


def reachable_address(address: str | None = None) -> str:
    """Where a cluster answers that lets this process in; found out at once, while Ray would try for long.

    Raises as `connect_ray`.
    """
    where = _resolved(_given_address(address))
    _probe(where)
    check_token(where)
    return where


def _given_address(address: str | None) -> str:
    given = address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_address("address" if address else "RAY_ADDRESS", given)
    return given


def disconnect_ray() -> None:
    """This process leaves its Ray cluster, without a word of Ray's; harmless if it is in none."""
    import ray

    # what Ray's log listener kept back as repetitions, it would print to stdout now
    with contextlib.redirect_stdout(io.StringIO()):
        ray.shutdown()


def clusters_here() -> set[str]:
    """Addresses of the Ray clusters that run on this machine; none where Ray does not tell."""
    try:
        from ray._private.services import find_gcs_addresses
    except ImportError:  # a private function of Ray that moved
        return set()
    return {str(address) for address in find_gcs_addresses()}


def _check_address(field: str, address: object) -> None:
    if not isinstance(address, str):
        raise BadInput(field, address, '"auto", or the address of a running Ray cluster: host:port')
    if address.startswith("ray://"):
        expected = (
            "host:port of the cluster's GCS: Ray Client (ray://) can't hold a slot; "
            "run this on a machine of the cluster, with `ray job submit`, or in a Ray task"
        )
        raise BadInput(field, address, expected)
    if address == "local" or "://" in address:
        expected = '"auto", or host:port of a running cluster; `pools up --local` starts one'
        raise BadInput(field, address, expected)


def _check_connected(address: str | None) -> None:
    """The process is connected: is it as itself, and to the cluster that was named?"""
    import ray
    from ray.util.client import ray as ray_client

    if ray_client.is_connected():
        _check_address("address", "ray://")
    if address is None or address == "auto":
        return
    theirs = str(ray.get_runtime_context().gcs_address)
    if address != theirs and _endpoint(address) != _endpoint(theirs):
        raise BadInput("address", address, f"{theirs}, to which this process is connected already")


def _endpoint(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, UnicodeError):
        host = socket.gethostbyname(host)
    return ("this machine" if host.startswith("127.") or host == _own_ip() else host), port


def _own_ip() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _resolved(address: str) -> str:
    """Where "auto" leads. Unreachable at once when there is no cluster on this machine."""
    if address != "auto":
        return address
    try:
        from ray._private.services import get_ray_address_from_environment

        found = get_ray_address_from_environment("auto", None)
    except ConnectionError:
        raise Unreachable(
            "no Ray cluster runs on this machine: start one with `pools up --local CONFIG`, "
            "or name one by RAY_ADDRESS=host:port"
        ) from None
    except (ImportError, TypeError):  # a private function of Ray that moved: ray.init finds it by itself
        return address
    return str(found or address)


def _probe(address: str) -> None:
    """Ray tries for 20 s and more where nobody listens; a closed port is known at once."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        if address == "auto":
            return
        raise BadInput("address", address, '"auto", or host:port of a running Ray cluster')
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
    except (OSError, OverflowError, UnicodeError) as problem:
        raise Unreachable(f"no Ray cluster answers at {address!r}: {one_line(str(problem))}") from None
