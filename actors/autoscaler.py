"""Ray's autoscaler, as who prewarms sees it: what it can make of the cluster, what it was asked for, how it is asked.

There is one register of wishes for the whole cluster, and its last writer wins. Ray Data and Ray Train keep a detached
actor, `AutoscalingCoordinator`, which merges the wishes of who registers there and writes the sum, every 20 s for ever;
where it lives, ours is registered there as well instead of written over theirs. That actor, and most of what is read
here, is no public interface: whatever is not as it was with the Ray of today raises here, or is None, and the one call
that is public (`request_resources`) remains.

Every call blocks, and fails or hangs while the GCS is down. Ray is imported when first used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ray_pools.core.bundles import Bundle
from ray_pools.core.feasible import Cluster, Node, NodeType, selector_parts
from ray_pools.core.prewarm import Wish
from ray_pools.errors import shown

log = logging.getLogger("ray_pools")

REGISTER, COORDINATOR = "register", "AutoscalingCoordinator"
OTHERS = "(others)"
HEAD_RESOURCE = "node:__internal_head__"
TYPE_LABEL = "ray.io/node-group"

_CALL_S = 5.0
_MONITORS_EVERY_S = 30.0
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

Wanted = Counter[tuple[Any, ...]]
"""(bundle, selector) to how many; both in a form that does not depend on how they were written."""


class Standing(NamedTuple):
    """What stands in the register; `refused`: what the autoscaler calls infeasible, so that it brings up nothing."""

    wanted: Wanted
    refused: Wanted


class Autoscaler(Protocol):
    """What the prewarmer asks of Ray."""

    def version(self) -> str: ...
    def cluster(self) -> Cluster | None: ...
    def send(self, bundles: Sequence[Bundle], selectors: Sequence[Mapping[str, str]], again: bool) -> str: ...
    def write(self, bundles: Sequence[Bundle], selectors: Sequence[Mapping[str, str]]) -> None: ...
    def standing(self) -> Standing | None: ...
    def has_coordinator(self) -> bool: ...
    def starting(self) -> dict[str, int]: ...


def wanted_of(
    bundles: Sequence[Mapping[str, float]], selectors: Sequence[Mapping[str, str]], labels: bool = True
) -> Wanted:
    """A wish as it stands in the register. labels: False where they are dropped."""
    return Counter(
        (_amounts(bundle), _selector(selector) if labels else ())
        for bundle, selector in zip(bundles, selectors, strict=True)
    )


def _amounts(bundle: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted((name, round(float(amount), 4)) for name, amount in bundle.items() if amount))


def _selector(selector: Mapping[str, str]) -> tuple[Any, ...]:
    return tuple(sorted((key, *selector_parts(said)) for key, said in selector.items()))


def wishes_of(wanted: Wanted) -> list[Wish]:
    """What stands in the register, as wishes of nobody in particular: one for each selector."""
    found: dict[tuple[Any, ...], list[Bundle]] = {}
    for (bundle, selector), count in sorted(wanted.items()):
        found.setdefault(selector, []).extend([dict(bundle)] * count)
    return [
        Wish(f"{OTHERS} {number}", bundles, {key: _said(*rest) for key, *rest in selector})
        for number, (selector, bundles) in enumerate(found.items(), 1)
    ]


def _said(negated: bool, values: Sequence[str]) -> str:
    said = values[0] if len(values) == 1 else f"in({','.join(values)})"
    return f"!{said}" if negated else said


class RayAutoscaler:
    """The autoscaler of the cluster that this process is connected to. `requester`: as whom it asks."""

    def __init__(self, requester: str, expire_s: float = 60.0) -> None:
        self._requester, self._expire_s = requester, expire_s
        self._coordinator: Any = None
        self._complained = ""
        self._monitors_seen: tuple[float, list[str]] | None = None
        self._read: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    # --- what there is

    def version(self) -> str:
        """v2, v1, none (nothing will ever come up), or unknown (no cluster, or it has not said yet)."""
        return autoscaler_of_ray(self._monitors())

    def cluster(self) -> Cluster | None:
        """Its node types and nodes; None where they can't be known."""
        settings = self._settings()
        return None if settings is None else cluster_of(settings, _nodes())

    def _settings(self) -> dict[str, Any] | None:
        """The autoscaler's own settings: of the file that its process reads, or of the RayCluster in Kubernetes."""
        path = next((each for each in self._monitors() or () if each), "")
        if not path:
            return _kuberay_settings()
        stat = os.stat(path)
        stamp = path, stat.st_mtime_ns, stat.st_size
        if self._read is None or self._read[0] != stamp:
            self._read = stamp, _parsed(Path(path).read_text())
        return self._read[1]

    def _monitors(self) -> list[str] | None:
        """As `monitors`, which looks at every process of the machine: not at each sending."""
        if self._monitors_seen is None or time.monotonic() - self._monitors_seen[0] > _MONITORS_EVERY_S:
            with contextlib.suppress(OSError):
                self._monitors_seen = time.monotonic(), monitors()
        return self._monitors_seen[1] if self._monitors_seen is not None else None

    def starting(self) -> dict[str, int]:
        """Node type to how many of it were asked for and are not there yet."""
        found: Counter[str] = Counter()
        if _is_v2():
            state = _cluster_status().autoscaling_state
            for asked in state.pending_instance_requests:
                found[asked.ray_node_type_name] += asked.count
            for pending in state.pending_instances:
                found[pending.ray_node_type_name] += 1
        else:
            report = _v1_report()
            found.update(
                {str(name): int(count) for name, count in (report.get("pending_launches") or {}).items()}
            )
            found.update(str(kind) for _, kind, *_ in report.get("pending_nodes") or ())
        return dict(found)

    # --- what it was asked for

    def standing(self) -> Standing | None:
        """What stands in the register now; None where it can't be read."""
        if not _is_v2():
            from ray._private import ray_constants
            from ray.experimental.internal_kv import _internal_kv_get

            said = _internal_kv_get(ray_constants.AUTOSCALER_RESOURCE_REQUEST_CHANNEL)
            bundles = json.loads(said) if said else []
            return Standing(wanted_of(bundles, [{}] * len(bundles)), Counter())
        status = _cluster_status()
        return Standing(
            _constrained(status.cluster_resource_state.cluster_resource_constraints),
            _constrained(status.autoscaling_state.infeasible_cluster_resource_constraints),
        )

    def has_coordinator(self) -> bool:
        """Ray Data or Ray Train have run: their actor writes the register. Loads none of their code."""
        from ray.util import list_named_actors

        found = list_named_actors(all_namespaces=True)
        return any(each == {"name": COORDINATOR, "namespace": COORDINATOR} for each in found)

    # --- asking

    def send(self, bundles: Sequence[Bundle], selectors: Sequence[Mapping[str, str]], again: bool) -> str:
        """Asks for all of it, in place of what was asked before. again: although it may be the same. Returns through
        what: `REGISTER` or `COORDINATOR`.
        """
        try:
            if self.has_coordinator() and self._register(bundles, selectors, again):
                self._complained = ""
                return COORDINATOR
        except Exception as problem:  # noqa: BLE001 - no public interface: anything may have changed in it
            self._coordinator = None
            said = f"{type(problem).__name__}: {shown(str(problem), 200)}"
            if said != self._complained:
                log.warning(
                    "prewarming: Ray's %s can't be asked, so it and the pools write over each other's wishes: %s",
                    COORDINATOR,
                    said,
                )
            self._complained = said
        self.write(bundles, selectors)
        return REGISTER

    def write(self, bundles: Sequence[Bundle], selectors: Sequence[Mapping[str, str]]) -> None:
        """Into the register itself, in place of all that stands there."""
        send_to_ray(list(bundles), [dict(each) for each in selectors])

    def _register(
        self, bundles: Sequence[Bundle], selectors: Sequence[Mapping[str, str]], again: bool
    ) -> bool:
        import ray

        if self._coordinator is None:
            self._coordinator = ray.get_actor(COORDINATOR, namespace=COORDINATOR)
        if not bundles:
            ray.get(self._coordinator.cancel_request.remote(self._requester), timeout=_CALL_S)
            return True
        asked: dict[str, Any] = {
            "requester_id": self._requester,
            "resources": [dict(bundle) for bundle in bundles],
            "expire_after_s": self._expire_s,
            "label_selectors": [dict(each) for each in selectors],
        }
        ray.get(self._coordinator.request_resources.remote(**asked), timeout=_CALL_S)
        # the same wish is not written again before its next round; a new one is, and all others with it
        if again:
            nudge = {"requester_id": f"{self._requester} (again)", "resources": [], "expire_after_s": 0.1}
            ray.get(self._coordinator.request_resources.remote(**nudge), timeout=_CALL_S)
        return True

    @property
    def complaint(self) -> str:
        """Why the other side's actor can't be asked although it lives; "" where all is well."""
        return self._complained


def send_to_ray(bundles: list[Bundle], selectors: list[dict[str, str]]) -> None:
    """Replaces the cluster's whole request. Blocks while the GCS is down; does nothing without an autoscaler."""
    from ray.autoscaler.sdk import request_resources

    if bundles:
        request_resources(bundles=bundles, bundle_label_selectors=selectors)
    else:
        request_resources(bundles=[])


def autoscaler_of_ray(found: list[str] | None = None) -> str:
    """v2, v1, none (nothing will ever come up), or unknown (no cluster, or it has not said). `found`: `monitors`."""
    from ray.experimental.internal_kv import _internal_kv_initialized

    if not _internal_kv_initialized():
        return "unknown"
    if found is None:
        with contextlib.suppress(OSError):
            found = monitors()
    if found and not any(found):  # it runs, and was given nothing that it could start
        return "none"
    if _is_v2():
        return "v2"
    node_types = _v1_report().get("active_nodes") or {}
    if not node_types:
        return "unknown"
    # without an autoscaler its monitor still reports, each node as a type of its own
    return "none" if all(name.startswith("node_") for name in node_types) else "v1"


def monitors() -> list[str]:
    """Of each autoscaler's process on this machine that belongs to this cluster: the file of its settings, or ""."""
    import ray

    here = f"--gcs-address={ray.get_runtime_context().gcs_address}"
    return [
        next((word.partition("=")[2] for word in words if word.startswith("--autoscaling-config=")), "")
        for words in _command_lines()
        if here in words and any(word.endswith("/monitor.py") and "autoscaler" in word for word in words[:4])
    ]


def _command_lines() -> Iterator[list[str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it is gone, or another user's
                continue
            yield [os.fsdecode(word) for word in words]


def _parsed(text: str) -> dict[str, Any]:
    import yaml

    found = yaml.safe_load(text)  # JSON too, as Ray reads it
    return found if isinstance(found, dict) else {}


def _kuberay_settings() -> dict[str, Any] | None:
    """In a pod of KubeRay the autoscaler runs in a container of its own; its settings are made of the RayCluster."""
    name = os.environ.get("RAY_CLUSTER_NAME")
    if not name or not _SERVICE_ACCOUNT.is_file():
        return None
    from ray.autoscaler._private.kuberay.autoscaling_config import AutoscalingConfigProducer

    found: dict[str, Any] = AutoscalingConfigProducer(name, _SERVICE_ACCOUNT.read_text().strip())()
    return found


def cluster_of(settings: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> Cluster | None:
    """Settings of `available_node_types` as Ray has them, and nodes as of `ray.nodes()`. None where a type does not say
    what its nodes have: then nobody can tell what is feasible.
    """
    most = settings.get("max_workers")
    types = []
    for name, kind in (settings.get("available_node_types") or {}).items():
        if name == settings.get("head_node_type"):
            continue
        resources = kind.get("resources") or {}
        if not resources:
            return None
        limit = kind.get("max_workers", most)
        types.append(
            NodeType(
                str(name),
                {str(key): float(amount) for key, amount in resources.items()},
                {str(key): str(value) for key, value in (kind.get("labels") or {}).items()},
                int(limit) if limit is not None else 10**9,
            )
        )
    there = [
        Node(
            str((node.get("Labels") or {}).get(TYPE_LABEL, "")),
            dict(node.get("Resources") or {}),
            dict(node.get("Labels") or {}),
            HEAD_RESOURCE in (node.get("Resources") or {}),
        )
        for node in nodes
        if node.get("Alive")
    ]
    return Cluster(types, None if most is None else int(most), there)


def _nodes() -> list[dict[str, Any]]:
    import ray

    return list(ray.nodes())


def _is_v2() -> bool:
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    return bool(is_autoscaler_v2())


def _v1_report() -> dict[str, Any]:
    from ray._private import ray_constants
    from ray.experimental.internal_kv import _internal_kv_get

    status = _internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS)
    return (json.loads(status) if status else {}).get("autoscaler_report") or {}


def _cluster_status() -> Any:
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
    from ray.experimental.internal_kv import internal_kv_get_gcs_client

    reply = GetClusterStatusReply()
    reply.ParseFromString(internal_kv_get_gcs_client().get_cluster_status(timeout_s=_CALL_S))
    return reply


def _constrained(constraints: Any) -> Wanted:
    """Of Ray's protobuf messages."""
    found: Wanted = Counter()
    for constraint in constraints:
        for asked in constraint.resource_requests:
            selector = tuple(
                sorted(
                    (each.label_key, each.operator != _operator_in(), tuple(sorted(each.label_values)))
                    for labels in asked.request.label_selectors
                    for each in labels.label_constraints
                )
            )
            found[_amounts(dict(asked.request.resources_bundle)), selector] += asked.count
    return found


def _operator_in() -> int:
    from ray.core.generated.common_pb2 import LabelSelectorOperator

    return int(LabelSelectorOperator.LABEL_OPERATOR_IN)
