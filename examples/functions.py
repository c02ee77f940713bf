"""examples/functions.py: functions that run in slots, and go on from where they were."""

import json
import tempfile
from pathlib import Path

import ray_pools as pools

STEPS = 5
client = pools.connect()


@client.function(requester="research", gpus=1, retries=5)
def train(checkpoint, slot):
    """Called back, it saves and leaves; called again with the same arguments, it goes on."""
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0}
    while state["step"] < STEPS:
        if slot.preempting.is_set():
            checkpoint.write_text(json.dumps(state))
            slot.check()  # raises SlotPreempted: with retries left, the call queues again
        state["step"] += 1
    return f"trained {state['step']} steps on attempt {slot.k}"


def square(number):
    return number * number


folder = Path(tempfile.mkdtemp())  # one that all nodes can reach
print(train(folder / "checkpoint.json"))
print(sum(client.map(square, range(100), requester="research", gpus=1, retries=5)))
