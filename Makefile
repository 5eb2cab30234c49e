# Every target works on a fresh machine with Python 3.11 or later: it makes .venv and installs what it needs into it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODELS := build/models
SOURCES := gkd embed serve tools tests examples

.PHONY: demo test lint unit bench models format clean

demo: $(VENV)/.demo
	$(BIN)/python examples/similarity.py

test: lint unit

lint: $(VENV)/.test
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy --strict $(SOURCES)

unit: $(VENV)/.test models
	$(BIN)/python -m pytest

bench: $(VENV)/.test models
	$(BIN)/python tools/bench_cpu.py

models: $(VENV)/.test
	$(BIN)/python tools/models.py $(MODELS)

format: $(VENV)/.test
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf build dist .venv

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet 'torch==2.13.0'
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/.demo
