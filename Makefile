# make serve needs nothing but a Python 3.11 or later; everything lands in .venv and in the user's cache.

PYTHON ?= python3
ARGS ?=
FULL ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SETTINGS := pyproject.toml constraints.txt
READY := $(VENV)/.ready
TEST_READY := $(VENV)/.ready-for-tests
CLIENTS := .clients
WHEEL := .wheel
WHEEL_READY := $(WHEEL)/.ready
CLIENTS_READY := $(CLIENTS)/.ready
SOURCES := faser tests benchmarks deploy examples

.DEFAULT_GOAL := help
.PHONY: help setup serve check test page-tests clients flashinfer deploy-tools ray wheel try-wheel format docs clean

help:
	@echo "make setup            create .venv and install FASER"
	@echo "make serve            set up, fetch the default model, serve it on 127.0.0.1:8000"
	@echo "                      flags: make serve ARGS=\"--port 8001 --max-num-seqs 8\""
	@echo "make test             install what the tests need, and run them"
	@echo "make clients          install other clients (Claude Code, opencode, aider, LangChain, …), and run them"
	@echo "make page-tests       install what drives a browser, and try the page in Chromium"
	@echo "make flashinfer       install FlashInfer's sources, so that make test holds calls against them"
	@echo "make deploy-tools     install what renders and validates deploy/, so that make test checks it"
	@echo "make ray              install Ray, so that make test tries replicas and batches on it"
	@echo "make wheel            build and audit the wheels, into dist; needs no compiler of this machine"
	@echo "make try-wheel        install that wheel where there is no compiler, and run it"
	@echo "make check            format, lint, types, and the lines of code of each area against budget.toml"
	@echo "make format           put the sources into shape"
	@echo "make docs             write docs/cli.md, models.md and api.md anew from the code"
	@echo "make clean            remove .venv and what tools left behind"
	@echo "make … PYTHON=python3.12   use another interpreter than python3"

setup: $(READY)

serve: $(READY)
	@$(BIN)/faser serve $(ARGS)

# A process for each core, and one more for the time in which tests wait; a file's tests stay together, as they share what
# takes long to make. Bytecode is kept even where the environment forbids it: hundreds of processes would compile it anew.
test: export PYTHONDONTWRITEBYTECODE =
test: $(TEST_READY)
ifeq ($(strip $(ARGS)),)
	@$(BIN)/pytest $(FULL) --numprocesses $$($(BIN)/python -c 'import os; print(1 + os.cpu_count())') --dist loadfile -m "not alone and not clients and not page and not wheel"
	@$(BIN)/pytest $(FULL) -m alone $$(grep -rl "mark.alone" tests --include="test_*.py")
else
	@$(BIN)/pytest $(ARGS)
endif

# Other clients, and agents through their tool loops, against a server. Their packages are in .clients, because they
# want other versions of some that FASER's tests use. Needs npm.
clients: $(TEST_READY) $(CLIENTS_READY)
	@$(BIN)/pytest -m clients --clients $(CLIENTS) tests/clients

$(CLIENTS_READY): tests/clients/requirements.txt tests/clients/requirements-aider.txt tests/clients/package.json
	@command -v npm > /dev/null || { \
	  echo "make clients needs npm, for the client of Node; on Debian: apt install npm"; exit 1; }
	@echo "installing clients into $(CLIENTS), 1.8 GB"
	@$(PYTHON) -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
	  --requirement tests/clients/requirements.txt
	@$(PYTHON) -m venv --clear $(CLIENTS)/aider
	@$(CLIENTS)/aider/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
	  --requirement tests/clients/requirements-aider.txt
	@cp tests/clients/package.json $(CLIENTS)
	@cd $(CLIENTS) && npm install --no-audit --no-fund --silent
	@touch $@

# The page in a real browser.
page-tests: $(TEST_READY)
	@command -v chromium > /dev/null || { \
	  echo "make page-tests needs Chromium; on Debian: apt install chromium"; exit 1; }
	@$(PIP) --editable ".[page-tests]"
	@$(BIN)/pytest -m page tests/page $(ARGS)

# Without what it depends on: several GB that only a GPU has a use for.
flashinfer: $(TEST_READY)
	@echo "installing FlashInfer, 850 MB"
	@$(PIP) --no-deps flashinfer-python apache-tvm-ffi nvidia-ml-py

deploy-tools: $(TEST_READY)
	@echo "installing what checks deploy/, 100 MB"
	@$(PIP) --editable ".[deploy]"

ray: $(TEST_READY)
	@echo "installing Ray, 600 MB"
	@$(PIP) --editable ".[ray]"

# What builds a wheel is an environment of its own: no torch, and a compiler of 100 MB.
wheel: $(WHEEL_READY)
	@$(WHEEL)/bin/python -m deploy.wheel $(ARGS)

$(WHEEL_READY): deploy/wheel/requirements.txt constraints.txt
	@echo "installing what builds the wheel into $(WHEEL), 500 MB"
	@$(PYTHON) -m venv --clear $(WHEEL)
	@$(WHEEL)/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt \
	  --requirement deploy/wheel/requirements.txt
	@touch $@

try-wheel: $(TEST_READY)
	@$(BIN)/pytest -m wheel --wheels dist tests/deploy/wheel

check: $(TEST_READY)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/mypy --num-workers auto
	@$(BIN)/python -m benchmarks.budget

format: $(TEST_READY)
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

docs: $(TEST_READY)
	@$(BIN)/faser serve --help=markdown > docs/cli.md
	@$(BIN)/faser models --markdown > docs/models.md
	@$(BIN)/python -m tests.api.surface.page > docs/api.md

clean:
	rm -rf $(VENV) $(CLIENTS) $(WHEEL) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

# A virtual environment made by an interrupted run is made again: only the stamps say that it is whole.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "FASER needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot create virtual environments; on Debian: apt install python3-venv"; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)

$(READY): $(SETTINGS) | $(BIN)/python
	@echo "installing torch and FASER into $(VENV), 700 MB on a CPU; this takes a minute or two the first time"
	@$(PIP) torch
	@$(PIP) --editable .
	@touch $@

$(TEST_READY): $(READY)
	@echo "installing what the tests need"
	@$(PIP) --editable ".[test]"
	@touch $@
