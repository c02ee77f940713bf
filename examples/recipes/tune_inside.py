"""examples/recipes/tune_inside.py: Ray Tune, with the work of its trials inside a grant.

Tune makes a placement group for each trial, outside of any grant. So a trial asks for next to nothing there, and sends
its work into the slot.
"""

import tempfile

import ray
from ray import tune

import ray_pools as pools


@ray.remote(num_cpus=1, num_gpus=1)
def train(config):
    return {"loss": (config["lr"] - 0.1) ** 2}


client = pools.connect()
with client.slot(requester="vision", gpus=2, cpus=2) as slot:
    inside = train.options(**slot.options())

    def trial(config):
        return ray.get(inside.remote(config))

    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 0.01}),
        param_space={"lr": tune.grid_search([0.01, 0.1, 0.5])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=slot.resources["gpu"]),
        run_config=tune.RunConfig(storage_path=tempfile.mkdtemp(), verbose=0),
    )
    print("best:", tuner.fit().get_best_result().config)
