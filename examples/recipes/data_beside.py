"""examples/recipes/data_beside.py: Ray Data beside a grant: its actors are counted, and on the nodes of the pool."""

import ray

import ray_pools as pools


class Predictor:
    def __call__(self, batch):
        return {"id": batch["id"], "node": [ray.get_runtime_context().get_node_id()] * len(batch["id"])}


client = pools.connect()
with client.slot(requester="vision", gpus=2, cpus=2, placement="none") as slot:
    predicted = ray.data.range(100, override_num_blocks=4).map_batches(
        Predictor,
        batch_size=20,
        compute=ray.data.ActorPoolStrategy(size=slot.resources["gpu"]),
        num_cpus=1,
        num_gpus=1,
        label_selector=slot.label_selector,
    )
    rows = predicted.take_all()

labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
assert sorted(row["id"] for row in rows) == list(range(100))
assert all(slot.label_selector.items() <= labels[row["node"]].items() for row in rows)
print("predicted", len(rows), "rows in pool", slot.pool)
