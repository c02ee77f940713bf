"""What a client knows by asking, of requests, pools and configuration; and the calls to actors that it is made of."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, cast

from .. import wire
from ..errors import BadInput, PoolsError, Refused
from ..keys import Keys
from ..limits import check_integer, check_name
from .authentication import one_line
from .background import Background
from .sending import SUBMIT_BATCH
from .ticket import Ticket
from .transport import Caller, Transport, TryAgain
from .views import STATES, View, is_final

if TYPE_CHECKING:
    from ..core.system import System

COORDINATOR = wire.coordinator_actor_name()
_STATUS_S = 5.0
_COPY_TRIES = 20
_COPY_PAUSE_S = 0.01

Tickets = list[Ticket]
Views = list[View]
"""Client has a method called list: inside its class the name is taken."""


class Connection:
    """Calls to the actors of one namespace; the part of a Client that needs no thread."""

    def __init__(self, transport: Transport, give_up_s: float, keys: Keys) -> None:
        self._keys = keys
        self.namespace = transport.namespace
        self._transport = transport
        self._caller = Caller(transport, give_up_s)
        self._pid = os.getpid()
        self._closed = False
        self._background = Background(f"ray-pools-loop-{self.namespace}")

    def get(self, id: str) -> View | None:
        """A request as it is now; None if the coordinator does not know it."""
        check_name("id", id)
        found = self._coordinator({"op": "get", "ids": [id]})
        return cast("View | None", found[0])

    def list(
        self,
        *,
        requester: str | None = None,
        pool: str | None = None,
        states: Collection[str] | None = None,
        since: float | None = None,
        limit: int | None = None,
    ) -> Views:
        """Requests, newest first: those of a requester, of a pool (held or waiting there), in these states, to which
        something happened since then (the core's time, in seconds).
        """
        for name, value in (("requester", requester), ("pool", pool)):
            if value is not None:
                check_name(name, value)
        for state in states or ():
            if state not in STATES:
                raise BadInput("states", state, f"any of {', '.join(STATES)}")
        if limit is not None:
            check_integer("limit", limit, 1)
        op = {
            "op": "list",
            "requester": requester,
            "pool": pool,
            "states": sorted(states or ()),
            "limit": limit,
            **({} if since is None else {"since": since}),
        }
        return cast(Views, self._coordinator(op)["requests"])

    def status(self) -> dict[str, Any]:
        """{"coordinator": its status, "pools": {name: its status, or {"unreachable": why}}}."""
        coordinator = self._coordinator({"op": "status"})
        return {"coordinator": coordinator, "pools": self.ask_pools(coordinator["pools"], {"op": "status"})}

    def explain(self, id: str, pools: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """What each pool says of a waiting or holding request; without `pools`, those that it is in now.

        Raises:
            Refused: there is no such request (`unknown_id`).
        """
        if pools is None:
            view = self.get(id)
            if view is None:
                raise Refused("unknown_id", f"there is no request {id!r}", {"id": id})
            pools = [] if is_final(view) else [view["pool"]] if view["pool"] else view["pools"]
        answers = self.ask_pools(pools, {"op": "explain", "ids": [id]})
        return {
            pool: answer if "unreachable" in answer else (answer.get(id) or {})
            for pool, answer in answers.items()
        }

    def config(self) -> dict[str, Any]:
        """The pools and policies that are in force, with their version."""
        return cast("dict[str, Any]", self._coordinator({"op": "config"}))

    def ping(self) -> dict[str, Any]:
        """The coordinator's name, epoch, seq, pid, version and protocol."""
        return cast("dict[str, Any]", self._coordinator({"op": "ping"}))

    def pool(self, name: str, operation: Mapping[str, Any]) -> Any:
        """One operation of a pool's actor, such as {"op": "digest"} (docs/protocol.md, "Wire")."""
        self._check_usable()
        return self._caller.value(wire.pool_actor_name(check_name("pool", name)), operation)

    def ask_pools(self, pools: Iterable[str], op: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """One operation to many pools side by side; one that does not answer soon is {"unreachable": why}."""
        self._check_usable()
        data, started, found = wire.encode_request([op]), {}, {}
        for pool in pools:
            try:
                started[pool] = self._transport.start(wire.pool_actor_name(pool), "call", data)
            except (TryAgain, PoolsError) as problem:
                found[pool] = {"unreachable": one_line(str(problem))}
        for pool, future in started.items():
            try:
                (result,) = wire.decode_response(future.result(_STATUS_S), 1, f"pool {pool!r}")
                found[pool] = wire.value_of(result)
            except (TryAgain, PoolsError, FutureTimeout) as problem:
                found[pool] = {"unreachable": one_line(str(problem)) or f"no answer within {_STATUS_S:g} s"}
        return found

    def coordinator(self, operation: Mapping[str, Any]) -> Any:
        """One operation of the coordinator, likewise."""
        return self._coordinator(operation)

    def copy(self) -> System:
        """Coordinator and pools as they are now, as a copy in this process: whatever is done to it shows what would
        come of it (`ray_pools.core.preview`). A pool that does not answer counts as unreachable in it.

        Raises:
            PoolsError: they change too fast to be seen in one moment.
        """
        from ..core.link import SHORTER_LOG
        from ..core.preview import world_of  # drivers have no need of the cores

        for attempt in range(_COPY_TRIES):
            names = self._coordinator({"op": "config"})["uids"]
            # pools first: of what they say the coordinator then knows all
            found = self.ask_pools(sorted(names), {"op": "picture"})
            pools = {name: said for name, said in found.items() if "unreachable" not in said}
            coordinator = self._coordinator({"op": "copy"})
            try:
                return world_of(coordinator, pools)
            except Refused as problem:
                if problem.code != SHORTER_LOG:
                    raise
            time.sleep(_COPY_PAUSE_S * attempt)
        raise PoolsError("the pools change too fast to be seen in one moment: try again")

    def change(
        self, changes: Iterable[Sequence[Any]], id: str | None = None, since: int | None = None
    ) -> int:
        """Changes pools, policies, keys and limits, all or nothing; returns the configuration's new version. A change
        is a list such as ["policy", config]; docs/protocol.md, "Wire", has all kinds.

        The same call again with the same `id` (by default each call has its own) changes nothing twice. since: the
        version that the changes were made for.

        Raises:
            BadInput: the whole would break a rule (docs/rules.md section 9); nothing has changed.
            Refused: the id belongs to other changes (`id_in_use`), what is to go is not there, the version is
                another by now (`changed_meanwhile`), or operators have a key, and it is not this client's
                (`not_operator`).
            Unreachable: not known whether it was changed; the same call with the same id is safe.
        """
        op = {
            "op": "change",
            "id": uuid.uuid4().hex if id is None else check_name("id", id),
            "changes": [[*change] for change in changes],
            **({} if since is None else {"since": since}),
            **self._keys.of_operator(),
        }
        version: int = self._coordinator(op)["version"]
        return version

    # --- many at once

    def release_many(self, tickets: Iterable[Ticket]) -> Views:
        """Gives back what these hold and cancels what still waits, a thousand in one call; returns their views when
        nothing is held any more. One that is refused does not keep the others: its error is raised when all were sent.
        """
        self._check_usable()
        found = [*tickets]
        problems = [self._released(part, self._caller.call(COORDINATOR, ops)) for part, ops in _ends(found)]
        return _views_or_first(found, problems)

    async def release_many_async(self, tickets: Iterable[Ticket]) -> Views:
        """As `release_many`. Once begun it is carried out, also when its caller is cancelled."""
        self._check_usable()
        found = [*tickets]

        async def carry_out() -> Views:
            problems = []
            for part, ops in _ends(found):
                results = await self._background.call(self._caller, COORDINATOR, ops)
                problems.append(self._released(part, results))
            return _views_or_first(found, problems)

        return await self._background.start(carry_out()).carried_out()

    def _released(self, tickets: Tickets, results: Sequence[wire.Wire]) -> PoolsError | None:
        """Every answer is worked in; the first that is an error."""
        problem = None
        for ticket, result in zip(tickets, results, strict=True):
            if "ok" in result:
                ticket._apply(result["ok"])
            elif problem is None:
                problem = wire.error_from_wire(result["error"])
        return problem

    # --- calls

    def _coordinator(self, op: Mapping[str, Any], give_up_s: float | None = None) -> Any:
        self._check_usable()
        return self._caller.value(COORDINATOR, op, give_up_s)

    async def _coordinator_async(self, op: Mapping[str, Any], give_up_s: float | None = None) -> Any:
        """Likewise; to be run in the background."""
        self._check_usable()
        (result,) = await self._background.call(self._caller, COORDINATOR, [op], give_up_s)
        return wire.value_of(result)

    def _check_usable(self) -> None:
        if self._closed:
            raise PoolsError("the client was closed")
        if os.getpid() != self._pid:
            raise PoolsError(
                f"this client belongs to process {self._pid}: a fork has to call pools.connect() for its own"
            )


def _ends(tickets: Tickets) -> Iterator[tuple[Tickets, list[dict[str, Any]]]]:
    """Those that are not over yet, a call's worth at a time."""
    live = [ticket for ticket in dict.fromkeys(tickets) if not ticket.done]
    for start in range(0, len(live), SUBMIT_BATCH):
        part = live[start : start + SUBMIT_BATCH]
        yield part, [ticket._op("release", None) for ticket in part]


def _views_or_first(tickets: Tickets, problems: Iterable[PoolsError | None]) -> Views:
    for problem in problems:
        if problem is not None:
            raise problem
    return [ticket.view for ticket in tickets]
