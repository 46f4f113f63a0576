"""A script without torch, which starts in no time: its numbers are a function of recipe, seed and learning rate."""

import hashlib
import json
import os
import random
import sys

with open(os.environ["ABLATE_RECIPE"], "rb") as file:
    recipe = hashlib.sha256(file.read()).hexdigest()[:16]
print(json.dumps({"ablate/recipe": recipe}))
generator = random.Random(f"{recipe} {sys.argv[1:]}")
for step in range(1, int(os.environ["ABLATE_STEPS"]) + 1):
    loss = 1 / step + 0.01 * generator.random()
    print(json.dumps({"step": step, "train/loss": loss, "val/loss": loss}))
