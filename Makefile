# Two commands on a fresh machine with Python, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
PLATFORM ?= .venv-platform
BIN := $(VENV)/bin
# uv, if it is installed, takes a fraction of pip's time; its indices are its own settings, not pip's.
INSTALL = $(if $(shell command -v uv),uv pip install --quiet --compile-bytecode --python $(1)/bin/python,$(1)/bin/python -m pip install --quiet)
# Of random draws: faults, and mutants of the code.
SEED ?= 1
# On 2 cores: a third of the time of tests is spent waiting for servers and Ray.
JOBS ?= 3
# Every command and worker is a process that imports a thousand modules: without bytecode, half of a report's time.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := hatch_build.py $(wildcard ablate/numerics/kernels/*.[ch])

.PHONY: demo test-fast test test-all chaos mutants mutants-by-hand coverage-map peers platform env lint schema pages clean

demo: $(VENV)/.installed
	$(BIN)/python -m ablate.sweep experiments/rht_sr.yaml

# A worker that dies ends the run: xdist would start another and wait for ever for the tests that it had.
# Without slow tests, servers and browsers, and with a few cases of each test.
test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --max-worker-restart 0 --fast

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# With every case of wide products, of which the others run a sample.
test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --all

# Processes are killed, state folders damaged and input files mutated, in and around real sweeps: nothing may be lost,
# done twice, or silently wrong.
KILLS ?= 50
CORRUPTIONS ?= 50
MUTANTS ?= 1000
chaos: $(VENV)/.installed-dev
	$(BIN)/python tests/chaos/run.py --kills $(KILLS) --corruptions $(CORRUPTIONS) --mutants $(MUTANTS) --seed $(SEED) $(if $(OUT),--out $(OUT))

# 120 one-token mistakes, and the tests that see them. OUT=before.jsonl keeps the results; AGAIN=before.jsonl runs the
# same mistakes after a change, and tests/mutants/compare.py lists those that are no longer seen.
mutants: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants/run.py --seed $(SEED) $(if $(OUT),--out $(OUT)) $(if $(AGAIN),--again $(AGAIN))

mutants-by-hand: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants/run.py --by-hand

# Which test files call which function: after tests have been added or moved between files.
coverage-map: $(VENV)/.installed-dev
	$(BIN)/python tests/mutants/coverage_map.py

peers: $(PEERS)/.installed
	$(PEERS)/bin/python benchmarks/peers.py kernels
	$(PEERS)/bin/python benchmarks/peers.py step

platform: $(PLATFORM)/.installed
	$(PLATFORM)/bin/python benchmarks/platform_costs.py

# Random secrets for docker/compose.yaml, once.
env:
	$(PYTHON) docker/new_env.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/lint_docstrings.py
	$(BIN)/python tests/lint_weight.py
	$(BIN)/mypy

schema: $(VENV)/.installed
	$(BIN)/ablate init --schema > experiments/schema.json

# The generated pages.
pages: $(VENV)/.installed
	$(BIN)/python tests/regenerate_recipes_page.py
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python benchmarks/conformance.py
	$(BIN)/python docs/generate_tensor_cores.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt $(SOURCES)
	$(call INSTALL,$(VENV)) --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(call INSTALL,$(VENV)) --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(PEERS)/.installed: pyproject.toml constraints.txt benchmarks/requirements.txt $(SOURCES)
	$(PYTHON) -m venv $(PEERS)
	$(call INSTALL,$(PEERS)) --constraint constraints.txt --editable .
	SKIP_CUDA_BUILD=1 $(call INSTALL,$(PEERS)) --constraint constraints.txt --no-build-isolation --requirement benchmarks/requirements.txt
	@touch $@

$(PLATFORM)/.installed: pyproject.toml constraints.txt benchmarks/platform-requirements.txt $(SOURCES)
	$(PYTHON) -m venv $(PLATFORM)
	$(call INSTALL,$(PLATFORM)) --constraint constraints.txt --editable . --requirement benchmarks/platform-requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(PLATFORM) runs
