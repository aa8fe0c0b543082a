# SPDX-License-Identifier: Apache-2.0
# Everything lives in .venv; a fresh clone needs python3 (3.11 or newer, with venv), make and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test check oracle e2e bench bench-real genproto clean
.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(VENV)/.run: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev
	touch $@

demo: $(VENV)/.run  ## Run the agent on a mock machine between stand-ins for the API server and kubelet
	$(BIN)/nearfield demo

test: $(VENV)/.dev  ## Everything: format, lint, types, layers, unit and functional tests, coverage
	hack/check

check: test  ## The same as test

oracle: $(VENV)/.dev  ## What upstream's own allocator and hwloc make of our machines (hack/oracle --help)
	hack/oracle

e2e: $(VENV)/.dev  ## Real pods on a real Kubernetes node, made here for the purpose; needs root (hack/e2e --help)
	hack/e2e

bench: $(VENV)/.dev  ## Measure; see docs/performance.md
	$(BIN)/python -m hack.bench

bench-real: $(VENV)/.dev  ## Measure on a real node of its own; needs root
	$(BIN)/python -m hack.bench --real

genproto: $(VENV)/.dev  ## Regenerate proto/ from the .proto files
	hack/genproto

clean:  ## Remove what make made
	rm -rf $(VENV) build *.egg-info .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
