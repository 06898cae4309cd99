# Everything a newcomer needs is one target; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
SEED ?= 1
TESTS ?= tests/unit tests/conformance tests/integration tests/e2e/test_train.py tests/e2e/test_ppo.py
BIN := $(VENV)/bin
PYTHON_SOURCES := slime tests tools bench examples scripts train.py train_async.py
export VENV
# Every run starts dozens of processes that import torch; without bytecode on disk each would compile it anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup setup-dev quickstart test test-parallel test-runs test-interrupted test-sglang test-gpu style format bench bench-trl clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with the pinned run-time dependencies
	@scripts/setup.sh run

setup-dev: setup
	@scripts/setup.sh dev

quickstart: setup ## train SmolLM2-135M with GRPO on this machine and show the result (SEED=1)
	@SEED=$(SEED) PYTHON=$(BIN)/python examples/quickstart/run.sh

test: setup-dev ## run the tests
	$(BIN)/python -m pytest $(TESTS)

test-parallel: setup-dev ## every parallel layout against one process, checkpoints across layouts, killed saves; two tables
	$(BIN)/python -m pytest tests/parallel
	@$(BIN)/python -m tests.parallel.algorithm_table

test-gpu: setup-dev ## the same checks in fp32 and bf16 on one CUDA device; each states its tolerances
	$(BIN)/python -m pytest tests/gpu

test-sglang: ## tests with the real SGLang on the CPU, in an environment of its own
	@VENV=.venv-sglang PLATFORM=cpu scripts/setup.sh sglang
	PYTHONPATH=$(CURDIR)/tests/sglang/shim .venv-sglang/bin/python -m pytest tests/sglang tests/conformance

RUNS := $(filter-out tests/e2e/test_train.py tests/e2e/test_ppo.py tests/e2e/test_interrupted.py, $(wildcard tests/e2e/test_*.py))
test-runs: setup-dev ## whole runs of what is used less often: several models, weights through files, engines that fail
	$(BIN)/python -m pytest $(RUNS)

test-interrupted: setup-dev ## end whole runs at every stage with signals; nothing may stay behind
	$(BIN)/python -m pytest tests/e2e/test_interrupted.py

style: setup-dev ## lint, format check, spelling, shell scripts, import layers, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $$(git ls-files)
	$(BIN)/shellcheck $$(git ls-files '*.sh' '.ci/run')
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright

format: setup-dev ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev ## run the benchmarks that need nothing beyond .venv
	@set -e; for script in $(filter-out bench/grpo_vs_trl.py, $(wildcard bench/*.py)); do echo "== $$script"; $(BIN)/python $$script; done

bench-trl: setup ## compare complete GRPO steps with TRL's GRPOTrainer
	@VENV=.venv-trl scripts/setup.sh trl
	@$(BIN)/python bench/grpo_vs_trl.py --trl-python .venv-trl/bin/python

clean: ## remove environments, models, data and results
	rm -rf .venv .venv-* build dist *.egg-info outputs models data .pytest_cache .ruff_cache .hypothesis .import_linter_cache
