# Everything happens in .venv; a fresh machine needs Python 3.11 or newer, pip and make.
.DEFAULT_GOAL := help
.PHONY: help demo test pytest slow compiled sanitize mutation mutation-sample lint types compile-check compile-versions docs notebooks kernels-package results dist release-check venv clean

VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
MUTATION_ARGS ?=
RELEASE_ARGS ?=
SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))

# The first of these that is new enough; `make demo PYTHON=/path/to/python3.12` names another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if $$p -c '$(SUPPORTED)' 2>/dev/null; then echo $$p; break; fi; done)

# pip's progress bars in a terminal, silence in a log.
QUIET_PIP := python -m pip install --disable-pip-version-check $(shell test -t 2 || echo --quiet)
PIP := $(BIN)/$(QUIET_PIP)

# One thread for each of pytest's two workers.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## train a text classifier, classify three sentences, and make 64 pictures of digits
	$(BIN)/minidl train text --data docstrings --out runs/demo --overwrite
	$(BIN)/minidl predict runs/demo \
		"Compute the logarithm of a number to a given base" \
		"Open a socket and wait for clients to connect" \
		"Start a thread and wait until it has finished"
	$(BIN)/minidl generate --grid 8x8 --out runs/demo-pictures --overwrite

test: lint types pytest ## lint, types and the test suite without what takes long

pytest: $(VENV)/.installed-dev ## the test suite alone; PYTEST_ARGS="-k gemm" picks tests
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal -rs -m "not slow" $(PYTEST_ARGS)

slow: $(VENV)/.installed-dev ## the tests that take more than ten seconds each
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal -rs -m slow $(PYTEST_ARGS)

compiled: $(VENV)/.installed-dev ## every operation once more in float32 and bfloat16, compiled for the CPU; skipped without a C compiler
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal --device compiled -rs tests/cpu tests/test_operations.py \
		-k "cpu or (test_fixed_examples and (float32 or bfloat16))" $(PYTEST_ARGS)

sanitize: $(VENV)/.installed-dev ## every operation and kernel again, each load and store checked
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal --device cpu --sanitize -rs tests/test_operations.py tests/kernels \
		tests/interpreter/test_patches.py $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## ruff and the layers of the design
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev ## mypy, strict, on the public API
	$(BIN)/python -m mypy

mutation: $(VENV)/.installed-dev ## judge the mutants of kernels that have no verdict yet; MUTATION_ARGS="--only gemm --sample 50" draws some
	$(BIN)/python -m tests.mutation $(MUTATION_ARGS)

mutation-sample: $(VENV)/.installed-dev ## two minutes of mutants, drawn by the commit, that tests have seen: do they still?
	$(BIN)/python -m tests.mutation --repeat --minutes 2 --seed $$(git rev-parse HEAD 2>/dev/null || echo 0)

compile-check: $(VENV)/.installed ## compile every kernel for sm_80 and sm_90; needs no GPU
	$(BIN)/minidl doctor --compile --arch 80,90 --brief 80

# An environment of each version's own holds Triton alone; everything else is read from .venv, behind it on the path.
PACKAGES = $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

compile-versions: $(VENV)/.installed-dev ## compile and interpret the kernels with Triton 3.6.0 and 3.9.0 as well
	for v in 3.6.0 3.9.0; do \
		test -e .venv-triton$$v/.installed || { $(BIN)/python -m venv .venv-triton$$v && \
		.venv-triton$$v/bin/$(QUIET_PIP) --no-deps triton==$$v && \
		$(PACKAGES) > $$(echo .venv-triton$$v/lib/python*/site-packages)/base.pth && \
		touch .venv-triton$$v/.installed; } || exit 1; \
	done
	$(BIN)/python -m pytest -n 2 tests/tools/doctor/test_versions.py tests/tools/doctor/test_usual.py \
		-k "3.6.0 or 3.9.0" -rs
	for v in 3.6.0 3.9.0; do \
		$(ONE_THREAD) .venv-triton$$v/bin/python -m pytest -n 2 -q tests/interpreter/test_patches.py tests/testing/sanitizer \
			tests/test_operations.py \
			-k "test_patches or test_sanitize or (test_fixed_examples and float32)" || exit 1; \
	done

docs: $(VENV)/.installed-docs ## the site of the documentation, in docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -d docs/_build/doctrees -b html docs docs/_build/html

notebooks: $(VENV)/.installed-dev ## run the notebooks and write their .ipynb from the text sources
	$(BIN)/python notebooks/run.py

kernels-package: $(VENV)/.installed ## the operators in torch as a package of Hugging Face's kernels, in dist/kernels
	$(BIN)/python -m minidl.tools.kernels_package dist/kernels

results: $(VENV)/.installed ## the table and the charts of the committed results of an H200
	$(BIN)/python -m benchmarks.bench.results_page benchmarks/results/nvidia-h200.json docs/performance.md \
		benchmarks/results/nvidia-h200.svg benchmarks/results/nvidia-h200-short.svg

dist: $(VENV)/.installed-release ## the wheel and the source distribution, in dist/
	rm -f dist/minidl-*
	$(BIN)/python -m hatchling build -d dist

# Most of it is torch, of which each Python gets several gigabytes. RELEASE_ARGS=--write renews docs/licences.md.
release-check: dist ## whether dist/ can be released, installed by each Python on PATH: 3 minutes of a core for each
	$(BIN)/python -m tests.release $(RELEASE_ARGS)

venv: $(VENV)/.installed-dev ## make the virtual environment with all the tools

$(BIN)/python:
	@if ! "$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null; then \
		echo "minidl needs Python 3.11 or newer, found $$($(or $(PYTHON),python3) --version 2>&1)." \
			"Install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; \
	fi
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# pip learnt --group in 25.1; Python 3.11 comes with an older one.
$(VENV)/.pip: | $(BIN)/python
	$(PIP) --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.pip
	@echo "Installing minidl into $(VENV): some minutes the first time"
	$(PIP) -c constraints.txt -e ".[plots]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the test and lint tools into $(VENV)"
	$(PIP) -c constraints.txt -e ".[plots,notebooks]" --group test --group lint
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "Installing what makes the site into $(VENV)"
	$(PIP) -c constraints.txt -e ".[plots,notebooks]" --group docs
	@touch $@

$(VENV)/.installed-release: pyproject.toml constraints.txt $(VENV)/.pip
	@echo "Installing what builds and checks a release into $(VENV)"
	$(PIP) -c constraints.txt --group release
	@touch $@

clean: ## remove the virtual environment, caches and build products; runs/ stays
	rm -rf $(VENV) .venv-triton* dist build docs/_build docs/_pages .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
