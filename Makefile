# Everything a developer runs. Each target sets up what it needs first.

PYTHON ?= python3
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
N ?= 1000
MINUTES ?= 10
SEED ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALLING := $(VENV)/.installing
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A crashed test process ends the run: with restarts, xdist may wait for it for ever.
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist load --max-worker-restart=0 $(PYTEST_ARGS)
CHECKED := $(wildcard tests examples benchmarks scripts)

# Workers share the machine: one thread each, or they fight for the cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup lint types layers docs test unit oracle chaos conformance demo bench format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with pinned tools and this package

# The mark beside an unfinished installation makes the next run start from nothing: an
# interrupted pip can leave packages that look installed and are not. The package itself
# goes in without its dependencies, so that torch is resolved once, from the pinned line.
$(READY): requirements-dev.txt pyproject.toml
	@if [ -e $(INSTALLING) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(INSTALLING)
	$(PIP) install --quiet -r requirements-dev.txt
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@rm -f $(INSTALLING)
	@touch $@

lint: $(READY) ## style, formatting, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(READY) ## mypy, strict for the package
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini $(CHECKED)

layers: $(READY) ## who may import whom
	$(BIN)/lint-imports

# The variable: a notice about other tools at every build.
docs: $(READY) ## the documentation site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: lint types layers docs ## all checks, then all tests
	$(BIN)/python -m tests.conformance.torch_suites --fast
	$(PYTEST)

unit: $(READY) ## tests without worker processes
	$(PYTEST) $(wildcard tests/unit tests/property) tests/test_api.py

oracle: $(READY) ## N random programs against one process, fresh seeds
	$(BIN)/python -m tests.oracle --count $(N)

chaos: $(READY) ## train for MINUTES while workers are killed, half of it across hosts
	$(BIN)/python -m tests.chaos --minutes $$(echo $(MINUTES) | awk '{ print $$1 / 2 }') $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.chaos --minutes $$(echo $(MINUTES) | awk '{ print $$1 / 2 }') $(if $(SEED),--seed $(SEED)) --hosts $(if $(TLS),--tls)

conformance: $(READY) ## torch's own tests of RPC, against gradwire
	$(BIN)/python -m tests.conformance.torch_suites

demo: $(READY) ## three parties train one model; draws the graph
	$(BIN)/python examples/split_learning.py

bench: $(READY) ## remote calls and backwards through them, beside those of torch
	$(BIN)/python benchmarks/rpc.py
	$(BIN)/python benchmarks/autograd.py
	$(BIN)/python benchmarks/torch_surface.py

format: $(READY) ## rewrite the sources in house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build outputs, keep .venv
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.egg-info' -type d -prune -exec rm -rf {} +
