"""Checks of one device that compare runs with each other: programs of the steps of benchmarks/gpu_day.sh.

    python benchmarks/gpu_checks.py smoke gpt --device cuda       # two steps, killed in the second, resumed
    python benchmarks/gpu_checks.py resume nvfp4 --device cuda    # stopped half-way and continued: equal bits
    python benchmarks/gpu_checks.py fork --device cuda            # from a shared prefix: equal bits
    python benchmarks/gpu_checks.py agree gpt --device cuda       # beside the CPU, over 50 steps
    python benchmarks/gpu_checks.py percentile --device cuda      # time of a percentile and of a maximum

Each prints one JSON object with `sentence`, its main figure, and has exit status 1 if runs differ that must
be equal. `--tiny` takes sizes of a second on a CPU. Runs are compared by their records without times and
memory; every number in them must have the same bits.
"""

import argparse
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

OWN = ("throughput/", "memory/", "comm/")
"""Prefixes of the metrics in which any two runs differ."""
SIZES = {
    False: {"layers": 4, "width": 512, "heads": 8, "context": 256, "batch": 16, "eval_tokens": 16384},
    True: {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 2, "eval_tokens": 64},
}
"""Sizes of the gpt, by `--tiny`."""
QWEN = {
    False: {
        "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    },
    True: {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    },
}  # fmt: skip
"""Configurations of transformers for `finetune`, by `--tiny`."""
FIRST, LATER = 0.01, 0.05
"""Differences in nats of the first loss, and of later ones, that other orders of sums may make: at most 0.003
in the first on an H200, in a model loaded as bf16."""
NUDGE, TIMES = 1e-4, 3
"""Relative change of the learning rate in a third run, on the CPU; and the multiple of its distance that is
allowed, too. Training amplifies any difference, as much as the recipe and the learning rate make it."""
FUNCTION = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

def train(trial):
    torch.manual_seed(trial.seed)
    model = trial.convert(Net(trial.config.width).to(trial.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trial.checkpoint(model=model, optimizer=optimizer)
    for step in trial.steps():
        step = step[0] if isinstance(step, tuple) else step
        x = torch.randn(32, trial.config.width, generator=torch.Generator().manual_seed(step))
        with trial.step():
            loss = model(x.to(trial.device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log({"train/loss": loss.item(), "val/loss": loss.item()})
"""
COMMAND = """\
import json, sys
import torch
x = torch.arange(64.0, device=sys.argv[1])
for step in range(1, int(sys.argv[2]) + 1):
    print(json.dumps({"step": step, "val/loss": (x.sum() / step).item()}), flush=True)
"""
WORKLOADS = ("gpt", "finetune", "lora", "python", "command", "tensors")


def spec_of(name: str, recipe: str, steps: int, device: str, folder: Path, tiny: bool, **changes: object):
    """Return the trial of a workload.

    Args:
        name: one of WORKLOADS.
        recipe: preset.
        steps: optimizer steps.
        device: `cpu` or `cuda`.
        folder: folder for the files that the workload reads.
        tiny: sizes of a second on a CPU.
        changes: further fields of the workload.
    """
    from ablate.experiment.trial_spec import TrialSpec
    from ablate.recipes import PRESETS
    from ablate.training.workloads import WORKLOADS as classes

    common = {"steps": steps, "eval_every": steps}
    text = {"batch": SIZES[tiny]["batch"], "context": SIZES[tiny]["context"], "eval_tokens": 64}
    fields: dict[str, object] = {
        "gpt": SIZES[tiny] | common,
        "finetune": {"model": QWEN[tiny]} | text | common,
        "lora": {"model": QWEN[tiny], "lora": {"rank": 4}} | text | common,
        "tensors": {"tokens": 64, "inputs": 64, "outputs": 64} if tiny else {"tokens": 8192},
    }.get(name, {"steps": steps})
    folder.mkdir(parents=True, exist_ok=True)
    if name == "python":
        (folder / "function.py").write_text(FUNCTION)
        fields |= {"file": str(folder / "function.py"), "config": {"width": 32 if tiny else 1024}}
    if name == "command":
        (folder / "command.py").write_text(COMMAND)
        fields |= {"run": f"{sys.executable} {folder / 'command.py'} {{device}} {{steps}}"}
    kind = "finetune" if name == "lora" else name
    plain = "bf16" if name == "command" else recipe  # it would have to confirm a quantised one
    config = classes[kind].model_validate(fields | changes)
    return TrialSpec(
        workload=kind, config=config, recipe=PRESETS[plain](), seed=0, engine="emulated", device=device
    )


def lines_of(records: Iterator) -> Iterator[str]:
    """Yield a line of JSON for each record: its step and all numbers in which equal runs are equal."""
    for record in records:
        metrics = {
            name: float(value).hex() for name, value in record.metrics.items() if not name.startswith(OWN)
        }
        yield json.dumps([record.step, metrics], sort_keys=True)


def telemetry():
    """Return intervals with which every step is recorded, measured in the first, and saved."""
    from ablate.training.loop import Telemetry

    return Telemetry(every=1000, shadow=1000, log=1, checkpoint=0)


def train(asked: argparse.Namespace) -> int:
    """Train a workload and print its records; `--kill N` ends this process by SIGKILL before record N."""
    from ablate.training.checkpoints import Checkpoints

    changes = {"compile": True} if asked.compile else {}
    spec = spec_of(
        asked.subject, asked.recipe, asked.steps, asked.device, asked.folder, asked.tiny, **changes
    )
    checkpoints = Checkpoints(asked.folder / "checkpoint.pt", "gpu-day", 0)
    for number, line in enumerate(lines_of(spec.records(telemetry(), checkpoints)), 1):
        if number == asked.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        print(line, flush=True)
    print(json.dumps({"resumed": checkpoints.resumed}))
    return 0


def smoke(asked: argparse.Namespace) -> int:
    """Take two steps of a workload; again, killed in the second, and resumed. Compare the records."""
    words = [asked.subject, "--device", asked.device, "--recipe", asked.recipe, *(["--tiny"] * asked.tiny)]
    words += ["--compile"] * asked.compile

    def child(folder: Path, *more: str, status: int = 0) -> list[str]:
        command = [sys.executable, __file__, "train", *words, "--steps", "2", "--folder", str(folder), *more]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != status:
            raise SystemExit(f"train {asked.subject} {' '.join(more)}: exit status {done.returncode}")
        return done.stdout.splitlines()

    checkpointed = asked.subject not in ("command", "tensors")
    whole = child(asked.folder / "whole")[:-1]
    last = str(len(whole)) if len(whole) > 1 else "1"
    before = child(asked.folder / "killed", "--kill", last, status=-signal.SIGKILL)
    *after, about = child(asked.folder / "killed")
    resumed = json.loads(about)["resumed"]
    kept = before[: resumed or 0]
    equal = [*kept, *after] == whole and (resumed == 1) == checkpointed
    how = "continued from step 1" if resumed else "begun again, since it has no checkpoint"
    verdict = "equal records" if equal else "RECORDS DIFFER"
    sentence = f"{asked.subject}: killed in its last step, {how}: {verdict}"
    return answer(sentence, equal, resumed=resumed, whole=whole, killed=[*kept, *after])


def resume(asked: argparse.Namespace) -> int:
    """Stop a gpt half-way and continue it from its checkpoint; compare with the run that was not stopped."""
    from ablate.training.checkpoints import Checkpoints

    steps = 6 if asked.tiny else 20
    spec = spec_of("gpt", asked.subject, steps, asked.device, asked.folder, asked.tiny)
    whole = list(lines_of(spec.records(telemetry())))
    again = list(lines_of(spec.records(telemetry())))
    path = asked.folder / "resume.pt"
    records = spec.records(telemetry(), Checkpoints(path, "gpu-day", 0))
    taken = list(itertools.islice(lines_of(records), steps // 2 + 1))[: steps // 2]
    records.close()
    checkpoints = Checkpoints(path, "gpu-day", 0)
    taken += lines_of(spec.records(telemetry(), checkpoints))
    equal = taken == whole and checkpoints.resumed == steps // 2
    sentence = (
        f"{asked.subject}: {steps} steps run twice {'are equal' if again == whole else 'DIFFER'}, "
        f"{'equal' if equal else 'DIFFERENT'} when continued from step {checkpoints.resumed}"
    )
    return answer(sentence, equal and again == whole, first_difference=first_difference(whole, taken))


def fork(asked: argparse.Namespace) -> int:
    """Train from a shared prefix, and from scratch: equal bits after it."""
    from ablate.training.checkpoints import Checkpoints

    steps = 6 if asked.tiny else 20
    spec = spec_of("gpt", asked.recipe, steps, asked.device, asked.folder, asked.tiny)
    shared = {steps // 2: asked.folder / "shared.pt"}
    list(spec.records(telemetry(), Checkpoints(asked.folder / "trunk.pt", "trunk", math.inf, shared)))
    whole = list(lines_of(spec.records(telemetry())))
    branch = Checkpoints(asked.folder / "branch.pt", "branch", math.inf, shared)
    forked = list(lines_of(spec.records(telemetry(), branch)))
    equal = forked == whole[steps // 2 :] and branch.start == steps // 2
    sentence = f"forked after step {branch.start} of {steps}: {'equal' if equal else 'DIFFERENT'} records"
    return answer(sentence, equal, first_difference=first_difference(whole[steps // 2 :], forked))


def first_difference(one: list[str], other: list[str]) -> list[str] | None:
    """Return the first two records that differ; None if all are equal."""
    pairs = itertools.zip_longest(one, other, fillvalue="")
    return next(([a, b] for a, b in pairs if a != b), None)


def agree(asked: argparse.Namespace) -> int:
    """Train on the CPU and on the device for 50 steps, and report how far the training losses are apart.

    The measure is a third run, on the CPU with another learning rate in the fifth digit.
    """
    steps = 10 if asked.tiny else 50

    def losses(device: str, **changes: object) -> list[float]:
        spec = spec_of(asked.subject, asked.recipe, steps, device, asked.folder, asked.tiny, **changes)
        records = [record.metrics for record in spec.records(telemetry())]
        return [metrics["train/loss"] for metrics in records if "train/loss" in metrics]

    ours, theirs = losses("cpu"), losses(asked.device)
    nudged = losses("cpu", lr=(1 + NUDGE) * learning_rate(asked.subject))
    apart, expected = distances(ours, theirs), distances(ours, nudged)
    fell = ours[0] - ours[-1]
    sentence = (
        f"{asked.subject}, {asked.recipe}: losses of CPU and {asked.device} are {apart[0]:.2g} apart "
        f"after step 1, {apart[-1]:.2g} after step {steps}, at most {max(apart):.2g}, on the CPU with "
        f"another fifth digit of the learning rate at most {max(expected):.2g}; the loss fell by {fell:.3f}"
    )
    finite = all(map(math.isfinite, apart))
    fine = finite and apart[0] < FIRST and max(apart) < max(LATER, TIMES * max(expected))
    return answer(sentence, fine, cpu=ours, device=theirs, nudged=nudged)


def distances(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the differences of two runs' losses, step by step."""
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def learning_rate(subject: str) -> float:
    """Return the default learning rate of a workload."""
    from ablate.training.workloads import WORKLOADS as classes

    return classes["finetune" if subject == "lora" else subject].model_fields["lr"].default


def percentile(asked: argparse.Namespace) -> int:
    """Time a quantiser whose tensor scale is a percentile, beside the maximum; and compare its amax with the
    CPU's.
    """
    import torch

    from ablate.numerics.quantize import quantize
    from ablate.numerics.spec import Outer, Quant
    from ablate.verification import timing

    rows, columns = (256, 256) if asked.tiny else (8192, 8192)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    here = x.to(asked.device)
    quants = {
        "amax": Quant(),
        **{f"{p}": Quant(outer=Outer(statistic=f"percentile:{p}")) for p in ("0.999", "0.9999")},
    }
    calls = {name: (lambda quant=quant: quantize(here, quant)) for name, quant in quants.items()}
    spent = {name: one.median for name, one in timing.on_device(calls, 5, asked.device).items()}
    ours = {name: dequantized(quantize(x, quant)) for name, quant in quants.items()}
    theirs = {name: dequantized(quantize(here, quant)).cpu() for name, quant in quants.items()}
    different = [name for name in quants if not torch.equal(ours[name], theirs[name])]
    times = ", ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in spent.items())
    verdict = f"bits DIFFER from the CPU's: {', '.join(different)}" if different else "bits of the CPU"
    return answer(f"{rows}x{columns}: {times}; {verdict}", not different, seconds=spent)


def dequantized(result):
    """Return the values of a quantised tensor."""
    return result.dequantize() if hasattr(result, "dequantize") else result.values


def answer(sentence: str, ok: bool, **more: object) -> int:
    """Print the result of a check, and return its exit status."""
    print(json.dumps({"sentence": sentence, "ok": ok, **more}))
    return int(not ok)


CHECKS = {
    "smoke": smoke, "train": train, "resume": resume, "fork": fork, "agree": agree, "percentile": percentile,
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="benchmarks/gpu_checks.py", description=__doc__.splitlines()[0])
    top.add_argument("check", choices=CHECKS)
    top.add_argument("subject", nargs="?", default="gpt", help="workload; of `resume` a preset")
    top.add_argument("--device", choices=("cpu", "cuda"), required=True)
    top.add_argument("--folder", type=Path, help="folder for files; default: a temporary one")
    top.add_argument("--recipe", default="nvfp4", help="preset")
    top.add_argument("--steps", type=int, default=2, help="steps of `train`")
    top.add_argument("--kill", type=int, default=0, metavar="N", help="end `train` before its record N")
    top.add_argument("--compile", action="store_true", help="compile the model")
    top.add_argument("--tiny", action="store_true", help="sizes of a second on a CPU")
    return top


def main(words: list[str]) -> int:
    """Run a check and return its exit status."""
    asked = parser().parse_args(words)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        asked.folder = asked.folder or Path(folder)
        return CHECKS[asked.check](asked)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
