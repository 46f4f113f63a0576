"""A day with a GPU: all that needs one, run without a person, as one folder to send back.

    benchmarks/gpu_day.sh                      # sets up an environment, then runs this file
    benchmarks/gpu_day.sh --dry-run            # lists the steps, and checks their commands
    benchmarks/gpu_day.sh --only kernels
    benchmarks/gpu_day.sh --resume --out DAY   # runs the steps that DAY has no good result of yet
    benchmarks/gpu_day.sh --device cpu --tiny  # the same steps in small, to try this file without a GPU

The problem. The project is developed without a GPU, and who lends one has an afternoon. Nothing may stop half
way, and a command whose option was renamed since must be found before that afternoon.

The idea. Each step is a command of this project in a process of its own, with a time limit of its own. A step
that fails, or exceeds its limit, is a line of the summary; the next one runs. What shows most in the least
time comes first: whether each workload trains at all, then whether equal runs are equal, then times. Each
step has an estimate of its memory. One that this GPU lacks the memory for takes its smaller size, or is
skipped with the reason. The dry run hands every command to the parser that will read it.

The folder has summary.md (step, result, seconds, main figure), results.json, machine.json, nvidia-smi.txt and
packages.txt; of each step NAME.out and NAME.err, and a folder NAME with the files that it wrote. The same is
written as one archive, FOLDER.tar.gz, beside it. Nothing is sent anywhere. This file needs Python's standard
library alone; the commands need the environment that it runs in.
"""

import argparse
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import gpu_checks

ROOT = Path(__file__).resolve().parents[1]
CHECKS = str(ROOT / "benchmarks" / "gpu_checks.py")
GRACE_SECONDS = 30
"""Time that a command has to end after SIGTERM, before it is killed."""
RESERVED = 1.0
"""GiB of a GPU's memory that CUDA's context and cuBLAS' workspace take."""


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that decide which steps it can run."""

    gpus: int = 0
    """Number of GPUs that torch can use."""
    memory: float = 0.0
    """Memory of the first one in GiB."""
    refusals: dict[str, str | None] = field(default_factory=dict)
    """Reason why Transformer Engine cannot train here, by family of formats; None if it can."""
    facts: dict[str, object] = field(default_factory=dict)
    """Versions and names, for the record."""
    scaled: dict[str, str | None] = field(default_factory=dict)
    """Reason why an engine `scaled_mm` cannot multiply here, by `ENGINE FAMILY`; None if it can."""


Need = Callable[[Machine], str | None]
"""Condition of a step: returns the reason why a machine cannot run it; None if it can."""


@dataclass(frozen=True)
class Step:
    """One command, with its time limit and the way to read its main figure."""

    name: str
    about: str
    command: tuple[str, ...]
    seconds: float
    """Time limit."""
    needs: tuple[Need, ...] = ()
    expects: float = 0.0
    """Estimated seconds on an H100."""
    memory: float = 0.0
    """Estimated peak of the GPU's memory in GiB, with CUDA's own part."""
    smaller: tuple[str, ...] = ()
    """Words that replace those of the command after the same options on a GPU with less memory."""
    smaller_memory: float = 0.0
    """Estimated peak with them in GiB."""
    proof: str = ""
    """Word of the main figure without which an exit status of 0 is not a success: tests that are all skipped
    prove nothing."""
    figure: Callable[[str], str] = lambda output: ""
    """Function from the command's standard output to its main figure."""
    files: dict[str, str] = field(default_factory=dict)
    """Text of files that the command reads, by name in the step's folder."""

    def obstacle(self, machine: Machine) -> str | None:
        """Return the reason why this machine cannot run the step; None if it can."""
        if why := next((why for need in self.needs if (why := need(machine))), None):
            return why
        least = self.smaller_memory if self.smaller else self.memory
        if machine.gpus and machine.memory < least:
            return f"needs {least:.0f} GiB of GPU memory, and there are {machine.memory:.0f}"
        return None

    def sized(self, machine: Machine) -> "Step":
        """Return the step as this machine runs it: in its smaller size if its memory asks for that."""
        if not (self.smaller and machine.gpus and machine.memory < self.memory):
            return self
        words = list(self.command)
        for option, value in zip(self.smaller[::2], self.smaller[1::2], strict=True):
            words[words.index(option) + 1] = value
        about = f"{self.about} ({' '.join(self.smaller)} for this GPU's memory)"
        return replace(self, about=about, command=tuple(words), memory=self.smaller_memory, smaller=())


@dataclass(frozen=True)
class Result:
    """Outcome of a step."""

    step: str
    result: str
    seconds: float = 0.0
    figure: str = ""

    @property
    def failed(self) -> bool:
        """True unless the step ended well or was skipped."""
        return self.result != "ok" and not self.result.startswith("skipped")


# --- what a step needs ----------------------------------------------------------------------------


def gpu(machine: Machine) -> str | None:
    """Need a GPU."""
    return None if machine.gpus else str(machine.facts.get("no gpu", "torch sees no GPU with CUDA here"))


def gpus(count: int) -> Need:
    """Need several GPUs."""
    return lambda machine: (
        None if machine.gpus >= count else f"needs {count} GPUs, and there are {machine.gpus}"
    )


def trains(family: str) -> Need:
    """Need a Transformer Engine that trains in a family of formats on this GPU."""
    return lambda machine: machine.refusals.get(family, "Transformer Engine was not examined")


def multiplies(engine: str, family: str) -> Need:
    """Need an engine `scaled_mm` that multiplies a family of formats on this GPU."""
    return lambda machine: machine.scaled.get(f"{engine} {family}", f"{engine} was not examined")


# --- main figures ---------------------------------------------------------------------------------


def last_line(output: str) -> str:
    """Return the last line, which is the summary of pytest."""
    return next((line.strip(" =") for line in reversed(output.splitlines()) if line.strip()), "")


def trials_run(output: str) -> str:
    """Return the line of a sweep that counts its trials."""
    return next((line for line in output.splitlines() if re.match(r"\d+ trials? ", line)), "")


def checks(output: str) -> str:
    """Return how many checks of the doctor agree."""
    judged = [row["ok"] for row in json.loads(output)["rows"] if row["ok"] is not None]
    return f"{sum(judged)} of {len(judged)} checks agree"


def sentence(output: str) -> str:
    """Return the verdict of a comparison of engines."""
    return json.loads(output)["sentence"]


def fastest_of_bf16(output: str) -> str:
    """Return the step of one preset as a multiple of that in bf16, with its peak memory."""
    line = json.loads(output)[1]
    return f"{line['of bf16']:.2f} of bf16, {line['peak MiB'] / 1024:.1f} GiB"


def of_copy(output: str) -> str:
    """Return the slowest and the fastest quantiser of the largest bf16 tensor, as fractions of a copy."""
    lines = [line for line in json.loads(output) if line["dtype"] == "bfloat16"]
    lines = sorted(
        (line for line in lines if line["shape"] == lines[-1]["shape"]), key=lambda one: one["of memcpy"]
    )
    ends = " to ".join(f"{one['of memcpy']:.2f} ({one['operation']})" for one in (lines[0], lines[-1]))
    return f"{ends} of a copy at {lines[0]['copy GB/s']:,.0f} GB/s, by {lines[0]['back end']}; goal .8"


def of_bf16(output: str) -> str:
    """Return the step of each preset as a multiple of that in bf16."""
    lines = [line for line in json.loads(output) if line["preset"] != "bf16"]
    return ", ".join(f"{line['preset']} {line['of bf16']:.2f}" for line in lines) + " of bf16; goal 1.3"


def of_bf16_layers(output: str) -> str:
    """Return the time of all layers in each preset as a multiple of that in bf16."""
    sums: dict[str, float] = {}
    for line in json.loads(output)["lines"]:
        name = line["preset"] if line["preset"] == "bf16" else f"{line['preset']} ({line['engine']})"
        sums[name] = sums.get(name, 0.0) + line["forward ms"] + line["backward ms"]
    return (
        ", ".join(f"{name} {sums[name] / sums['bf16']:.2f}" for name in sums if name != "bf16") + " of bf16"
    )


# --- the steps ------------------------------------------------------------------------------------

TRIALS = """\
schema: 1
question: Does the rotation pay on this device?
workload: {{gpt: {size}}}
engine: {engine}
recipe: nvfp4
ablate: {{rht: [true, false]}}
against: bf16
seeds: {seeds}
resources: {resources}
"""
"""Trials of seconds to a minute each."""
SIZES = {
    False: "{layers: 4, width: 256, heads: 4, batch: 8, steps: 300, eval_every: 100}",
    True: "{layers: 1, width: 32, heads: 2, context: 16, batch: 2, steps: 4, eval_every: 2, eval_tokens: 64}",
}
"""Their gpt, by `--tiny`."""
WORKLOADS = ("gpt", "finetune", "lora", "python", "command", "tensors")
"""Workloads of the smoke steps."""
EQUAL = ("bf16", "nvfp4", "quartet2", "fp8_delayed")
"""Presets whose runs are continued: without state, with drawn bits, with an estimator, with a history."""
BLOCK_WEIGHTS = 12
"""Weights of a block over the square of its width: attention 4, an MLP of 8 / 3 of the width 8."""
STEP_BYTES, LINEAR_BYTES = 290.0, 36.0
"""Peak of the tensors of a training step per token, feature and block, and of a layer's two passes per
element of its largest tensor, above weights and moments: the most of all presets by the reference quantisers,
by torch's profiler on a CPU."""


def step_memory(layers: int, width: int, tokens: int) -> float:
    """Return the estimated GiB of `ablate bench step PRESET`, which keeps three models: bf16 and two modes.

    A weight takes 16 bytes with its gradient and moments.

    Args:
        layers: blocks.
        width: width of the model.
        tokens: tokens of a step.
    """
    weights = 3 * 16 * BLOCK_WEIGHTS * width**2 * layers
    return RESERVED + (weights + STEP_BYTES * tokens * width * layers) / 2**30


def linear_memory(tokens: int, inputs: int, outputs: int) -> float:
    """Return the estimated GiB of `ablate bench linear` at its largest layer, whose weight is fp32."""
    return RESERVED + (8 * inputs * outputs + LINEAR_BYTES * max(tokens, inputs) * outputs) / 2**30


def ablate(*words: str) -> tuple[str, ...]:
    """Return an `ablate` command."""
    return (sys.executable, "-m", "ablate", *words)


def pytest(*words: str) -> tuple[str, ...]:
    """Return a command that runs tests which need a GPU."""
    return (sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *words)


@cache
def presets() -> list[str]:
    """Return the names of all presets, as the package lists them."""
    answer = output_of(sys.executable, "-c", "from ablate.recipes import PRESETS; print(*PRESETS)")
    return answer.split()


@dataclass(frozen=True)
class Day:
    """Device and sizes of a day, from which its steps are made."""

    out: Path
    """Folder for their files."""
    device: str = "cuda"
    tiny: bool = False
    """Sizes of seconds on a CPU, to try the steps themselves."""

    @property
    def base(self) -> tuple[Need, ...]:
        """Conditions of every step."""
        return (gpu,) if self.device == "cuda" else ()

    def trials(
        self,
        name: str,
        about: str,
        share: float,
        *needs: Need,
        engine: str = "emulated",
        seeds: int = 4,
        memory: float = 4,
    ) -> Step:
        """Return a step that runs a sweep of trials, each with this share of a GPU."""
        file, state = self.out / name / f"{name}.yaml", self.out / name / "state"
        where = ("--state", str(state), "--device", self.device, "--mlflow", "none", "--no-report", "--quiet")
        resources = f"{{gpus: {share}}}" if self.device == "cuda" else "{ranks: 1}"
        seeds = 2 if self.tiny else seeds
        text = TRIALS.format(size=SIZES[self.tiny], engine=engine, seeds=seeds, resources=resources)
        return Step(
            name,
            about,
            ablate("sweep", str(file), *where),
            1800,
            (*self.base, *needs),
            60 + 25 * seeds * 3 * min(share, 1),
            memory,
            figure=trials_run,
            files={file.name: text},
        )

    def check(
        self, name: str, about: str, *words: str, expects: float = 40, memory: float = 4, limit: float = 900
    ) -> Step:
        """Return a step that runs a check of benchmarks/gpu_checks.py."""
        command = (
            sys.executable,
            CHECKS,
            *words,
            "--device",
            self.device,
            *(["--tiny"] if self.tiny else []),
        )
        return Step(name, about, command, limit, self.base, expects, memory, figure=sentence)

    def bench(
        self, name: str, about: str, words: Sequence[str], figure: Callable[[str], str], **more: Any
    ) -> Step:
        """Return a step that times something with `ablate bench`."""
        command = ablate("bench", *words, "--device", self.device, "--json")
        needs = (*self.base, *more.pop("needs", ()))
        return Step(name, about, command, more.pop("limit", 1200), needs, figure=figure, **more)

    def preset(self, name: str, width: int) -> Step:
        """Return a step that times one preset beside bf16, alone in its process."""
        size = (
            (2, 64, 128) if self.tiny else (2, width, 4096)
        )  # one more than the last, which some keep in bf16
        layers, width_, tokens = map(str, size)
        words = ("step", name, "--layers", layers, "--width", width_, "--tokens", tokens)
        words += ("--rounds", "1" if self.tiny else "5")
        return self.bench(
            f"preset-{width}-{name}",
            f"step of {name}, width {width_}",
            words,
            fastest_of_bf16,
            expects=25 if width == 2048 else 30,
            memory=step_memory(*size),
            limit=600,
        )

    def linears(self, name: str, about: str, words: Sequence[str], *needs: Need, **more: Any) -> Step:
        """Return a step that times the layers of Llama 8B; tiny: one small layer."""
        size = ("--shape", "32x64x64", "--rounds", "1") if self.tiny else ("--model", "llama-8b")
        given = {"expects": 90, "memory": linear_memory(8192, 4096, 28672)} | more
        return self.bench(name, about, ("linear", *words, *size), of_bf16_layers, needs=needs, **given)


def steps(out: Path, device: str = "cuda", tiny: bool = False) -> list[Step]:
    """Return all steps, those first that show most in the least time.

    Args:
        out: folder for their files.
        device: `cuda`, or `cpu` to try the steps themselves.
        tiny: sizes of seconds on a CPU.
    """
    day = Day(out, device, tiny)
    names = [name for name in presets() if name != "bf16"]
    smoke = [
        day.check(f"smoke-{name}", f"two steps of {name}, killed, resumed", "smoke", name)
        for name in WORKLOADS
    ]
    smoke.append(day.check("smoke-compiled", "the same, compiled", "smoke", "gpt", "--compile", expects=180))
    smoke.append(day.trials("smoke-shared", "six trials, four at a time on one GPU", 0.25, seeds=2, memory=6))
    equal = [
        day.check(f"resume-{name}", f"{name}, continued from a checkpoint", "resume", name) for name in EQUAL
    ]
    equal.append(day.check("fork", "a fork beside the run from scratch", "fork"))
    agree = [
        day.check(
            f"agree-{name}-{recipe}",
            f"{name} in {recipe}, 50 steps beside the CPU",
            "agree",
            name,
            "--recipe",
            recipe,
            expects=240,
            limit=1800,
        )
        for name, recipe in (("gpt", "bf16"), ("gpt", "nvfp4"), ("lora", "nvfp4"))
    ]
    return [
        *smoke,
        *equal,
        *agree,
        *_numerics(day),
        *(day.preset(name, 2048) for name in names),
        *_speeds(day),
        *_ranks(day),
        day.trials("trials-alone", "12 trials, one at a time", 1),
        day.trials("trials-shared", "12 trials, four share the GPU", 0.25, memory=6),
        day.trials("trials-ranks", "12 trials on two GPUs each", 2, gpus(2)),
        *_native(day),
        *(day.preset(name, 4096) for name in ([] if tiny else names)),
    ]


def _numerics(day: Day) -> list[Step]:
    """Return the steps that compare numbers, and those that time quantisers."""
    few = ("tests/numerics/test_cuda_kernels.py", "tests/verification/test_bench.py") if day.tiny else ()
    cases = "tests/numerics/cuda_kernel_cases.py"
    whole = "tests/numerics/test_cuda_kernels.py::test_every_bit_is_the_references_on_a_gpu"  # `gpu-bits`
    tests = pytest("-v", "--ignore", "tests/experiment/test_api_ranks.py", "--deselect", whole, *few)
    bits = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", cases)
    fast = ("--fast",) if day.tiny else ()
    sizes = ("64x64", "--rounds", "1") if day.tiny else ("4096x4096", "8192x8192")
    return [
        Step("gpu-bits", "kernels' bits", bits, 2400, (gpu,), 600, 8, figure=last_line, proof="passed"),
        Step("gpu-tests", "GPU tests", tests, 900, (gpu,), 90, 8, figure=last_line, proof="passed"),
        Step(
            "doctor", "numerics, GPU bits included", ablate("doctor", *fast, "--json"), 1200, day.base,
            120, 4, figure=checks,
        ),
        day.check("percentile", "a percentile beside a maximum", "percentile", memory=3),
        day.bench(
            "kernels", "quantisers beside a device copy", ("kernels", *sizes), of_copy, expects=120, memory=3
        ),
    ]  # fmt: skip


def _speeds(day: Day) -> list[Step]:
    """Return the steps that time NVFP4's training step and the layers of large models."""

    def step(name: str, layers: int, width: int, tokens: int, *words: str, **more: Any) -> Step:
        size = (1, 64, 128) if day.tiny else (layers, width, tokens)
        options = itertools.chain(*zip(("--layers", "--width", "--tokens"), map(str, size), strict=True))
        words = ("step", "nvfp4", *options, *words, *(("--rounds", "1") if day.tiny else ()))
        given = {"expects": 60, "memory": step_memory(*size)} | ({} if day.tiny else more)
        return day.bench(name, f"step, width {size[1]}", words, of_bf16, **given)

    trace = ("--trace", str(day.out / "step-2048" / "traces"))
    smaller = {"smaller": ("--layers", "1"), "smaller_memory": step_memory(1, 4096, 8192)}
    seventy = ("--shape", "32x64x64", "--rounds", "1") if day.tiny else ("--model", "llama-70b")
    return [
        step("step-2048", 4, 2048, 8192, *trace),
        step("step-4096", 2, 4096, 8192, **smaller),
        day.linears("linear-8b", "layers of Llama 8B", ()),
        day.bench(
            "linear-70b", "layers of Llama 70B", ("linear", *seventy), of_bf16_layers,
            expects=240, memory=linear_memory(8192, 8192, 57344), limit=1800,
        ),
    ]  # fmt: skip


def _ranks(day: Day) -> list[Step]:
    """Return the steps of several ranks."""
    ranks, program = "tests/experiment/test_api_ranks.py", "tests/support/ddp_program.py"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    two = (gpus(2),) if day.device == "cuda" else ()
    backend = "nccl" if day.device == "cuda" else "gloo"
    tests = [
        Step(
            f"ranks-{name}",
            about,
            pytest(ranks, "-k", name),
            900,
            (gpu,),
            60,
            3,
            figure=last_line,
            proof="passed",
        )
        for name, about in (("gloo", "two ranks on one GPU, gloo"), ("nccl", "one rank, NCCL"))
    ]
    return [
        *tests,
        Step(
            "ranks-two",
            f"two ranks on two devices, {backend}",
            (*torchrun, program, backend, day.device),
            900,
            (*day.base, *two),
            60,
            3,
            figure=lambda output: last_line(output) or "the weights of one process",
        ),
    ]


def _native(day: Day) -> list[Step]:
    """Return the steps of Transformer Engine and of torch's scaled products."""

    def parity(name: str, engine: str, need: Need) -> Step:
        words = ("doctor", "--engine", engine, "--record", str(day.out / name / "parity.json"), "--json")
        about = f"{engine} beside the emulator"
        command = ablate(*words, *(("--fast",) if day.tiny else ()))
        return Step(name, about, command, 3600, (*day.base, need), 900, 8, figure=sentence)

    te, scaled = "transformer_engine", "scaled_mm"
    backends = f"{scaled},{scaled}:cudnn,{scaled}:cutlass,{te},emulated"
    fp8, fp4 = trains("fp8"), trains("nvfp4")
    return [
        parity("te-parity", te, fp8),
        day.linears("te-fp8", "FP8 layers by Transformer Engine", ("fp8_current", "--engine", te), fp8),
        day.linears("emulated-fp8", "the same layers emulated", ("fp8_current", "--engine", "emulated"), fp8),
        day.linears(
            "te-nvfp4", "NVFP4 and MXFP8 layers by Transformer Engine",
            ("nvfp4", "mxfp8", "--engine", te), fp4,
        ),
        day.trials("te-trials", "12 trials by NVFP4 hardware", 1, fp4, engine=te),
        *(
            parity(name, engine, multiplies(engine, family))
            for name, engine, family in (
                ("scaled-parity", scaled, "fp8"),
                ("cudnn-parity", f"{scaled}:cudnn", "nvfp4"),
                ("cutlass-parity", f"{scaled}:cutlass", "nvfp4"),
            )
        ),
        day.linears(
            "scaled-fp8", "FP8 layers by torch's scaled products",
            ("fp8_current", "--engine", f"{scaled},emulated"), multiplies(scaled, "fp8"),
        ),
        day.linears(
            "scaled-fp4", "FP4 and MXFP8 layers by every engine",
            ("nvfp4", "quartet2", "mxfp4", "mxfp8", "--engine", backends), multiplies(scaled, "nvfp4"),
            expects=300, limit=3600,
        ),
        day.trials(
            "scaled-trials", "12 trials by torch's scaled products", 1, multiplies(scaled, "nvfp4"),
            engine=scaled,
        ),
    ]  # fmt: skip


# --- this machine ---------------------------------------------------------------------------------

PROBE = """
import json, torch
from ablate import provenance
from ablate.engines.gpu_access import device_class
from ablate.engines.hardware import refusal, scaled_refusal, this_machine
from ablate.provenance import driver
here, count = this_machine(), torch.cuda.device_count() if torch.cuda.is_available() else 0
if count:
    torch.cuda.init()
facts = {name: fact for name, fact in provenance.environment().items() if name != "host"}
why = device_class().why
facts |= {"no gpu": why} if why and not count else {}
facts |= {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": driver()}
facts |= {"capability": here.capability, "transformer engine": here.version, "native part": here.native}
refused = {family: refusal(here, {family}) for family in ("fp8", "nvfp4")}
refusals = {family: reason and reason.why for family, reason in refused.items()}
memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if count else 0
tried = [("scaled_mm", "cublaslt", "fp8"), ("scaled_mm", "cublaslt", "nvfp4")]
tried += [(f"scaled_mm:{name}", name, "nvfp4") for name in ("cudnn", "cutlass")]
scaled = {}
for engine, backend, family in tried:
    reason = scaled_refusal(here, "cuda", [family], backend)
    scaled[f"{engine} {family}"] = reason and reason.why
document = {"gpus": count, "memory": memory, "refusals": refusals, "facts": facts, "scaled": scaled}
print(json.dumps(document))
"""
"""Program that describes the machine. It runs in a process of its own, since a broken torch may end it."""


def environment() -> dict[str, str]:
    """Return the environment of all commands: this checkout's code, and none of the owner's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ABLATE_")}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "150"}


def output_of(*command: str) -> str:
    """Return the standard output of a short command, or why there is none."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shlex.join(command)}: {error}\n"
    return done.stdout if done.returncode == 0 else f"{shlex.join(command)}: {last_line(done.stderr)}\n"


def probe() -> Machine:
    """Return the properties of this machine; without a GPU if torch cannot be asked."""
    answer = output_of(sys.executable, "-c", PROBE)
    try:
        return Machine(**json.loads(answer))
    except ValueError:
        return Machine(facts={"no gpu": f"torch could not be asked: {last_line(answer)[-300:]}"})


def checkout() -> dict[str, object]:
    """Return the commit of this checkout, and the files that differ from it."""
    commit = output_of("git", "rev-parse", "HEAD").strip()
    changed = output_of("git", "status", "--porcelain").splitlines()
    return {"commit": commit, "changed files": ", ".join(line[3:] for line in changed) or "none"}


def record(out: Path, machine: Machine) -> None:
    """Write the facts about this machine."""
    (out / "machine.json").write_text(json.dumps(asdict(machine), indent=1) + "\n")
    (out / "nvidia-smi.txt").write_text(output_of("nvidia-smi") + output_of("nvidia-smi", "-q"))
    versions = {f"{one.name}=={one.version}\n" for one in distributions()}  # an environment of uv has no pip
    (out / "packages.txt").write_text("".join(sorted(versions, key=str.lower)))


# --- the dry run ----------------------------------------------------------------------------------


def rejected(parse: Callable[[Sequence[str]], object], words: Sequence[str]) -> str | None:
    """Return why a parser of the standard library refuses these words; None if it takes them."""
    message = io.StringIO()
    try:
        with redirect_stderr(message):
            parse(words)
    except SystemExit:
        return last_line(message.getvalue())
    return None


def misfit(command: Sequence[str]) -> str | None:
    """Return why the program that a command names does not take its words; None if it does."""
    if command[1] == CHECKS:
        return rejected(gpu_checks.parser().parse_args, command[2:])
    module, words = command[2], list(command[3:])
    if module == "torch.distributed.run":
        from torch.distributed.run import get_args_parser

        return rejected(get_args_parser().parse_args, words)
    if command[1] != "-m" or module != "ablate":
        return "no parser is known for this command"
    sys.path.insert(0, str(ROOT))
    import typer

    from ablate.cli.commands import whole_app
    from ablate.recipes import PRESETS

    node, name = typer.main.get_command(whole_app()), "ablate"
    while words and (inner := getattr(node, "commands", {}).get(words[0])):
        node, name = inner, f"{name} {words.pop(0)}"
    if hasattr(node, "commands"):
        return f"{name}: no such command: {' '.join(words[:1])}"
    try:
        parsed = node.make_context(name, words).params
    except Exception as error:  # click's, of which typer has a copy under a private name
        return f"{type(error).__name__}: {error}"
    unknown = sorted({*(parsed.get("presets") or ())} - {*PRESETS})
    return f"no such preset: {', '.join(unknown)}" if unknown else None


COLLECT = """
import contextlib, io, json, sys
import pytest
problems = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        status = pytest.main(words)
    problems.append(output.getvalue().strip() if status else None)
print(json.dumps(problems))
"""
"""Program that prints why pytest refuses each of several lists of words, or null: torch is imported once."""
QUICK = ("--collect-only", "-q", "tests/experiment/test_api_ranks.py", "tests/numerics/test_cuda_kernels.py")


def uncollected(commands: Sequence[Sequence[str]]) -> list[str | None]:
    """Return for each command of pytest why it does not collect its tests; None if it does."""
    if not commands:
        return []
    words = json.dumps([[*command[3:], *QUICK] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return [last_line(done.stderr)] * len(commands)
    return [problem and last_line(problem) for problem in json.loads(last_line(done.stdout))]


def dry_run(chosen: Sequence[Step], machine: Machine) -> int:
    """Print the steps and check their commands. Return the exit status: 1 if a command would be refused."""
    wrong = ready = 0
    seconds = 0.0
    sized = [step.sized(machine).command for step in chosen]
    tests = [command for command in sized if command[1:3] == ("-m", "pytest")]
    problems = dict(zip(tests, uncollected(tests), strict=True))
    print(f"{'step':<54}{'GiB':>5}{'about s':>9}{'limit s':>9}  here")
    for given in chosen:
        reason, step = given.obstacle(machine), given.sized(machine)
        state = f"skipped: {reason}" if reason else "runs" if step is given else f"runs as: {step.about}"
        print(f"{step.name:<54}{step.memory:>5.1f}{step.expects:>9.0f}{step.seconds:>9.0f}  {state}")
        if problem := problems[step.command] if step.command in problems else misfit(step.command):
            wrong += 1
            print(f"    REFUSED: {shlex.join(step.command)}: {problem}")
        if not reason:
            ready += 1
            seconds += step.expects
    most = max((step.sized(machine).memory for step in chosen), default=0.0)
    print(f"{ready} would run here, for about {seconds / 60:.0f} minutes; the largest takes {most:.0f} GiB")
    print(f"{len(chosen)} steps, {wrong} of which would be refused")
    return int(wrong > 0)


# --- the run --------------------------------------------------------------------------------------


def run(step: Step, out: Path, extra: dict[str, str]) -> Result:
    """Run a step, within its time limit, and return its outcome.

    Args:
        step: the step.
        out: folder for its output and its files.
        extra: environment variables besides those of `environment`.
    """
    folder = out / step.name
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in step.files.items():
        (folder / name).write_text(text)
    started = time.monotonic()
    with (out / f"{step.name}.out").open("w") as output, (out / f"{step.name}.err").open("w") as errors:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=environment() | extra,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = process.wait(step.seconds)
            result = "ok" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            result = f"stopped after {step.seconds:g} s"
        finally:
            end(process)
    seconds = time.monotonic() - started
    figure = main_figure(step, out)
    if result == "ok" and step.proof not in figure:
        result = f"nothing {step.proof}"
    for checkpoint in folder.rglob("*.pt"):  # megabytes that nobody reads
        checkpoint.unlink()
    with suppress(OSError):
        folder.rmdir()  # of a step without files
    return Result(step.name, result, round(seconds, 1), figure)


def end(process: subprocess.Popen) -> None:
    """End a command and what it started: by SIGTERM, then by SIGKILL."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main_figure(step: Step, out: Path) -> str:
    """Return the main figure of what a step printed; without one the last line of its errors."""
    with suppress(ValueError, KeyError, IndexError, TypeError, ZeroDivisionError):
        if figure := step.figure((out / f"{step.name}.out").read_text(errors="replace")):
            return figure
    return last_line((out / f"{step.name}.err").read_text(errors="replace"))[:200]


def summarize(results: Sequence[Result], chosen: Sequence[Step], machine: Machine, out: Path) -> None:
    """Write summary.md and results.json. After every step, so that a lost machine leaves what it had."""
    facts = [f"- {name}: {fact}" for name, fact in machine.facts.items()]
    about = {step.name: step.about for step in chosen}
    cells = [
        (one.step, about[one.step], one.result, f"{one.seconds:.0f}", one.figure.replace("|", "/"))
        for one in results
    ]
    rows = [f"| {' | '.join(row)} |" for row in cells]
    head = ["| step | what | result | seconds | main figure |", "|---|---|---|---|---|"]
    text = ["# A day with a GPU", "", *facts, "", *head, *rows, ""]
    replace_text(out / "summary.md", "\n".join(text))
    replace_text(out / "results.json", json.dumps([asdict(one) for one in results], indent=1) + "\n")


def replace_text(file: Path, text: str) -> None:
    """Write a file whole or not at all: a day that ends here must not lose the results before."""
    half = file.with_suffix(".half")
    half.write_text(text)
    half.replace(file)


def archive(out: Path) -> Path:
    """Write the folder as one archive beside it, and return its path."""
    file = out.with_name(f"{out.name}.tar.gz")
    half = file.with_suffix(".half")
    with tarfile.open(half, "w:gz") as tar:
        tar.add(out, arcname=out.name)
    half.replace(file)
    return file


SAME = ("gpu", "torch", "commit")
"""Facts of a machine in which the parts of one day must not differ."""


def earlier(out: Path, machine: Machine) -> list[Result]:
    """Return the results of an earlier run in this folder that ended well; [] if there was none.

    Raises:
        ValueError: they are of another GPU, torch or commit, and would be mixed with those of this one.
    """
    try:
        rows = json.loads((out / "results.json").read_text())
        before = json.loads((out / "machine.json").read_text())["facts"]
    except FileNotFoundError:
        return []
    here = machine.facts | checkout()
    for name in SAME:
        if before.get(name) != here.get(name):
            raise ValueError(f"{out} is of {name} {before.get(name)}, and this is {here.get(name)}")
    return [result for result in (Result(**row) for row in rows) if result.result == "ok"]


def run_all(chosen: Sequence[Step], machine: Machine, out: Path, done: Sequence[Result] = ()) -> int:
    """Run the steps one after another, except for those that are done. Return the exit status: 1 if one
    failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    machine = replace(machine, facts=machine.facts | checkout())
    record(out, machine)
    results = [result for result in done if result.step in {step.name for step in chosen}]
    finished = {result.step for result in results}
    # A cache of its own: a comparison that is stored there would change the engine of later sweeps.
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as cache:
        for number, step in enumerate(chosen, 1):
            if step.name in finished:
                continue
            reason, step = step.obstacle(machine), step.sized(machine)
            print(f"[{number}/{len(chosen)}] {step.name}: {step.about} ...", flush=True)
            result = (
                Result(step.name, f"skipped: {reason}") if reason else run(step, out, {"ABLATE_CACHE": cache})
            )
            print(f"    {result.result}, {result.seconds:.0f} s  {result.figure}", flush=True)
            results.append(result)
            summarize(results, chosen, machine, out)
    print(f"Written: {out / 'summary.md'}. Please look through it, and send back {archive(out)}.")
    return int(any(result.failed for result in results))


def main(
    words: Sequence[str],
    make: Callable[[Path], list[Step]] | None = None,
    describe: Callable[[], Machine] = probe,
) -> int:
    """Run the command line and return its exit status: 0 all steps ended well or were skipped, 1 one failed.

    Args:
        words: command line.
        make: function that returns the steps, given the folder for their files; None: `steps`.
        describe: function that returns the properties of this machine.
    """
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_day.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="list the steps and check their commands")
    parser.add_argument(
        "--resume", action="store_true", help="skip steps that ended well in the folder of --out"
    )
    parser.add_argument("--only", action="append", metavar="STEP", help="run this step alone; repeatable")
    default = Path(time.strftime("gpu-day-%Y%m%d-%H%M%S"))
    parser.add_argument("--out", type=Path, default=default, metavar="FOLDER", help="folder for the results")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu, with --tiny: try the steps"
    )
    parser.add_argument("--tiny", action="store_true", help="take sizes of seconds on a CPU")
    asked = parser.parse_args(words)
    if asked.device == "cpu" and not asked.tiny:
        parser.error("--device cpu: these sizes would take days; add --tiny")
    out = asked.out.resolve()
    chosen = (make or partial(steps, device=asked.device, tiny=asked.tiny))(out)
    names = [step.name for step in chosen]
    if unknown := [name for name in asked.only or () if name not in names]:
        parser.error(f"--only {', '.join(unknown)}: no such step; there are {', '.join(names)}")
    chosen = [step for step in chosen if not asked.only or step.name in asked.only]
    machine = describe()
    if asked.dry_run:
        return dry_run(chosen, machine)
    try:
        done = earlier(out, machine) if asked.resume else []
    except ValueError as error:
        parser.error(f"--resume: {error}; name another folder")
    try:
        return run_all(chosen, machine, out, done)
    except KeyboardInterrupt:
        print(f"Interrupted. Continue with: benchmarks/gpu_day.sh --resume --out {shlex.quote(str(out))}")
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running command is ended, too
    sys.exit(main(sys.argv[1:]))
