"""The script nanogpt_like.py as a training function: a sweep calls it once for each arm and seed.

ablate check nanogpt.yaml
ablate sweep nanogpt.yaml
"""

from pathlib import Path

import torch
from nanogpt_like import Transformer


def train(trial):
    context = trial.config.context
    torch.manual_seed(trial.seed)
    text = torch.tensor(list(Path(__file__).with_name("nanogpt_like.py").read_bytes()))
    rows = text.unfold(0, context + 1, 1)
    training, validation = rows[: len(rows) * 9 // 10], rows[len(rows) * 9 // 10 :]
    model = Transformer(vocabulary=256, context=context, width=trial.config.width).to(trial.device)
    if trial.start:
        model.load_state_dict(torch.load(trial.start, weights_only=True))
    model = trial.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.config.lr)
    trial.checkpoint(model=model, optimizer=optimizer)

    def batch(step):
        order = torch.Generator().manual_seed(trial.seed * 1_000_003 + step)
        return training[torch.randint(len(training), (8,), generator=order)].to(trial.device)

    for step, tokens in trial.steps(batch):
        decay = 1.0 if trial.forked else min(1.0, 2 * (1 - step / trial.max_steps))
        for group in optimizer.param_groups:
            group["lr"] = trial.config.lr * trial.lr_factor * decay
        with trial.step():
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log({"train/loss": loss.item()})
    with trial.evaluation(), torch.no_grad():
        tokens = validation[:: context // 4].to(trial.device)
        trial.log({"val/loss": model(tokens[:, :-1], tokens[:, 1:]).item()})
