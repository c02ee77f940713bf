"""A pool whose log is lost for good: what an operator's word brings (docs/protocol.md, "A pool whose log is lost").

Nobody can know any more what the pool held. So it is another pool from here on, with another uid: nothing that the old
one says counts, and the new one begins with an empty state. What the old one had taken stays taken until the
new one, once nothing stands of the old one's grants, says that it is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_pools.core import records as ev
from ray_pools.core.link import Message, is_made_anew, lost, uid_anew
from ray_pools.core.requests import OPEN
from ray_pools.errors import Refused

if TYPE_CHECKING:
    from ray_pools.core.coordinator import Coordinator


def check(core: Coordinator, pool: str, message: Message, asked_in: int = 0) -> None:
    """Whether a pool may be listened to, and whether it knows more of the coordinator's log than there is.

    Raises:
        Refused: no such pool (`unknown_pool`).
        StalePeer, ShorterLog: as `Link.check`; ShorterLog also if it is the coordinator's log that lost something.
    """
    uid = core.state.uids.get(pool, "")
    known = bool(uid) and message.uid in ("", uid)
    if message.seen_epoch < core.epoch and message.seen_head > core.opened:
        if known or not is_made_anew(uid):  # what an old one knew does not count once it was declared lost
            seen = message.seen_head, message.seen_epoch
            raise lost("coordinator", core.opened, core.epoch, "pool:" + pool, *seen)
    if not known:
        raise Refused("unknown_pool", f"there is no pool {pool!r} with id {message.uid!r}", {"pool": pool})
    core._link(pool).check(message, asked_in)


def declare_lost(core: Coordinator, pool: str, operator: str, id: str) -> int:
    """An operator's word that the log of the pool is lost for good. Returns the version; the same id again changes
    nothing.

    Raises:
        Refused: no such pool (`unknown_pool`); the id belongs to another command (`id_in_use`).
    """
    state = core.state
    if (made := state.made_before(id, [["lost", pool]])) is not None:
        return made
    if pool not in state.uids:
        raise Refused("unknown_pool", f"there is no pool {pool!r}", {"pool": pool})
    version = state.version + 1
    core._emit(ev.DeclaredLost(version, pool, uid_anew(state.uids[pool], version), operator, id))
    core.links.pop(pool, None)
    core._link(pool)
    core.bids_seen.pop(pool, None)
    core.greeted.discard(pool)
    for request in list(state.waiting_or_holding.values()):
        if request.changed_seq == state.seq:
            core.touched[request.id] = None
        if request.phase == OPEN and pool in request.pools:
            core._decided.setdefault(request.id, (request.k, request.answers))
            request.answers = {name: said for name, said in request.answers.items() if name != pool}
    return version
