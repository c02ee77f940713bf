"""A request as the coordinator's state holds it, over all its attempts, and what each pool must be told of it."""

from __future__ import annotations

from typing import Any

from ray_pools.core import records as ev

OPEN = "open"
TAKEN = "taken"
FINAL = "final"

FINAL_STATES = frozenset(("released", "rejected", "cancelled", "preempted", "expired"))

# What its pool told of a taken attempt -> the request's state (docs/rules.md section 8)
SHOWN = {
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
        "by",
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
        # the operator who wanted it to end, if it was one
        self.by = ""
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
        return self.state if self.phase == FINAL else SHOWN[self.told]

    @property
    def waits(self) -> bool:
        """It queues: nothing is held for it."""
        return self.phase != FINAL and self.told in ("", "nominated")

    def is_lost(self, pool: str) -> bool:
        """The pool was declared lost while it ran this attempt, which is not known to be over."""
        directive = self.directives.get(pool)
        return directive is not None and (directive.k, directive.what) == (self.k, "lost")

    @property
    def positive(self) -> ev.Amounts:
        """The amounts that count: positive ones, by key."""
        return ev.positive(self.amounts)


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


REQUEST_FIELDS = sorted(set(Request.__slots__) - {"answers", "amounts", "pools", "directives"})


def dump_request(request: Request) -> list[Any]:
    return [
        [list(pair) for pair in request.amounts],
        list(request.pools),
        [[pool, d.seq, d.kind, d.k, d.what] for pool, d in sorted(request.directives.items())],
        *(getattr(request, name) for name in REQUEST_FIELDS),
    ]


def load_request(fields: list[Any]) -> Request:
    request = Request.__new__(Request)
    amounts, pools, directives, *rest = fields
    for name, value in zip(REQUEST_FIELDS, rest, strict=True):
        setattr(request, name, value)
    request.amounts = tuple((key, amount) for key, amount in amounts)
    request.pools = tuple(pools)
    request.directives = {pool: Directive(seq, kind, k, what) for pool, seq, kind, k, what in directives}
    request.answers = {}
    return request
