"""cluster.yaml: valid by Ray's own schema, the pools come up with the head, the package brings the same file.

Faults it stands for: a key that `ray up` would refuse, a label that Ray would refuse on a running node, a
built-in copy that drifted, a bad cluster.yaml that is not named as such.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_pools.errors import BadInput
from ray_pools.local_node_types import BUILT_IN, HEAD_TYPE, find_cluster_yaml, load_node_types

ROOT = Path(__file__).parent.parent
CLUSTER_YAML = ROOT / "cluster.yaml"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded = yaml.safe_load(CLUSTER_YAML.read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_valid_by_rays_own_schema(document: dict[str, Any]) -> None:
    import ray.autoscaler
    from ray.autoscaler._private.util import validate_config

    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(document, schema)
    validate_config(document)


def test_labels_are_labels_that_ray_takes(document: dict[str, Any]) -> None:
    from ray._private.label_utils import validate_node_label_syntax

    for kind in document["available_node_types"].values():
        validate_node_label_syntax(kind.get("labels"))


def test_two_gpu_types_that_labels_tell_apart_one_of_them_spot(document: dict[str, Any]) -> None:
    types = {
        name: kind for name, kind in document["available_node_types"].items() if "GPU" in kind["resources"]
    }
    markets = {kind["labels"]["ray.io/market-type"] for kind in types.values()}
    spot = [name for name, kind in types.items() if "InstanceMarketOptions" in kind["node_config"]]

    assert markets == {"spot", "on-demand"}
    assert [types[name]["labels"]["ray.io/market-type"] for name in spot] == ["spot"]
    assert all(kind["labels"]["ray-pools.io/node-type"] == name for name, kind in types.items())
    assert document["head_node_type"] == HEAD_TYPE


def test_the_head_brings_the_pools_up_after_ray(document: dict[str, Any]) -> None:
    commands = document["head_start_ray_commands"]
    ray_start = next(i for i, command in enumerate(commands) if "ray start --head" in command)
    pools_up = next(i for i, command in enumerate(commands) if "pools up" in command)

    assert ray_start < pools_up
    # a mounted file must exist where `ray up` runs, and the configuration that comes up must be a mounted one
    config = commands[pools_up].split("pools up ")[1]
    assert (ROOT / document["file_mounts"][config]).parent.is_dir()
    assert any("ray-pools" in command for command in document["setup_commands"])


def test_the_package_brings_the_same_file() -> None:
    assert BUILT_IN.read_bytes() == CLUSTER_YAML.read_bytes()


def test_found_beside_the_configuration_then_here_then_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = tmp_path / "beside", tmp_path / "here"
    beside.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    assert find_cluster_yaml(beside / "pools.yaml") == BUILT_IN

    (here / "cluster.yaml").touch()
    assert find_cluster_yaml(beside / "pools.yaml") == here / "cluster.yaml"

    (beside / "cluster.yaml").touch()
    assert find_cluster_yaml(beside / "pools.yaml") == beside / "cluster.yaml"


def test_the_node_types_read(document: dict[str, Any]) -> None:
    types = load_node_types(CLUSTER_YAML)

    assert set(types) == {HEAD_TYPE, "gpu_ondemand", "gpu_spot"}
    assert types["gpu_spot"].resources["GPU"] == 4
    assert types["gpu_spot"].labels["ray.io/market-type"] == "spot"
    assert types["gpu_spot"].max_workers == document["available_node_types"]["gpu_spot"]["max_workers"]


HEAD = f"{HEAD_TYPE}: {{resources: {{CPU: 1}}, node_config: {{}}}}"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "available_node_types"),
        ("[1, 2]", "available_node_types"),
        ("{a: ", "cluster.yaml"),
        ("available_node_types: 3", "available_node_types"),
        ("available_node_types: {gpu: {resources: {GPU: 1}}}", "head_node_type"),
        (f"head_node_type: other\navailable_node_types: {{{HEAD}}}", "head_node_type"),
        (f"available_node_types: {{{HEAD}, gpu: 1}}", "available_node_types.gpu"),
        (f"available_node_types: {{{HEAD}, gpu: {{}}}}", "available_node_types.gpu.resources"),
        (
            f"available_node_types: {{{HEAD}, gpu: {{resources: {{GPU: -1}}}}}}",
            "available_node_types.gpu.resources.GPU",
        ),
        (
            f"available_node_types: {{{HEAD}, gpu: {{resources: {{GPU: 1}}, labels: {{a: 1}}}}}}",
            "available_node_types.gpu.labels",
        ),
        (
            f"available_node_types: {{{HEAD}, gpu: {{resources: {{GPU: 1}}, min_workers: 3, max_workers: 2}}}}",
            "available_node_types.gpu.max_workers",
        ),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path: Path, text: str, field: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)

    with pytest.raises(BadInput) as caught:
        load_node_types(file)

    assert caught.value.field == field
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere\.yaml.*No such file"):
        load_node_types(tmp_path / "nowhere.yaml")
