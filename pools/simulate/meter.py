"""Who held how much over time, in share and borrowed (docs/rules.md sections 1 and 4), and what shares waited for.

The sums are exact between events, as those of `ray_pools.log_usage`, which measures real logs.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.pool import Pool
from ..core.queue import Kind


class Holding:
    """One requester in one pool. Seconds are of the amount: GPU-seconds."""

    __slots__ = ("_at", "_bin_s", "bins", "booked", "borrowed_s", "held", "in_share_s", "reserved")

    def __init__(self, reserved: int, bin_s: float) -> None:
        self.reserved = reserved
        self.held = 0
        # what of it is not being preempted
        self.booked = 0
        self.in_share_s = 0.0
        self.borrowed_s = 0.0
        # number of the span of time -> what was held in it
        self.bins: dict[int, float] = {}
        self._bin_s = bin_s
        self._at = 0.0

    def change(self, now: float, held: int, booked: int) -> None:
        """It holds so much more, or less, from now on."""
        was = self.held
        if was:
            self.settle(now)
        else:
            self._at = now
        self.held = was + held
        self.booked += booked

    def settle(self, now: float) -> None:
        """What was held since the last change is added up."""
        since, held = self._at, self.held
        elapsed_s = now - since
        self._at = now
        if not held or elapsed_s <= 0:
            return
        share = self.booked if self.booked < self.reserved else self.reserved
        self.in_share_s += share * elapsed_s
        self.borrowed_s += (held - share) * elapsed_s
        bin_s, bins = self._bin_s, self.bins
        first, last = int(since // bin_s), int(now // bin_s)
        if first == last:
            bins[first] = bins.get(first, 0.0) + held * elapsed_s
            return
        bins[first] = bins.get(first, 0.0) + held * ((first + 1) * bin_s - since)
        for number in range(first + 1, last):
            bins[number] = bins.get(number, 0.0) + held * bin_s
        bins[last] = bins.get(last, 0.0) + held * (now - last * bin_s)


class ShareWatch:
    """How long requests stood in their share, as their requester's oldest, beyond what section 10.4 grants them."""

    def __init__(self, pools: Mapping[str, Pool], key: str) -> None:
        self._pools, self._key = pools, key
        self._bounds_s: dict[str, float] = {}
        for name, pool in pools.items():
            config = pool.state.config
            self._bounds_s[name] = 2 * config.grace_s + config.min_runtime_s if config else 0.0
        # pool -> id -> since when, and its amount
        self._since: dict[str, dict[str, tuple[float, int]]] = {name: {} for name in pools}
        self.unmet_s = 0.0
        self.unmet = 0
        self.longest_s = 0.0

    def look(self, now: float) -> None:
        """Once all has settled at this time."""
        for name, pool in self._pools.items():
            state, since = pool.state, self._since[name]
            order = state.queue.ordered(state.ledger)
            if not since and not state.nominated and not (order and order[0].share):
                continue
            oldest: dict[str, tuple[int, str, int]] = {}
            for kind in order:
                if not kind.share:
                    break
                self._older(oldest, kind)
            waiting = {id: amount for _, id, amount in oldest.values()}
            # what was freed for a nominated one is on its way, and it still waits
            for attempt in state.nominated.values():
                use = state.ledger.uses[attempt.requester]
                if attempt.id in since or state.ledger.in_share(
                    state.need(attempt), use, attempt.preemptible, nominated=True
                ):
                    waiting[attempt.id] = dict(attempt.amounts).get(self._key, 0)
            for id in [id for id in since if id not in waiting]:
                self._over(name, id, now)
            for id, amount in waiting.items():
                since.setdefault(id, (now, amount))

    def _older(self, oldest: dict[str, tuple[int, str, int]], kind: Kind) -> None:
        head = kind.head()
        known = oldest.get(kind.requester)
        if head is not None and (known is None or head.age < known[0]):
            oldest[kind.requester] = head.age, head.id, dict(head.amounts).get(self._key, 0)

    def _over(self, name: str, id: str, now: float) -> None:
        began, amount = self._since[name].pop(id)
        waited_s = now - began
        self.longest_s = max(self.longest_s, waited_s)
        beyond_s = waited_s - self._bounds_s[name]
        if beyond_s > 0:
            self.unmet += 1
            self.unmet_s += amount * beyond_s

    def close(self, now: float) -> None:
        """What still waits has waited until now."""
        for name, since in self._since.items():
            for id in list(since):
                self._over(name, id, now)
