"""Processes of coordinator and pools that can die anywhere, on disks that fail and machines whose clocks are set.

A process takes turns as `actors/shell.py` has them: every command that waits, what the core does by itself, one append,
and only then replies, effects and messages. An append that fails is undone: the core is rebuilt from the log, and the
callers get the error. A sync that fails, or a newer epoch, ends the process. The cores and the clock are the real ones.

The fault model, here and in `fault_simulation.py`:

- *disk*: it is full (nothing of the turn is kept, the process goes on); a sync fails (the turn is kept, or is not; the
  process ends). What was durable stays so, and a later opener fences the earlier.
- *process*: it dies between turns, before its append, or between its append and the first reply; it is replaced while
  it lives (a zombie, which goes on until an append of it is refused). Its successor has the log, or a snapshot and the
  rest of the log.
- *clock*: each actor's machine has a wall clock that is set forwards or back by hours; the monotonic clock goes on.
- *network*: every message and every reply may be lost, repeated, late and overtaken, and reach a zombie.
- *groups*: a placement group does not come up, or is lost; whoever was to report it dies before that.
- *clients*: repeat a command by its id until it is answered; stop late or never; renew their leases or vanish.

- *lost logs*: a pool comes back with an old copy of its log, shorter than the coordinator durably remembers. Whatever
  it grants then would be wrong; it does nothing until an operator declares it lost, sooner or later. Healthy pools are
  declared lost, too.

Not in it: a coordinator's log that gets shorter (`test_lost_logs.py`), groups that a zombie makes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from ray_pools.actors import clock as clock_module
from ray_pools.core import records as ev
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.link import Message
from ray_pools.core.lost import declare_lost
from ray_pools.core.pool import BeginAnew, Place, Pool, Unplace
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import ENDING, HOLDING
from ray_pools.core.requests import FINAL, TAKEN, Request
from ray_pools.errors import PoolsError

if TYPE_CHECKING:
    from fault_world import World

COORDINATOR = "coordinator"
BEFORE_APPEND, BEFORE_REPLY = "before its append", "between append and reply"


class Violation(AssertionError):
    """Something that must hold does not."""


class Full(PoolsError):
    """The append was rolled back."""


class Over(Exception):
    """The process ends here."""


class Disk:
    """One actor's log: what is on it when the power goes."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, bytes]] = []
        self.epoch = 0
        self.snapshot: tuple[int, bytes] | None = None
        # what the next append meets: full, sync lost, sync kept
        self.fault = ""
        self.fences = True
        # a later end of the log is gone, which the coordinator remembers
        self.lost = False

    def cut(self, rows: int) -> None:
        """An old copy takes the place of the log: what came later is gone, and so is the epoch."""
        del self.rows[rows:]
        self.epoch = self.rows[-1][1] if self.rows else 0
        if self.snapshot is not None and self.snapshot[0] > rows:
            self.snapshot = None
        self.lost = True

    def append(
        self, epoch: int, at: float, events: list[Any], expected_seq: int, hear: Callable[[Any], None]
    ) -> None:
        """One turn, durable on return. `hear` is told of each event as it becomes durable."""
        if self.fences and epoch != self.epoch:
            raise Over(f"fenced: epoch {epoch}, now {self.epoch}")
        if self.fences and expected_seq != len(self.rows):
            raise Over(f"row {expected_seq} should be the last, but {len(self.rows)} is")
        fault, self.fault = self.fault, ""
        if fault == "full":
            raise Full("the disk is full")
        if fault != "sync lost":
            self.rows += [(at, epoch, ev.pack(event)) for event in events]
            for event in events:
                hear(event)
        if fault:
            raise Over(fault)

    def fold(self, state: Any) -> Any:
        """The state after all rows, from where this one stands."""
        for at, _, body in self.rows[state.seq :]:
            state.apply(ev.unpack(body), at)
        return state


class Machine:
    """What stands for the module `time` in `actors/clock.py`: each actor's machine has clocks of its own."""

    def __init__(self) -> None:
        # what no actor sees: the seconds that have really passed
        self.true = 0.0
        self.set_by: dict[str, float] = {}
        self.who = ""

    def time(self) -> float:
        return 1e6 + self.true + self.set_by.get(self.who, 0.0)

    def monotonic(self) -> float:
        return 77.0 + self.true


class Call(NamedTuple):
    """A command on its way through a process. `reply_to`: (kind, whom)."""

    op: str
    args: tuple[Any, ...]
    reply_to: tuple[str, Any]


class Errand(NamedTuple):
    """What a pool's process has to do about a placement group: place, unplace, or report that it is lost."""

    what: str
    id: str
    k: int


class Deferred(NamedTuple):
    """The result comes when the request is final."""

    id: str


class View(NamedTuple):
    """A request as its holder sees it, and the event that last changed it."""

    id: str
    state: str
    final: bool
    k: int
    pool: str
    ready: bool
    seq: int


class Process:
    """See the module's docstring."""

    def __init__(self, world: World, who: str, *, use_snapshot: bool = True) -> None:
        self.world, self.who = world, who
        self.disk = world.disks[who]
        world.machine.who = who
        # as `opened_epoch`: where the clock was set back it leaps, here by what was never leapt before
        world.openings += 1
        self.disk.epoch = max(self.disk.epoch + world.openings, int(1000 * world.machine.time()))
        self.epoch = self.disk.epoch
        self.alive = True
        self.crash_at = ""
        self.started_at = world.machine.true
        self.inbox: list[Call] = []
        self.on_final: dict[str, list[Call]] = {}
        self.errands: list[Errand] = []
        self._effects: list[Any] = []
        # of a pool: the coordinator has answered this run
        self.welcome = False
        state = self._folded(use_snapshot)
        world.machine.who = who
        self.clock = clock_module.WallClock(state.clock)
        self.core: Any = self._new_core(state)

    @property
    def name(self) -> str:
        """For the trace."""
        return f"{self.who}/{self.epoch}"

    @property
    def replaced(self) -> bool:
        """A successor has opened the log."""
        return self.epoch != self.disk.epoch

    def now(self) -> float:
        """The time as this process has it."""
        self.world.machine.who = self.who
        return self.clock.now()

    def _folded(self, use_snapshot: bool) -> Any:
        cls: Any = CoordinatorState if self.who == COORDINATOR else PoolState
        if use_snapshot and self.disk.snapshot is not None:
            state = cls.load(msgpack.unpackb(self.disk.snapshot[1], strict_map_key=False))
        else:
            state = cls()
        return self.disk.fold(state)

    def _new_core(self, state: Any) -> Coordinator | Pool:
        if self.who == COORDINATOR:
            return Coordinator(state, self.epoch, self.now())
        return Pool(self.who, state, self.epoch, self.now())

    # --- turns

    def turn(self) -> None:
        """Everything that waits, in one turn. Ends the process where a fault says so."""
        if not self.alive:
            return
        try:
            self._turn()
        except Over as over:
            self.world.note("%s ends: %s", self.name, over)
            self.world.seen["process ends"] += 1
            self.alive = False

    def _turn(self) -> None:
        world, core = self.world, self.core
        batch, self.inbox = self.inbox, []
        before, soft = core.state.seq, core.soft()
        core.set_time(self.now())
        try:
            results = [(call, self._carry_out(call)) for call in batch]
            self._settle()
            step = core.take_step()
        except Exception as error:
            if not self.replaced:
                raise
            # what is told to its successor need not make sense to a zombie: it undoes the turn, as any that fails
            self._undo(batch, PoolsError(repr(error)), soft)
            return
        if world.mutant == "reply before sync":
            self._reply(results)
        if self.crash_at == BEFORE_APPEND:
            raise Over(BEFORE_APPEND)
        if step.events:
            if world.traced:
                world.note("%s logs %s", self.name, ", ".join(map(_shown, step.events)))
            world.writer = self
            try:
                self.disk.append(self.epoch, core.now, step.events, before, self._hear)
            except Full as full:
                world.note("%s: %s", self.name, full)
                world.seen["failed turn"] += 1
                self._undo(batch, full, soft)
                return
        elif batch and self.disk.fences and self.epoch != self.disk.epoch:
            raise Over(f"fenced: epoch {self.epoch}, now {self.disk.epoch}")  # before it answers anybody
        if self.crash_at == BEFORE_REPLY:
            raise Over(BEFORE_REPLY)
        if world.mutant != "reply before sync":
            self._reply(results)
        self._after_turn(step)

    def _hear(self, event: Any) -> None:
        what = getattr(event, "what", getattr(event, "how", ""))
        self.world.seen[type(event).__name__ + what] += 1
        self.world.auditor.hear(self.who, event)

    def _settle(self) -> None:
        if self.who == COORDINATOR:
            self.core.tick()
        elif self.welcome:
            self.core.tick()
            self.core.walk()

    def _undo(self, batch: list[Call], error: PoolsError, soft: Any) -> None:
        failed, self.core = self.core, self._new_core(self._folded(True))
        self.core.resume(soft, failed)
        for call in batch:
            self.world.reply(self, call, error)

    def _reply(self, results: list[tuple[Call, Any]]) -> None:
        for call, result in results:
            if isinstance(result, Deferred):
                self.on_final.setdefault(result.id, []).append(call)
            else:
                self.world.reply(self, call, result() if callable(result) else result)

    def _after_turn(self, step: Any) -> None:
        if self.who == COORDINATOR:
            for id in step.touched:
                request = self.core.state.requests.get(id)
                if request is None:
                    continue
                self.world.show(self.view(request))
                if request.phase == FINAL:
                    for call in self.on_final.pop(id, ()):
                        self.world.reply(self, call, self.view(request))
            return
        if any(isinstance(effect, BeginAnew) for effect in step.effects):
            raise Over("it was declared lost, and begins anew")
        self._effects += step.effects
        if self.welcome:
            for effect in self._effects:
                self._run(effect)
            self._effects.clear()

    def _run(self, effect: Place | Unplace) -> None:
        errand = Errand("place" if isinstance(effect, Place) else "unplace", effect.id, effect.k)
        if errand.what == "unplace":
            self.errands = [e for e in self.errands if e[1:] != errand[1:]]
        if errand not in self.errands:
            self.errands.append(errand)

    def _be_welcome(self) -> None:
        """Groups of nobody are removed, and groups that are gone are found to be."""
        self.welcome = True
        attempts = self.core.state.attempts
        groups = self.world.groups
        for group in [g for g in groups if g[0] == self.who]:
            attempt = attempts.get(group[1])
            if attempt is None or attempt.k != group[2] or attempt.state not in HOLDING:
                if self.world.mutant != "groups of a lost pool stay":
                    del groups[group]
        for a in attempts.values():
            if a.state in HOLDING and a.state != ENDING and a.placed and a.placed.get("pg"):
                if (self.who, a.id, a.k) not in groups:
                    self.errands.append(Errand("lost", a.id, a.k))

    # --- commands

    def _carry_out(self, call: Call) -> Any:
        run = getattr(self, "_op_" + call.op, None) or getattr(self.core, call.op)
        try:
            return run(*call.args)
        except PoolsError as error:
            return error

    def _op_exchange(self, peer: str, body: bytes, answer: bool) -> Any:
        message = Message(*msgpack.unpackb(body, strict_map_key=False))
        if self.who == COORDINATOR:
            self.core.exchange(peer, message)
            return lambda: pack(self.core.outgoing(peer))
        self.core.check(message)
        if answer and not self.welcome and not self.core.is_replaced(message):
            self._be_welcome()
        if self.welcome or self.core.is_replaced(message):
            self.core.exchange(message)
        return lambda: pack(self.core.outgoing())

    def _op_submit(self, id: str, requester: str, amounts: dict[str, int], options: dict[str, Any]) -> View:
        return self.view(self.core.submit(id, requester, amounts, **options))

    def _op_release(self, id: str) -> Any:
        request = self.core.find(id)
        return (lambda: self.view(request)) if self.core.release(request) else Deferred(id)

    def _op_cancel(self, id: str) -> Any:
        request = self.core.find(id)
        return (lambda: self.view(request)) if self.core.cancel(request) else Deferred(id)

    def _op_stopped(self, id: str, k: int) -> Any:
        request = self.core.find(id)
        if k == request.k:  # a late repetition must not stop the next attempt
            self.core.stopped(request)
        return lambda: self.view(request)

    def _op_renew(self, id: str) -> Any:
        request = self.core.find(id)
        self.core.renew(request)
        if request.phase != FINAL and not self.replaced:
            self.world.auditor.renewed(id)
        return lambda: self.view(request)

    def _op_get(self, id: str) -> Any:
        request = self.core.find(id)
        return lambda: self.view(request)

    def _op_declare_lost(self, pool: str, id: str) -> int:
        return declare_lost(self.core, pool, "somebody", id)

    def _op_forget(self) -> None:
        self.core.retention_s = -1e9
        self.core.forget()

    def view(self, request: Request) -> View:
        """What its holder is shown."""
        ready = request.told == "placed" and request.phase == TAKEN and not request.asked
        return View(
            request.id,
            request.shown,
            request.phase == FINAL,
            request.k,
            request.owner,
            ready,
            request.changed_seq,
        )

    # --- errands

    def do_errand(self, errand: Errand, *, fails: bool = False) -> None:
        """The group is there, or gone, or does not come up; and that is reported, until it is in the log."""
        group = (self.who, errand.id, errand.k)
        if errand.what == "place" and not fails:
            self.world.auditor.group_is_made(group)
            self.world.groups[group] = None
            call = Call(
                "placed", (errand.id, errand.k, {"pg": f"{errand.id}/{errand.k}"}), ("errand", errand)
            )
        elif errand.what == "unplace":
            self.world.groups.pop(group, None)
            call = Call("gone", (errand.id, errand.k), ("errand", errand))
        else:
            why = "its node is gone" if errand.what == "lost" else "not placed within 60 s"
            call = Call("unplaced", (errand.id, errand.k, why), ("errand", errand))
        self.world.note("%s: %s of %s/%d%s", self.name, errand.what, errand.id, errand.k, " fails" * fails)
        self.inbox.append(call)
        self.turn()

    def do_lost(self, id: str, k: int) -> None:
        """The watcher sees that a group is gone."""
        errand = Errand("lost", id, k)
        self.errands.append(errand)
        self.do_errand(errand)


def pack(message: Message) -> bytes:
    """The message as it travels."""
    packed: bytes = msgpack.packb(list(message))
    return packed


def _shown(event: Any) -> str:
    fields = ", ".join(
        f"{name}={value!r}" for name, value in event._asdict().items() if value not in ("", {}, [])
    )
    return f"{type(event).__name__}({fields})"


def digest_of(rows: list[tuple[float, int, bytes]]) -> str:
    """A hash of a log, to see that a seed gives the same twice."""
    summed = hashlib.blake2b(digest_size=8)
    for at, epoch, body in rows:
        summed.update(repr((at, epoch)).encode() + body)
    return summed.hexdigest()
