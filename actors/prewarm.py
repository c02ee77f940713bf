"""Sends the wish for nodes to Ray's autoscaler: one thread, at most one call each 0.2 s, again every period.

The register at the autoscaler is one for the whole cluster and the last writer wins, so the coordinator alone has a
`Prewarmer`. Its calls block while the GCS is down, which is why none runs on the actor's event loop. In between it
looks what stands there: a wish that somebody else wrote over, or that went with a GCS that was started anew, is sent
again at once, and told of. An empty wish is sent once and not repeated: others may use the register when the pools
want nothing.

What the cluster's node types can never provide is cut before (`ray_pools.core.feasible`): an autoscaler v2 that is
asked for more brings up nothing for anybody. So where others' wishes stand beside ours and lead beyond, the register is
written anew with what can be had of theirs after ours, each time that they ask for more. Where the types can't be read
and the autoscaler calls the wish infeasible, it is cut to the nodes that are there, and tried whole a minute later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ray_pools.actors.autoscaler import COORDINATOR, Autoscaler, Standing, Wanted, wanted_of, wishes_of
from ray_pools.core.feasible import Cluster, Cut, Feasible, feasible, marked, marker
from ray_pools.core.prewarm import Lingering, Wish, clamp
from ray_pools.errors import shown

log = logging.getLogger("ray_pools")

SEND_EVERY_MIN_S = 0.2
_RETRY_S, _RETRY_MAX_S = 0.5, 10.0

_WATCHED_S = 0.3
_LOOK_MAX_S = 1.0
"""Between two looks at what else lives in the cluster. From the start of Ray Data's actor to its first word it takes
longer than that, so that our wish is among the first that it writes."""

_CAUTIOUS_S = 60.0

# Others who ask for too much do so again and again, every 10 or 20 s: seldom is it all that stands when somebody looks.
_CUT_SHOWN_S = 60.0


class _Sent(NamedTuple):
    """What the autoscaler was asked for, and how it stands in the register."""

    wishes: list[Wish]
    wanted: Wanted
    through: str
    at: float


class Prewarmer:
    """Keeps the autoscaler's register at what was wished last. Methods return at once."""

    def __init__(
        self,
        autoscaler: Autoscaler,
        period_s: float = 10.0,
        linger_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.period_s = period_s
        self._ray, self._clock = autoscaler, clock
        self._lingering = Lingering(linger_s)
        self._changed = threading.Condition()
        # below: guarded by _changed
        self._wishes: list[Wish] = []
        self._is_new = True  # a predecessor's wish may still stand: the first one is sent even if it is empty
        self._cleared = False
        self._closed = False
        self._sent: _Sent | None = None
        self._error = ""
        self._version = "unknown"
        self._cuts: dict[str, Cut] = {}
        self._nodes: dict[str, int] | None = None
        self._types_known = False
        self._blind: list[str] = []
        self._others_cut: Cut | None = None
        # how often our wish was found to be gone, when last, and what stood there
        self._overwritten, self._overwritten_at, self._overwritten_by = 0, 0.0, ""
        self._thread: threading.Thread | None = None
        # --- of the thread alone
        self._looked_at = self._read_at = 0.0
        self._cautious_until = 0.0
        self._known_gone = False
        self._others_cut_at = 0.0

    def update(self, wishes: Sequence[Wish]) -> None:
        """What is wanted now. Cheap when nothing changed."""
        with self._changed:
            if self._closed or (wishes == self._wishes and not self._is_new and not self._cleared):
                return
            self._wishes, self._is_new, self._cleared = list(wishes), True, False
            self._wake()

    def go_by(self, period_s: float, linger_s: float) -> None:
        """Other times from here on; what lingers already does so for as long as it was to."""
        with self._changed:
            if (period_s, linger_s) == (self.period_s, self._lingering.linger_s):
                return
            self.period_s, self._lingering.linger_s = period_s, linger_s
            self._changed.notify()

    def clear(self) -> None:
        """Takes everything back, what lingers too."""
        with self._changed:
            if self._closed:
                return
            self._wishes, self._is_new, self._cleared = [], True, True
            self._wake()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread, after a last try to send what is new (so `clear` then `close` leaves nothing behind)."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def status(self) -> dict[str, Any]:
        """For `pools status`: per pool what was sent and what was cut, how long ago, and what went wrong."""
        with self._changed:
            sent, now = self._sent, self._clock()
            wishes = sent.wishes if sent else []
            return {
                "wanted": {
                    wish.pool: {"bundles": len(wish.bundles), "gpus": wish.total("GPU")} for wish in wishes
                },
                "bundles": sum(len(wish.bundles) for wish in wishes),
                "gpus": sum(wish.total("GPU") for wish in wishes),
                "sent_s_ago": None if sent is None else max(0.0, now - sent.at),
                "error": self._error,
                "autoscaler": self._version,
                "through": sent.through if sent else "",
                "cut": {pool: cut._asdict() for pool, cut in self._cuts.items()},
                # pool -> how many nodes its wish takes; None: the node types are not known
                "nodes_wanted": self._nodes,
                "node_types_known": self._types_known,
                "labels_ignored": list(self._blind),
                # what others ask for through Ray's own actor, and can't have beside the pools
                "others_cut": self._others_cut._asdict() if self._others_cut else None,
                "overwritten": self._overwritten,
                "overwritten_s_ago": max(0.0, now - self._overwritten_at) if self._overwritten else None,
                "overwritten_by": self._overwritten_by,
            }

    def sent(self) -> list[Wish]:
        """What the autoscaler was last asked for."""
        with self._changed:
            return list(self._sent.wishes) if self._sent else []

    @property
    def overwritten(self) -> int:
        """How often our wish was found to be gone."""
        return self._overwritten

    # --- the thread

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="prewarmer", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _loop(self) -> None:
        retry_s = _RETRY_S
        while True:
            with self._changed:
                while not self._is_new and not self._closed:
                    wait_s = self._wait_s()
                    if wait_s is not None and wait_s <= 0:
                        break
                    self._changed.wait(wait_s)
                if self._closed and not self._is_new:
                    return
                due = self._is_new or self._is_due()
                wishes = self._current() if due else []
                self._is_new = False
            ok = self._bring(wishes) if due else self._look()
            with self._changed:
                if not ok and not self._closed:
                    self._is_new = True
                    self._changed.wait_for(lambda: self._closed, retry_s)
                # what changes meanwhile goes into one call
                self._changed.wait_for(lambda: self._closed, SEND_EVERY_MIN_S if due else 0.0)
            retry_s = _RETRY_S if ok else min(retry_s * 2, _RETRY_MAX_S)

    def _due_at(self) -> float | None:
        """When the wish must be sent again, or one that lingers ends."""
        times = [self._sent.at + self.period_s] if self._sent and self._sent.wishes else []
        end = self._lingering.next_end()
        if end is not None:
            times.append(end)
        return min(times, default=None)

    def _is_due(self) -> bool:
        at = self._due_at()
        return at is not None and at <= self._clock()

    def _wait_s(self) -> float | None:
        at = self._due_at()
        if at is None:
            return None
        if self._sent and self._sent.wishes:
            at = min(at, self._looked_at + self._look_s)
        return at - self._clock()

    @property
    def _look_s(self) -> float:
        return min(self.period_s / 4, self._read_s, _LOOK_MAX_S)

    @property
    def _read_s(self) -> float:
        """Where others ask for too much, they are watched: until it is cut, our nodes are not safe."""
        if self._sent is None or self._sent.through != COORDINATOR:
            return self.period_s / 4
        return _WATCHED_S if self._others_cut else _LOOK_MAX_S

    def _current(self) -> list[Wish]:
        now = self._clock()
        if self._cleared:
            self._lingering = Lingering(self._lingering.linger_s)
            return []
        return self._lingering.update(self._wishes, now) if self._is_new else self._lingering.wanted(now)

    # --- not under the lock, since any of these calls may block

    def _bring(self, wishes: list[Wish]) -> bool:
        """Sends what can be had of the wishes."""
        error = ""
        before, now = self._sent, self._clock()
        try:
            version = self._version_now()
            cluster = self._cluster_now()
            possible = self._possible([wish for wish in map(clamp, wishes) if wish.bundles], cluster, now)
            types = cluster.types if cluster is not None else ()
            if version == "v1":
                possible = possible._replace(wishes=[marked(wish, types) for wish in possible.wishes])
            wanted = possible.wishes
            with self._changed:
                self._version, self._cuts = version, possible.cuts
                self._nodes = possible.nodes if cluster is not None else None
                self._types_known = cluster is not None
                self._blind = [
                    wish.pool for wish in wanted if version == "v1" and marker(wish.selector, types) is None
                ]
            if not wanted and before is not None and not before.wishes:
                return True
            bundles = [bundle for wish in wanted for bundle in wish.bundles]
            selectors = [wish.selector for wish in wanted for _ in wish.bundles]
            again = before is not None and before.wishes == wanted
            if again and before is not None and not self._known_gone:
                self._check_standing(before, self._ray.standing())
            through = self._ray.send(bundles, selectors, again)
            sent = _Sent(wanted, wanted_of(bundles, selectors, version != "v1"), through, self._clock())
        except Exception as problem:  # noqa: BLE001 - whatever Ray raises: the next try may do
            error = f"{type(problem).__name__}: {shown(str(problem), 300)}"
            log.warning("prewarming: %s", error)
        with self._changed:
            self._error = error
            if not error:
                self._sent, self._known_gone = sent, False
                self._looked_at = self._read_at = sent.at
        return not error

    def _look(self) -> bool:
        """Between two sendings: is our wish where it must be, and does it stand? False: it is to be sent again."""
        sent, self._looked_at = self._sent, self._clock()
        if sent is None:
            return True
        try:
            if sent.through != COORDINATOR and self._ray.has_coordinator() and not self._ray_complains():
                log.info("prewarming: Ray's %s has come: the wish goes there from here on", COORDINATOR)
                self._send_anew()
            elif self._clock() - self._read_at >= self._read_s:
                self._read_at = self._clock()
                standing = self._ray.standing()
                if not self._check_standing(sent, standing):
                    self._known_gone = True
                    self._send_anew()
                elif standing is not None and sent.through == COORDINATOR and self._version != "v1":
                    self._make_feasible(sent, standing)
        except Exception as problem:  # noqa: BLE001 - as above; the period sends again anyhow
            log.info("prewarming: no look at what stands: %s", shown(str(problem), 300))
        return True

    def _ray_complains(self) -> bool:
        return bool(getattr(self._ray, "complaint", ""))

    def _send_anew(self) -> None:
        with self._changed:
            self._is_new = True

    def _make_feasible(self, sent: _Sent, standing: Standing) -> None:
        """Others may ask for what can't be had, and the autoscaler takes all or nothing."""
        cluster, others = self._cluster_now(), wishes_of(standing.wanted - sent.wanted)
        cut = None
        if cluster is not None and others:
            possible = feasible(sent.wishes, cluster, others=others)
            left_out = [possible.cuts[each.pool] for each in others if each.pool in possible.cuts]
            if left_out:
                cut = Cut(
                    sum(each.bundles for each in left_out),
                    sum(each.gpus for each in left_out),
                    "; ".join(dict.fromkeys(each.why for each in left_out)),
                )
                bundles = [bundle for wish in possible.wishes for bundle in wish.bundles]
                selectors = [wish.selector for wish in possible.wishes for _ in wish.bundles]
                self._ray.write(bundles, selectors)
                self._others_cut_at = self._clock()
                if self._others_cut is None:
                    log.warning(
                        "prewarming: others ask for what the cluster can't provide (%d bundles: %s), for which the"
                        " autoscaler would bring up nothing at all: it is cut",
                        cut.bundles,
                        cut.why,
                    )
        if cut is not None or self._clock() - self._others_cut_at > _CUT_SHOWN_S:
            with self._changed:
                self._others_cut = cut

    def _check_standing(self, sent: _Sent, standing: Standing | None) -> bool:
        """Whether what we sent stands, and whether the autoscaler calls it infeasible; both are told."""
        if standing is None or not sent.wishes:
            return True
        ours = sent.through != COORDINATOR or not self._types_known
        if ours and sent.wanted <= standing.refused and self._clock() >= self._cautious_until:
            log.warning(
                "prewarming: the autoscaler calls the wish infeasible and would bring up nothing:"
                " it is cut to the nodes that are there"
            )
            self._cautious_until = self._clock() + _CAUTIOUS_S
            return False
        # there may be others' wishes beside ours where Ray's own actor adds them up
        stands = (
            sent.wanted <= standing.wanted if sent.through == COORDINATOR else sent.wanted == standing.wanted
        )
        if stands:
            return True
        found = _words(standing.wanted)
        with self._changed:
            self._overwritten += 1
            self._overwritten_at, self._overwritten_by = self._clock(), found
        log.warning(
            "prewarming: somebody else called request_resources, or a new GCS has forgotten the wish: there stood %s;"
            " it is put right",
            found,
        )
        return False

    def _possible(self, wishes: list[Wish], cluster: Cluster | None, now: float) -> Feasible:
        if now < self._cautious_until:
            return feasible(wishes, cluster or Cluster([]), grows=False)
        if cluster is None:
            return Feasible(wishes, {}, {})
        return feasible(wishes, cluster)

    def _cluster_now(self) -> Cluster | None:
        try:
            return self._ray.cluster()
        except Exception as problem:  # noqa: BLE001 - of no public interface, some of it: then nothing is cut
            log.info("prewarming: the node types can't be read: %s", shown(str(problem), 300))
            return None

    def _version_now(self) -> str:
        try:
            return self._ray.version()
        except Exception as problem:  # noqa: BLE001 - it is for the status, and for what v1 needs besides
            log.info("prewarming: no word of an autoscaler: %s", shown(str(problem), 300))
            return "unknown"


def _words(wanted: Wanted) -> str:
    """What stands there, in total."""
    totals: dict[str, float] = {}
    for (bundle, _), count in wanted.items():
        for name, amount in bundle:
            totals[name] = totals.get(name, 0.0) + amount * count
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(totals.items())) or "nothing"
