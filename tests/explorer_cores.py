"""The real cores under the explorer: one coordinator and its pools, their logs and copies, each with a number.

A *copy* is the core itself, pickled. What it does depends on it and on the command alone, so each turn is taken once
for each (`outcome`). Which steps follow from that, and what a bad environment does, is in `explorer_world.py`.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import msgpack
from property_worlds import kept, summed, unlike

from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.link import Link, Message, is_made_anew
from ray_pools.core.lost import declare_lost
from ray_pools.core.pool import Pool
from ray_pools.core.pool_state import PoolState
from ray_pools.core.requests import FINAL
from ray_pools.errors import PoolsError

ENV = (
    *("crash", "split", "full", "cancel", "attach", "delete", "expel", "shrink", "silent", "unplaced"),
    "declare",
)
UNIT = {name: 4**place for place, name in enumerate(ENV)}  # budgets: two bits each
FOREVER_S = 1e8

# What makes a copy what it is (`_copy`), and what of a core is left aside: it follows from the rest, or time stands
# still, or the turn is over. A test sees to it that nothing is new.
KEY = {
    Pool: "state epoch link bids bid_number bids_due bids_acked promised _bidder _unanswered _needs_walk deadlines",
    Coordinator: "state epoch links bids_seen greeted silent _decided_before",
    Link: "epoch head heard acked index",
}
ASIDE = {
    Pool: "name now opened events effects",
    Coordinator: "now opened retention_s leases denials events touched _decided",
    Link: "me peer went_back bids_ack",
}

Command = tuple[Any, ...]


class Config(NamedTuple):
    """One world, and how often the environment may do what."""

    requests: str = "AB,A"
    gpus: str = "11"
    crash: int = 0
    split: int = 0
    # an append fails, and the turn is undone
    full: int = 0
    cancel: int = 0
    # a policy opens the pools after '>'
    attach: int = 0
    # all policies on pool A are taken away
    delete: int = 0
    # all policies of a requester are taken away
    expel: int = 0
    # pool A loses a GPU
    shrink: int = 0
    silent: int = 0
    # a placement group does not come up
    unplaced: int = 0
    # pool A is declared lost; it may have lost any end of its log, or nothing, and goes on until it hears of it
    declare: int = 0
    # grants are placement groups
    places: int = 0
    # attempts that a request may reach
    k: int = 5
    # an append is no transaction: a crash keeps any first part of a turn's events
    cut: int = 0
    # directives arrive singly and stale ones too, as if the link had no numbers; pools forget no end
    weak: int = 0
    # a turn may take two commands or messages at once
    batch: int = 0
    mutant: str = ""


class Violation(Exception):
    """Something that must hold does not."""


class Copy(NamedTuple):
    """A running copy of an actor. `out`: its messages; `news`: whom it would call; `facts`: what clients may know."""

    who: int
    blob: bytes
    epoch: int
    dump: int
    out: int
    news: frozenset[int]
    facts: int
    # per peer: what of the other's messages is old (epoch, heard, acked, bids)
    views: dict[int, tuple[int, int, int, tuple[int, int]]]


class Part(NamedTuple):
    """An actor: its log and its copies, the newest last."""

    epoch: int
    dump: int
    copies: tuple[int, ...]


class Outcome(NamedTuple):
    """What a turn of a copy came to."""

    copy: int
    events: tuple[Any, ...]


class Cores:
    """Cores, messages and parts, each with a number. Actor 0 is the coordinator, the others are the pools."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.words = config.requests.split(",")
        self.names = ["", *"ABC"[: len(config.gpus)]]
        self.actors = range(len(self.names))
        self.dumps: list[bytes] = []
        self.copies: list[Copy] = []
        self.parts: list[Part] = []
        self.messages: list[tuple[int, int, Message]] = []
        self.facts: list[tuple[Any, ...]] = []
        self._numbers: dict[Any, int] = {}
        self._states: dict[int, Any] = {}
        self._outcomes: dict[Any, Outcome | None] = {}
        self._fresh: dict[tuple[int, int, int], int] = {}
        self.masks = [0 for _ in self.actors]
        self.inbox: list[list[int]] = [[] for _ in self.actors]

    # --- configuration

    def _policy(self, r: int, pool: str) -> PolicyConfig:
        word = self.words[r]
        order = [letter for letter in word if letter in "ABC"]
        reserved = {"gpu": 1} if "+" in word else {}
        return PolicyConfig(pool, f"u{r}", len(order) - order.index(pool), reserved)

    def _pool_config(self, name: str, gpu: int) -> PoolConfig:
        placement = {"resources": {}, "labels": {}, "node": {}, "strategy": "PACK", "warm": {}}
        return PoolConfig(
            name,
            {"gpu": gpu},
            grace_s=FOREVER_S,
            min_runtime_s=0.0 if "+" in self.config.requests else FOREVER_S,
            placement={**placement, "provision_timeout_s": 60.0} if self.config.places else None,
        )

    def initial(self) -> tuple[int, ...]:
        """All actors run, and the pools are configured; nothing was submitted yet."""
        cores: list[Any] = [Coordinator(CoordinatorState(), 1, 0.0)]
        cores += [Pool(name, PoolState(), 1, 0.0) for name in self.names[1:]]
        changes: list[tuple[Any, ...]] = [
            ("pool", self._pool_config(name, int(self.config.gpus[i])), name + "#1")
            for i, name in enumerate(self.names[1:])
        ]
        for r, word in enumerate(self.words):
            changes += [("policy", self._policy(r, p)) for p in word.split(">")[0] if p in "ABC"]
        cores[0].change(changes)
        self._end_turn(0, cores[0])
        for _ in range(4):
            for p in self.actors[1:]:
                cores[p].exchange(self._outgoing(0, cores[0], p))
                self._end_turn(p, cores[p])
                cores[0].exchange(self.names[p], self._outgoing(p, cores[p], 0))
                self._end_turn(0, cores[0])
        # the links as they are are durable, too
        for p in self.actors[1:]:
            link = cores[0].links[self.names[p]]
            cores[0].state.peers[self.names[p]] = ev.Peer(self.names[p], 1, 0, link.heard, link.acked)
            link = cores[p].link
            cores[p].state.peer = ev.Peer("coordinator", 1, 0, link.heard, link.acked)
        parts = []
        for who in self.actors:
            copy = self._copy(who, cores[who])
            parts.append(self.part(who, 1, self.copies[copy].dump, (copy,)))
        budgets = sum(getattr(self.config, name) * UNIT[name] for name in ENV)
        return (*parts, 0, budgets, 0)

    # --- numbers

    def _number(self, table: list[Any], key: Any, value: Any) -> int:
        key = (id(table), key)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(table)
            table.append(value)
        return number

    def part(self, who: int, epoch: int, dump: int, copies: tuple[int, ...]) -> int:
        """The number of a part."""
        return self._number(self.parts, (who, epoch, dump, copies), Part(epoch, dump, copies))

    def fact(self, *fact: Any) -> int:
        """The bit of something that a client may know."""
        return 1 << self._number(self.facts, fact, fact)

    def state(self, who: int, dump: int) -> Any:
        """The fold of a log; nobody changes it."""
        found = self._states.get(dump)
        if found is None:
            found = self._states[dump] = self._load(who, dump)
        return found

    def _load(self, who: int, dump: int) -> Any:
        plain = msgpack.unpackb(self.dumps[dump], strict_map_key=False)
        return PoolState.load(plain) if who else CoordinatorState.load(plain)

    # --- cores

    def _outgoing(self, who: int, core: Any, to: int) -> Message:
        link = core.link if who else core.links[self.names[to]]
        due = link.due()
        message: Message = core.outgoing() if who else core.outgoing(self.names[to])
        # what is older than the last declaration must be known for that; else no length counts
        anew = 0 if who else int(is_made_anew(message.uid)) * int(message.uid.partition("+")[2] or 0)
        return message._replace(
            head=anew, opened=anew, seen_epoch=0, seen_head=0, upto=due[-1][1] if due else link.acked
        )

    def _end_turn(self, who: int, core: Any) -> tuple[Any, ...]:
        """What the core does by itself; the events of the turn."""
        core.tick()
        if who:
            core.walk()
        events = tuple(core.take_step().events)
        self._forget_numbers(who, core.state, events)
        return events

    @staticmethod
    def _forget_numbers(who: int, state: Any, events: tuple[Any, ...]) -> None:
        """Numbers that nothing is compared with."""
        state.seq -= sum(isinstance(event, ev.Peer) for event in events)
        if not who:
            for request in state.requests.values():
                request.changed_seq = 0

    def _copy(self, who: int, core: Any) -> int:
        """The number of a core as it is."""
        dump = msgpack.packb(core.state.dump())
        names = self.names
        if who:
            link = core.link
            links: tuple[Any, ...] = (
                (link.epoch, link.head, link.heard, link.acked, tuple(link.index.items())),
            )
            soft: tuple[Any, ...] = (
                tuple(core.bids.items()),
                core.bid_number,
                tuple(core.bids_due.items()),
                core.bids_acked,
                tuple(core.promised),
                core._bidder,
                tuple(core._unanswered),
                core._needs_walk,
                tuple(sorted(core.deadlines)),
            )
        else:
            links = tuple(
                (lk.epoch, lk.head, lk.heard, lk.acked, tuple(lk.index.items()))
                for lk in (core.links[names[p]] for p in self.actors[1:])
            )
            soft = (
                tuple(sorted(core.bids_seen.items())),
                tuple(sorted(core.greeted)),
                tuple(sorted(core.silent)),
                tuple(
                    (id, tuple(sorted(request.answers.items())))
                    for id, request in sorted(core.state.waiting_or_holding.items())
                ),
                (repr(core._decided_before),) if self.config.full else (),
            )
        key = (id(self.copies), who, core.epoch, dump, links, soft)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.copies)
            self.copies.append(self._made(who, core, self._number(self.dumps, (who, dump), dump)))
        return number

    def _made(self, who: int, core: Any, dump: int) -> Copy:
        out, facts, news = 0, 0, set()
        views: dict[int, tuple[int, int, int, tuple[int, int]]] = {}
        blob = pickle.dumps(core, pickle.HIGHEST_PROTOCOL)
        if who:
            link = core.link
            views[0] = link.epoch, link.heard, link.acked, (0, core.bids_acked)
            news = {0} if core.has_news else set()
            different = unlike(kept(core.state), summed(core.state, core.promised.values()))
            if different:
                raise Violation(f"ledger of {self.names[who]}, kept and summed: {different}")
            out = self.bit(who, 0, self._outgoing(who, core, 0))
        else:
            for p in self.actors[1:]:
                name = self.names[p]
                link = core.links[name]
                seen = core.bids_seen.get(name, (0, 0)) if name in core.greeted else (-1, -1)
                views[p] = link.epoch, link.heard, link.acked, seen
                if name in core.state.pools:
                    out |= self.bit(0, p, self._outgoing(0, core, p))
                    if core.has_news(name):
                        news.add(p)
            facts = self._facts_of(core)
        return Copy(who, blob, core.epoch, dump, out, frozenset(news), facts, views)

    def _facts_of(self, core: Coordinator) -> int:
        facts = 0
        for id, request in core.state.requests.items():
            facts |= self.fact("submitted", id)
            if request.phase == FINAL:
                facts |= self.fact("final", id, request.state)
            elif request.asked:
                facts |= self.fact("asked", id, request.k)
            if request.told == "placed":
                facts |= self.fact("holds", id, request.k, request.owner)
        return facts

    def fresh(self, who: int, epoch: int, dump: int) -> int:
        """A copy that starts with a log and nothing else."""
        key = (who, epoch, dump)
        found = self._fresh.get(key)
        if found is None:
            state = self._load(who, dump)
            found = self._fresh[key] = self._copy(who, self.around(who, state, epoch))
        return found

    def around(self, who: int, state: Any, epoch: int) -> Coordinator | Pool:
        """A new core around a fold."""
        return Pool(self.names[who], state, epoch, 0.0) if who else Coordinator(state, epoch, 0.0)

    # --- messages

    def bit(self, sender: int, to: int, message: Message) -> int:
        """The bit of a message."""
        key = (sender, to, msgpack.packb(list(message)))
        before = len(self.messages)
        number = self._number(self.messages, key, (sender, to, message))
        if number == before:
            self.masks[to] |= 1 << number
            self.inbox[to].append(number)
        return 1 << number

    # --- turns

    def outcome(self, number: int, command: Command) -> Outcome | None:
        """What a turn of a copy comes to; None: nothing changes."""
        key = (number, command)
        if key not in self._outcomes:
            copy = self.copies[number]
            core = pickle.loads(copy.blob)
            try:
                self._carry_out(copy.who, core, command)
                events = self._end_turn(copy.who, core)
            except Violation:
                raise
            except Exception as error:
                raise Violation(f"the core fails: {error!r}") from error
            new = self._copy(copy.who, core)
            self._outcomes[key] = None if new == number else Outcome(new, events)
        return self._outcomes[key]

    def _carry_out(self, who: int, core: Any, command: Command) -> None:
        kind, *rest = command
        try:
            if kind == "both":
                for each in rest:
                    self._carry_out(who, core, each)
            elif kind == "message":
                sender, _, message = self.messages[rest[0]]
                message = Message(*msgpack.unpackb(msgpack.packb(list(message)), strict_map_key=False))
                core.exchange(*([] if who else [self.names[sender]]), message)
            elif kind == "submit":
                word = self.words[rest[0]]
                core.submit(f"r{rest[0]}", f"u{rest[0]}", {"gpu": 1}, retries=int("-" in word))
            elif kind in ("release", "cancel", "stopped"):
                getattr(core, kind)(core.find(rest[0]))
            elif kind == "attach":
                later = self.words[rest[0]].partition(">")[2]
                core.change([("policy", self._policy(rest[0], p)) for p in later if p in "ABC"])
            elif kind == "delete":
                core.change(
                    [("unpolicy", r, "A") for r, of in sorted(core.state.policies.items()) if "A" in of]
                )
            elif kind == "expel":
                core.change([("unpolicy", rest[0], p) for p in sorted(core.state.policies[rest[0]])])
            elif kind == "shrink":
                gpu = core.state.pools["A"].capacity["gpu"] - 1
                core.change([("pool", self._pool_config("A", gpu), "A#1")])
            elif kind == "declare":
                declare_lost(core, "A", "somebody", "")
            elif kind == "silent":
                core.set_silent(rest[0])
            elif kind == "speaks":  # something old arrives, of which only that it arrives is new
                self._speaks(core, rest[0])
            elif kind == "grace":
                core.deadlines.update({id: core.now for id in rest if id in core.deadlines})
            elif kind == "placed":
                core.placed(*rest, {"pg": "group"})
            elif kind == "unplaced":
                core.unplaced(*rest, "not placed within 60 s")
            elif kind == "gone":
                core.gone(*rest)
        except PoolsError:
            pass  # whoever said it gets the error

    @staticmethod
    def _speaks(core: Coordinator, name: str) -> None:
        link = core.links[name]
        nothing = Message("pool:" + name, "", link.epoch, 0, link.acked, 0, [], 0, [], 0, 0, 0)
        core.exchange(name, nothing)
