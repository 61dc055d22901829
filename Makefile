# Every target does all the set-up it needs by itself. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules

BUILD_PACKAGES := build-essential:c++ cmake:cmake ninja-build:ninja git:git ccache:ccache pkg-config:pkg-config \
	libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc:grpc_cpp_plugin libgtest-dev libssl-dev
LINT_PACKAGES := git:git clang-format:clang-format
TEST_PACKAGES := curl:curl postgresql:postgres
VENV := .venv/bin
# Started in the background, a shell ignores Ctrl-C for itself and all it starts; tests that press it need it back.
PYTEST := env --default-signal=INT $(VENV)/python -m pytest
UPSTREAM := python3 native/upstream.py
# Build the llama.cpp work tree as it is, with changes that no patch holds: make worker DIRTY=1
DIRTY ?=
# Targets of unpatched llama.cpp that tests and benchmarks compare with.
REFERENCE_TARGETS ?= meshnet-reference
BENCH_TARGETS ?= llama-bench ggml-rpc-server
# Passed on: make bench BENCH_OPTIONS='--rounds 9'
BENCH_OPTIONS ?=

section = @printf '\n==== %s\n' '$(1)'
cxx_files = $$(find native -path native/patches -prune -o \( -name '*.h' -o -name '*.cpp' \) -print | sort)

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ------------------------------------------------------------------------------------------------------- set-up

.PHONY: setup packages-build packages-python packages-lint packages-test venv llama worker native model models reference
setup: venv worker model ## everything that `make demo` needs

packages-build:
	@tools/packages $(BUILD_PACKAGES)

# Debian splits the module that makes virtual environments off Python.
packages-python:
	@python3 -c 'import ensurepip, venv' 2>/dev/null || tools/packages python3:python3 python3-venv

packages-lint:
	@tools/packages $(LINT_PACKAGES)

packages-test:
	@tools/packages $(TEST_PACKAGES)

venv: packages-python ## the virtual environment .venv
	@tools/venv

llama: packages-build packages-python ## llama.cpp at the pinned commit, patched, in build/upstream
	@$(if $(DIRTY),true,$(UPSTREAM) fetch)

worker: llama ## the shard worker build/native/bin/meshnet-shard
	@$(UPSTREAM) build $(if $(DIRTY),--dirty) --target meshnet-shard

native: llama ## the worker and all native tests
	@$(UPSTREAM) build $(if $(DIRTY),--dirty)

model: venv ## the demo's model, in the store
	@$(VENV)/python -m meshnet.artifact.samples smollm2-135m-instruct

models: model ## all models that tests use, in the store
	@$(VENV)/python -m meshnet.artifact.samples gemma-3-270m

reference: packages-build packages-python ## unpatched llama.cpp, to compare with
	@$(UPSTREAM) unpatched --target $(REFERENCE_TARGETS)

# --------------------------------------------------------------------------------------------------------- use

.PHONY: demo bench bench-repair bench-tracker
demo: venv worker model ## chat over two workers on this machine; KEEP=1 stays up
	@$(VENV)/meshnet demo

bench: venv worker model ## side by side with whole-model llama.cpp and its RPC backend
	@$(UPSTREAM) build $(if $(DIRTY),--dirty) --target meshnet-generate-client
	@$(UPSTREAM) unpatched --target $(BENCH_TARGETS)
	@$(VENV)/python -m bench $(BENCH_OPTIONS)

bench-repair: venv worker model ## how long an answer stands still when a worker fails
	@$(VENV)/python -m bench.repair $(BENCH_OPTIONS)

bench-tracker: venv ## a tracker under 1,000 nodes, for ten minutes
	@$(VENV)/python -m bench.tracker_load $(BENCH_OPTIONS)

# -------------------------------------------------------------------------------------------------------- check

.PHONY: test test-quick test-unit test-native test-integration test-parity test-e2e parity kill-matrix lint format proto
test: test-unit test-native test-integration test-parity test-e2e ## everything but lint and the longest sweeps
	$(call section,all tests passed)

test-quick: test-unit test-native ## no models, no whole system

# pytest fails where it finds no test at all.
test-unit: venv
	$(call section,unit tests)
	@$(PYTEST) tests/unit

test-native: native
	$(call section,native tests)
	@ctest --test-dir build/native --output-on-failure --no-tests=error --timeout 300

test-integration: venv native models packages-test
	@$(UPSTREAM) unpatched --target $(BENCH_TARGETS)
	$(call section,integration tests)
	@$(PYTEST) tests/integration

test-parity: venv native models reference
	$(call section,parity (a seeded sample; all of it: make parity))
	@$(PYTEST) tests/parity

test-e2e: venv native models packages-test
	$(call section,end-to-end tests)
	@$(PYTEST) tests/e2e

parity: venv native models reference ## the full parity sweeps (long)
	$(call section,parity (full))
	@MESHNET_PARITY=full $(PYTEST) --timeout 0 tests/parity

# Another number: make kill-matrix KILLS=1000; the same ones again: MESHNET_KILL_SEED=… make kill-matrix
KILLS ?= 200
kill-matrix: venv worker model ## workers that fail at 200 random moments of answers (long)
	@MESHNET_KILLS=$(KILLS) $(PYTEST) -s tests/e2e/test_kill_matrix.py

lint: venv packages-lint ## style, types, generated files, patch stack
	$(call section,lint)
	@$(VENV)/ruff check
	@$(VENV)/ruff format --check
	@$(VENV)/mypy
	@clang-format --dry-run -Werror $(cxx_files)
	@tools/stubs check
	@$(UPSTREAM) check

format: venv packages-lint ## rewrite Python and C++ in the house style
	@$(VENV)/ruff check --fix
	@$(VENV)/ruff format
	@clang-format -i $(cxx_files)

proto: venv ## Python modules for proto/
	@tools/stubs write

.PHONY: clean
clean: ## remove what was built; models in the store stay
	rm -rf build .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
