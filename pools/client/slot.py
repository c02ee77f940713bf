"""A slot: one grant of a request in its holder's hands, from the moment it is usable until it is given back.

It hands out where work runs (the granted placement group) only as long as the grant stands: work sent to a group that
is gone would hang for ever. It tells of its end by an event, a callback, and an error at `check()`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import BadInput, PoolsError, SlotError, SlotOver, SlotPreempted
from .views import View, error_of, is_final

if TYPE_CHECKING:
    from .ticket import Ticket

log = logging.getLogger("ray_pools")

DEFAULT_STRATEGY = "DEFAULT"


class Slot:
    """Attempt `k` of a request, granted. Made by `Ticket.wait` and `Client.slot`; safe to use from any thread.

    `preempting` is set once the holder must leave: on preemption, and also when the slot was lost in another way
    (an operator's cancel, a lease that ran out). `check()` raises which of them it was.
    """

    def __init__(self, ticket: Ticket, view: View) -> None:
        self._ticket = ticket
        self.id: str = view["id"]
        self.requester: str = view["requester"]
        self.pool: str = view["pool"]
        self.k: int = view["k"]
        self.resources: dict[str, int] = dict(view["amounts"])
        self._placement: dict[str, Any] = dict(view.get("placement") or {})
        self._labels: dict[str, str] = dict(view.get("labels") or {})
        self.preempting = threading.Event()
        self._lock = threading.Lock()
        # "released" or "stopped", once its holder gave it back; _gone: the grant is no more
        self._given_back = ""
        self._gone = False
        self._problem: SlotError | None = None
        self._deadline: float | None = None
        self._callbacks: list[Callable[[Slot], object]] = []

    def __repr__(self) -> str:
        return f"<Slot {self.id} attempt {self.k} on pool {self.pool!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Slot stays in its process: hand over slot.scheduling_strategy or slot.placement_group"
        )

    # --- where work runs

    @property
    def counts_only(self) -> bool:
        """The pool keeps count and places nothing: work runs wherever Ray puts it."""
        return not self._placement.get("pg")

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The placement group's bundles, in Ray's resources; empty when the pool only counts."""
        return [dict(bundle) for bundle in self._placement.get("bundles") or ()]

    @property
    def label_selector(self) -> dict[str, str]:
        """The pool's labels, as Ray's label selector: for work beside a grant that only counts, such as Ray Train's,
        which makes a placement group of its own. Empty for a pool without labels.
        """
        return dict(self._labels)

    @property
    def placement_group(self) -> Any:
        """Ray's PlacementGroup; None when the pool only counts. SlotOver once the slot is over."""
        self._must_stand()
        if self.counts_only:
            return None
        from ray._raylet import PlacementGroupID
        from ray.util.placement_group import PlacementGroup

        # with its bundles known, Ray need not ask for them at the first use
        return PlacementGroup(PlacementGroupID.from_hex(self._placement["pg"]), self.bundles or None)

    @property
    def scheduling_strategy(self) -> Any:
        """For tasks and actors: `f.options(scheduling_strategy=slot.scheduling_strategy)` runs inside the grant,
        and what it starts does too. "DEFAULT", Ray's own, when the pool only counts. SlotOver once it is over.
        """
        return self._strategy(-1)

    def scheduling_strategy_for(self, bundle_index: int) -> Any:
        """Likewise, in one bundle of a gang. BadInput for a bundle that is not there."""
        count = len(self.bundles)
        if (
            isinstance(bundle_index, bool)
            or not isinstance(bundle_index, int)
            or not 0 <= bundle_index < count
        ):
            expected = f"a bundle's index, from 0 to {count - 1}" if count else "a slot of a pool that places"
            raise BadInput("bundle_index", bundle_index, expected)
        return self._strategy(bundle_index)

    def options(self, **more: Any) -> dict[str, Any]:
        """Options for a task or an actor inside the slot: `f.options(**slot.options(num_gpus=1)).remote()`."""
        return {"scheduling_strategy": self.scheduling_strategy, **more}

    def as_handed(self) -> View:
        """What another process must know to follow this slot: plain values."""
        return {
            "id": self.id,
            "requester": self.requester,
            "state": "allocated",
            "pool": self.pool,
            "k": self.k,
            "amounts": dict(self.resources),
            "placement": dict(self._placement),
            "labels": dict(self._labels),
            "changed_seq": -1,
        }

    def _strategy(self, bundle_index: int) -> Any:
        group = self.placement_group
        if group is None:
            return DEFAULT_STRATEGY
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle_index, placement_group_capture_child_tasks=True
        )

    def _must_stand(self) -> None:
        if not self.over:
            self._ticket._make_sure()
        with self._lock:
            if self._given_back:
                raise SlotOver(self.id, "given back")
            if self._gone:
                raise SlotOver(self.id, self._problem.summary if self._problem else "gone")

    # --- its end

    @property
    def over(self) -> bool:
        """Given back, or gone: it hands out nothing any more."""
        return bool(self._given_back) or self._gone

    def check(self) -> None:
        """Raises what ended the slot, or ends it soon: SlotPreempted, SlotCancelled, LeaseExpired; SlotOver when
        it was given back. To be called between steps of work that can stop there. It asks the coordinator when
        the lease was not renewed for too long, as in a process that was stopped: its slot may be another's by now.
        """
        if not self.over:
            self._ticket._make_sure()
        if self._problem is not None:
            raise self._problem
        self._must_stand()

    def grace_left_s(self) -> float | None:
        """Seconds until the slot is taken by force; None while nobody wants it, 0 when it is gone."""
        if self._gone:
            return 0.0
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def on_preempt(self, callback: Callable[[Slot], object]) -> None:
        """Calls it with this slot, once, in a thread of its own, when `preempting` is set (at once if it is)."""
        with self._lock:
            if self._problem is None:
                self._callbacks.append(callback)
                return
        self._call_back([callback])

    def stopped(self) -> None:
        """The holder of a preempted slot has stopped its work: the capacity may go. Harmless if it is gone."""
        if self._give_back("stopped"):
            self._ticket._own_op("stopped", k=self.k)

    def release(self) -> None:
        """Gives the slot back; returns when its capacity is free. Harmless twice."""
        if self._give_back("released"):
            self._ticket._own_op("release")

    async def stopped_async(self) -> None:
        """As `stopped`. Once begun it is carried out, also when its caller is cancelled."""
        if self._give_back("stopped"):
            await self._ticket._own_op_async("stopped", k=self.k)

    async def release_async(self) -> None:
        """As `release`. Once begun it is carried out, also when its caller is cancelled."""
        if self._give_back("released"):
            await self._ticket._own_op_async("release")

    async def preempting_async(self) -> None:
        """Returns when `preempting` is set, or the slot was given back; no thread waits. Unreachable as `wait`."""
        await self._ticket._wait_until_async(
            lambda _: self.preempting.is_set() or self.over, None, "called back"
        )

    def _give_back(self, how: str) -> bool:
        """Nothing is handed out any more. Is there something to be told to the coordinator?"""
        with self._lock:
            self._given_back = self._given_back or how
            return not self._gone and self._ticket._holds(self.k)

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives it back. Raises what ended the slot during the block, unless the block raised by itself."""
        ended_by, given_back = self._problem, self._given_back
        try:
            if isinstance(ended_by, SlotPreempted):
                self.stopped()
            else:
                self.release()
        except PoolsError as trouble:
            self._not_given_back(trouble, problem or ended_by)
        self._raise_end(problem, ended_by, given_back)

    async def __aenter__(self) -> Slot:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `__exit__`."""
        ended_by, given_back = self._problem, self._given_back
        try:
            if isinstance(ended_by, SlotPreempted):
                await self.stopped_async()
            else:
                await self.release_async()
        except PoolsError as trouble:
            self._not_given_back(trouble, problem or ended_by)
        self._raise_end(problem, ended_by, given_back)

    def _not_given_back(self, trouble: PoolsError, other: BaseException | None) -> None:
        """What the block raised, or what ended the slot, says more."""
        if other is None:
            raise trouble
        log.warning("slot %s was not given back, its lease will do it: %s", self.id, trouble)

    def _raise_end(self, problem: BaseException | None, ended_by: SlotError | None, given_back: str) -> None:
        if problem is None and given_back != "released":
            ended_by = ended_by or self._ended_before_release()
            if ended_by is not None:
                raise ended_by

    def _ended_before_release(self) -> SlotError | None:
        """The answer to the release may bring the first word of another end."""
        view = self._ticket.view
        if view["k"] == self.k and view["state"] in ("cancelled", "expired", "preempted"):
            return error_of(view)
        return None

    # --- what its ticket tells it

    def _see(self, view: View) -> None:
        """The request changed. Called with views in the order of the log, some of them left out."""
        callbacks: list[Callable[[Slot], object]] = []
        with self._lock:
            standing = view["k"] == self.k and view["state"] in ("allocated", "preempting")
            if not standing:
                self._gone = True
            if self._given_back or (view["state"] == "released" and view["k"] == self.k):
                return
            if standing and view["state"] == "allocated":
                return
            if self._problem is None:
                # a later attempt: this one was preempted, whether or not we heard of it
                mine = is_final(view) and view["k"] == self.k
                self._problem = error_of(view) if mine else SlotPreempted(self.id)
                grace_s = view.get("grace_left_s", view.get("grace_s", 0.0))
                self._deadline = time.monotonic() + (grace_s if standing else 0.0)
                callbacks, self._callbacks = self._callbacks, []
        if self._problem is not None:
            self.preempting.set()
        self._call_back(callbacks)

    def _lose(self, problem: SlotError) -> None:
        """The coordinator does not know the request any more."""
        with self._lock:
            self._gone = True
            self._problem = self._problem or problem
            callbacks, self._callbacks = self._callbacks, []
        self.preempting.set()
        self._call_back(callbacks)

    def _call_back(self, callbacks: list[Callable[[Slot], object]]) -> None:
        if callbacks:
            threading.Thread(
                target=self._run, args=(callbacks,), name=f"ray-pools-preempt-{self.id}", daemon=True
            ).start()

    def _run(self, callbacks: list[Callable[[Slot], object]]) -> None:
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # a user's code: the others are called all the same
                log.exception("slot %s: a callback of on_preempt failed", self.id)
