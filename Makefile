# Everything sets itself up: a virtual environment in .venv, made anew when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-all lint docs clean

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

# The site, in site/. The theme's notice about another program is no warning about these pages.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
