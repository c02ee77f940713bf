"""Rules broken on purpose, one at a time: the suite must catch each (docs/rules.md sections 2 to 9).

`python tests/mutations.py [NAME...]` plays every mutant, in a copy of the package, against the scenarios and then
against the reference on random cases, until something differs. It exits with 1 if a mutant survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mutation_probe import HIT

TESTS = Path(__file__).parent
TOP = TESTS.parent
SEEDS = 1500


class Mutant(NamedTuple):
    """One change of one place."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "queue: the younger first",
        "core/queue.py",
        "heapq.heappush(kind.waiters, (attempt.age,",
        "heapq.heappush(kind.waiters, (-attempt.age,",
    ),
    Mutant(
        "queue: lower priority first",
        "core/queue.py",
        "not kind.share, -kind.priority",
        "not kind.share, kind.priority",
    ),
    Mutant("queue: borrowers before shares", "core/queue.py", "(not kind.share, -kind", "(kind.share, -kind"),
    Mutant(
        "limit: off by one",
        "core/quota.py",
        "if claimed[key] > limit_room:",
        "if claimed[key] > limit_room + 1:",
    ),
    Mutant(
        "limit: held against what is booked only",
        "core/quota.py",
        "        claimed = use.claimed\n",
        "        claimed = use.booked\n",
    ),
    Mutant(
        "reserved: non-preemptible work may exceed it",
        "core/quota.py",
        "if use.pinned[key] > share_room:",
        "if False:",
    ),
    Mutant(
        "capacity: off by one",
        "core/quota.py",
        "if booked[key] > room:\n                return",
        "if booked[key] > room + 1:\n                return",
    ),
    Mutant(
        "capacity: what victims still hold is granted",
        "core/quota.py",
        "            if held[key] + promised[key] > room:\n",
        "            if held[key] + promised[key] > room + 99:\n",
    ),
    Mutant(
        "share: non-preemptible work counts what it may take back",
        "core/quota.py",
        "spent = use.booked if preemptible else use.pinned",
        "spent = use.booked",
    ),
    Mutant(
        "admission: a limit is no cause",
        "core/quota.py",
        "if key in policy.limit and amount > policy.limit[key]:",
        "if False:",
    ),
    Mutant(
        "admission: metered keys only",
        "core/quota.py",
        "            if key in UNMETERED_IF_ABSENT:\n",
        "            if True:\n",
    ),
    Mutant(
        "admission: exempt keys must be listed",
        "core/quota.py",
        "            if key in UNMETERED_IF_ABSENT:\n",
        "            if False:\n",
    ),
    Mutant(
        "hold back: a share holds nobody back",
        "core/walk.py",
        "                borrowers_held = True",
        "                borrowers_held = False",
    ),
    Mutant(
        "hold back: never by starvation",
        "core/walk.py",
        "elif strict or kind.oldest_at <= starved_before:",
        "elif strict:",
    ),
    Mutant(
        "hold back: not in a strict pool",
        "core/walk.py",
        "elif strict or kind.oldest_at",
        "elif kind.oldest_at",
    ),
    Mutant(
        "hold back: pinned out ones too",
        "core/walk.py",
        "if cause is not None and not (pinned and not ledger.fits_beside_pinned(need)):",
        "if cause is not None:",
    ),
    Mutant(
        "victims: highest priority first",
        "core/victims.py",
        "for priority in sorted(groups):",
        "for priority in sorted(groups, reverse=True):",
    ),
    Mutant(
        "victims: the oldest first",
        "core/queue.py",
        "for place in range(end - 1, -1, -1):",
        "for place in range(end):",
    ),
    Mutant(
        "victims: none is spared",
        "core/victims.py",
        "    for grant in reversed(chosen):\n",
        "    return chosen\n    for grant in reversed(chosen):\n",
    ),
    Mutant(
        "victims: spared in the order chosen",
        "core/victims.py",
        "    for grant in reversed(chosen):\n",
        "    for grant in chosen:\n",
    ),
    Mutant(
        "victims: priority takes a share",
        "core/victims.py",
        "return booked - freed[requester][key] > (policy.reserved.get(key, 0) if policy else 0)",
        "return booked - freed[requester][key] > 0",
    ),
    Mutant(
        "victims: an equal may be stopped",
        "core/victims.py",
        "(asker.in_share or priority < asker.priority)",
        "(asker.in_share or priority <= asker.priority)",
    ),
    Mutant(
        "victims: min_runtime shields nobody", "core/victims.py", "now if own else now - min_runtime_s", "now"
    ),
    Mutant(
        "victims: min_runtime shields from oneself",
        "core/victims.py",
        "now if own else now - min_runtime_s",
        "now - min_runtime_s",
    ),
    Mutant(
        "victims: one's own work never yields",
        "core/victims.py",
        "return not self.preemptible and self.in_share",
        "return False",
    ),
    Mutant(
        "victims: a lost policy keeps its rank",
        "core/quota.py",
        'BELOW_ALL = float("-inf")',
        "BELOW_ALL = 1000.0",
    ),
    Mutant(
        "pools: any order",
        "core/coordinator_state.py",
        "admitting.append((-policy.priority, name))",
        "admitting.append((policy.priority, name))",
    ),
    Mutant(
        "pools: a share does not come first to preempt",
        "core/choice.py",
        "preempting.append((not in_share, place, pool))",
        "preempting.append((False, place, pool))",
    ),
    Mutant(
        "pools: preempt before a later pool's room",
        "core/choice.py",
        "if answer == ROOM and not unknown:",
        "if answer == ROOM and not unknown and not preempting:",
    ),
    Mutant(
        "retry: a retry is not spent",
        "core/coordinator.py",
        "self._reopen(request, request.retries - 1)",
        "self._reopen(request, request.retries)",
    ),
    Mutant(
        "retry: none is given",
        "core/coordinator.py",
        "            if request.retries > 0:\n",
        "            if False:\n",
    ),
    Mutant(
        "retry: the age is not kept",
        "core/requests.py",
        "        request.age,\n        request.submitted_at,",
        "        request.age + 1000 * (request.k - 1),\n        request.submitted_at,",
    ),
    Mutant(
        "lease: a grant renews it",
        "core/coordinator.py",
        '        elif told != "ending" and (told, detail)',
        '        elif self.renew(request) or told != "ending" and (told, detail)',
    ),
    Mutant(
        "lease: never runs out",
        "core/coordinator.py",
        'self._ask_end(self.state.requests[id], "expire")',
        "pass",
    ),
    Mutant(
        "deadline: one grace too long",
        "core/pool.py",
        "self.deadlines[victim.id] = self.now + grace_s",
        "self.deadlines[victim.id] = self.now + 2 * grace_s",
    ),
    Mutant(
        "change: nominations stay",
        "core/pool.py",
        "            self._undo_nominations()\n",
        "            pass\n",
    ),
    Mutant(
        "change: the first submitted is undone first",
        "core/pool_state.py",
        "return max(found, key=lambda a: a.age, default=None)",
        "return min(found, key=lambda a: a.age, default=None)",
    ),
    Mutant(
        "change: nominations of one requester may wait for each other",
        "core/pool_state.py",
        "or use.claimed[key] - amount > limit_room",
        "or False",
    ),
    Mutant(
        "change: waiters are not admitted anew",
        "core/coordinator.py",
        '                self._link(pool).note("", seq)\n        self._admit_anew()',
        '                self._link(pool).note("", seq)',
    ),
    Mutant(
        "id: other content is taken as a repetition",
        "core/intake.py",
        "    if content != (",
        "    if False and content != (",
    ),
]


def survives(mutant: Mutant) -> str | None:
    """What is wrong with the mutant: it was not caught, or its place was not found. None: it was caught."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "ray_pools"
        shutil.copytree(TOP / "pools", package, ignore=shutil.ignore_patterns("__pycache__"))
        file = package / mutant.file
        source = file.read_text()
        if source.count(mutant.old) != 1:
            return f"its place was found {source.count(mutant.old)} times in {mutant.file}"
        file.write_text(source.replace(mutant.old, mutant.new))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder}{os.pathsep}{TESTS}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, str(TESTS / "mutation_probe.py"), str(package), str(SEEDS)]
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
    if run.returncode == HIT:
        return None
    return "it was not caught" if run.returncode == 0 else f"the probe failed: {run.stderr[-500:]}"


def main(names: list[str]) -> int:
    """Play the mutants, two at a time."""
    chosen = [m for m in MUTANTS if not names or any(name in m.name for name in names)]
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, problem in zip(chosen, pool.map(survives, chosen), strict=True):
            print(
                f"{'caught  ' if problem is None else 'SURVIVES'}  {mutant.name}"
                + (f": {problem}" if problem else "")
            )
            sys.stdout.flush()
            survivors += problem is not None
    print(f"{len(chosen)} mutants, {survivors} not caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
