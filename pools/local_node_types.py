"""The node types of a cluster.yaml, read for a local cluster, and the autoscaler's settings made from them.

Of a cluster.yaml only `available_node_types` counts here: a type's name, resources, labels, min and max. What
concerns a cloud (machines, disks, commands) is left to Ray and to the cloud.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .errors import MISSING, BadInput
from .limits import AMOUNT_MAX, CONFIG_MAX_BYTES, check_integer, check_name

HEAD_TYPE = "ray.head.default"
"""Ray's fake provider knows the head by this name only; with another, its autoscaler fails at each round."""

NODE_OBJECT_STORE_BYTES = 100_000_000
"""Of each pretended node, unless its type says otherwise: they all share this machine's memory."""

DEFAULT_MAX_WORKERS = 2
BUILT_IN = Path(__file__).parent / "data" / "cluster.yaml"

# Keys that Ray's autoscaler wants to find, empty, in any configuration that `ray up` did not fill.
_EMPTY: dict[str, Any] = {
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    **{name: [] for name in ("initialization_commands", "setup_commands")},
    **{name: [] for name in ("head_setup_commands", "worker_setup_commands")},
    **{name: [] for name in ("head_start_ray_commands", "worker_start_ray_commands")},
    "file_mounts_sync_continuously": False,
}


@dataclass(frozen=True)
class NodeType:
    """One node type: whole amounts of resources, labels, and how many nodes there may be."""

    resources: Mapping[str, int]
    labels: Mapping[str, str]
    min_workers: int
    max_workers: int


def find_cluster_yaml(beside: str | Path | None = None) -> Path:
    """cluster.yaml in the folder of the file `beside`, else in the current folder, else the package's own."""
    folders = [Path(beside).parent] if beside is not None else []
    for folder in (*folders, Path.cwd()):
        if (folder / "cluster.yaml").is_file():
            return folder / "cluster.yaml"
    return BUILT_IN


def load_node_types(path: str | Path | None = None, beside: str | Path | None = None) -> dict[str, NodeType]:
    """The node types in `path` (by default `find_cluster_yaml(beside)`), the head's among them.

    Raises BadInput naming file and key for a file that can't be read or makes no local cluster.
    """
    file = Path(path) if path is not None else find_cluster_yaml(beside)
    try:
        with file.open("rb") as stream:
            text = stream.read(CONFIG_MAX_BYTES + 1)
        if len(text) > CONFIG_MAX_BYTES:
            raise BadInput("cluster.yaml", str(file), f"a file of at most {CONFIG_MAX_BYTES} bytes")
        document = yaml.safe_load(text)
    except OSError as error:
        raise BadInput("cluster.yaml", str(file), f"a readable file ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput("cluster.yaml", str(file), f"YAML ({' '.join(str(error).split())[:200]})") from None
    found = document.get("available_node_types", MISSING) if isinstance(document, dict) else MISSING
    if not isinstance(found, dict):
        raise BadInput("available_node_types", found, "a mapping from name to node type", str(file))
    if document.get("head_node_type", HEAD_TYPE) != HEAD_TYPE or HEAD_TYPE not in found:
        raise BadInput("head_node_type", document.get("head_node_type", MISSING), f"{HEAD_TYPE}", str(file))
    return {
        check_name("available_node_types", name, str(file)): _read(name, found[name], file) for name in found
    }


def _read(name: str, body: object, file: Path) -> NodeType:
    key, where = f"available_node_types.{name}", str(file)
    if not isinstance(body, dict):
        raise BadInput(key, body, "a mapping with resources and labels", where)
    resources, labels = body.get("resources") or {}, body.get("labels") or {}
    if not isinstance(resources, dict):
        raise BadInput(f"{key}.resources", resources, "a mapping from resource to whole amount", where)
    if name != HEAD_TYPE and not resources:
        raise BadInput(
            f"{key}.resources", resources, "stated amounts: a local node has no machine type", where
        )
    for resource, amount in resources.items():
        check_name(f"{key}.resources", resource, where)
        check_integer(f"{key}.resources.{resource}", amount, 0, AMOUNT_MAX, where)
    if not isinstance(labels, dict) or not all(isinstance(x, str) for pair in labels.items() for x in pair):
        raise BadInput(f"{key}.labels", labels, "a mapping from text to text", where)
    low = check_integer(f"{key}.min_workers", body.get("min_workers", 0), 0, where=where)
    default = 0 if name == HEAD_TYPE else max(low, DEFAULT_MAX_WORKERS)
    high = check_integer(f"{key}.max_workers", body.get("max_workers", default), low, where=where)
    return NodeType(dict(resources), dict(labels), low, high)


def autoscaling_config(
    node_types: Mapping[str, NodeType], provider: Mapping[str, Any], max_workers: int, idle_timeout_s: float
) -> dict[str, Any]:
    """The file behind `ray start --autoscaling-config` for these node types."""
    types: dict[str, Any] = {HEAD_TYPE: {"resources": {}, "node_config": {}, "max_workers": 0}}
    for name, kind in node_types.items():
        resources = dict(kind.resources)
        if name != HEAD_TYPE:
            resources.setdefault("object_store_memory", NODE_OBJECT_STORE_BYTES)
        types[name] = {
            "resources": resources,
            "labels": dict(kind.labels),
            "node_config": {},
            "min_workers": kind.min_workers,
            "max_workers": kind.max_workers,
        }
    return {
        "cluster_name": "local",
        "provider": dict(provider),
        "available_node_types": types,
        "head_node_type": HEAD_TYPE,
        "max_workers": max_workers,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_timeout_s / 60,
        **_EMPTY,
    }
