"""What a submission must pass before it becomes a request: an id that is free, an age that can be trusted, room.

None of it changes anything; a repetition of what is known passes whatever came meanwhile (docs/rules.md section 2).
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any

from ray_pools.core.access import WRONG_TOKEN
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.requests import Request
from ray_pools.errors import Refused
from ray_pools.limits import CLOCK_SKEW_MAX_S


def check_same(known: Request, content: tuple[Any, ...]) -> None:
    """The id belongs to the content that it first came with. Raises Refused (`id_in_use`)."""
    if content != (
        known.requester,
        known.amounts,
        known.preemptible,
        known.retries_at_first,
        known.lease_s,
        known.options,
    ):
        raise Refused(
            "id_in_use",
            f"request id {known.id!r} belongs to another submission, of requester {known.requester!r}: use a new id",
            {"id": known.id},
        )


def check_token(request: Request, token: bytes, submits: bool = False) -> None:
    """Raises Refused (`wrong_token`) unless the request was submitted with the token of this hash."""
    if hmac.compare_digest(request.token, token):
        return
    if submits:
        said = (
            f"request id {request.id!r} is taken: a request that was submitted before, with another token, has it and"
            f" is {request.shown}; use a new id, or none"
        )
    else:
        said = (
            f"the token is not that of request {request.id!r}, which only its submitter has: `pools cancel` and"
            " `pools release` go without, as an operator"
        )
    raise Refused(WRONG_TOKEN, said, {"id": request.id})


def check_age(age_s: float | None, retention_s: float) -> None:
    """A request that is over is forgotten after `retention_s`, and its id with it: a submission that may have run and
    been forgotten by now must not run again. `age_s`: since its client made it, by two clocks that may differ; None
    where nobody knows.

    Raises:
        Refused: `too_old`, or `clock_ahead`, for then nobody could tell how old its repetitions are.
    """
    if age_s is None:
        return
    oldest_s = retention_s - min(CLOCK_SKEW_MAX_S, retention_s / 2)
    if age_s > oldest_s:
        raise Refused(
            "too_old",
            f"the submission was made {_hours(age_s)} ago, and may be one that ran and was forgotten: at most"
            f" {_hours(oldest_s)}; submit it anew with a new id",
            {"age_s": age_s, "at_most_s": oldest_s},
        )
    if age_s < -CLOCK_SKEW_MAX_S:
        raise Refused(
            "clock_ahead",
            f"the submission says that it was made in {_hours(-age_s)}: the client's clock is ahead of the"
            f" coordinator's by more than {_hours(CLOCK_SKEW_MAX_S)}; set it right",
            {"ahead_s": -age_s, "at_most_s": CLOCK_SKEW_MAX_S},
        )


def check_room(state: CoordinatorState, more: Mapping[str, int]) -> None:
    """So many more requests of these requesters may come in (docs/limits.md).

    Raises:
        Refused: `too_many_waiting` or `too_many_live`, with the numbers.
    """
    limit = state.limit("waiting_per_requester")
    for requester, count in more.items():
        waiting = state.waiting_of.get(requester, 0)
        if waiting + count > limit:
            raise Refused(
                "too_many_waiting",
                f"requester {requester!r} has {waiting} requests waiting, and {_more(count)} would be over"
                f" limits.waiting_per_requester ({limit})",
                {"requester": requester, "waiting": waiting, "more": count, "limit": limit},
            )
    live, count, limit = len(state.waiting_or_holding), sum(more.values()), state.limit("live_requests")
    if live + count > limit:
        raise Refused(
            "too_many_live",
            f"{live} requests wait or hold, and {_more(count)} would be over limits.live_requests ({limit})",
            {"live": live, "more": count, "limit": limit},
        )


def _more(count: int) -> str:
    return "one more" if count == 1 else f"{count} more"


def _hours(seconds: float) -> str:
    return f"{seconds / 86_400:.1f} days" if seconds >= 86_400 else f"{seconds / 3600:.1f} hours"
