"""The client: connects a process to the pools of a Ray cluster, submits requests, and keeps their tickets.

One client per process is enough: it has one long poll and one renewal call for all of its requests. Drivers, tasks and
actors make their own; a Client is not sent anywhere.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from typing_extensions import Unpack

from ..errors import PoolsError
from ..keys import Keys, client_keys
from ..limits import BATCH_MAX, check_name
from ..settings import ResourceSettings
from .connection import COORDINATOR
from .function_calls import FunctionCalls
from .sending import SUBMIT_BATCH, Pairs, Tickets, batches, take_results
from .slot import Slot, log
from .submission import (
    DEFAULT_LEASE_S,
    RequestArguments,
    Submission,
    as_submissions,
    check_room,
    check_token,
    room_op,
    submission_of,
    takes_request_arguments,
)
from .ticket import Ticket
from .transport import GIVE_UP_S, RayTransport, Transport, connect_ray
from .views import View
from .watcher import Renewer, Watcher

DEFAULT_NAMESPACE = "pools"
_GIVE_UP_ON_EXIT_S = 10.0
_MAKE_SURE_S = 5.0
# The process that ends waits no longer for this; its leases are the other way.
_LEAVE_S = 3.0


_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def connect(
    address: str | None = None,
    namespace: str = DEFAULT_NAMESPACE,
    *,
    quiet: bool = False,
    give_up_s: float = GIVE_UP_S,
    key: str | None = None,
    operator_key: str | None = None,
) -> Client:
    """Connects to the pools of a running Ray cluster; never starts one.

    A process that is connected to Ray already (any task, actor or Ray job) stays so; else `address` (host:port), the
    environment's RAY_ADDRESS or this machine's cluster is taken. `namespace` is that of the pools' configuration.
    quiet: no output of Ray's own. give_up_s: how long a call is tried while the coordinator is away. key: of a
    requester that has one (docs/protocol.md, "Who may do what"), by default RAY_POOLS_KEY or the file that
    RAY_POOLS_KEY_FILE names. operator_key: for operators' commands, likewise RAY_POOLS_OPERATOR_KEY.

    Raises:
        Unreachable: no such cluster, or no pools in that namespace.
        ProtocolMismatch: the pools speak another version.
        BadInput: an address that can't be right, such as one of Ray Client (ray://).
    """
    check_name("namespace", namespace)
    keys = client_keys(key, operator_key)  # what is wrong with one is said before Ray is asked
    connect_ray(address, quiet)
    client = Client(RayTransport(namespace), give_up_s, keys)
    client._go_by(client.ping())
    # Ray's own exit handlers, which run the later the earlier they came, must not take the connection away before
    atexit.unregister(_leave_all)
    atexit.register(_leave_all)
    return client


async def connect_async(
    address: str | None = None,
    namespace: str = DEFAULT_NAMESPACE,
    *,
    quiet: bool = False,
    give_up_s: float = GIVE_UP_S,
    key: str | None = None,
    operator_key: str | None = None,
) -> Client:
    """As `connect`, without blocking the loop meanwhile."""
    options: dict[str, Any] = {"give_up_s": give_up_s, "key": key, "operator_key": operator_key}
    return await asyncio.to_thread(connect, address, namespace, quiet=quiet, **options)


class Client(FunctionCalls):
    """Made by `connect`; safe to use from any thread. As a context manager it closes itself."""

    def __init__(self, transport: Transport, give_up_s: float = GIVE_UP_S, keys: Keys | None = None) -> None:
        super().__init__(transport, give_up_s, client_keys() if keys is None else keys)
        self.client_id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._live_tickets: dict[str, Ticket] = {}
        # also those that are over, as long as somebody keeps them: the same submission again finds its ticket
        self._known: weakref.WeakValueDictionary[str, Ticket] = weakref.WeakValueDictionary()
        self._watcher = Watcher(self, give_up_s)
        self._renewer = Renewer(self)
        self._followed_ids: frozenset[str] = frozenset()
        # as the operator has it, once `connect` has asked
        self._default_lease_s, self._renew_s = DEFAULT_LEASE_S, math.inf
        _open_clients.add(self)

    def __repr__(self) -> str:
        return f"<Client of namespace {self.namespace!r}, {len(self._live_tickets)} live requests>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Client stays in its process: call pools.connect() where it is needed, "
            "or hand over slot.scheduling_strategy"
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening and renewing. What is not given back by then ends with its lease. Harmless twice."""
        self._closed = True
        if os.getpid() != self._pid:  # a fork: the threads are not here, and may have left locks behind
            return
        self._caller.closed.set()
        self._watcher.close()
        self._renewer.close()
        for ticket in self._live():
            ticket._wake()
        self._background.close()

    # --- asking for capacity

    @takes_request_arguments
    def submit(
        self,
        requester: str,
        settings: ResourceSettings | None = None,
        **arguments: Unpack[RequestArguments],
    ) -> Ticket:
        """Asks the pools for capacity and returns at once.

        A request that every pool rejects gives a ticket too: waiting for it raises SlotRejected.

        Raises:
            BadInput: an argument can't be right; nothing was sent.
            Refused: the id came with other content (`id_in_use`) or another token (`wrong_token`); the requester
                has a key, and it is not this client's (`wrong_key`); too many wait already (`too_many_waiting`,
                `too_many_live`); the submission is too old (`too_old`). docs/limits.md has the numbers.
            Unreachable: not known whether it was submitted; the same call with the same id and token is safe.
        """
        return self._submit([submission_of(requester, settings, arguments)])[0]

    def submit_many(self, submissions: Iterable[Submission | Mapping[str, Any]]) -> Tickets:
        """Submits many at once, each a `Submission` or a mapping of its arguments, a thousand in one call.

        All or nothing: all are checked before the first is sent, and whether there is room for all of them
        (`too_many_waiting`). When one is refused nevertheless, those sent so far are cancelled. Errors as of `submit`.
        """
        return self._submit(as_submissions(submissions))

    @takes_request_arguments
    @contextlib.contextmanager
    def slot(
        self,
        requester: str,
        settings: ResourceSettings | None = None,
        *,
        timeout_s: float | None = None,
        progress: bool = False,
        **arguments: Unpack[RequestArguments],
    ) -> Iterator[Slot]:
        """Waits for capacity, gives it to the block, and gives it back at the end, whatever happens.

        timeout_s bounds the wait (WaitTimeout, and the request is cancelled). progress: a line on the terminal
        meanwhile that says why it waits. retries count until the block begins: it can't begin anew. A block whose
        slot was preempted ends in SlotPreempted, at `slot.check()` or at its end; whatever else the block raises
        goes through. Errors as of `submit` and `Ticket.wait`.
        """
        ticket = self.submit(requester, settings, **arguments)
        try:
            slot = ticket.wait(timeout_s, progress=progress)
        except BaseException:  # Ctrl-C too: nobody waits for it any more
            self._give_up(ticket)
            raise
        try:
            with slot:
                yield slot
        finally:
            if not ticket.done:  # retries left: another attempt would find nobody
                self._give_up(ticket)

    # --- the same without a thread that waits

    @takes_request_arguments
    async def submit_async(
        self,
        requester: str,
        settings: ResourceSettings | None = None,
        **arguments: Unpack[RequestArguments],
    ) -> Ticket:
        """As `submit`. A caller that is cancelled meanwhile leaves no request behind."""
        return (await self._submit_async([submission_of(requester, settings, arguments)]))[0]

    async def submit_many_async(self, submissions: Iterable[Submission | Mapping[str, Any]]) -> Tickets:
        """As `submit_many`. A caller that is cancelled meanwhile leaves no request behind."""
        return await self._submit_async(as_submissions(submissions))

    @takes_request_arguments
    @contextlib.asynccontextmanager
    async def slot_async(
        self,
        requester: str,
        settings: ResourceSettings | None = None,
        *,
        timeout_s: float | None = None,
        progress: bool = False,
        **arguments: Unpack[RequestArguments],
    ) -> AsyncIterator[Slot]:
        """As `slot`, by `async with`. A caller that is cancelled while it waits leaves no request behind."""
        ticket = await self.submit_async(requester, settings, **arguments)
        try:
            slot = await ticket.wait_async(timeout_s, progress=progress)
        except BaseException:  # cancelled, too
            await self._give_up_async(ticket)
            raise
        try:
            async with slot:
                yield slot
        finally:
            if not ticket.done:
                await self._give_up_async(ticket)

    async def _submit_async(self, given: Sequence[Submission]) -> Tickets:
        submitting = self._background.start(self._submit_coroutine(given))
        try:
            return (await submitting.outcome())[0]
        except asyncio.CancelledError:
            if submitting.ended.done() and submitting.ended.exception() is None:
                # accepted at the same moment: nobody will ever hear of these tickets
                await asyncio.gather(*(self._give_up_async(each) for each in submitting.ended.result()[1]))
            raise

    async def _give_up_coroutine(self, ticket: Ticket) -> None:
        """Likewise; to be run in the background."""
        if not ticket.done:
            try:
                op = ticket._op("cancel", None)
                ticket._apply(await self._coordinator_async(op, _GIVE_UP_ON_EXIT_S))
            except PoolsError as problem:
                log.warning("request %s was not cancelled, its lease will do it: %s", ticket.id, problem)

    async def _give_up_async(self, ticket: Ticket) -> None:
        try:
            await ticket._end_async("cancel", _GIVE_UP_ON_EXIT_S)
        except PoolsError as problem:
            log.warning("request %s was not cancelled, its lease will do it: %s", ticket.id, problem)

    def follow(self, id: str, token: bytes | None = None) -> Ticket:
        """A ticket for a request that another process submitted: it is told what becomes of it, and waits for it.
        The ticket that there is, for one that this process submitted (too).

        Its lease stays the other's to renew, and so does the answer to a preemption. token: the request's secret,
        without which it can't be released, cancelled or confirmed as stopped here; one that is given later counts.

        Raises:
            BadInput, Refused: the token can't be one; there is no such request (`unknown_id`).
        """
        self._check_usable()
        check_name("id", id)
        check_token("token", token)
        with self._lock:
            ticket = self._known.get(id)
            if ticket is not None and ticket.followed and token is not None:
                ticket._token = token
            elif ticket is None:
                ticket = self._known[id] = Ticket(self, id, token or b"", 0.0, followed=True)
                self._live_tickets[id] = ticket
            self._followed_ids |= {id}
        try:
            ticket.status()
        except BaseException:
            if ticket.followed:
                self._finished(ticket)
            raise
        if not ticket.done:
            self._watcher.ensure()
        return ticket

    def _give_up(self, ticket: Ticket) -> None:
        try:
            ticket._end("cancel", _GIVE_UP_ON_EXIT_S)
        except PoolsError as problem:
            log.warning("request %s was not cancelled, its lease will do it: %s", ticket.id, problem)

    def _submit(self, given: Sequence[Submission]) -> Tickets:
        if len(given) > 1:
            self._check_usable()
            check_room(self._caller.call(COORDINATOR, [room_op(given)]))
        tickets, fresh = self._enter(given)
        sent: Tickets = []
        try:
            for pairs in batches(given, tickets):
                results = self._caller.call(COORDINATOR, self._submit_ops(pairs))
                take_results(pairs, results, sent)
        except PoolsError:
            self._undo_submit(fresh, sent)
            raise
        except BaseException:  # Ctrl-C: what is on its way is not wanted either
            self._undo_submit(fresh, fresh)
            raise
        return self._listen_to(tickets, fresh)

    async def _submit_coroutine(self, given: Sequence[Submission]) -> tuple[Tickets, Tickets]:
        """Likewise, and which of them are new; to be run in the background."""
        if len(given) > 1:
            self._check_usable()
            check_room(await self._background.call(self._caller, COORDINATOR, [room_op(given)]))
        tickets, fresh = self._enter(given)
        sent: Tickets = []
        try:
            for pairs in batches(given, tickets):
                results = await self._background.call(self._caller, COORDINATOR, self._submit_ops(pairs))
                take_results(pairs, results, sent)
        except PoolsError:
            await self._background.in_thread(self._undo_submit, fresh, sent)
            raise
        except BaseException:  # cancelled
            await self._background.in_thread(self._undo_submit, fresh, fresh)
            raise
        return self._listen_to(tickets, fresh), fresh

    def _enter(self, given: Sequence[Submission]) -> tuple[Tickets, Tickets]:
        """The ticket of each submission, and those among them that are new."""
        self._check_usable()
        tickets, fresh = [], []
        with self._lock:
            for each in given:
                ticket = self._known.get(each.request_id)
                if ticket is None or ticket.followed:
                    lease_s = each.lease_or(self._default_lease_s)
                    ticket = Ticket(self, each.request_id, each.secret, lease_s)
                    self._known[ticket.id] = ticket
                    fresh.append(ticket)
                tickets.append(ticket)
            # before they are sent: no change of theirs is missed
            self._live_tickets.update({ticket.id: ticket for ticket in fresh})
            self._followed_ids -= {ticket.id for ticket in fresh}
        return tickets, fresh

    def _submit_ops(self, pairs: Pairs) -> list[dict[str, Any]]:
        lease_s, key = self._default_lease_s, self._keys.of_requester()
        ops = [{**each.operation(self.client_id, ticket._token, lease_s), **key} for each, ticket in pairs]
        ops[0]["holder"] = self._transport.holder()
        return ops

    def _listen_to(self, tickets: Tickets, fresh: Tickets) -> Tickets:
        live = [ticket for ticket in fresh if not ticket.done]
        if live:
            self._watcher.ensure()
        leases = [ticket.lease_s for ticket in live if ticket.lease_s > 0]
        if leases:
            self._renewer.ensure(min(leases))
        return tickets

    def _undo_submit(self, fresh: Tickets, sent: Tickets) -> None:
        """Not all were accepted: those that this call brought in are not wanted either."""
        ours = {id(ticket) for ticket in fresh}
        unwanted = [ticket for ticket in sent if id(ticket) in ours and not ticket.done]
        with self._lock:
            for ticket in fresh:
                self._live_tickets.pop(ticket.id, None)
                self._known.pop(ticket.id, None)
        try:
            for start in range(0, len(unwanted), SUBMIT_BATCH):
                ops = [
                    {"op": "cancel", "id": ticket.id, "token": ticket._token}
                    for ticket in unwanted[start : start + SUBMIT_BATCH]
                ]
                self._caller.call(COORDINATOR, ops, _GIVE_UP_ON_EXIT_S)
        except PoolsError as problem:
            log.warning("%d requests were not cancelled: %s", len(unwanted), problem)

    # --- an operator's commands

    def release(self, id: str, operator: str | None = None) -> View:
        """Releases anybody's request, as an operator: the log and the request's view say who (by default user@host).
        Returns when nothing is held. Refused (`not_operator`) without the operators' key, where they have one.
        """
        return self._as_operator("release", id, operator)

    def cancel(self, id: str, operator: str | None = None) -> View:
        """Cancels anybody's request, likewise."""
        return self._as_operator("cancel", id, operator)

    def _as_operator(self, name: str, id: str, operator: str | None) -> View:
        by = self._keys.of_operator(None if operator is None else check_name("operator", operator))
        view = cast(View, self._coordinator({"op": name, "id": check_name("id", id), **by}))
        own = self._known.get(id)
        if own is not None:
            own._apply(view)
        return view

    # --- between the client, its tickets and its threads

    def _trouble(self) -> PoolsError | None:
        """Why waiting any longer is in vain, if it is."""
        return PoolsError("the client was closed") if self._closed else self._watcher.trouble

    def _live(self) -> Tickets:
        with self._lock:
            return [*self._live_tickets.values()]

    def _followed(self) -> frozenset[str]:
        return self._followed_ids

    def _look(self, ids: Sequence[str], give_up_s: float | None = None) -> None:
        """Asks what became of requests. One that is forgotten is lost for who has its ticket."""
        for start in range(0, len(ids), BATCH_MAX):
            part = [*ids[start : start + BATCH_MAX]]
            views = self._coordinator({"op": "get", "ids": part}, give_up_s)
            self._heard(view for view in views if view is not None)
            self._lost(id for id, view in zip(part, views, strict=True) if view is None)

    def _has_live(self) -> bool:
        return bool(self._live_tickets)

    def _go_by(self, said: Mapping[str, Any]) -> None:
        """What the coordinator says of its configuration; older ones say nothing."""
        lease = said.get("lease") or {}
        self._default_lease_s = float(lease.get("default_s") or DEFAULT_LEASE_S)
        self._renew_s = float(lease.get("renew_s") or math.inf)

    def _finished(self, ticket: Ticket) -> None:
        with self._lock:
            self._live_tickets.pop(ticket.id, None)
            self._followed_ids -= {ticket.id}

    def _heard(self, changes: Iterable[View | dict[str, Any]]) -> None:
        with self._lock:
            pairs = [(self._known.get(view["id"]), view) for view in changes]
        for ticket, view in pairs:
            if ticket is not None:
                ticket._apply(cast(View, view))

    def _renew_now(self, ticket: Ticket) -> None:
        try:
            self._renewer.renew([ticket], min(ticket.lease_s, _MAKE_SURE_S))
        except PoolsError as problem:
            # not again at once: who calls this does so in a loop
            ticket._renewed_at = time.monotonic() - max(ticket.lease_s - _MAKE_SURE_S, 0.0)
            log.warning("request %s: its lease may be over, and nobody says: %s", ticket.id, problem)

    def _leave(self) -> None:
        """The process ends: what it holds or waits for under a lease ends too, now rather than with the lease."""
        if self._closed or os.getpid() != self._pid or self._transport.holder().get("kind") != "driver":
            return
        items = [[ticket.id, ticket._token] for ticket in self._live() if ticket.lease_s > 0]
        with contextlib.suppress(PoolsError):
            for start in range(0, len(items), BATCH_MAX):
                op = {"op": "leave", "items": items[start : start + BATCH_MAX]}
                self._coordinator(op, _LEAVE_S)

    def _renewed(self, final: Sequence[str], unknown: Sequence[str]) -> None:
        """What the renewal said of requests that it could not renew."""
        self._look(final)
        self._lost(unknown)

    def _lost(self, ids: Iterable[str]) -> None:
        """The coordinator knew these, and does not any more."""
        with self._lock:
            lost = [self._live_tickets[id] for id in ids if id in self._live_tickets]
        for ticket in lost:
            ticket._lose()


def _leave_all() -> None:
    """Before Ray's own exit handlers take the connection away under the threads."""
    for client in [*_open_clients]:
        client._leave()
        client.close()
