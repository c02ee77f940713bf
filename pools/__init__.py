"""ray-pools: shared, preemptible GPU pools for Ray clusters. `import ray_pools as pools` is what a driver writes.

    client = pools.connect()
    with client.slot(requester="vision", gpus=2) as slot:
        ray.get(train.options(scheduling_strategy=slot.scheduling_strategy).remote())

Only the names below are public. Importing this package does not import ray: `connect` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    BadInput,
    LeaseExpired,
    NoSlot,
    PoolsError,
    ProtocolMismatch,
    Refused,
    SlotCancelled,
    SlotError,
    SlotLost,
    SlotOver,
    SlotPreempted,
    SlotRejected,
    Unreachable,
    WaitTimeout,
)
from .settings import ResourceSettings

if TYPE_CHECKING:
    from .client import Client, Slot, Submission, Ticket, View, connect, connect_async, current_slot

__version__ = "0.1.0"

__all__ = [
    "connect",
    "connect_async",
    "current_slot",
    "Client",
    "Ticket",
    "Slot",
    "Submission",
    "View",
    "ResourceSettings",
    "PoolsError",
    "BadInput",
    "Refused",
    "Unreachable",
    "ProtocolMismatch",
    "WaitTimeout",
    "NoSlot",
    "SlotError",
    "SlotPreempted",
    "SlotCancelled",
    "SlotRejected",
    "SlotLost",
    "SlotOver",
    "LeaseExpired",
    "__version__",
]

_LAZY = (
    "connect",
    "connect_async",
    "current_slot",
    "Client",
    "Ticket",
    "Slot",
    "Submission",
    "View",
)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(".client", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
