"""Visits every state that the real core can reach: one coordinator and its pools, on a network that keeps no promise.

It drives `Coordinator` and `Pool` themselves, breadth first (docs/protocol.md is what must hold):

  * *net*: every message ever said, as a set. Loss is "never delivered", repetition "delivered again", reordering "any
    order". After each turn an actor says all that it has to say.
  * *part* of an actor: its log, folded, with the epoch that may write; and its running copies, zombies too. A copy is
    the core itself, pickled. What a copy does depends on it and on the message alone, so it is done once for each.
  * *turn*: one command or message (`batch=1`: up to two), what the core does by itself, the append. A crash strikes
    between turns: as messages may be lost, this is also the crash between append and send.
  * *environment*: crashes, zombies, cancels, changes of policies and so on, each with a budget, at any point. All other
    steps are fair: they happen at last. Where no fair step is left, everything must be settled.

What is left out, and why nothing is lost by it: a message that can change nothing any more, now or after a restart,
leaves the net; a `Peer` event takes no number, and `upto` ends with the last item (numbers are only compared with
those of items); `head` is always 0, for no log here gets shorter; time stands still, and deadlines come at any point.

usage: explorer.py                                  all configurations of `TABLE`, and all mutants
       explorer.py AB,A 11 crash=1 cancel=1 [mutant=NAME] [limit=N] [trace=1] [/ next configuration ...]

Requests: for each the pools in its order; after '>' those that a policy adds later; '+' has a share and may preempt,
'-' has a retry; what '!' holds it never gives up. Then the GPUs of each pool; each request takes one. They are
submitted in this order. Other words: the fields of `explorer_cores.Config`.
"""

from __future__ import annotations

import pickle
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from multiprocessing import Pool as Processes
from typing import Any, NamedTuple

import explorer_mutants
from explorer_cores import UNIT, Config, Part, Violation
from explorer_world import Step, World

from ray_pools.core.link import is_made_anew
from ray_pools.core.queue import HOLDING, QUEUED
from ray_pools.core.requests import FINAL, TAKEN, Request

LIMIT = 3_000_000

# ---------------------------------------------------------------- what must hold


def check_logs(world: World, facts: int, dumps: list[int]) -> None:
    """What must hold between the logs at every moment. Raises Violation."""
    requests = world.state(0, dumps[0]).requests
    holding: dict[str, str] = {}
    for p in world.actors[1:]:
        name, state = world.names[p], world.state(p, dumps[p])
        held = 0
        for id, attempt in state.attempts.items():
            if attempt.state == QUEUED:
                continue
            request = requests.get(id)
            held += attempt.state in HOLDING
            here = f"{id}#{attempt.k} is {attempt.state} at {name}"
            if id in holding:
                raise Violation(f"held twice: {here}, and also {holding[id]}")
            holding[id] = here
            if request is None or request.phase == FINAL:
                raise Violation(f"{here}, and the coordinator says {request and request.state}")
            if (request.k, request.phase, request.owner) != (attempt.k, TAKEN, name):
                raise Violation(f"{here} without Taken: {request.k} is {request.phase}, {request.owner!r}")
        if held > int(world.config.gpus[p - 1]):
            raise Violation(f"{name} holds {held}")
    for id, request in requests.items():
        if request.phase == TAKEN and request.told and not was_lost(world, request, dumps[0]):
            attempt = world.state(
                world.names.index(request.owner), dumps[world.names.index(request.owner)]
            ).attempt(id)
            if attempt is None or attempt.k != request.k or attempt.state == QUEUED:
                raise Violation(
                    f"{id}#{request.k} was told {request.told}, which is not in {request.owner}'s log"
                )
    check_facts(world, facts, dumps)


def was_lost(world: World, request: Request, dump: int) -> bool:
    """Its pool was declared lost while it ran the attempt: what takes its place is asked for the end of it."""
    directive = request.directives.get(request.owner)
    anew = is_made_anew(world.state(0, dump).uids[request.owner])
    return anew and directive is not None and (directive.k, directive.kind) == (request.k, "ask")


def check_facts(world: World, facts: int, dumps: list[int]) -> None:
    """What clients know stays true."""
    requests = world.state(0, dumps[0]).requests
    for place in range(facts.bit_length()):
        if not facts >> place & 1:
            continue
        kind, id, *rest = world.facts[place]
        request = requests.get(id)
        if request is None:
            raise Violation(f"lost: {id}, which was acknowledged")
        if kind == "final" and (request.phase, request.state) != (FINAL, rest[0]):
            raise Violation(f"{id} was final: {rest[0]}, and now is {request.shown} #{request.k}")
        if kind == "asked" and (request.k != rest[0] or not (request.asked or request.phase == FINAL)):
            raise Violation(f"the end of {id} was asked for in attempt {rest[0]}, and now it is {request.k}")
        if kind == "holds":
            for p in world.actors[1:]:
                attempt = world.state(p, dumps[p]).ended.get(id) if world.names[p] == rest[1] else None
                if attempt and attempt.k == rest[0] and attempt.ended_as in ("returned", "withdrawn"):
                    raise Violation(f"{id}#{rest[0]} was held by its holder, and is {attempt.ended_as}")
    for id, request in requests.items():
        if request.k > world.config.k:
            raise Violation(f"{id} is at attempt {request.k}")


def check_bookings(world: World, who: int, part: Part) -> None:
    """Capacity with all that is booked, in the copy that may write."""
    if not who:
        return
    core = pickle.loads(world.copies[part.copies[-1]].blob)
    ledger, capacity = core.state.ledger, core.state.capacity
    for key in capacity:
        total = int(world.config.gpus[who - 1])  # what was granted stays when the pool shrinks
        booked, held = ledger.booked[key], ledger.held[key] + ledger.promised[key]
        if booked > total or held > total:
            raise Violation(f"{world.names[who]}: booked {booked}, held and promised {held} of {total}")


def check_end(world: World, parts: list[Part]) -> None:
    """Nothing happens any more by itself: everything is settled."""
    requests = world.state(0, parts[0].dump).requests
    if len(requests) < len(world.words):
        raise Violation("stuck: not everything was submitted")
    forever = {f"r{r}" for r, word in enumerate(world.words) if "!" in word}
    held = [0 for _ in parts]
    for id, request in requests.items():
        if id in forever and request.told == "placed":
            held[world.names.index(request.owner)] += 1
        elif request.phase != FINAL:
            raise Violation(f"stuck: {id}#{request.k} is {request.phase}, told {request.told!r}")
    for p in world.actors[1:]:
        core = pickle.loads(world.copies[parts[p].copies[-1]].blob)
        left = [id for id in core.state.attempts if id not in forever]
        left += [*core.promised, *core.bids, *core.bids_due, *core.deadlines]
        if left or core.link.index or core.state.queue.size:
            raise Violation(f"{world.names[p]} keeps {left} {core.link.index} {core.state.queue.size}")
        for what in ("held", "booked", "promised"):
            expected = held[p] if what != "promised" else 0
            if sum(getattr(core.state.ledger, what).values()) != expected:
                raise Violation(f"{world.names[p]} has {what} something")


# ---------------------------------------------------------------- the search


class Result(NamedTuple):
    """What a run came to. `path`: the shortest way to the violation."""

    states: int
    edges: int
    ends: int
    turns: int
    seconds: float
    violation: str
    path: list[str]
    complete: bool


class Search:
    """Breadth first over (parts of all actors, net, budgets, facts)."""

    def __init__(self, config: Config, limit: int = LIMIT) -> None:
        self.world = World(config)
        self.limit = limit
        self.n = len(self.world.names)
        self._checked: set[Any] = set()
        self._booked: set[int] = set()

    def fair_bits(self, state: tuple[int, ...]) -> int:
        """What actors say now, and say again until it is acknowledged."""
        world = self.world
        newest = [world.copies[world.parts[state[who]].copies[-1]] for who in world.actors]
        bits = 0
        for p in world.actors[1:]:
            if p in newest[0].news or 0 in newest[p].news:
                bits |= newest[p].out | newest[0].out & world.masks[p]
        return bits

    def successors(self, state: tuple[int, ...]) -> Iterator[tuple[Step, int, tuple[int, ...]]]:
        """(step, actor, next state)"""
        world, n = self.world, self.n
        net, budgets, facts = state[n:]
        for who in world.actors:
            for step in world.steps(who, state[who], net, budgets):
                left = budgets - step.spent
                restarts = bool(left // UNIT["crash"] & 3 or left // UNIT["split"] & 3)
                parts = [*state[:n]]
                parts[who] = step.part
                said = net | step.sent
                for each in world.actors:
                    said &= ~world.dead(each, parts[each], restarts)
                yield step, who, (*parts, said, left, facts | step.facts)

    def check(self, state: tuple[int, ...]) -> None:
        """Raises Violation."""
        world, n = self.world, self.n
        parts = [world.parts[number] for number in state[:n]]
        dumps = [part.dump for part in parts]
        key = (state[-1], *dumps)
        if key not in self._checked:
            check_logs(world, state[-1], dumps)
            self._checked.add(key)
        for who in world.actors:
            if state[who] not in self._booked:
                check_bookings(world, who, parts[who])
                self._booked.add(state[who])

    def run(self) -> Result:
        """Until all states are visited, the limit is reached or something does not hold."""
        started = time.process_time()
        world = self.world
        first = world.initial()
        numbers = {first: 0}
        states = [first]
        parent = array("i", [-1])
        fair_from, fair_to = array("i"), array("i")
        edges = ends = place = 0
        violation = ""
        try:
            while place < len(states) and len(states) < self.limit:
                state = states[place]
                self.check(state)
                fair, moved = self.fair_bits(state), False
                for step, _, new in self.successors(state):
                    if new == state:
                        continue
                    edges += 1
                    number = numbers.get(new)
                    if number is None:
                        number = numbers[new] = len(states)
                        states.append(new)
                        parent.append(place)
                    if step.fair and (not step.bit or step.bit & fair):
                        moved = True
                        fair_from.append(place)
                        fair_to.append(number)
                if not moved:
                    ends += 1
                    check_end(world, [world.parts[number] for number in state[: self.n]])
                place += 1
        except Violation as error:
            violation = str(error)
        complete = not violation and place == len(states)
        if complete:
            circle = in_circles(len(states), fair_from, fair_to)
            if circle is not None:
                place, violation = circle, "fair steps go in circles"
        path = self._path(states, parent, place) if violation else []
        spent = time.process_time() - started
        return Result(len(states), edges, ends, len(world._outcomes), spent, violation, path, complete)

    def _path(self, states: list[tuple[int, ...]], parent: array[int], place: int) -> list[str]:
        path: list[str] = []
        while parent[place] >= 0:
            before = states[parent[place]]
            path.insert(
                0,
                next(
                    self.world.told(who, step.label)
                    for step, who, new in self.successors(before)
                    if new == states[place]
                ),
            )
            place = parent[place]
        return path


def in_circles(count: int, sources: array[int], targets: array[int]) -> int | None:
    """A state from which fair steps may lead back to it, or that such a one leads to; None: each way ends."""
    into = array("i", [0]) * count
    start = array("i", [0]) * (count + 1)
    for source in sources:
        start[source + 1] += 1
    for place in range(count):
        start[place + 1] += start[place]
    sorted_targets = array("i", [0]) * len(targets)
    at = start[:]
    for source, target in zip(sources, targets, strict=True):
        sorted_targets[at[source]] = target
        at[source] += 1
        into[target] += 1
    ready = deque(place for place in range(count) if not into[place])
    done = 0
    while ready:
        place = ready.popleft()
        done += 1
        for target in sorted_targets[start[place] : start[place + 1]]:
            into[target] -= 1
            if not into[target]:
                ready.append(target)
    return None if done == count else next(place for place in range(count) if into[place])


def explore(config: Config, limit: int = LIMIT) -> Result:
    """Visit all states of a configuration, with its mutant in place of the core's own methods."""
    with explorer_mutants.applied(config.mutant, weak=bool(config.weak)):
        return Search(config, limit).run()


# ---------------------------------------------------------------- the command line

# Explored in every run of the tests; the time of each is that of its states, some 20,000 a second.
TABLE = """
AB,A 11
AB,A 11 crash=1
AB 11 crash=1 cancel=1
AB 11 crash=1 batch=1
AB 11 full=1 cancel=1
AB 11 silent=1 crash=1
AB,A 11 batch=1
A>B 11 attach=1 cancel=1
A>B,A 11 attach=1
AB,A 11 delete=1
AB 11 expel=1
AB 21 shrink=1
AB 11 unplaced=1 places=1
A-,A+ 1 places=1
B!,A-,AB+ 11
A,A 1 split=1
AB 11 declare=1
A-,A+ 1 declare=1
A- 1 declare=1 cancel=1 crash=1
"""
# Explored on demand (make faults). More is only a matter of patience: AB,AB 11 crash=1 has over 3,000,000 states.
DEEP = """
A-,A+ 1 cancel=1 batch=1
AB,AB 11
AB 11 split=1
A,AB 11 crash=1
A-,A+ 1 cancel=1 crash=1
AB 11 crash=2
AB 11 split=1 cancel=1
AB 11 shrink=1 crash=1
A>B 11 attach=1 crash=1 cancel=1
AB 11 expel=1 crash=1
AB,A 11 silent=1
AB,A 11 cancel=1
AB,A 11 full=1
AB,A 11 delete=1 batch=1
A,AB 21 shrink=1
A-,A+ 1 places=1 batch=1
AB,A 11 declare=1
A- 1 declare=2 crash=1
"""


def parsed(line: str) -> tuple[Config, int, bool]:
    """A configuration as one writes it."""
    words = line.split()
    options = dict(word.split("=") for word in words[2:])
    limit, trace = int(options.pop("limit", LIMIT)), bool(options.pop("trace", ""))
    values = {name: value if name == "mutant" else int(value) for name, value in options.items()}
    return Config(words[0], words[1], **values), limit, trace  # type: ignore[arg-type]


def one(line: str) -> str:
    """Explores one configuration; what came of it in words."""
    config, limit, trace = parsed(line)
    result = explore(config, limit)
    said = (
        "all hold" if result.complete and not result.violation else result.violation or "stopped at the limit"
    )
    text = (
        f"{line:<60} {result.states:>8} states {result.edges:>9} steps {result.turns:>7} turns"
        f" {result.ends:>5} ends {result.seconds:>6.1f}s  {said}"
    )
    return "\n     ".join(
        [text, *(result.path if trace else [f"depth {len(result.path)}"] if result.path else [])]
    )


def main(arguments: list[str]) -> None:
    """See the module's docstring."""
    text = " ".join(arguments) or TABLE + "/" + explorer_mutants.table()
    lines = [line.strip() for line in text.replace("\n", "/").split("/") if line.strip()]
    with Processes(2) as processes:
        for told in processes.imap(one, lines):
            print(told, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
