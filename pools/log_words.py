"""The events of the logs in plain words: one sentence each, for people; which request an event is about.

Nothing here reads a log (log_view.py does). Every event of `core/records.py` has its words: a new one without fails the
tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .core import holders
from .core import records as ev
from .counting import counted

_ASKED = {
    "release": "its holder is done: the pool is asked to release it",
    "cancel": "it is cancelled: the pool is asked to end it, and no attempt follows",
    "expire": "its lease is over: the pool is asked to end it",
    "give": "another pool opened to it: its pool is asked to give it back if it still waits",
    "yield": "its pool admits it no more, and is asked to give it back",
    "stopped": "its holder has stopped: the pool is told",
    "evict": "its pool is being emptied: its holder is to be told to stop",
    "lost": "the log of its pool is lost: what takes its place is asked to end it",
}
_DENIED = {
    "wrong_token": "the token is not the request's",
    "wrong_key": "the key is not the requester's",
    "not_operator": "the key is not that of operators",
}
_TOLD = {
    "nominated": "is nominated: others are being stopped for it",
    "granted": "is granted",
    "placed": "is placed: its holder may use it",
    "preempting": "is to stop: it is called back",
}


def request_of(event: Any) -> str:
    """The id of the request that the event is about, or ""."""
    return str(getattr(event, "id", ""))


def is_about(event: Any, id: str) -> bool:
    """The event changes something for this request: its own, one that stops it, or one that forgets it."""
    if isinstance(event, ev.Nominated):
        return event.id == id or any(victim == id for victim, _ in event.victims)
    if isinstance(event, (ev.Forgotten, ev.HolderGone)):
        return id in event.ids
    return request_of(event) == id


def words(event: Any) -> str:
    """What the event says."""
    return _WORDS[type(event)](event)


def amounts_words(amounts: Iterable[Iterable[Any]]) -> str:
    """`gpu 2, mcpu 500`; every request has its one slot of `step_run`, which says nothing."""
    pairs = [(key, amount) for key, amount in amounts if amount and key != "step_run"]
    return ", ".join(f"{key} {amount}" for key, amount in pairs) or "a slot"


def ids_words(ids: Iterable[str], most: int = 5) -> str:
    """The first few, and how many more there are."""
    every = list(ids)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def _why(how: str, why: str) -> str:
    return f"{how} ({why})" if why and why != how else how


def _configured(event: ev.Configured) -> str:
    capacity = amounts_words(event.config.get("capacity", {}).items())
    state = f"; it is {event.config['state']}" if event.config.get("state") else ""
    policies = counted(len(event.policies), "policy")
    return f"goes by configuration {event.version}: capacity {capacity}; {policies}{state}"


def _queued(event: ev.Queued) -> str:
    kind = "" if event.preemptible else ", not preemptible"
    bids = "" if event.owned else "; it asks several pools"
    pause = f"; not before {event.not_before:.3f}" if event.not_before else ""
    return (
        f"attempt {event.k} queues: {event.requester} asks for {amounts_words(event.amounts)}"
        f" (age {event.age}{kind}){bids}{pause}"
    )


def _placed(event: ev.Placed) -> str:
    group = str(event.detail.get("pg", ""))
    ready = f"its placement group {group[:12]} is ready" if group else "ready"
    return f"attempt {event.k} is placed: {ready}"


def _nominated(event: ev.Nominated) -> str:
    victims = ids_words(id for id, _ in event.victims)
    return f"attempt {event.k} is nominated: its amounts are booked, and {victims} must stop for it"


def _changed(event: ev.Changed) -> str:
    said = []
    for kind, *rest in event.changes:
        if kind == "pool":
            state = f" ({rest[0]['state']})" if rest[0].get("state") else ""
            capacity = amounts_words(rest[0].get("capacity", {}).items())
            said.append(f"pool {rest[0]['name']} has {capacity}{state}")
        elif kind == "policy":
            said.append(f"{rest[0]['requester']} has a policy on {rest[0]['pool']}")
        elif kind == "unpool":
            said.append(f"pool {rest[0]} is gone")
        elif kind == "unpolicy":
            said.append(f"{rest[0]} has no policy on {rest[1]} any more")
        else:
            said.append(_access(kind, rest))
    by = f", by operator {event.by}" if event.by else ""
    return f"configuration {event.version}{by}: " + "; ".join(said)


def _access(kind: str, rest: list[Any]) -> str:
    if kind == "requester":
        return f"who submits for {rest[0]} needs a key (SHA-256 {rest[1]['key_sha256'][:12]}...)"
    if kind == "unrequester":
        return f"who submits for {rest[0]} needs no key any more"
    if kind == "operators":
        hashed = rest[0].get("key_sha256")
        return f"operators need a key (SHA-256 {hashed[:12]}...)" if hashed else "operators need no key"
    numbers = ", ".join(f"{name} {_number(number)}" for name, number in rest[0].items())
    return f"{kind}: {numbers or 'as by default'}"


def _number(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _commanded(event: ev.Commanded) -> str:
    detail = f" ({event.detail})" if event.detail else ""
    return f"operator {event.by} says: {event.what}{detail}"


def _denied(event: ev.Denied) -> str:
    by = f" to who says to be {event.by}" if event.by else ""
    times = f" {event.times} times" if event.times != 1 else ""
    return f"{event.what} was refused{by}{times}: {_DENIED.get(event.why, event.why)}"


def _submitted(event: ev.Submitted) -> str:
    more = "" if event.preemptible else ", not preemptible"
    more += f", {_retries(event.retries)}" if event.retries else ""
    more += f", lease {event.lease_s:g} s" if event.lease_s else ""
    asks = f"{event.requester} asks for {amounts_words(event.amounts)} (age {event.age}{more})"
    if not event.pools:
        return f"{asks}: rejected, {causes_words(event.causes)}"
    return f"{asks}: attempt 1 opens in {', '.join(event.pools)}"


def _retries(count: int) -> str:
    return "1 retry" if count == 1 else f"{count or 'no'} retries"


def causes_words(causes: dict[str, str]) -> str:
    return ", ".join(f"{pool}: {cause}" for pool, cause in sorted(causes.items())) or "there are no pools"


def _opened(event: ev.Opened) -> str:
    later = ", ".join(f"{pool} not before {at:.3f}" for pool, at in sorted(event.not_before.items()))
    return (
        f"attempt {event.k} opens in {', '.join(event.pools)}, with its old age and {_retries(event.retries)} left"
        + (f" ({later})" if later else "")
    )


def _finished(event: ev.Finished) -> str:
    return f"it is {event.state}: final" + (f" ({causes_words(event.causes)})" if event.causes else "")


def _holder_gone(event: ev.HolderGone) -> str:
    ends = f"these expire: {ids_words(event.ids)}" if event.ids else "it held nothing that ends with it"
    return f"client {event.client[:12]}: its holder's process is gone ({event.why}); {ends}"


def _peer(event: ev.Peer) -> str:
    return (
        f"has worked in what {event.name} said up to its row {event.heard} (epoch {event.epoch}, then"
        f" {event.head} rows long); {event.name} has ours up to row {event.acked}"
    )


def _announced(event: ev.Announced) -> str:
    for_whom = f" for {event.requester}" if event.requester else ""
    return (
        f"{event.by or 'somebody'} announces {amounts_words(event.amounts)} of pool {event.pool}{for_whom} for the"
        f" next {event.for_s:g} s ({event.id})"
    )


_WORDS: dict[type[Any], Callable[[Any], str]] = {
    ev.Configured: _configured,
    ev.Queued: _queued,
    ev.Granted: lambda event: f"attempt {event.k} is granted",
    ev.Placed: _placed,
    ev.Nominated: _nominated,
    ev.Evicted: lambda event: f"attempt {event.k} must stop, for nobody: {event.why}",
    ev.Ending: lambda event: (
        f"attempt {event.k} is {_why(event.how, event.why)}: its placement group is removed"
    ),
    ev.Ended: lambda event: f"attempt {event.k} is over here and holds nothing: {_why(event.how, event.why)}",
    ev.Changed: _changed,
    ev.Submitted: _submitted,
    ev.Opened: _opened,
    ev.Taken: lambda event: f"attempt {event.k} belongs to pool {event.pool} alone",
    ev.Told: lambda event: f"told by its pool: attempt {event.k} {_TOLD.get(event.state, event.state)}",
    ev.Asked: lambda event: f"attempt {event.k}: {_ASKED.get(event.what, event.what)}",
    ev.Finished: _finished,
    ev.Forgotten: lambda event: f"retention is over, these leave the state: {ids_words(event.ids)}",
    ev.HolderSeen: lambda event: f"client {event.client[:12]} is {holders.words(event.holder)}",
    ev.HolderGone: _holder_gone,
    ev.Adopted: lambda event: (
        f"it is held by client {event.client[:12]} from now on, which submitted it again"
    ),
    ev.Peer: _peer,
    ev.Commanded: _commanded,
    ev.Denied: _denied,
    ev.DeclaredLost: lambda event: (
        f"configuration {event.version}: {event.operator} says that the log of pool {event.pool} is lost for good;"
        f" another pool takes its place ({event.uid})"
    ),
    ev.Announced: _announced,
    ev.Unannounced: lambda event: (
        f"announced no more: {ids_words(event.ids)}: {event.why}" + (f" by {event.by}" if event.by else "")
    ),
    ev.BegunAnew: lambda event: (
        f"was declared lost: begins anew as {event.uid}, and nothing before this counts"
    ),
}
