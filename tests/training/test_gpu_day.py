"""A day with a GPU: what is tested without one is that commands exist, that failures stop nothing, and that figures are read.

What its commands find on a GPU is no matter of a test.
"""

import json
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from support.cases import every
from support.commands import here
from support.experiments import environment

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpu_checks
import gpu_day
from gpu_day import Machine, Step

from ablate.experiment.load import load
from ablate.recipes import PRESETS
from ablate.training.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
HERE = Machine(facts={"torch": "none"})
SCALED = ("scaled_mm fp8", "scaled_mm nvfp4", "scaled_mm:cudnn nvfp4", "scaled_mm:cutlass nvfp4")
OLDER = "this GPU, SM 9.0, does not multiply NVFP4"
BLACKWELL = Machine(1, 180.0, {"fp8": None, "nvfp4": None}, scaled=dict.fromkeys(SCALED))
HOPPER = Machine(
    1,
    79.2,
    {"fp8": None, "nvfp4": "this GPU, SM 9.0, does not train NVFP4"},
    scaled={"scaled_mm fp8": None} | dict.fromkeys(SCALED[1:], OLDER),
)
TINY = ("--layers", "1", "--width", "64", "--tokens", "128", "--rounds", "1")


def python(code: str) -> tuple[str, ...]:
    """Return a command that runs a line of Python."""
    return (sys.executable, "-c", code)


def day(out: Path, *chosen: Step, words: tuple[str, ...] = ()) -> tuple[int, dict[str, dict], str]:
    """Run these steps; returns the exit status, the results by step, and the summary."""
    status = gpu_day.main(["--out", str(out), *words], lambda out: list(chosen), lambda: HERE)
    results = {one["step"]: one for one in json.loads((out / "results.json").read_text())}
    return status, results, (out / "summary.md").read_text()


def test_steps_of_the_scaled_engines_follow_what_this_gpu_multiplies(tmp_path):
    """FP8 alone on Hopper, FP4 by torch without FlashInfer, and all of them with it."""
    names = ("scaled-parity", "scaled-fp8", "scaled-fp4", "scaled-trials", "cudnn-parity", "cutlass-parity")
    steps = {step.name: step for step in gpu_day.steps(tmp_path) if step.name in names}
    assert {*steps} == {*names}
    fp8 = {"scaled_mm fp8": None}
    fp4 = fp8 | {"scaled_mm nvfp4": None, "scaled_mm:cudnn nvfp4": "FlashInfer is not installed"}
    for scaled, runs in (
        ({}, ()),
        (fp8 | {"scaled_mm nvfp4": "this GPU, SM 9.0, does not multiply NVFP4"}, names[:2]),
        (fp4, names[:4]),
        (fp4 | {"scaled_mm:cudnn nvfp4": None, "scaled_mm:cutlass nvfp4": None}, names),
    ):
        machine = replace(BLACKWELL, scaled=scaled)
        assert {name for name, step in steps.items() if step.obstacle(machine) is None} == {*runs}
        assert all(step.obstacle(HERE) for step in steps.values())


@pytest.mark.slow
def test_a_dry_run_passes_without_a_gpu(tmp_path):
    """Every option of every command exists."""
    command = [str(ROOT / "benchmarks" / "gpu_day.sh"), "--dry-run"]
    venv = Path(sys.executable).parents[1]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(VENV=str(venv)),
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for step in gpu_day.steps(tmp_path):
        assert f"\n{step.name} " in f"\n{done.stdout}"
    assert (
        done.stdout.splitlines()[-1] == f"{len(gpu_day.steps(tmp_path))} steps, 0 of which would be refused"
    )
    assert list(tmp_path.iterdir()) == []


def test_help_makes_no_environment(tmp_path):
    command = ["sh", str(ROOT / "benchmarks" / "gpu_day.sh"), "--help"]
    env = environment(VENV=str(tmp_path / "venv"))
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--only STEP" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("kernels", "--device", "--devise"),
        ("step-2048", "--tokens", "--token"),
        ("step-2048", "nvfp4", "nvfp5"),
        ("step-4096", "4096", "many"),
        ("linear-8b", "linear", "linears"),
        ("doctor", "--json", "--jsn"),
        ("trials-shared", "--no-report", "--noreport"),
        pytest.param("ranks-gloo", "-k", "--kk", marks=pytest.mark.slow),
    ],
)
def test_a_word_that_does_not_exist_fails_the_dry_run(tmp_path, capsys, name, right, wrong):
    def make(out):
        (step,) = (step for step in gpu_day.steps(out) if step.name == name)
        assert right in step.command
        return [replace(step, command=tuple(wrong if word == right else word for word in step.command))]

    assert gpu_day.main(["--dry-run", "--out", str(tmp_path)], make, lambda: HERE) == 1
    assert "REFUSED: " in capsys.readouterr().out


def test_a_command_that_nothing_can_check_fails_the_dry_run(tmp_path):
    step = Step("other", "", python("print(1)"), 5)
    assert gpu_day.main(["--dry-run", "--out", str(tmp_path)], lambda out: [step], lambda: HERE) == 1


def test_a_step_that_fails_stops_no_other_and_is_in_the_summary(tmp_path):
    status, results, summary = day(
        tmp_path / "day",
        Step("broken", "fails", python("print('half'); import sys; sys.exit('why')"), 60),
        Step("hangs", "never ends", python("import time; time.sleep(600)"), 0.5),
        Step("elsewhere", "needs more", python("open('never', 'w')"), 60, (gpu_day.gpu,)),
        Step("unread", "prints no figure", python("print('no JSON')"), 60, figure=gpu_day.of_bf16),
        Step(
            "fine",
            "prints",
            python("import sys; print('1|2'); print(3, file=sys.stderr)"),
            60,
            figure=str.strip,
        ),
    )
    assert status == 1
    assert {name: one["result"] for name, one in results.items()} == {
        "broken": "exit status 1",
        "hangs": "stopped after 0.5 s",
        "elsewhere": "skipped: torch sees no GPU with CUDA here",
        "unread": "ok",
        "fine": "ok",
    }
    assert results["broken"]["figure"] == "why"
    assert results["hangs"]["seconds"] < 60
    assert (tmp_path / "day" / "broken.out").read_text() == "half\n"
    assert (tmp_path / "day" / "fine.err").read_text() == "3\n"
    rows = [line.split(" | ") for line in summary.splitlines() if line.startswith("| ")]
    assert [len(row) for row in rows] == [5] * 6
    assert rows[-1] == ["| fine", "prints", "ok", f"{results['fine']['seconds']:.0f}", "1/2 |"]


@pytest.mark.slow
def test_what_a_hanging_command_started_ends_with_it(tmp_path):
    child = "import time, pathlib; time.sleep(3); pathlib.Path('{}').touch()".format(tmp_path / "late")
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    day(
        tmp_path / "day",
        Step("hangs", "", python(code), 1),
        Step("waits", "", python("import time; time.sleep(4)"), 60),
    )
    assert not (tmp_path / "late").exists()


def test_tests_that_are_all_skipped_are_not_a_success(tmp_path):
    def step(name, line):
        return Step(name, "", python(f"print({line!r})"), 60, figure=gpu_day.last_line, proof="passed")

    skipped, passed = step("skipped", "== 3 skipped in 1.2s =="), step("passed", "== 3 passed in 1.2s ==")
    status, results, _ = day(tmp_path, skipped, passed)
    assert (status, results["skipped"]["result"]) == (1, "nothing passed")
    assert results["passed"]["result"] == "ok"
    assert {one.proof for one in STEPS if "pytest" in one.command} == {"passed"}


def test_one_step_can_be_chosen_and_a_name_that_is_not_there_is_refused(tmp_path, capsys):
    both = Step("one", "", python("print(1)"), 60), Step("two", "", python("print(2)"), 60)
    status, results, _ = day(tmp_path, *both, words=("--only", "two"))
    assert (status, list(results)) == (0, ["two"])
    with pytest.raises(SystemExit) as ended:
        day(tmp_path, *both, words=("--only", "three"))
    assert ended.value.code == 2
    assert "no such step; there are one, two" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_day_runs_what_has_no_good_result_yet(tmp_path):
    def steps(count):
        note = f"open({str(tmp_path / 'runs')!r}, 'a').write('{{}}'); raise SystemExit({count})"
        return (
            Step("good", "", python(note.format("g").replace(f"({count})", "(0)")), 60),
            Step("flaky", "", python(note.format("f")), 60),
            Step("elsewhere", "", python("1"), 60, (gpu_day.gpu,)),
        )

    out = tmp_path / "day"
    assert day(out, *steps(1), words=("--resume",))[0] == 1
    status, results, summary = day(out, *steps(0), words=("--resume",))
    assert (status, (tmp_path / "runs").read_text()) == (0, "gff")
    assert results.keys() == {"good", "flaky", "elsewhere"}
    assert summary.count("\n| ") == 4
    assert day(out, *steps(0))[1]["good"]["result"] == "ok"  # without the option everything runs again
    assert (tmp_path / "runs").read_text() == "gffgf"


def test_the_machine_is_recorded(tmp_path):
    day(tmp_path, Step("one", "", python("print(1)"), 60))
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert machine["facts"].items() > HERE.facts.items()
    assert len(machine["facts"]["commit"]) == 40 or "git" in machine["facts"]["commit"]
    assert {f"{name}=={version(name)}" for name in ("torch", "ablate-fp4")} < {
        *(tmp_path / "packages.txt").read_text().splitlines()
    }
    assert (tmp_path / "nvidia-smi.txt").read_text()


def test_this_machine_is_described():
    machine = gpu_day.probe()
    assert machine.facts["torch"]
    assert {*machine.refusals} == {"fp8", "nvfp4"}
    assert {*machine.scaled} == {*SCALED}
    assert (machine.gpus == 0) == (gpu_day.gpu(machine) is not None)


def test_a_step_is_skipped_where_a_gpu_cannot_run_it(tmp_path):
    def skipped(machine):
        return {step.name: why for step in gpu_day.steps(tmp_path) if (why := step.obstacle(machine))}

    two = "needs 2 GPUs, and there are 1"
    assert skipped(BLACKWELL) == {"trials-ranks": two, "ranks-two": two}
    assert skipped(HOPPER) == skipped(BLACKWELL) | dict.fromkeys(
        ("te-nvfp4", "te-trials"), "this GPU, SM 9.0, does not train NVFP4"
    ) | dict.fromkeys(("scaled-fp4", "scaled-trials", "cudnn-parity", "cutlass-parity"), OLDER)
    assert {*skipped(Machine())} == {step.name for step in gpu_day.steps(tmp_path)}
    assert skipped(replace(BLACKWELL, memory=31.4)) == skipped(BLACKWELL)
    assert {"linear-70b", "step-4096", "preset-4096-nvfp4"} < {*skipped(replace(BLACKWELL, memory=15.5))}


STEPS = gpu_day.steps(Path("day"))
CARDS = {"H100": 79.2, "RTX 5090": 31.4}
"""Memory in GiB that torch reports for the cards that a day must fit."""


def test_every_step_has_estimates_and_fits_each_card():
    """A step whose own size is too large has a smaller one, which only changes words of its command."""
    for step in STEPS:
        assert 0 < step.expects < step.seconds, step.name
        assert step.memory > 0, step.name
        for gib in CARDS.values():
            sized = step.sized(Machine(1, gib))
            assert sized.memory <= gib, step.name
            assert (sized is step) == (step.memory <= gib)
            assert len(sized.command) == len(step.command)
            assert sized.seconds == step.seconds


def test_the_memory_of_a_timed_step_is_that_of_the_sizes_in_its_command():
    """Three models of 16 bytes a weight, and what a step holds, of each size that a card gets."""
    timed = [step for step in STEPS if step.command[3:5] == ("bench", "step")]
    assert len(timed) == 2 * (len(PRESETS) - 1) + 2
    for step in (step.sized(Machine(1, gib)) for step in timed for gib in CARDS.values()):
        layers, width, tokens = (
            int(step.command[step.command.index(option) + 1])
            for option in ("--layers", "--width", "--tokens")
        )
        weights = layers * (4 * width**2 + 3 * width * (8 * width // 3))
        least = (3 * 16 * weights + 290 * tokens * width * layers) / 2**30
        assert least + 0.5 < step.memory < least + 1.5, step.name


def test_a_step_that_no_size_of_fits_says_how_much_it_needs():
    step = Step("large", "", python("1"), 60, memory=40.2, smaller=("-c", "2"), smaller_memory=33.0)
    assert step.obstacle(Machine(1, 31.4)) == "needs 33 GiB of GPU memory, and there are 31"
    assert step.obstacle(Machine(1, 35.0)) is None
    assert step.sized(Machine(1, 35.0)).command == python("2")
    assert step.sized(Machine(1, 35.0)).about.endswith("for this GPU's memory)")
    assert step.sized(Machine(1, 79.2)) is step
    assert (
        replace(step, smaller=()).obstacle(Machine(1, 35.0)) == "needs 40 GiB of GPU memory, and there are 35"
    )


def test_the_day_covers_every_workload_and_every_preset_and_begins_with_the_smoke_steps():
    names = [step.name for step in STEPS]
    assert len({*names}) == len(names)
    smoke = [name for name in names if name.startswith("smoke-")]
    assert names[: len(smoke)] == smoke
    assert {f"smoke-{name}" for name in WORKLOADS if name != "idle"} <= {*smoke}
    assert {"smoke-lora", "smoke-compiled", "smoke-shared"} <= {*smoke}
    for width in (2048, 4096):
        assert {f"preset-{width}-{name}" for name in PRESETS if name != "bf16"} <= {*names}
    layers = {step.command[step.command.index("--layers") + 1] for step in STEPS if "preset-" in step.name}
    assert layers == {"2"}  # some presets keep the last block in bf16, and would time nothing of theirs


@pytest.mark.parametrize("at", ["smoke-gpt", "preset-2048-mxfp8"])
def test_a_day_that_is_interrupted_continues_at_that_step(tmp_path, monkeypatch, at):
    """Every step of the day runs to its end exactly once."""
    notes, out = tmp_path / "notes", tmp_path / "day"
    real = [
        replace(step, command=("/bin/sh", "-c", f"echo {step.name} >> {notes}"), needs=(), files={}, proof="")
        for step in STEPS
    ]
    run = gpu_day.run

    def interrupted(step, *rest):
        if step.name == at:
            raise KeyboardInterrupt
        return run(step, *rest)

    monkeypatch.setattr(gpu_day, "run", interrupted)
    words = ["--resume", "--out", str(out)]
    assert gpu_day.main(words, lambda out: real, lambda: HERE) == 130
    assert notes.exists() == (at != "smoke-gpt")
    monkeypatch.setattr(gpu_day, "run", run)
    assert gpu_day.main(words, lambda out: real, lambda: HERE) == 0
    assert notes.read_text().split() == [step.name for step in real]
    assert {row["step"] for row in json.loads((out / "results.json").read_text())} == {
        step.name for step in real
    }


def test_a_day_is_not_continued_on_another_gpu(tmp_path, capsys):
    step = Step("one", "", python("print(1)"), 60)

    def day_on(gpu):
        machine = Machine(facts={"gpu": gpu})
        return gpu_day.main(["--resume", "--out", str(tmp_path / "day")], lambda out: [step], lambda: machine)

    assert day_on("NVIDIA H100 80GB HBM3") == 0
    with pytest.raises(SystemExit) as ended:
        day_on("NVIDIA B200")
    assert ended.value.code == 2
    assert "is of gpu NVIDIA H100 80GB HBM3, and this is NVIDIA B200" in capsys.readouterr().err
    assert day_on("NVIDIA H100 80GB HBM3") == 0


def test_the_archive_has_what_the_folder_has(tmp_path):
    out = tmp_path / "day"
    day(out, Step("one", "", python("print(1)"), 60, files={"x.yaml": "y"}))
    with tarfile.open(tmp_path / "day.tar.gz") as archive:
        names = {name.removeprefix("day/") for name in archive.getnames()} - {"day"}
    assert names == {str(path.relative_to(out)) for path in out.rglob("*")}
    assert {"summary.md", "results.json", "machine.json", "nvidia-smi.txt", "one.out"} < names
    assert "one/x.yaml" in names


def test_full_sizes_are_refused_on_a_cpu(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_day.main(["--device", "cpu", "--dry-run"], lambda out: [], lambda: HERE)
    assert ended.value.code == 2
    assert "add --tiny" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smoke-python", "resume-quartet2"])
def test_a_step_runs_in_small_on_a_cpu(tmp_path, name):
    words = ["--device", "cpu", "--tiny", "--only", name, "--out", str(tmp_path / "day")]
    assert gpu_day.main(words, None, lambda: HERE) == 0
    (row,) = json.loads((tmp_path / "day" / "results.json").read_text())
    assert re.search(r"\b(equal records|are equal, equal when continued)", row["figure"])


def test_a_check_whose_runs_differ_fails(tmp_path, capsys, monkeypatch):
    """The second of the two runs that `fork` compares has another number."""
    lines, count = gpu_checks.lines_of, iter(range(99))

    def moved(records):
        yield from (f"{line} {number}" if (number := next(count)) > 5 else line for line in lines(records))

    monkeypatch.setattr(gpu_checks, "lines_of", moved)
    words = ["fork", "--device", "cpu", "--tiny", "--folder", str(tmp_path)]
    assert gpu_checks.main(words) == 1
    assert json.loads(capsys.readouterr().out)["sentence"] == "forked after step 3 of 6: DIFFERENT records"


@every(name=["trials-alone", "trials-shared", "trials-ranks", "te-trials", "scaled-trials"])
def test_an_experiment_of_the_day_loads(tmp_path, name):
    (step,) = (step for step in gpu_day.steps(tmp_path) if step.name == name)
    ((file, text),) = step.files.items()
    native = {"te-trials": "transformer_engine", "scaled-trials": "scaled_mm"}.get(name, "emulated")
    assert f"engine: {native}\n" in text
    (tmp_path / file).write_text(text.replace(native, "emulated"))  # the others need a GPU to be loaded
    experiment = load(tmp_path / file)
    assert len(experiment.arms) * len(experiment.seeds) == 12
    assert Path(step.command[4]).name == file


@pytest.mark.slow
def test_the_main_figures_are_read_from_what_the_commands_print():
    """The same commands, small and on this processor."""

    def figure(read, *words):
        done = here(*words, "--json")
        assert done.returncode == 0, done.stderr
        return read(done.stdout)

    kernels = figure(gpu_day.of_copy, "bench", "kernels", "64x64", "--rounds", "1")
    assert kernels.endswith("goal .8")
    assert " of a copy at " in kernels
    step = figure(gpu_day.of_bf16, "bench", "step", "nvfp4", *TINY)
    assert step.startswith("nvfp4 ")
    assert ", nvfp4, fp32_out " in step
    linear = ("linear", "nvfp4", "--shape", "32x64x48", "--rounds", "1", "--device", "cpu")
    assert figure(gpu_day.of_bf16_layers, "bench", *linear).startswith("nvfp4 (emulated) ")
    assert figure(gpu_day.checks, "doctor", "--fast").endswith(" checks agree")
    assert gpu_day.trials_run("A question?\n12 trials run in 95 s\n\narm") == "12 trials run in 95 s"
    assert gpu_day.last_line("x\n===== 3 passed in 2.00s =====\n\n") == "3 passed in 2.00s"
