"""examples/recipes/train_beside.py: Ray Train beside a grant.

Train makes a placement group of its own. So the grant only counts (`placement="none"`), and Train's workers go to the
pool's nodes by its label selector. `TorchTrainer` and the others take the same arguments.
"""

import tempfile

import ray
from ray import train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import ray_pools as pools


def loop(config):
    labels = ray.get_runtime_context().get_node_labels()
    assert config["pool's nodes"].items() <= labels.items()
    train.report({"loss": 0.1})


client = pools.connect()
with client.slot(requester="vision", gpus=2, cpus=2, placement="none") as slot:
    trainer = DataParallelTrainer(
        loop,
        train_loop_config={"pool's nodes": slot.label_selector},
        scaling_config=train.ScalingConfig(
            num_workers=slot.resources["gpu"],
            use_gpu=True,
            resources_per_worker={"CPU": 1, "GPU": 1},
            label_selector=slot.label_selector,
        ),
        run_config=train.RunConfig(storage_path=tempfile.mkdtemp()),
    )
    trainer.fit()
    print("trained in pool", slot.pool)
