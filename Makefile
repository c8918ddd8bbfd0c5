# Everything sets itself up: a virtual environment in .venv, made anew when the dependencies change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The oldest transformers that is supported, in front of everything else of .venv.
FLOOR := transformers==5.17.*
FLOOR_VENV := .venv-floor
# What is tested with it: one test in sixteen of each of these files.
FLOOR_TESTS := --one-in 16 $(patsubst %,tests/test_%.py,exact_output memory_bound cache continuation integration \
	persist prefix_store quantised static_cache layout matrix)

.PHONY: demo test test-all test-floor lint docs package clean

demo: $(INSTALLED)
	$(BIN)/windowkv demo

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses auto

# Every cache with every architecture of transformers that can have a window, not a sample of them.
test-all: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses auto --every-architecture

test-floor: $(FLOOR_VENV)/.installed
	$(FLOOR_VENV)/bin/python -m pytest --numprocesses auto $(FLOOR_TESTS)

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

# Both archives, and whether the wheel works where nothing of this folder is on the path.
package: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python tests/check_package.py dist $(VENV)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

$(FLOOR_VENV)/.installed: $(INSTALLED) Makefile
	rm -rf $(FLOOR_VENV)
	$(PYTHON) -m venv $(FLOOR_VENV)
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> "$$($(FLOOR_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	$(FLOOR_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt '$(FLOOR)'
	touch $@

clean:
	rm -rf $(VENV) $(FLOOR_VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
