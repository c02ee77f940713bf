"""examples/recipes/serve_replicas.py: Ray Serve's replicas, counted by a grant and on the nodes of its pool.

Serve's controller starts the replicas, and puts them into no placement group of ours. `preemptible=False` keeps them
for as long as they serve, within the team's own share; else `slot.on_preempt` is where to `serve.delete` them.
"""

import ray
from ray import serve

import ray_pools as pools


@serve.deployment
class Doubler:
    def __call__(self, number):
        return 2 * number, ray.get_runtime_context().get_node_id()


client = pools.connect()
with client.slot(requester="vision", gpus=2, cpus=2, placement="none", preemptible=False) as slot:
    replicas = Doubler.options(
        num_replicas=slot.resources["gpu"],
        ray_actor_options={"num_cpus": 1, "num_gpus": 1, "label_selector": slot.label_selector},
    )
    app = serve.run(replicas.bind(), name="doubler", route_prefix=None)
    answer, node = app.remote(21).result()
    serve.shutdown()

labels = {each["NodeID"]: each["Labels"] for each in ray.nodes()}[node]
assert slot.label_selector.items() <= labels.items()
print("served", answer, "in pool", slot.pool)
