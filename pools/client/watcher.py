"""The two background threads of a client process: one hears what changed (long poll), one renews all leases.

Both are daemons, start when there is something to do, and outlast any restart of the coordinator: they try again until
the client is closed. Neither is ever stuck inside Ray, for calls are futures.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from .. import wire
from ..errors import BadInput, PoolsError, ProtocolMismatch, Refused, Unreachable
from ..limits import BATCH_MAX
from .transport import TryAgain, no_answer

if TYPE_CHECKING:
    from .client import Client
    from .ticket import Ticket

log = logging.getLogger("ray_pools")

POLL_S = 20.0
_POLL_SLACK_S = 10.0
RENEWALS_PER_LEASE = 4
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 1.0
_COORDINATOR = wire.coordinator_actor_name()


class Watcher:
    """Hears of changes and tells the client's tickets. `trouble` is why nothing is heard, once it is serious."""

    def __init__(self, client: Client, give_up_s: float) -> None:
        self._client, self._give_up_s = client, give_up_s
        self._after = 0
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.closed = False
        self.trouble: PoolsError | None = None
        self._failing_since: float | None = None

    def ensure(self) -> None:
        """There is a ticket to listen for."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ray-pools-watch", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    def _run(self) -> None:
        backoff_s = _BACKOFF_FIRST_S
        while not self.closed:
            if not self._client._live():
                # tickets are entered before ensure() sets the event
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                data = self._poll()
                if data is None:
                    continue
                self._after, changes = wire.decode_changes(data, "the coordinator")
            except ProtocolMismatch as problem:  # no other try gives another answer
                self._fail(problem)
                return
            except Exception as problem:  # noqa: BLE001 - whatever it was, the thread lives on
                self._failed_once(problem)
                self._pause(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
                continue
            backoff_s, self._failing_since, self.trouble = _BACKOFF_FIRST_S, None, None
            self._client._heard(changes)
            if not changes:
                self._look_after_followed()

    def _look_after_followed(self) -> None:
        """A coordinator of an older version does not tell of others' requests."""
        followed = sorted(self._client._followed())
        if followed:
            try:
                self._client._look(followed)
            except PoolsError as problem:
                log.warning("following requests of others: %s", problem)

    def _poll(self) -> bytes | None:
        """One long poll; None when closed meanwhile, or when there is more to ask for."""
        followed = self._client._followed()
        data = wire.encode_wait(self._client.client_id, self._after, POLL_S, sorted(followed))
        answer: Future[bytes] = self._client._transport.start(_COORDINATOR, "wait", data)
        answer.add_done_callback(lambda _: self._wake.set())
        ends_at = time.monotonic() + POLL_S + _POLL_SLACK_S
        while not answer.done():
            left_s = ends_at - time.monotonic()
            if self.closed or not self._client._followed() <= followed:
                return None
            if left_s <= 0:
                raise TryAgain("no answer yet")
            self._wake.wait(left_s)
            self._wake.clear()
        if (
            not self._client._followed() <= followed
        ):  # its sequence number would skip what they were not asked for
            return None
        return answer.result()

    def _failed_once(self, problem: Exception) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if not isinstance(problem, (TryAgain, Unreachable)):
            log.warning("waiting for changes: %s: %s", type(problem).__name__, problem)
        if now - self._failing_since >= self._give_up_s:
            why = str(problem)
            if isinstance(problem, Unreachable):
                self._fail(problem)
            else:
                self._fail(
                    Unreachable(
                        no_answer(_COORDINATOR, self._client.namespace, now - self._failing_since, why)
                    )
                )

    def _fail(self, problem: PoolsError) -> None:
        """All who wait are told; the next answer takes it back."""
        self.trouble = problem
        for ticket in self._client._live():
            ticket._wake()

    def _pause(self, pause_s: float) -> None:
        ends_at = time.monotonic() + pause_s
        while not self.closed and (left_s := ends_at - time.monotonic()) > 0:
            self._wake.wait(left_s)
            self._wake.clear()


class Renewer:
    """Renews the leases of all live tickets in one call, several times within the shortest of them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self.closed = False

    def ensure(self) -> None:
        """There is a ticket with a lease."""
        with self._wake:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ray-pools-renew", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def close(self) -> None:
        with self._wake:
            self.closed = True
            self._wake.notify_all()

    def _run(self) -> None:
        renewed_at = time.monotonic()
        while True:
            with self._wake:
                while not self.closed:
                    leases = [ticket.lease_s for ticket in self._client._live() if ticket.lease_s > 0]
                    every_s = min(leases, default=0.0) / RENEWALS_PER_LEASE
                    if not leases:
                        renewed_at = time.monotonic()
                        self._wake.wait()
                    elif (left_s := renewed_at + every_s - time.monotonic()) > 0:
                        self._wake.wait(left_s)
                    else:
                        break
                if self.closed:
                    return
            renewed_at = time.monotonic()
            try:
                self._renew([ticket for ticket in self._client._live() if ticket.lease_s > 0], every_s)
            except Exception as problem:  # noqa: BLE001 - the next round tries again
                log.warning("leases were not renewed: %s", problem)

    def _renew(self, tickets: list[Ticket], every_s: float) -> None:
        for start in range(0, len(tickets), BATCH_MAX):
            part = tickets[start : start + BATCH_MAX]
            items = [[ticket.id, ticket._token] for ticket in part]
            try:
                answers = [self._client._coordinator({"op": "renew", "items": items}, every_s)]
            except (Refused, BadInput):
                # one that is refused must not cost the others their lease
                ops = [{"op": "renew", "items": [item]} for item in items]
                results = self._client._caller.call(_COORDINATOR, ops, every_s)
                answers = [result["ok"] for result in results if "ok" in result]
            self._client._renewed(
                [each for answer in answers for each in answer["final"]],
                [each for answer in answers for each in answer["unknown"]],
            )
