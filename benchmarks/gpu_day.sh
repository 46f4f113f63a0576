#!/bin/sh
# Runs everything of this project that needs a GPU, without a person, and writes one folder to send back:
#     benchmarks/gpu_day.sh [--dry-run] [--only STEP]... [--out FOLDER]
# VENV names the environment: made by the Makefile unless it exists, which is then used as it is. With TE=1 the
# native part of Transformer Engine is compiled into it first; without a success its steps are skipped.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
[ -x "$VENV/bin/python" ] || make VENV="$VENV" "$VENV/.installed-dev"
if [ -n "${TE:-}" ]; then
    "$VENV/bin/python" -m pip install --no-build-isolation 'ablate-fp4[blackwell]' ||
        echo "Transformer Engine could not be installed; its steps are skipped" >&2
fi
exec "$VENV/bin/python" benchmarks/gpu_day.py "$@"
