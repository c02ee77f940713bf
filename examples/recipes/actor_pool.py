"""examples/recipes/actor_pool.py: a pool of actors inside a grant."""

import ray
from ray.util import ActorPool

import ray_pools as pools


@ray.remote(num_cpus=1, num_gpus=1)
class Model:
    def predict(self, number):
        return number * number


client = pools.connect()
with client.slot(requester="vision", gpus=2, cpus=2) as slot:
    workers = ActorPool([Model.options(**slot.options()).remote() for _ in range(2)])
    answers = workers.map(lambda model, number: model.predict.remote(number), range(8))
    for answer in answers:
        slot.check()  # SlotPreempted between two answers, once the slot is called back
        print(answer)
