#!/bin/sh
# Runs everything of this project that needs a GPU, without a person, and writes one folder to send back:
#     benchmarks/gpu_day.sh [--dry-run] [--only STEP]... [--out FOLDER] [--resume]
# VENV names the environment: made here unless it exists, which is then used as it is. With TE=1 the native part
# of Transformer Engine is compiled into it first; without a success its steps are skipped. PYTHON names the
# interpreter of a new environment. Neither make, git nor a C compiler is needed for the set-up; Triton needs a
# C compiler (gcc) and Python.h for the compiled quantisers when they run.
set -eu
cd "$(dirname "$0")/.."
case " $* " in *" --help "*)
    sed -n '2,/^set/{s/^# \{0,1\}//p;}' benchmarks/gpu_day.sh
    exit ;;
esac
VENV=${VENV:-.venv}

modern() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; }

if [ ! -x "$VENV/bin/python" ]; then
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 none}; do
        if modern "$name"; then break; fi
    done
    if ! modern "$name"; then
        cat >&2 <<'MESSAGE'
No Python from 3.11 on (Ubuntu 22.04 has 3.10 as python3). Either
    sudo apt-get install python3.11 python3.11-venv python3.11-dev gcc
or, without root, uv (https://docs.astral.sh/uv), which brings a Python with its headers:
    uv venv --seed --python 3.12 .venv && uv pip install --constraint constraints.txt --editable '.[dev]'
then run this again.
MESSAGE
        exit 2
    fi
    if ! "$name" -m venv "$VENV"; then
        echo "$name has no venv. On Debian and Ubuntu: sudo apt-get install $name-venv" >&2
        exit 2
    fi
    touch "$VENV/.half"
fi
if [ -e "$VENV/.half" ]; then # made here, and not complete yet
    "$VENV/bin/python" -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
    rm "$VENV/.half"
fi
if [ -n "${TE:-}" ]; then
    "$VENV/bin/python" -m pip install --no-build-isolation 'ablate-fp4[blackwell]' ||
        echo "Transformer Engine could not be installed; its steps are skipped" >&2
fi
command -v "${CC:-gcc}" >/dev/null 2>&1 ||
    echo "There is no C compiler: without gcc Triton cannot start, and GPUs run the slow reference" >&2
exec "$VENV/bin/python" benchmarks/gpu_day.py "$@"
