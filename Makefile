# Every target creates .venv and installs what it needs; stamp files make a second run quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO_DIR ?= demo
SEED ?= 0
N ?= 5000

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow coverage fuzz-networks check-install lint bench docs picture evidence clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.created: constraints.txt
	@echo "• creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "• installing torch (a minute or two the first time)"
	@$(PIP) torch
	@touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml
	@echo "• installing pathlens with plots and tables"
	@$(PIP) -e ".[plot,table]"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "• installing the test tools"
	@$(PIP) -e ".[dev]"
	@touch $@

demo: $(VENV)/.demo  ## train three networks on the circle and write a page about them
	@$(BIN)/pathlens demo --out $(DEMO_DIR)

test: $(VENV)/.dev  ## lint, type-check and run the tests
	@$(MAKE) --no-print-directory lint
	@echo "• running the tests on two processes"
	@$(BIN)/python -m pytest -n 2 -q --durations=10

coverage: $(VENV)/.dev  ## the tests, then the lines of src that none of them runs
	@$(BIN)/python -m pytest -n 2 -q --cov=pathlens --cov-report=term:skip-covered --cov-report=html:build/coverage
	@echo "• open build/coverage/index.html"

test-slow: $(VENV)/.dev  ## the tests that take minutes
	@$(BIN)/python -m pytest -q -m slow

fuzz-networks: $(VENV)/.dev  ## every function on N random networks from SEED, against brute force
	@OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz_networks.py --seed $(SEED) --n $(N)

# An ordinary machine has no pip configuration and no folder of wheels: what resolves only with them does not count.
PLAIN := env -u PIP_FIND_LINKS -u PIP_INDEX_URL -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null
RESOLVE := $(BIN)/python -m pip install -qq --disable-pip-version-check --dry-run --ignore-installed

check-install: $(VENV)/.created  ## resolve every install of the README without installing: plain pip, then this machine's
	@echo "• plain pip, newest versions: pathlens[all]"
	@$(PLAIN) $(RESOLVE) ".[all]"
	@echo "• plain pip, constraints.txt: what make test installs"
	@$(PLAIN) $(RESOLVE) -c constraints.txt ".[dev]"
	@echo "• this machine's pip, constraints.txt: what make test installs"
	@$(RESOLVE) -c constraints.txt ".[dev]"

lint: $(VENV)/.dev  ## ruff (rules and format) and mypy
	@echo "• ruff"
	@$(BIN)/ruff check src tests benchmarks docs conftest.py
	@$(BIN)/ruff format --check --quiet src tests benchmarks docs conftest.py
	@echo "• mypy"
	@$(BIN)/mypy

bench: $(VENV)/.dev  ## measure speed; prints ratios, asserts nothing
	@$(BIN)/python -m benchmarks.run

docs: $(VENV)/.dev  ## write the reference, from docstrings, into build/docs
	@echo "• writing build/docs"
	@$(BIN)/python docs/build.py
	@echo "• open build/docs/index.html"

picture: $(VENV)/.demo  ## draw the README's picture anew from the demo's artifacts
	@test -d $(DEMO_DIR)/artifacts || $(MAKE) --no-print-directory demo
	@$(BIN)/python docs/opening.py $(DEMO_DIR)/artifacts docs/images/opening.png

evidence: $(VENV)/.dev  ## draw the README's maps of images anew: ten minutes, needs CIFAR-10
	@$(BIN)/python docs/evidence.py

clean:  ## remove the environment, caches and demo output
	@rm -rf $(VENV) $(DEMO_DIR) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache src/*.egg-info
