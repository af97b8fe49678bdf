# Every target creates .venv when it is not there. `make help` lists them.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
BENCHMARKS := wire merge checkpoint rounds stall budget quality
FUZZ_SECONDS ?= 60

.PHONY: help demo test test-rooms test-runs test-walls test-all lint bench fuzz clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: $(VENV)/.plots ## three learners train one model through a syncer, under three minutes
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/.dev ## the tests, without the long runs, in three parts side by side
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target test-rooms test-runs test-walls

test-rooms: $(VENV)/.dev ## everything but whole runs of real processes
	$(BIN)/python -m pytest -m "not slow" --ignore=tests/system

test-runs: $(VENV)/.dev ## real processes: rounds, budget, kills
	$(BIN)/python -m pytest -m "not slow" $(wildcard tests/system/test_[a-r]*.py)

test-walls: $(VENV)/.dev ## real processes: starts, strangers, security, training
	$(BIN)/python -m pytest -m "not slow" $(wildcard tests/system/test_[s-z]*.py)

test-all: $(VENV)/.dev ## all tests
	$(BIN)/python -m pytest

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.plots ## the benchmarks, each with small sizes
	@set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name --quick; done

fuzz: $(VENV)/.fuzz ## the fuzz targets, FUZZ_SECONDS (60) each
	$(BIN)/python -m fuzz.run --seconds $(FUZZ_SECONDS)

clean: ## remove what the targets above wrote, except .venv
	rm -rf demo-run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no python3 found; yeto needs Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "yeto needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=/path/to/python3.11")'
	@echo "creating $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.plots: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing (PyTorch is large: this takes a while the first time)"
	$(PIP_INSTALL) -e '.[plots]'
	@touch $@

$(VENV)/.fuzz: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[fuzz]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing (PyTorch is large: this takes a while the first time)"
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.plots
