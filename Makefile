# make help lists what there is.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CLIENTS ?=
CONFIG ?=

export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1
export FLWR_TELEMETRY_ENABLED := 0
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help run table reproduce quick test test-system test-long coverage docs verdicts test-gpu fuzz mutants lint format bench bench-gpu bench-peers bench-scale bench-deployment bench-sites clean certificates demo demo-down faults

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "make %-16s %s\n", $$1, $$2}' Makefile

$(BIN)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

run: $(BIN)/.installed  ## prototypes beside FedAvg and training alone, in two minutes; make run CONFIG='algo=fedplvm' CLIENTS=20
	@$(BIN)/protofl run $(CLIENTS:%=--clients %) $(or $(CONFIG),--recipe first-run)

TABLE ?= fedproto-mnist
ARGS  ?=
# Papers' tables whose data and networks suit a machine without a GPU (fedtgp-fmnist takes twelve days).
REPRODUCE ?= side-by-side fedproto-mnist fedproto-mnist-pu fedproto-figure3 protofed fedpcl-digits fedpcl-office10 fedpcl-table1 \
    fedpcl-table5 fedpcl-table6 fedpcl-table11 fedpcl-label-shift fedpcl-mnist-m fedpcl-table12 fedpcl-table13 fedpcl-table14 fedpcl-table15 fedpcl-figure2 \
    fedplvm-office10 fedplvm-office10-label-shift fedplvm-ablations fedplvm-three-domains fedpcl-imagenet fedtgp-cifar-part

table: $(BIN)/.installed  ## a paper's table; make table TABLE=fedtgp-fmnist DATA_DIR=/data ARGS='--seeds 1 rounds=30'
	$(BIN)/protofl table configs/tables/$(TABLE).yaml --data-dir '$(DATA_DIR)' $(ARGS)

reproduce: $(BIN)/.installed  ## the papers' tables for a CPU, in days; start it again to go on; DATA_DIR holds MNIST/raw, office10, …
	$(BIN)/protofl table $(REPRODUCE:%=configs/tables/%.yaml) --data-dir '$(DATA_DIR)' $(ARGS)

quick: $(BIN)/.installed  ## unit tests but the slow ones and the algorithms' scripts: under a minute on two cores
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not system and not long and not slow' --hypothesis-profile=few \
	    tests/unit --ignore=tests/unit/reference

test: $(BIN)/.installed  ## unit tests and in-process federations, on all cores: six minutes on two
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not system and not long' --durations=15

test-system: $(BIN)/.installed  ## whole systems of real Flower processes, two files at once: they often wait; nine minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'system and not long' --durations=15

test-long: $(BIN)/.installed  ## what takes minutes each: every algorithm alone on SuperNodes, every row of every table, the door
	$(BIN)/python -m pytest -m long --durations=0

coverage: $(BIN)/.installed  ## the lines that `make test` does not run
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not system and not long' --cov --cov-report=term:skip-covered

docs: $(BIN)/.installed  ## the references anew, from the code; the site in site/, where a warning is an error
	$(BIN)/python -m tests.bench.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

verdicts: $(BIN)/.installed  ## the verdicts of docs/papers.md anew, by its rule, from docs/papers/claims.yaml and measured.csv
	$(BIN)/python -m tests.bench.verdicts

test-gpu: $(BIN)/.installed  ## on a machine with a CUDA device: every algorithm, seeds, resuming, memory
	$(BIN)/python -m pytest tests/federation/test_cuda.py -n 0 --durations=15

fuzz: $(BIN)/.installed  ## 10,000 random messages for each decoder, and for a site that is watched, and 15,000 damaged files: 40 minutes
	$(BIN)/python -m pytest --hypothesis-profile=fuzz --hypothesis-show-statistics \
	    tests/unit/protofl_common/data/test_csv_file.py tests/unit/protofl_common/data/test_data_fuzz.py \
	    tests/unit/protofl_common/wire/test_wire_fuzz.py tests/federation/test_site_fuzz.py

mutants: $(BIN)/.installed  ## breaks one line at a time, of mathematics and of what protects a site; ten minutes; one: python -m tests.bench.mutants NAME
	$(BIN)/python -m tests.bench.mutants

lint: $(BIN)/.installed  ## ruff and mypy (strict): under a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(BIN)/.installed  ## ruff mends what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BIN)/.installed  ## speed against a bare PyTorch script, and HtFLlib given HTFLLIB=<its folder>; DATA_DIR holds FashionMNIST/raw
	$(BIN)/python -m tests.bench.round_speed --data-dir '$(DATA_DIR)' $(if $(HTFLLIB),--htfllib '$(HTFLLIB)') $(ARGS)

bench-peers: $(BIN)/.installed  ## one job in a bare loop, ProtoFL, pfl-research and Flower; DATA_DIR holds FashionMNIST/raw; needs a network once
	$(BIN)/python -m tests.bench.peers.compare --data-dir '$(DATA_DIR)' $(ARGS)

bench-gpu: $(BIN)/.installed  ## steps per second on a CUDA device, and FedTGP's server; ARGS='--at-once 1 2'
	$(BIN)/python -m tests.bench.gpu $(ARGS)

bench-scale: $(BIN)/.installed  ## what a client costs among 100 to 10,000; make bench-scale ARGS='100 1000:1.0'
	$(BIN)/python -m tests.bench.scale $(ARGS)

bench-deployment: $(BIN)/.installed  ## where a round's time goes with SuperLink and SuperNodes; make bench-deployment STOCK=--stock
	$(BIN)/python -m tests.bench.deployment_overhead $(STOCK)

bench-sites: $(BIN)/.installed  ## up to how many sites one SuperLink serves: 10 to 300 stubs; make bench-sites ARGS='100 --secagg'
	$(BIN)/python -m tests.bench.sites $(ARGS)

faults: $(BIN)/.installed  ## every fault five times on real Flower processes, an hour; started again it goes on; ARGS='--only late'
	$(BIN)/python -m tests.bench.faults --out faults $(ARGS)

clean:  ## caches; runs/ and .venv/ stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

SERVERS ?= localhost 127.0.0.1
NODES   ?=

certificates: $(BIN)/.installed  ## keys and certificates in certs/; make certificates SERVERS='my.host 10.0.0.5' NODES='north'
	$(BIN)/python docker/certificates.py certs $(SERVERS:%=--server %) $(NODES:%=--node %)

demo:  ## a SuperLink and three sites in containers: one run and its result; KEEP=1 leaves them running
	@sh docker/demo.sh

demo-down:  ## take the demo's containers down, with their volumes
	@sh docker/demo.sh down
