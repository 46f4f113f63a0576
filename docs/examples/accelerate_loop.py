"""Train in a loop with accelerate. `# ablate` marks all that a recipe adds to it.

python accelerate_loop.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

import ablate  # ablate

TINY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}


def train(model, rows, batch, recipe="nvfp4", seed=0, accumulate=1, lr=1e-3, folder=None, until=None):
    """`rows` are pairs of tokens and targets. A checkpoint in `folder` is continued."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulate)
    run = ablate.integrations.Accelerated(accelerator, model, recipe, seed=seed)  # ablate
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer, losses, first = torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True), [], 0
    loader = torch.utils.data.DataLoader(rows, batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if folder and folder.exists():
        accelerator.load_state(str(folder))
        first = int((folder / "batches").read_text())
    for number, (tokens, targets) in enumerate(accelerator.skip_first_batches(loader, first), first):
        if number == until:
            break
        with run.accumulate(model):  # ablate
            logits = model(input_ids=tokens).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if folder:
        accelerator.save_state(str(folder))
        (folder / "batches").write_text(str(first + len(losses)))
    return losses


if __name__ == "__main__":
    text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 65, 1)
    torch.manual_seed(0)
    rows = [(text[n][:-1], text[n][1:]) for n in torch.randperm(len(text))[:400]]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **TINY), dtype=torch.float32)
    print(*train(model, rows, batch=8), sep="\n")
