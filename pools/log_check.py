"""Do the logs hold what the rules promise (docs/rules.md section 10)? Items 1, 2, 3, 6 as far as logs show it, and 7.

One log at a time is read in log_story.py; here is what takes several: that each grant is the one that the
coordinator's log knows of, and that a request never had two. Logs may be live while they are read: the pools' lengths
are noted first, then the coordinator's log is read, then the pools'. So whatever a pool did up to its noted length, the
reason for it is in what was read of the coordinator's log; and whatever the coordinator was told, the pool's log shows.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .counting import counted
from .errors import BadInput, PoolsError
from .log_story import COORDINATOR, CoordinatorStory, Life, PoolStory, Problem, Story, pool_log
from .store import NoLog, open_reader

__all__ = ["LogReport", "Problem", "check_logs"]

Digests = Mapping[str, Mapping[str, Any]]


class LogReport(NamedTuple):
    """What a check found. events, digests: per log. final: how many requests came to which end; open: how many not."""

    problems: list[Problem]
    pools: list[str]
    events: dict[str, int]
    digests: dict[str, str]
    final: dict[str, int]
    open: int

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.problems

    def text(self) -> str:
        """One line; the problems are for the caller to list."""
        if self.problems:
            return f"log check: {counted(len(self.problems), 'problem')}"
        rows = sum(self.events.values())
        ended = counted(sum(self.final.values()), "request")
        return (
            f"log check: ok ({counted(rows, 'event')} in {counted(len(self.events), 'log')}, {ended} ended)"
        )


def check_logs(store: str, pools: Iterable[str], live: Digests | None = None) -> LogReport:
    """Reads the logs of the coordinator and of these pools at a store's address, and checks them.

    live: log name -> {"seq", "digest"} as running actors answered before this call; their logs must give the same.
    A pool that was never up has no log, which is no problem by itself.

    Raises:
        BadInput: the address can't be right.
        NoLog: there is no coordinator's log.
    """
    names = sorted(set(pools))
    live = live or {}
    heads = {name: _head(store, name) for name in names}
    coordinator = CoordinatorStory()
    _read(store, coordinator, live)
    stories = {name: PoolStory(name) for name in names}
    for name, story in stories.items():
        if heads[name] is not None:
            _read(store, story, live)
    problems = [*coordinator.problems, *(each for story in stories.values() for each in story.problems)]
    problems += _grants_were_taken(coordinator, stories, heads)
    problems += _one_at_a_time(coordinator, stories, heads)
    problems += _nothing_lost(coordinator, stories)
    ends: dict[str, int] = defaultdict(int)
    for _, state in coordinator.facts.finished.values():
        ends[state] += 1
    read: list[Story] = [coordinator, *(stories[name] for name in names if heads[name] is not None)]
    return LogReport(
        problems,
        names,
        {story.log: story.events for story in read},
        {story.log: story.digest for story in read},
        dict(sorted(ends.items())),
        len(coordinator.facts.submitted) - len(coordinator.facts.finished),
    )


def _head(store: str, pool: str) -> int | None:
    try:
        reader = open_reader(store, pool_log(pool))
    except NoLog:
        return None
    except BadInput:
        raise
    except PoolsError:  # damaged: told when it is read
        return 0
    try:
        return reader.head()[1]
    finally:
        reader.close()


def _read(store: str, story: Story, live: Digests) -> None:
    try:
        reader = open_reader(store, story.log)
    except (BadInput, NoLog):
        raise
    except PoolsError as problem:
        story.wrong(0, "", 7, str(problem))
        return
    try:
        story.read(reader, live.get(story.log))
    except PoolsError as problem:  # a snapshot that is damaged, a file that went away
        story.wrong(0, "", 7, str(problem))
    finally:
        reader.close()


def _grants_were_taken(
    coordinator: CoordinatorStory, stories: Mapping[str, PoolStory], heads: Mapping[str, int | None]
) -> Iterable[Problem]:
    """Only the pool that the coordinator's log names may grant or nominate an attempt (item 1)."""
    facts = coordinator.facts
    for pool, story in stories.items():
        for (id, k), life in story.lives.items():
            first = life.nominated or life.granted
            if not first or k < facts.older.get(id, 0):
                continue
            taker = facts.takers.get((id, k))
            did = "nominated" if life.nominated else "granted"
            if taker is None and first <= (heads[pool] or 0):
                text = f"attempt {k} is {did}, but the coordinator's log says of no pool that it took it"
                yield Problem(story.log, first, id, 1, text)
            elif taker is not None and taker != pool:
                text = f"attempt {k} is {did} here, but the coordinator's log says that pool {taker} took it"
                yield Problem(story.log, first, id, 1, text)


def _one_at_a_time(
    coordinator: CoordinatorStory, stories: Mapping[str, PoolStory], heads: Mapping[str, int | None]
) -> Iterable[Problem]:
    """A request holds or is nominated in at most one pool over all its attempts (item 1): each attempt is over before
    the next one opens, as the coordinator's log orders it.
    """
    for opening in coordinator.facts.openings:
        story = stories.get(opening.before)
        life = story.lives.get((opening.id, opening.k - 1)) if story is not None else None
        if story is None or life is None or not (life.granted or life.nominated):
            continue
        if not life.ended:
            text = (
                f"attempt {opening.k} opens, but attempt {opening.k - 1} never ended in pool {opening.before}"
            )
            yield Problem(COORDINATOR, opening.seq, opening.id, 1, text)
        elif life.ended > opening.heard and story.from_seq == 1:
            text = (
                f"attempt {opening.k} opens before the end of attempt {opening.k - 1} was heard"
                f" (row {life.ended} of {story.log}, heard up to {opening.heard})"
            )
            yield Problem(COORDINATOR, opening.seq, opening.id, 1, text)
    held: dict[str, list[tuple[int, str, Life]]] = defaultdict(list)
    for pool, story in stories.items():
        for (id, k), life in story.lives.items():
            first = life.granted or life.nominated
            if first and (first <= (heads[pool] or 0) or life.ended):
                held[id].append((k, pool, life))
    for id, lives in held.items():
        lives.sort(key=lambda each: each[:2])
        for (k, pool, life), (later, other, _) in itertools.pairwise(lives):
            if k == later:
                yield Problem(pool_log(other), 0, id, 1, f"attempt {k} is held in pools {pool} and {other}")
            elif not life.ended:
                text = f"attempt {k} still holds here, while attempt {later} is granted in pool {other}"
                yield Problem(pool_log(pool), life.granted or life.nominated, id, 1, text)


def _nothing_lost(coordinator: CoordinatorStory, stories: Mapping[str, PoolStory]) -> Iterable[Problem]:
    """What the coordinator was told is in the pool's log, and what is final holds nothing (item 6)."""
    facts = coordinator.facts
    for (id, k), seq in facts.told_granted.items():
        story = stories.get(facts.takers.get((id, k), ""))
        if story is None or k < facts.older.get(id, 0):
            continue
        life = story.lives.get((id, k))
        if life is None or not life.granted:
            if story.from_seq == 1 and seq > facts.lost.get(story.pool, 0):
                text = f"told that attempt {k} is granted in pool {story.pool}, whose log knows no such grant"
                yield Problem(COORDINATOR, seq, id, 6, text)
    for story in stories.values():
        for (id, k), life in story.lives.items():
            final = facts.finished.get(id)
            if final is not None and life.granted and not life.ended:
                text = f"attempt {k} still holds, but the request is {final[1]} (coordinator row {final[0]})"
                yield Problem(story.log, life.granted, id, 6, text)
