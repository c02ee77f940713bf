"""What the coordinator says of a request, and what each final state means to who waits for it or holds it."""

from __future__ import annotations

from typing import Any, TypedDict

from ..errors import LeaseExpired, SlotCancelled, SlotError, SlotOver, SlotPreempted, SlotRejected

FINAL_STATES = frozenset(("released", "rejected", "cancelled", "preempted", "expired"))
STATES = ("queued", "allocated", "preempting", *sorted(FINAL_STATES))

FOR_NOBODY = {"evict": "an operator emptied its pool", "lost": "an operator declared its pool's log lost"}
"""Who is stopped for no other request will ask for whom it was."""


class View(TypedDict, total=False):
    """A request as its coordinator sees it (docs/protocol.md, "Wire"). A plain dict; newer actors may add keys.

    state: docs/rules.md section 8. pool: which holds it or held it last, else "". k: the attempt, counted from 1.
    ready: allocated and its placement group stands, so that its holder may use it. placement: the group of a
    grant, empty when the pool only counts. labels: of the nodes that the pool places on. causes: why each pool
    rejected it. by: the operator who ended it. for_nobody: why it was called back, where that was for no other request:
    "evict" (an operator empties its pool) or "lost" (its pool's log was declared lost). changed_seq: where in the
    coordinator's log it last changed; a view with a lower number is older.
    """

    id: str
    requester: str
    state: str
    pool: str
    pools: list[str]
    k: int
    ready: bool
    placement: dict[str, Any]
    labels: dict[str, str]
    nominated: bool
    preemptible: bool
    amounts: dict[str, int]
    retries: int
    age: int
    submitted_at: float
    told_at: float
    grace_s: float
    grace_left_s: float
    causes: dict[str, str]
    changed_seq: int
    lease_s: float
    asked: str
    by: str
    for_nobody: str


def is_final(view: View) -> bool:
    """Nothing changes the request any more."""
    return view.get("state") in FINAL_STATES


def error_of(view: View) -> SlotError:
    """Why a request in a final state gives no slot (any more)."""
    request_id, state = view["id"], view["state"]
    if state == "rejected":
        return SlotRejected(request_id, view.get("causes"))
    if state == "expired":
        return LeaseExpired(request_id)
    if state == "cancelled":
        # a waiter whose lease ran out is cancelled too (docs/rules.md section 8)
        expired = view.get("asked") == "expire"
        return LeaseExpired(request_id) if expired else SlotCancelled(request_id, _by(view))
    if state == "preempted":
        return SlotPreempted(request_id, FOR_NOBODY.get(view.get("for_nobody", ""), ""))
    return SlotOver(request_id, ", ".join(filter(None, [state, _by(view)])))


def _by(view: View) -> str:
    """Who ended it, if it was an operator: its holder will ask."""
    return f"by operator {view['by']}" if view.get("by") else ""
