"""The world of a simulated day (`fault_simulation`): actors, the network between them, clients and what they know."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, NamedTuple

import msgpack
from fault_auditor import FaultAuditor
from fault_calm import settle
from fault_processes import COORDINATOR, Call, Disk, Machine, Process, View, Violation, pack

from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.errors import PoolsError, Refused

PLACEMENT = {"strategy": "PACK", "provision_timeout_s": 60.0}
TEAMS = ("t1", "t2", "t3")


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
        self.openings = 0
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
        if isinstance(result, PoolsError) and not isinstance(result, Refused) and not _of_operator(pending):
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
        if op in ("change", "declare_lost"):
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
        elif what < 0.96 and name in state.pools:
            self.declare_lost(name)
            return
        else:
            changes = [("unpool", name)]
        self.seen[f"change {changes[0][0]}"] += 1
        self.command("change", "", (changes, f"c{self.commands + 1}"))

    def declare_lost(self, name: str) -> None:
        """An operator says that the log of a pool is lost, be it so or not."""
        self.seen["declared lost"] += 1
        id = f"c{self.commands + 1}"
        self.command("declare_lost", "", (name, id))

    def lose(self, process: Process) -> None:
        """The pool comes back with an old copy of its log, shorter than the coordinator knows it."""
        peers = self.processes[COORDINATOR].disk.fold(CoordinatorState()).peers
        if process.who not in peers or process.replaced or peers[process.who].head < 1:
            return
        self.machine.true += 0.01  # no two runs open a log in the same millisecond
        process.alive = False
        self.zombies = [zombie for zombie in self.zombies if zombie.who != process.who]
        rows = self.rng.randrange(peers[process.who].head)
        self.note("%s loses its log after row %d of %d", process.who, rows, len(process.disk.rows))
        process.disk.cut(rows)
        if not process.disk.rows:
            self.auditor.emptied.add(process.who)
        self.seen["log lost"] += 1
        self.start(process.who)

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


def _of_operator(pending: Pending) -> bool:
    return pending.op in ("change", "declare_lost")


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
