# `make train` and `make test` do all set-up on a fresh machine: .venv is made and filled once, and again only when
# pyproject.toml or the pin changes. `make PYTHON=python3.12 test` chooses the interpreter.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
READY := .venv/ready
SOURCES := $(wildcard fzero tests property_tests examples benchmarks)

.PHONY: train test check format clean

train: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_bytes.py $(ARGS)

test: $(READY)
	$(BIN)/pytest tests property_tests $(ARGS)

check: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

$(READY): pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -r requirements-dev.txt
	$(BIN)/pip install -q -e '.[test,examples,dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
