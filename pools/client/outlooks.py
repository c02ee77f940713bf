"""The part of a Client that looks ahead: what would become of a request, and how long those that wait will wait.

The actors give a picture of their states; the looking ahead is done here, by the simulator, and no actor waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from typing_extensions import Unpack

from ..core.records import UnknownSnapshot, positive
from ..errors import PoolsError
from ..limits import check_name
from ..settings import ResourceSettings
from ..simulate.outlook import Outlook, estimates, would
from .connection import Connection
from .submission import RequestArguments, submission_of, takes_request_arguments

Pictures = tuple[dict[str, Any], list[dict[str, Any]]]


class Outlooks(Connection):
    """Base of Client, and never anything else."""

    @takes_request_arguments
    def would(
        self,
        requester: str,
        settings: ResourceSettings | None = None,
        **arguments: Unpack[RequestArguments],
    ) -> Outlook:
        """What would become of this request if it were submitted now; nothing is submitted. As `submit` takes them.

        As `str` one sentence. Who is granted or stopped at once is what the pools themselves would decide from where
        they are; `wait_s` is an estimate (docs/simulation.md). Pools that don't answer are left out.

        Raises:
            BadInput: names the argument. PoolsError: the actors run another version of this package.
            Unreachable: the coordinator can't be reached.
        """
        given = submission_of(requester, settings, arguments)
        operation = given.operation("", b"")
        coordinator, pools = self._pictures()
        with _of_this_version():
            return would(
                coordinator,
                pools,
                requester,
                positive(given.amounts.items()),
                preemptible=operation["preemptible"],
                retries=given.retries,
                expected_run_s=given.expected_run_s,
            )

    def estimates(self, ids: Iterable[str]) -> dict[str, float | None]:
        """Id of a waiting request to the seconds that it will still wait, as estimated; None where nobody can say.

        Requests that don't wait are not in it. Raises as `would`.
        """
        wanted = [check_name("id", id) for id in ids]
        coordinator, pools = self._pictures()
        with _of_this_version():
            return estimates(coordinator, pools, wanted)

    def explain(
        self, id: str, pools: Iterable[str] | None = None, *, estimate: bool = False
    ) -> dict[str, dict[str, Any]]:
        """What each pool says of a waiting or holding request; without `pools`, those that it is in now. estimate: with
        `estimate_s`, how long it will still wait as far as can be told, None where that is not known.

        Raises:
            Refused: there is no such request (`unknown_id`).
        """
        said = super().explain(id, pools)
        if estimate and any(each.get("position") or each.get("cause") for each in said.values()):
            with contextlib.suppress(PoolsError):  # actors of before can't say
                estimate_s = self.estimates([id]).get(id)
                said = {pool: {**each, "estimate_s": estimate_s} for pool, each in said.items()}
        return said

    def _pictures(self) -> Pictures:
        coordinator = self._coordinator({"op": "picture"})
        names = [wire["name"] for wire in coordinator["pools"]]
        answers = self.ask_pools(names, {"op": "picture"})
        return coordinator, [answer for answer in answers.values() if "state" in answer]


@contextlib.contextmanager
def _of_this_version() -> Iterator[None]:
    """Who looks ahead must know the actors' states."""
    try:
        yield
    except UnknownSnapshot as problem:
        raise PoolsError(f"the pools run another version of ray-pools: {problem}") from None
