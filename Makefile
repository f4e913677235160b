# `make help` lists what can be done here. Everything happens in .venv; nothing else on the machine is touched.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= runs/demo

.DEFAULT_GOAL := help

.PHONY: help
help:  ## list these targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

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

# the parts that never import torch, on another Python and without torch: PYTHON313=/path/to/python3.13
PYTHON313 ?= python3.13
TORCH_FREE_TESTS := tests/unit/test_errors.py tests/unit/test_units.py tests/unit/test_layout.py tests/unit/test_spec.py \
  tests/unit/config tests/unit/tokenizer tests/unit/data_tools tests/unit/data/test_format.py tests/unit/data/test_order.py \
  tests/unit/data/test_sample_index.py tests/unit/data/test_causal.py tests/unit/runtime/test_files.py \
  tests/unit/runtime/test_process.py tests/unit/runtime/test_seed.py tests/unit/runtime/test_faults.py \
  tests/unit/checkpoint/test_format.py tests/unit/checkpoint/test_pieces.py tests/house

$(VENV)-torch-free/.installed: pyproject.toml
	$(PYTHON313) -m venv $(VENV)-torch-free
	$(VENV)-torch-free/bin/pip install --quiet --disable-pip-version-check \
	  typer rich hydra-core tokenizers numpy pytest hypothesis transformers
	@touch $@

.PHONY: test-torch-free
test-torch-free: $(VENV)-torch-free/.installed  ## the torch-free parts on Python 3.13 (PYTHON313=...), without torch
	$(VENV)-torch-free/bin/python -m pytest -q -p no:cacheprovider $(TORCH_FREE_TESTS)

.PHONY: package
package: $(VENV)/.installed  ## build a wheel, install it into an empty folder and use it from there
	rm -rf dist build/installed
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/installed dist/*.whl
	cd build && PYTHONPATH=installed $(abspath $(BIN))/python -m lmtrain.cli.main pretrain data.path=x --print-config > config.yaml
	cd build && PYTHONPATH=installed $(abspath $(BIN))/python -c "import lmtrain; assert 'installed' in lmtrain.__file__"
	grep -q "kind: gpt" build/config.yaml

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
