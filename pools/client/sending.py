"""Many submissions, sent some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import wire
from .submission import Submission
from .ticket import Ticket

SUBMIT_BATCH = 1000

Tickets = list[Ticket]
Pairs = Sequence[tuple[Submission, Ticket]]


def batches(given: Sequence[Submission], tickets: Tickets) -> Iterator[Pairs]:
    pairs = list(zip(given, tickets, strict=True))
    for start in range(0, len(pairs), SUBMIT_BATCH):
        yield pairs[start : start + SUBMIT_BATCH]


def take_results(pairs: Pairs, results: Sequence[wire.Wire], sent: Tickets) -> None:
    """What became of one batch: `sent` are those that were accepted. Raises the first refusal."""
    for (_, ticket), result in zip(pairs, results, strict=True):
        if "ok" in result:
            sent.append(ticket)
            ticket._apply(result["ok"])
    for result in results:
        wire.value_of(result)
