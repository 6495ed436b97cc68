# The three commands a person types: make run, make test, make clean.
# Everything is installed into .venv; stamps under .make/ let the next run start in seconds.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
# Recipes to serve, several of different kinds if you like; empty: what is embedded.
RECIPE ?=
# One exact torch release, so that no later step exchanges it. On Linux x86-64, PyPI's own build of it carries CUDA;
# for a small one: make run TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_SPEC ?= torch==2.13.0
TORCH_ARGS ?=
# The run fails when a required acceptance check has no passing test; make test REQ_STRICT= leaves that out.
REQ_STRICT ?= --req-strict
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
STAMPS := .make
PAGE := realtime_omni/server/page
WEB := clients/web

# Torch's OpenMP workers spin between ticks unless told to sleep; on two cores the spinning starves the event loop.
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export DEBIAN_FRONTEND := noninteractive

# What mypy checks with --strict: everything that ships, but not the tests and the training recipes.
STRICT := protocols/realtime_omni_protocols clients/python/realtime_omni_client realtime_omni

.PHONY: run test lint format imports web pytest conformance install clean help
.DEFAULT_GOAL := help

help:
	@echo "make run    serve $(or $(RECIPE),the embedded models) on http://$(HOST):$(PORT)"
	@echo "make test   lint, types, import contracts, web page, tests"
	@echo "make conformance  conversations with unmodified voice clients (installs them once: two minutes)"
	@echo "make format sort imports and format the Python files"
	@echo "make clean  remove .venv and the stamps"

run: $(STAMPS)/serve
	@exec $(BIN)/realtime-omni serve $(RECIPE) --host $(HOST) --port $(PORT)

test: lint imports web pytest

# -- set-up --------------------------------------------------------------------------------------------------------

install: $(STAMPS)/install

$(STAMPS)/venv:
	@mkdir -p $(STAMPS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "realtime_omni needs Python 3.11 or newer; name one with PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "could not create $(VENV); on Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	@touch $@

# The installed release, written down as a constraint, so that no later step can exchange it.
$(STAMPS)/torch: $(STAMPS)/venv
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install $(TORCH_ARGS) "$(TORCH_SPEC)"
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

# What serving needs; the embedded policy reads its words with the tokenizers of vla.
$(STAMPS)/serve: $(STAMPS)/torch pyproject.toml
	$(PIP) install --quiet -c $(STAMPS)/torch -e ".[server,vla]"
	@touch $@

# What the checks need too.
$(STAMPS)/install: $(STAMPS)/torch pyproject.toml
	$(PIP) install --quiet -c $(STAMPS)/torch -e ".[all]"
	@touch $@ $(STAMPS)/serve

# $(call system_package,COMMAND,PACKAGES): installs Debian packages unless COMMAND is there already.
define system_package
@mkdir -p $(STAMPS)
@command -v $(1) >/dev/null || { \
  command -v apt-get >/dev/null || { echo "$(1) is missing; install $(2)"; exit 1; }; \
  if [ "$$(id -u)" = 0 ]; then sudo=; elif sudo -n true 2>/dev/null; then sudo=sudo; \
  else echo "$(1) is missing; as root: apt-get install $(2)"; exit 1; fi; \
  $$sudo apt-get update -qq && $$sudo apt-get install -qq -y $(2); }
@touch $@
endef

$(STAMPS)/node:
	$(call system_package,npm,nodejs npm)
	@node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 19) ? 0 : 1)' \
	  || { rm -f $@; echo "the web page is built with Node 20.19 or newer, this is $$(node --version)"; exit 1; }

$(STAMPS)/chromium:
	$(call system_package,chromium,chromium)

# Robot clients that are not ours, and the numpy of older robots, for tests/conformance: in folders of their own, because some
# of them ask for versions that this environment does not have.
ROBOTS := tests/conformance/openpi
$(STAMPS)/robots.done: $(STAMPS)/install $(ROBOTS)/requirements.txt $(ROBOTS)/numpy1.txt
	@rm -rf $(STAMPS)/robots $(STAMPS)/numpy1
	$(PIP) install --quiet --no-deps --target $(STAMPS)/robots -r $(ROBOTS)/requirements.txt
	$(PIP) install --quiet --no-deps --target $(STAMPS)/numpy1 -r $(ROBOTS)/numpy1.txt
	@touch $@

# Voice clients that are not ours, for tests/conformance/realtime: environments keyed by the hash of their lock file, because they
# ask for versions that ours does not have. They cost minutes once, so only `make conformance` builds them.
VOICES := tests/conformance/realtime
voice_clients = $(STAMPS)/voices-$(1)-$(shell sha256sum $(VOICES)/$(1).lock | cut -c1-12)/done
VOICE_CLIENTS := $(call voice_clients,openai) $(call voice_clients,pipecat) $(call voice_clients,moshi)
$(VOICE_CLIENTS):
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $(if $(findstring voices-moshi,$@),--no-deps) -r $(VOICES)/$(word 2,$(subst -, ,$(notdir $(@D)))).lock
	@touch $@

# -- checks --------------------------------------------------------------------------------------------------------

lint: install
	@if git grep -nE '^(<{7}|>{7}) '; then echo "a merge conflict was committed"; exit 1; fi
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(STRICT)

format: install
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

imports: install
	$(BIN)/lint-imports

$(STAMPS)/node_modules: $(wildcard $(WEB)/package.json $(WEB)/package-lock.json) $(STAMPS)/node
	cd $(WEB) && npm ci --no-audit --no-fund
	@touch $@

# The page is committed in built form, so that `make run` needs no Node; here we prove that it is what the source builds.
ifneq ($(wildcard $(WEB)/package.json),)
web: $(STAMPS)/node_modules
	@rm -rf $(STAMPS)/page && mkdir -p $(PAGE) && cp -R $(PAGE) $(STAMPS)/page
	cd $(WEB) && npm run build && npm test --if-present
	@diff -rq $(STAMPS)/page $(PAGE) \
	  || { echo "$(PAGE) was not what $(WEB) builds; it has been rebuilt: commit it"; exit 1; }
else
web:
	@echo "web: skipped, $(WEB)/package.json does not exist yet"
endif

pytest: install $(STAMPS)/robots.done $(STAMPS)/chromium $(STAMPS)/node
	$(BIN)/python -m pytest $(REQ_STRICT) $(PYTEST_ARGS)

# Whole conversations with unmodified clients.
conformance: install $(VOICE_CLIENTS)
	CONFORMANCE=1 $(BIN)/python -m pytest $(VOICES) tests/conformance/live tests/conformance/moshi $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(STAMPS) $(WEB)/node_modules
