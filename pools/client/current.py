"""The slot that this process runs in: for commands of `pools run` and `pools job submit`, and for tasks and actors that
run inside a slot's placement group.

A command knows its slot by its environment, which names a file with the request's token. A task knows it by the name of
its placement group, and has no token: it hears of all that its driver hears of, but can't give the slot back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import wire
from ..errors import NoSlot, PoolsError
from .client import Client
from .slot import Slot
from .transport import RayTransport, connect_ray


@dataclass(frozen=True)
class _Place:
    """Which attempt of which request this process runs in."""

    namespace: str
    request_id: str
    k: int
    token_file: str = ""


_lock = threading.Lock()
_found: dict[tuple[int, _Place], Slot] = {}
"""By process, for a fork has to look for itself."""


def current_slot(required: bool = True) -> Slot | None:
    """The slot that this process runs in; the same object each time.

    Inside a command of `pools run` or `pools job submit` it is the command's: `options()` puts tasks and actors into
    it, `preempting`, `on_preempt`, `check()` and `grace_left_s()` say whether it is called back. Leaving is simply to
    end; `stopped()` and `release()` give the slot back at once, and the command is killed with it. Inside a task or an
    actor of a slot's placement group it is that slot, which its driver holds: the two are refused there.

    Args:
        required: raise outside of a slot; else None is returned there.

    Raises:
        NoSlot: this process runs in no slot.
        SlotOver: the slot that it ran in is over.
        Unreachable: the pools can't be reached.
    """
    with _lock:
        place = _by_environment(os.environ) or _by_placement_group()
        if place is None:
            if required:
                raise NoSlot(
                    "this process runs in no slot: current_slot() is for a command of `pools run` or"
                    " `pools job submit`, and for a task or an actor inside a slot's placement group"
                )
            return None
        key = (os.getpid(), place)
        if key not in _found:
            _found[key] = _slot_of(place)
        return _found[key]


def _by_environment(env: Mapping[str, str]) -> _Place | None:
    try:
        return _Place(
            env["RAY_POOLS_NAMESPACE"],
            env["RAY_POOLS_SLOT_ID"],
            int(env["RAY_POOLS_ATTEMPT"]),
            env.get("RAY_POOLS_TOKEN_FILE", ""),
        )
    except (KeyError, ValueError):
        return None


def _by_placement_group() -> _Place | None:
    """The attempt that a placement group was made for, by its name."""
    try:
        import ray
    except ImportError:
        return None
    if not ray.is_initialized():
        return None
    from ray.util import get_current_placement_group, placement_group_table

    group = get_current_placement_group()
    if group is None:
        return None
    name = str(placement_group_table(group).get("name", ""))
    return place_of_group(name)


def place_of_group(name: str) -> _Place | None:
    """None for a group that is no pool's."""
    found = wire.group_of(name)
    if found is None:
        return None
    namespace, _, request_id, k = found
    return _Place(namespace, request_id, k)


def _slot_of(place: _Place) -> Slot:
    connect_ray()
    client = Client(RayTransport(place.namespace))
    try:
        return client.follow(place.request_id, _token(place)).held(place.k)
    except PoolsError:
        client.close()
        raise


def _token(place: _Place) -> bytes | None:
    try:
        return bytes.fromhex(Path(place.token_file).read_text())
    except (OSError, ValueError):
        return None  # the coordinator refuses it where it is needed
