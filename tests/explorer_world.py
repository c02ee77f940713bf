"""The steps of each actor: deliveries, what happens by itself, crashes, zombies, full disks, and what people do.

A step of an actor depends on its part, on the messages to it and on the budgets, and on nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import explorer_mutants
import msgpack
from explorer_cores import UNIT, Command, Config, Copy, Cores, Outcome, Part, Violation

from ray_pools.core.link import Message
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import ENDING, HOLDING
from ray_pools.core.requests import FINAL


class Step(NamedTuple):
    """A step of one actor. `bit`: the message that was delivered, 0 for others; `fair`: it happens at last."""

    fair: bool
    bit: int
    label: tuple[Any, ...]
    spent: int
    sent: int
    facts: int
    part: int


class World(Cores):
    """Cores with all their steps. Actor 0 is the coordinator, the others are the pools."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bug = config.mutant
        self._steps: dict[Any, list[Step]] = {}
        self._dead: dict[tuple[int, bool], list[int]] = {}

    # --- messages that matter no more

    def dead(self, who: int, part: int, restarts: bool) -> int:
        """Messages that can change nothing of this actor any more."""
        found = self._dead.setdefault((part, restarts), [0, 0])
        inbox = self.inbox[who]
        while found[0] < len(inbox):
            number = inbox[found[0]]
            found[0] += 1
            sender, _, message = self.messages[number]
            if self._is_dead(who, self.parts[part], restarts, sender, message):
                found[1] |= 1 << number
        return found[1]

    def _is_dead(self, who: int, part: Part, restarts: bool, sender: int, message: Message) -> bool:
        for number in part.copies:
            copy = self.copies[number]
            epoch, heard, acked, bids = copy.views[sender]
            if message.epoch < epoch:
                continue
            uid = self._uid(who, copy.dump, sender)
            if not sender and message.uid != uid:
                return False
            if sender and message.uid not in ("", uid):
                continue
            mine = (message.epoch, message.bids_upto) if sender else (0, message.bids_ack)
            newer = message.to_epoch == copy.epoch and mine > bids
            if message.epoch > epoch or message.upto > heard or message.ack > acked or newer:
                return False
        if explorer_mutants.revives(self.bug, message) or (self.config.weak and who and message.items):
            return False
        if restarts:
            state = self.state(who, part.dump)
            peer = state.peer if who else state.peers.get(self.names[sender])
            if sender and message.uid not in ("", self._uid(who, part.dump, sender)):
                return True
            if peer is None or message.epoch > peer.epoch:
                return False
            if message.epoch == peer.epoch and (message.upto > peer.heard or message.ack > peer.acked):
                return False
        return True

    def _uid(self, who: int, dump: int, sender: int) -> str:
        """What the pool is, or what the coordinator takes the sender for."""
        state = self.state(who, dump)
        return str(state.uid if who else state.uids.get(self.names[sender], ""))

    # --- what may happen

    def commands(self, number: int, left: Any) -> Iterator[tuple[bool, str, Command]]:
        """(fair, budget, command) of all that may happen to a copy beside messages."""
        copy = self.copies[number]
        state = self.state(copy.who, copy.dump)
        yield True, "", ("turn",)
        if copy.who:
            yield from self._pool_commands(state, left)
            return
        requests = state.requests
        if len(requests) < len(self.words):
            yield True, "", ("submit", len(requests))
        for id, request in requests.items():
            if request.phase == FINAL:
                continue
            if request.told == "placed" and "!" not in self.words[int(id[1:])]:
                yield True, "", ("release", id)
            if request.told == "preempting":
                yield False, "", ("stopped", id)
            if left("cancel") and not request.asked:
                yield False, "cancel", ("cancel", id)
        for r, word in enumerate(self.words) if left("attach") else ():
            later = [p for p in word.partition(">")[2] if p in "ABC"]
            if later and later[0] not in state.policies.get(f"u{r}", {}):
                yield False, "attach", ("attach", r)
        if left("delete") and any("A" in policies for policies in state.policies.values()):
            yield False, "delete", ("delete",)
        for requester, policies in state.policies.items() if left("expel") else ():
            if policies:
                yield False, "expel", ("expel", requester)
        if left("shrink") and state.pools["A"].capacity["gpu"]:
            yield False, "shrink", ("shrink",)
        if left("declare"):
            yield False, "declare", ("declare",)
        if left("silent") or self.config.silent:
            for p in self.names[1:]:
                yield False, "silent" if left("silent") else "never", ("silent", p)
                yield False, "", ("speaks", p)

    def _pool_commands(self, state: PoolState, left: Any) -> Iterator[tuple[bool, str, Command]]:
        for attempt in state.attempts.values():
            if attempt.id in state.preempting:
                yield True, "", ("grace", attempt.id)
            if attempt.state == ENDING:
                yield True, "", ("gone", attempt.id, attempt.k)
            elif attempt.state in HOLDING and attempt.placed is None:
                yield True, "", ("placed", attempt.id, attempt.k)
            if left("unplaced") and attempt.state in HOLDING and attempt.state != ENDING:
                yield False, "unplaced", ("unplaced", attempt.id, attempt.k)

    # --- steps of one actor

    def steps(self, who: int, part: int, net: int, budgets: int) -> list[Step]:
        """All steps, with the messages in `net`."""
        key = (part, net & self.masks[who], budgets)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = list(self._make_steps(who, self.parts[part], key[1], budgets))
        return found

    def _make_steps(self, who: int, part: Part, net: int, budgets: int) -> Iterator[Step]:
        def left(name: str) -> int:
            return int(budgets // UNIT[name] & 3)

        for number in part.copies:
            copy = self.copies[number]
            top = copy.epoch == part.epoch
            others = tuple(each for each in part.copies if each != number)
            inputs: list[tuple[bool, int, str, Command]] = []
            rest = net
            while rest:
                low = rest & -rest
                inputs.append((top, low, "", ("message", low.bit_length() - 1)))
                rest ^= low
            inputs += [(fair and top, 0, env, command) for fair, env, command in self.commands(number, left)]
            if self.config.batch:
                free = [command for _, _, env, command in inputs if not env and command != ("turn",)]
                pairs = [("both", one, two) for one in free for two in free if one != two]
                inputs += [(False, 0, "", pair) for pair in pairs]
            for fair, bit, env, command in inputs:
                if env == "never":
                    continue
                label = (copy.epoch, *command)
                try:
                    outcome = self.outcome(number, command)
                except Violation as error:
                    raise Violation(f"{error}, at {self.told(who, label)}") from error
                if outcome is not None:
                    spent = UNIT[env] if env else 0
                    for step in self._ended(who, part, copy, others, outcome, left):
                        yield step._replace(
                            fair=fair and step.fair,
                            bit=bit if step.fair else 0,
                            label=label + step.label,
                            spent=spent + step.spent,
                        )
        if left("crash"):
            yield self._crash(who, part, part.dump, part.copies[:-1], UNIT["crash"], ("crash",))
        if left("split"):
            yield self._crash(
                who, part, part.dump, part.copies, UNIT["split"], ("restart, the old one lives",)
            )

    def _ended(
        self, who: int, part: Part, copy: Copy, others: tuple[int, ...], outcome: Outcome, left: Any
    ) -> Iterator[Step]:
        """The end of a turn: its append, and what may go wrong with it."""
        new, events = self.copies[outcome.copy], outcome.events
        fenced = copy.epoch != part.epoch
        dump = new.dump if not fenced else part.dump
        if events and fenced:
            if self.bug != f"{'pool' if who else 'coordinator'}-not-fenced":
                yield Step(
                    True, 0, ("refused: it ends",), 0, 0, 0, self.part(who, part.epoch, part.dump, others)
                )
                return
            dump = self.folded(who, part.dump, events)
        copies = tuple(sorted((*others, outcome.copy), key=lambda n: self.copies[n].epoch))
        yield Step(True, 0, (), 0, new.out, new.facts, self.part(who, part.epoch, dump, copies))
        if not events or fenced:
            return
        if left("full"):
            core = self._undone(copy, outcome)
            copies = tuple(sorted((*others, core), key=lambda n: self.copies[n].epoch))
            at = self.part(who, part.epoch, part.dump, copies)
            yield Step(False, 0, ("disk full",), UNIT["full"], self.copies[core].out, 0, at)
        if not left("crash"):
            return
        if self.bug == f"{'pool' if who else 'coordinator'}-early":
            step = self._crash(
                who, part, part.dump, others, UNIT["crash"], ("said, then a crash before the append",)
            )
            yield step._replace(sent=step.sent | new.out, facts=new.facts)
        for n in range(1, len(events)) if self.config.cut else ():
            dump = self.folded(who, part.dump, events[:n])
            yield self._crash(who, part, dump, others, UNIT["crash"], (f"crash after {n} events",))

    def _undone(self, copy: Copy, outcome: Outcome) -> int:
        """The core after an append that failed."""
        before, failed = pickle.loads(copy.blob), pickle.loads(self.copies[outcome.copy].blob)
        core: Any = self.around(copy.who, self._load(copy.who, copy.dump), copy.epoch)
        core.resume(before.soft(), failed)
        return self._copy(copy.who, core)

    def folded(self, who: int, dump: int, events: tuple[Any, ...]) -> int:
        """The log after more events."""
        state = self._load(who, dump)
        try:
            for event in events:
                state.apply(event, 0.0)
        except Exception as error:
            raise Violation(f"the log can't be replayed: {error!r} at {event}") from error
        self._forget_numbers(who, state, events)
        packed = msgpack.packb(state.dump())
        return self._number(self.dumps, (who, packed), packed)

    def _crash(
        self, who: int, part: Part, dump: int, others: tuple[int, ...], spent: int, label: tuple[str, ...]
    ) -> Step:
        copy = self.fresh(who, part.epoch + 1, dump)
        at = self.part(who, part.epoch + 1, dump, (*others, copy))
        return Step(False, 0, label, spent, self.copies[copy].out, 0, at)

    # --- to be read by people

    def told(self, who: int, label: tuple[Any, ...]) -> str:
        """A step in words."""
        words = [self.names[who] or "C"]
        for place, word in enumerate(label):
            if isinstance(word, tuple):
                word = self.told(who, word)
            elif place and label[place - 1] == "message":
                sender, _, m = self.messages[word]
                word = (
                    f"of {self.names[sender] or 'C'}: {m.items} bids {m.bids} (epoch {m.epoch}, ack {m.ack})"
                )
            words.append(str(word))
        return " ".join(words)
