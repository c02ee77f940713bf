"""What a pool's placement asks of nodes that no node of the cluster has, nor any that its autoscaler can start.

It is legal, for node types come and go, and surely not meant: grants of such a pool wait for nodes until their time for
that is over, again and again (docs/rules.md section 7).
"""

from __future__ import annotations

from .bundles import mapping_of, selector_for
from .config_rules import PoolConfig
from .feasible import Cluster, matches


def unplaceable(pool: PoolConfig, cluster: Cluster) -> str:
    """Why no node can be one of this pool's, or not one as large as it says; "" where some can."""
    placement = pool.placement
    kinds = [(kind.resources, kind.labels) for kind in cluster.types]
    kinds += [(node.resources, node.labels) for node in cluster.nodes]
    if placement is None or not kinds:
        return ""
    labels = selector_for(placement)
    fitting = [resources for resources, has in kinds if matches(labels, has)]
    if not fitting:
        said = ", ".join(f"{key}={value}" for key, value in labels.items())
        return f"no node has labels {said}, nor has any node type"
    mapping, nodes = mapping_of(placement), placement.get("node") or {}
    for key in sorted({*pool.capacity, *nodes} & mapping.keys()):
        resource, divisor = mapping[key]
        most = max(float(resources.get(resource, 0.0)) for resources in fitting)
        node = nodes.get(key)
        if not most and (node or pool.capacity.get(key)):
            which = "node with its labels" if labels else "node"
            return f"no {which} has any {resource} (its {key}), nor has any node type"
        if node and node / divisor > most:
            return f"placement.node says {key} {node}, but the largest node has {resource} {most:g}"
    return ""
