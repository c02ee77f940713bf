"""What an actor gives away so that somebody else can look ahead from where it is: plain values, no secret among them.

A simulation (`ray_pools.simulate.outlook`) goes on from it; the actor itself has nothing to do with that.
"""

from __future__ import annotations

import itertools
from typing import Any

from ray_pools.core.coordinator import Coordinator
from ray_pools.core.pool import Pool
from ray_pools.core.requests import FINAL, Request

# Of so many of the newest requests that are over the run times are looked at.
RUNS_LOOKED_AT = 5000


def pool_picture(pool: Pool) -> dict[str, Any]:
    """The pool's whole state, and when its victims must have stopped."""
    return {
        "name": pool.name,
        "now": pool.now,
        "state": pool.state.dump(),
        "deadlines": dict(sorted(pool.deadlines.items())),
    }


def coordinator_picture(core: Coordinator) -> dict[str, Any]:
    """The configuration, all requests that wait or hold, and how long those of each requester ran that are over."""
    state = core.state
    return {
        "now": core.now,
        "ages": state.ages,
        "pools": [config.to_wire() for _, config in sorted(state.pools.items())],
        "policies": [policy.to_wire() for name in sorted(state.pools) for policy in state.policies_of(name)],
        "requests": [_live(request) for request in state.waiting_or_holding.values()],
        "runs_s": _runs_s(core),
    }


def _live(request: Request) -> dict[str, Any]:
    return {
        "id": request.id,
        "requester": request.requester,
        "amounts": [list(pair) for pair in request.positive],
        "preemptible": request.preemptible,
        "retries": request.retries,
        "age": request.age,
        "submitted_at": request.submitted_at,
        "k": request.k,
        "pools": list(request.pools),
        "owner": request.owner,
        "asked": request.asked,
        "expected_run_s": request.options.get("expected_run_s"),
    }


def _runs_s(core: Coordinator) -> dict[str, list[float]]:
    """Requester to run times: from when its holder was told of the grant until it gave it back."""
    found: dict[str, list[float]] = {}
    newest = itertools.islice(reversed(core.state.requests.values()), RUNS_LOOKED_AT)
    for request in newest:
        if request.phase == FINAL and request.state == "released" and request.told == "placed":
            found.setdefault(request.requester, []).append(round(request.finished_at - request.told_at, 3))
    return dict(sorted(found.items()))
