"""Operators lost their key: whoever can write the store takes the need for it away, past the coordinator.

The change is appended to the coordinator's log under a new epoch. A coordinator that runs is refused at its next
append, ends, and goes on from the log when Ray starts it again: so nothing needs to be taken down.
"""

from __future__ import annotations

from .core import records as ev
from .core.coordinator_state import CoordinatorState
from .errors import PoolsError, Refused
from .log_story import COORDINATOR
from .log_view import folded
from .store import open_reader, open_store


def reset_operators(address: str, by: str) -> int:
    """Operators' commands need no key from here on. Returns the configuration's version.

    Raises:
        NoLog: there is no coordinator's log.
        Refused: they need none (`no_key`).
    """
    _state(address)  # also that there is a log: opening for writing would make one
    store = open_store(address, COORDINATOR)
    try:
        store.open()
        state = _state(address)  # nobody else writes any more
        change = ev.Changed(state.version + 1, [["operators", {}]], "", by)
        store.append([(state.clock, ev.pack(change))], state.seq)
    finally:
        store.close()
    return change.version


def _state(address: str) -> CoordinatorState:
    reader = open_reader(address, COORDINATOR)
    try:
        state, _ = folded(reader, COORDINATOR)
    finally:
        reader.close()
    if not isinstance(state, CoordinatorState):
        raise PoolsError(f"the log at {address} is not a coordinator's")
    if not state.operator_key:
        raise Refused("no_key", "operators have no key here")
    return state
