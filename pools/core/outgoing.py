"""What the coordinator tells a pool, and a pool of an attempt (docs/protocol.md, "Directives")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray_pools.core.link import Message
from ray_pools.core.queue import ENDED, ENDING, GRANTED, Attempt
from ray_pools.core.requests import directive_item

if TYPE_CHECKING:
    from ray_pools.core.coordinator import Coordinator


def message_to(core: Coordinator, pool: str) -> Message:
    """All that the pool does not have yet."""
    state, link = core.state, core._link(pool)
    due = link.due()
    upto = due[-1][1] if len(due) < len(link.index) else state.seq
    items: list[list[Any]] = []
    if not link.acked and "" in link.index:
        # so that the first row of a pool's log says whose it is, however much of it an old copy has
        due = [("", link.index[""]), *(pair for pair in due if pair[0])]
    for id, seq in due:
        if not id and pool in state.pools:  # else it was taken away in the turn in which it spoke
            wire = state.pools[pool].to_wire(), [policy.to_wire() for policy in state.policies_of(pool)]
            items.append([seq, "", "configure", state.version, state.uids[pool], *wire])
        elif id in state.requests:
            items.append(directive_item(state.requests[id], pool, seq))
    epoch, bids = core.bids_seen.get(pool, (0, 0))
    return Message(
        "coordinator",
        state.uids.get(pool, ""),
        core.epoch,
        state.seq,
        link.acked,
        upto,
        items,
        link.heard,
        [],
        0,
        bids,
        epoch,
        *(core.opened, link.epoch, link.head),
    )


def news_of(attempt: Attempt) -> list[Any]:
    """What the coordinator is told of an attempt: its state and, where there is more to say, the detail."""
    if attempt.state == ENDED:
        return ["ended", {"how": attempt.ended_as, "why": attempt.why}]
    if attempt.state == GRANTED:
        return ["granted", {}] if attempt.placed is None else ["placed", attempt.placed]
    if attempt.state == ENDING:  # the grant before it is not news any more; its end will be
        return ["ending", {}]
    return [attempt.state, attempt.placed or {}]
