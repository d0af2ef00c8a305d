# Two commands do everything on a fresh machine: `make serve` and `make test`. Both make .venv first.

PYTHON ?= $(firstword $(shell for p in python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done))
BIN := .venv/bin
RUN := $(BIN)/python -m

.PHONY: serve test test-all lint bench-cpu bench-host clean

serve: .venv/serve
	@$(RUN) tpu_infer.cli serve

test: .venv/test lint
	$(RUN) pytest -m "not slow and not network" $(PYTEST_ARGS)

test-all: .venv/test lint
	$(RUN) pytest $(PYTEST_ARGS)

lint: .venv/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

bench-cpu: .venv/test
	$(RUN) bench.cpu $(BENCH_ARGS)

bench-host: .venv/test
	$(RUN) bench.host $(BENCH_ARGS)

.venv/python: .python-version
	@test -n "$(PYTHON)" || { echo "Python 3.12 or later was not found; install it or set PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/serve: .venv/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/test: .venv/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,bench]'
	@touch $@ .venv/serve

clean:
	rm -rf .venv .cache
