"""Optimizers: torch's own updates, moments in another type, and no compiler that nobody asked for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.gpt_runs import NVFP4, converted, facts, gpt, losses, train
from torch import nn

from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS
from ablate.training.data import open_corpus
from ablate.training.data.batches import training_batch
from ablate.training.optimizers import optimizer as build_optimizer

EAGER = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from support.corpus import write_shards
from ablate.recipes import PRESETS
from ablate.training.loop import Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt
shape = dict(layers=1, width=32, heads=1, context=16, batch=1, steps=2, eval_tokens=16, eval_batch=1, clip=1.0)
data = write_shards(Path(sys.argv[1]), 2000, 400)
for optimizer in sys.argv[2:]:
    config = Gpt(data=data, optimizer=optimizer, **shape)
    telemetry = Telemetry(every=1, log=1)
    list(config.records(TrialRun(PRESETS["nvfp4"](), 0, "emulated", "cpu", telemetry)))
    print(optimizer, *(name for name in ("torch", "torch._dynamo", "sympy") if name in sys.modules))
"""


def test_an_eager_training_imports_no_compiler(tmp_path):
    """It would take every worker as long again as the rest of torch."""
    command = [sys.executable, "-c", EAGER, str(tmp_path), "adamw", "muon"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.stdout.splitlines() == ["adamw torch", "muon torch"], done.stderr


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_optimizer_lowers_the_loss_and_repeats_itself(optimizer, shards):
    workload = gpt(shards, steps=12, optimizer=optimizer)
    first = train(workload)
    assert facts(train(workload)) == facts(first)
    assert losses(first)[12] < losses(first)[1] - 0.1


def test_muon_is_torchs_on_the_matrices_of_blocks_and_torchs_adamw_elsewhere(shards):
    """Bit for bit over three steps; weight decay is for embeddings and head, not for norms."""
    workload = gpt(shards, optimizer="muon", lr=1e-2, weight_decay=0.3, clip=None, warmup=0.0, steps=3)
    model, _ = converted(workload, PRESETS["bf16"](), Clock(0))
    ours = build_optimizer(model, workload)
    twin, _ = converted(workload, PRESETS["bf16"](), Clock(0))
    named = dict(twin.named_parameters())
    hidden = {name for name, p in named.items() if name.startswith("blocks.") and p.ndim == 2}
    matrices = {name for name, p in named.items() if p.ndim == 2} - hidden
    norms = named.keys() - hidden - matrices
    assert (len(hidden), matrices) == (8, {"embedding.weight", "head.weight"})
    assert len(norms) == 9
    adamw = [
        {"params": [named[name] for name in matrices], "weight_decay": 0.3},
        {"params": [named[name] for name in norms], "weight_decay": 0.0},
    ]
    references = (
        torch.optim.Muon(
            [named[name] for name in hidden],
            lr=1e-2,
            weight_decay=0.3,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(adamw, lr=1e-2, betas=(0.9, 0.95), fused=True),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(3):
        for candidate, optimizers in ((model, (ours,)), (twin, references)):
            candidate(*training_batch(open_corpus(workload.data), 0, step, 0, 2, 16)).backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
    after = model.state_dict()
    assert not [name for name in named if torch.equal(after[name], before[name])]
    assert not [name for name, value in twin.state_dict().items() if not torch.equal(after[name], value)]


def test_stacks_of_experts_and_biases_inside_blocks_have_adamw(shards):
    """Muon takes matrices; a stack of them has no singular vectors of its own."""
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(8, 4)])
    model.blocks[0].experts = nn.Parameter(torch.ones(3, 8, 4))
    parts = build_optimizer(model, gpt(shards, optimizer="muon")).parts
    taken = [[p for group in part.param_groups for p in group["params"]] for part in parts]
    block = model.blocks[0]
    assert [type(part).__name__ for part in parts] == ["Muon", "AdamW"]
    assert [[id(p) for p in its] for its in taken] == [
        [id(block.weight)],
        [id(block.experts), id(block.bias)],
    ]


def test_moments_in_bf16_are_bf16_and_change_the_run(shards):
    workload = gpt(shards, optimizer_state="bf16", steps=3)
    model, engine = converted(workload, NVFP4, Clock(0))
    optimizer = build_optimizer(model, workload)
    with engine.high_precision():
        model(*training_batch(open_corpus(workload.data), 0, 0, 0, 2, 16)).backward()
    optimizer.step()
    moments = [kept[name] for kept in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert moments
    assert all(torch.equal(moment, moment.bfloat16().float()) for moment in moments)
    assert losses(train(workload)) != losses(train(gpt(shards, steps=3)))
