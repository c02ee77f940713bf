"""Reads every row at the moment it becomes durable, and what clients were told, and says what can't be true.

To the bookkeeping of `Auditor` (docs/rules.md 10.1 to 10.3, docs/protocol.md "Attempts") it adds 10.6: what
was acknowledged is in the log, with the content that was sent, once, and has its effect. And that no clock that is set
makes a lease or a grace shorter than it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from auditor import Auditor
from fault_processes import View

from ray_pools.core import records as ev

if TYPE_CHECKING:
    from fault_world import World

_EPSILON_S = 1e-6
_END_OF = {"release": "released", "cancel": "cancelled", "expire": "expired"}


class FaultAuditor(Auditor):
    """See the module's docstring. `problems` is what it found."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.submitted: dict[str, ev.Submitted] = {}
        self.asked_end: dict[str, str] = {}
        self.granted: set[tuple[str, int, str]] = set()
        # (id, k) that the coordinator knows to be granted
        self.told: set[tuple[str, int]] = set()
        # id of a command -> the version that it made
        self.changes: dict[str, int] = {}
        self.forgotten: set[str] = set()
        # (id, k) of which the holder said that it has stopped
        self.confirmed: set[tuple[str, int]] = set()
        # when a lease began to run for the last time, in seconds that really passed
        self._lease_from: dict[str, float] = {}
        # (pool, id) -> since when a victim has had its grace, and how long that is at least
        self._grace: dict[tuple[str, str], tuple[float, float]] = {}
        self._grace_s: dict[str, float] = {}
        # pools whose log is gone altogether
        self.emptied: set[str] = set()

    def hear(self, who: str, event: Any) -> None:
        """A row became durable."""
        if who in self.emptied:  # it begins with nothing
            self.emptied.discard(who)
            self._forget_pool(who)
        super().hear(who, event)

    def _forget_pool(self, who: str) -> None:
        self.at[who].clear()
        self._grace = {key: since for key, since in self._grace.items() if key[0] != who}

    # --- the coordinator's rows

    def _submitted(self, who: str, event: ev.Submitted) -> None:
        super()._submitted(who, event)
        self.submitted[event.id] = event
        self.renewed(event.id)

    def renewed(self, id: str) -> None:
        """The holder's renewal reached the coordinator."""
        self._lease_from[id] = self.world.machine.true

    def _changed(self, who: str, event: ev.Changed) -> None:
        if event.command_id:
            self._says(event.command_id not in self.changes, f"change {event.command_id} was made twice")
            self.changes[event.command_id] = event.version

    def _asked(self, who: str, event: ev.Asked) -> None:
        facts = self.requests[event.id]
        self._says(event.k == facts.k and not facts.final, f"{event} of attempt {facts.k}, {facts.final!r}")
        if event.what in _END_OF:
            self._says(event.id not in self.asked_end, f"{event} after {self.asked_end.get(event.id)}")
            self.asked_end[event.id] = event.what
        if event.what == "expire":
            self._lease_is_over(event.id)
        if event.what == "stopped":
            said = (event.id, event.k) in self.confirmed
            self._says(said, f"{event}, but the holder of attempt {event.k} did not say so")

    def _lease_is_over(self, id: str) -> None:
        lease_s, now = self.submitted[id].lease_s, self.world.machine.true
        since = max(self._lease_from[id], self.world.writer.started_at)
        self._says(
            0 < lease_s <= now - since + _EPSILON_S,
            f"the lease of {id} is {lease_s} s, and ran out after {now - since:.3f} s",
        )

    def _opened(self, who: str, event: ev.Opened) -> None:
        super()._opened(who, event)
        asked = self.asked_end.get(event.id)
        self._says(not asked, f"{event.id} was asked to {asked}, and attempt {event.k} opens")

    def _finished(self, who: str, event: ev.Finished) -> None:
        super()._finished(who, event)
        asked = self.asked_end.get(event.id)
        if asked:
            right = event.state in ("cancelled", _END_OF[asked])
            self._says(right, f"{event.id} was asked to {asked}, and is {event.state}")
        elif event.state in ("cancelled", "released", "expired"):
            wanted = event.id in self.world.end_wanted
            if not wanted:
                self._lease_is_over(event.id)

    def _forgotten(self, who: str, event: ev.Forgotten) -> None:
        for id in event.ids:
            self._says(bool(self.requests[id].final), f"{id} is forgotten, and is not final")
        self.forgotten.update(event.ids)

    def _declaredlost(self, who: str, event: ev.DeclaredLost) -> None:
        self._says(
            event.command_id not in self.changes, f"{event.pool} was declared lost twice by one command"
        )
        self.changes[event.command_id] = event.version
        self.world.disks[event.pool].lost = False

    # --- the pools' rows

    def _told(self, who: str, event: ev.Told) -> None:
        if event.state in ("granted", "placed"):
            self.told.add((event.id, event.k))

    def _begunanew(self, who: str, event: ev.BegunAnew) -> None:
        """What it was asked to run counts as over only once it says so; its groups may stand until then.

        An old copy of before the first such row begins anew by itself. What the coordinator never heard of between
        may happen again: nobody was told of it, and its groups are removed before.
        """
        self._forget_pool(who)
        self.granted = {grant for grant in self.granted if grant[2] != who or grant[:2] in self.told}

    def group_is_made(self, group: tuple[str, str, int]) -> None:
        """A placement group comes up: no other one of its request stands, and its pool has none of nobody."""
        pool, id, _ = group
        for other in self.world.groups:
            self._says(other[1] != id or other == group, f"{group} is made, and {other} stands")
            of_nobody = other[0] == pool and other[1] not in self.at[pool]
            self._says(not of_nobody, f"{group} is made, while {other} stands for nobody")

    def _configured(self, who: str, event: ev.Configured) -> None:
        super()._configured(who, event)
        grace_s = self._grace_s[who] = float(event.config.get("grace_s", 30.0))
        for key, (since, least_s) in self._grace.items():
            if key[0] == who:
                self._grace[key] = since, min(least_s, grace_s)

    def _granted(self, who: str, event: ev.Granted) -> None:
        super()._granted(who, event)
        grant = (event.id, event.k, who)
        self._says(grant not in self.granted, f"{grant} is granted twice")
        self.granted.add(grant)

    def _nominated(self, who: str, event: ev.Nominated) -> None:
        super()._nominated(who, event)
        for id, _ in event.victims:
            self._grace[who, id] = self.world.machine.true, self._grace_s[who]

    def _evicted(self, who: str, event: ev.Evicted) -> None:
        super()._evicted(who, event)
        self._grace[who, event.id] = self.world.machine.true, self._grace_s[who]

    def _ending(self, who: str, event: ev.Ending) -> None:
        super()._ending(who, event)
        self._grace_is_over(who, event)

    def _ended(self, who: str, event: ev.Ended) -> None:
        super()._ended(who, event)
        self._grace_is_over(who, event)

    def _grace_is_over(self, who: str, event: ev.Ending | ev.Ended) -> None:
        since, least_s = self._grace.pop((who, event.id), (None, 0.0))
        if since is None or event.why != "its grace ran out":
            return
        had_s = self.world.machine.true - max(since, self.world.writer.started_at)
        self._says(
            had_s + _EPSILON_S >= least_s, f"{event.id} at {who} had {had_s:.3f} s of {least_s} s of grace"
        )

    # --- what clients were told

    def told_submitted(
        self, id: str, requester: str, amounts: dict[str, int], options: dict[str, Any]
    ) -> None:
        """The submission was acknowledged."""
        event = self.submitted.get(id)
        self._says(event is not None, f"the submission of {id} was acknowledged, and is not in the log")
        if event is not None:
            sent = (requester, [[key, n] for key, n in sorted(amounts.items())], *options.values())
            stands = (
                event.requester,
                [list(pair) for pair in event.amounts],
                *(getattr(event, n) for n in options),
            )
            self._says(sent == stands, f"{id} was acknowledged as {sent}, and is {stands}")

    def told_ended(self, op: str, id: str, view: View) -> None:
        """A release or a cancel was acknowledged."""
        final = self.requests[id].final
        self._says(bool(final), f"the {op} of {id} was acknowledged, and it goes on")
        self._says(final == view.state, f"the {op} of {id} was acknowledged as {view.state}; it is {final!r}")
        self._says(
            not self._where(id), f"the {op} of {id} was acknowledged, and it stands in {self._where(id)}"
        )

    def told_changed(self, command_id: str, version: int) -> None:
        """A change was acknowledged."""
        made = self.changes.get(command_id)
        self._says(made == version, f"change {command_id} made version {version}, and the log says {made}")

    def told_view(self, view: View) -> None:
        """Somebody was shown a request."""
        final = self.requests[view.id].final
        if view.final:
            self._says(final == view.state, f"{view.id} was shown as {view.state}, and is {final!r}")
        if view.ready:
            held = (view.id, view.k, view.pool) in self.granted
            self._says(held, f"{view} is ready, and was never granted")
