"""The part of a Client that announces capacity ahead, so that its nodes are up before the first request."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypedDict, cast

from ..core.announcements import for_s_problem
from ..errors import BadInput
from ..limits import ANNOUNCEMENTS_MAX, check_name
from ..settings import ResourceSettings, unknown_key
from .outlooks import Outlooks
from .submission import amounts_of


class Announcement(TypedDict):
    """An announcement as the coordinator sees it. A plain dict; newer actors may add keys.

    until: the core's time in seconds at which it ends; left_s: how far away that is. by: who announced it. over: why it
    is, "" as long as it lasts.
    """

    id: str
    pool: str
    amounts: dict[str, int]
    for_s: float
    until: float
    left_s: float
    requester: str
    by: str
    over: str


_ARGUMENTS = ("pool", "settings", "gpus", "cpus", "memory", "pool_resources", "for_s", "requester", "id")

Several = list[Announcement]
"""Client has a method called list: inside its class the name is taken."""


class Announcing(Outlooks):
    """Base of Client, and never anything else."""

    def prewarm(
        self,
        pool: str,
        settings: ResourceSettings | None = None,
        *,
        gpus: int | None = None,
        cpus: int | float | str | Decimal | None = None,
        memory: int | str | None = None,
        pool_resources: Mapping[str, int] | None = None,
        for_s: float,
        requester: str | None = None,
        id: str | None = None,
    ) -> Announcement:
        """Announces that so much of a pool will be needed within the next `for_s` seconds: its nodes come up now.

        Nothing is granted or kept free by it. What requests of the pool that come later hold or wait for is part of
        what was announced, not more; when they end, the nodes stay until the announcement is over, which it is by
        itself (at most after a day). requester: whose requests it is for; by its key, where it has one. Without, it is
        everybody's, and an operator's command. id: made when left out; the same again changes nothing, and lasts no
        longer.

        Raises:
            BadInput: an argument can't be right, or is more than the pool has; nothing has changed.
            Refused: no such pool (`unknown_pool`), one without nodes of its own (`counts_only`) or that is being
                emptied (`draining`); the requester has no policy there (`no_policy`), or another key (`wrong_key`); no
                operator's key (`not_operator`); the id is another announcement's (`id_in_use`); too many at a time
                (`too_many_announced`). docs/limits.md has the numbers.
            Unreachable: not known whether it was announced; the same call with the same id is safe.
        """
        given = _given(locals())
        return self._announced([_operation(given, "")])[0]

    def prewarm_many(self, announcements: Iterable[Mapping[str, Any]]) -> Several:
        """Several in one call, each a mapping of the arguments of `prewarm`: all of them, or none. Errors likewise."""
        return self._announced(_operations(announcements))

    def cancel_prewarm(self, *ids: str) -> Several:
        """Ends announcements before their time, all or none; one that is over stays so. Whoever may announce the
        like may end it.

        Raises:
            Refused: there is no such announcement (`unknown_id`); as `prewarm`.
        """
        return _several(self._coordinator(self._cancelling(ids)))

    async def prewarm_async(
        self,
        pool: str,
        settings: ResourceSettings | None = None,
        *,
        gpus: int | None = None,
        cpus: int | float | str | Decimal | None = None,
        memory: int | str | None = None,
        pool_resources: Mapping[str, int] | None = None,
        for_s: float,
        requester: str | None = None,
        id: str | None = None,
    ) -> Announcement:
        """As `prewarm`. A caller that is cancelled meanwhile may have announced it: it ends by itself."""
        given = _given(locals())
        return (await self._announced_async([_operation(given, "")]))[0]

    async def prewarm_many_async(self, announcements: Iterable[Mapping[str, Any]]) -> Several:
        """As `prewarm_many`."""
        return await self._announced_async(_operations(announcements))

    async def cancel_prewarm_async(self, *ids: str) -> Several:
        """As `cancel_prewarm`. What was begun is carried out."""
        op = self._cancelling(ids)
        return _several(await self._background.start(self._coordinator_async(op)).carried_out())

    def _announced(self, wanted: Sequence[Mapping[str, Any]]) -> Several:
        return _several(self._coordinator(self._announcing(wanted))) if wanted else []

    async def _announced_async(self, wanted: Sequence[Mapping[str, Any]]) -> Several:
        if not wanted:
            return []
        return _several(
            await self._background.start(self._coordinator_async(self._announcing(wanted))).outcome()
        )

    def _announcing(self, wanted: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "op": "announce",
            "announcements": [*wanted],
            **self._keys.of_requester(),
            **self._keys.of_operator(),
        }

    def _cancelling(self, ids: Sequence[str]) -> dict[str, Any]:
        if not 0 < len(ids) <= ANNOUNCEMENTS_MAX:
            raise BadInput("ids", f"{len(ids)} of them", f"1 to {ANNOUNCEMENTS_MAX} ids of announcements")
        checked = [check_name("id", id) for id in ids]
        return {"op": "unannounce", "ids": checked, **self._keys.of_requester(), **self._keys.of_operator()}


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in _ARGUMENTS}


def _several(answer: Any) -> Several:
    return cast(Several, answer["announcements"])


def _operations(announcements: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for index, given in enumerate(announcements):
        place = f"announcements[{index}]"
        if index >= ANNOUNCEMENTS_MAX:
            raise BadInput("announcements", "more", f"at most {ANNOUNCEMENTS_MAX} in one call")
        if not isinstance(given, Mapping):
            raise BadInput(place, given, "a mapping of the arguments of prewarm")
        for key in given:
            if key not in _ARGUMENTS:
                raise BadInput(f"{place}.{key!s:.40}", given[key], unknown_key(key, _ARGUMENTS))
        found.append(_operation(given, f"{place}."))
    return found


def _operation(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    """One announcement as it is sent. BadInput names the argument."""
    try:
        pool, for_s, requester, id = (given.get(name) for name in ("pool", "for_s", "requester", "id"))
        check_name("pool", pool)
        if problem := for_s_problem(for_s):
            raise BadInput("for_s", for_s, problem)
        settings = given.get("settings")
        amounts = amounts_of(settings, *(given.get(name) for name in _ARGUMENTS[2:6]))
        amounts.pop("step_run", None)
        if not any(amounts.values()):
            raise BadInput("gpus", given.get("gpus"), "at least one amount above 0, such as gpus=8")
        return {
            "id": uuid.uuid4().hex if id is None else check_name("id", id),
            "pool": pool,
            "amounts": amounts,
            "for_s": for_s,
            "requester": "" if requester is None else check_name("requester", requester),
        }
    except BadInput as problem:
        raise BadInput(f"{place}{problem.field}", problem.value, problem.expected) from None
