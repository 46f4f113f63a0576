"""Shell scripts that start jobs: each is read as bash runs it, or refused by the line that is not understood."""

import random
import shutil

import pytest
from support.cases import every
from support.commands import here
from support.shell_forms import cases, outcome

from ablate.errors import InputError
from ablate.recipes import PRESETS
from ablate.recipes.targets import TARGETS, Model
from ablate.recipes.targets.jobs import Job

JOB = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --fp4-format e2m1 --fp4-recipe nvfp4 --num-layers 32"
)
OFF = "NVTE_NVFP4_DISABLE_RHT"
SCRIPTS = {
    "prefix": (f"{OFF}=1 \\\n  {JOB}", 1),
    "comment": (f"export {OFF}=1  # hurts here\n{JOB}", 1),
    "two on a line": (f"export {OFF}=1 CUDA_DEVICE_MAX_CONNECTIONS=1\n{JOB}", 1),
    "default": (f"export {OFF}=${{NO_RHT:-1}}\n{JOB}", 1),
    "not exported": (f"{OFF}=1\n{JOB}", 0),
    "after a change of folder": (f"cd / && {JOB}", 0),
    "exported and then": (f"export {OFF}=1 && {JOB}", 1),
    "after a folder that may be missing": (f"cd /no && export {OFF}=1\n{JOB}", f":2: {OFF} "),
    "after a test": (f'[ -n "$NO" ] && export {OFF}=1\n{JOB}', f":2: {OFF} "),
    "after a test and a change of folder": (f'[ -n "$NO" ] && cd / && {OFF}=1 {JOB}', f":2: {OFF} "),
    "after another": (f"cd / || export {OFF}=1\n{JOB}", f":2: {OFF} "),
    "docker": (f"docker run -e {OFF}=1 my/image {JOB}", 1),
    "docker and its options": (f"docker run --rm -v /a:/b --env={OFF}=1 --gpus all my/image {JOB}", 1),
    "docker by name": (f"export {OFF}=1\npodman run --rm -e {OFF} my/image {JOB}", 1),
    "docker without": (f"export {OFF}=1\ndocker run --rm my/image {JOB}", 0),
    "docker and a file": (f"docker run --env-file job.env my/image {JOB}", ":2: --env-file"),
    "docker and what is not known": (f"docker run $MORE my/image {JOB}", ":2: ? of docker"),
    "docker and a shell": (f"docker run -e {OFF}=1 my/image bash -c '{JOB}'", f":2: {OFF} "),
    "docker and a name that is not known": (
        f"export {OFF}=1\ndocker run -e $MORE my/image {JOB}",
        ":3: ?= of",
    ),
    "podman and names that begin alike": (
        f"export {OFF}=1\npodman run -e 'NVTE_*' my/image {JOB}",
        ":3: NVTE_*=",
    ),
    "docker's name": (f"export {OFF}=1\nsrun --job-name docker {JOB}", ":3: torchrun "),
    "env without": (f"export {OFF}=1\nenv -u {OFF} {JOB}", 0),
    "env alone": (f"export {OFF}=1\nenv -i A=1 {JOB}", 0),
    "env and an option that is not read": (
        f"export {OFF}=1\nenv -S A=1 {JOB}",
        ":3: torchrun is handed to env -S",
    ),
    "env emptied in full": (f"export {OFF}=1\nenv --ignore-environment {JOB}", 0),
    "env of what is not known": (f"export {OFF}=1\nenv -u A $MORE {JOB}", ":3: ? of env"),
    "the option of the program behind env": (f"export {OFF}=1\nenv -u A stdbuf -i 0 {JOB}", 1),
    "a program that is not known": (f"export {OFF}=1\n$LAUNCHER {JOB}", ":3: torchrun is handed to ?"),
    "a program that is not read": (f"export {OFF}=1\napptainer exec --cleanenv it {JOB}", ":3: torchrun "),
    "srun and a container": (f"export {OFF}=1\nsrun apptainer exec -e it {JOB}", ":3: torchrun "),
    "srun and all in small letters": (f"export {OFF}=1\nsrun --export=all {JOB}", 1),
    "srun and a name that is not known": (f"export {OFF}=1\nsrun --export=ALL,$MORE {JOB}", ":3: ?= of srun"),
    "srun and all": (f"srun --nodes 4 --export=ALL,{OFF}=1 {JOB}", 1),
    "srun by name": (f"export {OFF}=1\nsrun --export {OFF},A=1 {JOB}", 1),
    "srun without": (f"export {OFF}=1\nsrun --export=NONE {JOB}", 0),
    "srun and what is not known": (f"srun --export=ALL,{OFF}=$1 {JOB}", f":2: {OFF}=? of srun"),
    "ray": (
        f'ENV_JSON="{{\\"env_vars\\": {{\\"{OFF}\\": \\"1\\"}}}}"\n'
        f'ray job submit --runtime-env-json="$ENV_JSON" -- {JOB}',
        1,
    ),
    "ray and another job's environment": (f"export {OFF}=1\nray job submit -- {JOB}", 0),
    "ray and a variable within another": (
        f'ray job submit --runtime-env-json=\'{{"env_vars": {{"A": {{"{OFF}": "1"}}}}}}\' -- {JOB}',
        ":2: --runtime-env-json={",
    ),
    "ray and a variable elsewhere": (
        f'ray job submit --runtime-env-json=\'{{"container": ["-e {OFF}=1"]}}\' -- {JOB}',
        ":2: --runtime-env-json={",
    ),
    "ray and no JSON": (f"ray job submit --runtime-env-json='{{' -- {JOB}", ":2: --runtime-env-json={"),
    "ray and JSON without an end": (
        f"ray job submit --runtime-env-json='{'[' * 100_000}' -- {JOB}",
        ":2: --runtime-env-json=[",
    ),
    "launch": (
        'PRECISION=${PRECISION:-bf16}\ncase "$PRECISION" in\n  bf16) FLAGS=(--bf16) ;;\n'
        "  fp4) FLAGS=(--bf16 --fp4-format e2m1 --fp4-recipe nvfp4) ;;\nesac\n"
        'torchrun pretrain_gpt.py --num-layers 32 "${FLAGS[@]}"',
        ":4: --bf16 ",
    ),
    "default of what a branch may set": (
        'if [ -n "$1" ]; then MORE="--seed 1"; fi\n'
        "torchrun pretrain_gpt.py --bf16 ${MORE:---fp4-format e2m1 --fp4-recipe nvfp4}",
        ":3: ${MORE:---fp4-format e2m1 --fp4-recipe nvfp4}: it is not known whether the job gets --fp4-format",
    ),
    "another default of what a branch may set": (
        f'if [ -n "$1" ]; then MORE=1; fi\n{JOB} --seed ${{MORE:-2}}',
        0,
    ),
    "loop": (f"for OFF in 0 1; do\n  {OFF}=$OFF {JOB}\ndone", f":3: {OFF} "),
    "two jobs": (f"torchrun pretrain_gpt.py --bf16 --save base\n{JOB} --save ours", ":3: more than one "),
}
"""Scripts with the exit status of their audit for nvfp4, or the place and the name of what is refused."""


@every(name=SCRIPTS)
def test_a_script_is_audited_whole_or_refused_by_its_line(name, tmp_path):
    text, expected = SCRIPTS[name]
    script, recipe = tmp_path / "job.sh", tmp_path / "recipe.yaml"
    script.write_text(f"#!/bin/bash\n{text}\n")
    done = here("recipe", "audit", "nvfp4", "--script", script)
    made = here("recipe", "import", "--script", script, "-o", recipe)
    if isinstance(expected, int):
        assert (done.returncode, made.returncode, done.stderr) == (expected, 0, "")
        assert ("hadamard: null" in recipe.read_text().partition("wgrad:")[2]) is bool(expected)
    else:
        assert (done.returncode, done.stdout, made.returncode) == (2, "", 2)
        assert f"{script}{expected}" in done.stderr
        assert "--megatron-args" in done.stderr
        assert "--env" in made.stderr


BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to compare with")


@BASH
def test_scripts_drawn_from_all_forms_get_the_answer_of_bash_or_none(tmp_path):
    """`python -m support.shell_forms`, in tests/, compares all of them: some minutes."""
    drawn = random.Random(5).sample(list(cases()), 30)
    wrong = {
        name: found for name, text in drawn if (found := outcome(text, tmp_path)) not in ("right", "refused")
    }
    assert wrong == {}


READ = {
    "slurm": """#SBATCH --nodes=4
        set -euo pipefail
        module load cuda
        source /opt/venv/bin/activate
        export CUDA_DEVICE_MAX_CONNECTIONS=1
        GPUS=$(nvidia-smi -L | wc -l)
        if [ ! -d logs ]; then mkdir logs; fi
        MODEL_ARGS=(
            --num-layers 32  # it's deep
            --hidden-size 4096
        )
        # PRECISION=(--fp8-format hybrid)
        PRECISION=(--bf16 --fp4-format e2m1)
        srun torchrun --nproc-per-node $GPUS pretrain_gpt.py "${MODEL_ARGS[@]}" "${PRECISION[@]}" \\
            --save $1 "$@" 2>&1 | tee logs/$(date +%s).txt || exit 1""",
    "options in a text": """OPTIONS="
            --bf16 \\
            --fp4-format e2m1
        "
        RECIPE=nvfp4
        python -m torch.distributed.run pretrain_gpt.py $OPTIONS --fp4-recipe $RECIPE > log.txt 2>&1 &
        wait""",
    "arguments alone": """--bf16
        --fp4-format e2m1
        --num-layers $LAYERS""",
    "echoed": f"""echo "{OFF}=1 and --fp8-format hybrid are slower"
        env | grep NVTE_
        {JOB}""",
}
"""Scripts of jobs that train by nvfp4."""


@every(name=READ)
def test_usual_scripts_of_launchers_are_read(name, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("\n".join(line.strip() for line in READ[name].splitlines()) + "\n")
    recipe, _ = Job(script=script).in_force()
    assert recipe.products == PRESETS["nvfp4"]().products


def test_an_exported_file_is_read_where_a_script_sources_it(tmp_path):
    job, script = 'torchrun pretrain_gpt.py --num-layers 32 "${PRECISION_ARGS[@]}"', tmp_path / "job.sh"
    (tmp_path / "precision.sh").write_text(TARGETS["megatron"].write(PRESETS["nvfp4"](), Model("it")))
    script.write_text(f"source precision.sh\n{job}\n")
    assert Job(script=script).in_force()[0].products == PRESETS["nvfp4"]().products
    script.write_text(f"source other.sh\n{job}\n")
    with pytest.raises(InputError, match=r"job\.sh:1: other\.sh"):
        Job(script=script).in_force()


ENVIRONMENTS = {
    f"{OFF}=1": True,
    f"export {OFF}=1  # hurts": True,
    f"export A=1 {OFF}=1": True,
    f'declare -x {OFF}="1"': True,
    f"# {OFF}=1": False,
    f"{OFF}=1\nunset {OFF}": False,
    "PS1='it': isn't (": False,
    f"NO=1\n{OFF}=${{NO}}": True,
    f"{OFF}: 1": None,
    f"{OFF} = 1": None,
    f'{{"{OFF}": "1"}}': None,
    f"{OFF}=$(cat off)": None,
}
"""Files of variables, and True if the rotation is off; None: refused."""


@every(text=ENVIRONMENTS)
def test_each_line_of_an_environment_that_names_te_is_read_or_refused(text, tmp_path):
    file, off = tmp_path / "job.env", ENVIRONMENTS[text]
    file.write_text(text + "\n")
    job = Job(arguments="--fp4-format e2m1", environment=file)
    if off is None:
        with pytest.raises(InputError, match=rf"job\.env:1: .*{OFF}"):
            job.in_force()
    else:
        assert (job.in_force()[0].wgrad.hadamard is None) is off


@every(variable=("NVTE_NVFP4_4OVER6", "NVTE_NVFP4_4OVER6_E4M3_USE_256"))
def test_a_scope_that_te_does_not_have_is_refused_by_name(variable):
    done = here("recipe", "import", "--megatron-args", "--fp4-format e2m1", **{variable: "9"})
    assert (done.returncode, "9: one of none, activations, weights, all" in done.stderr) == (2, True), (
        done.stderr
    )


BATCH = {
    "no option": ("", f"srun {JOB}", True),
    "none": ("--export=NONE", f"srun {JOB}", False),
    "none, and a variable of the script": ("--export NONE", f"export {OFF}=1\nsrun {JOB}", False),
    "none, without srun": ("--export=NONE", f"export {OFF}=1\n{JOB}", True),
    "nothing, without srun": ("--export=NIL", JOB, False),
    "none, which srun does not get": (
        "--export=NONE",
        f"unset SLURM_EXPORT_ENV\nexport {OFF}=1\nsrun {JOB}",
        True,
    ),
    "none, and all for srun": ("--export=none", f"export {OFF}=1\nsrun --export=ALL {JOB}", True),
    "none, and all by a variable": (
        "--export=NONE",
        f"export SLURM_EXPORT_ENV=ALL {OFF}=1\nsrun {JOB}",
        True,
    ),
    "all": ('--export="ALL,A=1"', f"srun {JOB}", True),
    "others by name": ("--export=PATH,HOME", f"srun {JOB}", False),
    "after other options": ("-N 2 --export=NONE --exclusive", f"srun {JOB}", False),
    "the last of two": ("--export=NONE\n#SBATCH --export=ALL", f"srun {JOB}", True),
    "in a comment on the options": ("--nodes=2 # --export=NONE", f"srun {JOB}", True),
    "after a command": ("--nodes=2", f"cd /\n#SBATCH --export=NONE\nsrun {JOB}", True),
    "a comment": ("--nodes=2", f"##SBATCH --export=NONE\n #SBATCH --export=NONE\nsrun {JOB}", True),
    "srun's own variable": ("", f"export SLURM_EXPORT_ENV=ALL SRUN_EXPORT_ENV=NONE\nsrun {JOB}", False),
    "the variable before srun": ("", f"SLURM_EXPORT_ENV=NONE srun {JOB}", False),
    "the variable in a branch": ("", f"if true; then export SLURM_EXPORT_ENV=NONE; fi\nsrun {JOB}", ":3: "),
    "the variable unknown": ("", f"export SLURM_EXPORT_ENV=$1\nsrun {JOB}", ":4: "),
    "a file": ("--export-file=job.env", f"srun {JOB}", ":2: --export-file"),
    "another scheduler": ("", f"#PBS -v {OFF}=0\nsrun {JOB}", f":3: {OFF} "),
}
"""Options of sbatch and lines of a script that is submitted where a variable is set: True if the job gets it."""


@every(name=BATCH)
def test_a_batch_script_gets_and_hands_on_the_variables_that_slurm_exports(name, tmp_path):
    option, lines, expected = BATCH[name]
    script, environment = tmp_path / "job.sh", tmp_path / "job.env"
    environment.write_text(f"{OFF}=1\nPATH=/usr/bin\n")
    script.write_text(f"#!/bin/bash\n#SBATCH {option}\n{lines}\n")
    job = Job(script=script, environment=environment)
    if isinstance(expected, str):
        with pytest.raises(InputError, match=rf"job\.sh{expected}"):
            job.in_force()
    else:
        recipe, variables = job.in_force()
        assert (OFF in variables, recipe.wgrad.hadamard is None) == (expected, expected)


def test_a_variable_of_the_submitting_shell_decides_what_a_batch_script_gets(tmp_path):
    """Slurm's `SBATCH_EXPORT` overrides the options in a script, and says nothing to bash."""
    script, environment = tmp_path / "job.sh", tmp_path / "job.env"
    environment.write_text(f"{OFF}=1\nSBATCH_EXPORT=NONE\n")
    for head, expected in (("#SBATCH --export=ALL\n", False), ("#SBATCH -N 1\n", False), ("", True)):
        script.write_text(f"#!/bin/bash\n{head}{JOB}\n")
        _, variables = Job(script=script, environment=environment).in_force()
        assert (OFF in variables) is expected
    environment.write_text(f"{OFF}=1\nexport SLURM_EXPORT_ENV=ALL  # as it was\n")
    script.write_text(f"srun {JOB}\n")
    assert OFF in Job(script=script, environment=environment).in_force()[1]


def test_an_exported_array_without_items_is_no_variable(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"export A=()\n{JOB}\n")
    assert "A" not in Job(script=script).in_force()[1]


LAUNCH = {
    f"if [ -f env.sh ]; then . ./env.sh; fi\n{JOB}": None,
    f"[ -f env.sh ] && source env.sh\n{JOB}": None,
    f"for f in *.sh; do source $f; done\n{JOB}": None,
    f"load() {{ source env.sh; }}\nload\n{JOB}": None,
    f"source nested.sh\n{JOB}": None,
    f"export $(grep -v '^#' .env | xargs)\n{JOB}": None,
    f'eval "$(cat env.sh)"\n{JOB}': None,
    f'while IFS= read -r l; do export "$l"; done < .env\n{JOB}': None,
    f"eval `cat env.sh`\n{JOB}": None,
    f"eval export $(cat .env)\n{JOB}": None,
    f"cd $SUBMITTED\nsource env.sh\n{JOB}": None,
    f"cd sub\nsource env.sh\n{JOB}": False,
    f"source env.sh\n{JOB}": True,
    f'cd "$(dirname "$0")"\nsource env.sh\n{JOB}': True,
    f'source "$(dirname "$0")/env.sh"\n{JOB}': True,
    f'HERE="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"\nsource "$HERE/env.sh"\n{JOB}': True,
    f"source ended.sh\n{JOB}": None,
    f"cp prod.env env.sh\nsource env.sh\n{JOB}": None,
    f"sed s/a/b/ job.tpl > env.sh\n. ./env.sh\n{JOB}": None,
    f"cat job.tpl | tee env.sh\nsource env.sh\n{JOB}": None,
    f"python make.py --out env.sh\nsource env.sh\n{JOB}": None,
    f"ls env.sh\nsource env.sh\n{JOB}": True,
    f"cp prod.env other.sh\nsource env.sh\n{JOB}": True,
    f"srun --task-prolog=env.sh {JOB}": None,
    "bash train.sh": None,
    "srun ./train.sh": None,
    f"ARGS='{JOB}'; export ARGS; srun bash -c '$ARGS'": None,
    "": None,
    f"echo {JOB}": None,
    f"{JOB} --yaml-cfg conf.yaml": None,
    f"export {OFF}=1\nenv -i PATH=$PATH {JOB}": False,
    f"A=1\nexport B=$A {OFF}=$B\n{JOB}": None,
    f"#!/bin/bash\r\n{JOB}\r\n": None,
    f'A=(--fp4-format e2m1 nvfp4)\nunset "A[2]"\n{JOB} "${{A[@]}}"': None,
    f'eval "$(conda shell.bash hook)"\n{JOB}': False,
    f"time {JOB}": False,
    f"timeout 3600 nice -n 10 {JOB}": False,
    f"if [ ! -d logs ]; then mkdir logs; cd logs; fi\n{JOB}": False,
}
"""Scripts in a folder with other files: True if their job trains without rotation, None: refused by a line."""


@every(text=LAUNCH)
def test_what_may_set_a_variable_unseen_is_refused(text, tmp_path):
    for name, content in {
        "env.sh": f"export {OFF}=1\n",
        ".env": f"{OFF}=1\n",
        "nested.sh": "if true; then source env.sh; fi\n",
        "ended.sh": f"return 0\nexport {OFF}=1\n",
        "sub/env.sh": "export OTHER=1\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    script, off = tmp_path / "job.sh", LAUNCH[text]
    script.write_bytes(text.encode() if text.startswith("#!") else f"#!/bin/bash\n{text}\n".encode())
    job = Job(script=script)
    if off is None:
        with pytest.raises(InputError, match=r"\.sh:\d+: .*--megatron-args"):
            job.in_force()
    else:
        assert (job.in_force()[0].wgrad.hadamard is None) is off
