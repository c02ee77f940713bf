"""A ticket: one request in its submitter's hands, over all its attempts. What it knows is pushed to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ..errors import BadInput, Refused, SlotLost, SlotOver, WaitTimeout
from ..limits import check_seconds
from .slot import Slot
from .views import FINAL_STATES, STATES, View, error_of, is_final

if TYPE_CHECKING:
    from .client import Client


class Ticket:
    """Made by `Client.submit`; safe to use from any thread. `state`, `pool`, `k` and `view` are kept up to date by
    the coordinator's pushes, which may skip states that did not last; `status()` asks.
    """

    def __init__(
        self, client: Client, request_id: str, token: bytes, lease_s: float, followed: bool = False
    ) -> None:
        self._client = client
        # another process submitted it, renews it, and answers for its attempts
        self.followed = followed
        self.id = request_id
        self.lease_s = lease_s
        self._token = token
        self._changed = threading.Condition()
        self._view: View = {"id": request_id, "state": "queued", "pool": "", "k": 0, "changed_seq": -1}
        # the last attempt that was called back before its slot was given to anybody
        self._unseen_k = 0
        self._slot: Slot | None = None
        self._lost: SlotLost | None = None

    def __repr__(self) -> str:
        return f"<Ticket {self.id} {self.state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Ticket stays in its process: hand over its id")

    # --- what is known

    @property
    def view(self) -> View:
        """All that is known of the request."""
        return self._view

    @property
    def state(self) -> str:
        """docs/rules.md section 8."""
        return self._view["state"]

    @property
    def pool(self) -> str:
        """The pool that holds it or held it last; "" while none does."""
        return self._view["pool"]

    @property
    def k(self) -> int:
        """The attempt, counted from 1."""
        return self._view["k"]

    @property
    def done(self) -> bool:
        """In a final state."""
        return is_final(self._view)

    def status(self) -> View:
        """Asks the coordinator."""
        found = self._client.get(self.id)
        if found is None:
            raise Refused("unknown_id", f"the coordinator does not know request {self.id!r}", {"id": self.id})
        self._apply(found)
        return self._view

    def explain(self) -> dict[str, dict[str, Any]]:
        """Why it waits: per pool that it queues in, what the pool says (state, cause, position, ...). When it was
        rejected, each pool's cause.
        """
        view = self.status()
        if view["state"] == "rejected":
            return {pool: {"cause": cause} for pool, cause in view.get("causes", {}).items()}
        pools = [view["pool"]] if view["pool"] else view.get("pools", [])
        return {} if is_final(view) else self._client.explain(self.id, pools)

    # --- waiting

    def wait(self, timeout_s: float | None = None) -> Slot:
        """Returns when the slot is usable: granted, and its placement group ready.

        After a preemption with retries left, wait again: the next attempt gives another slot.

        Raises:
            SlotRejected, SlotCancelled, SlotPreempted, LeaseExpired, SlotOver: the request came to its end.
            SlotLost: the coordinator does not know it any more.
            WaitTimeout: not within `timeout_s`; the request waits on.
            Unreachable: the coordinator can't be reached.
        """
        while True:
            view = self._wait_until(
                lambda view: is_final(view) or _usable(view) or self._called_back_unseen(view),
                timeout_s,
                "a slot that is usable",
            )
            if is_final(view):
                raise error_of(view)
            if self._called_back_unseen(view):  # nobody works in it: the capacity need not wait for its grace
                self._unseen_k = view["k"]
                self._own_op("stopped", k=view["k"])
                continue
            slot = self._slot_of(view)
            if slot is not None:
                return slot

    def held(self, k: int | None = None) -> Slot:
        """The slot of the attempt that holds now, be it called back or not; of attempt `k` only, if it is given.

        For work that runs inside a slot of another process's request (`Client.follow`). Does not wait.

        Raises:
            SlotOver: no such attempt holds (any more).
        """
        view = self.status()
        if view["state"] not in ("allocated", "preempting") or k not in (None, view["k"]):
            raise SlotOver(self.id, f"attempt {view['k']} is {view['state']}")
        return self._slot_for(view)

    def wait_for(self, states: str | Collection[str], timeout_s: float | None = None) -> View:
        """Returns when it is in one of these states, or was last seen in one. Errors as of `wait`, but that a
        final state that was not waited for raises its error.
        """
        wanted = {states} if isinstance(states, str) else set(states)
        for state in wanted:
            if state not in STATES:
                raise BadInput("states", state, f"any of {', '.join(STATES)}")
        view = self._wait_until(
            lambda view: view["state"] in wanted or is_final(view), timeout_s, " or ".join(sorted(wanted))
        )
        if view["state"] not in wanted:
            raise error_of(view)
        return view

    def _wait_until(self, holds: Callable[[View], bool], timeout_s: float | None, what: str) -> View:
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        self._client._check_usable()
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not holds(self._view):
                if self._lost is not None:
                    raise self._lost
                trouble = self._client._trouble()
                if trouble is not None:
                    raise trouble
                left_s = None if ends_at is None else ends_at - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise WaitTimeout(
                        f"request {self.id!r} is {self.state} after {timeout_s:g} s, not yet {what}"
                    )
                self._changed.wait(left_s)
            return self._view

    # --- ending

    def release(self) -> View:
        """Gives back what it holds, or cancels what still waits; returns when nothing is held any more."""
        return self._end("release")

    def cancel(self) -> View:
        """Wanted no more, in any attempt to come; returns when nothing is held any more."""
        return self._end("cancel")

    def stopped(self) -> View:
        """The holder of a preempted slot has stopped its work; no effect otherwise."""
        return self._own_op("stopped", k=self.k)

    def _end(self, what: str, give_up_s: float | None = None) -> View:
        return self._view if self.done else self._own_op(what, give_up_s)

    def _own_op(self, name: str, give_up_s: float | None = None, k: int | None = None) -> View:
        op: dict[str, Any] = {"op": name, "id": self.id, "token": self._token}
        if k is not None:  # of this attempt only: it may arrive late, or twice
            op["k"] = k
        self._apply(self._client._coordinator(op, give_up_s))
        return self._view

    def _release_attempt(self, k: int) -> None:
        """Releases the request if this attempt is still the one that holds."""
        if self.k == k and not self.done:
            self._own_op("release")

    def _confirm_stopped(self, k: int) -> None:
        if self.k == k and not self.done:
            self._own_op("stopped", k=k)

    # --- what the client tells it

    def _apply(self, view: View) -> None:
        """A view came in; one that is older than what is known says nothing."""
        with self._changed:
            if view["changed_seq"] < self._view["changed_seq"]:
                return
            self._view = view
            if self._slot is not None:
                self._slot._see(view)
            self._changed.notify_all()
        if is_final(view):
            self._client._finished(self)

    def _lose(self) -> None:
        with self._changed:
            self._lost = SlotLost(self.id, "the coordinator does not know the request any more")
            if self._slot is not None:
                self._slot._lose(self._lost)
            self._changed.notify_all()
        self._client._finished(self)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _called_back_unseen(self, view: View) -> bool:
        """The attempt was granted and called back before anybody here was given its slot."""
        if self.followed:
            return False
        handed_out = self._slot.k if self._slot is not None else 0
        return view["state"] == "preempting" and view["k"] not in (handed_out, self._unseen_k)

    def _slot_of(self, view: View) -> Slot | None:
        """The slot of a usable view; the same one for the same attempt. None if it is out of date by now."""
        with self._changed:
            if self._view["k"] != view["k"] or not _usable(self._view):
                return None
            return self._slot_for(view)

    def _slot_for(self, view: View) -> Slot:
        """The slot of the attempt that this view is of, with all that is known of it since."""
        with self._changed:
            if self._slot is None or self._slot.k != view["k"]:
                self._slot = Slot(self, view)
                if self._view["changed_seq"] >= view["changed_seq"]:
                    self._slot._see(self._view)
            return self._slot


def _usable(view: View) -> bool:
    return view["state"] == "allocated" and bool(view.get("ready"))


assert set(STATES) >= FINAL_STATES
