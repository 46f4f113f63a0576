"""A toy training stack that knows nothing of ablate: it reads torchtitan's override, and prints its lines."""

import argparse
import importlib.util
import re
import time
from pathlib import Path

options = argparse.ArgumentParser()
options.add_argument("--lr", type=float)
options.add_argument("--seed", type=int)
options.add_argument("--steps", type=int)
options.add_argument("--override.imports", dest="override")
options.add_argument("--checkpoint")
options.add_argument("--seconds", type=float, default=0.0)
asked = options.parse_args()
blocks = []
if asked.override:
    module, function = asked.override.rsplit(".", 1)
    text = Path(importlib.util.find_spec(module).origin).read_text()
    assert f"def {function}(" in text
    blocks = re.findall(r'^    "(layers\.\d+\.)",$', text, re.MULTILINE)
state = Path(asked.checkpoint) / "step"
start = int(state.read_text()) if state.exists() else 0
print(f"converted {len(blocks)} blocks, from step {start}", flush=True)
for step in range(start + 1, asked.steps + 1):
    loss = 4 - asked.lr * step + 0.01 * len(blocks) + 0.001 * ((7 * asked.seed + 3 * step) % 5)
    rest = "memory:  2.11GiB(2.67%)  tps: 9,871"
    print(f"step: {step:2}  loss: {loss:8.5f}  grad_norm:  1.8123  {rest}  tflops: 1.02  mfu: N/A")
    print(f"validate step: {step:2}  loss: {loss:8.5f}  {rest}", flush=True)
    state.with_name("new").write_text(str(step))
    state.with_name("new").rename(state)  # whole, whenever this process is killed
    time.sleep(asked.seconds)
