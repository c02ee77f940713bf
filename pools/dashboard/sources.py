"""Where the page's present comes from: the actors of a running cluster, or the logs alone.

A source is asked again and again, and answers with what may have changed. It asks an actor for everything only when its
log has grown, or once in a while for what is soft; and the longer an answer takes, the longer it waits before the next.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from ..client import Client
from ..errors import PoolsError
from .history import History

SHOWN = 1_000
"""Of each pool's queue, and of its grants."""

ANYWAY_EVERY_S = 5.0
"""Graces run down and pauses end without a row in the log."""

BUSY_SHARE = 0.05
"""Of its time, that an actor spends at most on answering the page."""

_ASK = {"op": "status", "queue_limit": SHOWN, "grants_limit": SHOWN}
_GIVE_UP_S = 3.0


class Source(Protocol):
    """What the feed asks. Methods block, and are called by one thread at a time."""

    live: bool

    def look(self, history: History | None) -> dict[str, Any]:
        """{"at": time, "namespace", "coordinator": {} or its status, "pools": {name: status}, "trouble": ""}."""
        ...

    def request(self, id: str) -> dict[str, Any]:
        """{"view": the request now or None, "explain": {pool: what it says}}."""
        ...


class _Asked:
    """One actor, as it last answered."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.seq = -1
        self.at = self.not_before = -ANYWAY_EVERY_S

    def is_due(self, seq: int, now: float) -> bool:
        return now >= self.not_before and (seq != self.seq or now - self.at >= ANYWAY_EVERY_S)

    def keep(self, said: dict[str, Any], asked_at: float, now: float) -> None:
        self.said, self.at, self.seq = said, now, said.get("seq", -1)
        self.not_before = now + (now - asked_at) / BUSY_SHARE


class LiveSource:
    """The actors of a namespace, through a client, as any driver asks them."""

    live = True

    def __init__(self, client: Client) -> None:
        self._client = client
        self._coordinator = _Asked()
        self._pools: dict[str, _Asked] = {}

    def look(self, history: History | None) -> dict[str, Any]:
        """As `Source`. What can't be reached is shown as it was, with the trouble."""
        trouble, at = "", None
        try:
            ping = self._client.coordinator({"op": "ping"})
            at = ping["now"]
            asked_at = time.monotonic()
            if self._coordinator.is_due(ping["seq"], asked_at):
                said = self._client.coordinator({"op": "status"})
                self._coordinator.keep(said, asked_at, time.monotonic())
            self._ask_pools()
        except PoolsError as problem:
            trouble = str(problem)
        coordinator = self._coordinator.said
        return {
            "at": at,
            "namespace": self._client.namespace,
            "coordinator": coordinator,
            "pools": {
                pool: self._pools[pool].said for pool in coordinator.get("pools", ()) if pool in self._pools
            },
            "trouble": trouble,
        }

    def _ask_pools(self) -> None:
        names = self._coordinator.said.get("pools", ())
        pings = self._client.ask_pools(names, {"op": "ping"})
        asked_at = time.monotonic()
        due = [
            pool
            for pool, ping in pings.items()
            if not self._is_away(pool, ping) and self._pools[pool].is_due(ping["seq"], asked_at)
        ]
        for pool, said in self._client.ask_pools(due, _ASK).items():
            if not self._is_away(pool, said):
                self._pools[pool].keep(said, asked_at, time.monotonic())

    def _is_away(self, pool: str, said: dict[str, Any]) -> bool:
        """It does not answer: what it said last stands, with a word that it is old."""
        asked = self._pools.setdefault(pool, _Asked())
        known = {key: value for key, value in asked.said.items() if key != "unreachable"}
        if "unreachable" not in said:
            asked.said = known
            return False
        asked.said, asked.seq = {**known, "unreachable": said["unreachable"]}, -1
        return True

    def request(self, id: str) -> dict[str, Any]:
        """As `Source`."""
        view = self._client.get(id)
        return {"view": view, "explain": self._client.explain(id) if view is not None else {}}


class LogSource:
    """The logs alone: where no cluster runs, or not here."""

    live = False

    def __init__(self) -> None:
        self._said: dict[str, tuple[int, dict[str, Any]]] = {}

    def look(self, history: History | None) -> dict[str, Any]:
        """As `Source`; the present is the last row."""
        assert history is not None
        span = history.span()
        for pool, rows in span["rows"].items():
            if self._said.get(pool, (-1, {}))[0] != rows:
                self._said[pool] = rows, history.now(pool, SHOWN)
        return {
            "at": span["to"],
            "namespace": history.store,
            "coordinator": {},
            "pools": {pool: said for pool, (_, said) in self._said.items()},
            "trouble": "",
        }

    def request(self, id: str) -> dict[str, Any]:
        """As `Source`: only actors know more than the logs."""
        return {"view": None, "explain": {}}
