# One command for a newcomer: make quickstart. All set-up is part of every target and is skipped
# where it is done already. The suite, lint and types run on the CPU, with or without a GPU.

PYTHON ?= python3
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
TEST_MODEL := .model/smollm2-135m-instruct
MODEL ?= $(TEST_MODEL)
PYTEST_ARGS ?=
VLLM_025 := .venv-vllm-0.25.0

VENV = $(if $(filter gpu,$(DEVICE)),.venv-gpu,.venv)
RUN = $(VENV)/bin/python
TESTS = $(VENV)/bin/pytest $(PYTEST_ARGS)

# No hub, no usage reports: whatever the machine, tests and examples see only local files.
OFFLINE = HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
test test-unit test-engine test-compat check lint types lock readme: DEVICE = cpu
test test-unit test-engine check: export CORUN_TEST_MODEL = $(abspath $(TEST_MODEL))
test test-unit test-engine test-compat check: export VLLM_LOGGING_LEVEL ?= WARNING
test test-unit test-engine check: SETUP_ARGS = --compiler

.DEFAULT_GOAL := help
.PHONY: help setup model quickstart test test-unit test-engine test-compat check lint types lock \
	readme clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## create the virtual environment and install the locked packages
	@$(PYTHON) tools/setup_env.py --device $(DEVICE) $(SETUP_ARGS)

model: setup ## prepare the small test model, SmolLM2-135M-Instruct
	@$(RUN) tools/prepare_model.py --output $(TEST_MODEL)

quickstart: setup $(if $(filter $(TEST_MODEL),$(MODEL)),model) ## plain vLLM beside CoRun, to the bit; MODEL=... takes another model
	@$(if $(filter $(TEST_MODEL),$(MODEL)),$(OFFLINE)) $(RUN) -m corun.quickstart $(MODEL)

test: setup model ## the whole suite
	$(OFFLINE) $(TESTS)

test-unit: setup ## only the tests without an engine
	$(OFFLINE) $(TESTS) tests/unit

test-engine: setup model ## only the tests on a real vLLM engine
	$(OFFLINE) $(TESTS) tests/engine

test-compat: setup ## the scheduler against vLLM 0.25.0 too (downloads its wheel once)
	@$(RUN) tools/fetch_vllm_025.py --output $(VLLM_025)
	$(OFFLINE) VLLM_PLUGINS= VLLM_CACHE_ROOT=$(abspath build/vllm-0.25.0-cache) \
		PYTHONPATH=$(VLLM_025) $(TESTS) tests/unit/test_scheduler_real.py \
		tests/unit/test_isolate.py tests/unit/test_admission.py tests/unit/test_held.py \
		tests/unit/test_held_real.py tests/unit/test_split_cache.py

check: lint types test ## lint, types and the whole suite

lint: setup ## ruff
	$(VENV)/bin/ruff check .

types: setup ## mypy
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy tools

lock: setup ## resolve requirements/*.lock anew
	$(RUN) tools/lock.py

readme: setup model ## fill README.md and docs/results.md: the quickstart's output, recorded results
	$(OFFLINE) $(RUN) tools/readme_quickstart.py $(TEST_MODEL)
	$(RUN) tools/readme_tables.py

clean: ## remove the environments, the model and caches
	rm -rf .venv .venv-gpu $(VLLM_025) .model build dist corun_vllm.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find corun tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
