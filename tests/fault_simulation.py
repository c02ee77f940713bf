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
import sys
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import msgpack
from fault_calm import calm_down
from fault_mutants import MUTANTS, applied
from fault_processes import BEFORE_APPEND, BEFORE_REPLY, COORDINATOR, Call, Process, Violation
from fault_world import Flight, Pending, World

from ray_pools.actors import clock as clock_module

STEPS = 200


class Day(World):
    """What happens, step by step."""

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

    def _log_is_cut(self, process: Process) -> None:
        if process.who != COORDINATOR:
            self.lose(process)

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
            if attempt is not None and attempt.k == group[2] and attempt.placed:
                if owner.alive and owner.welcome:
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


_FAULTS: tuple[tuple[str, Any], ...] = (
    *[("replaced", Day._replaced)] * 3,
    *[("killed", Day._killed)] * 2,
    *[("crash in a turn", Day._crash_later)] * 3,
    *[("bad disk", Day._bad_disk)] * 3,
    *[("clock set", Day._clock_is_set)] * 2,
    *[("group lost", Day._group_is_lost)] * 2,
    ("silent", Day._silent),
    *[("snapshot", Day._snapshot)] * 2,
    ("forget", Day._forget),
    *[("a log is cut", Day._log_is_cut)] * 2,
)


def play(seed: int, steps: int = STEPS, *, traced: bool = False, mutant: str = "") -> Day:
    """One day. Raises what it finds, with the seed; the world is at `error.world`."""
    with ExitStack() as stack:
        stack.enter_context(applied(mutant))
        real, world = clock_module.time, None
        stack.callback(setattr, clock_module, "time", real)
        machine_of: Any = _Later()
        clock_module.time = machine_of
        try:
            world = machine_of.world = Day.__new__(Day)
            Day.__init__(world, seed, traced=traced, mutant=mutant)
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
