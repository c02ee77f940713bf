"""What runs in the worker's process around a function of `Client.run`: it may have the slot that it runs in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client
    from .slot import Slot

_lock = threading.Lock()
_clients: dict[str, Client] = {}
"""By namespace: a worker's process runs many tasks, one after the other."""


def call_inside(
    handed: Mapping[str, Any] | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Calls the function, with its slot as the argument `slot` if it has a parameter of that name."""
    if handed is None:
        return function(*args, **kwargs)
    slot = follow(handed)
    try:
        return function(*args, **kwargs, slot=slot)
    finally:
        slot._ticket._client._finished(slot._ticket)


def follow(handed: Mapping[str, Any]) -> Slot:
    """The slot that the driver handed over, told by push of what becomes of it. It has no token: the end of the
    function gives it back, and nothing else here.
    """
    from .client import Client
    from .transport import RayTransport

    namespace = str(handed["namespace"])
    with _lock:
        client = _clients.get(namespace)
        if client is None or client._closed:
            client = _clients[namespace] = Client(RayTransport(namespace))
    return client.follow(handed["view"]["id"])._slot_for(handed["view"])
