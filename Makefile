# `make train` and `make test` do all set-up on a fresh machine: .venv is made and filled once, and again only when
# pyproject.toml or the pin changes. `make PYTHON=python3.12 test` chooses the interpreter, `make WORKERS=4 test` how many
# processes run tests: one a core without it, and one more for those of `make test-rest`.

PYTHON ?= python3
ARGS ?=
EXAMPLES ?= 1000
MINUTES ?= 2
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count())')
BIN := .venv/bin
SITE := build/docs
READY := .venv/ready
SOURCES := $(wildcard fzero tests property_tests examples benchmarks tools)

.PHONY: train test test-rest test-all wheel release site trl versions steps axes layers surroundings prove conformance arguments mutate check format clean

train: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_bytes.py $(ARGS)

# Python keeps what it compiles: runs of tests start a hundred processes, each of which would compile fzero anew.
export PYTHONDONTWRITEBYTECODE :=

# A worker has one thread, as a rank has: with more, threads of one worker would spin on the core of another.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --dist loadfile --no-loadscope-reorder tests property_tests
# Many tests wait for processes, and leave their core to one worker more.
MORE := $(shell expr $(WORKERS) + 1 2> /dev/null || echo $(WORKERS))

# The tests of a newcomer, in minutes: of each function one case, and no processes but those of a smoke run.
test: $(READY)
	$(PYTEST) -n $(WORKERS) --tier=quick $(ARGS)

# What `make test` leaves out.
test-rest: $(READY)
	$(PYTEST) -n $(MORE) --tier=rest $(ARGS)

# Both.
test-all: $(READY)
	$(PYTEST) -n $(MORE) $(ARGS)

# The sdist and the wheel, and the wheel's life in an environment with the declared dependencies alone.
wheel: $(READY)
	$(BIN)/python tools/try_wheel.py

# The sdist and the wheel in dist/, checked and tried. Nothing is uploaded. `make release ARGS=--rehearse` before it is time.
release: $(READY)
	$(BIN)/python tools/release.py $(ARGS)

# The documentation as a site in build/site, with pages of all public names. A link that leads nowhere is an error. The
# tools have an environment of their own, without torch: pages read fzero's source, and other targets use .venv meanwhile.
# mkdocs counts no warning that --quiet hides, and --strict would pass.
site: $(SITE)/ready
	PATH=$(CURDIR)/$(SITE)/bin:$$PATH NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict $(ARGS)

$(SITE)/ready: pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(PYTHON) -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*extras["docs"], sep="\n")' > $(SITE)/requirements.txt
	$(SITE)/bin/pip install -q -r $(SITE)/requirements.txt
	touch $@

# The tests of TRL's trainers, which other runs skip: TRL brings 270 MB, and they take five minutes.
trl: $(READY)
	$(BIN)/pip install -q -e '.[trl]'
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) tests/hf/test_hf_trl*.py $(ARGS)

# `make test` with the oldest and the newest torch and others of Python, in environments of gigabytes: see tools/versions.py.
versions:
	$(PYTHON) tools/versions.py $(ARGS)

# MINUTES of random train steps against plain torch, other ones each time. `make steps ARGS="--seed 12"` shows one.
steps: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m property_tests.random_steps --minutes $(MINUTES) --workers $(WORKERS) $(ARGS)

# Random models on data and model axes against one device. `make axes ARGS="--count 2000"`, or `ARGS="--seed 12"` for one.
axes: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m property_tests.random_axes --workers $(WORKERS) $(ARGS)

# Random lists of layers, with habits that equal layers may have, against plain torch. ARGS as of `axes`.
layers: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m property_tests.random_layers --workers $(WORKERS) $(ARGS)

# Random ways to hold a value around a step, and to read it there, which changes between calls. ARGS as of `axes`.
surroundings: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m property_tests.random_surroundings --workers $(WORKERS) $(ARGS)

# Random steps, then EXAMPLES random cases of each property, and a fifth of it of those that run a step: hours.
prove: $(READY)
	$(MAKE) steps ARGS=
	$(BIN)/pytest property_tests --hypothesis-profile=deep --examples=$(EXAMPLES) $(ARGS)

# torch's operators, modules and optimizers, with all their samples, against tests/conformance/table.txt: about an hour of
# one core. A run that was stopped goes on. `make conformance ARGS=--write` rewrites the table and docs/conformance.md;
# ARGS="--samples 1 --write" does so from one sample of each form and dtype, in five minutes.
conformance: $(READY)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m conformance --workers $(WORKERS) $(ARGS)

# The tables of TrainingArguments in docs/huggingface.md, from the installed transformers.
arguments: $(READY)
	$(BIN)/python tools/hf_arguments.py

# Mutants of the partition math and the passes, in a copy under build/; `make mutate ARGS="layout donate"` for some.
mutate: $(READY)
	$(BIN)/python tools/mutate.py $(ARGS)

check: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python tools/api.py

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
