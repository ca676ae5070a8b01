# `make demo` trains examples/train_llama.py on 4 processes; `make test` runs everything that CI runs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CHECK := $(VENV)/typecheck
WORKERS ?= 2
CONSTRAINTS ?= constraints.txt

export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED = 1

.PHONY: demo test lint types unit clean

demo: $(VENV)/.installed
	$(BIN)/python examples/train_llama.py $(ARGS)

test: lint types unit

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-build-isolation -e '.[test]'
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check .

# The checker reads an installed copy: it does not see the folder that an editable install maps into the package.
types: $(VENV)/.installed
	rm -rf $(CHECK) build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target $(CHECK) .
	rm -rf build
	cd $(CHECK) && ../bin/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir ../mypy_cache -p spmd_compiler

unit: $(VENV)/.installed
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --durations 10

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
