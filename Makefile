# `make help` lists what can be done here. Everything happens in .venv; nothing else on the machine is touched.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= runs/demo
# the tests start hundreds of processes, and without bytecode each compiles every module again
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help

.PHONY: help
help:  ## list these targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

# torch first, from the ordinary index and pinned: a bare range may take a build of several gigabytes
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@touch $@

# each of these compiles csrc/, so that none of them asks for another
SOURCES := pyproject.toml $(wildcard csrc/*.cpp csrc/*.h) csrc/lmtrain_build.py

$(VENV)/.installed: $(SOURCES) $(VENV)/.torch
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.tested: $(SOURCES) $(VENV)/.torch
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test]"
	@touch $(VENV)/.installed $@

$(VENV)/.documented: $(VENV)/.installed
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])" \
	  | xargs $(BIN)/pip install --quiet --disable-pip-version-check
	@touch $@

.PHONY: install
install: $(VENV)/.installed  ## make .venv and install lmtrain into it

.PHONY: demo
demo: $(VENV)/.installed  ## the whole job in a few minutes: corpus, tokenizer, dataset, GPT, evaluation, resharding
	$(BIN)/lmtrain demo --output $(RUN)

# as many tests at once as there are cores, but 4 at most: each brings a torch of its own, and some use several cores
AT_ONCE := -n auto --maxprocesses 4 --dist worksteal
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(AT_ONCE)

.PHONY: test
test: $(VENV)/.tested  ## the proof: unit tests, a layout for every axis and schedule, planted bugs, a kill
	$(PYTEST) -m "not wide and not slow"

.PHONY: test-wide
test-wide: $(VENV)/.tested  ## what `make test` leaves out, but for the slow ones: every pair of settings
	$(PYTEST) -m "wide and not slow"

.PHONY: test-all
test-all: $(VENV)/.tested  ## both in one: all tests but the slow ones
	$(PYTEST) -m "not slow"

.PHONY: test-slow
test-slow: $(VENV)/.tested  ## the tests that take minutes
	$(PYTEST) -m slow
	$(MAKE) test-transformers TRANSFORMERS_TESTS=tests/unit/exchange/huggingface/families TRANSFORMERS_MARKS="wide or slow"

.PHONY: mutants
mutants: $(VENV)/.tested  ## plant each mistake of tests/mutants in a copy: which test notices? ROOM=optim, SUITE=fast|wide|both
	$(BIN)/python -m tests.mutants $(addprefix --room ,$(ROOM)) $(addprefix --suite ,$(SUITE))

SEED ?= 1
N ?= 300
.PHONY: mutants-drawn
mutants-drawn: $(VENV)/.tested  ## plant N mistakes that SEED draws, of ROOM or of all rooms, and print the share that is noticed
	$(BIN)/python -m tests.mutants --drawn $(SEED) --count $(N) $(addprefix --room ,$(ROOM)) $(addprefix --suite ,$(SUITE))

.PHONY: mutants-real
mutants-real: $(VENV)/.tested  ## undo N commits that SEED draws of those that mended something: who notices?
	$(BIN)/python -m tests.mutants --real $(SEED) --count $(N) $(addprefix --suite ,$(SUITE))

.PHONY: mutants-chosen
mutants-chosen: $(VENV)/.tested  ## plant a dozen of those that are on record as noticed, by the commit's hash
	$(BIN)/python -m tests.mutants --chosen 12

.PHONY: replay
replay: $(VENV)/.tested  ## one layout beside one process: CASE=gqa-tp2-dp2-zero3-sp-bf16-micro4 (docs/explanation/parallelism.md)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.layouts.replay $(CASE)

# the parts that never import torch, on another Python and without torch: PYTHON313=/path/to/python3.13
PYTHON313 ?= python3.13
# which of them: a pattern of paths
TORCH_FREE ?= .

$(VENV)-torch-free/.installed: pyproject.toml
	$(PYTHON313) -m venv $(VENV)-torch-free
	$(VENV)-torch-free/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  print(*[n for n in p['dependencies'] + p['optional-dependencies']['test'] if not n.startswith('torch')])" \
	  | xargs $(VENV)-torch-free/bin/pip install --quiet --disable-pip-version-check
	@touch $@

.PHONY: test-torch-free
test-torch-free: $(VENV)-torch-free/.installed  ## the torch-free parts on Python 3.13 (PYTHON313=...), without torch
	$(VENV)-torch-free/bin/python -m tests.torch_free | xargs -n 1 | grep -E "$(TORCH_FREE)" \
	  | PYTHONPATH="$(CURDIR)" xargs $(VENV)-torch-free/bin/python -m pytest -q -p no:cacheprovider $(AT_ONCE) -m "not slow"

# the versions of transformers with which imports and exports are tested, each in an environment of its own
TRANSFORMERS ?= 4.57 5
TRANSFORMERS_TESTS ?= tests/unit/exchange
TRANSFORMERS_MARKS ?= not slow

$(VENV)-transformers-%/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-transformers-$*
	$(VENV)-transformers-$*/bin/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VENV)-transformers-$*/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  print(*p['dependencies'], *[n for n in p['optional-dependencies']['test'] if n.startswith(('pytest', 'hypothesis'))])" \
	  | xargs $(VENV)-transformers-$*/bin/pip install --quiet --disable-pip-version-check "transformers==$*.*"
	@touch $@

.PHONY: test-transformers
test-transformers: $(foreach version,$(TRANSFORMERS),$(VENV)-transformers-$(version)/.installed)  ## imports and exports with transformers 4.57 and 5: TRANSFORMERS="5"
	for version in $(TRANSFORMERS); do PYTHONPATH="$(CURDIR)" OMP_NUM_THREADS=1 \
	  $(VENV)-transformers-$$version/bin/python -m pytest -q -p no:cacheprovider $(AT_ONCE) -m "$(TRANSFORMERS_MARKS)" \
	  $(TRANSFORMERS_TESTS) || exit; done

# ---- the compiled helpers of csrc/, in place and file by file; `pip install` builds the same by pyproject.toml
CXX ?= g++
NATIVE_FLAGS := -std=c++17 -O3 -g0 -fPIC -fvisibility=hidden -Wall -Wextra
NATIVE_OBJECTS := $(patsubst csrc/%.cpp,build/native/%.o,$(wildcard csrc/*.cpp))
NATIVE_INCLUDES = $(shell $(BIN)/python -c "import pybind11, sysconfig; \
  print('-I' + pybind11.get_include(), '-I' + sysconfig.get_path('include'))")
NATIVE_MODULE = lmtrain/_native$(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")

build/native/%.o: csrc/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(NATIVE_FLAGS) $(NATIVE_INCLUDES) -MMD -MP -MF $(@:.o=.d) -MT $@ -c $< -o $@.$$$$ && mv $@.$$$$ $@

-include $(NATIVE_OBJECTS:.o=.d)

.PHONY: native
native: $(NATIVE_OBJECTS)  ## compile csrc/ into lmtrain/_native*.so, only what has changed
	$(CXX) -shared $^ -o $(NATIVE_MODULE).$$$$ && mv $(NATIVE_MODULE).$$$$ $(NATIVE_MODULE)

# the same, stopping at the first read or write out of bounds and at undefined behaviour; with SSE2, then without
SANITIZE := -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
# the tests of every room with a file that calls csrc/, found so that a new one is not forgotten
SANITIZED_TESTS ?= $(shell grep -rlE "^from lmtrain.runtime import .*compiled_helpers" lmtrain data_tools \
  | sed -E "s,^lmtrain/,,; s,/.*,,; s,^,tests/unit/," | sort -u)

.PHONY: native-sanitized
native-sanitized: $(VENV)/.tested  ## run the tests of what csrc/ does under the address and undefined behaviour sanitizers
	for flags in "" -DLMTRAIN_PORTABLE; do \
	  rm -rf build/sanitized && mkdir -p build/sanitized && \
	  cp -r lmtrain data_tools tests conf csrc pyproject.toml build/sanitized && rm -f build/sanitized/lmtrain/_native* && \
	  $(CXX) $(SANITIZE) $$flags $(NATIVE_INCLUDES) -fPIC -shared csrc/*.cpp -o build/sanitized/$(NATIVE_MODULE) && \
	  (cd build/sanitized && OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0:malloc_context_size=1:handle_segv=0 \
	    LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	    $(abspath $(BIN))/python -m pytest -q -p no:cacheprovider -m "not slow" $(SANITIZED_TESTS)) || exit; \
	done

FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 1
# which of tests/fuzz/fuzzers: all, if this is empty
FUZZ ?=
# what the fuzzer links: the sources that know nothing of Python
FUZZED = $(shell grep -L '"bind.h"' csrc/*.cpp)

# FUZZ_FLAGS=-DLMTRAIN_PORTABLE fuzzes the plain loops. With clang: the same two lines, -fsanitize=fuzzer in place of -fsanitize-coverage=trace-pc, and without driver.cpp.
build/fuzz: $(wildcard csrc/*.cpp csrc/*.h csrc/fuzz/*.cpp)
	@mkdir -p build
	$(CXX) $(SANITIZE) -c csrc/fuzz/driver.cpp -o build/fuzz-driver.o
	$(CXX) $(SANITIZE) $(FUZZ_FLAGS) -fsanitize-coverage=trace-pc csrc/fuzz/encoder.cpp $(FUZZED) build/fuzz-driver.o -o $@

.PHONY: fuzz
fuzz: build/fuzz $(VENV)/.tested  ## change inputs of the compiled encoder and of every verb, each for FUZZ_SECONDS=60
	build/fuzz $(FUZZ_SECONDS) $(FUZZ_SEED)
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) $(FUZZ)

# which of tests/drills: all, if this is empty
DRILL ?=
DRILLS ?= build/drills

.PHONY: drill
drill: $(VENV)/.tested  ## break runs on purpose by the hundred, for hours: DRILL="injections hangs false_alarms day slurm"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.drills $(DRILL) --out $(DRILLS)

.PHONY: bench-data
bench-data: $(VENV)/.tested  ## time the data tools beside their peers: every tests/benchmarks/data_*.py
	@for script in $(sort $(patsubst tests/benchmarks/%.py,%,$(wildcard tests/benchmarks/data_*.py))); do \
	  echo "== $$script" && $(BIN)/python -m tests.benchmarks.$$script || exit; done

.PHONY: bench-parallel
bench-parallel: $(VENV)/.tested  ## the host's overhead of the parallel path beside a plain module and DTensor, on two CPU cores
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.parallel_overhead

.PHONY: bench-pipeline
bench-pipeline: $(VENV)/.tested  ## time every pipeline schedule with fixed delays beside the simulator, on 4 processes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.pipeline_makespan

.PHONY: bench-plan
bench-plan: $(VENV)/.tested  ## time every schedule, with and without sharding, beside the planner, on 4 processes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.plan_executor

.PHONY: package
package: $(VENV)/.installed  ## build a wheel, install it into an empty folder and use it from there
	rm -rf dist build/installed build/lib* build/bdist*  # because: setuptools would pack modules that are gone
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/installed dist/*.whl
	cd build && PYTHONPATH=installed $(abspath $(BIN))/python -m lmtrain.cli.main pretrain data.path=x --print-config > config.yaml
	cd build && PYTHONPATH=installed $(abspath $(BIN))/python -c "import lmtrain; assert 'installed' in lmtrain.__file__; lmtrain.Dataset"
	test -f build/installed/lmtrain/py.typed  # because: type checkers ignore the types of a package without it
	grep -q "kind: gpt" build/config.yaml
	cd build && PYTHONPATH=installed $(abspath $(BIN))/python -m lmtrain.cli.main eval --list --json | grep -q choice/piqa

.PHONY: check
check: $(VENV)/.tested  ## formatting rules and types
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: docs
docs: $(VENV)/.documented  ## regenerate the reference pages and build the site into site/
	$(BIN)/python -m lmtrain.cli.reference docs/reference
	$(BIN)/python -m lmtrain.cli.plan.model_presets_page docs/reference
	$(BIN)/mkdocs build --quiet --strict -f .mkdocs.yml -d site

.PHONY: bench
bench: $(VENV)/.installed  ## time training beside a bare-torch twin (NANOGPT=PATH adds nanoGPT's model)
	$(BIN)/python -m tests.benchmarks.train_speed $(if $(NANOGPT),--nanogpt $(NANOGPT)) $(BENCH)

.PHONY: gpu-day
gpu-day: $(VENV)/.tested  ## what only a GPU can tell, the most telling in 25 minutes: DAY="--only speed", DAY=--smoke on a CPU
	$(BIN)/python -m tests.gpu.day $(DAY)

# which Python the machine with the GPU has; antlr4 comes as source alone
GPU_DAY_PYTHON ?= 3.12
GPU_DAY_WHEELS := build/gpu_day_wheels
GPU_DAY_PLATFORMS := $(foreach n,28 27 17,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64

.PHONY: gpu-day-archive
gpu-day-archive: $(VENV)/.tested  ## build/gpu_day.tar.gz, all that a bare machine with torch needs for it: GPU_DAY_PYTHON=3.12
	rm -rf $(GPU_DAY_WHEELS) && mkdir -p $(GPU_DAY_WHEELS)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps -w $(GPU_DAY_WHEELS) antlr4-python3-runtime==4.9.3
	$(BIN)/python -m tests.gpu.day.archive --needs | xargs $(BIN)/pip download --quiet --disable-pip-version-check \
	  --only-binary=:all: --python-version $(GPU_DAY_PYTHON) $(GPU_DAY_PLATFORMS) \
	  --find-links $(GPU_DAY_WHEELS) -d $(GPU_DAY_WHEELS)
	$(BIN)/python -m tests.gpu.day.archive build/gpu_day.tar.gz

.PHONY: clean
clean:  ## remove builds and caches; runs and .venv stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
