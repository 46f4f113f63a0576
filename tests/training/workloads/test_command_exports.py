"""Commands that get a recipe in the form of their own training stack, unchanged: placeholders such as `{export:te}`."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cases import every
from support.commands import INLINE, here
from support.experiments import end, start, sweep, values
from support.workloads import OWN_COMMAND

from ablate.cli.init import STACKS as INIT_STACKS
from ablate.cli.init import init
from ablate.cli.recipe import resolve
from ablate.errors import InputError
from ablate.experiment.load import load
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.targets import TARGETS, Lost, Model
from ablate.recipes.targets.commands import STACKS, exported, path_of
from ablate.recipes.targets.megatron import VARIABLES, read
from ablate.training.checkpoints import Checkpoints
from ablate.training.loop import Telemetry
from ablate.training.own_code.exports import ExportOptions, NotExpressed
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.command import PLACEHOLDERS, Command

SEEN = """
import json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open(os.path.join(os.environ["ABLATE_FOLDER"], "seen"), "w"))
print('{"step": 1, "val/loss": 1}')
"""
BLOCKS = 8


def command(folder: Path, run: str, blocks: int | None = BLOCKS, **fields) -> Command:
    (folder / "script.py").write_text(fields.pop("code", SEEN))
    return Command(run=run, folder=str(folder), steps=3, export=ExportOptions(blocks=blocks), **fields)


def seen(workload: Command, recipe: Recipe, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment that the command of a trial got."""
    checkpoints = Checkpoints(folder / "c.pt", "trial", 60)
    list(workload.records(TrialRun(recipe, 0, "emulated", "cpu", Telemetry(log=1), checkpoints)))
    arguments, environment = json.loads((folder / "artifacts" / "seen").read_text())
    return arguments, environment


def lost(name: str, recipe: Recipe, blocks: int = BLOCKS) -> list[str]:
    """Return the reasons why a stack cannot express a recipe; none if it can."""
    try:
        exported(name, recipe, Model(blocks=blocks), Path("x"), [])
    except Lost as error:
        return error.reasons
    return []


@every(stack=STACKS)
def test_a_stack_takes_the_presets_of_its_target_and_bf16(stack):
    assert lost(stack, PRESETS["bf16"]()) == []
    for name in PRESETS:
        reasons = lost(stack, PRESETS[name]())
        wanted = []
        if stack in TARGETS:
            try:
                TARGETS[stack].write(PRESETS[name](), Model(blocks=BLOCKS))
            except Lost as error:
                wanted = error.reasons
        assert reasons == wanted


@every(stack=STACKS)
def test_within_a_word_a_placeholder_is_the_path_of_what_recipe_export_writes(stack, tmp_path):
    recipe = PRESETS["nvfp4_paper"]()
    (given,), environment = seen(
        command(tmp_path, f"python script.py --recipe={{export:{stack}}}"), recipe, tmp_path
    )
    path = path_of(stack, tmp_path / "artifacts" / "export")
    assert given == f"--recipe={path}"
    if stack == "json":
        assert Recipe.model_validate_json(path.read_text()) == recipe
    else:
        assert path.read_text() == TARGETS[stack].write(recipe, Model("this trial's recipe", BLOCKS))
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    assert (str(path.parent) in paths) is (path.suffix == ".py")


RECIPES = {
    "bf16": PRESETS["bf16"](),
    "nvfp4_paper": PRESETS["nvfp4_paper"](),
    "no rotation": resolve("nvfp4", ["rht=false"]),
    "to nearest": resolve("nvfp4", ["sr=false", "skip_first=2"]),
    "mxfp8": PRESETS["mxfp8"](),
    "dequantised": PRESETS["nvfp4_dequantised"](),
    "rules": resolve("nvfp4", ['recipe.layers.rules=[{match: "*.linear_fc2", use: null}]']),
}


@pytest.mark.parametrize("name", RECIPES)
def test_megatrons_options_files_and_variables_stand_for_the_recipe(name, tmp_path, monkeypatch):
    """Read as `ablate recipe import` reads a job, whatever the environment of the sweep says."""
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "1" if variable != "NVTE_BACKWARD_OVERRIDE" else "dequantized")
    recipe = RECIPES[name]
    run = f"python script.py --num-layers {BLOCKS} {{export:megatron}} --lr 1e-3"
    arguments, environment = seen(command(tmp_path, run, blocks=None), recipe, tmp_path)
    assert arguments[:3] == ["--num-layers", "8", "--bf16"]
    assert arguments[-2:] == ["--lr", "1e-3"]
    found = read(arguments, environment)
    assert found.products == recipe.products
    counted = [[each.layers.quantises(block, BLOCKS) for block in range(BLOCKS)] for each in (found, recipe)]
    assert counted[0] == counted[1]
    assert bool(found.layers.rules) is bool(recipe.layers.rules)
    sourced = subprocess.run(
        ["bash", "-c", 'source "$1"; printf "%s\\n" "${PRECISION_ARGS[@]}"', "bash",
         str(tmp_path / "artifacts" / "export" / "recipe_megatron.sh")],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sourced.stdout.split() == arguments[2:-2]


def test_torchtitan_gets_an_override_and_nothing_for_bf16(tmp_path):
    workload = command(tmp_path, "python script.py {export:torchtitan}")
    assert seen(workload, PRESETS["bf16"](), tmp_path)[0] == []
    arguments, environment = seen(workload, PRESETS["nvfp4"](), tmp_path)
    assert arguments == ["--override.imports", "recipe_torchtitan.quantised"]
    code = "import importlib.util as u; print(u.find_spec('recipe_torchtitan').origin)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()).read_text().count("@override(") == 1


CHANGED = {
    "--fp8-format hybrid --fp8-recipe mxfp8 {export:megatron}": "takes one of them",
    "{export:megatron} --first-last-layers-bf16 --num-layers-at-end-in-bf16 2": "would quantise other layers",
    "{export:megatron} --fp4-fromat e2m1": "'--fp4-format' is the nearest",
    "--num-layers 4 {export:megatron}": "--num-layers is 4, and export says 8 blocks",
    "--override.imports a.b {export:torchtitan}": "stands in the command already",
}


@pytest.mark.parametrize("words", CHANGED)
def test_a_command_that_changes_its_recipe_elsewhere_is_refused(words, tmp_path):
    workload = command(tmp_path, f"python script.py {words}")
    with pytest.raises(NotExpressed, match=CHANGED[words]):
        workload.exported(PRESETS["nvfp4"](), dict.fromkeys(PLACEHOLDERS, "0"), tmp_path)


def test_an_unchanged_command_needs_no_confirmation_and_a_wrong_one_still_fails(tmp_path):
    plain = 'print(\'{"step": 1, "val/loss": 1}\')'
    for run, code, fails in (
        ("python script.py", plain, "without confirming"),
        ("python script.py {export:te}", plain, None),
        ("python script.py {export:te}", 'print(\'{"ablate/recipe": "0"}\')', "confirms recipe '0'"),
    ):
        workload = command(tmp_path, run, None, code=code) if "export" in run else Command(
            run=run, folder=str(tmp_path), steps=3
        )  # fmt: skip
        (tmp_path / "script.py").write_text(code)
        trial = TrialRun(PRESETS["nvfp4"](), 0, "emulated", "cpu", Telemetry(log=1))
        if fails is None:
            assert len(list(workload.records(trial))) == 1
        else:
            with pytest.raises(RuntimeError, match=fails):
                list(workload.records(trial))


def test_a_variable_that_changes_every_number_ends_a_trial_of_transformer_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("NVTE_USE_FAST_MATH", "1")
    for stack in ("te", "megatron"):
        with pytest.raises(RuntimeError, match="NVTE_USE_FAST_MATH"):
            seen(command(tmp_path, f"python script.py {{export:{stack}}}"), PRESETS["nvfp4"](), tmp_path)
    seen(command(tmp_path, "python script.py {export:torchao}"), PRESETS["nvfp4"](), tmp_path)


def test_the_stack_its_version_and_the_number_of_blocks_are_part_of_the_id(tmp_path, monkeypatch):
    def named(run: str, **fields) -> str:
        workload = command(tmp_path, f"python script.py {run}", **fields)
        return TrialSpec(
            workload="command", config=workload, recipe=PRESETS["nvfp4"](), seed=0, engine="emulated", device="cpu"
        ).id  # fmt: skip

    first = named("{export:te}")
    assert first == named("{export:te}")
    ids = {first, named("{export:te}", blocks=9), named("{export:torchao}"), named("", blocks=None)}
    monkeypatch.setitem(STACKS, "te", type(STACKS["te"])(**{**vars(STACKS["te"]), "version": 2}))
    ids |= {named("{export:te}")}
    assert len(ids) == 5


# --- experiments --------------------------------------------------------------------------------------


def experiment(folder: Path, workload: str, **lines: str) -> Path:
    shutil.copy(OWN_COMMAND / "stack.py", folder)
    parts = {"recipe": "nvfp4"} | ({"ablate": "{skip_last: [0, 4]}"} if "arms" not in lines else {}) | lines
    path = folder / "own.yaml"
    path.write_text(
        f"schema: 1\nquestion: Does it?\nworkload: {{command: {workload}}}\n"
        + "".join(f"{key}: {value}\n" for key, value in parts.items())
    )
    return path


def run_of(words: str, more: str = "export: {blocks: 8}") -> str:
    seed = " {seed}" if "{export:" in words and "{seed}" not in words else ""  # else all seeds are one run
    return f"{{run: 'python stack.py {words}{seed}', {more}}}"


@pytest.mark.parametrize(
    ("workload", "lines", "sentences"),
    [
        (run_of("{export:torchtitn}"), {}, ["3:22: .*no such training stack; 'torchtitan' is the nearest"]),
        (run_of("{export}"), {}, ["3:22: .*names no training stack; write {export:NAME}"]),
        (run_of("{lr}", "config: {lr: 1}, export: {blocks: 8}"), {}, ["3:68: .*has no effect"]),
        (run_of("{export:te}", "export: {block: 8}"), {}, ["3:7.: .*'blocks' is the nearest"]),
        (run_of("{export:te}", "config: {export: 1}"), {}, ["config.export: .*is a placeholder"]),
        (
            run_of("{export:torchtitan}", "steps: 3"),
            {},
            ["layers: torchtitan names the blocks.*give workload.export.blocks"],
        ),
        (
            run_of("{export:torchtitan}"),
            {"ablate": "{sr: [true, false], skip_last: [0, 4]}"},
            [
                r"5:21: ablate.sr.1: false: {export:torchtitan}: dgrad.g.rounding nearest: torchtitan's nearest"
            ],
        ),
        (
            run_of("{export:te}"),
            {"ablate": "{recipe: [nvfp4, mxfp4, row_scaled]}"},
            ["5:26: ablate.recipe.1: 'mxfp4': .*fprop.x", "5:33: ablate.recipe.2: .*granularity row"],
        ),
        (
            run_of("{export:te} {lr}", "config: {lr: 1}"),
            {"recipe": "row_scaled", "ablate": "{workload.config.lr: [1, 2]}"},
            ["4:1: recipe: {export:te}: .*granularity row"],
        ),
    ],
)
def test_a_plan_names_the_arms_that_a_stack_cannot_express_at_their_place(
    workload, lines, sentences, tmp_path
):
    with pytest.raises(InputError) as error:
        load(experiment(tmp_path, workload, **lines), device="cpu")
    for sentence in sentences:
        assert any(re.search(sentence, str(each)) for each in error.value.problems), str(error.value)


@pytest.mark.parametrize(("words", "told"), [("{export:torchtitan}", True), ("", False)])
def test_a_plan_says_which_stack_computes_the_recipes(words, told, tmp_path):
    """Not an engine of this package."""
    more = "export: {blocks: 8}" if told else "steps: 3"
    done = here("plan", experiment(tmp_path, run_of(words, more)), "--state", tmp_path / "state")
    assert done.returncode == 0, done.stderr
    assert ("exported to torchtitan, and read back" in done.stdout) is told
    assert ("Recipes: the command reads each arm's (ABLATE_RECIPE)" in done.stdout) is not told
    assert "Engine: " not in done.stdout


def test_a_plan_prints_the_command_that_each_arm_runs(tmp_path):
    """As the script gets it: variables that differ before it, those that all share once."""
    keys = {"ablate": "{rht: [true, false], workload.config.lr: [1, 2]}", "seeds": "[7]"}
    words = "{lr} {folder} --num-layers 8 {export:megatron}"
    path = experiment(tmp_path, run_of(words, "config: {lr: 1}"), **keys)
    arms = json.loads(here("plan", path, "--json").stdout)
    lines = {arm["arm"]: shlex.split(arm["command"]) for arm in arms["arms"]}
    printed = here("plan", path).stdout
    assert len(lines) == 6
    for name, line in lines.items():
        rht, at = "rht=true" in name or "bf16" in name, line.index("python")
        assert line[:at] == [f"NVTE_NVFP4_DISABLE_RHT={int(not rht)}"]
        assert line[at : at + 5] == ["python", "stack.py", name[-1], "TRIAL/folder", "--num-layers"]
        assert ("--fp4-recipe" in line) == (not name.startswith("bf16"))
        assert line[-1] == "7"
        assert f"  {name}: {shlex.join(line)}\n" in printed
    assert "NVTE_NVFP4_DISABLE_2D_QUANTIZATION=0" in arms["variables"]
    assert f"  variables of each: {arms['variables']}\n" in printed


@every(stack=INIT_STACKS)
def test_what_init_writes_for_a_stack_passes_the_plan_and_is_not_overwritten(stack, tmp_path):
    init("mine", folder=tmp_path, **{stack: True})
    found = load(tmp_path / "mine.yaml", device="cpu")
    assert (found.base.workload, len(found.arms), found.seeds) == ("command", 3, (0, 1, 2))
    assert found.keys.answer
    assert found.keys.metric["min_effect"]
    (job,) = (path for path in tmp_path.iterdir() if path.suffix != ".yaml")
    assert found.base.config.run.split()[1] == job.name
    assert max(map(len, job.read_text().splitlines())) <= 110
    syntax = ["bash", "-n"] if job.suffix == ".sh" else [sys.executable, "-m", "py_compile"]
    subprocess.run([*syntax, str(job)], check=True)
    for again in ({stack: True}, {stack: True, "training": True}, {"hf": True, "megatron": True}):
        with pytest.raises(InputError, match=r"exists already|write different files"):
            init("mine", folder=tmp_path, **again)
    with pytest.raises(InputError, match="part of the job's command"):
        init("two words", folder=tmp_path, **{stack: True})


@pytest.mark.slow
def test_an_unchanged_stack_is_killed_resumed_and_reported(tmp_path, capfd):
    """Options and recipes in one sweep, two seeds; a trial continues from the stack's own checkpoint."""
    words = "--lr {lr} --seed {seed} --steps {steps} --checkpoint {checkpoint} --seconds 0.03"
    path = experiment(
        tmp_path,
        run_of(
            f"{words} {{export:torchtitan}}",
            "config: {lr: 0.1}, steps: 8, export: {blocks: 8}, metrics: torchtitan",
        ),
        arms="{all: {skip_last: 0}, half: {skip_last: 4, workload.config.lr: 0.2}}",
        seeds="2",
    )
    state = tmp_path / "state"
    running = start("sweep", path, "--state", state, *INLINE)
    try:
        deadline = time.monotonic() + 60
        while not [*state.glob("trials/*/command/checkpoint/step")]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        running.kill()
        end(running)
    outcome, news = sweep(load(path, device="cpu"), state)
    assert (outcome.ran + outcome.reused, outcome.failed) == (8, 0)
    found = values(state, "own")
    assert len(found) == 8
    for (name, seed), loss in found.items():
        blocks, lr = {"all": (8, 0.1), "half": (4, 0.2)}.get(name, (0, 0.2 if "lr=0.2" in name else 0.1))
        noise = 0.001 * ((7 * seed + 24) % 5)
        assert loss == pytest.approx(4 - lr * 8 + 0.01 * blocks + noise, abs=1e-5), name  # digits printed
    logged = capfd.readouterr().out
    assert re.search(r"from step [1-9]", logged)
    assert (logged.count("converted 8 blocks"), logged.count("converted 4 blocks")) == (2, 2)
    assert len([*state.glob("trials/*/artifacts/export/recipe_torchtitan.py")]) == 8
    assert "half" in "\n".join(news)


def job(folder: Path, run: str, script: str, **fields) -> list[str]:
    """Return why a job of a shell script cannot run."""
    (folder / "job.sh").write_text(script)
    workload = Command(run=run, folder=str(folder), steps=3, export=ExportOptions(blocks=BLOCKS), **fields)
    return [f"{field}: {why}" for field, why in workload.problems()]


@pytest.mark.parametrize(
    ("run", "script", "told"),
    [
        ("bash job.sh --seed {seed} {export:megatron}", "exec train --bf16 \"$@\"\n", ""),
        ("bash job.sh {export:megatron}", "exec train --seed \"$ABLATE_SEED\" \"$@\"\n", ""),
        ("bash job.sh --seed {seed} {export:megatron}", "# not --fp4-format\nexec train \"$@\"\n", ""),
        ("bash job.sh --seed {seed} {export:megatron}", "exec train --fp4-format e2m1 \"$@\"\n", "job.sh has --fp4-format"),
        ("bash job.sh --seed {seed} {export:megatron}", "export NVTE_NVFP4_DISABLE_RHT=1\ntrain \"$@\"\n", "job.sh has NVTE_NVFP4_DISABLE_RHT"),
        ("bash job.sh --seed {seed} --fp8-format hybrid {export:megatron}", "train \"$@\"\n", "run has --fp8-format"),
        ("bash job.sh {export:torchtitan}", "train \"$@\"\n", "has no {seed}, so that all seeds would be one run"),
        ("bash job.sh --lr 1", "train --fp4-format e2m1 \"$@\"\n", ""),
    ],
)  # fmt: skip
def test_a_job_whose_arms_or_seeds_would_train_alike_is_refused(run, script, told, tmp_path):
    found = job(tmp_path, run, script) if "export" in run else []
    assert [told in line for line in found] == [True] * bool(told), found


@pytest.mark.parametrize(("blocks", "refused"), [(8, False), (3, True)])
def test_a_stack_with_no_block_left_to_quantise_is_refused(blocks, refused):
    recipe = PRESETS["nvfp4"]()
    kept = recipe.model_copy(update={"layers": recipe.layers.model_copy(update={"skip_last": 3})})
    for stack in ("megatron", "torchtitan"):
        assert bool(lost(stack, kept, blocks)) == refused


def test_a_plan_says_that_a_stacks_lines_are_not_read(tmp_path):
    (tmp_path / "job.sh").write_text('train "$@"\n')
    given = {"run": "bash job.sh --seed {seed} {export:torchtitan}", "folder": str(tmp_path), "steps": 3}
    assert [*Command(**given, metrics="torchtitan").remarks()] == []
    (said,) = Command(**given).remarks()
    assert "`metrics: torchtitan`" in said
