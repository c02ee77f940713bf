"""Coordinator and pools as live actors run them, in one process: real cores, real logs in memory, a bad network.

Each actor works in turns as `actors/shell.py` has them: commands, what the core does by itself, one append, and only
then messages and effects. A turn whose append fails is undone (`_undo` there): the core is rebuilt from the log, and
whoever called gets the error. Messages travel as bytes through `air`, where a test may drop, repeat or delay them.
Placement groups are errands: they come up, fail or are removed when a test says so, and die with their pool's process.
An `Auditor` hears every row at the moment it becomes durable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgpack
from auditor import Auditor
from property_worlds import still_kept

from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.link import Message
from ray_pools.core.pool import Place, Pool, Step, Unplace
from ray_pools.core.pool_state import PoolState
from ray_pools.errors import PoolsError
from ray_pools.store import AppendFailed, Store, open_store
from ray_pools.store.memory import forget, memory_log

COORDINATOR = "coordinator"
ROUNDS_MAX = 300

_worlds = itertools.count()


class Flight(NamedTuple):
    """A message on its way. A call is answered; an answer is not."""

    sender: str
    to: str
    body: bytes
    is_call: bool


class Errand(NamedTuple):
    """What a pool's process still has to do about a placement group."""

    pool: str
    effect: Place | Unplace


class Stopped(NamedTuple):
    """The process of an actor that has been replaced, and does not know."""

    core: Coordinator | Pool
    store: Store


class LiveStyle:
    """See the module's docstring. `now` is everybody's clock; a test moves it."""

    def __init__(self, pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig] = ()) -> None:
        self.address = f"memory:live-style-{next(_worlds)}"
        self.now = 0.0
        self.auditor = Auditor()
        self.air: list[Flight] = []
        self.errands: list[Errand] = []
        self.stores: dict[str, Store] = {}
        self.cores: dict[str, Any] = {}
        # what messages were refused with, and how many turns failed, while `run` went on
        self.refusals: list[PoolsError] = []
        self.failed_turns = 0
        # how many more appends of an actor succeed before one fails
        self.fails_in: dict[str, int] = {}
        for who in (COORDINATOR, *pools):
            self.restart(who)
        changes = [("pool", pool, name + "#1") for name, pool in pools.items()]
        self.ask("change", [*changes, *(("policy", policy) for policy in policies)])
        self.run()

    def close(self) -> None:
        """Drops the logs."""
        forget(self.address)

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator's core as it runs now: a failed turn and a restart replace it."""
        core: Coordinator = self.cores[COORDINATOR]
        return core

    def pool(self, name: str) -> Pool:
        """The core of a pool as it runs now."""
        core: Pool = self.cores[name]
        return core

    @property
    def pools(self) -> list[str]:
        """Names of all pools that have a process."""
        return [who for who in self.cores if who != COORDINATOR]

    # --- actors

    def restart(self, who: str) -> Stopped | None:
        """The process ends wherever it is; its successor has the log and nothing else. Returns the zombie."""
        before = Stopped(self.cores[who], self.stores[who]) if who in self.cores else None
        self.stores[who] = open_store(self.address, who if who == COORDINATOR else "pool:" + who)
        epoch = self.stores[who].open()
        self.errands = [errand for errand in self.errands if errand.pool != who]
        self.cores[who] = self._new_core(who, epoch)
        return before

    def _new_core(self, who: str, epoch: int) -> Coordinator | Pool:
        state: Any = CoordinatorState() if who == COORDINATOR else PoolState()
        for row in self.stores[who].read():
            state.apply(ev.unpack(row.body), row.at)
        if who == COORDINATOR:
            return Coordinator(state, epoch, self.now)
        return Pool(who, state, epoch, self.now)

    def fail_next_append(self, who: str) -> None:
        """The disk is full when this actor next has something to write."""
        log = memory_log(self.address, who if who == COORDINATOR else "pool:" + who)
        assert log is not None
        log.next_fault = "full"

    def _count_down(self, who: str) -> None:
        left = self.fails_in.pop(who, None)
        if left == 0:
            self.fail_next_append(who)
        elif left is not None:
            self.fails_in[who] = left - 1

    def turn(self, who: str, command: Callable[[Any], Any] | None = None) -> Any:
        """One turn around one command. Raises what refused it, or AppendFailed with nothing of it done."""
        core = self.cores[who]
        before, soft = core.state.seq, core.soft()
        core.set_time(self.now)
        result, refused = None, None
        if command is not None:
            try:
                result = command(core)
            except PoolsError as error:
                refused = error
        core.tick()
        if isinstance(core, Pool):
            core.walk()
        step = core.take_step()
        try:
            if step.events:
                self._count_down(who)
                self.stores[who].append([(core.now, ev.pack(event)) for event in step.events], before)
        except AppendFailed:
            self.cores[who] = self._new_core(who, core.epoch)
            self.cores[who].resume(soft, core)
            raise
        for event in step.events:
            self.auditor.hear(who, event)
        if isinstance(step, Step):
            known = set(map(repr, self.errands))
            self.errands += [
                e for e in (Errand(who, effect) for effect in step.effects) if repr(e) not in known
            ]
        if refused is not None:
            raise refused
        return result

    # --- commands of clients

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A turn of the coordinator that calls one of its methods."""
        return self.turn(COORDINATOR, lambda core: getattr(core, method)(*args, **kwargs))

    def submit(self, id: str, requester: str, gpu: int, **options: Any) -> None:
        """A request for GPUs enters."""
        self.ask("submit", id, requester, {"gpu": gpu}, **options)

    def about(self, method: str, id: str) -> Any:
        """release, cancel, renew or stopped, by id."""
        return self.turn(COORDINATOR, lambda core: getattr(core, method)(core.find(id)))

    # --- messages

    def peers(self, who: str) -> list[str]:
        """Whom an actor speaks to. One that is no pool any more speaks to nobody."""
        pools = self.coordinator.state.pools
        if who != COORDINATOR:
            return [COORDINATOR] if who in pools else []
        return [name for name in self.pools if name in pools]

    def has_news(self, sender: str, to: str) -> bool:
        """The sender would call this peer now."""
        if sender != COORDINATOR:
            return self.pool(sender).has_news
        return self.coordinator.has_news(to)

    def send(self, sender: str, to: str, *, is_call: bool = True) -> None:
        """All that the other side does not have yet goes into the air."""
        core = self.cores[sender]
        message = core.outgoing(to) if sender == COORDINATOR else core.outgoing()
        self.air.append(Flight(sender, to, msgpack.packb(list(message)), is_call))

    def deliver(self, flight: Flight) -> None:
        """The message arrives (it need not be in the air any more). A call that was worked in is answered.

        Raises:
            PoolsError: what the caller gets for an answer, if anybody still waits for it.
        """
        message = Message(*msgpack.unpackb(flight.body, strict_map_key=False))
        if flight.to == COORDINATOR:
            self.turn(COORDINATOR, lambda core: core.exchange(flight.sender, message))
        else:
            self.turn(flight.to, lambda core: core.exchange(message))
        if flight.is_call:
            self.send(flight.to, flight.sender, is_call=False)

    def exchange(self, caller: str, to: str) -> None:
        """One call and its answer, without loss."""
        self.send(caller, to)
        self.deliver(self.air.pop())
        self.deliver(self.air.pop())

    def settle_errand(self, place: int = 0) -> None:
        """The pool's process does an errand: the group is there, or gone."""
        pool, effect = self.errands[place]
        if isinstance(effect, Place):
            self.turn(pool, lambda core: core.placed(effect.id, effect.k, {"pg": f"{effect.id}/{effect.k}"}))
        else:
            self.turn(pool, lambda core: core.gone(effect.id, effect.k))
        self.errands.remove(Errand(pool, effect))

    def not_placed(self, id: str) -> None:
        """The group of a grant does not come up in time."""
        errand = next(e for e in self.errands if isinstance(e.effect, Place) and e.effect.id == id)
        pool, effect = errand
        self.turn(pool, lambda core: core.unplaced(id, effect.k, "not placed within 60 s"))
        self.errands.remove(errand)

    # --- until nothing moves

    def run(self, *, errands: bool = True) -> None:
        """Everything arrives, whoever has news says it, until nobody has any. Turns that fail are taken again."""
        for _ in range(ROUNDS_MAX):
            while self.air:
                flight = self.air.pop(0)
                self.try_to(lambda: self.deliver(flight))  # noqa: B023 - called at once
            for _ in range(len(self.errands) if errands else 0):
                self.try_to(self.settle_errand)
            for who in list(self.cores):
                self.try_to(lambda: self.turn(who))  # noqa: B023 - called at once
                for to in self.peers(who):
                    if self.has_news(who, to):
                        self.send(who, to)
            if not self.air and not (errands and self.errands):
                return
        raise AssertionError(f"messages without an end: {self.air[:3]}")

    def try_to(self, act: Callable[[], Any]) -> bool:
        """What actors do with a message or a report: whatever refuses it, they go on. False: it was refused."""
        try:
            act()
        except AppendFailed:
            self.failed_turns += 1
        except PoolsError as error:  # of a zombie, or about a pool that is there no more
            self.refusals.append(error)
        else:
            return True
        return False

    def advance(self, until: float) -> None:
        """Time goes on, and stops wherever it changes something."""
        for _ in range(ROUNDS_MAX):
            due = [at for core in self.cores.values() if (at := core.next_event_at()) is not None]
            if not due or min(due) > until:
                break
            self.now = max(self.now, min(due))
            self.run()
        else:
            raise AssertionError("time brings something new without an end")
        self.now = max(self.now, until)
        self.run()

    # --- what is to be seen

    def states(self) -> dict[str, str]:
        """Id to state, with `@pool` where it holds (docs/rules.md section 8)."""
        return {
            id: f"{request.shown}@{request.owner}"
            if request.shown in ("allocated", "preempting")
            else request.shown
            for id, request in self.coordinator.state.requests.items()
        }

    def held(self, name: str) -> dict[str, int]:
        """Per metered key what a pool holds."""
        return self.pool(name).state.usage()

    def left_behind(self) -> list[str]:
        """What is still there although every request is final and all has arrived."""
        found = [
            f"{id} is {state}" for id, state in self.states().items() if "@" in state or state == "queued"
        ]
        for name in self.peers(COORDINATOR):
            found += still_kept(name, self.pool(name))
        if self.coordinator.leases or self.coordinator.state.waiting_or_holding:
            found.append(f"the coordinator keeps {sorted(self.coordinator.leases)}")
        return [*found, *self.auditor.still_held()]
