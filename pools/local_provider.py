"""The node provider of a local cluster's autoscaler: Ray's fake one, with what it lacks.

The fake provider refuses a node type with `memory`, the one amount that it forgets to pass on (work that asks for
memory would never bring up a first node), and gives each node the head's label ray.io/node-group. The environment is
the way in that is left. And its nodes are there at once: `boot_s` has them take a while, as a cloud's do.

The module is a text that is written into the cluster's directory, since nothing but the cluster's autoscaler loads it.
"""

from __future__ import annotations

MODULE = "pools_local_provider"

CODE = """
import json, os, threading
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

class LocalProvider(FakeMultiNodeProvider):
    def _create_node_with_resources_and_labels(self, node_config, tags, count, resources, labels):
        boot_s = self.provider_config.get("boot_s") or 0
        if not boot_s:
            self._start(tags, resources, labels)
            return
        with self.lock:
            id = self._next_hex_node_id()
            own = {"ray-node-type": "worker", "ray-node-name": id, "ray-node-status": "up-to-date"}
            self._nodes[id] = {"tags": {**own, **tags}, "node": None}
        booted = threading.Timer(boot_s, self._boot, (id, tags, resources, labels))
        booted.daemon = True
        booted.start()

    def _boot(self, id, tags, resources, labels):
        with self.lock:
            if id in self._nodes:  # else it was taken back meanwhile
                next_id, self._next_node_id = self._next_node_id, int(id[-5:]) - 1
                try:
                    self._start(tags, resources, labels)
                finally:
                    self._next_node_id = next_id

    def _start(self, tags, resources, labels):
        resources = dict(resources)
        wanted = {"RAY_NODE_TYPE_NAME": tags["ray-user-node-type"]}
        if "memory" in resources:
            wanted["RAY_OVERRIDE_RESOURCES"] = json.dumps({"memory": resources.pop("memory")})
        with self.lock:
            before = {name: os.environ.get(name) for name in wanted}
            os.environ.update(wanted)
            try:
                super()._create_node_with_resources_and_labels({}, tags, 1, resources, labels)
            finally:
                for name, value in before.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})

    def _terminate_node(self, node):
        if node["node"] is not None:
            super()._terminate_node(node)
"""
