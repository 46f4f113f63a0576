"""A day with a GPU: all that needs one, run without a person, as one folder to send back.

    benchmarks/gpu_day.sh                      # sets up an environment, then runs this file
    benchmarks/gpu_day.sh --dry-run            # lists the steps, and checks every option of their commands
    benchmarks/gpu_day.sh --only kernels
    benchmarks/gpu_day.sh --resume --out DAY   # runs the steps that DAY has no good result of yet

The problem. The project is developed without a GPU, and who lends one has an afternoon. Nothing may stop half
way, and a command whose option was renamed since must be found before that afternoon.

The idea. Each step is a command of this project in a process of its own, with a time limit of its own. A step
that fails, or exceeds its limit, is a line of the summary; the next one runs. What this GPU cannot run is
listed as skipped, with the reason. The dry run hands every command to the parser that will read it.

The folder has summary.md (step, result, seconds, main figure), results.json, machine.json, nvidia-smi.txt and
packages.txt; of each step NAME.out and NAME.err, and a folder NAME with the files that it wrote. This file
needs Python's standard library alone; the commands need the environment that it runs in.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 30
"""Time that a command has to end after SIGTERM, before it is killed."""


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
    figure: Callable[[str], str] = lambda output: ""
    """Function from the command's standard output to its main figure."""
    files: dict[str, str] = field(default_factory=dict)
    """Text of files that the command reads, by name in the step's folder."""

    def obstacle(self, machine: Machine) -> str | None:
        """Return the reason why this machine cannot run the step; None if it can."""
        return next((why for need in self.needs if (why := need(machine))), None)


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


def memory(gib: float) -> Need:
    """Need a GPU with so much memory."""
    return lambda machine: (
        None
        if machine.memory >= gib
        else f"needs {gib:g} GiB of GPU memory, and there are {machine.memory:.0f}"
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
question: Does the rotation pay on this GPU?
workload: {{gpt: {{layers: 4, width: 256, heads: 4, batch: 8, steps: 300, eval_every: 100}}}}
engine: {engine}
recipe: nvfp4
ablate: {{rht: [true, false]}}
against: bf16
seeds: 4
resources: {{gpus: {gpus}}}
"""
"""Twelve trials of seconds to a minute each."""


def ablate(*words: str) -> tuple[str, ...]:
    """Return an `ablate` command."""
    return (sys.executable, "-m", "ablate", *words)


def pytest(*words: str) -> tuple[str, ...]:
    """Return a command that runs tests which need a GPU."""
    return (sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *words)


def trials(name: str, about: str, out: Path, share: float, engine: str = "emulated", *needs: Need) -> Step:
    """Return a step that runs a sweep of twelve trials, each with this share of a GPU."""
    file, state = out / name / f"{name}.yaml", out / name / "state"
    where = ("--state", str(state), "--device", "cuda", "--mlflow", "none", "--no-report", "--quiet")
    text = TRIALS.format(engine=engine, gpus=share)
    return Step(name, about, ablate("sweep", str(file), *where), 1800, needs, trials_run, {file.name: text})


def steps(out: Path) -> list[Step]:
    """Return all steps, those that others rely on first.

    Args:
        out: folder for their files.
    """
    ranks, llama = "tests/test_api_ranks.py", ("--model", "llama-8b")
    step, linear = (ablate("bench", name, "--device", "cuda", "--json") for name in ("step", "linear"))
    kernels = ablate("bench", "kernels", "4096x4096", "8192x8192", "--device", "cuda", "--json")
    trace = ("--trace", str(out / "step-2048" / "traces"))
    narrow = ("--layers", "4", "--width", "2048", "--tokens", "8192")
    wide = ("--layers", "2", "--width", "4096", "--tokens", "8192")
    parity = ("--engine", "transformer_engine", "--record", str(out / "te-parity" / "parity.json"), "--json")
    native, emulated = (("--engine", name, *llama) for name in ("transformer_engine", "emulated"))
    backends = "scaled_mm,scaled_mm:cudnn,scaled_mm:cutlass,transformer_engine,emulated"
    return [
        Step("gpu-tests", "GPU tests", pytest("--ignore", ranks), 2400, (gpu,), last_line),
        Step("doctor", "numerics, GPU bits included", ablate("doctor", "--json"), 1200, (gpu,), checks),
        Step("kernels", "quantisers beside a device copy", kernels, 1200, (gpu,), of_copy),
        Step(
            "step-2048",
            "step, width 2048",
            (*step, "nvfp4", *narrow, *trace),
            1200,
            (gpu, memory(20)),
            of_bf16,
        ),
        Step("step-4096", "step, width 4096", (*step, "nvfp4", *wide), 1200, (gpu, memory(30)), of_bf16),
        Step(
            "presets-2048",
            "step of every preset, width 2048",
            (*step, "--all-presets", "--layers", "1", "--width", "2048", "--tokens", "4096", "--rounds", "5"),
            2400,
            (gpu, memory(30)),
            of_bf16,
        ),
        Step(
            "presets-4096",
            "step of every preset, width 4096",
            (*step, "--all-presets", "--layers", "1", "--width", "4096", "--tokens", "4096", "--rounds", "5"),
            2400,
            (gpu, memory(76)),
            of_bf16,
        ),
        Step("linear-8b", "layers of Llama 8B", (*linear, *llama), 1200, (gpu, memory(20)), of_bf16_layers),
        Step(
            "linear-70b",
            "layers of Llama 70B",
            (*linear, "--model", "llama-70b"),
            1800,
            (gpu, memory(76)),
            of_bf16_layers,
        ),
        Step("ranks-gloo", "two ranks on one GPU, gloo", pytest(ranks, "-k", "gloo"), 900, (gpu,), last_line),
        Step("ranks-nccl", "one rank, NCCL", pytest(ranks, "-k", "nccl"), 900, (gpu,), last_line),
        trials("trials-alone", "12 trials, one at a time", out, 1, "emulated", gpu),
        trials("trials-shared", "12 trials, four share the GPU", out, 0.25, "emulated", gpu),
        trials("trials-ranks", "12 trials on two GPUs each", out, 2, "emulated", gpu, gpus(2)),
        Step(
            "te-parity",
            "Transformer Engine beside the emulator",
            ablate("doctor", *parity),
            3600,
            (gpu, trains("fp8")),
            sentence,
        ),
        Step(
            "te-fp8",
            "FP8 layers by Transformer Engine",
            (*linear, "fp8_current", *native),
            1200,
            (gpu, trains("fp8")),
            of_bf16_layers,
        ),
        Step(
            "emulated-fp8",
            "the same layers emulated",
            (*linear, "fp8_current", *emulated),
            1200,
            (gpu, trains("fp8")),
            of_bf16_layers,
        ),
        Step(
            "te-nvfp4",
            "NVFP4 and MXFP8 layers by Transformer Engine",
            (*linear, "nvfp4", "mxfp8", *native),
            1200,
            (gpu, trains("nvfp4")),
            of_bf16_layers,
        ),
        trials(
            "te-trials", "12 trials by NVFP4 hardware", out, 1, "transformer_engine", gpu, trains("nvfp4")
        ),
        *(
            Step(
                name,
                f"{engine} beside the emulator",
                ablate("doctor", "--engine", engine, "--record", str(out / name / "parity.json"), "--json"),
                3600,
                (gpu, multiplies(engine, family)),
                sentence,
            )
            for name, engine, family in (
                ("scaled-parity", "scaled_mm", "fp8"),
                ("cudnn-parity", "scaled_mm:cudnn", "nvfp4"),
                ("cutlass-parity", "scaled_mm:cutlass", "nvfp4"),
            )
        ),
        Step(
            "scaled-fp8",
            "FP8 layers by torch's scaled products",
            (*linear, "fp8_current", "--engine", "scaled_mm,emulated", *llama),
            1200,
            (gpu, multiplies("scaled_mm", "fp8")),
            of_bf16_layers,
        ),
        Step(
            "scaled-fp4",
            "FP4 and MXFP8 layers by every engine",
            (*linear, "nvfp4", "quartet2", "mxfp4", "mxfp8", "--engine", backends, *llama),
            3600,
            (gpu, multiplies("scaled_mm", "nvfp4")),
            of_bf16_layers,
        ),
        trials(
            "scaled-trials",
            "12 trials by torch's scaled products",
            out,
            1,
            "scaled_mm",
            gpu,
            multiplies("scaled_mm", "nvfp4"),
        ),
    ]


# --- this machine ---------------------------------------------------------------------------------

PROBE = """
import json, torch
from ablate import provenance
from ablate.engines.hardware import driver, refusal, scaled_refusal, this_machine
here, count = this_machine(), torch.cuda.device_count() if torch.cuda.is_available() else 0
facts = {name: fact for name, fact in provenance.environment().items() if name != "host"}
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
    (out / "packages.txt").write_text(output_of(sys.executable, "-m", "pip", "freeze"))


# --- the dry run ----------------------------------------------------------------------------------


def misfit(command: Sequence[str]) -> str | None:
    """Return why the program that a command names does not take its words; None if it does."""
    module, words = command[2], list(command[3:])
    if command[1] != "-m" or module not in ("ablate", "pytest"):
        return "no parser is known for this command"
    if module == "pytest":
        quick = ("--collect-only", "-q", "tests/test_api_ranks.py", "tests/numerics/test_cuda_kernels.py")
        done = subprocess.run(
            [*command, *quick], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        return None if done.returncode == 0 else last_line(done.stderr) or last_line(done.stdout)
    sys.path.insert(0, str(ROOT))
    import typer

    from ablate.cli.app import app
    from ablate.recipes import PRESETS

    node, name = typer.main.get_command(app), "ablate"
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


def dry_run(chosen: Sequence[Step], machine: Machine) -> int:
    """Print the steps and check their commands. Return the exit status: 1 if a command would be refused."""
    wrong = 0
    for step in chosen:
        reason = step.obstacle(machine)
        print(f"{step.name}: {step.about}; at most {step.seconds:g} s")
        print(f"    {shlex.join(step.command)}")
        if reason:
            print(f"    skipped here: {reason}")
        if problem := misfit(step.command):
            wrong += 1
            print(f"    REFUSED: {problem}")
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
    for checkpoint in folder.rglob("*.pt"):  # megabytes that nobody reads
        checkpoint.unlink()
    with suppress(OSError):
        folder.rmdir()  # of a step without files
    return Result(step.name, result, round(seconds, 1), main_figure(step, out))


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
    (out / "summary.md").write_text("\n".join(text))
    (out / "results.json").write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")


def earlier(out: Path) -> list[Result]:
    """Return the results of an earlier run in this folder that ended well; [] if there was none."""
    try:
        rows = json.loads((out / "results.json").read_text())
    except FileNotFoundError:
        return []
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
            reason = step.obstacle(machine)
            print(f"[{number}/{len(chosen)}] {step.name}: {step.about} ...", flush=True)
            result = (
                Result(step.name, f"skipped: {reason}") if reason else run(step, out, {"ABLATE_CACHE": cache})
            )
            print(f"    {result.result}, {result.seconds:.0f} s  {result.figure}", flush=True)
            results.append(result)
            summarize(results, chosen, machine, out)
    print(f"Written: {out / 'summary.md'}. Please send back the folder {out}.")
    return int(any(result.failed for result in results))


def main(
    words: Sequence[str],
    make: Callable[[Path], list[Step]] = steps,
    describe: Callable[[], Machine] = probe,
) -> int:
    """Run the command line and return its exit status: 0 all steps ended well or were skipped, 1 one failed.

    Args:
        words: command line.
        make: function that returns the steps, given the folder for their files.
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
    asked = parser.parse_args(words)
    out = asked.out.resolve()
    chosen = make(out)
    names = [step.name for step in chosen]
    if unknown := [name for name in asked.only or () if name not in names]:
        parser.error(f"--only {', '.join(unknown)}: no such step; there are {', '.join(names)}")
    chosen = [step for step in chosen if not asked.only or step.name in asked.only]
    machine = describe()
    if asked.dry_run:
        return dry_run(chosen, machine)
    return run_all(chosen, machine, out, earlier(out) if asked.resume else ())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running command is ended, too
    sys.exit(main(sys.argv[1:]))
