"""A command that queues for its slot, runs in it, and after a preemption queues and runs again.

One loop takes everything that happens, in the order in which it happens: grants, the command's end, preemption,
signals. Each step is said in one line.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..counting import counted
from ..errors import PoolsError, SlotPreempted, WaitTimeout
from ..supervise import NOT_STARTED, Ending
from .attempt import Attempt, CommandSpec, Ended, Lost, Started, Unread, start_attempt
from .patience import SLICE_S, slice_s

if TYPE_CHECKING:
    from .client import Client
    from .slot import Slot
    from .submission import Submission
    from .ticket import Ticket

DEFAULT_STOP_TIMEOUT_S = 10.0
LOOK_S = 2.0
"""How often one who waits asks why."""

EARLY_S, EARLY_PART = 0.5, 0.1
"""SIGKILL comes so long before the grace is over, at most this part of it: the pool takes the group by force then, and
by that time the command's GPUs should be free."""

_KILLED_WITHIN_S = 15.0
_FATE_KNOWN_WITHIN_S = 6.0

Say = Callable[[str], None]


class Preempted:
    """The slot is called back, or gone."""


def split_words(bundles: Sequence[Mapping[str, float]]) -> str:
    """What is to be said where a request is larger than a node and was split: its command runs in the first part."""
    if len(bundles) < 2:
        return ""
    counts = [bundle.get("GPU", 0.0) for bundle in bundles]
    what = f"sees {counted(int(counts[0]), 'GPU')} of {sum(counts):g}" if any(counts) else "has the first"
    return (
        f"it is more than a node has: {len(bundles)} bundles, and the command {what}, those of the first bundle;"
        " its tasks can use the others (pools.current_slot().options())"
    )


class CommandRun:
    """Runs a command in slots of one request. `interrupt` may be called from a signal handler."""

    def __init__(
        self,
        client: Client,
        submission: Submission,
        spec: CommandSpec,
        *,
        say: Say,
        complain: Say | None = None,
        stop_timeout_s: float = DEFAULT_STOP_TIMEOUT_S,
        on_grant: Callable[[Slot], None] | None = None,
    ) -> None:
        self._client, self._submission, self._spec = client, submission, spec
        self._say, self._stop_timeout_s, self._on_grant = say, stop_timeout_s, on_grant
        # for what is wrong, which is said even by one who else says nothing
        self._complain = complain or say
        # its put may be interrupted by a handler that puts
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._signals = 0
        self._stopping = 0  # the first signal
        self._gave_up = False

    def interrupt(self, number: int) -> None:
        """A signal for this process: the first is passed on as SIGTERM, the second kills, a third leaves."""
        self._signals += 1
        if self._signals >= 3:
            raise KeyboardInterrupt
        self._events.put(signal.Signals(number))

    def run(self, timeout_s: float | None = None) -> int:
        """The command's exit code: its own, or 128 and the number of the signal that ended it.

        timeout_s bounds the wait for the first slot.

        Raises:
            SlotError: the request came to its end without the command's: rejected, cancelled, preempted with no
                retries left, its lease run out.
            WaitTimeout: no slot within timeout_s; the request is cancelled.
            Unreachable, BadInput, Refused: as of `Client.submit`.
        """
        self._ticket = self._client._submit([self._submission])[0]
        try:
            while True:
                slot = self._wait_for_slot(timeout_s)
                if slot is None:
                    return 128 + self._stopping
                timeout_s = None
                code = self._run_in(slot)
                if code is not None:
                    return code
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """Tried once, for it takes its time where nobody answers."""
        if not self._ticket.done and not self._gave_up:
            self._gave_up = True
            self._client._give_up(self._ticket)

    # --- waiting

    def _wait_for_slot(self, timeout_s: float | None) -> Slot | None:
        """None: a signal came meanwhile."""
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        threading.Thread(target=self._wait, name="ray-pools-wait", daemon=True).start()
        said: Any = None
        while True:
            left_s = LOOK_S if ends_at is None else min(LOOK_S, ends_at - time.monotonic())
            event = self._next(max(left_s, 0.0) if said else min(0.2, max(left_s, 0.0)))
            if event is None:
                if ends_at is not None and time.monotonic() >= ends_at:
                    raise WaitTimeout(f"request {self._ticket.id!r} got no slot within {timeout_s:g} s")
                why, words = self._why_it_waits()
                if why is not None and why != said:
                    said = why
                    self._say(words)
            elif isinstance(event, signal.Signals):
                self._stopping = event
                self._give_up()
                self._say(f"{event.name}: request {self._ticket.id!r} {_what_became_of(self._ticket)}")
                return None
            elif isinstance(event, Exception):
                raise event
            elif isinstance(event, _Granted):
                return event.slot

    def _wait(self) -> None:
        try:
            self._events.put(_Granted(self._ticket.wait()))
        except PoolsError as problem:
            self._events.put(problem)

    def _why_it_waits(self) -> tuple[Any, str]:
        """In words, and what of it is worth a line when it changes: a place in the queue changes too often. None while
        it does not wait: the pools take back the slot that was just left, or a grant is on its way here.
        """
        try:
            said = self._ticket.explain()
        except PoolsError as problem:
            return str(problem), f"waiting: {problem}"
        if said.view["state"] != "queued":
            return None, ""
        causes = {pool: each.get("cause") for pool, each in said.items()}
        return (said.view["state"], causes), str(said)

    # --- running

    def _run_in(self, slot: Slot) -> int | None:
        """The exit code; None when the request waits for another slot."""
        self._say(f"granted in {slot.pool}, attempt {slot.k}")
        if not self._submission.bundles and (words := split_words(slot.bundles)):
            self._say(words)
        if self._on_grant is not None:
            self._on_grant(slot)
        over = threading.Event()

        def post(event: Any) -> None:
            if not over.is_set():  # a late word must not be taken for one of the next attempt's
                self._events.put(event)

        slot.on_preempt(lambda _: post(Preempted()))
        attempt = start_attempt(slot, self._spec, self._ticket._token, post)
        try:
            ending, told = self._stand_by(slot, attempt)
        finally:
            over.set()
            attempt.close()
        if told and not self._stopping:
            self._after_preemption(slot, ending)
            return None
        (self._complain if ending.failure else self._say)(str(ending))
        self._give_back(slot)
        return ending.exit_code

    def _after_preemption(self, slot: Slot, ending: Ending) -> None:
        problem = slot._problem
        if not isinstance(problem, SlotPreempted):
            self._say(str(ending))
            assert problem is not None
            raise problem
        view = self._ticket.view
        left = view.get("retries", 0) - (view["k"] == slot.k)
        slot.stopped()
        self._say(str(ending))
        if left < 0:
            # it is over as soon as its pool says so, as preempted: a cancel would overtake that
            self._gave_up = True
            raise SlotPreempted(self._ticket.id, "no retries left")
        self._say(f"queued again, {counted(left, 'retry')} left")

    def _give_back(self, slot: Slot) -> None:
        try:
            slot.release()
        except PoolsError as problem:
            self._complain(f"the slot was not given back, its lease will do it: {problem}")

    def _stand_by(self, slot: Slot, attempt: Attempt) -> tuple[Ending, bool]:
        """Until the command is gone: how it ended, and whether it was told to leave the slot."""
        deadline: float | None = None
        told = killed = False
        lost: Lost | None = None
        while True:
            event = self._next(None if deadline is None else deadline - time.monotonic())
            if isinstance(event, Ended):
                return event.ending, told
            if isinstance(event, Lost):
                if told:
                    return Ending(-signal.SIGKILL), told
                # its group may have been taken away: the pool will say so
                lost, deadline = event, time.monotonic() + _FATE_KNOWN_WITHIN_S
            elif isinstance(event, Started):
                self._say(f"running {event.note}")
            elif isinstance(event, Preempted):
                told = True
                if lost:
                    return Ending(-signal.SIGKILL), told
                deadline = self._pass_on_preemption(slot, attempt)
            elif isinstance(event, (Unread, signal.Signals)):
                if killed:
                    continue
                number = event if isinstance(event, signal.Signals) else signal.SIGPIPE
                kill_at = self._pass_on(number, attempt)
                deadline = kill_at if deadline is None else min(deadline, kill_at)
            elif lost:
                return _lost(lost), told
            elif killed:
                return Ending(-signal.SIGKILL, "did not answer to SIGKILL; it goes with its slot"), told
            else:
                killed, deadline = True, time.monotonic() + _KILLED_WITHIN_S
                self._say("time is over: SIGKILL")
                attempt.kill()

    def _pass_on_preemption(self, slot: Slot, attempt: Attempt) -> float:
        """When it will be killed."""
        grace_s = slot.grace_left_s() or 0.0
        if not isinstance(slot._problem, SlotPreempted):
            self._say(f"{slot._problem}")
            grace_s = 0.0
        attempt.terminate()
        kill_in_s = max(grace_s - min(EARLY_S, EARLY_PART * grace_s), 0.0)
        if grace_s:
            self._say(f"preempted: SIGTERM now, SIGKILL in {kill_in_s:.1f} s")
        return time.monotonic() + kill_in_s

    def _pass_on(self, number: signal.Signals, attempt: Attempt) -> float:
        now = time.monotonic()
        if self._stopping:
            return now
        self._stopping = number
        self._say(f"{number.name}: SIGTERM to the command, SIGKILL in {self._stop_timeout_s:g} s")
        attempt.terminate()
        return now + self._stop_timeout_s

    def _next(self, timeout_s: float | None) -> Any:
        """The next event; None when the time is over."""
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if ends_at is None else max(ends_at - time.monotonic(), 0.0)
            try:
                return self._events.get(timeout=slice_s(left_s))
            except queue.Empty:
                if left_s is not None and left_s <= SLICE_S:
                    return None


def _what_became_of(ticket: Ticket) -> str:
    return f"is {ticket.state}" if ticket.done else "is not cancelled yet: its lease will do it"


def _lost(lost: Lost) -> Ending:
    if lost.began:
        return Ending(-signal.SIGKILL, f"was lost with its node or its supervisor: {lost.why}")
    return Ending(NOT_STARTED, f"could not be started: {lost.why}")


class _Granted:
    def __init__(self, slot: Slot) -> None:
        self.slot = slot
