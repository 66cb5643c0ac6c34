# A fresh machine needs Python 3.11 and make, nothing else: `make demo` and `make test` install first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Tests run side by side, each worker on one core. WORKERS=0 runs them in this process (for pdb).
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -m "not gpu" -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# Neither tool should ask the network for a newer release of itself.
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1

.DEFAULT_GOAL := help
.PHONY: help install demo test check format compat clean

help:
	@echo "make demo      train a small Llama on 4 CPU ranks (dp 2 x sp 2)   DEMO_ARGS='--steps 50'"
	@echo "make test      all tests that need no GPU                         PYTEST_ARGS='-k loss -x'"
	@echo "make check     formatting, lint and types                         make format repairs the first two"
	@echo "make compat    the tests on another torch, in a venv of its own   TORCH=2.11.0"
	@echo "make install   only make $(VENV)"

# torch goes first and pinned: the package asks for a range, and a range takes the newest release.
define install_into
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install torch==$(2)
	$(1)/bin/python -m pip install --quiet -e '.[transformers,dev]'
	touch $@
endef

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(call install_into,$(VENV),$(TORCH))

demo: $(VENV)/.installed
	$(BIN)/python examples/train_llama.py $(DEMO_ARGS)

test: $(VENV)/.installed
	$(call PYTEST,$(VENV))

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

compat: .venv-compat-$(TORCH)/.installed
	$(call PYTEST,.venv-compat-$(TORCH))

.venv-compat-$(TORCH)/.installed: pyproject.toml
	$(call install_into,.venv-compat-$(TORCH),$(TORCH))

clean:
	rm -rf $(VENV) .venv-compat-* checkpoints .pytest_cache .ruff_cache
