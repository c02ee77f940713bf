"""Placement groups of one pool's grants: made, watched, removed and found again by name.

Each group is one `_Group` with a stage; one thread takes every group's next step when it is due, so that nothing
here ever blocks the actor's event loop, and a step that fails (the GCS is down) is simply taken again later:

    create -> pending -> ready            `placed` is posted on the way to ready
    remove -> settling -> (forgotten)     `gone` is posted at the end

What was measured with Ray 2.60 and shapes this (2 cores, one node):
- Creating takes 1 ms, and the group is ready 1 ms later if there is room. `pg.ready()` would run a task inside the
  group, so its state is read instead (0.4 ms by id; a listing costs more, and grows with all groups that ever were).
- A removed group's capacity comes back to the GCS with the node's next report, up to 0.1 s later. A group that
  is made in between finds no room and is tried again after 1 s. So `gone` waits for that report.
- The processes in a removed group live on for up to 0.2 s (SIGTERM, then SIGKILL), while Ray counts their GPUs as free
  after 0.1 s: where something ran, `gone` waits for them, or the next holder finds a GPU's memory taken.
- Groups are detached: they outlive this actor, and its successor finds them by name. Names are unique to
  namespace, pool, request and attempt.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Set
from typing import Any

from ray_pools import wire
from ray_pools.actors.ray_groups import CREATED, GroupInfo, Groups, Impossible, NameTaken, RayGroups, View
from ray_pools.core.bundles import Bundle, bundles_for, selector_for, strategy_for
from ray_pools.errors import BadInput, shown

log = logging.getLogger("ray_pools")

Post = Callable[[str, str, int, Any], None]
"""post(kind, request id, attempt, payload), called in the placer's thread: placed (detail), unplaced (why), gone; and
cleared, of no request."""

CREATE, PENDING, READY, REMOVE, SETTLING = "create", "pending", "ready", "remove", "settling"

_REPORT_S = 0.12
"""A node reports to the GCS every 0.1 s."""

_DYING_S = 0.25
"""The longest that processes in a removed group live on."""

_SETTLING_MAX_S = 90.0
"""A node that hangs reports nothing, and is declared dead after about a minute. Longer is a mistake of ours."""

_READY_EVERY_S = 5.0
_READY_MAX_PER_S = 20.0
_LOOK_S, _LOOK_MAX_S = 0.001, 0.5
_RETRY_S, _RETRY_MAX_S = 0.1, 5.0


class _Group:
    """One placement group, or one that should be or should no longer be."""

    __slots__ = (
        "amounts",
        "bundles",
        "due_at",
        "hex",
        "id",
        "k",
        "name",
        "options",
        "quiet_until",
        "report",
        "retry_s",
        "since",
        "stage",
        "strategy",
    )

    def __init__(self, name: str, id: str, k: int, stage: str) -> None:
        self.name, self.id, self.k, self.stage = name, id, k, stage
        self.amounts: Mapping[str, int] = {}
        self.options: Mapping[str, Any] = {}
        self.bundles: list[Bundle] = []
        self.strategy = ""
        self.hex = ""
        self.since = 0.0  # of the stage
        self.due_at = 0.0
        self.retry_s = _RETRY_S
        self.quiet_until = 0.0  # settling: not gone before
        self.report = False  # somebody waits for `gone`

    def detail(self) -> dict[str, Any]:
        """What the holder is told."""
        return {"pg": self.hex, "name": self.name, "bundles": self.bundles, "strategy": self.strategy}


class Placer:
    """The placement groups of one pool. All methods return at once; what comes of them is posted.

    `groups` is Ray, but for tests; so is `clock`.
    """

    def __init__(
        self,
        namespace: str,
        pool: str,
        post: Post,
        groups: Groups | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.namespace, self.pool = namespace, pool
        self.prefix = wire.group_prefix(namespace, pool)
        self._post_out = post
        self._ray: Groups = groups if groups is not None else RayGroups()
        self._clock = clock
        self._placement: Mapping[str, Any] | None = None
        self._groups: dict[str, _Group] = {}
        self._orphans: set[str] = set()  # not gone yet
        self._found: dict[str, str] | None = None  # name to hex of what was there at the start
        self._due: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._name = f"placer of {pool}"

    # --- called by the actor

    def configure(self, placement: Mapping[str, Any] | None) -> None:
        """How groups are made from now on; those that stand stay as they are."""
        copied = None if placement is None else dict(placement)

        def run() -> None:
            self._placement = copied

        self._send(run)

    def place(
        self, id: str, k: int, amounts: Mapping[str, int], options: Mapping[str, Any] | None = None
    ) -> None:
        """Make the group, or find it by its name. Posts `placed`, or `unplaced` with the reason."""
        self._send(lambda: self._place(id, k, dict(amounts), dict(options or {})))

    def unplace(self, id: str, k: int) -> None:
        """Remove the group, whatever its state. Posts `gone` when its capacity is free, also if there is none."""
        self._send(lambda: self._unplace(id, k))

    def reconcile(
        self,
        expected: Set[tuple[str, int]],
        placed: Mapping[tuple[str, int], Mapping[str, Any]] | None = None,
    ) -> None:
        """At the start: removes this pool's groups that nobody expects, and posts `cleared` when they are gone.
        `placed` (the details that were posted for grants that still stand) has those watched again: one that is gone
        is posted as `unplaced`.
        """
        names, watched = {self.name(*each) for each in expected}, dict(placed or {})
        self._send(lambda: self._reconcile(names, watched))

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends the thread. Groups stay: they are detached, and a successor finds them."""
        self._closing.set()
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def name(self, id: str, k: int) -> str:
        """The name of one attempt's group, unique in the cluster."""
        return wire.group_name(self.namespace, self.pool, id, k)

    # --- the thread

    def _send(self, run: Callable[[], None]) -> None:
        if self._closing.is_set():
            return
        self._inbox.put(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while True:
            run = self._next_command()
            while run is not None:
                try:
                    run()
                except Exception:
                    log.exception("%s: a command failed", self._name)
                run = self._inbox.get_nowait() if not self._inbox.empty() else None
            if self._closing.is_set():
                return
            self._take_steps()

    def _next_command(self) -> Callable[[], None] | None:
        wait_s = None if not self._due else max(0.0, self._due[0][0] - self._clock())
        try:
            return self._inbox.get(timeout=wait_s) if wait_s != 0.0 else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _take_steps(self) -> None:
        """Each group that is due takes its next step; what a node reported is asked at most once for all."""
        now = self._clock()
        view: View | None = None
        if not self._due or self._due[0][0] > now or not self._know_found():
            return
        while self._due and self._due[0][0] <= now and self._inbox.empty():
            due_at, _, name = heapq.heappop(self._due)
            group = self._groups.get(name)
            if group is None or group.due_at != due_at:
                continue
            try:
                if view is None and group.stage in (REMOVE, SETTLING):
                    view = self._ray.view()
                self._step(group, view or {})
                group.retry_s = _RETRY_S
            except Exception as problem:  # noqa: BLE001 - whatever Ray raises: the group must not be forgotten
                log.warning("%s: %s of %s failed, again in %.1f s: %s", self._name, group.stage, name,
                            group.retry_s, shown(str(problem), 300))  # fmt: skip
                self._later(group, group.retry_s)
                group.retry_s = min(group.retry_s * 2, _RETRY_MAX_S)

    def _know_found(self) -> bool:
        """What a predecessor left is listed once, before the first step. False: closed before the GCS answered."""
        retry_s = _RETRY_S
        while self._found is None:
            try:
                self._found = self._ray.list(self.prefix)
            except Exception as problem:  # noqa: BLE001 - as in `_take_steps`
                log.warning("%s: no list of placement groups: %s", self._name, shown(str(problem), 300))
                if self._closing.wait(retry_s):
                    return False
                retry_s = min(retry_s * 2, _RETRY_MAX_S)
        return True

    def _later(self, group: _Group, delay_s: float) -> None:
        group.due_at = self._clock() + delay_s
        heapq.heappush(self._due, (group.due_at, next(self._numbers), group.name))

    def _enter(self, group: _Group, stage: str, delay_s: float = 0.0) -> None:
        group.stage, group.since = stage, self._clock()
        self._later(group, delay_s)

    def _post(self, kind: str, group: _Group, payload: Any = None) -> None:
        try:
            self._post_out(kind, group.id, group.k, payload)
        except Exception as problem:  # noqa: BLE001 - an actor that is ending takes no more; the group's way goes on
            log.warning("%s: %s of %s was not taken: %s", self._name, kind, group.name, problem)

    # --- commands, in the thread

    def _place(self, id: str, k: int, amounts: dict[str, int], options: dict[str, Any]) -> None:
        name = self.name(id, k)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(name, id, k, CREATE)
            group.amounts, group.options = amounts, options
            self._enter(group, CREATE)
        elif group.stage == READY:
            self._post("placed", group, group.detail())

    def _unplace(self, id: str, k: int) -> None:
        name = self.name(id, k)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(name, id, k, REMOVE)
        group.report = True
        if group.stage != SETTLING:
            self._enter(group, REMOVE)

    def _reconcile(self, expected: set[str], placed: Mapping[tuple[str, int], Mapping[str, Any]]) -> None:
        for (id, k), detail in placed.items():
            name = self.name(id, k)
            if detail.get("pg") and name not in self._groups:
                group = self._groups[name] = _Group(name, id, k, READY)
                group.hex, group.strategy = str(detail["pg"]), str(detail.get("strategy", ""))
                group.bundles = list(detail.get("bundles", ()))
                self._enter(group, READY)
        if not self._know_found():
            return
        self._orphans = set()
        for name in self._found or {}:
            if name not in expected and name not in self._groups:
                *_, id, k = wire.group_of(name) or ("", "", name.removeprefix(self.prefix), 0)
                group = self._groups[name] = _Group(name, id, k, REMOVE)
                self._orphans.add(name)
                self._enter(group, REMOVE)
        if not self._orphans:
            self._post("cleared", _Group("", "", 0, ""))

    # --- steps

    def _step(self, group: _Group, view: View) -> None:
        if group.stage == CREATE:
            self._create(group)
        elif group.stage == PENDING:
            self._look(group)
        elif group.stage == READY:
            self._watch(group)
        elif group.stage == REMOVE:
            self._remove(group, view)
        else:
            self._settle(group, view)

    def _create(self, group: _Group) -> None:
        try:
            group.bundles = bundles_for(group.amounts, self._placement, group.options)
            group.strategy = strategy_for(self._placement, group.options)
            if group.bundles:
                group.hex = (self._found or {}).get(group.name) or self._made(group)
        except (BadInput, Impossible) as problem:
            del self._groups[group.name]  # no group was made: an unplace finds none
            self._post("unplaced", group, f"not placed: {problem}")
            return
        if group.bundles:
            self._enter(group, PENDING, _LOOK_S)
        else:  # a grant that only counts has nothing to wait for
            del self._groups[group.name]
            self._post("placed", group, {"pg": "", "name": "", "bundles": [], "strategy": ""})

    def _made(self, group: _Group) -> str:
        selector = selector_for(self._placement)
        try:
            return self._ray.create(group.name, group.bundles, group.strategy, selector)
        except NameTaken:
            # made before a restart, or by a call whose answer was lost
            hex = self._ray.find(group.name)
            if hex is None:
                raise  # removed just now: the name is free at the next try
            return hex

    def _look(self, group: _Group) -> None:
        info = self._ray.info(group.hex)
        waited_s = self._clock() - group.since
        timeout_s = float((self._placement or {}).get("provision_timeout_s") or 0.0)
        if info is None or info.removed:
            self._lost(group)
        elif info.state == CREATED:
            self._post("placed", group, group.detail())
            self._enter(group, READY, self._ready_every_s())
        elif timeout_s and waited_s >= timeout_s:
            self._ray.remove(group.hex)
            self._post("unplaced", group, f"not placed within {timeout_s:g} s{_because(info)}")
            self._settle_from(group, _REPORT_S)
        else:
            # later looks are rarer: a fifth of the wait so far is what a look can be late
            delay_s = min(max(waited_s * 0.2, _LOOK_S), _LOOK_MAX_S)
            left_s = timeout_s - waited_s
            self._later(group, min(delay_s, left_s) if timeout_s else delay_s)

    def _watch(self, group: _Group) -> None:
        info = self._ray.info(group.hex)
        if info is None or info.removed:
            self._lost(group)
        else:
            self._later(group, self._ready_every_s())

    def _ready_every_s(self) -> float:
        return max(_READY_EVERY_S, len(self._groups) / _READY_MAX_PER_S)

    def _lost(self, group: _Group) -> None:
        """Somebody else removed it."""
        self._post("unplaced", group, "not placed: its group was removed")
        self._settle_from(group, _DYING_S)

    def _remove(self, group: _Group, view: View) -> None:
        hex = group.hex or (self._found or {}).get(group.name) or self._ray.find(group.name)
        info = self._ray.info(hex) if hex else None
        if hex is None or info is None or info.removed:
            self._settle_from(group, 0.0, hex or "")
            return
        self._ray.remove(hex)
        free = view.get(hex)
        if info.state not in (CREATED, "RESCHEDULING", "PREPARED"):
            quiet_s = 0.0  # it never held anything
        elif free is None:
            quiet_s = _DYING_S  # too young to be in any report: it may be in use all the same
        else:
            quiet_s = 0.0 if free >= len(info.bundles) else _DYING_S
        self._settle_from(group, quiet_s, hex)

    def _settle_from(self, group: _Group, quiet_s: float, hex: str | None = None) -> None:
        group.hex = group.hex if hex is None else hex
        group.quiet_until = self._clock() + quiet_s
        self._enter(group, SETTLING)

    def _settle(self, group: _Group, view: View) -> None:
        now = self._clock()
        waited_s = now - group.since
        held = bool(group.hex) and group.hex in view and waited_s < _SETTLING_MAX_S
        if held or now < group.quiet_until:
            delay_s = min(max(waited_s * 0.2, 0.005), 0.25)
            self._later(group, delay_s if held else group.quiet_until - now)
            return
        if waited_s >= _SETTLING_MAX_S:
            log.warning("%s: %s was removed, yet a node still reports it", self._name, group.name)
        del self._groups[group.name]
        if self._found is not None:
            self._found.pop(group.name, None)
        if group.report:
            self._post("gone", group)
        if group.name in self._orphans:
            self._orphans.discard(group.name)
            if not self._orphans:
                self._post("cleared", _Group("", "", 0, ""))


def _because(info: GroupInfo) -> str:
    reasons = {"INFEASIBLE": ": no node can hold it", "NO_RESOURCES": ": no node has room"}
    return reasons.get(info.scheduling, "")
