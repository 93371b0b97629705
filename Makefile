# make demo, make test: each sets up its own .venv; no compiler, no GPU, no root.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
TORCH := torch==2.13.0
TRITON := triton==3.9.0; python_version >= "3.11"
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

# A torch that $(PYTHON) already has (CPU, CUDA or ROCm) is used; otherwise pip brings the pinned one. A path file reaches it
# where --system-site-packages does not: when $(PYTHON) is itself in a virtual environment. A torch for GPUs requires one
# certain Triton, which then stays; one whose Triton is too old for this package is not used.
OWN_TRITON := import importlib.metadata as m, re; own = [tuple(map(int, v)) for r in m.requires("torch") or () if "triton" in r for v in re.findall(r"==(\d+)\.(\d+)", r)]
HAS_TORCH := $(OWN_TRITON); import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6) and min([(3, 6), *own]) == (3, 6)
$(VENV)/.ready: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("mori_triton needs Python 3.10 or newer, this is " + sys.version)'
	@rm -rf $(VENV)
	@if $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; then site=--system-site-packages; else site=; fi; \
	echo "setting up $(VENV) $$site"; \
	$(PYTHON) -m venv $$site $(VENV) >/dev/null 2>&1 || $(PYTHON) -m virtualenv -q $$site $(VENV) 2>/dev/null || \
	{ rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $$site $(VENV) && \
	$(PYTHON) -m pip --python $(PY) install --quiet pip 2>/dev/null; } || \
	{ rm -rf $(VENV); echo "$(PYTHON) has neither ensurepip nor pip: install one (Debian, Ubuntu: apt-get install" \
	"python3-venv) or give another Python (make PYTHON=...)" >&2; exit 1; }; \
	if [ -n "$$site" ] && ! $(PY) -c '$(HAS_TORCH)' 2>/dev/null; then \
	$(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("platlib"))' > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/outer.pth"; fi
	@$(PY) -c '$(HAS_TORCH)' 2>/dev/null || $(PIP) install '$(TORCH)'
	@$(PY) -c '$(OWN_TRITON); assert own' 2>/dev/null || $(PIP) install '$(TRITON)'
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.ready
	$(PIP) install -c constraints.txt -e '.[demo,plot]'
	@touch $@

$(VENV)/.test: $(VENV)/.ready
	$(PIP) install -c constraints.txt -e '.[cli,demo,plot,rdma,test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.ready
	$(PIP) install -c constraints.txt -e '.[lint]'
	@touch $@

clean:
	rm -rf $(VENV) build dist
