# The two commands a person needs are `make serve` and `make test`. Each first brings .venv in line with the lock.
.DEFAULT_GOAL := help
.PHONY: help serve test test-gpu exhaustive soak clients lint lock clean

# CUDA=12 installs jax for NVIDIA GPUs, CUDA=none for CPUs; by default the machine decides.
CUDA ?= $(if $(shell nvidia-smi -L 2>/dev/null),12,none)
ifeq ($(filter 12 none,$(CUDA)),)
$(error CUDA=$(CUDA) has no lock file; use CUDA=12 or CUDA=none. CUDA 13: pip install -e '.[cuda13,dev]' by hand)
endif

unexport PYTHONDONTWRITEBYTECODE  # tests start dozens of Pythons, each of which would compile this package

ARGS ?=
LOCK := requirements$(if $(filter 12,$(CUDA)),-cuda12).lock
PY   := .venv/bin/python
READY := .venv/.ready-$(LOCK)
PYTEST := $(PY) -m pytest
LOCKED := uv pip compile pyproject.toml --extra dev --universal --python-version 3.12 --generate-hashes \
	--no-annotate --quiet --upgrade --custom-compile-command 'make lock'

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
		printf 'make %-10s %s\n' "$$name" "$$text"; done

serve: $(READY)  ## serve a model on an OpenAI-compatible API; flags: make serve ARGS="--model M --draft D --port 8000"
	@exec $(PY) -m server $(ARGS)

# Three workers: tests wait for processes and sockets, too. On two cores that takes a fifth less time than two do.
# Without a limit on restarts, xdist waits for ever for a worker that crashed. It would start with the files of most
# tests, which aren't those that take longest (tests/conftest.py).
test: $(READY)  ## run the tests on the CPU; one file: make test ARGS=tests/models/test_models.py
	@$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

test-gpu: $(READY)  ## run the tests that need an NVIDIA GPU
	@JAX_PLATFORMS=cuda,cpu $(PYTEST) -m gpu $(ARGS)

exhaustive: $(READY)  ## run the tests that take every combination of what `make test` samples
	@$(PYTEST) -m 'exhaustive and not gpu' -n auto --maxprocesses 4 --dist load $(ARGS)

soak: $(READY)  ## run the ten-minute load test
	@$(PYTEST) -m soak $(ARGS)

clients: $(READY)  ## run people's own clients against a live demo server; some: make clients ARGS="openai litellm"
	@$(PY) clients/run.py $(ARGS)

lint: $(READY)  ## check style and formatting
	@$(PY) -m ruff check --quiet && $(PY) -m ruff format --check --quiet || \
		{ echo 'make lint: to fix, run: $(PY) -m ruff check --fix && $(PY) -m ruff format' >&2; exit 1; }

lock:  ## choose the newest versions anew and write the lock files (needs uv: pip install uv)
	@$(LOCKED) --output-file requirements.lock
	@$(LOCKED) --extra cuda12 --constraint requirements.lock --output-file requirements-cuda12.lock

clean:  ## remove the environment and every cache
	@rm -rf .venv .venv-clients .cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml $(LOCK) scripts/setup.sh
	@sh scripts/setup.sh $(LOCK)
	@touch $@
