"""Files that `ablate init --torchtitan`, `--megatron` and `--hf` write: an experiment on a job, and the job.

Each experiment passes `ablate plan` as it is. The options of torchtitan's and Megatron's jobs are those that
the parsers of torchtitan 0.3.0 and megatron-core 0.19.1 accept.
"""

from dataclasses import dataclass

_HEAD = """\
schema: 1
question: {question}
workload:
  command:                     # docs/use/command_workload.md
"""
_TAIL = """\
against: bf16                  # the baseline, at the same seeds and the same values of the workload
seeds: {seeds}                       # runs of each arm; a verdict needs 3, small effects need more
metric: {{name: val/loss, direction: minimize, min_effect: {effect}}}  # smaller do not matter
{more}
# ablate plan {name}.yaml        arms, trials and time, in a second; runs nothing
# ablate sweep {name}.yaml       runs it, or continues it; at the end it names the report
"""
_GPUS = """\
resources: {gpus: 1, ranks: 1}                       # GPUs of one job; it starts its own processes
"""


@dataclass(frozen=True)
class Stack:
    """Templates of one training stack, in which NAME is the name of the experiment."""

    question: str
    job: str
    """Name of the job's file, behind the experiment's name."""
    workload: str
    """Keys of the workload `command`."""
    arms: str
    """Keys that say what varies."""
    text: str
    """Content of the job's file."""
    gpus: bool = True
    effect: str = "0.005"

    def files(self, name: str) -> dict[str, str]:
        """Return the content of each file that an experiment of this name begins with."""
        parts = (_HEAD, self.workload, self.arms, _TAIL)
        numbers = {"seeds": "3", "effect": self.effect, "more": _GPUS if self.gpus else ""}
        head, workload, arms, tail = (part.replace("NAME", name) for part in parts)
        head = head.format(question=self.question)
        return {
            f"{name}.yaml": head + workload + arms + tail.format(name=name, **numbers),
            f"{name}{self.job}": self.text.replace("NAME", name),
        }


_TORCHTITAN = Stack(
    question="How many of the last blocks must stay in bf16?",
    job="_job.sh",
    workload="""\
    run: "bash NAME_job.sh --debug.seed {seed} --training.steps {steps} --dump-folder {checkpoint}
      --optimizer.param-groups.0.optimizer-kwargs.lr {lr} {export:torchtitan}"
    export: {blocks: 6}        # blocks of the model, whose layers the recipe names
    metrics: torchtitan        # read from the lines that torchtitan prints
    sources: [NAME_job.sh]  # an edit runs its trials again; add "torchtitan/**/*.py" if you edit it
    steps: 500
    config: {lr: 8.0e-4}
""",
    arms="""\
recipe: nvfp4                  # what torchtitan cannot express is refused by the plan
ablate:                        # the knobs to turn, and their values; every combination is an arm
  skip_last: [0, 2]            #   last blocks in bf16
  # workload.config.lr: [4.0e-4, 8.0e-4]
answer: {knob: skip_last}      # the comparison that answers; named before the first run
""",
    text="""\
#!/bin/bash
# Start torchtitan; "$@": options of `run` in NAME.yaml. FP4 needs a GPU of compute capability 10.
exec torchrun --nproc-per-node "${NGPU:-1}" -m torchtitan.train --module llama3 --config llama3_debugmodel \\
    --validator.enable --validator.freq 50 --validator.steps 10 --metrics.log-freq 10 \\
    --checkpoint.enable --checkpoint.interval 100 "$@"
""",
)
_MEGATRON = Stack(
    question="Does stochastic rounding of the gradients matter for my model?",
    job="_job.sh",
    workload="""\
    run: "bash NAME_job.sh --num-layers 12 --seed {seed} --train-iters {steps} --lr {lr}
      --save {checkpoint} --load {checkpoint} {export:megatron}"
    metrics: megatron          # read from the lines that Megatron prints
    sources: [NAME_job.sh]  # an edit runs its trials again; add "megatron/**/*.py" if you edit it
    steps: 500
    config: {lr: 3.0e-4}
""",
    arms="""\
recipe: nvfp4                  # what Megatron cannot express is refused by the plan
ablate:                        # the knobs to turn, and their values; every combination is an arm
  sr: [true, false]            #   stochastic rounding of the gradients
  # rht: [true, false]         #   random Hadamard transform
  # workload.config.lr: [3.0e-4, 6.0e-4]
answer: {knob: sr}             # the comparison that answers; named before the first run
""",
    text="""\
#!/bin/bash
# Start Megatron-LM; "$@": options of `run` in NAME.yaml. FP4 needs a GPU of compute capability 10.
exec torchrun --nproc-per-node "${NGPU:-1}" pretrain_gpt.py --transformer-impl transformer_engine \\
    --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 \\
    --micro-batch-size 4 --global-batch-size 32 --lr-decay-style cosine --lr-warmup-iters 50 \\
    --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 \\
    --log-interval 10 --eval-interval 100 --eval-iters 10 --save-interval 100 "$@"
""",
)
_HF = Stack(
    question="Does stochastic rounding of the gradients matter for my model?",
    job="_train.py",
    workload="""\
    run: "python NAME_train.py --lr {lr} --seed {seed} --steps {steps} --folder {checkpoint}"
    metrics: {hf: 10}          # dicts that the Trainer prints, one each logging_steps
    steps: 200
    config: {lr: 1.0e-3}
""",
    arms="""\
recipe: nvfp4                  # a preset (docs/reference/recipes.md), or a file: my_recipe.yaml
ablate:                        # the knobs to turn, and their values; every combination is an arm
  sr: [true, false]            #   stochastic rounding of the gradients
  # workload.config.lr: [1.0e-3, 2.0e-3]
answer: {knob: sr}             # the comparison that answers; named before the first run
""",
    text='''\
"""Train with the Trainer of transformers. `# ablate` marks what a sweep adds; replace model and data."""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

import ablate  # ablate

options = argparse.ArgumentParser()
for name, kind in (("--lr", float), ("--seed", int), ("--steps", int), ("--folder", Path)):
    options.add_argument(name, type=kind, required=True)
asked = options.parse_args()
set_seed(asked.seed)
text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 64, 1)
rows = [{"input_ids": row, "labels": row} for row in text]
shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 256}
shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **shape), dtype=torch.float32)
arguments = TrainingArguments(
    str(asked.folder), seed=asked.seed, max_steps=asked.steps, learning_rate=asked.lr,
    per_device_train_batch_size=8, logging_steps=10, disable_tqdm=True, report_to="none",
    eval_strategy="steps", eval_steps=50, save_steps=50, save_total_limit=1,
)
trainer = Trainer(
    model, arguments, train_dataset=rows[:-64], eval_dataset=rows[-64:],
    callbacks=[ablate.integrations.HFCallback(ablate.recipe(), seed=asked.seed)],  # ablate
)
trainer.train()
''',
    gpus=False,
)
STACKS = {"torchtitan": _TORCHTITAN, "megatron": _MEGATRON, "hf": _HF}
"""Templates by the option of `ablate init` that chooses them."""
