"""Every command that README, docs and the Makefile print exists and parses; each is in a table that names the test that runs it."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from support.cases import every
from support.commands import here
from support.experiments import environment

from ablate.cli import commands, recipe

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name != "upstream.md"
]
"""Pages, but for the one on faults of other libraries, whose commands need those."""
SCRIPTS = sorted(
    {
        path.parent
        for name in ("benchmarks", "docker", "tests", "analysis")
        for path in (ROOT / name).rglob("*.py")
    }
)
"""Folders whose files are run as scripts: Python looks for modules there first."""

VERBS = {
    "ablate bench kernels": "verification/test_bench.py",
    "ablate bench linear": "verification/test_bench.py",
    "ablate bench step": "verification/test_bench.py",
    "ablate calibrate": "cli/test_calibrate.py",
    "ablate check": "training/workloads/test_python.py",
    "ablate collect": "execution/test_job_array.py",
    "ablate conform": "verification/test_conformance_faults.py",
    "ablate data prepare": "cli/test_data_command.py",
    "ablate doctor": "verification/test_doctor.py",
    "ablate init": "training/workloads/test_python.py",
    "ablate judge": "judging/test_judge.py",
    "ablate plan": "cli/test_commands.py",
    "ablate rank": "cli/test_rank_command.py",
    "ablate rebuild": "cli/test_rebuild.py",
    "ablate recipe audit": "recipes/test_recipe_targets.py",
    "ablate recipe diff": "cli/test_recipe_command.py",
    "ablate recipe export": "recipes/test_recipe_targets.py",
    "ablate recipe import": "recipes/test_recipe_targets.py",
    "ablate recipe show": "cli/test_recipe_command.py",
    "ablate report": "reports/test_report.py",
    "ablate run-task": "execution/test_job_array.py",
    "ablate show": "cli/test_export.py",
    "ablate status": "cli/test_status.py",
    "ablate stop": "cli/test_stop.py",
    "ablate sweep": "cli/test_commands.py",
    "ablate ui": "cli/test_ui.py",
}
"""The test file that runs each verb at its smallest size."""
OTHERS = {
    "docker run": "needs Docker; in a script that is read: recipes/test_shell_scripts.py",
    "docker compose": "needs Docker: house/test_docker.py and execution/test_compose_services.py",
    "export RAY_": "environment of Ray: execution/test_cluster.py",
    "make": "below",
    "pip install": "needs a package index: house/test_wheel.py",
    'python -c "from ablate.execution.trial_process import *; tune_process(); rehearse()"': "below",
    "python tests/mutants/conformance/run.py": "verification/test_conformance_mutants.py",
    "python benchmarks/conformance.py": "the page: house/test_docs.py; needs the libraries to examine them",
    "python benchmarks/exhaustive_cast.py": "verification/test_exhaustive.py tests its enumerations",
    "python benchmarks/many_arms.py": "by hand; tests have each of its commands",
    "python benchmarks/platform_costs.py": "verification/test_platform.py",
    "python benchmarks/same_numbers.py": "needs two revisions and minutes; by hand before a release",
    "python benchmarks/peers.py": "below",
    "python benchmarks/calibration_line.py": "results/test_fork_benchmarks.py",
    "python benchmarks/demo_design.py": "results/test_fork_benchmarks.py",
    "python benchmarks/equal_compute.py": "results/test_fork_benchmarks.py",
    "python benchmarks/expert_families.py": "engines/test_expert_families.py",
    "modal run docker/cloud/modal_app.py": "cli/test_cloud.py",
    "modal setup": "needs an account with Modal",
    "export MODAL_GPU": "environment of the command above",
    "python benchmarks/validity.py": "results/test_fork_benchmarks.py",
    "python benchmarks/rank_evidence.py": "cli/test_rank_command.py",
    "python benchmarks/transfer.py": "results/test_transfer_benchmark.py",
    "python benchmarks/sensitivity_proof.py": "results/test_fork_benchmarks.py",
    "python benchmarks/fork_designs.py": "results/test_fork_benchmarks.py",
    "python benchmarks/gpu_estimates.py": "training/test_gpu_estimates.py",
    "python benchmarks/simulated_truth.py": "results/test_simulated_truth.py",
    "python benchmarks/gate_loops.py": "results/test_proposals.py",
    "python benchmarks/blame_simulation.py": "results/test_blame.py",
    "python -m pytest": "is this suite",
    "python docs/generate_reference.py": "house/test_docs.py",
    "python docs/generate_tensor_cores.py": "recipes/test_scaled_mapping.py",
    "python benchmarks/gpu_counts.py": "training/test_gpu_estimates.py",
    "python tests/mutants/compare.py": "mutants/test_mutants.py",
    "python tests/golden_answers.py": "house/test_golden_answers.py",
    "python tests/lint_weight.py": "house/test_weight.py, and is a part of `make lint`",
    "python benchmarks/startup.py": "cli/test_startup.py",
    "python tests/regenerate_imaginary_gpu.py": "training/test_imaginary_gpu.py",
    "python tests/regenerate_recipes_page.py": "recipes/test_recipes_page.py",
    "python tests/regenerate_golden.py": "recipes/test_ids.py",
    "python3 -m venv": "Python's own",
    "ray get-auth-token": "Ray's own, needs a cluster",
    "ray job submit": "needs a cluster: test_cluster.py; its ablate command is parsed here",
}
"""Beginnings of commands that are not parsed here, with the test that runs them or what they need."""
TARGETS = {
    "demo": "cli/test_commands.py runs sweeps",
    "test": "is this suite",
    "test-fast": "is a part of this suite",
    "test-all": "is this suite with every case",
    "chaos": "chaos/test_chaos.py runs a sample",
    "mutants": "mutants/test_mutants.py",
    "mutants-by-hand": "mutants/test_mutants.py",
    "coverage-map": "mutants/test_mutants.py",
    "pages": "house/test_docs.py and recipes/test_recipes_page.py",
    "peers": "its scripts are started below; the peers need an environment of their own",
    "platform": "verification/test_platform.py",
    "env": "house/test_docker.py",
    "lint": "ruff",
    "schema": "house/test_docs.py",
    "clean": "removes folders",
}

_HEAD = re.compile(
    r"(?:[A-Z_]+=\S* )*(?:(?:ablate|make|docker|modal|ray|pip|sbatch|srun|export|kill)\s|python3?\s+(?:-m\s+)?\S+)"
)


def printed() -> Iterator[str]:
    """The commands in code blocks and inline code, each once, without prompts, comments and line breaks."""
    found: dict[str, None] = {}
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if language in ("", "bash", "sh", "console"):
                for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                    found[re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ "))] = None
        inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
        found |= dict.fromkeys(" ".join(code.split()) for code in inline)
    return (command for command in found if _HEAD.match(command))


def words_of(command: str) -> list[str] | None:
    """The words of the `ablate` command that this is or holds; None where there is none."""
    command = re.split(r"\s(?:&&|\||>|&)(?:\s|$)", f"{command} ")[0]
    match = re.search(r"(?:^|\s)(?:ablate\s|python3? -m ablate[.\s])(.*)", command)
    return (
        None
        if match is None or re.match(r"(pip |docker |python benchmarks/)", command)
        else shlex.split(match[1])
    )


def parse(words: list[str]) -> str:
    """The verb that is called. An exception of the parser where verb, options or arguments do not exist."""
    node, name, rest = typer.main.get_command(commands.whole_app()), "ablate", list(words)
    while rest and (inner := getattr(node, "commands", {}).get(rest[0])):
        node, name = inner, f"{name} {rest.pop(0)}"
    assert not hasattr(node, "commands"), f"{' '.join(words)}: no such verb"
    if rest:  # a verb alone is a mention of it
        node.make_context(name, rest)
    return name


COMMANDS = sorted(printed())


def test_commands_are_found_in_the_documents():
    assert {"make demo", "ablate report rht_sr", "python -m ablate.sweep experiments/rht_sr.yaml"} <= set(
        COMMANDS
    )


@every(command=COMMANDS)
def test_a_printed_command_exists_and_is_in_the_table(command):
    words = words_of(command)
    if words is not None:
        assert parse(words) in VERBS
    else:
        assert any(command.startswith(known) for known in OTHERS), (
            f"{command}: name in OTHERS how it is tested"
        )


@pytest.mark.parametrize(
    "words",
    [
        "plan --no-such X.yaml",
        "plann X.yaml",
        "bench linear --tokens many",
        "sweep X.yaml --executor none",
        "status --every",
    ],
)
def test_a_command_that_does_not_exist_is_seen(words):
    with pytest.raises(BaseException, match=r"(?i)no such|valid|requires|unexpected|is not"):
        parse(words.split())


def verbs(node: click.Command, name: str = "ablate") -> Iterator[str]:
    """The commands that have no commands below them."""
    inner = getattr(node, "commands", None)
    if inner is None:
        yield name
    for word, command in (inner or {}).items():
        yield from verbs(command, f"{name} {word}")


def test_the_table_has_every_verb():
    assert sorted(verbs(typer.main.get_command(commands.whole_app()))) == sorted(VERBS)


@every(verb=VERBS)
def test_the_table_names_a_test_that_runs_the_verb(verb):
    assert parse(verb.split()[1:]) == verb
    text = (ROOT / "tests" / VERBS[verb]).read_text(encoding="utf-8")
    assert (
        f'"{verb.split()[-1]}"' in text
        or f"ablate.{verb.split()[-1]}" in text
        or f"import {verb.split()[-1]}" in text
    )


@pytest.mark.parametrize(
    "words",
    ["recipe show nvfp4", "recipe diff nvfp4 quartet2", "status --settings", "plan experiments/rht_sr.yaml"],
)
def test_what_takes_a_moment_runs_as_printed(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = here(*words.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout


# The Makefile, and scripts


def _make(*words: str) -> str:
    if not shutil.which("make"):
        pytest.skip("there is no make")
    return subprocess.run(
        ["make", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    ).stdout


def test_every_make_target_is_in_the_table():
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(phony.split()) == set(TARGETS)
    for command in COMMANDS:
        if command.startswith("make "):
            assert command.split()[1] in TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_make_target_calls_is_there(target):
    """The scripts, modules and `ablate` commands of its recipe, as make would run them."""
    calls = 0
    for line in _make("-n", "--always-make", target).splitlines():
        if (match := re.search(r"python3? (?!-)(\S+\.py)", line)) and not line.startswith("#"):
            calls += 1
            assert (ROOT / match[1]).is_file(), line
        elif match := re.search(r"(?:bin/ablate |-m ablate[. ])(.*?)(?: >|$)", line):
            calls += 1
            assert parse(shlex.split(match[1])) in VERBS
    assert calls or target in ("test", "test-fast", "test-all", "lint", "clean")


@pytest.mark.parametrize("script", ["peers.py", "conformance.py", "exhaustive_cast.py", "platform_costs.py"])
def test_a_benchmark_starts(script):
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "help" in done.stdout


def test_what_the_peers_need_of_this_project_can_be_imported():
    """In the folder of the benchmarks, as `make peers` runs them: also what is imported within their functions."""
    program = "import peers, libraries, uuid, platform; uuid.uuid1(); platform.system()"
    environ = environment() | {"PYTHONPATH": f"{ROOT / 'benchmarks'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@every(folder=SCRIPTS)
def test_no_script_hides_a_module_of_the_standard_library(folder):
    names = {path.stem for path in folder.glob("*.py")} | {
        path.name for path in folder.iterdir() if (path / "__init__.py").is_file()
    }
    assert not names & sys.stdlib_module_names


def test_the_help_names_every_verb_about_recipes():
    verbs = typer.main.get_command(recipe.app).commands
    _, about = commands.VERBS["Every day"]["recipe"]
    assert {verb for verb in verbs if verb not in re.sub(r"[^\w ]", " ", about).lower().split()} == set()


STATELESS = {
    "`ablate sweep X.yaml": "a help text, or a mistake in a flag of the command that was typed",
    "`ablate status` ": "a help text, or a mention",
    "`ablate judge`": "the command that was typed, again",
    "`ablate judge --into`": "a mention",
    "`ablate plan`": "the command that was typed, as a plan",
    "`ablate ui ": "the command that was typed, with a word more",
    "`ablate recipe diff`": "a mention",
    "{named}": "a name with the option",
}
"""Commands in sentences of the program that are printed without a state folder, and why."""


def sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of the strings in code, with their holes as source; no docstrings."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and id(node) not in parts):
            holes = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [
                str(hole.value) if isinstance(hole, ast.Constant) else ast.unparse(hole) for hole in holes
            ]
            yield node.lineno, "".join(map(str, texts))


def test_each_command_that_the_program_prints_names_the_state_folder():
    takes = [verb for verb in VERBS if "--state" in here(*verb.split()[1:], "--help").stdout]
    assert {"ablate sweep", "ablate collect", "ablate rebuild", "ablate report"} <= {*takes}
    command = re.compile(rf"(?:{'|'.join(takes)})(?=[`\s{{])")
    without = []
    for package in ("cli", "execution", "judging", "reports", "results", "store"):
        for path in sorted((ROOT / "ablate" / package).rglob("*.py")):
            for line, text in sentences(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    command.search(text)
                    and "option" not in text
                    and not any(map(text.__contains__, STATELESS))
                ):
                    without.append(f"{path.name}:{line}: {text}")
    assert not without, "\n".join(without)
