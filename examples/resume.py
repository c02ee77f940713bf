"""examples/resume.py CHECKPOINT STEPS: a command that can be called back, and goes on from where it was."""

import json
import os
import signal
import sys
import time

checkpoint, steps = sys.argv[1], int(sys.argv[2])
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(time.time()))

step = 0
if os.path.exists(checkpoint):
    with open(checkpoint) as file:
        step = json.load(file)["step"]
print("from step", step, "on GPU", os.environ["CUDA_VISIBLE_DEVICES"])

while step < steps and not told:
    time.sleep(0.1)  # a step of training
    step += 1

with open(f"{checkpoint}.new", "w") as file:
    json.dump({"step": step, "told": told}, file)
os.replace(f"{checkpoint}.new", checkpoint)
print("saved step", step)
