# Thin: what each target does is in tools/, setup.py and CMakeLists.txt.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

# The clone is on the path, not installed: several clones share one environment.
export PYTHONPATH := $(CURDIR)
# What one clone compiled serves the next one, wherever that lies.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
JOBS := $(shell nproc)
PYTHON = $$(tools/setup.sh python build)
NO_GPU := $(if $(wildcard /dev/nvidia0),,-m "not gpu")

help:  ## This list
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 18

setup: setup-tools  ## Installs tools (as root, on Debian) and makes the Python environment
	@tools/setup.sh python build >/dev/null
setup-tools:
	@tools/setup.sh tools

which-python:  ## Prints the interpreter of the environment (use make -s)
	@tools/setup.sh python build

build:  ## Builds the extension in place
	@tools/build.sh >/dev/null

demo: build  ## Trains a small GPT, stock and under 40 % of its own peak, and compares
	@$(PYTHON) tools/demo.py

test:  ## Everything below but soak and bench; what CI runs
	@MAKE="$(MAKE)" tools/test.sh

lint: setup-tools  ## clang-format, clang-tidy, ruff, layers
	@tools/lint.sh
format: setup-tools  ## Rewrites sources in the form that lint asks for
	@find csrc tests/cpp bench \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' \) -print0 | \
	    xargs -0 -r clang-format -i
	@$(PYTHON) -m ruff check --quiet --fix --exit-zero . && $(PYTHON) -m ruff format --quiet .

core-debug: ## The C++ core and its tests, assertions on
core-asan:  ## The same under AddressSanitizer and UndefinedBehaviorSanitizer
core-tsan:  ## The same under ThreadSanitizer
core-release: ## The same optimized, with the benchmarks
core-debug core-asan core-tsan core-release: core-%: setup-tools
	@cmake --preset $* >/dev/null
	@cmake --build --preset $* -- --quiet
	@ctest --preset $* -j $(JOBS)
core-clang: setup-tools  ## The core built by clang, which checks its lock annotations
	@cmake --preset clang >/dev/null
	@cmake --build --preset clang -- --quiet

pytest: build  ## The Python tests (PYTEST_ARGS="-k name" narrows them)
	@$(PYTHON) -m pytest $(NO_GPU) --ignore=tests/ecosystem $(PYTEST_ARGS)
# The same tests run with device cuda where a GPU is. TRAINSTREAM_ECOSYSTEM=long: see CONTRIBUTING.md.
ecosystem: build  ## Scripts of other libraries, stock and under a budget
	@$$(tools/setup.sh python ecosystem) -m pytest $(NO_GPU) tests/ecosystem $(PYTEST_ARGS)
compatibility: build  ## The long form of it, and docs/compatibility.md from what it showed
	@TRAINSTREAM_ECOSYSTEM=long $$(tools/setup.sh python ecosystem) tools/compatibility.py
build-newest pytest-newest:
ifdef TRAINSTREAM_PYTHON
	@echo "skipped: TRAINSTREAM_PYTHON names the only interpreter to use"
else
build-newest:  ## Builds the extension for the newest torch, in a copy of the tree
	@tools/build.sh newest >/dev/null
pytest-newest:  ## The tests that need no GPU on the newest torch, but those marked any_torch
	@tree=$$(tools/build.sh newest); python=$$(tools/setup.sh python newest); cd "$$tree"; \
	    PYTHONPATH="$$tree" "$$python" -m pytest -m "not gpu and not any_torch" \
	        --ignore=tests/ecosystem $(PYTEST_ARGS)
endif

# Random walks read TRAINSTREAM_SOAK and run their long form.
soak: setup-tools build  ## The long form of the random walks
	@cmake --preset asan >/dev/null && cmake --build --preset asan -- --quiet
	@TRAINSTREAM_SOAK=1 ctest --preset asan -R '[Ww]alk|[Ss]tress' --timeout 3600
	@TRAINSTREAM_SOAK=1 $(PYTHON) -m pytest $(NO_GPU) -k "walk or stress" $(PYTEST_ARGS) || [ $$? -eq 5 ]

bench: setup-tools  ## The Google Benchmark binaries of bench/
	@cmake --preset release >/dev/null && cmake --build --preset release -- --quiet
	@shopt -s nullglob; for program in build/core-release/*_bench; do \
	    echo "== $$program"; "$$program"; done

clean:  ## Removes what was built; the environments stay (CONTRIBUTING.md says where)
	@rm -rf build dist trainstream.egg-info trainstream/_build_info.py trainstream/*.so

.PHONY: help setup setup-tools which-python build demo test lint format core-debug core-asan \
    core-tsan core-release core-clang build-newest pytest ecosystem compatibility pytest-newest soak bench clean
