"""A ticket: one request in its submitter's hands, over all its attempts. What it knows is pushed to it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import BadInput, Refused, SlotLost, SlotOver, WaitTimeout
from ..limits import check_seconds
from .background import Bell
from .explanation import Explanation
from .live_status import LiveStatus
from .patience import slice_s
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
        self._listeners: set[Callable[[], None]] = set()
        self._view: View = {"id": request_id, "state": "queued", "pool": "", "k": 0, "changed_seq": -1}
        # the last attempt that was called back before its slot was given to anybody
        self._unseen_k = 0
        self._slot: Slot | None = None
        self._lost: SlotLost | None = None
        # since when its lease counts at the latest, by this process's clock
        self._renewed_at = time.monotonic()

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
        return self._take_status(self._client.get(self.id))

    def _take_status(self, found: View | None) -> View:
        if found is None:
            raise Refused("unknown_id", f"the coordinator does not know request {self.id!r}", {"id": self.id})
        self._apply(found)
        return self._view

    def explain(self, *, estimate: bool = False) -> Explanation:
        """Why it waits: per pool that it queues in, what the pool says (state, cause, position, ...); as `str` one
        sentence. When it was rejected, each pool's cause; empty in the other final states. estimate: with `estimate_s`,
        how long it will still wait as far as can be told (docs/simulation.md).
        """
        view = self.status()
        if view["state"] == "rejected":
            return Explanation(view, {pool: {"cause": why} for pool, why in view.get("causes", {}).items()})
        pools = [view["pool"]] if view["pool"] else view.get("pools", [])
        said = {} if is_final(view) else self._client.explain(self.id, pools, estimate=estimate)
        return Explanation(view, said)

    # --- waiting

    def wait(self, timeout_s: float | None = None, *, progress: bool = False) -> Slot:
        """Returns when the slot is usable: granted, and its placement group ready.

        After a preemption with retries left, wait again: the next attempt gives another slot. progress: with a
        line on stderr meanwhile that says why it waits, if that is a terminal.

        Raises:
            SlotRejected, SlotCancelled, SlotPreempted, LeaseExpired, SlotOver: the request came to its end.
            SlotLost: the coordinator does not know it any more.
            WaitTimeout: not within `timeout_s`; the request waits on.
            Unreachable: the coordinator can't be reached.
        """
        with LiveStatus(self, progress):
            return self._wait(timeout_s)

    def _wait(self, timeout_s: float | None) -> Slot:
        while True:
            view = self._wait_until(self._decided, timeout_s, "a slot that is usable")
            if self._called_back_unseen(view):  # nobody works in it: the capacity need not wait for its grace
                self._unseen_k = view["k"]
                self._own_op("stopped", k=view["k"])
            elif (slot := self._slot_of(view)) is not None:
                return slot

    async def wait_async(self, timeout_s: float | None = None, *, progress: bool = False) -> Slot:
        """As `wait`; no thread waits. Cancelled, it leaves the request as it is, as `wait` does when interrupted."""
        with LiveStatus(self, progress):
            return await self._wait_async(timeout_s)

    async def _wait_async(self, timeout_s: float | None) -> Slot:
        while True:
            view = await self._wait_until_async(self._decided, timeout_s, "a slot that is usable")
            if self._called_back_unseen(view):
                self._unseen_k = view["k"]
                await self._own_op_async("stopped", k=view["k"])
            elif (slot := self._slot_of(view)) is not None:
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
        holds, what = _in_states(states)
        view = self._wait_until(holds, timeout_s, what)
        return _unless_over(view, states)

    async def wait_for_async(self, states: str | Collection[str], timeout_s: float | None = None) -> View:
        """As `wait_for`; no thread waits."""
        holds, what = _in_states(states)
        view = await self._wait_until_async(holds, timeout_s, what)
        return _unless_over(view, states)

    def _decided(self, view: View) -> bool:
        """There is something to do: a slot to hand out, or one to give back. Raises what ended the request."""
        if is_final(view):
            raise error_of(view)
        return _usable(view) or self._called_back_unseen(view)

    def _wait_until(self, holds: Callable[[View], bool], timeout_s: float | None, what: str) -> View:
        ends_at = self._wait_ends_at(timeout_s)
        with self._changed:
            while not self._look(holds):
                self._changed.wait(slice_s(self._wait_left_s(ends_at, timeout_s, what)))
            return self._view

    async def _wait_until_async(
        self, holds: Callable[[View], bool], timeout_s: float | None, what: str
    ) -> View:
        ends_at = self._wait_ends_at(timeout_s)
        while True:
            bell = Bell()
            with self._changed:
                if self._look(holds):
                    return self._view
                left_s = self._wait_left_s(ends_at, timeout_s, what)
                self._listeners.add(bell.ring)
            try:
                await bell.heard(left_s)
            finally:
                with self._changed:
                    self._listeners.discard(bell.ring)

    def _look(self, holds: Callable[[View], bool]) -> bool:
        """Does it hold? Raises why it never will."""
        if holds(self._view):
            return True
        trouble = self._lost or self._client._trouble()
        if trouble is not None:
            raise trouble
        return False

    def _wait_ends_at(self, timeout_s: float | None) -> float | None:
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        self._client._check_usable()
        return None if timeout_s is None else time.monotonic() + timeout_s

    def _wait_left_s(self, ends_at: float | None, timeout_s: float | None, what: str) -> float | None:
        left_s = None if ends_at is None else ends_at - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise WaitTimeout(f"request {self.id!r} is {self.state} after {timeout_s:g} s, not yet {what}")
        return left_s

    @contextlib.contextmanager
    def _listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """It is called, in any thread, whenever something about the request may have changed."""
        with self._changed:
            self._listeners.add(listener)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.discard(listener)

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

    async def release_async(self) -> View:
        """As `release`. Once begun it is carried out, also when its caller is cancelled; so are these:"""
        return await self._end_async("release")

    async def cancel_async(self) -> View:
        """As `cancel`."""
        return await self._end_async("cancel")

    async def stopped_async(self) -> View:
        """As `stopped`."""
        return await self._own_op_async("stopped", k=self.k)

    async def status_async(self) -> View:
        """As `status`."""
        return await self._client._background.start(self._status_coroutine()).outcome()

    async def explain_async(self) -> Explanation:
        """As `explain`."""
        return await asyncio.to_thread(self.explain)

    async def _status_coroutine(self) -> View:
        (view,) = await self._client._coordinator_async({"op": "get", "ids": [self.id]})
        return self._take_status(view)

    async def _end_async(self, what: str, give_up_s: float | None = None) -> View:
        return self._view if self.done else await self._own_op_async(what, give_up_s)

    async def _own_op_async(self, name: str, give_up_s: float | None = None, k: int | None = None) -> View:
        async def carry_out() -> View:
            self._apply(await self._client._coordinator_async(self._op(name, k), give_up_s))
            return self._view

        self._client._check_usable()
        return await self._client._background.start(carry_out()).carried_out()

    def _end(self, what: str, give_up_s: float | None = None) -> View:
        return self._view if self.done else self._own_op(what, give_up_s)

    def _own_op(self, name: str, give_up_s: float | None = None, k: int | None = None) -> View:
        self._apply(self._client._coordinator(self._op(name, k), give_up_s))
        return self._view

    def _op(self, name: str, k: int | None) -> dict[str, Any]:
        op: dict[str, Any] = {"op": name, "id": self.id, "token": self._token}
        return op if k is None else {**op, "k": k}  # of this attempt only: it may arrive late, or twice

    def _holds(self, k: int) -> bool:
        """This attempt is still the one that holds, as far as is known."""
        return self.k == k and not self.done

    def _make_sure(self) -> None:
        """Asks, if the lease may have run out unheard: this process was stopped, or out of reach of the coordinator.

        While the coordinator can't be reached the slot is taken to stand: it may have ended it all the same.
        """
        if self.lease_s <= 0 or self.done or time.monotonic() - self._renewed_at < self.lease_s:
            return
        self._client._renew_now(self)

    # --- what the client tells it

    def _apply(self, view: View) -> None:
        """A view came in; one that is older than what is known says nothing."""
        with self._changed:
            if view["changed_seq"] < self._view["changed_seq"]:
                return
            self._view = view
            if self._slot is not None:
                self._slot._see(view)
            self._tell()
        if is_final(view):
            self._client._finished(self)

    def _lose(self) -> None:
        with self._changed:
            self._lost = SlotLost(self.id, "the coordinator does not know the request any more")
            if self._slot is not None:
                self._slot._lose(self._lost)
            self._tell()
        self._client._finished(self)

    def _wake(self) -> None:
        with self._changed:
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for listener in [*self._listeners]:
            listener()

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


def _in_states(states: str | Collection[str]) -> tuple[Callable[[View], bool], str]:
    """Is it in one of them, or final? And what that is called. BadInput for a state that there is not."""
    wanted = {states} if isinstance(states, str) else set(states)
    for state in wanted:
        if state not in STATES:
            raise BadInput("states", state, f"any of {', '.join(STATES)}")
    return lambda view: view["state"] in wanted or is_final(view), " or ".join(sorted(wanted))


def _unless_over(view: View, states: str | Collection[str]) -> View:
    if view["state"] not in ({states} if isinstance(states, str) else states):
        raise error_of(view)
    return view


assert set(STATES) >= FINAL_STATES
