"""A training function as a user would write it: its own model, loader and loop."""

import torch
from model import Net


def train(trial):
    torch.manual_seed(trial.seed)
    model = trial.convert(Net(trial.config.width)).to(trial.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.config.lr)
    trial.checkpoint(model=model, optimizer=optimizer)
    data = torch.randn(48, 16, 8)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    for _, x in trial.steps(loader):
        with trial.step():
            trial.compare_gradient(lambda x=x: loss_of(model, x).backward())
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log({"train/loss": loss.item()})
    with trial.evaluation(), torch.no_grad():
        trial.log({"val/loss": loss_of(model, data)})


def loss_of(model, x):
    return (model(x) - x.sum(-1, keepdim=True)).square().mean()
