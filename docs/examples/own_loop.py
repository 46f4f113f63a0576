"""Train a model of transformers in a loop of one's own. `# ablate` marks all that a recipe adds to it.

python own_loop.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import ablate  # ablate

TINY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}


def train(model, batch, steps, recipe="nvfp4", seed=0, accumulate=1, lr=1e-3, checkpoint=None, until=None):
    """`batch(step, micro_batch)` returns tokens and targets. A checkpoint that exists is continued."""
    run = ablate.convert(model, recipe, seed=seed, steps=steps)  # ablate
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer, first, losses = torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True), 0, []
    if checkpoint and checkpoint.exists():
        state = torch.load(checkpoint)
        first = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        run.load_state_dict(state["recipe"])  # ablate
    for step in range(first, until or steps):
        with run.step():  # ablate
            losses.append(0.0)
            for micro_batch in range(accumulate):
                tokens, targets = batch(step, micro_batch)
                logits = model(input_ids=tokens).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / accumulate
                loss.backward()
                losses[-1] += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if checkpoint:
        state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"recipe": run.state_dict()}, checkpoint)  # ablate
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 65, 1)
    rows = [text[torch.randint(len(text), (8,))] for _ in range(50)]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **TINY), dtype=torch.float32)
    print(*train(model, lambda step, _: (rows[step][:, :-1], rows[step][:, 1:]), steps=50), sep="\n")
