# make run · make test · make lint · make bench · make clean
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CLIENTS ?= 10
CONFIG ?=

# A private home and ports for Flower, so that `make run` neither meets nor disturbs a SuperLink of yours.
export FLWR_HOME := $(CURDIR)/.flwr
export FLWR_LOCAL_SUPERLINK_HTTP_API_PORT ?= 39291
export FLWR_LOCAL_CONTROL_API_PORT ?= 39293
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1
export FLWR_TELEMETRY_ENABLED := 0
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: run test test-fast lint format bench clean certificates demo demo-down

$(BIN)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

run: $(BIN)/.installed  ## a FedProto federation of 10 clients; make run CONFIG='algo="local"' CLIENTS=20
	@sh configs/simulate.sh $(CLIENTS) '$(CONFIG)'

test: $(BIN)/.installed  ## every test
	$(BIN)/python -m pytest

test-fast: $(BIN)/.installed  ## without the whole-system tests
	$(BIN)/python -m pytest -m 'not system'

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BIN)/.installed  ## speed against a bare PyTorch script; DATA_DIR holds FashionMNIST/raw
	$(BIN)/python -m tests.bench.round_speed --data-dir '$(DATA_DIR)'

clean:  ## caches and Flower's private home; runs/ and .venv/ stay
	rm -rf .flwr .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

SERVERS ?= localhost 127.0.0.1
NODES   ?=

certificates: $(BIN)/.installed  ## keys and certificates in certs/; make certificates SERVERS='my.host 10.0.0.5' NODES='north'
	$(BIN)/python docker/certificates.py certs $(SERVERS:%=--server %) $(NODES:%=--node %)

demo:  ## a SuperLink and three sites in containers: one run and its result; KEEP=1 leaves them running
	@sh docker/demo.sh

demo-down:  ## take the demo's containers down, with their volumes
	@sh docker/demo.sh down
