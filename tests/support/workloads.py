"""A small instance of each workload: what every test of all of them runs."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ablate.training.workloads.command import Command
from ablate.training.workloads.finetune import Finetune, Lora
from ablate.training.workloads.gpt import Gpt
from ablate.training.workloads.idle import Idle
from ablate.training.workloads.python import Python
from ablate.training.workloads.tensors import Tensors
from support.experiments import SHAPE, shards


def fields_of(made: BaseModel) -> dict[str, Any]:
    """Return the fields of a model of pydantic by name, without what it has computed of them."""
    return {name: getattr(made, name) for name in type(made).model_fields}


OWN_CODE = Path(__file__).parent / "own_code"
"""A user's training file, with its model in another."""
OWN_COMMAND = Path(__file__).parent / "own_command"
"""Folder of a user's script that stays a process."""

SMALL = {
    "gpt": lambda folder: Gpt(
        **(SHAPE | {"data": shards(folder), "steps": 6, "eval_every": 3, "accumulate": 2})
    ),
    "finetune": lambda folder: Finetune(
        data=shards(folder),
        model={"model_type": "qwen3", "head_dim": 16, "hidden_size": 32, "num_hidden_layers": 2}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64},
        lora=Lora(rank=2, dropout=0.1),
        context=16,
        batch=2,
        accumulate=2,
        steps=4,
        eval_every=2,
        eval_tokens=64,
        eval_batch=2,
    ),
    "python": lambda folder: Python(
        file=str(OWN_CODE / "train.py"), steps=5, config={"width": 32, "lr": 1e-2}
    ),
    "command": lambda folder: Command(
        run="python light.py {lr} {seed}",
        folder=str(OWN_COMMAND),
        steps=5,
        config={"lr": 1e-2},
    ),
    "tensors": lambda folder: Tensors(tokens=64, inputs=48, outputs=80, draws=5),
    "idle": lambda folder: Idle(steps=5),
}
"""A small instance of each, with its data in a folder."""
