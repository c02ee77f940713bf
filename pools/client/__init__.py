"""The client of the pools: what a driver, a task or an actor uses to get capacity and to give it back.

`client.py` connects and submits, `ticket.py` follows one request, `slot.py` is one grant of it; `watcher.py` has the
two background threads, `transport.py` all calls of Ray. None of it imports ray before it is used.
"""

from .announcing import Announcement
from .client import DEFAULT_NAMESPACE, Client, connect, connect_async
from .current import current_slot
from .explanation import Explanation
from .slot import Slot
from .submission import DEFAULT_LEASE_S, Submission
from .ticket import Ticket
from .transport import clusters_here, connect_ray, disconnect_ray
from .views import FINAL_STATES, View

__all__ = [
    "DEFAULT_LEASE_S",
    "DEFAULT_NAMESPACE",
    "FINAL_STATES",
    "Announcement",
    "Client",
    "Explanation",
    "Slot",
    "Submission",
    "Ticket",
    "View",
    "connect",
    "connect_async",
    "clusters_here",
    "connect_ray",
    "current_slot",
    "disconnect_ray",
]
