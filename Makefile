# Every target makes what it needs: a virtual environment in .venv, the compiled core, the development tools.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/*.cpp csrc/*.h) CMakeLists.txt setup.py
CXX_FILES := $(wildcard csrc/*.cpp csrc/*.h tests/native/*.cpp tests/native/*.h)
PYTEST := $(BIN)/pytest -q
# Two processes with a thread each; tests that need more threads ask for them. Neighbours stay in one process, so that
# what they share is made once, until the other has nothing left to do.
PYTEST_PARALLEL := OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help build demo test test-all check-gpu bench bench-training bench-peers bench-growth bench-compare bench-gate \
  bench-gate-update browser pictures notebook lint format sanitize fuzz wheel clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# torch comes first and alone: what depends on it then takes the one that is there.
$(VENV)/.tools: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/pip install -q -r requirements-dev.txt
	@touch $@

$(VENV)/.built: $(VENV)/.tools $(SOURCES) pyproject.toml
	$(BIN)/pip install -q --no-build-isolation --no-deps -e .
	@touch $@

build: $(VENV)/.built  ## Build the compiled core in place

demo: build  ## Train a small language model, scanned, and show what was seen; two minutes
	$(BIN)/pyscan demo

test: build  ## The tests that take minutes in all; every benchmark runs once
	$(PYTEST_PARALLEL) -m "not slow"

test-all: build browser wheel sanitize check-gpu bench-gate  ## Every promise, also those that take long to prove
	$(PYTEST_PARALLEL) -m slow
	tests/check_wheel.sh

# Tests of what is on the screen are skipped only where there is no Chromium and no apt to bring it.
browser:  ## Chromium for the tests of viewer and report, from Debian if it is missing
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	command -v apt-get >/dev/null || exit 0; S=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	$$S apt-get update -qq && $$S apt-get install -y -qq chromium >/dev/null

pictures: build browser  ## The pictures of README.md, of the demo's run
	test -e runs/demo/run.mscan || $(BIN)/pyscan demo
	$(BIN)/python -m docs.make_pictures runs/demo/run.mscan

notebook: build  ## Run the example notebook anew, with its output
	OMP_NUM_THREADS=1 $(BIN)/python examples/make_notebook.py

check-gpu: build  ## What the compiler makes of the kernels for four GPUs: load width, spills, registers, instructions
	$(BIN)/python -m tests.gpu.check_compiled

bench: build  ## Benchmarks, with timing, ours beside a rival; with bench-training and bench-growth
	$(PYTEST) benchmarks --benchmark-only -s
	$(MAKE) bench-training bench-growth

BENCH_MODEL ?= minimind
BENCH_SECONDS ?= 180
TRAINING := $(BIN)/python -m benchmarks.training --seconds $(BENCH_SECONDS) --model $(BENCH_MODEL)
bench-training: build  ## A training step beside other scanners, until the noise is below 0.5 %; kept under benchmarks/results
	$(TRAINING) --table scanner --table modes --table sampling --table scripts --table tools --keep
	$(BIN)/python -m benchmarks.document --write

$(VENV)/.peers: $(VENV)/.built
	sed 's/\[.*\]//' requirements-dev.txt > $(VENV)/constraints.txt  # which may not name extras
	$(BIN)/pip install -q -c $(VENV)/constraints.txt --no-build-isolation -e ".[peers]"
	@touch $@

bench-peers: $(VENV)/.peers bench-training  ## The same with the tools of others installed

bench-growth: build  ## How the cost grows with sites, tokens, width, block size and steps; kept with pictures
	$(BIN)/python -m benchmarks.growth --keep
	$(BIN)/python -m benchmarks.document --write

bench-compare: build  ## Fail if a training step is slower than in the last kept result by more than the noise
	$(TRAINING) --table scanner --compare

# Counts instructions instead of seconds, so that a busy machine gives the same answer as an idle one.
INSTALL_VALGRIND := command -v valgrind >/dev/null || (apt-get update -qq && apt-get install -y -qq valgrind)
bench-gate: build  ## Fail if a hot path executes more instructions than are kept in the repository
	@$(INSTALL_VALGRIND)
	$(BIN)/python -m benchmarks.instructions

bench-gate-update: build  ## Keep the instruction counts of this tree
	@$(INSTALL_VALGRIND)
	$(BIN)/python -m benchmarks.instructions --update
	$(BIN)/python -m benchmarks.document --write

lint: build  ## Style and types, nothing is changed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: build  ## Bring all files into the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# cmake comes with the tools.
sanitize: $(VENV)/.tools  ## The core's tests under address, undefined-behaviour and thread sanitizers
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/native/run_sanitizers.sh

fuzz: build  ## A million mutants for the reader; what it finds is left in build/fuzz
	mkdir -p build/fuzz
	cd build/fuzz && $(CURDIR)/$(BIN)/python $(CURDIR)/fuzz/fuzz_reader.py -runs=1000000

wheel: $(VENV)/.tools  ## Build a wheel into dist/
	rm -rf dist
	$(BIN)/pip wheel -q --no-build-isolation --no-deps -w dist .

clean:  ## Remove what was built, but not .venv
	rm -rf build dist *.egg-info pyscan/*.so $(VENV)/.built
