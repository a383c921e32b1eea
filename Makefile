# make help lists the targets. make gpu and make simulation take $(PYTHON) as it is; all others make the environment
# $(VENV) first.
PYTHON ?= python3
RESULTS ?= gpu-results
VENV   ?= .venv
CONSTRAINTS ?= constraints.txt
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TESTED := $(VENV)$(if $(WHEEL),-wheel)
PACKED := $(shell find -L src kernels recipes -type f -not -name "*.pyc" -not -path "*.egg-info/*")

.PHONY: help check format lint types test wheel simulation plugin slow exhaustive demo gpu docs tables pages screenshots parameters sizes clean

help:  ## this list
	@grep -E '^[a-z][a-z ]*:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z ]*):.*## /\1\t/' | expand -t 10

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[test,lint,docs]"
	touch $@

dist/.built: pyproject.toml README.md LICENSE $(PACKED) | $(READY)
	rm -rf build/lib build/bdist.* dist  # a build would pack what an earlier one left
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	touch $@

# On top of the other environment, whose own link to src is not followed from here.
$(VENV)-wheel/.ready: $(READY) dist/.built
	$(BIN)/python -m venv --clear $(VENV)-wheel
	$(BIN)/python -c "$(PLACE)" > "$$($(VENV)-wheel/bin/python -c "$(PLACE)")/environment.pth"
	$(VENV)-wheel/bin/python -m pip install --quiet --no-deps --ignore-installed dist/*.whl
	touch $@

PLACE = import sysconfig; print(sysconfig.get_path('purelib'))

check: lint types test  ## all that a commit needs: ruff, mypy and the tests that are not slow

format: $(READY)  ## lay the code out, and mend what ruff can mend
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

lint: $(READY)  ## ruff: rules and layout
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)  ## mypy --strict
	$(BIN)/mypy

demo: $(READY)  ## a script on a simulated card, and the quickstart sweep; tables in demo-results/
	$(BIN)/actbench run --device-profile rtx-4060 examples/train.py
	$(BIN)/actbench sweep --output demo-results

# without bytecode each worker would rewrite all assertions in every run
test wheel slow exhaustive: export PYTHONDONTWRITEBYTECODE :=

test: $(TESTED)/.ready  ## the tests that are not marked slow, exhaustive or gpu; with WHEEL=1 of the package as a wheel
	$(TESTED)/bin/python -m pytest -n 2 --dist loadfile

wheel: $(VENV)-wheel/.ready  ## dist/: the package as a wheel; installed where src is not found, it is tried in a minute
	WHEEL=1 $(VENV)-wheel/bin/python -m pytest --quiet -m "not gpu" tests/packaging/test_installed.py

SIMULATION := tests/device tests/packaging tests/run/test_processes.py tests/run/test_tasks.py \
	tests/simulator/test_attention.py tests/simulator/test_caching.py tests/simulator/test_torch_versions.py \
	$(foreach each,followup simulation simulation_memory simulation_steps,tests/tools/script/test_$(each).py)

simulation:  ## tests of the simulation that need no extra, with $(PYTHON) as it is: on macOS, and with torch built for CPUs
	PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest $(SIMULATION)

plugin: $(READY)  ## examples/plugin: installed, held to the contract of schemes, swept, converted with, and removed
	.ci/plugin $(BIN)

slow: $(READY)  ## the slow tests; with MINUTES=N, none is begun after so many, and the number of those left is told
	$(BIN)/python -m pytest -m "slow and not gpu" -n 2 --dist loadfile $(MINUTES:%=--minutes %)

exhaustive: $(READY)  ## slow tests of what is like another that is slow, before a release or with another torch
	$(BIN)/python -m pytest -m exhaustive -n 2 --dist loadgroup

gpu:  ## on a machine with a GPU: measure on it, records to $(RESULTS); all steps, or STEPS
	$(PYTHON) benchmarks/gpu.py $(RESULTS) $(STEPS:%=--step %)

tables: $(READY)  ## every table under results/, anew from its records
	$(BIN)/python -c "from pathlib import Path; from actbench.run.sweep import render_again; print(*render_again(Path('results')), sep='\n')"

docs: $(READY)  ## the documentation as a site, strictly and offline, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

pages: $(READY)  ## the README's picture, and the pages under docs/reports
	$(BIN)/python benchmarks/picture.py > docs/images/memory.svg
	$(BIN)/actbench report results/quickstart --title "Which scheme saves what?" --html docs/reports/quickstart.html
	$(BIN)/actbench report results/finetune-8b --title "How to fit an 8B Llama on 24 GiB" --html docs/reports/finetune-8b.html

screenshots: $(READY)  ## docs/images of the live view, a table, a flame graph and a notebook; needs Chromium
	$(BIN)/python -m pip install --quiet nbconvert ipykernel
	$(BIN)/python benchmarks/screenshots.py

parameters: $(READY)  ## schemes.json in src/actbench/model/declared and src/actbench/cli, from the classes of schemes
	$(BIN)/python benchmarks/scheme_parameters.py

sizes:  ## lines, files and functions of each room, beside those of the last release
	@$(PYTHON) benchmarks/sizes.py

clean:  ## remove the environment and what was built
	rm -rf $(VENV) $(VENV)-wheel build dist demo-results src/*.egg-info
