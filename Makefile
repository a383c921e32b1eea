# make demo   creates .venv, installs, runs a script on a simulated card and the quickstart sweep; tables in demo-results/
# make test   the same environment, all tests but the slow ones and those of a GPU
# make slow   the slow tests
# make gpu    no environment: $(PYTHON) as it is, on a machine with a GPU; records go to $(RESULTS); all steps, or STEPS
PYTHON ?= python3
RESULTS ?= gpu-results
VENV   ?= .venv
CONSTRAINTS ?= constraints.txt
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test slow gpu lint types tables pages clean

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[test,lint]"
	touch $@

demo: $(READY)
	$(BIN)/actbench run --device-profile rtx-4060 examples/train.py
	$(BIN)/actbench sweep --output demo-results

# without bytecode each worker would rewrite all assertions in every run
test slow: export PYTHONDONTWRITEBYTECODE :=

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

slow: $(READY)
	$(BIN)/python -m pytest -m "slow and not gpu" -n 2 --dist loadfile

gpu:
	$(PYTHON) benchmarks/gpu.py $(RESULTS) $(STEPS:%=--step %)

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# every table under results/, anew from its records
tables: $(READY)
	$(BIN)/python -c "from pathlib import Path; from actbench.experiments.sweep import render_again; print(*render_again(Path('results')), sep='\n')"

# the pages under docs/reports anew from the records, and the picture of one, by an installed Chromium
pages: $(READY)
	$(BIN)/actbench report results/quickstart --title "Which scheme saves what?" --html docs/reports/quickstart.html
	$(BIN)/actbench report results/finetune-8b --title "How to fit an 8B Llama on 24 GiB" --html docs/reports/finetune-8b.html
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1400,1010 --virtual-time-budget=10000 \
		--screenshot=docs/images/report.png docs/reports/quickstart.html

clean:
	rm -rf $(VENV) build dist demo-results src/*.egg-info
