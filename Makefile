# One vocabulary for people, hooks and CI. `make` alone lists the verbs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup run test lint bench up down status doctor serve stop clean mlflow lock embed

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# No telemetry from any door; see QUIET in tasks/core/process.py, which a test holds equal to this block.
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export DVC_NO_ANALYTICS := 1
export GX_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export BENTOML_DO_NOT_TRACK := True
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION := false
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS := 120

help:  ## list these verbs
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## install the locked environment into .venv; skipped when requirements.lock did not change
	@cmp -s requirements.lock $(VENV)/requirements.lock || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error[python_too_old]: $$($(PYTHON) --version); must be 3.11 or newer; set PYTHON=python3.11" >&2; exit 2; }; \
	  echo "setup: installing requirements.lock into .venv"; \
	  $(PYTHON) -m venv $(VENV); \
	  $(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock; \
	  cp requirements.lock $(VENV)/requirements.lock; }
	@[ -f .trainyard/prefect/prefect.db ] || { \
	  echo "setup: making the database of runs without a server"; \
	  mkdir -p .trainyard/prefect; \
	  PREFECT_HOME="$(CURDIR)/.trainyard/prefect" $(VENV)/bin/prefect server database upgrade -y >/dev/null; }

run: setup  ## data -> validated -> trained -> judged -> registered -> packaged -> deployed
	@if [ -z "$${PREFECT_API_URL:-}$${MLFLOW_TRACKING_URI:-}" ] && [ -f .trainyard/stack/env ]; then source .trainyard/stack/env; fi; \
	  $(PY) -m flows.local

test: setup  ## every test, on as many cores as there are, at most four
	@$(PY) -m pytest -n auto --maxprocesses 4

lint: setup  ## ruff and mypy
	@ruff check . && ruff format --check . && mypy

bench: setup  ## every claim of speed and accuracy, measured here; results in bench/results/
	@$(PY) -m bench

up: setup  ## start a local stack: PostgreSQL, Prefect server, MLflow server, worker, service (docs/servers.md)
	@$(PY) -m flows.stack up

down:  ## end the local stack
	@if [ -x $(PY) ]; then $(PY) -m flows.stack down; else echo "nothing runs"; fi

status:  ## what runs of the local stack
	@if [ -x $(PY) ]; then $(PY) -m flows.stack status; else echo "nothing runs"; fi

serve: setup  ## serve again what was deployed last
	@$(PY) -m tasks.deploy --serve

stop:  ## end the service
	@if [ -x $(PY) ]; then $(PY) -m tasks.deploy --stop; else echo "nothing runs"; fi

doctor:  ## what is right and wrong with this project and machine, and what to do
	@[ -x $(PY) ] || { echo "doctor: there is no .venv yet: make setup" >&2; exit 1; }
	@$(PY) -m flows.doctor

mlflow: setup  ## the MLflow UI of this project's registry, on http://127.0.0.1:5000
	@if [ -f .trainyard/stack/env ]; then echo "the stack serves it: make status says where"; exit; fi; \
	  mlflow server --host 127.0.0.1 --port 5000 --workers 1 --backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///$(CURDIR)/.trainyard/mlflow/mlflow.db}"

lock: setup  ## write the installed versions to requirements.lock
	@$(PY) -m pip freeze --disable-pip-version-check | sort -f | sed -E \
	  '/^(cuda-|nvidia-(cu|nc|nv|cf)|triton=)/s/$$/ ; sys_platform == "linux" and platform_machine == "x86_64"/' > requirements.lock
	@cp requirements.lock $(VENV)/requirements.lock

embed: setup  ## for maintainers: make dvc.lock and the remote inside the repository anew from the last commit, in a clone
	@aside=$$(mktemp -d); trap 'rm -rf "$$aside"' EXIT; git clone -q . "$$aside/clone"; \
	  (cd "$$aside/clone" && dvc pull -q data.dvc && rm -rf dvc.lock .dvc/embedded && dvc repro -q && dvc push -q -r embedded); \
	  rm -rf .dvc/embedded; cp -r "$$aside/clone/.dvc/embedded" .dvc/; cp "$$aside/clone/dvc.lock" .; du -sh .dvc/embedded

clean:  ## remove derived files (artifacts/, checkpoints, caches of tools); the data, registry and environment stay
	@rm -rf artifacts .trainyard/checkpoints .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
