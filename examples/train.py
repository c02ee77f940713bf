"""examples/train.py: two tasks inside a slot."""

import ray

import ray_pools as pools

client = pools.connect()


@ray.remote(num_gpus=1)
def train(part):
    return f"part {part} on GPU {ray.get_gpu_ids()}"


with client.slot(requester="vision", gpus=2, cpus=2) as slot:
    task = train.options(scheduling_strategy=slot.scheduling_strategy)
    print(f"in pool {slot.pool}:", ray.get([task.remote(part) for part in range(2)]))
