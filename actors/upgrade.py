"""Actors go on with other code from the same logs: `pools upgrade`, forth and back.

One after the other, pools first: the actor's process ends, and a new one is made in its place from the environment of
whoever calls, with the same log, name and options. That is a crash and a restart, which everything here survives:
grants are detached placement groups and stay, messages are said again, callers try again until somebody answers. Before
anything ends, the new code folds every log on the head, where the actors run: if it can't read one (an older version
meets an event that it does not know), nothing has happened.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import ray

from ray_pools import __version__, wire
from ray_pools.actors.coordinator import CoordinatorActor
from ray_pools.actors.deploy import _PREFIX, Progress, _pinned, ask, running_actors
from ray_pools.actors.pool import PoolActor
from ray_pools.errors import BadInput, PoolsError, Unreachable
from ray_pools.keys import operator_fields

_GONE_TIMEOUT_S = 30.0
_READ_TIMEOUT_S = 600.0
_COORDINATOR = wire.coordinator_actor_name()


def look(namespace: str) -> dict[str, dict[str, Any]]:
    """What runs: name -> what its ping says, pools first, the coordinator last.

    Raises:
        Unreachable: no pools run in the namespace, or one does not answer.
    """
    names = running_actors(namespace)
    if _COORDINATOR not in names:
        raise Unreachable(f"no pools run in namespace {namespace!r}")
    names.sort(key=lambda name: (name == _COORDINATOR, name))
    found = {}
    for name in names:
        found[name.removeprefix(_PREFIX)] = ask(ray.get_actor(name, namespace=namespace), {"op": "ping"})
    return found


def upgrade(namespace: str, progress: Progress = lambda text: None) -> list[dict[str, Any]]:
    """Each actor of the namespace goes on with the code of this environment. Returns what changed, per actor.

    Call inside `empty_directory`, connected to the cluster. If it fails half-way, call it again.

    Raises:
        PoolsError: this code can't read the logs (nothing has changed), or an actor did not come up with it.
        Unreachable: no pools run in the namespace, or one does not answer.
    """
    before = look(namespace)
    config = ask(ray.get_actor(_COORDINATOR, namespace=namespace), {"op": "config"})
    store = config.get("store")
    if not isinstance(store, str):
        raise PoolsError(
            "the running coordinator is too old to say where its logs are: `pools down`, then `pools up`"
        )
    progress(f"this code (version {__version__}) reads the logs at {store}")
    _can_read(store, [*before])  # an actor and its log have the same name
    _allowed(namespace)
    changed = []
    for name, was in before.items():
        changed.append(_replace(namespace, name, was, store, config["options"]))
        progress(
            f"{name}: version {was['version']} -> {changed[-1]['version']}, {changed[-1]['away_s']:.1f} s away"
        )
    return changed


def _allowed(namespace: str) -> None:
    """May this operator do so? The coordinator logs who it was; an older one has no such operation, and no keys."""
    op = {"op": "operate", "what": "upgrade", "detail": f"to version {__version__}", **operator_fields()}
    with contextlib.suppress(BadInput):
        ask(ray.get_actor(_COORDINATOR, namespace=namespace), op)


def _can_read(store: str, logs: list[str]) -> None:
    """Folds all logs with this code where the actors run."""

    def fold_all(store: str, logs: list[str]) -> str:
        from ray_pools.errors import PoolsError
        from ray_pools.log_view import folded
        from ray_pools.store import NoLog, open_reader

        for log in logs:
            try:
                reader = open_reader(store, log)
                try:
                    folded(reader, log)
                finally:
                    reader.close()
            except NoLog:
                continue
            except (PoolsError, KeyError, ValueError, TypeError) as problem:
                return f"{log}: {type(problem).__name__}: {problem}"
        return ""

    where = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}, "max_retries": 0}
    problem = _result(ray.remote(fold_all).options(**where).remote(store, logs), _READ_TIMEOUT_S)
    if problem:
        raise PoolsError(
            f"this code (version {__version__}) can't go on from the logs, nothing has changed: {problem}"
        )


def _result(reference: Any, timeout_s: float) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as problem:
        raise PoolsError(f"the code can't be run on the head: {_last_line(problem)}") from None
    except (ray.exceptions.RayError, TimeoutError) as problem:
        raise Unreachable(f"nothing can be run on the head: {_last_line(problem)}") from None


def _replace(
    namespace: str, name: str, was: Mapping[str, Any], store: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    actor = _PREFIX + name
    old = ray.get_actor(actor, namespace=namespace)
    started = time.monotonic()
    ray.kill(old, no_restart=True)
    _wait_until_gone(actor, namespace)
    if actor == _COORDINATOR:
        new = _pinned(CoordinatorActor, actor, namespace).remote(store, namespace, dict(options))
    else:
        pool = name.removeprefix("pool:")
        new = _pinned(PoolActor, actor, namespace).remote(store, namespace, pool, dict(options))
    try:
        answer = _answer(new, wire.encode_request([{"op": "ping"}]))
        now = wire.value_of(wire.decode_response(answer, 1, name)[0])
    except PoolsError as problem:
        raise PoolsError(
            f"{name} did not come up with this code: {problem}; `pools up` or the old code's"
            " `pools upgrade` brings it back from its log"
        ) from None
    if now["seq"] < was["seq"]:
        raise PoolsError(
            f"{name} came up with {now['seq']} rows, but had {was['seq']} before: is {store} its store?"
        )
    return {
        "name": name,
        "from": was["version"],
        "version": now["version"],
        "epoch": now["epoch"],
        "seq": now["seq"],
        "away_s": time.monotonic() - started,
    }


def _answer(handle: Any, request: bytes) -> bytes:
    try:
        answer: bytes = ray.get(handle.call.remote(request), timeout=60.0)
    except (ray.exceptions.RayError, TimeoutError) as problem:
        raise PoolsError(_last_line(problem)) from None
    return answer


def _wait_until_gone(actor: str, namespace: str) -> None:
    """A new actor can't have the name before."""
    ends_at = time.monotonic() + _GONE_TIMEOUT_S
    while True:
        try:
            ray.get_actor(actor, namespace=namespace)
        except ValueError:
            return
        if time.monotonic() >= ends_at:
            raise Unreachable(f"{actor} does not end within {_GONE_TIMEOUT_S:g} s")
        time.sleep(0.02)


def _last_line(problem: BaseException) -> str:
    """Ray puts the cause below the stack."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[-1][:400] if lines else type(problem).__name__
