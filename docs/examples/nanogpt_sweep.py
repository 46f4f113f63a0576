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
    model = trial.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.config.lr)
    if trial.start:  # a checkpoint of your own; before trial.checkpoint, which loads that of an interruption
        saved = torch.load(trial.start, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
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
        batches = validation[:: context // 4].to(trial.device).split(1)
        trial.log_batches([model(tokens[:, :-1], tokens[:, 1:]).item() for tokens in batches])
    if trial.forked:
        with trial.evaluation(high_precision=True), torch.no_grad():
            losses = [model(tokens[:, :-1], tokens[:, 1:]).item() for tokens in batches]
            trial.log_batches(losses, "val/loss_bf16")
