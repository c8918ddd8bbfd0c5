# Everything sets itself up: a virtual environment in .venv, made anew when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-all lint package clean

demo: $(INSTALLED)
	$(BIN)/windowkv demo

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses auto

# Every cache with every architecture of transformers that can have a window, not a sample of them.
test-all: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses auto --every-architecture

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Both archives, and whether the wheel works where nothing of this folder is on the path.
package: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python tests/check_package.py dist $(VENV)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
