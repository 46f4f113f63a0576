# Two commands on a fresh machine with Python, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: demo test lint schema clean

demo: $(VENV)/.installed
	$(BIN)/python -m ablate.sweep experiments/rht_sr.yaml

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

schema: $(VENV)/.installed
	$(BIN)/ablate schema > experiments/schema.json

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt hatch_build.py $(wildcard ablate/numerics/kernels/*.[ch])
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) runs
