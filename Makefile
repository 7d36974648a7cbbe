# Needs python3 (3.10 or newer) with pip, and nothing else. `make test PYTHON=python3.13 VENV=.venv-3.13` takes another one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
OLDEST := $(CURDIR)/$(VENV)/oldest
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
DECLARED := pyproject.toml constraints.txt
# Files of tests that meet the oldest: of the shells, the contract, and those with one of these words. Of a file with
# tests that are marked, these run.
MEETS_OLDEST := _lightning_compat|_torch_compat|mark\.oldest

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
.PHONY: help demo test test-oldest test-flavor test-flavor-sample thorough ci soak requeues slurm fuzz sweep matrix foreign mutants coverage check fix bench gpu docs constraints clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/installed-package ## Train a real model on real digits with most of the tricks, and kill and resume a run
	$(BIN)/python examples/demo/every_trick.py
	$(BIN)/python examples/demo/kill_and_resume.py

test: $(VENV)/installed-test ## Run the tests two parts at a time, or those in TESTS="tests/flops ..." at once
	$(if $(TESTS),$(PYTEST) $(TESTS),$(TWO_AT_A_TIME) $(PARTS:%=test-%))

$(PARTS:%=test-%): test-%: $(VENV)/installed-test
	$(PYTEST) $($*)

test-oldest: $(OLDEST)/installed $(VENV)/installed-test ## Run the tests that meet the oldest Lightning and torch supported
	PYTHONPATH=$(OLDEST) $(PYTEST) --oldest $$( \
	{ grep -rlE '$(MEETS_OLDEST)' $(or $(TESTS),tests) --include='test_*.py'; \
	find $(or $(TESTS),tests) -name test_callback.py -o -name test_contract.py; } | sort -u)

# The contract of all callbacks, real kills, and what names Lightning's classes; TESTS="tests/metrics" runs others
FLAVORED := tests/contract/test_contract.py tests/auto_resume/test_kills.py tests/training_cli tests/mixin \
	tests/lightning_compat tests/metrics/test_callback.py lightning_tricks

test-flavor: $(VENV)/installed-test ## Run tests as programs that import pytorch_lightning
	$(BIN)/python -m tests.flavor.copied build/flavor
	cd build/flavor && $(subst $(BIN),$(CURDIR)/$(BIN),$(PYTEST)) $(or $(TESTS),$(FLAVORED))

test-flavor-sample: $(VENV)/installed-test
	$(MAKE) test-flavor TESTS='tests/contract/test_contract.py tests/training_cli tests/auto_resume/test_kills.py \
	-k "works or mistake or configuration or killed_at_random or whole_process_group"'

thorough: $(VENV)/installed-test ## Run the tests with all cases, of which `make test` and CI run a sample, and whole notebooks
	$(TWO_AT_A_TIME) $(PARTS:%=test-%) PYTEST="$(PYTEST) --thorough"
	$(MAKE) test-oldest PYTEST="$(PYTEST) --thorough"

# The newest versions are installed beside the oldest, and these beside the first tests; what takes longest comes first
ci: $(VENV)/bin/python
	$(TWO_AT_A_TIME) $(VENV)/installed-test $(OLDEST)/installed $(wordlist 1,2,$(PARTS:%=test-%)) \
	test-oldest $(wordlist 3,4,$(PARTS:%=test-%)) test-flavor-sample check docs

soak: $(VENV)/installed-test ## Kill 400 runs of many scripts in all phases, and compare each with the undisturbed one
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.auto_resume.soak --kills 400 --result tests/auto_resume/soak_result.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.auto_resume.soak --sharded --kills 100 --each 0 \
	--result tests/auto_resume/soak_sharded_result.md

requeues: $(VENV)/installed-test ## Start one command 20 times, elsewhere each time, killed, on a full disk, twice at once
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.auto_resume.requeues --result tests/auto_resume/requeues_result.md

slurm: $(VENV)/installed-test ## Start a Slurm of one node from Debian's packages, and signal, requeue and cut off jobs
	OMP_NUM_THREADS=1 $(PYTEST) tests/slurm --thorough

fuzz: $(VENV)/installed-test ## Read files that are changed or made at random, and see that none takes long or much
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint_remapping.fuzz --minutes 5

sweep: $(VENV)/installed-test ## Load files with changed names and order into 1,300 models, and list what is wrong
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint_remapping.pairs
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint_remapping.converters --folder $(VENV)/converters \
	--result tests/checkpoint_remapping/converters/result.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint_remapping.sweep --result tests/checkpoint_remapping/sweep_result.md

matrix: $(VENV)/installed-test ## Train with all callbacks together in each of 72 ways, and list what does not hold
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.together.matrix --result tests/together/matrix_result.md

mutants: $(VENV)/installed-mutants ## Put 1,000 faults into cores and shells, and list those that no test finds; SEED=2 draws others
	$(BIN)/python -m tests.mutation.run --seed $(or $(SEED),0)

coverage: $(VENV)/installed-coverage ## Run the tests, and list which share of the lines and branches they reach
	$(BIN)/python -m coverage erase
	$(TWO_AT_A_TIME) $(PARTS:%=test-%) PYTEST="$(BIN)/python -m coverage run -m pytest --thorough"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m tests.coverage.table tests/coverage/result.md

foreign: $(VENV)/installed-test ## Install modules that others publish, and train them with and without the callbacks
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.foreign.run --folder $(VENV)/foreign --result tests/foreign/result.md

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

gpu: $(VENV)/installed-test ## Run what needs a GPU, and write what it found into the docs; DRY=1 tries the commands without one
	$(BIN)/python -m tests.gpu.run $(if $(DRY),--dry --result build/gpu.json)
	$(if $(DRY),,$(BIN)/python benchmarks/_summary.py && $(BIN)/python -m tests.documents.generated)

docs: $(VENV)/installed-test ## Build the documentation into build/docs; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	# it is read from disk: nothing is loaded from elsewhere
	! grep -rE '<(script|link)[^>]*(src|href)="https?:' build/docs --include='*.html'

constraints: $(VENV)/installed-test ## Pin the versions that are installed now
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/$$/ ; python_version == "3.11" and sys_platform == "linux"/' > constraints.txt

clean: ## Remove .venv and everything else that these commands made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf benchmarks/results lightning_logs lightning_tricks_demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	# Debian ships venv without the pip that it would put into it: then the pip outside does that
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	$(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; }

$(OLDEST)/installed: constraints-oldest.txt | $(VENV)/bin/python
	rm -rf $(OLDEST)
	mkdir $(OLDEST)
	# pip gathers them in a temporary folder and moves them from there
	TMPDIR=$(OLDEST) $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
	--target $(OLDEST) --requirement constraints-oldest.txt
	touch $@

$(VENV)/installed-package: $(DECLARED) | $(VENV)/bin/python
	$(INSTALL) --editable ".[devices,reports]"
	touch $@

$(VENV)/installed-mutants: | $(VENV)/installed-test
	$(INSTALL) --editable ".[test,mutants]"
	touch $@

$(VENV)/installed-coverage: | $(VENV)/installed-test
	$(INSTALL) --editable ".[test,coverage]"
	touch $@

$(VENV)/installed-test: $(DECLARED) | $(VENV)/bin/python
	$(INSTALL) --editable ".[test]"
	touch $@ $(VENV)/installed-package
