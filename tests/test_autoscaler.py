"""What is read of Ray's autoscaler, and asked of it, without a cluster: node types from its settings (a file, or a
RayCluster in Kubernetes), wishes as they stand in the register, and Ray Data's actor when it does as it should, or not.

Faults it stands for: an interface that is not Ray's public one, and changes; a wish that is compared with itself and
found to be another's; a type whose nodes nobody can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_pools.actors import autoscaler
from ray_pools.actors.autoscaler import COORDINATOR, REGISTER, RayAutoscaler, cluster_of, wanted_of, wishes_of
from ray_pools.core.feasible import Cluster, Node, NodeType

SETTINGS: dict[str, Any] = {
    "max_workers": 5,
    "head_node_type": "head",
    "available_node_types": {
        "head": {"resources": {"CPU": 4}, "max_workers": 0},
        "a": {"resources": {"CPU": 8, "GPU": 4}, "labels": {"kind": "a"}, "max_workers": 2},
        "b": {"resources": {"CPU": 8}},
    },
}


def test_node_types_and_nodes_are_what_the_autoscaler_goes_by() -> None:
    nodes = [
        {"Alive": True, "Labels": {"ray.io/node-group": "a", "kind": "a"}, "Resources": {"GPU": 4.0}},
        {"Alive": True, "Labels": None, "Resources": {"node:__internal_head__": 1.0}},
        {"Alive": False, "Labels": {}, "Resources": {}},
    ]
    assert cluster_of(SETTINGS, nodes) == Cluster(
        [NodeType("a", {"CPU": 8.0, "GPU": 4.0}, {"kind": "a"}, 2), NodeType("b", {"CPU": 8.0}, {}, 5)],
        5,
        [
            Node("a", {"GPU": 4.0}, {"ray.io/node-group": "a", "kind": "a"}),
            Node("", {"node:__internal_head__": 1.0}, {}, is_head=True),
        ],
    )


def test_where_a_type_does_not_say_what_its_nodes_have_nothing_is_known() -> None:
    kinds = {**SETTINGS["available_node_types"], "c": {"node_config": {"InstanceType": "g5"}}}
    assert cluster_of({**SETTINGS, "available_node_types": kinds}, []) is None


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("{max_workers: 1, available_node_types: {a: {resources: {GPU: 4}}}}")
    monkeypatch.setattr(autoscaler, "monitors", lambda: ["", str(file)])
    monkeypatch.setattr(autoscaler, "_nodes", list)
    found = RayAutoscaler("me")
    assert found.cluster() == Cluster([NodeType("a", {"GPU": 4.0}, {}, 1)], 1, [])
    file.write_text('{"max_workers": 22, "available_node_types": {"a": {"resources": {"GPU": 4}}}}')
    assert found.cluster() == Cluster([NodeType("a", {"GPU": 4.0}, {}, 22)], 22, [])


def test_in_kubernetes_the_node_types_are_those_of_the_ray_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.autoscaler._private.kuberay import autoscaling_config

    def group(name: str, gpus: int, most: int, labels: dict[str, str]) -> dict[str, Any]:
        limits = {"cpu": "8", "memory": "32Gi", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
        container = {"name": "ray", "resources": {"limits": limits, "requests": limits}}
        return {
            "groupName": name,
            "replicas": 0,
            "minReplicas": 0,
            "maxReplicas": most,
            "labels": labels,
            "rayStartParams": {},
            "template": {"spec": {"containers": [container]}},
        }

    made = {
        "metadata": {"name": "mine", "namespace": "team"},
        "spec": {
            "headGroupSpec": group("headgroup", 0, 0, {}),
            "workerGroupSpecs": [group("spot", 4, 3, {"kind": "spot"})],
        },
    }
    asked: list[tuple[str, str]] = []

    class Client:
        def __init__(self, namespace: str) -> None:
            self.namespace = namespace

        def get(self, path: str) -> dict[str, Any]:
            asked.append((self.namespace, path))
            return made

    (tmp_path / "namespace").write_text("team\n")
    monkeypatch.setattr(autoscaling_config.node_provider, "KubernetesHttpApiClient", Client)
    monkeypatch.setattr(autoscaler, "_SERVICE_ACCOUNT", tmp_path / "namespace")
    monkeypatch.setattr(autoscaler, "monitors", list)
    monkeypatch.setattr(autoscaler, "_nodes", list)
    assert RayAutoscaler("me").cluster() is None, "it is no pod of KubeRay"
    monkeypatch.setenv("RAY_CLUSTER_NAME", "mine")
    cluster = RayAutoscaler("me").cluster()
    assert cluster is not None
    (kind,) = cluster.types
    assert (kind.name, kind.most, kind.labels) == ("spot", 3, {"kind": "spot"})
    assert (kind.resources["GPU"], kind.resources["CPU"]) == (4, 8)
    assert asked == [("team", "rayclusters/mine")]


def test_a_wish_is_the_same_however_it_is_written() -> None:
    one = wanted_of([{"GPU": 4, "CPU": 1.0, "x": 0}], [{"k": "in(b, a)", "j": "!c"}])
    assert one == wanted_of([{"CPU": 1, "GPU": 4.00001}], [{"j": "!c", "k": "in(a,b)"}])
    assert one != wanted_of([{"CPU": 1, "GPU": 4}], [{"j": "c", "k": "in(a,b)"}])
    assert wanted_of([{"GPU": 4}], [{"k": "a"}], labels=False) == wanted_of([{"GPU": 4}], [{}])


def test_what_stands_there_can_be_asked_for_again() -> None:
    bundles = [{"GPU": 4.0}, {"CPU": 1.0}, {"CPU": 1.0}]
    selectors = [{"k": "!in(a,b)"}, {"k": "a"}, {"k": "a"}]
    found = wishes_of(wanted_of(bundles, selectors))
    again = [bundle for wish in found for bundle in wish.bundles]
    assert wanted_of(again, [wish.selector for wish in found for _ in wish.bundles]) == wanted_of(
        bundles, selectors
    )


# --- Ray Data's actor


class Method:
    """One that is called by `remote`, as an actor's."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class PaperCoordinator:
    """What it was asked for, in order."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.request_resources = Method(lambda **asked: self.asked.append(asked))
        self.cancel_request = Method(lambda requester: self.asked.append(f"cancel {requester}"))


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> PaperCoordinator:
    """It lives, and the register is a list of what was written."""
    made = PaperCoordinator()
    monkeypatch.setattr(RayAutoscaler, "has_coordinator", lambda self: True)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: made)
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)
    return made


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(
        autoscaler, "send_to_ray", lambda bundles, selectors: found.append((bundles, selectors))
    )
    return found


def test_where_it_lives_the_wish_is_registered_there(paper: PaperCoordinator, written: list[Any]) -> None:
    found = RayAutoscaler("me", 60.0)
    assert found.send([{"GPU": 4.0}], [{"k": "a"}], again=False) == COORDINATOR
    (asked,) = paper.asked
    assert asked == {
        "requester_id": "me",
        "resources": [{"GPU": 4.0}],
        "expire_after_s": 60.0,
        "label_selectors": [{"k": "a"}],
    }
    # the same again is written only with something new
    found.send([{"GPU": 4.0}], [{"k": "a"}], again=True)
    assert paper.asked[1] == asked
    assert (paper.asked[2]["requester_id"], paper.asked[2]["resources"]) == ("me (again)", [])
    found.send([], [], again=False)
    assert paper.asked[3] == "cancel me"
    assert (written, found.complaint) == ([], "")


def test_one_that_is_not_as_it_was_is_told_once_and_written_over(
    paper: PaperCoordinator, written: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    del paper.request_resources  # such as where the head can't load Ray Data
    found = RayAutoscaler("me")
    for _ in range(2):
        assert found.send([{"GPU": 4.0}], [{"k": "a"}], again=False) == REGISTER
    assert written == [([{"GPU": 4.0}], [{"k": "a"}])] * 2
    assert "request_resources" in found.complaint
    assert len([record for record in caplog.records if "write over" in record.message]) == 1
