"""examples/checkpoint.py: work that can be called back, and goes on from where it was."""

import ray

import ray_pools as pools

EPOCHS = 3


@ray.remote(num_gpus=1)
def train_epoch(epoch):
    return f"weights after epoch {epoch}"


client = pools.connect()
ticket = client.submit(requester="research", gpus=1, retries=5)
checkpoint, epoch = None, 0
while epoch < EPOCHS:
    try:
        with ticket.wait() as slot:  # queues until the slot can be used
            slot.on_preempt(lambda slot: print(f"must leave within {slot.grace_left_s():.0f} s"))
            train = train_epoch.options(**slot.options())
            while epoch < EPOCHS:
                slot.check()  # raises SlotPreempted once the slot is called back
                checkpoint = ray.get(train.remote(epoch))
                epoch += 1
    except pools.SlotPreempted:  # leaving the block said "stopped": the capacity has moved on
        if ticket.done:
            raise  # no retries left
ticket.release()  # called back after the last epoch, it would queue for another slot
print(checkpoint)
