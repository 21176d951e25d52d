# Two commands do everything on a fresh Debian machine with python3, g++ and make: `make demo`, `make test`.
PYTHON ?= python3
BIN := .venv/bin
DEV := clang-format flask flask-cors hypothesis mkdocs-material mkdocstrings[python] moto[s3] mypy pytest pytest-timeout pytest-xdist ruff scikit-learn scipy tensorboard triton
# What only the long tests need: a browser's driver, and the tools that our loaders and loggers work with.
LONG := accelerate lightning ogb playwright pytorch-frame relbench venv-pack wandb
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest
TOGETHER := $(PYTEST) --numprocesses $(WORKERS) --dist worksteal
CORE := $(wildcard csrc/*.cpp csrc/*.h) CMakeLists.txt pyproject.toml

# Tests start a hundred processes: none of them compiles again what another one has compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all torch-matrix wheels lint format asan tsan fuzz bench docs clean

.venv/tools: constraints.txt
	scripts/venv.sh $(PYTHON)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --timeout 120 --retries 10 -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt scikit-build-core nanobind cmake ninja
	touch $@

# Editable: Python changes need no build, changes of the core rebuild it. What only some uses need comes with dev.
.venv/installed: .venv/tools $(CORE)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation --editable .
	touch $@

.venv/dev: .venv/installed
	scripts/java.sh
	scripts/services.sh
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation --editable '.[all]'
	$(BIN)/python -m pip install --quiet -c constraints.txt $(DEV)
	touch $@

.venv/long: .venv/dev
	scripts/browser.sh
	$(BIN)/python -m pip install --quiet -c constraints.txt $(LONG)
	touch $@

demo: .venv/installed
	test -d demo/graph.store || $(BIN)/hoploom generate demo/graph.store --nodes 120000 --features 100 --classes 40 --homophily 0.5
	rm -rf demo/run
	$(BIN)/hoploom train examples/demo.toml

# No test needs the machine for itself, but for slow ones.
test: .venv/dev lint
	$(TOGETHER) -m "not slow"

test-all: .venv/long lint asan
	$(TOGETHER) -m "not slow"
	$(PYTEST) --numprocesses 2 --dist worksteal -m slow
	scripts/torch_matrix.sh

# One wheel beside four versions of torch, one after the other; each takes 7 GB while it runs.
torch-matrix: .venv/dev
	scripts/torch_matrix.sh

# dist/: the source archive and wheels for Linux; docs/releasing.md.
wheels:
	scripts/wheels.sh

lint: .venv/dev
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp csrc/tests/*.cpp csrc/tests/*.h

format: .venv/dev
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/clang-format -i csrc/*.h csrc/*.cpp csrc/tests/*.cpp csrc/tests/*.h

# The core under AddressSanitizer and UndefinedBehaviorSanitizer: unit tests and a bounded fuzz run.
asan:
	$(MAKE) -C csrc/tests asan

tsan:
	$(MAKE) -C csrc/tests tsan

fuzz:
	$(MAKE) -C csrc/tests fuzz

bench: .venv/dev
	$(BIN)/python benchmarks/run.py

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build site demo
