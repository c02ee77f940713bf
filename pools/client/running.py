"""`Client.run`: one call of a function inside a slot, queued again when the slot is called back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import PoolsError, SlotError, SlotOver, SlotPreempted, Unreachable
from ..limits import RETRIES_MAX, check_integer
from .background import settled
from .slot import Slot, log
from .submission import Submission
from .tasks import Call, Task

if TYPE_CHECKING:
    from .client import Client
    from .ticket import Ticket

_WITHOUT_NEWS_S = 5.0
"""While nobody can say what becomes of a slot, its placement group is looked at this often."""
_NEWS_WITHIN_S = 30.0
"""A group that is gone was taken away: word of it comes within this."""
_GIVE_BACK_S = 10.0


@dataclass(frozen=True)
class Done:
    """The function returned."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """The function raised."""

    problem: BaseException


@dataclass(frozen=True)
class Crashed:
    """Its process ended under it, and the slot stands."""

    problem: BaseException


@dataclass(frozen=True)
class Taken:
    """The slot was called back, or lost, before the function had ended."""


Outcome = Done | Failed | Crashed | Taken


async def run(
    client: Client,
    call: Call,
    submission: Submission,
    crash_retries: int,
    timeout_s: float | None,
    watch: Callable[[Ticket], Any],
) -> Any:
    """The function's result. Raises what it raised, or what ended the request. Cancelled, it leaves nothing behind."""
    check_integer("crash_retries", crash_retries, 0, RETRIES_MAX)
    (ticket,), _ = await client._submit_coroutine([submission])
    try:
        return await _until_done(client, call, ticket, crash_retries, timeout_s, watch)
    except BaseException:  # cancelled, too
        await client._give_up_coroutine(ticket)
        raise


async def _until_done(
    client: Client,
    call: Call,
    ticket: Ticket,
    crash_retries: int,
    timeout_s: float | None,
    watch: Callable[[Ticket], Any],
) -> Any:
    attempts = 0
    while True:
        try:
            with watch(ticket):
                slot = await ticket.wait_async(timeout_s)
        except SlotPreempted:
            tries = f"{attempts} attempt" + ("s" if attempts != 1 else "")
            raise SlotPreempted(ticket.id, f"{tries}, and no retries left") from None
        attempts += 1
        outcome = await call_in(client, slot, call)
        if isinstance(outcome, Done):
            await give_back(slot)
            return outcome.value
        if isinstance(outcome, Failed):
            await give_back(slot)
            raise outcome.problem
        if isinstance(outcome, Taken):
            await stop(slot)
        elif crash_retries > 0:
            crash_retries -= 1
            log.warning("%s in slot %s: %s; it runs again", call.name, slot.id, outcome.problem)
        else:
            await give_back(slot)
            raise outcome.problem


async def call_in(client: Client, slot: Slot, call: Call) -> Outcome:
    """Runs the call in a slot, to its end or to the slot's. Cancelled, it kills what runs."""
    started: list[Task] = []
    try:
        # a caller that is cancelled meanwhile has started it all the same
        await client._background.in_thread(lambda: started.append(client._tasks.start(slot, call)))
        (task,) = started
        await _ended_or_gone(client, slot, task)
        if not task.outcome.done():
            return Taken()
        problem = task.outcome.exception()
        if problem is None:
            return Done(task.outcome.result())
        return await _judged(client, slot, problem)
    except SlotOver:
        return Taken()
    finally:
        for task in started:
            if not task.outcome.done():
                await client._background.in_thread(task.kill)


async def _judged(client: Client, slot: Slot, problem: BaseException) -> Outcome:
    if not client._tasks.crash(problem):
        own = client._tasks.own_error(problem)
        left = isinstance(own, SlotError) and own.request_id == slot.id
        # it looked at its slot and left, as it should: the word that it heard is on its way here too
        return Taken() if left and await _called_back(slot) else Failed(own)
    if slot.preempting.is_set():
        return Taken()
    if await client._background.in_thread(client._tasks.group_is_gone, slot) and await _called_back(slot):
        return Taken()
    return Crashed(problem)


async def _called_back(slot: Slot) -> bool:
    try:
        await slot._ticket._wait_until_async(
            lambda _: slot.preempting.is_set(), _NEWS_WITHIN_S, "called back"
        )
    except PoolsError:
        return False
    return True


async def _ended_or_gone(client: Client, slot: Slot, task: Task) -> None:
    """Until the task has ended or the slot is gone: a task that was sent too late would never end."""
    ticket = slot._ticket
    task.outcome.add_done_callback(lambda _: ticket._wake())
    while True:
        try:
            await ticket._wait_until_async(lambda _: task.outcome.done() or slot._gone, None, "at its end")
            return
        except Unreachable:
            # the task is none the worse for it; but nobody would tell us that its slot has gone
            await settled(task.outcome, _WITHOUT_NEWS_S)
            if task.outcome.done():
                return
            if await client._background.in_thread(client._tasks.group_is_gone, slot):
                return


async def give_back(slot: Slot) -> None:
    """What a result is worth does not hang on this."""
    try:
        if slot._give_back("released"):
            await slot._ticket._own_op_async("release", _patience_s(slot))
    except PoolsError as problem:
        log.warning("slot %s was not given back, its lease will do it: %s", slot.id, problem)


async def stop(slot: Slot) -> None:
    """The work in a slot that was called back has ended."""
    try:
        if slot._give_back("stopped"):
            await slot._ticket._own_op_async("stopped", _patience_s(slot), slot.k)
    except PoolsError as problem:
        log.warning("slot %s: its stop was not confirmed: %s", slot.id, problem)


def _patience_s(slot: Slot) -> float:
    return min(_GIVE_BACK_S, slot._ticket._client._caller.give_up_s)
