# `make help` lists what can be done here. Everything happens in .venv; nothing else on the machine is touched.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= runs/demo

.DEFAULT_GOAL := help

.PHONY: help
help:  ## list these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# torch first, from the ordinary index and pinned: a bare range may take a build of several gigabytes
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@touch $@

$(VENV)/.installed: pyproject.toml csrc/native.cpp csrc/lmtrain_build.py $(VENV)/.torch
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test]"
	@touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

.PHONY: install
install: $(VENV)/.installed  ## make .venv and install lmtrain into it

.PHONY: demo
demo: $(VENV)/.installed  ## the whole job in under nine minutes: corpus, tokenizer, dataset, GPT, evaluation
	$(BIN)/lmtrain demo --output $(RUN)

.PHONY: test
test: $(VENV)/.tested  ## all tests but the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"

.PHONY: test-slow
test-slow: $(VENV)/.tested  ## the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

.PHONY: check
check: $(VENV)/.tested  ## formatting rules and types
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: docs
docs: $(VENV)/.documented  ## regenerate the reference pages and build the site into site/
	$(BIN)/python -m lmtrain.cli.reference docs/reference
	$(BIN)/mkdocs build --quiet --strict -f .mkdocs.yml -d site

.PHONY: bench
bench: $(VENV)/.installed  ## time training beside a bare-torch twin (NANOGPT=PATH adds nanoGPT's model)
	$(BIN)/python tests/benchmarks/train_speed.py $(if $(NANOGPT),--nanogpt $(NANOGPT)) $(BENCH)

.PHONY: clean
clean:  ## remove builds and caches; runs and .venv stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
