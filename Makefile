# The two commands of the README are `make demo` and `make test`; a contributor repeats `make check`.
# Needs make and Python 3.11 or newer, nothing else: everything is installed into .venv. Every target can be run again.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test ipex kernels soak lint format settings reference docs check clean

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
WORKERS ?= logical
BIN := .venv/bin
IPEX_VENV ?= .venv-ipex

export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:
	@echo "make demo      install octavo into .venv, serve the demo model, show an answer (CHECK=1: end then)"
	@echo "make test      install what the tests need and run them"
	@echo "make ipex      run the backends on Intel's library, in an environment with PyTorch 2.8: 2.3 GB of disk, made once"
	@echo "make soak      half an hour of clients that cancel, stall and send too much, while the engine is killed"
	@echo "make kernels   compile every kernel for every GPU that is known, none of which need be here"
	@echo "make lint      ruff (format and rules), mypy --strict, the import contracts"
	@echo "make format    let ruff rewrite what it can"
	@echo "make settings  write docs/settings.md anew, from the settings' source"
	@echo "make reference write docs/contract.md and docs/hooks.md anew, from docstrings"
	@echo "make docs      build the documentation into site/, warnings are errors"
	@echo "make check     lint, docs and test: what a change must pass"
	@echo "make clean     remove .venv, caches and what was built"

# At Ctrl-C octavo ends with status 0; make, which the terminal interrupts too, waits for it and ends by the signal.
demo: .venv/octavo
	@$(BIN)/octavo demo $(if $(CHECK),--check)

# As many processes as cores (WORKERS=0: this one alone, for a debugger), each with one torch thread: the tests' tensors are
# small, and two threads on them only wait for each other. Where a test starts more, idle ones sleep: those that spin take the
# cores from the ones that work.
test: .venv/octavo-dev
	@echo "==> Running the tests"
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Each worker is a process of its own: where the library ends it, that is a test that failed, and another takes its place.
ipex: $(IPEX_VENV)/octavo
	@echo "==> Running the conformance suite and models on Intel's library"
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(IPEX_VENV)/bin/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 \
	    -k 'ipex and not OnStandIn and not stand-in' $(PYTEST_ARGS) tests/backends/ipex tests/engine/test_copying.py

# SOAK_ARGS='--minutes 5 --seed 7 --json soak.json --log server.log' for another one.
soak: .venv/octavo-dev
	@echo "==> Soaking the server"
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE COMPILE=0 $(BIN)/python -m tests.soak $(SOAK_ARGS)

# KERNELS_ARGS='--target gfx942 --shard 2/8' for a part: several machines share them. What was compiled is kept.
kernels: .venv/octavo-dev
	@echo "==> Compiling the kernels"
	$(BIN)/octavo kernels compile --json kernels.json $(KERNELS_ARGS)

lint: .venv/octavo-dev
	@echo "==> ruff"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@echo "==> mypy"
	$(BIN)/mypy
	@echo "==> import contracts"
	$(BIN)/lint-imports --no-logo

format: .venv/octavo-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

settings: .venv/octavo-dev
	$(BIN)/octavo settings --markdown > docs/settings.md

reference: .venv/octavo-dev
	$(BIN)/python -m tests.reference

docs: .venv/octavo-dev
	@echo "==> Building the documentation into site/"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint docs test

clean:
	rm -rf .venv $(IPEX_VENV) site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Stamps: an install is repeated when the metadata or the pins changed, or when .venv was made anew.
.venv/octavo: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "==> Installing octavo into .venv (PyTorch is large: a few minutes the first time)"
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --editable '.[serve]'
	@touch $@

.venv/octavo-dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "==> Installing octavo with its test, lint and documentation tools into .venv (a few minutes the first time)"
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --editable '.[dev,bench,serve,otel]'
	@touch $@ .venv/octavo

$(IPEX_VENV)/octavo: pyproject.toml tests/backends/ipex/environment.py | $(BIN)/python
	@echo "==> Installing octavo with Intel's library into $(IPEX_VENV) (1 GB is downloaded the first time; what pip misses of CUDA is left out)"
	$(BIN)/python -m venv $(IPEX_VENV)
	$(IPEX_VENV)/bin/python tests/backends/ipex/environment.py
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "octavo needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "==> Creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv \
	    || { rm -rf .venv; echo "$(PYTHON) cannot make virtual environments: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
