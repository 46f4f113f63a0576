"""Shell scripts that set one variable or option in many forms, and what bash hands to the job of each.

`python -m support.shell_forms` in tests/ compares the answer of `ablate recipe audit` with bash for all of them.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from ablate.errors import InputError
from ablate.recipes.targets.jobs import Job
from ablate.recipes.targets.megatron import VARIABLES, read

VALUES = {
    "NVTE_NVFP4_4OVER6": "all",
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": "none",
    "NVTE_NVFP4_4OVER6_ERR_MODE": "MSE",
    "NVTE_BACKWARD_OVERRIDE": "dequantized",
}
"""Values of the variables that are not switches."""
NAMES = (*VARIABLES, "NVTE_USE_FAST_MATH")
ASSIGNMENTS = {
    "export": "export N=V",
    "quoted": "export N='V'",
    "quoted name": 'export "N=V"',
    "two on a line": "export A=1 N=V B=2",
    "semicolons": "A=1; export N=V; B=2",
    "comment after": "export N=V  # it's measured",
    "declare": "declare -x N=V",
    "declare alone": "declare N=V",
    "typeset global": "typeset -gx N=V",
    "not exported": "N=V",
    "exported later": "N=V\nexport N",
    "exported before": "export N\nN=V",
    "all exported": "set -a\nN=V\nset +a",
    "all exported by name": "set -o allexport; N=V; set +o allexport",
    "all exported later": "N=V\nset -a",
    "default": "export N=${NOWHERE:-V}",
    "default in a default": 'export N="${NOWHERE:-${NOR_HERE-V}}"',
    "of a variable": "X=V\nexport N=$X",
    "of a reassigned variable": "X=V\nX=9\nexport N=$X",
    "assigned by an expansion": ": ${N:=V}\nexport N",
    "name of a variable": "X=N\nexport $X=V",
    "appended": "export N=\nN+=V",
    "unset": "export N=V\nunset N",
    "unset and set": "export N=V\nunset N\nN=V",
    "not exported any more": "export N=V\nexport -n N",
    "exported off": "export N=V\ndeclare +x N",
    "changed": "export N=9\nN=V",
    "readonly": "readonly N=V\nexport N",
    "branch": "if true; then export N=V; fi",
    "branch not taken": "if false; then\n  export N=V\nfi",
    "branch of a value": "X=9\nif true; then X=V; fi\nexport N=$X",
    "case": "case $HOME in /nowhere) export N=9 ;; *) export N=V ;; esac",
    "loop": "for X in 9 V; do export N=$X; done",
    "value of a loop": "for X in 9 V; do true; done\nexport N=$X",
    "while": "while read X; do export N=$X; done <<< V",
    "function": "f() { export N=V; }\nf",
    "function not called": "function f {\n  export N=V\n}",
    "function of a value": "f() { X=V; }\nX=9\nf\nexport N=$X",
    "group": "{ export N=V; }",
    "subshell": "(export N=V)",
    "condition": '[ -n "$HOME" ] && export N=V',
    "condition in double brackets": '[[ -n "$NOWHERE" ]] && export N=V',
    "condition not met": "false && export N=V",
    "alternative": "true || export N=V",
    "after a change of folder": "cd . && export N=V",
    "after a missing folder": "cd /nowhere/at/all && export N=V",
    "eval": "eval export N=V",
    "eval of a text": 'X="N=V"; eval "export $X"',
    "substituted": "export N=$(echo V)",
    "substituted in backticks": "export N=`echo V`",
    "arithmetic": "export N=$((0 + V))",
    "arithmetic in brackets": "export N=$[0 + V]",
    "arithmetic in brackets and quotes": 'export N="$[0 + V]"',
    "translated": 'export N=$"V"',
    "braces": "export N={9,V}",
    "braces before a command": "N={9,V} true\nexport N=V",
    "pipe": "export N=V | cat",
    "background": "export N=V &",
    "read": "read -r N <<< V\nexport N",
    "printf": "printf -v N %s V\nexport N",
    "here-document": "cat > made.sh <<'EOF'\nexport N=V\nEOF\nsource ./made.sh",
    "here-document not read": "cat > made.txt <<EOF\nexport N=V\nEOF",
    "echoed to a file": "echo export N=V > made.sh\n. ./made.sh",
    "sourced": "source ./sourced.sh",
    "sourced by another": "source ./outer.sh",
    "sourced from nowhere": "source ./missing.sh",
    "dollar quote": "export N=$'V'",
    "array": "export N=(V)",
    "element": "N[0]=V; export N",
    "comment": "# export N=V",
    "echo": 'echo "export N=V"',
    "grep": "env | grep N=V",
    "trap": "trap 'export N=V' EXIT",
    "alias": "alias torchrun='N=V torchrun'",
    "continued": "export \\\n  N=V",
    "continued comment": "# export A=1 \\\nexport N=V",
    "exit before": "exit 0\nexport N=V",
    "negated": "! export N=V",
    "timed": "time export N=V",
    "launcher again": "export N=9\ntorchrun --version\nexport N=V",
}
"""Lines that set, or seem to set, a variable N to V."""
WRAPPINGS = {
    "prefix": "N=V JOB",
    "prefix on its own line": "N=V \\\n  JOB",
    "two prefixes": 'A=1 N="V" JOB',
    "prefix of its own value": "N=V X=$N JOB",
    "env": "env A=1 N=V JOB",
    "empty env": "env -i PATH=$PATH SEEN=$SEEN N=V JOB",
    "without": "export N=V\nenv -u N JOB",
    "nohup env": "nohup env N=V JOB",
    "exec": "N=V exec JOB",
    "container": "docker run -e N=V my/image JOB",
    "container without": "export N=V\ndocker run my/image JOB",
    "bash": "export N=V\nbash -c 'JOB'",
    "bash with a prefix": "bash -c 'N=V JOB'",
    "eval": "eval N=V 'JOB'",
    "command in a text": "X='JOB'\nexport N=V\n$X",
    "loop": "for X in 9 V; do N=$X JOB; done",
    "job in a branch": "export N=V\nif true; then JOB; fi",
    "two jobs": "JOB\nN=V JOB",
    "function": 'f() { "$@"; }\nN=V f JOB',
    "subshell": "(export N=V; JOB)",
    "after a condition": 'export N=V\n[ -n "$NOWHERE" ] || JOB',
    "background": "N=V JOB &\nwait",
    "pipe": "N=V JOB 2>&1 | cat",
    "log": "N=V JOB > log.txt 2>&1",
    "srun": "srun --export=ALL,N=V JOB",
    "srun of some": "export N=V\nsrun --export A=1,N JOB",
    "srun of none": "export N=V\nsrun --export=NONE JOB",
    "srun of all": "export N=V\nsrun JOB",
    "srun of none by a variable": "export N=V SLURM_EXPORT_ENV=NONE\nsrun JOB",
    "srun of none by its prefix": "export N=V\nSLURM_EXPORT_ENV=NONE srun JOB",
    "srun of some by a variable": "export N=V SLURM_EXPORT_ENV=N,A=1\nsrun JOB",
    "srun of all after none": "export SLURM_EXPORT_ENV=NONE\nexport N=V\nunset SLURM_EXPORT_ENV\nsrun JOB",
    "srun of none in a branch": "export N=V\nif true; then export SLURM_EXPORT_ENV=NONE; fi\nsrun JOB",
    "container by name": "N=V docker run -e N my/image JOB",
    "Ray": """ray job submit --runtime-env-json='{"env_vars": {"N": "V"}}' -- JOB""",
    "Ray without": "export N=V\nray job submit -- JOB",
}
"""Commands that start the job with a variable N of V."""
OPTIONS = {
    "straight": "JOB O W",
    "equals": "JOB O=W",
    "quoted": "JOB 'O' \"W\"",
    "array": 'F=(O W)\nJOB "${F[@]}"',
    "array on lines": "F=(\n  --bf16  # it's on\n  # --fp8-format hybrid\n  O W\n)\nJOB ${F[@]}",
    "array appended": "F=(--bf16)\nF+=(O W)\nJOB ${F[*]}",
    "array joined": 'F=(O W)\nJOB "${F[*]}"',
    "first of an array": "F=(--bf16 O W)\nJOB $F",
    "part of an array": 'F=(--bf16 O W)\nJOB "${F[@]:0:1}"',
    "array changed": 'F=(O W)\nF[1]=mxfp8\nJOB "${F[@]}"',
    "array emptied in a branch": 'F=(O W)\nif [ -n "$HOME" ]; then F=(); fi\nJOB "${F[@]}"',
    "array unset in a branch": 'F=(O W)\nif [ -n "$HOME" ]; then unset F; fi\nJOB "${F[@]}"',
    "array appended after a branch": 'F=()\nif [ -n "$HOME" ]; then F+=(--seed 1); fi\nF+=(O W)\nJOB "${F[@]}"',
    "text appended after a branch": 'F=\nif [ -n "$HOME" ]; then F="--seed 1"; fi\nF="$F O W"\nJOB $F',
    "array of another": 'F=(O W)\nG=("${F[@]}" --bf16)\nJOB ${G[@]}',
    "array not given": "F=(O W)\nJOB --bf16",
    "array unset": "F=(O W)\nunset F\nJOB ${F[@]}",
    "text": "F='O W'\nJOB $F",
    "quoted text": "F='O W'\nJOB \"$F\"",
    "text appended": "F=--bf16\nF+=' O W'\nJOB $F",
    "text with commas": "F=O,W; IFS=,\nJOB $F",
    "text on lines": 'F="\n  --bf16\n  O W\n"\nJOB $F',
    "two texts": "F='--bf16 '; G='O W'\nJOB $F$G",
    "value": "X=W\nJOB O $X",
    "value of a value": "X=W\nY=${X}\nJOB O ${Y:-mxfp8}",
    "value set before": "X=W\nX=9\nJOB O $X",
    "value unknown": "JOB O $NOWHERE",
    "value by default": "JOB O ${1:-W}",
    "value of a branch": "X=W\nif true; then X=9; fi\nJOB O $X",
    "value cut": "X=W.sh\nJOB O ${X%.sh}",
    "name in pieces": "X=format\nY=${X/format/W}\nP=O\nJOB $P W",
    "branch": 'F=()\nif [ -n "$NOWHERE" ]; then F+=(O W); fi\nJOB ${F[@]}',
    "branch of the job": 'F=(O W)\nif [ -n "$NOWHERE" ]; then JOB ${F[@]}; else JOB; fi',
    "loop": "for X in W; do JOB O $X; done",
    "positional": 'set -- O W\nJOB "$@"',
    "positional unset": 'JOB O W "$@"',
    "function": 'f() { JOB "$@"; }\nf O W',
    "indirect": "F='O W'; G=F\nJOB ${!G}",
    "alternate": "X=1\nJOB ${X:+O W}",
    "printed": "JOB $(echo O W)",
    "printed from a file": "JOB $(cat flags.txt)",
    "read from a file": 'F=\nwhile read X; do F+=" $X"; done < flags.txt\nJOB $F',
    "read in": "read -r F < flags.txt\nJOB $F",
    "comment between": "JOB \\\n  --bf16 \\\n  # O W \\\n  --seed 1",
    "comment after": "JOB --bf16  # O W",
    "after the end": "JOB --bf16\n  O W",
    "of the launcher": "torchrun O W pretrain_gpt.py",
    "another's value": "JOB --name 'O W'",
    "braces": "JOB {O,W}",
    "braces in a name": "JOB --{seed,first-last-layers-bf16,num-layers-at-end-in-bf16}=1",
    "braces of a value": "JOB O={9,W}",
    "two jobs": "JOB\nJOB O W",
    "another program": "python3 - O W < /dev/null\nJOB",
    "another alone": "echo O W\nJOB",
    "bash": "bash -c 'JOB O W'",
    "eval": "X='JOB O W'\neval $X",
    "command in a text": "X='JOB O W'\n$X",
    "array as a command": 'X=(JOB O W)\n"${X[@]}"',
    "escaped": "JOB \\\n  O \\\n  W",
    "given twice": "JOB O 9 O W",
}
"""Scripts that give, or seem to give, the job an option O with a value W."""
FILES = {
    "sourced.sh": "export NVTE_NVFP4_DISABLE_RHT=1\n",
    "outer.sh": "source ./sourced.sh\n",
    "flags.txt": "--fp8-format hybrid\n",
    "empty.env": "",
}
"""Files beside a script."""
GIVEN = (("--fp4-recipe", "nvfp4"), ("--fp8-recipe", "mxfp8"), ("--num-layers-at-end-in-bf16", "3"))
FRAME = """#!/bin/bash
#SBATCH --nodes=2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
FIRST
# The options of the model: NVTE_NVFP4_4OVER6=all was no better.
MODEL_ARGS=(
    --num-layers 32  # it's deep
    --hidden-size 4096
)
PRECISION_ARGS=(--bf16 --fp4-format e2m1)
MIDDLE
echo "NVTE_USE_FAST_MATH is ${NVTE_USE_FAST_MATH:-off}" >&2
LAST
STARTED
AFTER
"""
JOB = 'torchrun --nproc-per-node 8 pretrain_gpt.py "${MODEL_ARGS[@]}" ${PRECISION_ARGS[@]}'
PLACES = ("FIRST", "MIDDLE", "LAST", "AFTER")
CARRIER = """#!/usr/bin/env python3
import json, os, sys
words, kept = sys.argv[1:], {name: os.environ[name] for name in ("PATH", "SEEN")}
def given(items):
    pairs = [item.partition("=") for item in items]
    return {name: value if equals else os.environ[name] for name, equals, value in pairs
            if equals or name in os.environ}
def start(words):
    os.execvpe(words[0], words, kept)
"""
PROGRAMS = {
    "torchrun": '#!/bin/bash\nprintf "%s\\0" "$@" -- >> "$SEEN"; env -0 >> "$SEEN"; printf "==\\0" >> "$SEEN"\n',
    "docker": CARRIER
    + """
while words[1] == "-e":
    kept |= given([words[2]])
    del words[1:3]
start(words[2:])
""",
    "srun": CARRIER
    + """
option, equals, value = words[0].partition("=")
count, names = (1, value) if equals else (2, words[1])
if option != "--export":
    count, names = 0, os.environ.get("SLURM_EXPORT_ENV", "ALL")
names = names.split(",")
kept |= (dict(os.environ) if "ALL" in names else {}) | given(names)
start(words[count:])
""",
    "ray": CARRIER
    + """
kept |= json.loads(words[2].partition("=")[2] or "{}").get("env_vars", {})
start(words[words.index("--") + 1:])
""",
}
"""Programs that stand in for those of a cluster: they write what they get to a file."""


def framed(started: str, place: str = "", lines: str = "") -> str:
    """Return a script with lines at one of its places."""
    text = FRAME.replace("STARTED", started)
    for each in PLACES:
        text = text.replace(each, lines if each == place else "")
    return text.replace("set -euo pipefail\n", "")


def cases() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every script."""
    for name in NAMES:
        value = VALUES.get(name, "1")

        def filled(text: str, name: str = name, value: str = value) -> str:
            words = {"N": name, "V": value}
            return re.sub(r"\b[NV]\b", lambda match: words[match[0]], text)

        for form, lines in ASSIGNMENTS.items():
            for place in PLACES:
                yield f"{form}, {name}, {place}", framed(JOB, place, filled(lines))
        for form, command in WRAPPINGS.items():
            yield f"{form}, {name}", framed(filled(command).replace("JOB", JOB))
    for option, value in GIVEN:
        job = "torchrun pretrain_gpt.py --fp4-format e2m1" if "fp8" not in option else ""
        job = job or "torchrun pretrain_gpt.py --fp8-format hybrid"
        job += " --first-last-layers-bf16 --num-layers-at-start-in-bf16 1"
        for form, text in OPTIONS.items():
            words = {"O": option, "W": value, "JOB": job}
            yield (
                f"{form}, {option}",
                "#!/bin/bash\n"
                + re.sub(r"\b(?:JOB|[OW])\b", lambda m, words=words: words[m[0]], text)
                + "\n",
            )


def by_bash(script: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Return the arguments and the environment of each job that bash starts."""
    folder = script.parent
    for name, text in PROGRAMS.items():
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    seen = folder / "seen"
    seen.unlink(missing_ok=True)
    kept = {name: os.environ[name] for name in ("HOME",) if name in os.environ}
    environment = kept | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SEEN": str(seen)}
    subprocess.run(
        ["bash", script.name], cwd=folder, env=environment, capture_output=True, timeout=60, check=False
    )
    jobs = []
    for each in seen.read_bytes().decode().split("==\0")[:-1] if seen.exists() else []:
        words, _, variables = each.partition("--\0")
        pairs = (line.partition("=") for line in variables.split("\0") if line)
        jobs.append((words.split("\0")[:-1], {name: value for name, _, value in pairs}))
    return [job for job in jobs if job[0] != ["--version"]]


def outcome(text: str, folder: Path) -> str:
    """Return `right`, `refused`, or what is wrong about the answer to a script."""
    script, empty = folder / "job.sh", folder / "empty.env"
    script.write_text(text)
    for name, content in FILES.items():
        (folder / name).write_text(content)
    (folder / "made.sh").unlink(missing_ok=True)
    expected = [known(words, variables) for words, variables in by_bash(script)]
    (folder / "made.sh").unlink(missing_ok=True)
    try:
        recipe, variables = Job(script=script, environment=empty).in_force()
    except InputError as error:
        if expected and all(str(error) == each for each in expected):
            return "right"
        placed = re.match(rf"{re.escape(str(folder))}/\w+\.sh:\d+: |--", str(error))
        return "refused" if placed else f"refused without a place: {error}"
    answer = (recipe, te_variables(variables))
    return "right" if expected and all(answer == each for each in expected) else f"{answer} for {expected}"


def known(words: list[str], variables: dict[str, str]) -> object:
    """Return the recipe of a job and its variables; the error if Megatron does not take its arguments."""
    program = next(number for number, word in enumerate(words) if word.endswith(".py"))
    try:
        return read([shlex.join(words[program + 1 :])], variables), te_variables(variables)
    except ValueError as error:
        return str(error)


def te_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of Transformer Engine."""
    return {name: value for name, value in variables.items() if name.startswith("NVTE_")}


def main() -> None:
    """Print how many answers are right, and those that are wrong."""
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in cases():
            found = outcome(text, Path(folder))
            counts[found if found in ("right", "refused") else "wrong"] += 1
            refused[name.partition(",")[0]] += found == "refused"
            if found not in ("right", "refused"):
                print(f"{name}\n{text if '-v' in sys.argv else ''}\n{found}\n", flush=True)
    print(dict(counts))
    print("refused:", ", ".join(f"{form} {count}" for form, count in refused.items() if count))
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
