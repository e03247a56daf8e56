# Everything sets itself up: the first target that needs it makes .venv. Nothing is compiled, nothing installed system-wide;
# but `make arm64`, started by root, installs QEMU and debootstrap where they are missing, and else says how to.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# These change speed, not bits: torch's and Numba's thread pools must not spin against each other.
export OMP_WAIT_POLICY := PASSIVE
export NUMBA_THREADING_LAYER := workqueue

SLOW := tests --ignore tests/ui # what `make test-slow` takes them from

.DEFAULT_GOAL := help
.PHONY: help install demo demo-slow test test-slow ptx conformance worlds chaos attacks corpus s3 page arm64 bench-cpu \
	bench-corpus bench-s3 unit-1b olmes ui lint serve clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; try: make PYTHON=/path/to/python3.11")'
	@echo "Setting up .venv (about two minutes, once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: .venv/installed ## only set up .venv, which every other target does itself

demo: .venv/installed ## raw text to audited steps, on this computer (about 5 minutes)
	$(BIN)/python -m flows.demo

demo-slow: .venv/installed ## the same on one thread and without AMX or VNNI: the same roots, under 25 minutes
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=AVX512_CORE $(BIN)/python -m flows.demo

test: lint ## style, types and all tests but the slow ones, two files at a time (about 15 minutes)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not s3 and not ui and not browser' --ignore tests/ui

test-slow: .venv/installed ## the slow tests: other instruction sets, long runs, memory at its limit, chaos in short (about 35 minutes)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'slow and not s3 and not ui and not browser' $(SLOW)

ptx: .venv/installed ## every NVIDIA kernel compiled and read, no GPU needed (about 6 minutes; Linux on x86-64)
	$(BIN)/python -m tests.kernels.nvidia.ptx

conformance: .venv/installed ## the same bits under every instruction set and thread count here (about 5 minutes)
	$(BIN)/python -m tests.conformance

worlds: .venv/installed ## one trajectory from worlds of 1, 2, 3, 4 and 6 processes, in any grouping (about 6 minutes)
	$(BIN)/python -m tests.worlds.run
	$(BIN)/python -m tests.worlds.ordered
	$(BIN)/python -m tests.worlds.resume

chaos: .venv/installed ## more than 50 kills of a small run, which must end as the undisturbed one (about 20 minutes)
	$(BIN)/python -m tests.chaos

attacks: .venv/installed ## cheats, forgeries and hostile files, each beside its honest twin and with its exact verdict (about 2 minutes)
	$(BIN)/python -m pytest -q tests/attacks

corpus: .venv/installed ## one mix by 1 to 5 workers, in other surroundings and through kills: the same bytes (about 5 minutes, and 4 on Ray)
	$(BIN)/python -m tests.corpus
	$(BIN)/python -m tests.corpus.on_ray

s3: .venv/installed ## stores at s3:// on a real server, SeaweedFS, which it installs and starts (about 40 minutes)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[s3]'
	$(BIN)/python -m pytest -m s3 tests/s3

page: .venv/installed ## the report page in a headless Chromium: 80,957 steps, no mouse, a phone (about 2 minutes)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[ui]'
	$(BIN)/python -m tests.browser.chromium
	$(BIN)/python -m pytest -s -m browser tests/browser

arm64: .venv/installed ## the same bits on arm64 under QEMU, prepared at first (about 11 minutes, then 4)
	$(BIN)/python -m tests.conformance.arm64

bench-cpu: .venv/installed ## a full step against stock PyTorch, and each kernel against its floor (about 15 minutes)
	$(BIN)/python -m tests.bench.cpu

bench-corpus: .venv/installed ## preparing a mix beside HF tokenizers and datatrove (about 5 minutes)
	$(BIN)/python -m tests.bench.corpus

bench-s3: .venv/installed ## 1 GB to a server at s3:// and back, beside botocore's transfer manager (about 5 minutes)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[s3,bench]'
	$(BIN)/python -m tests.bench.s3

unit-1b: .venv/installed ## one unit and one step of the 1.608 B shape within 22 GB (an hour or less; 13 GB of disk)
	@mkdir -p runs
	$(BIN)/python -m tests.bench.unit_1b
	$(BIN)/python -m tests.bench.unit_1b --step runs

olmes: ## only set up .venv-olmes, in which lm-eval asks an exported model tasks (verbatim score)
	@test -x .venv-olmes/bin/python || $(PYTHON) -m venv .venv-olmes
	.venv-olmes/bin/python -m pip install -qq --disable-pip-version-check -r deployments/olmes.txt

ui: .venv/installed ## the UI in a browser, real server and worker, cancelled and killed (about 10 minutes; needs chromium)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[ui]'
	$(BIN)/python -m pytest tests/ui

lint: .venv/installed ## style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

serve: .venv/installed ## the UI with the runs' history, and a worker that starts deployments
	$(BIN)/python -m flows.serving

clean: ## remove the environment and runs/: every run, certificate and signing key
	rm -rf .venv .venv-olmes runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache
