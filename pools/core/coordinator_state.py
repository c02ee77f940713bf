"""The state of the coordinator: a fold over its log. `apply` is the only thing that changes it.

Durable: pools and policies, every request that is not forgotten, and what each pool must be told of it (a directive,
numbered by the event that it follows from). What is soft (leases, the pools' answers) is not here but in
`coordinator.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgpack

from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.quota import NO_POLICY, admission_cause
from ray_pools.errors import Refused

OPEN = "open"
TAKEN = "taken"
FINAL = "final"

# So many ids of changes are kept: who repeats one has not heard of the answer yet, and is not far behind.
CHANGE_IDS_KEPT = 1000

FINAL_STATES = frozenset(("released", "rejected", "cancelled", "preempted", "expired"))

# What its pool told of a taken attempt -> the request's state (docs/rules.md section 8)
_SHOWN = {
    "": "queued",
    "nominated": "queued",
    "granted": "allocated",
    "placed": "allocated",
    "preempting": "preempting",
}


class Directive:
    """What a pool must be told of a request: newest only, for it says all that went before."""

    __slots__ = ("k", "kind", "seq", "what")

    def __init__(self, seq: int, kind: str, k: int, what: str = "") -> None:
        self.seq, self.kind, self.k, self.what = seq, kind, k, what


class Request:
    """A request over all its attempts."""

    __slots__ = (
        "age",
        "amounts",
        "answers",
        "asked",
        "causes",
        "changed_seq",
        "client",
        "detail",
        "directives",
        "finished_at",
        "id",
        "k",
        "lease_s",
        "not_before",
        "options",
        "owner",
        "pauses",
        "phase",
        "pools",
        "preemptible",
        "requester",
        "retries",
        "retries_at_first",
        "state",
        "submitted_at",
        "told",
        "told_at",
        "token",
    )

    def __init__(self, event: ev.Submitted, at: float) -> None:
        self.id = event.id
        self.requester = event.requester
        # as submitted, zeros included: an id belongs to its content (section 2)
        self.amounts: ev.Amounts = tuple((key, amount) for key, amount in event.amounts)
        self.preemptible = event.preemptible
        self.retries = self.retries_at_first = event.retries
        self.lease_s = event.lease_s
        self.age = event.age
        self.submitted_at = at
        self.options = event.options
        self.token = event.token
        self.client = event.client
        self.phase = OPEN
        self.k = 1
        # the pools of the attempt, in the request's own order
        self.pools: tuple[str, ...] = tuple(event.pools)
        self.not_before: dict[str, float] = {}
        # pool -> how often in a row it gave a grant back because its group did not come up
        self.pauses: dict[str, int] = {}
        self.owner = ""
        self.told = ""
        self.told_at = at
        self.detail: dict[str, Any] = {}
        # release, cancel or expire, once someone wants it to end: it fences all later attempts
        self.asked = ""
        self.state = ""
        self.causes: dict[str, str] = event.causes
        self.directives: dict[str, Directive] = {}
        self.changed_seq = 0
        self.finished_at = 0.0
        # soft: pool -> (answer, in_share) for the attempt that is open
        self.answers: dict[str, tuple[str, bool]] = {}

    @property
    def shown(self) -> str:
        """Its state, in the words of docs/rules.md section 8."""
        return self.state if self.phase == FINAL else _SHOWN[self.told]

    @property
    def positive(self) -> ev.Amounts:
        """The amounts that count: positive ones, by key."""
        return tuple(sorted((key, amount) for key, amount in self.amounts if amount > 0))


def directive_item(request: Request, pool: str, seq: int) -> list[Any]:
    """What the pool is told of the request now, as an item of a message (docs/protocol.md, "Directives")."""
    directive = request.directives[pool]
    if directive.kind == "close":
        return [seq, request.id, "close", directive.k]
    if directive.kind == "ask":
        return [seq, request.id, "ask", directive.k, directive.what]
    fields = [
        request.requester,
        [list(pair) for pair in request.positive],
        request.preemptible,
        request.age,
        request.submitted_at,
        request.not_before.get(pool, 0.0),
        request.options,
    ]
    if directive.kind == "take":
        return [seq, request.id, "take", directive.k, fields]
    return [seq, request.id, "enqueue", directive.k, len(request.pools) == 1, fields]


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
        self.ages = 0
        self.requests: dict[str, Request] = {}
        self.peers: dict[str, ev.Peer] = {}
        # client -> what it said of its process; as long as there is a request of it
        self.holders: dict[str, dict[str, str]] = {}
        # --- derived
        self.waiting_or_holding: dict[str, Request] = {}
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
        wire = [[part if isinstance(part, str) else part.to_wire() for part in change] for change in changes]
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
        if event.command_id:
            self.changes_made[event.command_id] = event.version, _change_hash(event.changes)
            if len(self.changes_made) > CHANGE_IDS_KEPT:
                del self.changes_made[next(iter(self.changes_made))]
        for kind, *rest in event.changes:
            if kind == "pool":
                config = PoolConfig.from_wire(rest[0])
                self.pools[config.name] = config
                self.uids[config.name] = rest[1]
                self.configured[config.name] = self.seq
            elif kind == "unpool":
                (name,) = rest
                del self.pools[name], self.uids[name]
                self.configured.pop(name, None)
                self.peers.pop(name, None)
                for policies in self.policies.values():
                    policies.pop(name, None)
            elif kind == "policy":
                policy = PolicyConfig.from_wire(rest[0])
                self.policies.setdefault(policy.requester, {})[policy.pool] = policy
                self.configured[policy.pool] = self.seq
            else:
                requester, pool = rest
                del self.policies[requester][pool]
                self.configured[pool] = self.seq
        self._admitted.clear()

    def _submitted(self, event: ev.Submitted, at: float) -> None:
        request = self.requests[event.id] = Request(event, at)
        self.ages = max(self.ages, event.age)
        if event.pools:
            self.waiting_or_holding[event.id] = request
            self.live_of_client.setdefault(request.client, {})[event.id] = None
            self._begin(request)
        else:
            request.phase, request.state, request.finished_at = FINAL, "rejected", at
        self._touch(request)

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
        for pool in request.pools:
            if pool not in event.pools and pool != request.owner:
                request.directives[pool] = Directive(self.seq, "close", request.k)
        request.k, request.pools, request.retries = event.k, tuple(event.pools), event.retries
        request.not_before, request.pauses = event.not_before, event.pauses
        self._begin(request)
        self._touch(request)

    def _taken(self, event: ev.Taken, at: float) -> None:
        request = self.requests[event.id]
        request.phase, request.owner, request.answers = TAKEN, event.pool, {}
        for pool in request.pools:
            kind = "take" if pool == event.pool else "close"
            request.directives[pool] = Directive(self.seq, kind, event.k)

    def _told(self, event: ev.Told, at: float) -> None:
        request = self.requests[event.id]
        request.told, request.detail, request.told_at = event.state, event.detail, at
        if event.state == "placed" and request.owner in request.pauses:
            request.pauses = {pool: n for pool, n in request.pauses.items() if pool != request.owner}
        self._touch(request)

    def _asked(self, event: ev.Asked, at: float) -> None:
        request = self.requests[event.id]
        if event.what in ("release", "cancel", "expire"):
            request.asked = event.what
        request.directives[request.owner] = Directive(self.seq, "ask", event.k, event.what)

    def _finished(self, event: ev.Finished, at: float) -> None:
        request = self.requests[event.id]
        if request.phase == OPEN:
            for pool in request.pools:
                request.directives[pool] = Directive(self.seq, "close", request.k)
        request.phase, request.state, request.finished_at = FINAL, event.state, at
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

    def dump(self) -> dict[str, Any]:
        """The durable state as plain values, in an order that depends on nothing but the log."""
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
            "requests": [_dump(self.requests[id]) for id in sorted(self.requests)],
        }
        dumped["layout"] = {"keys": sorted(dumped), "fields": _FIELDS}
        # no part of the layout, and left out where there are none: logs of before are the same states as ever
        if self.holders:
            dumped["holders"] = sorted(
                [client, sorted(said.items())] for client, said in self.holders.items()
            )
        return dumped

    @classmethod
    def load(cls, dumped: dict[str, Any]) -> CoordinatorState:
        """The state that `dump` wrote, with all that is derived from it. UnknownSnapshot if other code wrote it."""
        state = cls()
        ev.check_layout(dumped, state.dump())
        for name in ("seq", "clock", "version", "ages"):
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
        requests = sorted(map(_load, dumped["requests"]), key=lambda r: r.age)
        for request in requests:  # in the order in which they came, as where the whole log was folded
            state.requests[request.id] = request
            if request.phase != FINAL:
                state.waiting_or_holding[request.id] = request
                state.live_of_client.setdefault(request.client, {})[request.id] = None
        state.holders = {client: dict(said) for client, said in dumped.get("holders", ())}
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


_FIELDS = sorted(set(Request.__slots__) - {"answers", "amounts", "pools", "directives"})


def _dump(request: Request) -> list[Any]:
    return [
        [list(pair) for pair in request.amounts],
        list(request.pools),
        [[pool, d.seq, d.kind, d.k, d.what] for pool, d in sorted(request.directives.items())],
        *(getattr(request, name) for name in _FIELDS),
    ]


def _load(fields: list[Any]) -> Request:
    request = Request.__new__(Request)
    amounts, pools, directives, *rest = fields
    for name, value in zip(_FIELDS, rest, strict=True):
        setattr(request, name, value)
    request.amounts = tuple((key, amount) for key, amount in amounts)
    request.pools = tuple(pools)
    request.directives = {pool: Directive(seq, kind, k, what) for pool, seq, kind, k, what in directives}
    request.answers = {}
    return request


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
}
