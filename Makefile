# Every target sets up what it needs by itself; `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help setup demo test check unit format bench campaign peers clean
.SILENT:
# Hundreds of processes are started here: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

VENV   := .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
SEED   := 7
# Whole files side by side, the long ones (processes, faults) first: most of their time is waiting.
SIDE_BY_SIDE := --numprocesses 4 --dist loadfile --no-loadscope-reorder

# Unit tests wait for nothing: more processes than cores would only import torch more often.
ON_ALL_CORES := --numprocesses logical --dist loadfile

help:           ## list the targets
	sed -n 's/^\([a-z]*\): .*## \(.*\)/make \1\t\2/p; s/^\([a-z]*\):  *## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16 | sort -u

setup:          ## make .venv from constraints.txt, when something changed
	scripts/setup

demo: setup     ## train a GPT on all cores, kill a rank, compare the bits
	$(BIN)/argosy demo

test: setup     ## the whole test suite
	$(PYTEST) tests $(SIDE_BY_SIDE)

check: setup    ## format, lint, types, layers, unit tests
	$(BIN)/ruff format --check --quiet . || { echo "fix: make format" >&2; exit 1; }
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-logo >.import-linter.log 2>&1 || { cat .import-linter.log; rm -f .import-linter.log; exit 1; }
	rm -f .import-linter.log
	$(PYTEST) tests/unit $(ON_ALL_CORES)

format: setup   ## let ruff format and mend what it can
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .

bench: setup peers  ## all benchmarks, side by side with the peers
	$(BIN)/python -m benchmarks launch --json
	$(BIN)/python -m benchmarks supervise --json
	$(BIN)/python -m benchmarks collectives --json
	$(BIN)/python -m benchmarks exchange --json
	$(BIN)/python -m benchmarks reshard --json
	$(BIN)/python -m benchmarks checkpoint --json
	$(BIN)/python -m benchmarks train --json
	$(BIN)/python -m benchmarks recover --json
	$(BIN)/python -m benchmarks exact --json

campaign: setup ## long random campaigns: simulator seeds, then real faults
	$(BIN)/python -m argosy.testing --seeds 0-1999 --twice
	$(BIN)/python -m benchmarks.orphans --kills 500
	$(BIN)/python -m benchmarks exact --seed $(SEED)

peers: setup    ## .peers/: environments of the programs the benchmarks compare with; PEERS="NAME …" makes these alone
	scripts/peers $(PEERS)

clean:          ## remove what the other targets made in this directory (`argosy down` ends a cluster)
	rm -rf $(VENV) .peers build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .import-linter.log src/argosy/native/_kernels*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
