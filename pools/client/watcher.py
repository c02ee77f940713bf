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
_ATTEMPT_MIN_S = 1.0
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
        # no answer came for longer than one may take: what was forgotten meanwhile is in no answer to come
        self._broken = False

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
            if not self._client._has_live():
                # tickets are entered before ensure() sets the event
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                data = self._poll(0.0 if self._broken else POLL_S)
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
            if self._broken:
                self._look_again()
            elif not changes:
                self._look_after_followed()

    def _look_again(self) -> None:
        """The stream of changes was broken; it does not tell what was forgotten meanwhile."""
        try:
            known = [ticket.id for ticket in self._client._live() if ticket.k > 0]
            self._client._look(known, _POLL_SLACK_S)
        except PoolsError as problem:
            log.info("not looked again yet: %s", problem)
            self._pause(_BACKOFF_MAX_S)
        else:
            self._broken = False

    def _look_after_followed(self) -> None:
        """A coordinator of an older version does not tell of others' requests."""
        followed = sorted(self._client._followed())
        if followed:
            try:
                self._client._look(followed)
            except PoolsError as problem:
                log.warning("following requests of others: %s", problem)

    def _poll(self, timeout_s: float) -> bytes | None:
        """One long poll; None when closed meanwhile, or when there is more to ask for."""
        followed = self._client._followed()
        data = wire.encode_wait(self._client.client_id, self._after, timeout_s, sorted(followed))
        answer: Future[bytes] = self._client._transport.start(_COORDINATOR, "wait", data)
        answer.add_done_callback(lambda _: self._wake.set())
        ends_at = time.monotonic() + timeout_s + _POLL_SLACK_S
        while not answer.done():
            left_s = ends_at - time.monotonic()
            if self.closed or not self._client._followed() <= followed:
                return None
            if left_s <= 0:
                raise TryAgain("no answer yet")
            self._wake.wait(left_s)
            self._wake.clear()
        if not self._client._followed() <= followed:
            return None  # its sequence number would skip what they were not asked for
        self._broken |= time.monotonic() > ends_at  # this process was stopped
        return answer.result()

    def _failed_once(self, problem: Exception) -> None:
        now = time.monotonic()
        self._broken = True
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
    """Renews the leases of all live tickets in one call, several times within the shortest of them; what failed is
    tried again at once, so that only an outage as long as the lease costs it.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self.closed = False
        # when to renew next; None while nothing has a lease
        self._due_at: float | None = None

    def ensure(self, lease_s: float) -> None:
        """There are tickets whose shortest lease is this."""
        due_at = time.monotonic() + self._every_s(lease_s)
        with self._wake:
            if self._due_at is None or due_at < self._due_at:
                self._due_at = due_at
                self._wake.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ray-pools-renew", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._wake:
            self.closed = True
            self._wake.notify_all()

    def _every_s(self, lease_s: float) -> float:
        return min(lease_s / RENEWALS_PER_LEASE, self._client._renew_s)

    def _run(self) -> None:
        backoff_s = _BACKOFF_FIRST_S
        while (tickets := self._when_due()) is not None:
            if not tickets:
                continue
            every_s = self._every_s(min(ticket.lease_s for ticket in tickets))
            begun_at = time.monotonic()
            try:
                self.renew(tickets, every_s)
            except Exception as problem:  # noqa: BLE001 - tried again soon
                if self.closed:
                    return
                log.warning("leases were not renewed, trying again: %s", problem)
                next_at = time.monotonic() + min(backoff_s, every_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
            else:
                next_at, backoff_s = begun_at + every_s, _BACKOFF_FIRST_S
            with self._wake:  # a shorter lease may have come meanwhile
                due_at = self._due_at
                self._due_at = next_at if due_at is None or due_at <= begun_at else min(due_at, next_at)

    def _when_due(self) -> list[Ticket] | None:
        """Waits; then the tickets to renew, none if all have ended. None once closed."""
        with self._wake:
            while not self.closed:
                left_s = None if self._due_at is None else self._due_at - time.monotonic()
                if left_s is not None and left_s <= 0:
                    # those that are still on their way there are renewed by that; `ensure` follows
                    live = self._client._live()
                    tickets = [ticket for ticket in live if ticket.lease_s > 0 and ticket.k > 0]
                    if not tickets:
                        self._due_at = None
                    return tickets
                self._wake.wait(left_s)
            return None

    def renew(self, tickets: list[Ticket], give_up_s: float) -> None:
        """Renews these, and tells those that have ended. Unreachable when nobody answers within `give_up_s`."""
        call, holder = self._client._caller.call, self._client._transport.holder()
        attempt_s = max(_ATTEMPT_MIN_S, give_up_s / 3)
        for start in range(0, len(tickets), BATCH_MAX):
            part = tickets[start : start + BATCH_MAX]
            items = [[ticket.id, ticket._token] for ticket in part]
            op = {"op": "renew", "client": self._client.client_id, "holder": holder}
            begun_at = time.monotonic()
            try:
                results = call(_COORDINATOR, [{**op, "items": items}], give_up_s, attempt_s)
                answers = [wire.value_of(results[0])]
            except (Refused, BadInput):
                # one that is refused must not cost the others their lease
                results = call(
                    _COORDINATOR, [{**op, "items": [item]} for item in items], give_up_s, attempt_s
                )
                answers = [result["ok"] for result in results if "ok" in result]
            final = [id for answer in answers for id in answer["final"]]
            # one that is refused is another client's by now: to this one it is lost
            lost = [id for answer in answers for id in (*answer["unknown"], *answer.get("refused", ()))]
            over = {*final, *lost}
            for ticket in part:
                if ticket.id not in over:
                    ticket._renewed_at = begun_at
            self._client._renewed(final, lost)
