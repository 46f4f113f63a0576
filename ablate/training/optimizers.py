"""Optimizers, from torch, over one model's trainable parameters, and the type of their state.

`OPTIMIZERS`, at the foot of this file, maps the values of `optimizer` to the functions that build them.
"""

from collections.abc import Callable, Iterable
from inspect import unwrap
from typing import Any

import torch
from torch import nn

from ablate.recipes.layers import block_of
from ablate.training.hyperparameters import Training

OptimizerState = dict[str, Any]
"""State dict of a torch optimizer, whose entries depend on its class."""

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def _eager(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a torch optimizer class without the wrappers that keep torch.compile out. At the first call they
    import torch._dynamo, which takes as long as the rest of torch. Nothing here compiles a step."""
    plain = {
        name: unwrap(getattr(kind, name))
        for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    }
    return type(kind.__name__, (kind,), plain | {"step": torch.no_grad()(unwrap(kind.step))})


_AdamW, _Muon = _eager(torch.optim.AdamW), _eager(torch.optim.Muon)
_Optimizer: Any = _eager(torch.optim.Optimizer)  # mypy accepts no base class that a function made


def optimizer(model: nn.Module, config: Training) -> torch.optim.Optimizer:
    """Return the optimizer that a configuration names, over all parameters with `requires_grad`. With
    `optimizer_state` bf16, the moments are rounded after every step."""
    built = OPTIMIZERS[config.optimizer](model, config)
    if config.optimizer_state == "bf16":
        built.register_step_post_hook(_round_state)
    return built


def adamw(model: nn.Module, config: Training) -> torch.optim.Optimizer:
    """Return AdamW, with weight decay on matrices only."""
    return _adamw((p for p in model.parameters() if p.requires_grad), config)


def _adamw(parameters: Iterable[nn.Parameter], config: Training) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return _AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def muon(model: nn.Module, config: Training) -> torch.optim.Optimizer:
    """Return Muon on the matrices inside numbered blocks, and AdamW on the rest (embeddings, head, norms, and
    experts whose matrices one tensor holds).

    The split is that of Muon's author. The update has AdamW's root mean square (`match_rms_adamw`, arXiv
    2502.16982), so one learning rate serves both. Biases and norms inside blocks have AdamW too.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.ndim == 2 and block_of(name) >= 0]
    others = [p for name, p in named if not (p.ndim == 2 and block_of(name) >= 0)]
    setting = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
        "adjust_lr_fn": "match_rms_adamw",
    }
    return Joint([_Muon(hidden, **setting), *([_adamw(others, config)] if others else [])])


class Joint(_Optimizer):
    """Several optimizers, each over its own parameters, as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        # The parts' own dicts: a learning rate set here applies to the parts.
        self.param_groups = [group for part in parts for group in part.param_groups]

    @property
    def state(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        return {parameter: kept for part in self.parts for parameter, kept in part.state.items()}

    @state.setter
    def state(self, value: object) -> None:
        """Ignore the empty state that the base class sets; each part keeps its own."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take one step with each part. `closure`, a part of torch's signature, is ignored."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, list[OptimizerState]]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, list[OptimizerState]]) -> None:
        for part, its in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(its)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def _round_state(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Round the moments to the nearest bf16 values, kept in fp32."""
    for kept in optimizer.state.values():
        for moment in (kept[name] for name in _MOMENTS if name in kept):
            moment.copy_(moment.to(torch.bfloat16))


OPTIMIZERS = {"adamw": adamw, "muon": muon}
"""Functions of a model and its configuration, by the value of `optimizer`."""
