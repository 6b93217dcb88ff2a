# Everything is installed into .venv; each set-up step leaves a stamp there, so that it runs once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

# The studies that `make bench` measures, one after another: some are about time.
STUDIES := mixtures networks gaussian coverage peers growth

.PHONY: help demo test test-full lint mypy docs notebooks store-notebooks figures measured bench bench-pages bench-index \
	house release hooks clean

help:
	@echo "make demo            fit the breast-cancer example; writes demo-output/"
	@echo "make test            ruff, codespell, mypy, and the tests but the slow ones"
	@echo "make test-full       the slow tests too"
	@echo "make docs            run the notebooks, and build docs/_build/html; warnings are errors"
	@echo "make notebooks       run the notebooks, leaving them as they are"
	@echo "make store-notebooks run the notebooks, and store their outputs and thumbnails"
	@echo "make figures         draw the figures of README and docs again"
	@echo "make measured        print the tables of the docs again"
	@echo "make bench           measure the studies of STUDIES; hours, goes on where it was ended; AGAIN=--again begins anew"
	@echo "make bench-NAME      one study: benchmarks/studies/NAME.py"
	@echo "make bench-pages     write docs/benchmarks and the index of benchmarks/README.md from stored rows"
	@echo "make house           print the size of the package, tests and benchmarks, and what one update walks through"
	@echo "make release         build dist/, and try wheel and source in fresh environments, with the oldest versions and the newest"
	@echo "make hooks           install the pre-commit hooks"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra of pyproject.toml.
$(VENV)/.with-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

demo: $(VENV)/.with-demo
	$(BIN)/python examples/breast_cancer.py

lint: $(VENV)/.with-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

mypy: $(VENV)/.with-test
	$(BIN)/mypy

# Compiled programs are kept in .cache (tests/conftest.py): a second run compiles hardly anything. Workers begin with one
# half of the files each, so that what a file prepares is made once, and then take over from each other.
DISTRIBUTED := -n $(WORKERS) --dist worksteal

# With a worker on each core, threads of BLAS would wait for each other, spinning: it made dense solves ten times slower.
test test-full: export OPENBLAS_NUM_THREADS := 1

# The tests compile more than they compute, so `make test` spares the optimizer, and the newer emitters of fusions, where
# XLA knows that flag (it aborts at one it does not know); `make test-full` compiles as users do, but for the thousand
# small programs of fuzzing.
PLAIN_FUSIONS := --xla_cpu_use_fusion_emitters=false
UNOPTIMIZED = XLA_FLAGS="--xla_backend_optimization_level=0 $(XLA_FLAGS) $$(XLA_FLAGS=$(PLAIN_FUSIONS) \
	$(BIN)/python -c 'import jax; jax.devices()' >/dev/null 2>&1 && echo $(PLAIN_FUSIONS))"

test: lint mypy
	$(UNOPTIMIZED) $(BIN)/python -m pytest $(DISTRIBUTED) -m "not slow" --durations 10

test-full: lint mypy $(VENV)/.with-seats
	$(BIN)/python -m pytest $(DISTRIBUTED) --ignore tests/kernels/test_fuzz.py
	$(UNOPTIMIZED) $(BIN)/python -m pytest $(DISTRIBUTED) tests/kernels/test_fuzz.py

docs: notebooks
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html

notebooks: $(VENV)/.with-docs
	$(BIN)/python docs/execute.py

store-notebooks: $(VENV)/.with-docs
	$(BIN)/python docs/execute.py --store

figures: $(VENV)/.with-docs
	$(BIN)/python docs/figures/benchmarks.py
	$(BIN)/python docs/figures/particles.py
	$(BIN)/python docs/figures/pictures.py
	$(BIN)/python docs/figures/house.py
	$(BIN)/python docs/figures/windows.py
	$(BIN)/python docs/figures/noise.py
	$(BIN)/python docs/figures/diagnostics.py
	$(BIN)/python docs/figures/zero_sum.py
	$(BIN)/python docs/figures/bias.py
	$(BIN)/python docs/figures/crossover.py
	$(BIN)/python docs/figures/against_nuts.py

measured: $(VENV)/.with-demo
	$(BIN)/python docs/measured.py

STUDY = $(BIN)/python -m benchmarks $(subst -,_,$(1))
PAGE := $(BIN)/python -m benchmarks.harness.page

bench: $(VENV)/.with-bench
	for name in $(STUDIES); do $(call STUDY,$$name) $(AGAIN) || exit 1; done
	$(PAGE)

bench-pages: $(VENV)/.with-bench bench-index
	$(PAGE)

bench-index: $(BIN)/python
	$(BIN)/python -m benchmarks.harness.index

house: $(VENV)/.with-test
	$(BIN)/python -m benchmarks.harness.house

bench-%: $(VENV)/.with-bench
	$(call STUDY,$*) $(AGAIN)

release: $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	rm -rf dist && $(BIN)/python -m build --outdir dist .
	.ci/release dist/*

hooks: $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pre-commit
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) .venv-new docs/_build demo-output .cache .mypy_cache .pytest_cache .ruff_cache
