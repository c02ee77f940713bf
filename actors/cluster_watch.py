"""What the coordinator knows of the cluster's nodes: those of each pool that are ready or on their way, and GPUs of
theirs that somebody uses without a slot.

A thread looks every few seconds, and only at Ray's tables; `pools status` shows what it saw last. GPUs outside of the
pools are what a node has, less what is free, less the placement groups of grants. Whose they are is looked up only
where there are any: placement groups, actors, and at last the node's own workers. A job counts when two looks in a row
saw it: between them a group that comes or goes looks like one.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ray_pools.actors.autoscaler import HEAD_RESOURCE, TYPE_LABEL
from ray_pools.core.feasible import NodeType, matches
from ray_pools.errors import shown

log = logging.getLogger("ray_pools")

PERIOD_S = 3.0
GPU = "GPU"
NOBODY_KNOWS = "?"

_GROUP_GPU = re.compile(r"GPU_group_([0-9a-f]{30,})")
_SLACK = 1e-3


class NodeView(NamedTuple):
    """A living node. `groups`: placement group (hex) to the GPUs that it has reserved there."""

    id: str
    type: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]
    gpus_free: float
    groups: Mapping[str, float]
    is_head: bool = False


class Group(NamedTuple):
    """A placement group by its name, and the job that made it."""

    name: str
    job: str


class Use(NamedTuple):
    """GPUs of a node that something outside of placement groups takes."""

    node: str
    job: str
    what: str
    gpus: float


class Tables(Protocol):
    """What is asked of Ray."""

    def nodes(self) -> list[NodeView]: ...
    def group(self, hex: str) -> Group | None: ...
    def actors(self) -> list[Use]: ...
    def workers(self, node: str) -> list[Use]: ...
    def jobs(self) -> dict[str, str]: ...
    def starting(self) -> dict[str, int]: ...
    def node_types(self) -> Sequence[NodeType]: ...


Pools = Mapping[str, tuple[Mapping[str, str], frozenset[str]]]
"""Pool that places its grants to (its label selector, the resources that its nodes are for)."""


class Outside:
    """GPUs used without a slot, by two looks in a row."""

    def __init__(self, tables: Tables, group_prefix: str) -> None:
        self._tables, self._prefix = tables, group_prefix
        self._groups: dict[str, Group | None] = {}
        self._before: dict[tuple[str, str, str], float] = {}

    def look(self, nodes: Sequence[NodeView], pools: Pools, excused: frozenset[str]) -> list[dict[str, Any]]:
        """Per job what it uses. `excused`: jobs that hold grants which only count, and may use GPUs anywhere."""
        uses = [use for use in self._uses(nodes, pools) if use.job not in excused]
        now: dict[tuple[str, str, str], float] = {}
        for use in uses:
            key = use.job, use.node, use.what
            now[key] = now.get(key, 0.0) + use.gpus
        steady = {key: min(gpus, self._before[key]) for key, gpus in now.items() if key in self._before}
        self._before = now
        return self._told(steady, {node.id: node for node in nodes}, pools) if steady else []

    def _uses(self, nodes: Sequence[NodeView], pools: Pools) -> list[Use]:
        seen = {hex for node in nodes for hex in node.groups}
        self._groups = {hex: known for hex, known in self._groups.items() if hex in seen}
        found: list[Use] = []
        actors: list[Use] | None = None
        for node in nodes:
            if not any(matches(selector, node.labels) for selector, _ in pools.values()):
                continue
            left = node.resources.get(GPU, 0.0) - node.gpus_free
            for hex, gpus in node.groups.items():
                group = self._group(hex)
                left -= gpus
                if group is None or not group.name.startswith(self._prefix):
                    who = group or Group("", NOBODY_KNOWS)
                    found.append(Use(node.id, who.job, f"placement group {who.name}".strip(), gpus))
            if left <= _SLACK:
                continue
            actors = self._tables.actors() if actors is None else actors
            of_actors = [use for use in actors if use.node == node.id]
            left -= sum(use.gpus for use in of_actors)
            found += of_actors
            if left > _SLACK:
                found += self._rest(node.id, left, of_actors)
        return found

    def _rest(self, node: str, left: float, actors: Sequence[Use]) -> list[Use]:
        """What is no actor's: tasks. Workers of actors say what they use, too, and are known by then."""
        tasks = [use for use in self._tables.workers(node) if use.gpus > 0]
        known = sum(use.gpus for use in tasks)
        if known < left - _SLACK:
            tasks.append(Use(node, NOBODY_KNOWS, "a task", left - known))
        return tasks

    def _group(self, hex: str) -> Group | None:
        if hex not in self._groups:
            self._groups[hex] = self._tables.group(hex)
        return self._groups[hex]

    def _told(
        self, uses: Mapping[tuple[str, str, str], float], nodes: Mapping[str, NodeView], pools: Pools
    ) -> list[dict[str, Any]]:
        jobs = self._tables.jobs()
        told: dict[str, dict[str, Any]] = {}
        for (job, node, what), gpus in sorted(uses.items()):
            entry = told.setdefault(
                job,
                {
                    "job": job,
                    "entrypoint": jobs.get(job, ""),
                    "gpus": 0.0,
                    "pools": [],
                    "nodes": [],
                    "what": [],
                },
            )
            entry["gpus"] += gpus
            at = [name for name, (selector, _) in pools.items() if matches(selector, nodes[node].labels)]
            for name, more in (("pools", at), ("nodes", [node]), ("what", [what])):
                entry[name] = sorted({*entry[name], *more})
        return list(told.values())


def nodes_of_pools(
    nodes: Iterable[NodeView], starting: Mapping[str, int], types: Sequence[NodeType], pools: Pools
) -> dict[str, dict[str, int | None]]:
    """Pool to its nodes: ready, and starting (None where nobody knows which types are its own)."""
    nodes = list(nodes)
    found: dict[str, dict[str, int | None]] = {}
    for name, (selector, resources) in pools.items():
        ready = sum(
            matches(selector, node.labels) and any(node.resources.get(each) for each in resources)
            for node in nodes
        )
        own = [
            kind
            for kind in types
            if matches(selector, kind.labels) and any(kind.resources.get(each) for each in resources)
        ]
        coming = sum(starting.get(kind.name, 0) for kind in own) if types else None
        found[name] = {"ready": ready, "starting": 0 if coming is None and not starting else coming}
    return found


class ClusterWatch:
    """Looks again and again, in a thread, at what `pools` and `excused` say then. Its status is what it saw last."""

    def __init__(
        self,
        tables: Tables,
        group_prefix: str,
        pools: Callable[[], Pools],
        excused: Callable[[], frozenset[str]] = frozenset,
        period_s: float = PERIOD_S,
    ) -> None:
        self._tables, self._pools, self._excused, self._period_s = tables, pools, excused, period_s
        self._outside = Outside(tables, group_prefix)
        self._closing = threading.Event()
        self._seen: dict[str, Any] = {}
        self._complained = ""
        self._thread = threading.Thread(target=self._loop, name="cluster watch", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread."""
        self._closing.set()
        self._thread.join(timeout_s)

    def status(self) -> dict[str, Any]:
        """{"nodes": per pool ready and starting, "outside": per job, "trouble"}; empty before the first look."""
        return dict(self._seen)

    def _loop(self) -> None:
        while not self._closing.is_set():
            self.look()
            self._closing.wait(self._period_s)

    def look(self) -> None:
        """One look. What can't be seen stays as it was, and `trouble` says why."""
        trouble, seen = "", dict(self._seen)
        try:
            pools = self._pools()
            if pools:
                nodes = self._tables.nodes()
                seen["nodes"] = nodes_of_pools(
                    nodes, self._tables.starting(), self._tables.node_types(), pools
                )
                seen["outside"] = self._outside.look(nodes, pools, self._excused())
            else:
                seen = {"nodes": {}, "outside": []}
        except Exception as problem:  # noqa: BLE001 - of no public interface, some of it; and the GCS may be away
            trouble = f"{type(problem).__name__}: {shown(str(problem), 200)}"
            if trouble != self._complained:
                log.info("looking at the cluster's nodes: %s", trouble)
        self._complained = trouble
        self._seen = {**seen, "trouble": trouble}


class RayTables:
    """Ray's tables of the cluster that this process is connected to; `starting` and `node_types`: of its autoscaler."""

    def __init__(
        self, starting: Callable[[], dict[str, int]], node_types: Callable[[], Sequence[NodeType]]
    ) -> None:
        self.starting, self.node_types = starting, node_types
        self._addresses: dict[str, tuple[str, int]] = {}

    def nodes(self) -> list[NodeView]:
        """Those that live."""
        import ray
        from ray._private.state import state  # no public call tells what each node has free

        totals, free = state.total_resources_per_node(), state.available_resources_per_node()
        found = []
        for node in ray.nodes():
            id, labels = str(node["NodeID"]), dict(node.get("Labels") or {})
            if not node.get("Alive"):
                continue
            self._addresses[id] = str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])
            groups = {
                match[1]: float(amount)
                for name, amount in totals.get(id, {}).items()
                if (match := _GROUP_GPU.fullmatch(name))
            }
            resources = dict(node.get("Resources") or {})
            # one that has not reported yet has all of it free
            gpus_free = free[id].get(GPU, 0.0) if id in free else resources.get(GPU, 0.0)
            is_head = HEAD_RESOURCE in resources
            kind = str(labels.get(TYPE_LABEL, ""))
            found.append(NodeView(id, kind, labels, resources, gpus_free, groups, is_head))
        return found

    def group(self, hex: str) -> Group | None:
        """None: it is gone."""
        import ray
        from ray.core.generated import gcs_pb2

        said = _accessor().get_placement_group_info(ray.PlacementGroupID(bytes.fromhex(hex)))
        if said is None:
            return None
        data = gcs_pb2.PlacementGroupTableData.FromString(said)
        return Group(data.name, data.creator_job_id.hex())

    def actors(self) -> list[Use]:
        """Living actors that hold GPUs outside of placement groups."""
        from ray.core.generated import gcs_pb2

        found = []
        for said in _accessor().get_actor_table(None, "ALIVE"):
            data = gcs_pb2.ActorTableData.FromString(said)
            gpus = data.required_resources.get(GPU, 0.0)
            if gpus and not data.placement_group_id.strip(b"\xff"):
                what = f"actor {data.name or data.class_name.rpartition('.')[2]}"
                node = data.node_id or data.address.node_id
                found.append(Use(node.hex(), data.job_id.hex(), what, gpus))
        return found

    def workers(self, node: str) -> list[Use]:
        """Tasks that run on the node and hold GPUs outside of placement groups."""
        from ray._private.internal_api import node_stats

        found = []
        for worker in node_stats(*self._addresses[node], False).core_workers_stats:
            slots = worker.used_resources[GPU].resource_slots if GPU in worker.used_resources else ()
            if slots and not worker.actor_id.strip(b"\xff"):
                found.append(Use(node, worker.job_id.hex(), "a task", sum(slot.allocation for slot in slots)))
        return found

    def jobs(self) -> dict[str, str]:
        """Job to its entrypoint, with the id that it was submitted under where it was."""
        from ray.core.generated import gcs_pb2

        found = {}
        for said in _accessor().get_job_table():
            data = gcs_pb2.JobTableData.FromString(said)
            submitted = data.config.metadata.get("job_submission_id", "")
            found[data.job_id.hex()] = f"{submitted}: {data.entrypoint}" if submitted else data.entrypoint
        return found


def _accessor() -> Any:
    from ray._private.state import state

    return state._connect_and_get_accessor()
