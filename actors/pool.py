"""A pool's actor: a shell around `ray_pools.core.pool`, and the placement groups of its grants."""

from __future__ import annotations

import asyncio
from typing import Any

from ray_pools import wire
from ray_pools.actors.peer import BEAT_S, PeerCaller, answer_to, beat_after_s, message_of
from ray_pools.actors.placement import Placer
from ray_pools.actors.shell import Later, Shell
from ray_pools.core import explain, status
from ray_pools.core.link import Message
from ray_pools.core.meter import PoolMeter
from ray_pools.core.picture import pool_picture
from ray_pools.core.pool import BeginAnew, Place, Pool, Step, Unplace
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import ENDING, HOLDING
from ray_pools.errors import PoolsError

# The coordinator's own message brings our news back; what it did not is said again after this long.
RESEND_S = 0.5
_QUEUE_SHOWN = 100
_REPORT_AGAIN_S = 1.0


class PoolShell(Shell):
    """Operations, the coordinator and placement around a pool's core."""

    state: PoolState
    core: Pool

    def __init__(self, store_address: str, namespace: str, pool: str, options: dict[str, Any]) -> None:
        self.pool = pool
        self.namespace = namespace
        self._answered = False
        # the coordinator has answered this run, and so knows no longer log; and no group of nobody stands
        self.welcome = False
        self._clearing = False
        # the coordinator is called although there is nothing to tell it
        self._asking = False
        self._heard_at = 0.0
        self._beat_s = float(options.get("beat_s", BEAT_S))
        self._effects: list[Any] = []
        self._reports: set[asyncio.Task[None]] = set()
        self._resend_s = float(options.get("resend_s", RESEND_S))
        self._placement: Any = None
        self.placer = Placer(namespace, pool, self._post)
        super().__init__("pool:" + pool, store_address, options.get("clock", "wall"))
        self.coordinator = PeerCaller(
            wire.coordinator_actor_name(),
            namespace,
            "pool:" + pool,
            self._outgoing,
            lambda answer, asked: self.command(
                [{"op": "exchange", "message": list(answer), "answer": True, "asked_in": asked.seen_epoch}]
            ),
        )
        self.start_metrics(PoolMeter(pool, self.state), namespace, options)
        self.schedule_turn()
        self.loop.call_later(beat_after_s(self._beat_s), self._beat)

    # --- the core

    def new_state(self, dumped: dict[str, Any] | None) -> PoolState:
        return PoolState.load(dumped) if dumped else PoolState()

    def new_core(self, state: PoolState) -> Pool:
        return Pool(self.pool, state, self.epoch, self.clock.now())

    def settle(self) -> None:
        if self.welcome:
            self.core.tick()
            self.core.walk()

    def _outgoing(self) -> Message | None:
        due = self.core.has_news or not self.welcome or self._asking
        self._asking = False
        return self.core.outgoing() if due else None

    def _ask(self) -> None:
        self._asking = True
        self.coordinator.poke()

    def _beat(self) -> None:
        """The coordinator calls often enough, if it knows of this pool: a log that was lost does not."""
        self.loop.call_later(beat_after_s(self._beat_s), self._beat)
        if self.loop.time() - max(self._heard_at, self.coordinator.spoke_at) > 1.5 * self._beat_s:
            self._ask()

    def after_turn(self, step: Step) -> None:
        if any(isinstance(effect, BeginAnew) for effect in step.effects):
            self._die("it was declared lost: a new run removes what stands of its grants, and begins anew")
        self._effects += step.effects
        if self.welcome:
            self._run_effects()
        if not self.welcome:
            self.coordinator.poke()
        elif self.core.has_news:
            self.coordinator.poke(self._resend_s if self._answered else 0.0)
        self._answered = False

    def _run_effects(self) -> None:
        self._configure_placer()
        for effect in self._effects:
            if isinstance(effect, Place):
                self.placer.place(effect.id, effect.k, effect.amounts, effect.options)
            elif isinstance(effect, Unplace):
                self.placer.unplace(effect.id, effect.k)
        self._effects.clear()

    def _accepted(self, message: Message) -> None:
        """The coordinator knows no longer log of this pool: what stands in it may be acted upon.

        Before that nobody is granted, stopped or cleared away: a log that lost its end knows nothing of grants that
        others hold. And before groups of nobody are gone nothing that the coordinator says is done: they may be those
        of a pool that was declared lost, whose requests must not go on elsewhere while their work runs here.
        """
        if self._clearing:
            return
        self._configure_placer()
        attempts = self.state.attempts.values()
        grouped = any(a.placed and a.placed.get("pg") for a in attempts)
        told = any(item[2] == "configure" and item[5].get("placement") for item in message.items)
        if not (self.state.places or grouped or told):
            self.welcome = True
            self.core.exchange(message)
            return
        self._clearing = True
        holding = [a for a in attempts if a.state in HOLDING]
        self.placer.reconcile(
            {(a.id, a.k) for a in holding},
            {(a.id, a.k): a.placed for a in holding if a.state != ENDING and a.placed and a.placed.get("pg")},
        )

    def _op_cleared(self, op: dict[str, Any]) -> None:
        self._clearing, self.welcome = False, True
        self._ask()

    def has_news(self) -> bool:
        return self.core.has_news or not self.welcome

    def _configure_placer(self) -> None:
        placement = self.state.config.placement if self.state.config else None
        if placement != self._placement:
            self._placement = placement
            self.placer.configure(placement)

    def _post(self, kind: str, id: str, k: int, payload: Any = None) -> None:
        """The placer reports, from its own thread."""
        self.loop.call_soon_threadsafe(self._posted, {"op": "_" + kind, "id": id, "k": k, "payload": payload})

    def _posted(self, op: dict[str, Any]) -> None:
        self._reports.add(task := self.loop.create_task(self._report(op)))
        task.add_done_callback(self._reports.discard)

    async def _report(self, op: dict[str, Any]) -> None:
        """What the placer said once must be in the log, also when a turn fails."""
        while isinstance((await self.command([op]))[0], PoolsError):
            await asyncio.sleep(_REPORT_AGAIN_S)

    # --- operations

    def operations(self) -> dict[str, Any]:
        return {
            "exchange": self._op_exchange,
            "explain": self._op_explain,
            "status": self._op_status,
            "picture": lambda op: Later(lambda: pool_picture(self.core)),
            "_placed": lambda op: self.core.placed(op["id"], op["k"], op["payload"] or {}),
            "_unplaced": lambda op: self.core.unplaced(op["id"], op["k"], str(op["payload"])),
            "_cleared": self._op_cleared,
            "_gone": lambda op: self.core.gone(op["id"], op["k"]),
        }

    def _op_exchange(self, op: dict[str, Any]) -> Later:
        message, answer = message_of(op), bool(op.get("answer"))
        self.core.check(message, int(op.get("asked_in", 0)))
        if self.welcome or self.core.is_replaced(message):
            self.core.exchange(message)
            self._answered |= not answer
        elif answer:
            self._accepted(message)
        self._heard_at = self.loop.time()
        return Later(lambda: answer_to(op, self.core.outgoing()))

    def _op_explain(self, op: dict[str, Any]) -> dict[str, Any]:
        attempts = self.state.attempts
        return {id: explain.why(self.core, attempts[id]) for id in op["ids"] if id in attempts}

    def _op_status(self, op: dict[str, Any]) -> dict[str, Any]:
        shown = int(op.get("grants_limit", 0))
        return {
            **status.pool_status(self.core, int(op.get("queue_limit", _QUEUE_SHOWN))),
            **({"grants": status.grants(self.core, shown)} if shown > 0 else {}),
            "epoch": self.epoch,
            "seq": self.state.seq,
            "trouble": self.coordinator.trouble,
        }


class PoolActor:
    """What Ray runs: two methods that never change."""

    async def __init__(  # type: ignore[misc]
        self, store_address: str, namespace: str, pool: str, options: dict[str, Any]
    ) -> None:
        self._shell = PoolShell(store_address, namespace, pool, options)

    async def call(self, request: bytes) -> bytes:
        """Operations, and their results."""
        return await self._shell.call(request)

    async def wait(self, request: bytes) -> bytes:
        """Clients wait at the coordinator; a pool has nothing to wait for yet."""
        return wire.encode_failure(PoolsError("a client waits at the coordinator, not at a pool"))
