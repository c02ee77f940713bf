"""A seeded bad day of coordinator, pools, clients and holders: whatever goes wrong, no promise is broken.

The cores are the real ones, the processes around them take turns as actors do; `fault_processes` says which faults
there are, `fault_auditor` what is checked at every row that becomes durable and at every answer. At the end nothing
goes wrong any more (`fault_calm`): then both sides agree, whoever can go on does, every command is answered, every
request becomes final, no pool keeps anything of it, and each log folds to the very state that its actor has (10.7).

usage: python tests/fault_simulation.py --seeds 0-1999 [--steps 200]   plays them; the first that fails is told
       python tests/fault_simulation.py --seed 17 --trace              one day as a story
       python tests/fault_simulation.py --seeds 0-199 --mutant R1      how many seeds notice that R1 is left out
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgpack
from fault_auditor import FaultAuditor
from fault_calm import calm_down, settle
from fault_mutants import MUTANTS, applied
from fault_processes import (
    BEFORE_APPEND,
    BEFORE_REPLY,
    COORDINATOR,
    Call,
    Disk,
    Machine,
    Process,
    View,
    Violation,
    pack,
)

from ray_pools.actors import clock as clock_module
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.errors import PoolsError, Refused

PLACEMENT = {"strategy": "PACK", "provision_timeout_s": 60.0}
TEAMS = ("t1", "t2", "t3")
STEPS = 200
_SILENT_REFUSALS = ("id_in_use", "unknown_id", "unknown_pool", "unknown_policy", "in_use")


class Flight(NamedTuple):
    """A message on its way: a call to whoever has this name, an answer to the process that called, or to a client."""

    to: Any
    what: Any


class Pending:
    """A command that a client repeats until it is answered."""

    def __init__(self, number: int, op: str, id: str, args: tuple[Any, ...]) -> None:
        self.number, self.op, self.id, self.args = number, op, id, args
        self.answered = False
        # whoever sent it knew by then that the request exists
        self.known = False
        self.impostor = False

    def __repr__(self) -> str:
        return f"#{self.number} {self.op} {self.id}"


def random_pool(rng: random.Random, name: str) -> PoolConfig:
    return PoolConfig(
        name,
        {"gpu": rng.randint(2, 4)},
        queueing=rng.choice(["backfill", "strict"]),
        starvation_after_s=rng.choice([0.0, 20.0, 300.0]),
        grace_s=rng.choice([0.0, 10.0, 30.0, 100.0]),
        min_runtime_s=rng.choice([0.0, 0.0, 20.0]),
        placement=rng.choice([None, PLACEMENT]),
    )


def random_policy(rng: random.Random, pool: str, team: str) -> PolicyConfig:
    reserved = rng.choice([{}, {}, {"gpu": 1}, {"gpu": 2}])
    limit = rng.choice([{}, {}, {}, {"gpu": rng.randint(1, 4)}])
    return PolicyConfig(pool, team, rng.choice([0, 1, 5]), reserved, limit)


class World:
    """See the module's docstring. `seen` counts what happened, `trace` tells it."""

    def __init__(self, seed: int, *, traced: bool = False, mutant: str = "") -> None:
        rng = self.rng = random.Random(seed)
        self.traced, self.mutant = traced, mutant
        self.trace: list[str] = []
        self.seen: Counter[str] = Counter()
        self.machine = Machine()
        self.auditor = FaultAuditor(self)
        # whose append is under way
        self.writer: Process
        self.air: list[Flight] = []
        self.groups: dict[tuple[str, str, int], None] = {}
        self.disks: dict[str, Disk] = {}
        self.processes: dict[str, Process] = {}
        self.zombies: list[Process] = []
        self.pending: list[Pending] = []
        self.commands = 0
        # what clients know: the newest view of each request; whose submission was acknowledged
        self.views: dict[str, View] = {}
        self.acknowledged: dict[str, tuple[Any, ...]] = {}
        self.leased: list[str] = []
        self.end_wanted: set[str] = set()
        self.pools_made = 0
        self.calm = False
        # days differ in how much goes wrong
        self.badness = rng.choice([0.2, 0.5, 1.0])
        self._begin(["p", "q", "r"][: rng.choice([1, 2, 2, 3])])

    def _begin(self, names: list[str]) -> None:
        rng = self.rng
        pools = {name: random_pool(rng, name) for name in names}
        policies = [random_policy(rng, n, t) for n in names for t in TEAMS if rng.random() < 0.85]
        shares = Counter(p.pool for p in policies for _ in range(p.reserved.get("gpu", 0)))
        for who in (COORDINATOR, *names):
            self.start(who)
        changes: list[tuple[Any, ...]] = [
            ("pool", pool._replace(capacity={"gpu": max(pool.capacity["gpu"], shares[name])}), name + "#1")
            for name, pool in pools.items()
        ]
        changes += [("policy", policy) for policy in policies]
        self.command("change", "", (changes, "c0"))
        settle(self)

    # --- what is told

    def note(self, text: str, *values: Any) -> None:
        """A line of the trace."""
        if self.traced:
            self.trace.append(f"{self.machine.true:8.1f}  " + text % values)

    def look(self) -> None:
        """Nothing has come up so far that can't be true."""
        if self.auditor.problems:
            raise Violation(self.auditor.problems[0])

    # --- actors

    def start(self, who: str) -> None:
        """A process for this actor; the one before, if it lives, is a zombie now."""
        before = self.processes.get(who)
        if before is not None and before.alive:
            self.zombies.append(before)
        self.disks.setdefault(who, Disk()).fences = self.mutant != "log not fenced"
        self.processes[who] = Process(self, who, use_snapshot=self.rng.random() < 0.7)
        self.note(
            "%s starts%s",
            self.processes[who].name,
            "; the one before lives" if before and before.alive else "",
        )

    def speak(self, process: Process) -> None:
        """What its peers do not have goes into the air."""
        core = process.core
        if not process.alive:
            return
        if process.who == COORDINATOR:
            for pool in core.state.pools:
                if core.has_news(pool) and self._may_call(process, pool):
                    call = Call(
                        "exchange", (COORDINATOR, pack(core.outgoing(pool)), False), ("peer", process)
                    )
                    self.air.append(Flight(pool, call))
        elif (core.has_news or not process.welcome) and self._may_call(process, COORDINATOR):
            call = Call("exchange", (process.who, pack(core.outgoing()), False), ("peer", process))
            self.air.append(Flight(COORDINATOR, call))

    def _may_call(self, process: Process, to: str) -> bool:
        """One call at a time, but for one that waited too long for its answer."""
        waits = any(
            f.to == to and isinstance(f.what, Call) and f.what.reply_to[1] is process for f in self.air
        )
        return not waits or self.rng.random() < 0.15

    def reply(self, process: Process, call: Call, result: Any) -> None:
        """A process answers."""
        kind, whom = call.reply_to
        if kind == "client":
            self.air.append(Flight(whom, (result, process)))
        elif isinstance(result, PoolsError):
            self.seen["refused"] += kind == "peer"
            self.note("%s refuses %s: %s", process.name, call.op, result)
        elif kind == "peer":
            peer = process.who
            self.air.append(Flight(whom, Call("exchange", (peer, result, True), ("", None))))
        elif kind == "errand" and whom in process.errands:
            process.errands.remove(whom)

    def show(self, view: View) -> None:
        """What a client's long poll brings it, if it comes through."""
        self.air.append(Flight("", view))

    # --- the network

    def arrive(self, flight: Flight) -> None:
        """It reaches whom it is for, if there still is one."""
        to, what = flight
        if isinstance(to, Pending):
            self._answered(to, *what)
            return
        if isinstance(what, View):
            self._see(what)
            return
        process: Process | None = to if isinstance(to, Process) else self.processes.get(to)
        if isinstance(to, str) and self.zombies and self.rng.random() < 0.2:
            process = next((z for z in self.zombies if z.who == to), process)
        if process is None or not process.alive:
            return
        if self.traced:
            self.note("%s hears %s", process.name, _told(what))
        process.inbox.append(what)
        if self.calm or self.rng.random() < 0.8:
            process.turn()

    # --- clients

    def command(self, op: str, id: str, args: tuple[Any, ...]) -> Pending:
        """A client has something to ask, and asks for the first time."""
        self.commands += 1
        pending = Pending(self.commands, op, id, args)
        pending.known = id in self.acknowledged
        self.pending.append(pending)
        self.ask(pending)
        return pending

    def ask(self, pending: Pending) -> None:
        """It goes into the air, once more perhaps."""
        self.note("client: %s %s", pending, pending.args)
        self.air.append(Flight(COORDINATOR, Call(pending.op, pending.args, ("client", pending))))

    def _answered(self, pending: Pending, result: Any, process: Process) -> None:
        self.note("client: %s is answered by %s: %s", pending, process.name, result)
        if isinstance(result, PoolsError) and not isinstance(result, Refused) and pending.op != "change":
            return  # the disk was full: it asks again
        if isinstance(result, PoolsError) and type(result).__name__ == "Full":
            return
        if isinstance(result, PoolsError):
            self._refused(pending, result, process)
        elif pending.impostor:
            raise Violation(f"{pending} is of other content than {pending.id} has, and was acknowledged")
        else:
            self._told(pending, result)
        pending.answered = True
        if pending in self.pending:
            self.pending.remove(pending)
        self.look()

    def _refused(self, pending: Pending, error: PoolsError, process: Process) -> None:
        code = getattr(error, "code", "")
        self.seen[f"{code or type(error).__name__} for {pending.op}"] += 1
        if code == "unknown_id":
            # a zombie does not know what its successor was told
            excused = process.replaced or pending.id in self.auditor.forgotten
            if pending.known and not excused:
                raise Violation(f"{pending.id} was acknowledged, and {process.name} does not know it")
        elif code == "id_in_use" and not pending.impostor:
            raise Violation(f"{pending} was refused: {error}")

    def _told(self, pending: Pending, result: Any) -> None:
        op, id = pending.op, pending.id
        if op == "change":
            self.auditor.told_changed(pending.args[1], result)
            return
        if op == "submit":
            self.auditor.told_submitted(*pending.args)
            self.acknowledged[id] = pending.args
        elif op in ("release", "cancel"):
            self.auditor.told_ended(op, id, result)
        self._see(result)

    def _see(self, view: View) -> None:
        self.auditor.told_view(view)
        before = self.views.get(view.id)
        if before is None or (view.seq, view.k) >= (before.seq, before.k):
            self.views[view.id] = view

    def new_command(self) -> None:
        """A client submits, ends something, or an operator changes something."""
        rng = self.rng
        what = rng.random()
        known = [id for id in self.acknowledged if id not in self.auditor.forgotten]
        if what < 0.7 or not known:
            hard = rng.random() < 0.1
            options = {
                "preemptible": not hard,
                "retries": rng.choice([0, 1, 3]),
                "lease_s": rng.choice([0.0, 0.0, 0.0, 45.5]),
            }
            amounts = {"gpu": 1 if hard else rng.choice([1, 2, 2, 3])}
            id = f"r{self.commands + 1}"
            if options["lease_s"] and rng.random() < 0.7:
                self.leased.append(id)  # the others vanish
            self.command("submit", id, (id, rng.choice(TEAMS), amounts, options))
        elif what < 0.78:
            id = rng.choice(known)
            self.end(rng.choice(["release", "release", "cancel"]), id)
        elif what < 0.82:
            id = rng.choice(known)
            _, team, amounts, options = self.acknowledged[id]
            self.command("submit", id, (id, team, {"gpu": amounts["gpu"] + 1}, options)).impostor = True
        else:
            self.change()

    def end(self, op: str, id: str) -> None:
        """A client wants a request to end."""
        self.end_wanted.add(id)
        self.command(op, id, (id,))

    def change(self) -> None:
        """Other numbers for a pool or a policy, a policy less, a pool more or less; many are refused."""
        rng, state = self.rng, self.processes[COORDINATOR].core.state
        name, team = rng.choice(list(state.pools) or ["p"]), rng.choice(TEAMS)
        what = rng.random()
        changes: list[tuple[Any, ...]]
        if what < 0.35:
            changes = [("pool", random_pool(rng, name), state.uids.get(name, "p#0"))]
        elif what < 0.7:
            changes = [("policy", random_policy(rng, name, team))]
        elif what < 0.85:
            changes = [("unpolicy", team, name)]
        elif what < 0.93:  # one that was taken away may come back, with another uid and its old log
            gone = [who for who in self.processes if who not in (COORDINATOR, *state.pools)]
            name = rng.choice(["z", *gone])
            if name in state.pools:
                return
            self.start(name)
            self.pools_made += 1
            changes = [("pool", random_pool(rng, name), f"{name}#{self.pools_made + 1}")]
            changes.append(("policy", random_policy(rng, name, team)))
        else:
            changes = [("unpool", name)]
        self.seen[f"change {changes[0][0]}"] += 1
        self.command("change", "", (changes, f"c{self.commands + 1}"))

    def holder_acts(self) -> None:
        """Someone looks what became of a request, renews a lease, or says that it has stopped."""
        rng = self.rng
        known = [id for id in self.acknowledged if id not in self.auditor.forgotten]
        if not known:
            return
        what, id = rng.random(), rng.choice(known)
        preempting = [id for id in known if id in self.views and self.views[id].state == "preempting"]
        if preempting and rng.random() < 0.5:
            id = rng.choice(preempting)
        if what < 0.3 and self.leased:
            id = rng.choice(self.leased)
            if id in self.acknowledged:
                self.once("renew", id, (id,))
            return
        view = self.views.get(id)
        if view is not None and view.state == "preempting" and what < 0.8:
            self.auditor.confirmed.add((id, view.k))
            self.command("stopped", id, (id, view.k))
        else:
            self.once("get", id, (id,))

    def once(self, op: str, id: str, args: tuple[Any, ...]) -> None:
        """Asked, and not repeated: it is asked anew later."""
        pending = self.command(op, id, args)
        self.pending.remove(pending)
        pending.answered = True

    # --- one step

    def step(self) -> None:
        """Something happens, good or bad."""
        rng = self.rng
        what = rng.random()
        dead = [who for who, process in self.processes.items() if not process.alive]
        if dead and rng.random() < 0.3:
            self.start(rng.choice(dead))
        elif what < 0.38:
            for _ in range(rng.randint(1, 8)):
                if self.air:
                    self._network()
        elif what < 0.56:
            for process in self.processes.values():
                if rng.random() < 0.8:
                    self.speak(process)
            if self.zombies:
                self.speak(rng.choice(self.zombies))
        elif what < 0.69:
            self.new_command()
        elif what < 0.71:
            if self.pending:
                self.ask(rng.choice(self.pending))
        elif what < 0.76:
            self.holder_acts()
        elif what < 0.83:
            process = rng.choice(list(self.processes.values()))
            if process.alive and process.errands:
                process.do_errand(rng.choice(process.errands), fails=rng.random() < 0.2)
        elif what < 0.88:
            self.machine.true += rng.choice([0.1, 0.1, 1.0, 5.0, 11.0, 31.0])
            self._someone().turn()
        elif what < 0.92:
            self._someone().turn()
        elif rng.random() < self.badness:
            self._fault()
        self.look()

    def _someone(self) -> Process:
        if self.zombies and self.rng.random() < 0.1:
            return self.rng.choice(self.zombies)
        return self.rng.choice(list(self.processes.values()))

    def _network(self) -> None:
        rng, air = self.rng, self.air
        place = 0 if rng.random() < 0.6 else rng.randrange(len(air))
        what = rng.random()
        if what < 0.2 * self.badness:
            self.seen["lost"] += 1
            del air[place]
        elif what < 0.3 * self.badness:
            self.seen["repeated"] += 1  # it stays in the air, and may arrive long after
            self.arrive(air[place])
        else:
            self.arrive(air.pop(place))

    def _fault(self) -> None:
        rng = self.rng
        kind, act = rng.choice(_FAULTS)
        process = rng.choice(list(self.processes.values()))
        self.seen[kind] += 1
        act(self, process)

    def _replaced(self, process: Process) -> None:
        self.start(process.who)

    def _killed(self, process: Process) -> None:
        self.note("%s is killed", process.name)
        process.alive = False

    def _crash_later(self, process: Process) -> None:
        process.crash_at = self.rng.choice([BEFORE_APPEND, BEFORE_REPLY])

    def _bad_disk(self, process: Process) -> None:
        process.disk.fault = self.rng.choice(["full", "full", "sync lost", "sync kept"])

    def _clock_is_set(self, process: Process) -> None:
        by_s = self.rng.choice([-7200.0, -40.0, 40.0, 3600.0, 90000.0])
        self.note("the clock of %s is set by %+.0f s", process.who, by_s)
        self.machine.set_by[process.who] = self.machine.set_by.get(process.who, 0.0) + by_s

    def _group_is_lost(self, process: Process) -> None:
        if self.groups:
            group = self.rng.choice(list(self.groups))
            del self.groups[group]
            self.note("the group of %s/%d at %s is lost", group[1], group[2], group[0])
            owner = self.processes[group[0]]
            attempt = owner.core.state.attempts.get(group[1])
            if (
                owner.alive
                and owner.welcome
                and attempt is not None
                and attempt.k == group[2]
                and attempt.placed
            ):
                owner.do_lost(attempt.id, attempt.k)

    def _silent(self, process: Process) -> None:
        coordinator = self.processes[COORDINATOR]
        if process.who != COORDINATOR and process.who in coordinator.core.state.pools and coordinator.alive:
            self.note("%s can't reach %s", coordinator.name, process.name)
            coordinator.inbox.append(Call("set_silent", (process.who,), ("", None)))
            coordinator.turn()

    def _snapshot(self, process: Process) -> None:
        """Between turns its state is what is durable."""
        if process.alive and not process.replaced:
            state = process.core.state
            process.disk.snapshot = state.seq, msgpack.packb(state.dump())

    def _forget(self, process: Process) -> None:
        """Clients have given up what they were at; so much time passes that what is final is forgotten."""
        coordinator = self.processes[COORDINATOR]
        self.air = [flight for flight in self.air if not _of_client(flight)]
        self.pending.clear()
        for process in self.processes.values():
            process.inbox = [call for call in process.inbox if call.reply_to[0] != "client"]
        coordinator.inbox.append(Call("forget", (), ("", None)))
        coordinator.turn()


def _of_client(flight: Flight) -> bool:
    return isinstance(flight.to, Pending) or (
        isinstance(flight.what, Call) and flight.what.reply_to[0] == "client"
    )


_FAULTS = (
    *[("replaced", World._replaced)] * 3,
    *[("killed", World._killed)] * 2,
    *[("crash in a turn", World._crash_later)] * 3,
    *[("bad disk", World._bad_disk)] * 3,
    *[("clock set", World._clock_is_set)] * 2,
    *[("group lost", World._group_is_lost)] * 2,
    ("silent", World._silent),
    *[("snapshot", World._snapshot)] * 2,
    ("forget", World._forget),
)


def _told(call: Call) -> str:
    if call.op != "exchange":
        return f"{call.op} {call.args}"
    sender, body, answer = call.args
    message = msgpack.unpackb(body, strict_map_key=False)
    items = [item[:5] for item in message[6]]
    return (
        f"{'the answer' if answer else 'a call'} of {sender}/{message[2]}: ({message[4]}, {message[5]}] {items}"
        f" ack {message[7]}" + (f" bids {message[8]}" if message[8] else "")
    )


def play(seed: int, steps: int = STEPS, *, traced: bool = False, mutant: str = "") -> World:
    """One day. Raises what it finds, with the seed; the world is at `error.world`."""
    with ExitStack() as stack:
        stack.enter_context(applied(mutant))
        real, world = clock_module.time, None
        stack.callback(setattr, clock_module, "time", real)
        machine_of: Any = _Later()
        clock_module.time = machine_of
        try:
            world = machine_of.world = World.__new__(World)
            World.__init__(world, seed, traced=traced, mutant=mutant)
            for _ in range(steps):
                world.step()
            calm_down(world)
        except Exception as error:
            found = Violation(f"seed {seed}: {type(error).__name__}: {error}")
            found.world = world  # type: ignore[attr-defined]
            raise found from error
    return world


class _Later:
    """Stands for the module `time` until the world has its machines."""

    world: World

    def time(self) -> float:
        return self.world.machine.time()

    def monotonic(self) -> float:
        return self.world.machine.monotonic()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Plays seeded days full of faults.")
    parser.add_argument("--seeds", default="0-199", help="FIRST-LAST")
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--trace", action="store_true", help="tell the day")
    parser.add_argument("--mutant", default="", choices=["", "all", *MUTANTS], help="break this first")
    args = parser.parse_args(argv)
    first, _, last = args.seeds.partition("-")
    seeds = [args.seed] if args.seed is not None else range(int(first), int(last or first) + 1)
    if args.mutant == "all":
        for mutant in MUTANTS:
            print(f"{mutant:42} {caught(mutant, seeds, args.steps)} of {len(seeds)} seeds", flush=True)
        return 0
    started, seen, failed = time.process_time(), Counter[str](), 0
    for seed in seeds:
        try:
            world = play(seed, args.steps, traced=args.trace, mutant=args.mutant)
        except Violation as error:
            failed += 1
            if not args.mutant and failed == 1 and not args.trace:
                print_failure(seed, args.steps)
            elif args.trace:
                print("\n".join(error.world.trace))  # type: ignore[attr-defined]
            print(error, flush=True)
        else:
            if args.trace:
                print("\n".join(world.trace))
            seen += world.seen
    spent_s = time.process_time() - started
    print(
        f"{len(seeds)} seeds of {args.steps} steps, {failed} failed; {len(seeds) / spent_s:.1f} seeds a CPU second"
    )
    print(", ".join(f"{what}: {n}" for what, n in sorted(seen.items())))
    return 1 if failed else 0


def print_failure(seed: int, steps: int) -> None:
    """The story of a seed that fails."""
    try:
        play(seed, steps, traced=True)
    except Violation as error:
        print("\n".join(error.world.trace))  # type: ignore[attr-defined]


def caught(mutant: str, seeds: Any, steps: int = STEPS) -> int:
    """How many seeds notice the mutant."""
    found = 0
    for seed in seeds:
        try:
            play(seed, steps, mutant=mutant)
        except Violation:
            found += 1
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
