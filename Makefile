# Set up, try, test. Every target first makes .venv if it is missing; PYTHON=/path uses an existing environment instead.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

SEED ?= 0
RUN ?= runs/quickstart
HAS_GPU := $(shell [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1 && echo yes)
# GPUs that a process here sees: those that CUDA_VISIBLE_DEVICES names, else all; of slices of them (MIG) only one.
GPUS := $(if $(HAS_GPU),$(shell nvidia-smi --list-gpus 2>/dev/null | \
  awk -v seen="$${CUDA_VISIBLE_DEVICES-all}" '/^GPU/ { all++ } /MIG/ { sliced = 1 } END { \
    sub(/(^|,) *-.*/, "", seen); count = seen == "all" ? all : split(seen, names, ","); \
    if (all && count > all) count = all; if (count > 1 && (sliced || seen ~ /MIG/)) count = 1; print count + 0 }'))
# The quickstart's ranks: 2, or 1 on a machine with a single GPU.
RANKS ?= $(if $(filter 1,$(GPUS)),1,2)
# Two test files at a time: a machine with 2 cores is idle half of the time while ranks start.
TWO_FILES := -n 2 --dist loadfile
REQUIREMENTS := $(if $(HAS_GPU),requirements.txt,requirements-cpu.txt)

ifeq ($(origin PYTHON),command line)
PY := $(PYTHON)
SETUP :=
else
PY := .venv/bin/python
SETUP := setup
endif
export OMP_NUM_THREADS ?= 1

.PHONY: help setup quickstart test test-slow test-next lint

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed 's/:.*## /|/' | column -t -s '|'

setup:  ## make .venv and install; does nothing while the requirements file is unchanged
	@bash .ci/setup $(REQUIREMENTS)

quickstart: $(SETUP)  ## train a tiny model with GRPO until its accuracy rises (SEED=k for another seed)
	@$(PY) -m recipes.prepare_arithmetic --out data/arithmetic --seed $(SEED)
	@$(PY) -m recipes.make_tiny_model --data data/arithmetic --out models/tiny-arithmetic --seed $(SEED)
	@$(PY) -m torch.distributed.run --nproc_per_node=$(RANKS) -m recipes.grpo_tiny_arithmetic \
	    --run-dir $(RUN) --seed $(SEED) --overwrite $(ARGS)
	@echo
	@echo "What next: open $(RUN)/report.html in a browser, look at $(RUN)/samples/,"
	@echo "make a Hugging Face folder of the checkpoint, evaluate that, then train on"
	@echo "your own data:"
	@echo "  $(PY) merge.py --local-dir $(RUN)/global_step_$$(cat $(RUN)/latest_checkpointed_iteration.txt)/actor \\"
	@echo "      --target-dir models/quickstart"
	@echo "  $(PY) -m torch.distributed.run --nproc_per_node=$(RANKS) eval.py --model.path models/quickstart \\"
	@echo "      --data.files data/arithmetic/val.parquet --data.max-prompt-len 32 --rollout.max-response-len 12 \\"
	@echo "      --output $(RUN)/answers.parquet"
	@echo "  $(PY) -m torch.distributed.run --nproc_per_node=$(RANKS) train_grpo.py --help"

test: $(SETUP)  ## the test suite, 15 minutes on 2 idle cores
	$(PY) -m pytest -q $(TWO_FILES) -m "not slow and not gpu"

test-slow: $(SETUP)  ## the tests that take longer
	$(PY) -m pytest -q $(TWO_FILES) -m "slow and not gpu"

NEXT := $(CURDIR)/.venv/next
test-next: $(SETUP)  ## the engine's tests and a recipe with the next vLLM, on a CPU
	rm -rf $(NEXT)
	$(PY) -m pip --disable-pip-version-check install -q --no-input --progress-bar off --no-deps --target $(NEXT) \
	    -r requirements-cpu-next.txt
	PYTHONPATH=$(NEXT) $(PY) -m pytest -q $(TWO_FILES) \
	    tests/test_block_hashes.py tests/test_decoding.py tests/test_fast_paths.py tests/test_rollout.py
	PYTHONPATH=$(NEXT) $(PY) -m pytest -q tests/test_recipes.py -k "two_steps and grpo_tiny and not dr_grpo"

lint: $(SETUP)  ## formatting and static checks
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
