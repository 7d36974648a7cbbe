# Needs python3 (3.10 or newer) with pip, and nothing else. `make test PYTHON=python3.13 VENV=.venv-3.13` takes another one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
OLDEST := $(CURDIR)/$(VENV)/oldest
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
DECLARED := pyproject.toml constraints.txt

# Bytecode is kept, wherever images of containers switch that off: without it, each process that a test starts compiles
# torch and Lightning anew, which takes 8 seconds
unexport PYTHONDONTWRITEBYTECODE

# Parts of the tests, those that take longest first. A part takes one core, and ten seconds until all is imported.
PARTS := d-to-l auto-resume m-to-z a-to-c
a-to-c := tests/a[!u]* tests/[bc]*
auto-resume := tests/au*
d-to-l := tests/[d-l]*
m-to-z := tests/[m-z]* lightning_tricks
TWO_AT_A_TIME := $(MAKE) --jobs=2 --keep-going $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.DEFAULT_GOAL := help
.PHONY: help demo test thorough ci check fix bench docs clean

include tests/lab/Makefile

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed-package ## Train a real model on real digits with most of the tricks, and kill and resume a run
	$(BIN)/python examples/demo/every_trick.py
	$(BIN)/python examples/demo/kill_and_resume.py

test: $(VENV)/installed-test ## Run the tests two parts at a time, or those in TESTS="tests/flops ..." at once
	$(if $(TESTS),$(PYTEST) $(TESTS),$(TWO_AT_A_TIME) $(PARTS:%=test-%))

$(PARTS:%=test-%): test-%: $(VENV)/installed-test
	$(PYTEST) $($*)

thorough: $(VENV)/installed-test ## Run the tests with all cases, of which `make test` and CI run a sample, and whole notebooks
	$(TWO_AT_A_TIME) $(PARTS:%=test-%) PYTEST="$(PYTEST) --thorough"
	$(MAKE) test-oldest PYTEST="$(PYTEST) --thorough"

# The newest versions are installed beside the oldest, and these beside the first tests; what takes longest comes first
ci: $(VENV)/bin/python
	$(TWO_AT_A_TIME) $(VENV)/installed-test $(OLDEST)/installed $(wordlist 1,2,$(PARTS:%=test-%)) \
	test-oldest $(wordlist 3,4,$(PARTS:%=test-%)) test-flavor-sample check docs

check: $(VENV)/installed-test ## Lint, format, types, import rules
	$(BIN)/ruff check .
	# Windows has another default encoding
	$(BIN)/ruff check --preview --select PLW1514 lightning_tricks
	$(BIN)/ruff format --check .
	# the oldest Python, and the newest one on Windows: by a cache each, the second time takes seconds
	$(BIN)/mypy --python-version 3.10
	$(BIN)/mypy --python-version 3.13 --platform win32
	$(BIN)/lint-imports

fix: $(VENV)/installed-test ## Mend what ruff can mend, and write the generated pages of docs/
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m tests.documents.generated

bench: $(VENV)/installed-test ## Run the benchmarks, which print ratios, and write benchmarks/results.json and docs/benchmarks.md
	for script in $(or $(SCRIPTS),benchmarks/[a-z]*.py); do $(BIN)/python $$script || exit 1; done
	$(BIN)/python benchmarks/_summary.py

docs: $(VENV)/installed-test ## Build the documentation into build/docs; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	# it is read from disk: nothing is loaded from elsewhere
	! grep -rE '<(script|link)[^>]*(src|href)="https?:' build/docs --include='*.html'

clean: ## Remove .venv and everything else that these commands made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf benchmarks/results lightning_logs lightning_tricks_demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	# Debian ships venv without the pip that it would put into it: then the pip outside does that
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	$(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; }

$(VENV)/installed-package: $(DECLARED) | $(VENV)/bin/python
	$(INSTALL) --editable ".[devices,reports]"
	touch $@

$(VENV)/installed-test: $(DECLARED) | $(VENV)/bin/python
	$(INSTALL) --editable ".[test]"
	touch $@ $(VENV)/installed-package
