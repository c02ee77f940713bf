"""The state of the coordinator: a fold over its log. `apply` is the only thing that changes it.

Durable: pools and policies, every request that is not forgotten, and what each pool must be told of it (a directive,
numbered by the event that it follows from). What is soft (leases, the pools' answers) is not here but in
`coordinator.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack

from ray_pools.core import records as ev
from ray_pools.core.access import LIMITS
from ray_pools.core.announcements import Announcement, dump_announcements, forget_oldest
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.link import took_the_place_of
from ray_pools.core.quota import DRAINING, NO_POLICY, admission_cause
from ray_pools.core.requests import (
    FINAL,
    OPEN,
    REQUEST_FIELDS,
    TAKEN,
    Directive,
    Request,
    dump_request,
    load_request,
)
from ray_pools.core.timings import TIMINGS
from ray_pools.errors import Refused

# So many ids of changes are kept: who repeats one has not heard of the answer yet, and is not far behind.
CHANGE_IDS_KEPT = 1000


class CoordinatorState:
    """See the module's docstring. Attributes are read by all, and written by `apply` alone."""

    def __init__(self) -> None:
        self.seq = 0
        self.clock = 0.0
        self.version = 0
        self.pools: dict[str, PoolConfig] = {}
        self.uids: dict[str, str] = {}
        # requester -> pool -> policy
        self.policies: dict[str, dict[str, PolicyConfig]] = {}
        # pool -> the event that last changed what it must go by
        self.configured: dict[str, int] = {}
        # id of a change -> the version that it made, and a hash of what it changed; the oldest first
        self.changes_made: dict[str, tuple[int, bytes]] = {}
        # requester -> hash of the key that who submits for it must have; of the key of operators ("": they need none)
        self.requester_keys: dict[str, str] = {}
        self.operator_key = ""
        # those that the configuration set
        self.limits: dict[str, int] = {}
        # section of the configuration (`TIMINGS`) -> its seconds, once a change has set them
        self.timings: dict[str, dict[str, float]] = {}
        self.ages = 0
        self.requests: dict[str, Request] = {}
        self.peers: dict[str, ev.Peer] = {}
        # client -> what it said of its process; as long as there is a request of it
        self.holders: dict[str, dict[str, str]] = {}
        # id -> capacity announced ahead, in the order in which it was; and the last of those that are over
        self.announced: dict[str, Announcement] = {}
        self.announced_before: dict[str, Announcement] = {}
        # --- derived
        self.waiting_or_holding: dict[str, Request] = {}
        # requester -> how many of its requests wait
        self.waiting_of: dict[str, int] = {}
        # client -> ids, the last changed last
        self.of_client: dict[str, dict[str, None]] = {}
        # client -> ids of those that wait or hold
        self.live_of_client: dict[str, dict[str, None]] = {}
        self._admitted: dict[tuple[str, ev.Amounts, bool], tuple[tuple[str, ...], dict[str, str]]] = {}

    # --- reading

    def admit(
        self, requester: str, positive: ev.Amounts, preemptible: bool
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """The pools that admit such a request, in its own order, and the causes of the others (sections 3 and 7)."""
        key = (requester, positive, preemptible)
        found = self._admitted.get(key)
        if found is None:
            policies = self.policies.get(requester, {})
            causes: dict[str, str] = {}
            admitting: list[tuple[int, str]] = []
            for name in sorted(self.pools):
                policy = policies.get(name)
                cause = (
                    NO_POLICY
                    if policy is None
                    else DRAINING
                    if self.pools[name].state == DRAINING
                    else admission_cause(positive, preemptible, self.pools[name].capacity, policy)
                )
                if cause is None and policy is not None:
                    admitting.append((-policy.priority, name))
                elif cause is not None:
                    causes[name] = cause
            if len(self._admitted) > 10_000:
                self._admitted.clear()
            found = self._admitted[key] = tuple(name for _, name in sorted(admitting)), causes
        return found

    def limit(self, name: str) -> int:
        """A limit that the configuration can set: `LIMITS` has their names."""
        return self.limits.get(name, LIMITS[name][0])

    def policies_of(self, pool: str) -> list[PolicyConfig]:
        """The pool's policies, by requester."""
        return [self.policies[r][pool] for r in sorted(self.policies) if pool in self.policies[r]]

    def made_before(self, command_id: str, changes: Sequence[Sequence[Any]]) -> int | None:
        """The version that this very change made when it came for the first time; None if it is new, or has no id.

        Raises:
            Refused: the id belongs to other changes (`id_in_use`).
        """
        known = self.changes_made.get(command_id)
        if known is None:
            return None
        wire = [
            [part.to_wire() if isinstance(part, (PoolConfig, PolicyConfig)) else part for part in change]
            for change in changes
        ]
        if known[1] != _change_hash(wire):
            raise Refused(
                "id_in_use",
                f"change id {command_id!r} belongs to other changes, which made version {known[0]}: use a new id",
                {"id": command_id},
            )
        return known[0]

    # --- the fold

    def apply(self, event: Any, at: float) -> None:
        """One event of the log, which became durable with the core's time `at`."""
        self.seq += 1
        self.clock = max(self.clock, at)
        _APPLY[type(event)](self, event, at)

    def _changed(self, event: ev.Changed, at: float) -> None:
        self.version = event.version
        self._remember(event.command_id, event.changes)
        for kind, *rest in event.changes:
            if kind == "pool":
                config = PoolConfig.from_wire(rest[0])
                self.pools[config.name] = config
                # whoever made the change need not know yet that the pool was declared lost
                if not took_the_place_of(self.uids.get(config.name, ""), rest[1]):
                    self.uids[config.name] = rest[1]
                self.configured[config.name] = self.seq
            elif kind == "unpool":
                (name,) = rest
                del self.pools[name], self.uids[name]
                self.configured.pop(name, None)
                self.peers.pop(name, None)
                for policies in self.policies.values():
                    policies.pop(name, None)
                gone = [each.id for each in self.announced.values() if each.pool == name]
                self._unannounced(ev.Unannounced(gone, "its pool was deleted", ""), at)
            elif kind == "policy":
                policy = PolicyConfig.from_wire(rest[0])
                self.policies.setdefault(policy.requester, {})[policy.pool] = policy
                self.configured[policy.pool] = self.seq
            elif kind == "unpolicy":
                requester, pool = rest
                del self.policies[requester][pool]
                self.configured[pool] = self.seq
            elif kind == "requester":
                self.requester_keys[rest[0]] = rest[1]["key_sha256"]
            elif kind == "unrequester":
                del self.requester_keys[rest[0]]
            elif kind == "operators":
                self.operator_key = rest[0].get("key_sha256", "")
            elif kind == "limits":
                self.limits = dict(rest[0])
            elif kind in TIMINGS:
                self.timings[kind] = {**TIMINGS[kind], **rest[0]}
            else:
                raise ev.UnknownEvent(f"the log holds a change of {kind!r}, which is unknown here")
        self._admitted.clear()

    def _declared_lost(self, event: ev.DeclaredLost, at: float) -> None:
        """Another pool has the name: it must be told of what waits or was taken there, and of nothing else."""
        self.version, pool = event.version, event.pool
        self._remember(event.command_id, [["lost", pool]])
        self.uids[pool], self.configured[pool] = event.uid, self.seq
        self.peers.pop(pool, None)
        for request in self.requests.values():
            before = request.directives.pop(pool, None)
            if request.phase == OPEN and pool in request.pools:
                request.directives[pool] = Directive(self.seq, "enqueue", request.k)
            elif request.phase == TAKEN and request.owner == pool:
                told = request.told in ("placed", "preempting") or (before and before.what == "lost")
                request.directives[pool] = Directive(self.seq, "ask", request.k, "lost" if told else "yield")
                if request.told == "placed":  # its holder must leave
                    request.told, request.told_at = "preempting", at
                self._touch(request)

    def _remember(self, command_id: str, changes: list[list[Any]]) -> None:
        if command_id:
            self.changes_made[command_id] = self.version, _change_hash(changes)
            if len(self.changes_made) > CHANGE_IDS_KEPT:
                del self.changes_made[next(iter(self.changes_made))]

    def _submitted(self, event: ev.Submitted, at: float) -> None:
        request = self.requests[event.id] = Request(event, at)
        self.ages = max(self.ages, event.age)
        if event.pools:
            self.waiting_or_holding[event.id] = request
            self.live_of_client.setdefault(request.client, {})[event.id] = None
            self._begin(request)
            self._count(request, False)
        else:
            request.phase, request.state, request.finished_at = FINAL, "rejected", at
        self._touch(request)

    def _count(self, request: Request, waited: bool) -> None:
        """How many wait, after an event before which it did or did not."""
        if request.waits != waited:
            count = self.waiting_of.get(request.requester, 0) + (1 if request.waits else -1)
            if count:
                self.waiting_of[request.requester] = count
            else:
                del self.waiting_of[request.requester]

    def _begin(self, request: Request) -> None:
        """The attempt starts in its pools; with one pool, this one has taken it (R5: one event)."""
        request.phase, request.owner, request.told, request.detail = OPEN, "", "", {}
        request.answers = {}
        for pool in request.pools:
            request.directives[pool] = Directive(self.seq, "enqueue", request.k)
        if len(request.pools) == 1:
            request.phase, request.owner = TAKEN, request.pools[0]

    def _opened(self, event: ev.Opened, at: float) -> None:
        request = self.requests[event.id]
        waited = request.waits
        for pool in request.pools:
            if pool not in event.pools and pool != request.owner:
                request.directives[pool] = Directive(self.seq, "close", request.k)
        request.k, request.pools, request.retries = event.k, tuple(event.pools), event.retries
        request.not_before, request.pauses = event.not_before, event.pauses
        self._begin(request)
        self._count(request, waited)
        self._touch(request)

    def _taken(self, event: ev.Taken, at: float) -> None:
        request = self.requests[event.id]
        request.phase, request.owner, request.answers = TAKEN, event.pool, {}
        for pool in request.pools:
            kind = "take" if pool == event.pool else "close"
            request.directives[pool] = Directive(self.seq, kind, event.k)

    def _told(self, event: ev.Told, at: float) -> None:
        request = self.requests[event.id]
        waited = request.waits
        request.told, request.detail, request.told_at = event.state, event.detail, at
        self._count(request, waited)
        if event.state == "placed" and request.owner in request.pauses:
            request.pauses = {pool: n for pool, n in request.pauses.items() if pool != request.owner}
        self._touch(request)

    def _asked(self, event: ev.Asked, at: float) -> None:
        request = self.requests[event.id]
        if event.what in ("release", "cancel", "expire"):
            request.asked = event.what
        if request.is_lost(request.owner):
            return  # that its pool must end it is said already
        request.directives[request.owner] = Directive(self.seq, "ask", event.k, event.what)

    def _finished(self, event: ev.Finished, at: float) -> None:
        request = self.requests[event.id]
        waited = request.waits
        if request.phase == OPEN:
            for pool in request.pools:
                request.directives[pool] = Directive(self.seq, "close", request.k)
        request.phase, request.state, request.finished_at = FINAL, event.state, at
        self._count(request, waited)
        request.causes, request.answers = event.causes, {}
        self.waiting_or_holding.pop(event.id, None)
        _drop(self.live_of_client, request.client, event.id)
        self._touch(request)

    def _forgotten(self, event: ev.Forgotten, at: float) -> None:
        for id in event.ids:
            self._leave(self.requests.pop(id))

    def _leave(self, request: Request) -> None:
        """It is no request of its client any more."""
        _drop(self.of_client, request.client, request.id)
        if request.client not in self.of_client:
            self.holders.pop(request.client, None)

    def _holder_seen(self, event: ev.HolderSeen, at: float) -> None:
        self.holders[event.client] = event.holder

    def _holder_gone(self, event: ev.HolderGone, at: float) -> None:
        self.holders.pop(event.client, None)

    def _adopted(self, event: ev.Adopted, at: float) -> None:
        request = self.requests[event.id]
        self._leave(request)
        _drop(self.live_of_client, request.client, event.id)
        request.client = event.client
        self.live_of_client.setdefault(request.client, {})[event.id] = None
        self._touch(request)

    def _commanded(self, event: ev.Commanded, at: float) -> None:
        if event.id in self.requests and event.what in ("release", "cancel"):
            self.requests[event.id].by = event.by

    def _denied(self, event: ev.Denied, at: float) -> None:
        """It is in the log for who reads it."""

    def _announced(self, event: ev.Announced, at: float) -> None:
        self.announced[event.id] = Announcement.of(event, self.ages)

    def _unannounced(self, event: ev.Unannounced, at: float) -> None:
        for id in event.ids:
            over = self.announced.pop(id)._replace(over=event.why, over_at=at)
            self.announced_before[id] = over
        forget_oldest(self.announced_before)

    def _peer(self, event: ev.Peer, at: float) -> None:
        if event.name in self.pools:
            self.peers[event.name] = event

    def _touch(self, request: Request) -> None:
        """What its holder must hear of changed."""
        request.changed_seq = self.seq
        ids = self.of_client.setdefault(request.client, {})
        ids.pop(request.id, None)
        ids[request.id] = None

    # --- the whole of it, as bytes

    def dump(self, requests: Iterable[Request] | None = None) -> dict[str, Any]:
        """The durable state as plain values, in an order that depends on the log alone. `requests`: only these."""
        dumped: dict[str, Any] = {
            "seq": self.seq,
            "clock": self.clock,
            "version": self.version,
            "ages": self.ages,
            "pools": [
                [self.pools[n].to_wire(), self.uids[n], self.configured.get(n, 0)] for n in sorted(self.pools)
            ],
            "policies": [
                self.policies[r][p].to_wire() for r in sorted(self.policies) for p in sorted(self.policies[r])
            ],
            "peers": [list(self.peers[name]) for name in sorted(self.peers)],
            "changes_made": [[id, *made] for id, made in self.changes_made.items()],
            "requester_keys": dict(sorted(self.requester_keys.items())),
            "operator_key": self.operator_key,
            "limits": dict(sorted(self.limits.items())),
            "requests": [
                dump_request(request)
                for request in sorted(
                    self.requests.values() if requests is None else requests, key=lambda each: each.id
                )
            ],
        }
        dumped["layout"] = {"keys": sorted(dumped), "fields": REQUEST_FIELDS}
        # no part of the layout, and left out where there are none: logs of before are the same states as ever
        if self.holders:
            dumped["holders"] = sorted(
                [client, sorted(said.items())] for client, said in self.holders.items()
            )
        if self.timings:
            dumped["timings"] = [
                [section, sorted(values.items())] for section, values in sorted(self.timings.items())
            ]
        return {**dumped, **dump_announcements(self.announced, self.announced_before)}

    @classmethod
    def load(cls, dumped: dict[str, Any]) -> CoordinatorState:
        """The state that `dump` wrote, with all that is derived from it. UnknownSnapshot if other code wrote it."""
        state = cls()
        ev.check_layout(dumped, state.dump())
        for name in ("seq", "clock", "version", "ages", "requester_keys", "operator_key", "limits"):
            setattr(state, name, dumped[name])
        for wire, uid, configured in dumped["pools"]:
            config = PoolConfig.from_wire(wire)
            state.pools[config.name], state.uids[config.name] = config, uid
            state.configured[config.name] = configured
        for wire in dumped["policies"]:
            policy = PolicyConfig.from_wire(wire)
            state.policies.setdefault(policy.requester, {})[policy.pool] = policy
        state.changes_made = {id: (version, made) for id, version, made in dumped["changes_made"]}
        state.peers = {fields[0]: ev.Peer(*fields) for fields in dumped["peers"]}
        requests = sorted(map(load_request, dumped["requests"]), key=lambda r: r.age)
        for request in requests:  # in the order in which they came, as where the whole log was folded
            state.requests[request.id] = request
            if request.phase != FINAL:
                state.waiting_or_holding[request.id] = request
                state.live_of_client.setdefault(request.client, {})[request.id] = None
                state._count(request, False)
        state.holders = {client: dict(said) for client, said in dumped.get("holders", ())}
        state.timings = {section: dict(values) for section, values in dumped.get("timings", ())}
        for name in ("announced", "announced_before"):
            setattr(state, name, {each[0]: Announcement.load(each) for each in dumped.get(name, ())})
        for request in sorted(requests, key=lambda r: r.changed_seq):
            state.of_client.setdefault(request.client, {})[request.id] = None
        return state

    def digest(self) -> str:
        """A hash of the durable state: equal logs give equal digests (docs/rules.md section 10.7)."""
        return hashlib.blake2b(msgpack.packb(self.dump()), digest_size=16).hexdigest()


def _drop(ids_of: dict[str, dict[str, None]], client: str, id: str) -> None:
    ids = ids_of.get(client)
    if ids is not None:
        ids.pop(id, None)
        if not ids:
            del ids_of[client]


def _change_hash(changes: list[list[Any]]) -> bytes:
    return hashlib.blake2b(msgpack.packb(changes), digest_size=16).digest()


_APPLY: dict[type[Any], Any] = {
    ev.Changed: CoordinatorState._changed,
    ev.Submitted: CoordinatorState._submitted,
    ev.Opened: CoordinatorState._opened,
    ev.Taken: CoordinatorState._taken,
    ev.Told: CoordinatorState._told,
    ev.Asked: CoordinatorState._asked,
    ev.Finished: CoordinatorState._finished,
    ev.Forgotten: CoordinatorState._forgotten,
    ev.HolderSeen: CoordinatorState._holder_seen,
    ev.HolderGone: CoordinatorState._holder_gone,
    ev.Adopted: CoordinatorState._adopted,
    ev.Peer: CoordinatorState._peer,
    ev.Commanded: CoordinatorState._commanded,
    ev.Denied: CoordinatorState._denied,
    ev.DeclaredLost: CoordinatorState._declared_lost,
    ev.Announced: CoordinatorState._announced,
    ev.Unannounced: CoordinatorState._unannounced,
}
