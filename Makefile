# make demo, make test: each sets up its own .venv; no compiler, no GPU, no root.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
TORCH := torch==2.13.0
PYTEST_ARGS ?=

.PHONY: demo test lint format bitcode wheel clean

demo: $(VENV)/.demo
	$(PY) examples/01_moe_model.py $(DEMO_ARGS)

test: $(VENV)/.test
	$(PY) -m pytest -n auto --dist worksteal --cov=mori_triton --cov-report=term:skip-covered $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy mori_triton

format: $(VENV)/.lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# needs clang-19; everyone else uses the checked-in files
bitcode: $(VENV)/.ready
	$(PY) bitcode/build.py

wheel: $(VENV)/.ready
	$(PIP) install build
	$(PY) -m build --wheel --outdir dist

# A torch that the machine already has (CPU, CUDA or ROCm) is used through --system-site-packages; otherwise pip brings the pinned one.
$(VENV)/.ready: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("mori_triton needs Python 3.10 or newer, this is " + sys.version)'
	@if $(PYTHON) -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)' 2>/dev/null; then site=--system-site-packages; else site=; fi; \
	echo "setting up $(VENV) $$site"; \
	$(PYTHON) -m venv --clear $$site $(VENV) 2>/dev/null || $(PYTHON) -m virtualenv --clear $$site $(VENV) || \
	{ $(PYTHON) -m venv --clear --without-pip $$site $(VENV) && $(PYTHON) -m pip --python $(PY) install --quiet pip; }
	@$(PY) -c 'import torch' 2>/dev/null || $(PIP) install '$(TORCH)'
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.ready
	$(PIP) install -c constraints.txt -e '.[demo,plot]'
	@touch $@

$(VENV)/.test: $(VENV)/.ready
	$(PIP) install -c constraints.txt -e '.[demo,plot,test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.ready
	$(PIP) install -c constraints.txt -e '.[lint]'
	@touch $@

clean:
	rm -rf $(VENV) build dist
