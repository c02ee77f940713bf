"""Sends the wish for nodes to Ray's autoscaler: one thread, at most one call each 0.2 s, again every period.

The register at the autoscaler is one for the whole cluster and the last writer wins, so the coordinator alone has a
`Prewarmer`. The call blocks while the GCS is down, which is why it never runs on the actor's event loop. An empty
wish is sent once and not repeated: others may use the register when the pools want nothing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ray_pools.core.bundles import Bundle
from ray_pools.core.prewarm import Lingering, Wish, clamp
from ray_pools.errors import shown

log = logging.getLogger("ray_pools")

Send = Callable[[list[Bundle], list[dict[str, str]]], None]
"""send(bundles, selector of each)."""

Cut = Callable[[Sequence[Wish]], list[Wish]]
"""From wishes to what the cluster's node types can ever provide."""

SEND_EVERY_MIN_S = 0.2
_RETRY_S, _RETRY_MAX_S = 0.5, 10.0


def send_to_ray(bundles: list[Bundle], selectors: list[dict[str, str]]) -> None:
    """Replaces the cluster's whole request. Blocks while the GCS is down; does nothing without an autoscaler."""
    from ray.autoscaler.sdk import request_resources

    if bundles:
        request_resources(bundles=bundles, bundle_label_selectors=selectors)
    else:
        request_resources(bundles=[])


def autoscaler_of_ray() -> str:
    """v2, v1, none (nothing will ever come up), or unknown (no cluster, or it has not said yet)."""
    from ray._private import ray_constants
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_initialized

    if not _internal_kv_initialized():
        return "unknown"
    if is_autoscaler_v2():
        return "v2"
    status = _internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS)
    report = (json.loads(status) if status else {}).get("autoscaler_report") or {}
    node_types = report.get("active_nodes") or {}
    if not node_types:
        return "unknown"
    # without an autoscaler its monitor still reports, each node as a type of its own
    return "none" if all(name.startswith("node_") for name in node_types) else "v1"


class Prewarmer:
    """Keeps the autoscaler's register at what was wished last. Methods return at once."""

    def __init__(
        self,
        period_s: float = 10.0,
        linger_s: float = 0.0,
        send: Send = send_to_ray,
        clock: Callable[[], float] = time.monotonic,
        cut: Cut = list,
        autoscaler: Callable[[], str] = autoscaler_of_ray,
    ) -> None:
        self.period_s = period_s
        self._send_out, self._clock, self._cut, self._autoscaler_of = send, clock, cut, autoscaler
        self._lingering = Lingering(linger_s)
        self._changed = threading.Condition()
        # below: guarded by _changed
        self._wishes: list[Wish] = []
        self._is_new = True  # a predecessor's wish may still stand: the first one is sent even if it is empty
        self._cleared = False
        self._closed = False
        self._sent: list[Wish] | None = None
        self._sent_at: float | None = None
        self._error = ""
        self._autoscaler = "unknown"
        self._thread: threading.Thread | None = None

    def update(self, wishes: Sequence[Wish]) -> None:
        """What is wanted now. Cheap when nothing changed."""
        with self._changed:
            if self._closed or (wishes == self._wishes and not self._is_new and not self._cleared):
                return
            self._wishes, self._is_new, self._cleared = list(wishes), True, False
            self._wake()

    def go_by(self, period_s: float, linger_s: float) -> None:
        """Other times from here on; what lingers already does so for as long as it was to."""
        with self._changed:
            if (period_s, linger_s) == (self.period_s, self._lingering.linger_s):
                return
            self.period_s, self._lingering.linger_s = period_s, linger_s
            self._changed.notify()

    def clear(self) -> None:
        """Takes everything back, what lingers too."""
        with self._changed:
            if self._closed:
                return
            self._wishes, self._is_new, self._cleared = [], True, True
            self._wake()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread, after a last try to send what is new (so `clear` then `close` leaves nothing behind)."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def status(self) -> dict[str, Any]:
        """For `pools status`: per pool what was sent (bundles, GPUs), how long ago, and what went wrong."""
        with self._changed:
            sent = self._sent or []
            return {
                "wanted": {
                    wish.pool: {"bundles": len(wish.bundles), "gpus": wish.total("GPU")} for wish in sent
                },
                "bundles": sum(len(wish.bundles) for wish in sent),
                "gpus": sum(wish.total("GPU") for wish in sent),
                "sent_s_ago": None if self._sent_at is None else max(0.0, self._clock() - self._sent_at),
                "error": self._error,
                "autoscaler": self._autoscaler,
            }

    def sent(self) -> list[Wish]:
        """What the autoscaler was last asked for."""
        with self._changed:
            return list(self._sent or ())

    # --- the thread

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="prewarmer", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _loop(self) -> None:
        retry_s = _RETRY_S
        while True:
            with self._changed:
                while not self._is_new and not self._closed:
                    wait_s = self._wait_s()
                    if wait_s is not None and wait_s <= 0:
                        break
                    self._changed.wait(wait_s)
                if self._closed and not self._is_new:
                    return
                wishes = self._current()
                self._is_new = False
            ok = self._bring(wishes)
            with self._changed:
                if not ok and not self._closed:
                    self._is_new = True
                    self._changed.wait_for(lambda: self._closed, retry_s)
                # what changes meanwhile goes into one call
                self._changed.wait_for(lambda: self._closed, SEND_EVERY_MIN_S)
            retry_s = _RETRY_S if ok else min(retry_s * 2, _RETRY_MAX_S)

    def _wait_s(self) -> float | None:
        """Until the wish must be sent again, or one that lingers ends."""
        now = self._clock()
        times = [] if not self._sent or self._sent_at is None else [self._sent_at + self.period_s]
        end = self._lingering.next_end()
        if end is not None:
            times.append(end)
        return min(times) - now if times else None

    def _current(self) -> list[Wish]:
        now = self._clock()
        if self._cleared:
            self._lingering = Lingering(self._lingering.linger_s)
            return []
        return self._lingering.update(self._wishes, now) if self._is_new else self._lingering.wanted(now)

    def _bring(self, wishes: list[Wish]) -> bool:
        """Sends what can be had of the wishes; not under the lock, since any of these calls may block."""
        error = ""
        try:
            wanted = [wish for wish in map(clamp, self._cut(wishes)) if wish.bundles]
            if not wanted and self._sent == []:
                return True
            bundles = [bundle for wish in wanted for bundle in wish.bundles]
            self._send_out(bundles, [wish.selector for wish in wanted for _ in wish.bundles])
        except Exception as problem:  # noqa: BLE001 - whatever Ray raises: the next try may do
            error = f"{type(problem).__name__}: {shown(str(problem), 300)}"
            log.warning("prewarming: %s", error)
        with self._changed:
            self._error = error
            if not error:
                self._sent, self._sent_at = wanted, self._clock()
        if not error:
            self._look_for_autoscaler()
        return not error

    def _look_for_autoscaler(self) -> None:
        """For the status only: that it can't be told is no reason to send again."""
        try:
            found = self._autoscaler_of()
        except Exception as problem:  # noqa: BLE001 - as above
            log.info("prewarming: no word of an autoscaler: %s", shown(str(problem), 300))
            found = "unknown"
        with self._changed:
            self._autoscaler = found
