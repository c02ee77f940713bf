"""Coordinator and pools as live actors run them, on a network that loses, repeats, delays and reorders messages.

Each actor's turn is all or nothing: commands, what the core does by itself, the append; then messages. A crash may
strike before the append (nothing of the turn happened) or after it (nobody heard of it). Whoever has news says it
again until it is acknowledged; that is all that the protocol asks of the network. Placement groups are a name: they
come up or not, are lost or removed, some time after the pool asked for it, and its process may die in between.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgpack
from property_worlds import Held, broken_rules, disagreements, held_in, kept, summed, unlike

from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.link import Message, StalePeer
from ray_pools.core.pool import Place, Pool, Step, Unplace
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import GRANTED

COORDINATOR = ""
ROUNDS_MAX = 300


class Flight(NamedTuple):
    """A message on its way. A call is answered, an answer is not."""

    sender: str
    to: str
    body: bytes
    is_call: bool


class Net:
    """See the module's docstring. `rng` decides what the network does."""

    def __init__(
        self, pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig], rng: random.Random
    ) -> None:
        self.rng = rng
        self.now = 0.0
        self.logs: dict[str, list[tuple[float, bytes]]] = {who: [] for who in (COORDINATOR, *pools)}
        self.epochs: Counter[str] = Counter()
        self.air: list[Flight] = []
        # what the pools' processes still do about placement groups; it dies with them
        self.jobs: list[tuple[str, Place | Unplace]] = []
        self.problems: list[str] = []
        self.seen: Counter[str] = Counter()
        self.before: Held = Counter()
        self.pools: dict[str, Pool] = {}
        for who in self.logs:
            self.open(who)
        changes = [("pool", pool, name + "#1") for name, pool in pools.items()]
        self.coordinator.change([*changes, *(("policy", policy) for policy in policies)])
        self._end_turn(COORDINATOR)
        self.quiet_down()

    # --- actors

    def open(self, who: str) -> None:
        """The actor starts, with what its log tells and nothing else."""
        self.epochs[who] += 1
        self.jobs = [job for job in self.jobs if job[0] != who]
        state = PoolState() if who else CoordinatorState()
        for at, body in self.logs[who]:
            state.apply(ev.unpack(body), at)
        if isinstance(state, PoolState):
            self.pools[who] = Pool(who, state, self.epochs[who], self.now)
        else:
            self.coordinator = Coordinator(state, self.epochs[who], self.now)

    def turn(self, who: str, command: Callable[[], object] = lambda: None, crash: float = 0.0) -> None:
        """One turn, or what a crash leaves of it."""
        core = self.pools[who] if who else self.coordinator
        core.set_time(self.now)
        command()
        core.tick()
        if isinstance(core, Pool):
            core.walk()
        if self.rng.random() < crash:
            self.seen["crash before the append"] += 1
            self.open(who)
        else:
            self._end_turn(who)
            if self.rng.random() < crash:
                self.seen["crash after the append"] += 1
                self.open(who)
        self._look()

    def _end_turn(self, who: str) -> None:
        core = self.pools[who] if who else self.coordinator
        step = core.take_step()
        self.logs[who] += [(self.now, ev.pack(event)) for event in step.events]
        if isinstance(step, Step):
            self.jobs += [(who, effect) for effect in step.effects]

    def submit(self, id: str, requester: str, amounts: dict[str, int], **options: Any) -> None:
        """A turn of the coordinator that takes a submission."""

        def command() -> None:
            self.coordinator.submit(id, requester, amounts, **options)

        self.turn(COORDINATOR, command)

    # --- messages

    def speak(self, who: str) -> None:
        """Whoever has news says it."""
        if who:
            if self.pools[who].has_news:
                self.send(who, COORDINATOR)
            return
        for name in self.pools:
            if self.coordinator.has_news(name):
                self.send(COORDINATOR, name)

    def send(self, sender: str, to: str) -> None:
        """All that the receiver does not have yet goes into the air."""
        self._put(sender, to, True)

    def _put(self, sender: str, to: str, is_call: bool) -> None:
        message = self.pools[sender].outgoing() if sender else self.coordinator.outgoing(to)
        self.air.append(Flight(sender, to, msgpack.packb(list(message)), is_call))

    def deliver(self, place: int, crash: float = 0.0) -> None:
        """The message arrives; a call is answered with all that its receiver has to say."""
        sender, to, body, is_call = self.air[place]
        message = Message(*msgpack.unpackb(body, strict_map_key=False))
        epoch = self.epochs[to]

        def hear() -> None:
            try:
                if to:
                    self.pools[to].exchange(message)
                else:
                    self.coordinator.exchange(sender, message)
            except StalePeer:
                self.seen["stale"] += 1

        self.turn(to, hear, crash)
        if is_call and self.epochs[to] == epoch:
            self._put(to, sender, False)

    def deliver_all(self) -> None:
        """What is in the air arrives, in order, and so do the answers."""
        while self.air:
            self.deliver(0)
            del self.air[0]

    # --- placement groups

    def work(self, place: int, fails: float = 0.0) -> None:
        """One of the pools' errands is done, or the group does not come up in time."""
        who, effect = self.jobs.pop(place)
        pool = self.pools[who]
        if isinstance(effect, Unplace):
            self.turn(who, lambda: pool.gone(effect.id, effect.k))
        elif self.rng.random() < fails:
            self.seen["not placed"] += 1
            self.turn(who, lambda: pool.unplaced(effect.id, effect.k, "not placed: too few nodes"))
        else:
            self.turn(who, lambda: pool.placed(effect.id, effect.k, {"pg": f"{effect.id}-{effect.k}"}))

    def lose_group(self) -> None:
        """A group whose node died."""
        who = self.rng.choice(list(self.pools))
        pool = self.pools[who]
        grants = [one for one in pool.state.attempts.values() if one.state == GRANTED and one.placed]
        if grants:
            self.seen["group lost"] += 1
            one = self.rng.choice(grants)
            self.turn(who, lambda: pool.unplaced(one.id, one.k, "its node is gone"))

    def shake(self) -> None:
        """One thing that a bad network or a bad machine does."""
        what = self.rng.random()
        if what < 0.25:
            self.speak(self.rng.choice(list(self.logs)))
        elif what < 0.32:
            self.open(self.rng.choice(list(self.logs)))
            self.seen["restart"] += 1
        elif what < 0.36:
            self.turn(self.rng.choice(list(self.logs)))
        elif what < 0.38:
            self.lose_group()
        elif what < 0.4:  # it can't be reached for a while: its answers count as no
            silent = self.rng.choice(list(self.pools))
            self.turn(COORDINATOR, lambda: self.coordinator.set_silent(silent))
        elif what < 0.5:
            if self.jobs:
                self.work(self.rng.randrange(len(self.jobs)), fails=0.2)
        elif self.air:
            place = self.rng.randrange(len(self.air))
            if what < 0.6:
                self.seen["lost"] += 1
                del self.air[place]
                return
            self.deliver(place, crash=0.03)
            if what < 0.7:
                self.seen["repeated"] += 1  # it stays in the air, and may arrive long after
            else:
                del self.air[place]

    # --- the end

    def quiet_down(self) -> None:
        """From here on everything arrives at last: until nobody has news."""
        for _ in range(ROUNDS_MAX):
            self.deliver_all()
            while self.jobs:
                self.work(0)
            for who in self.logs:
                self.turn(who)
                self.speak(who)
            if not self.air and not self.jobs:
                return
        raise AssertionError(f"messages without an end: {self.air[:3]}")

    def run_out(self) -> None:
        """Time goes on until it changes nothing any more."""
        for _ in range(ROUNDS_MAX):
            self.quiet_down()
            cores: list[Coordinator | Pool] = [self.coordinator, *self.pools.values()]
            times = [at for core in cores if (at := core.next_event_at()) is not None]
            if not times:
                return
            self.now = max(self.now, min(times))
        raise AssertionError("time brings something new without an end")

    # --- what must hold

    def _look(self) -> None:
        states = {name: pool.state for name, pool in self.pools.items()}
        now = held_in(states)
        self.problems += broken_rules(states, self.before, now)
        self.before = now
        for name, pool in self.pools.items():
            different = unlike(kept(pool.state), summed(pool.state, pool.promised.values()))
            if different:
                self.problems.append(f"ledger of {name}, kept and summed: {different}")

    def states(self) -> dict[str, str]:
        """Id to state, as the coordinator shows it."""
        return {id: request.shown for id, request in self.coordinator.state.requests.items()}

    def loose_ends(self) -> list[str]:
        """What is not as it must be once all has arrived: sides that disagree, and work that could go on."""
        states = {name: pool.state for name, pool in self.pools.items()}
        found = disagreements(self.coordinator.state, states)
        for name, pool in self.pools.items():
            if pool.promised:
                found.append(f"{name} keeps room for {sorted(pool.promised)}")
            if pool.first_grant() is not None or pool.first_preemption() is not None:
                found.append(f"{name} could go on")
        return found
