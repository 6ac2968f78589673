# make demo and make test work from a fresh clone on a machine with Python 3.11 or later and a package index.
# The environment is kept in .venv/. Always with the constraints: without them an unbounded torch pulls gigabytes.

PYTHON ?= python3
BIN := .venv/bin
TESTS := $(BIN)/python -m pytest

.PHONY: demo test test-all journeys soak mutants lint bench site environment clean

environment: .venv/.made

.venv/.usable: pyproject.toml constraints.txt  # what README's commands need: half of the time that all takes
	@echo "installing paceline and what it needs into .venv: a minute or more, once"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[data,report,serve]'
	touch $@

.venv/.made: .venv/.usable
	@echo "installing what tests and linters need: another minute or more, once"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/.usable  ## train the demo preset on the CPU, end with a sample and a report page
	$(BIN)/paceline train demo
	@echo "next: open the report above in a browser"
	@echo "      $(BIN)/paceline sample latest --prompt 'Return the'"
	@echo "      $(BIN)/paceline serve latest    # a page to write with it"
	@echo "      docs/first-hour.md goes on from here"

test: environment  ## the default suite: offline, about 5 minutes on 2 cores
	$(TESTS) -n 2 --dist loadfile

journeys: environment  ## a user's whole paths and the longer series, as CI runs them after the suite
	$(TESTS) -m 'journey and not slow' -n 2 --dist loadfile --timeout 600

test-all: environment  ## and the slow tests
	$(TESTS) -m 'not soak and not gpu' --timeout 1800

soak: environment  ## the whole series of kills and fuzzing; what they showed goes to benchmarks/results/
	rm -f benchmarks/results/soak-cpu.json
	PACELINE_SOAK=benchmarks/results/soak-cpu.json $(TESTS) -m soak --timeout 7200

mutants: environment  ## 200 changes of the core, one at a time: does a test notice? an hour on 2 cores
	$(BIN)/python tools/mutants.py

lint: environment  ## style, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: environment  ## the demo three times, figures to benchmarks/results/, its curve to docs/images/
	$(BIN)/python benchmarks/demo.py --out benchmarks/results/demo-cpu.json --picture docs/images/demo-loss.svg

site: environment  ## the pages in docs/ as a site in site/, to open from disk or for any static host; a warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv runs build dist site
