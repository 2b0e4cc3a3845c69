# Needs only python3 (3.11 or later) with its venv module, and network access for the first call.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two workers: JAX compiles with several threads by itself. Each begins with one half of the tests,
# so that those of one file mostly share what they compile.
PYTEST_ARGS ?= -n 2 --dist worksteal
# A quarter of the time, which few changes need: JAX's own harnesses, programs of its libraries, random
# programs, benchmarks, and wheels. `.ci/run` runs them, too.
LONG ?= tests/conformance tests/ecosystem tests/fuzz tests/benchmarks tests/test_packaging.py
# The extra of pyproject.toml that is installed.
EXTRA ?= dev
# uv takes a fifth of what pip takes, but reads no pip.conf: an index that only pip knows is asked by
# pip, behind what uv says.
comma := ,
install = $(BIN)/python -m uv pip install --quiet --system-certs --python $(BIN)/python $(1) || \
    $(BIN)/python -m pip install --quiet --no-compile $(1)

# Without these files each process, and tests start many, would compile all of JAX's Python anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test deviceless check format clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/installed ## train a digit classifier, captured whole, and write digits_loss.png
	$(BIN)/python examples/03_train_digits.py

test: $(VENV)/installed ## run the tests; LONG= also runs those that take long
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(LONG:%=--ignore=%)

# XLA may look for a GPU otherwise, and finds a plugin without its libraries.
deviceless: export JAX_PLATFORMS := cpu
deviceless: export TRACEGRAPH_REQUIRE_DEVICELESS := 1
deviceless: $(VENV)/deviceless ## run the tests that compile for an H200 without one (PYTHON=python3.12 or later)
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/deviceless tests/lowering

# Most of what the type checker makes stays: with a small space for what is new, it is copied often.
check: $(VENV)/installed build/typecheck ## lint, check the format, check the types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	NODE_OPTIONS="$$NODE_OPTIONS --max-semi-space-size=256" $(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/installed ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove everything that the other targets made
	rm -rf .venv .venv-newest build dist *.egg-info

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tracegraph needs Python 3.11 or later; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile uv
	$(call install,--editable '.[$(EXTRA)]')
	touch $@

# Compiling for a GPU needs 1.2 GB of wheels; their dependencies, 3 GB more, are for running on one.
# With nvJitLink, which `jax[cuda]` brings, XLA assembles in its own process, and starts no ptxas.
$(VENV)/deviceless: $(VENV)/installed
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
	{ $(call install,--no-deps 'nvidia-cuda-nvcc-cu12>=12.9' 'nvidia-cuda-nvrtc-cu12>=12.9' \
	    'nvidia-nvjitlink-cu12>=12.9' \
	    "jax-cuda12-plugin==$$version" "jax-cuda12-pjrt==$$version"); }
	$(call install,'cuda-bindings>=12.9$(comma)<13')
	touch $@

# Type checkers do not run the line that joins the layers, so they get a tree of links in which
# `lowering/` and `runtime/` stand inside `tracegraph/`.
.PHONY: build/typecheck
build/typecheck:
	@rm -rf $@
	@$(BIN)/python -c 'import os, shutil; \
	    link = lambda folder, place: shutil.copytree( \
	        os.path.abspath(folder), "$@/" + place, copy_function=os.symlink); \
	    [link(each, each) for each in ("tracegraph", "tests", "examples", "benchmarks")]; \
	    [link(each, "tracegraph/" + each) for each in ("lowering", "runtime")]'
