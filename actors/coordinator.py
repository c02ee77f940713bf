"""The coordinator's actor: a shell around `ray_pools.core.coordinator`."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ray_pools import wire
from ray_pools.actors.clock import ManualClock
from ray_pools.actors.holders import Holder, HolderWatch
from ray_pools.actors.metrics import add_cluster_gauges
from ray_pools.actors.peer import BEAT_S, PeerCaller, answer_to, beat_after_s, message_of
from ray_pools.actors.shell import Deferred, Later, Shell
from ray_pools.actors.views import config_of, matching, view_of
from ray_pools.actors.wishes import Wishes
from ray_pools.core import access, commands, holders, picture
from ray_pools.core.bundles import validate_options
from ray_pools.core.coordinator import Coordinator, CoordinatorStep
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.eviction import evict
from ray_pools.core.intake import check_room, check_token
from ray_pools.core.link import SHORTER_LOG, Message, ShorterLog, StalePeer
from ray_pools.core.lost import declare_lost
from ray_pools.core.meter import CoordinatorMeter
from ray_pools.core.preview import copied
from ray_pools.core.requests import FINAL, Request
from ray_pools.core.timings import TIMINGS
from ray_pools.errors import BadInput, PoolsError, Refused
from ray_pools.limits import check_name

_FORGET_EVERY_S = 60.0
# A pool that an open attempt waits for is asked again this often: one that is gone must not be waited for.
_ASK_EVERY_S = 2.0
# A coordinator that starts waits so long at most for pools that can't be reached.
_LISTEN_MAX_S = 15.0
_LIST_MAX = 10_000
_DETAIL_MAX_CHARS = 500
_PROMISES = frozenset(("submit", "release", "cancel", "stopped", "change", "evict", "announce", "unannounce"))
_WRITES = _PROMISES | {"renew", "leave", "_forget", "_holders_gone"}


class CoordinatorShell(Shell):
    """Operations, waiters, pools and prewarming around the coordinator's core."""

    state: CoordinatorState
    core: Coordinator

    def __init__(self, store_address: str, namespace: str, options: dict[str, Any]) -> None:
        self.namespace = namespace
        self.options = options
        # who is woken when a request changes: by its client's id, and by its own for those of others that follow it
        self._waiters: dict[tuple[str, str], set[asyncio.Future[None]]] = {}
        self._peers: dict[str, PeerCaller] = {}
        # pool -> what its message showed: that its log lost something, or this one
        self._losses: dict[str, ShorterLog] = {}
        # pools that have not yet said that they know no longer log of this coordinator
        self._unheard: set[str] = set()
        self._all_heard = asyncio.Event()
        # pools that are asked although there is nothing to tell them
        self._asking: set[str] = set()
        self._holder_watch: HolderWatch | None = None
        super().__init__("coordinator", store_address, options.get("clock", "wall"))
        self._unheard = set(self.state.pools)
        self._heard("")
        self.wishes = Wishes(lambda: self.core, namespace, options, self._timings("prewarm"))
        if options.get("holder_watch", True):
            self._holder_watch = HolderWatch(lambda: holders.watched(self.core), self._holders_gone)
        self.start_metrics(
            CoordinatorMeter(self.state), namespace, options, partial(add_cluster_gauges, self)
        )
        self.schedule_turn()
        self.loop.call_later(_FORGET_EVERY_S, self._forget)
        self.loop.call_later(_ASK_EVERY_S, self._ask_unanswered)
        self._beat_s = float(options.get("beat_s", BEAT_S))
        self.loop.call_later(beat_after_s(self._beat_s), self._beat)

    # --- the core

    def new_state(self, dumped: dict[str, Any] | None) -> CoordinatorState:
        return CoordinatorState.load(dumped) if dumped else CoordinatorState()

    def new_core(self, state: CoordinatorState) -> Coordinator:
        return Coordinator(state, self.epoch, self.clock.now())

    def settle(self) -> None:
        if not (self._unheard or self._lost_here()):
            self.core.tick()

    def after_turn(self, step: CoordinatorStep) -> None:
        for id in step.touched:
            request = self.state.requests.get(id)
            if request is None:
                continue
            if request.phase == FINAL:
                self.finals(id, self.view(request))
            for subject in (("client", request.client), ("id", id)):
                for waiter in self._waiters.get(subject, ()):
                    if not waiter.done():
                        waiter.set_result(None)
        for pool in self.state.pools:
            if self.core.has_news(pool):
                self._peer(pool).poke()
        if step.events:
            self.wishes.soon()
        if "prewarm" in self.state.timings:
            self.wishes.go_by(self._timings("prewarm"))

    def has_news(self) -> bool:
        return any(self.core.has_news(pool) for pool in self.state.pools)

    def _peer(self, pool: str) -> PeerCaller:
        peer = self._peers.get(pool)
        if peer is None:
            peer = self._peers[pool] = PeerCaller(
                wire.pool_actor_name(pool),
                self.namespace,
                "coordinator",
                lambda: self._outgoing(pool),
                lambda answer, asked: self.command(
                    [{"op": "exchange", "pool": pool, "message": list(answer), "asked_in": asked.seen_epoch}]
                ),
                lambda: self._silent(pool),
            )
        return peer

    def _outgoing(self, pool: str) -> Message | None:
        due = pool in self.state.pools and (self.core.has_news(pool) or pool in self._asking)
        self._asking.discard(pool)
        return self.core.outgoing(pool) if due else None

    def _ask_unanswered(self) -> None:
        self.loop.call_later(_ASK_EVERY_S, self._ask_unanswered)
        self._ask(self.core.unanswered())

    def _ask(self, pools: Iterable[str]) -> None:
        for pool in sorted(pools):
            self._asking.add(pool)
            self._peer(pool).poke()

    def _beat(self) -> None:
        """Also where nothing happens both sides see that the other's log is whole. Nothing is logged by that."""
        self.loop.call_later(beat_after_s(self._beat_s), self._beat)
        since = self.loop.time() - 0.5 * self._beat_s
        self._ask(pool for pool in self.state.pools if self._peer(pool).spoke_at < since)

    def _heard(self, pool: str) -> None:
        self._unheard.discard(pool)
        if not self._unheard:
            self._all_heard.set()

    async def command(self, ops: Sequence[dict[str, Any]]) -> list[Any]:
        """As a shell; but nothing is promised before each pool that can be reached has said that this log is whole."""
        if self._unheard and any(op.get("op") in _PROMISES for op in ops):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_heard.wait(), _LISTEN_MAX_S)
        return await super().command(ops)

    def _lost_here(self) -> str:
        """What pools say of this log, if it lost something that they remember: then nothing is promised or logged."""
        for error in self._losses.values():
            if error.details["log"] == "coordinator":
                return str(error)
        return next((peer.trouble for peer in self._peers.values() if peer.lost == "coordinator"), "")

    def _silent(self, pool: str) -> None:
        self._heard(pool)
        if pool not in self.core.silent:
            task = self.loop.create_task(self.command([{"op": "_silent", "pool": pool}]))
            task.add_done_callback(lambda done: done.exception())

    def _holders_gone(self, found: list[tuple[str, Holder, str]]) -> None:
        """Ray knows that these processes are dead."""
        task = self.loop.create_task(self.command([{"op": "_holders_gone", "found": found}]))
        task.add_done_callback(lambda done: done.exception())

    def _forget(self) -> None:
        self.loop.call_later(_FORGET_EVERY_S, self._forget)
        task = self.loop.create_task(self.command([{"op": "_forget"}]))
        task.add_done_callback(lambda done: done.exception())

    # --- operations

    def operations(self) -> dict[str, Any]:
        return {
            "submit": self._op_submit,
            "room": self._op_room,
            "operate": self._op_operate,
            "release": self._op_release,
            "cancel": self._op_cancel,
            "stopped": self._op_stopped,
            "renew": self._op_renew,
            "leave": self._op_leave,
            "get": self._op_get,
            "list": self._op_list,
            "config": self._op_config,
            "change": self._op_change,
            "status": self._op_status,
            "picture": lambda op: Later(lambda: picture.coordinator_picture(self.core)),
            "exchange": self._op_exchange,
            "declare_lost": self._op_declare_lost,
            "drain": self._op_drain,
            "evict": self._op_evict,
            "announce": self._op_announce,
            "unannounce": self._op_unannounce,
            "copy": lambda op: Later(lambda: copied(self.core)),
            "_silent": lambda op: self.core.set_silent(op["pool"]),
            "_forget": lambda op: self.core.forget(),
            "_holders_gone": self._op_holders_gone,
        }

    def _op_ping(self, op: dict[str, Any]) -> dict[str, Any]:
        """With what clients go by that name no lease of their own."""
        return {**super()._op_ping(op), "lease": self._timings("lease")}

    def _timings(self, section: str) -> dict[str, float]:
        """Seconds of a section of the configuration: as the last change set them, else as the actor was made with."""
        made_with = {name: self.options.get(f"{section}_{name}") for name in TIMINGS[section]}
        found = self.state.timings.get(section, made_with)
        return {name: float(seconds) for name, seconds in found.items() if seconds is not None}

    def _op_submit(self, op: dict[str, Any]) -> dict[str, Any]:
        sent = commands.submission(op)
        validate_options(sent.amounts, sent.options)
        access.check_requester(self.state.requester_keys, sent.requester, op.get("key"))
        holder = holders.check_holder(op.get("holder"))
        request = self.core.submit(
            sent.id,
            sent.requester,
            sent.amounts,
            preemptible=sent.preemptible,
            retries=sent.retries,
            lease_s=sent.lease_s,
            options=sent.options,
            token=sent.token,
            client=sent.client,
            age_s=self._age_s(sent.made_at),
        )
        if request.phase != FINAL:
            holders.seen(self.core, sent.client, holder)
        return self.view(request)

    def _age_s(self, made_at: float | None) -> float | None:
        """By the wall clocks of both, not the core's time, which may be ahead; None where time is a scenario's."""
        return None if made_at is None or isinstance(self.clock, ManualClock) else time.time() - made_at

    def _op_room(self, op: dict[str, Any]) -> dict[str, Any]:
        """So many are about to come in several calls: better refused before the first than after the last."""
        known = self.state.requests
        coming = commands.coming(op)
        check_room(self.state, {name: sum(id not in known for id in ids) for name, ids in coming.items()})
        return {}

    def _found(self, op: dict[str, Any]) -> tuple[Request, str]:
        """The request of an operation, its holder's by token, or any by an operator; and the operator's name."""
        if op.get("operator"):
            by = access.check_operator(self.state.operator_key, op)
            return self.core.find(str(op["id"])), by
        return self.core.find(str(op["id"]), commands.token_hash(op.get("token"))), ""

    def _op_release(self, op: dict[str, Any]) -> Any:
        request, by = self._found(op)
        return Later(lambda: self.view(request)) if self.core.release(request, by) else Deferred(request.id)

    def _op_cancel(self, op: dict[str, Any]) -> Any:
        request, by = self._found(op)
        return Later(lambda: self.view(request)) if self.core.cancel(request, by) else Deferred(request.id)

    def _op_stopped(self, op: dict[str, Any]) -> Later:
        request, by = self._found(op)
        if op.get("k") in (None, request.k):  # a late repetition must not stop the next attempt
            self.core.stopped(request, by)
        return Later(lambda: self.view(request))

    def _op_operate(self, op: dict[str, Any]) -> dict[str, Any]:
        """What an operator does past the coordinator, such as ending its process: may they, and who was it?"""
        what = check_name("what", op.get("what"))
        by = access.check_operator(self.state.operator_key, op)
        self.core.commanded(what, by, "", str(op.get("detail") or "")[:_DETAIL_MAX_CHARS])
        return {}

    def _op_renew(self, op: dict[str, Any]) -> dict[str, Any]:
        renewed, finals, unknown, refused = 0, [], [], []
        client, holder = op.get("client", ""), holders.check_holder(op.get("holder"))
        for id, token in commands.renewals(op):
            request = self.state.requests.get(id)
            if request is None:
                unknown.append(id)
            elif not hmac.compare_digest(request.token, token):
                refused.append(id)
                self.core.denied(id, "renew", commands.caller(op), access.WRONG_TOKEN)
            elif request.phase == FINAL:
                finals.append(id)
            else:
                self.core.renew(request)
                renewed += 1
                if holder and client == request.client:  # it may have come back as another process
                    holders.seen(self.core, client, holder)
        return {"renewed": renewed, "final": finals, "unknown": unknown, "refused": refused}

    def _op_leave(self, op: dict[str, Any]) -> dict[str, Any]:
        """A client's process is about to end: what has a lease ends with it."""
        live: dict[str, list[Request]] = {}
        for id, token in commands.renewals(op):
            request = self.state.requests.get(id)
            if request is not None and request.phase != FINAL and request.lease_s > 0:
                check_token(request, token)
                live.setdefault(request.client, []).append(request)
        for client, requests in live.items():
            holders.end(self.core, client, sorted(requests, key=lambda r: r.age), holders.EXITED)
        return {"ended": sum(map(len, live.values()))}

    def _op_holders_gone(self, op: dict[str, Any]) -> None:
        for client, holder, why in op["found"]:
            holders.gone(self.core, client, holder, why)

    def _op_get(self, op: dict[str, Any]) -> list[dict[str, Any] | None]:
        found = (self.state.requests.get(id) for id in commands.ids(op))
        return [self.view(request) if request is not None else None for request in found]

    def _op_list(self, op: dict[str, Any]) -> dict[str, Any]:
        found = matching(self.state, op)
        return {
            "requests": [self.view(r) for r in found[: int(op.get("limit") or _LIST_MAX)]],
            "total": len(found),
        }

    def _op_config(self, op: dict[str, Any]) -> dict[str, Any]:
        timings = {section: self._timings(section) for section in TIMINGS}
        made = {"namespace": self.namespace, "store": self.store_address, "options": self.options}
        return {**made, **config_of(self.state), "timings": timings}

    def _op_change(self, op: dict[str, Any]) -> dict[str, Any]:
        by = access.check_operator(self.state.operator_key, op)
        changes = commands.changes(op["changes"])
        id = check_name("id", op["id"]) if op.get("id") else ""
        return {"version": self.core.change(changes, id, by, commands.since(op))}

    def _op_evict(self, op: dict[str, Any]) -> dict[str, Any]:
        by = access.check_operator(self.state.operator_key, op)
        return {"told": evict(self.core, check_name("pool", op.get("pool")), by)}

    def _op_announce(self, op: dict[str, Any]) -> dict[str, Any]:
        return self.wishes.announce(op)

    def _op_unannounce(self, op: dict[str, Any]) -> dict[str, Any]:
        return self.wishes.unannounce(op)

    def _op_status(self, op: dict[str, Any]) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for request in self.state.requests.values():
            counts[request.shown] = counts.get(request.shown, 0) + 1
        return {
            "epoch": self.epoch,
            "seq": self.state.seq,
            "version": self.state.version,
            "namespace": self.namespace,
            "store": self.store.where,
            "pools": sorted(self.state.pools),
            "requests": counts,
            "silent": sorted(self.core.silent),
            "trouble": {
                **{pool: peer.trouble for pool, peer in sorted(self._peers.items()) if peer.trouble},
                **{pool: str(error) for pool, error in sorted(self._losses.items())},
            },
            # what pools say of this log, if it lost something
            "lost": self._lost_here(),
            # pools that this run has not heard yet
            "unheard": sorted(set(self.state.pools) - self.core.greeted),
            **self.wishes.status(),
            "holders": {
                "watched": len(holders.watched(self.core)),
                "trouble": self._holder_watch.trouble if self._holder_watch is not None else "not watched",
            },
        }

    def _op_exchange(self, op: dict[str, Any]) -> Later:
        message, is_answer = message_of(op), "pool" in op
        pool = op["pool"] if is_answer else str(op["from"]).removeprefix("pool:")
        asked_in = int(op.get("asked_in", 0))
        try:
            self.core.check(pool, message, asked_in)
        except ShorterLog as error:
            self._losses[pool] = error
            raise
        except StalePeer:
            # a zombie, or the pool itself with a log that went back: its answer tells
            if pool in self.state.pools:
                self._ask([pool])
            raise
        self._losses.pop(pool, None)
        if is_answer:
            self._heard(pool)
        if not (pool in self._unheard or self._lost_here()):
            self.core.exchange(pool, message, asked_in)
        return Later(lambda: answer_to(op, self.core.outgoing(pool)))

    def _op_declare_lost(self, op: dict[str, Any]) -> dict[str, Any]:
        pool = check_name("pool", op.get("pool"))
        id = check_name("id", op.get("id"))
        operator = access.check_operator(self.state.operator_key, {"operator": "", **op})
        if not operator:
            raise BadInput("operator", op.get("operator"), "the name of who says that the log is lost")
        version = declare_lost(self.core, pool, operator, id)
        self._losses.pop(pool, None)
        if pool in self.state.pools:
            peer = self._peer(pool)
            peer.trouble = peer.lost = ""  # of what is no more
        return {"version": version, "uid": self.state.uids.get(pool, "")}

    def _carry_out(self, op: dict[str, Any]) -> Any:
        """Nothing is promised by a coordinator whose own log lost something that a pool remembers."""
        if op.get("op") in _WRITES and (lost_here := self._lost_here()):
            return Refused(SHORTER_LOG, lost_here, {"log": "coordinator"})
        result = super()._carry_out(op)
        if isinstance(result, Refused) and result.code in access.DENIALS:  # durable before it is answered
            self.core.denied(commands.about(op), op["op"], commands.caller(op), result.code)
        return result

    def _op_drain(self, op: dict[str, Any]) -> dict[str, Any]:
        """The pools are taken down: whatever was asked of the autoscaler is taken back."""
        self.core.commanded("down", access.check_operator(self.state.operator_key, op))
        self.wishes.end()
        return {}

    # --- what a client sees

    def view(self, request: Request) -> dict[str, Any]:
        """A request as the wire shows it (docs/protocol.md, "Wire")."""
        return view_of(self.state, request, self.core.now)

    def _changes(self, asked: wire.Wait) -> list[dict[str, Any]]:
        if asked.after > self.state.seq:  # of a log that lost its end, or one of before: worth nothing here
            asked = asked._replace(after=0)
        found: list[Request] = []
        for id in reversed(self.state.of_client.get(asked.client, {})):
            request = self.state.requests[id]
            if request.changed_seq <= asked.after:
                break
            found.append(request)
        for id in asked.ids:
            other = self.state.requests.get(id)
            if other is not None and other.client != asked.client and other.changed_seq > asked.after:
                found.append(other)
        return [self.view(request) for request in sorted(found, key=lambda each: each.changed_seq)]

    async def wait(self, request: bytes) -> bytes:
        """A client's long poll: answers with what changed, at once or when it does."""
        try:
            asked = wire.decode_wait(request)
        except PoolsError as error:
            return wire.encode_failure(error)
        changes = self._changes(asked)
        if not changes and asked.timeout_s > 0:
            waiter = self.loop.create_future()
            subjects = [("client", asked.client), *(("id", id) for id in asked.ids)]
            for subject in subjects:
                self._waiters.setdefault(subject, set()).add(waiter)
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(waiter, asked.timeout_s)
            finally:
                for subject in subjects:
                    self._waiters[subject].discard(waiter)
                    if not self._waiters[subject]:
                        del self._waiters[subject]
            changes = self._changes(asked)
        return wire.encode_changes(self.state.seq, changes)


class CoordinatorActor:
    """What Ray runs: two methods that never change."""

    async def __init__(self, store_address: str, namespace: str, options: dict[str, Any]) -> None:  # type: ignore[misc]
        self._shell = CoordinatorShell(store_address, namespace, options)

    async def call(self, request: bytes) -> bytes:
        """Operations, and their results."""
        return await self._shell.call(request)

    async def wait(self, request: bytes) -> bytes:
        """The long poll of one client process."""
        return await self._shell.wait(request)
