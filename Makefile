# Everything a fresh machine needs:  make test   make demo
#
# On a GPU machine choose the build of torch you want, for example
#   make demo TORCH="torch==2.11.0" PIP_ARGS="--extra-index-url <your index>"

PYTHON   ?= python3
TORCH    ?= torch==2.13.0
PIP_ARGS ?=
VENV     ?= .venv

# Two threads that spin stall small operations on a busy machine; one does not.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false

BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DOCS   := $(VENV)/.docs
OTHERS := $(VENV)-others

.PHONY: install test quick slow others survey demo bench lint types docs clean

install: $(READY)

# torch first and alone: resolved together with other packages, pip may choose a build for another kind of machine.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q $(PIP_ARGS) "$(TORCH)"
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e ".[test]"
	touch $(READY)

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# Every causal LM of the installed transformers: exact, refused, wrong, crash. Some minutes.
survey: install
	$(BIN)/python tests/survey.py --write docs/architectures.md

# The inner loop: equations, replay, engine, learner, one tiny run.
quick: install
	$(BIN)/python -m pytest -n 2 -m "not slow" tests/test_layout.py tests/learn/test_equations.py \
	    tests/attention/test_replay.py tests/rollout/test_engine.py tests/learn/test_learner.py tests/train/test_old_run.py

slow: install
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# Clients and libraries of others that cannot share the environment of `make test`: a second one, laid over the first.
# An import that fails ends it, so that no test is skipped for want of a package.
$(OTHERS)/.ready: $(READY) tests/others.txt
	test -x $(OTHERS)/bin/python || $(BIN)/python -m venv $(OTHERS)
	site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"); \
	    echo "import site; site.addsitedir('$$site')" > \
	    "$$($(OTHERS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/under.pth"
	$(OTHERS)/bin/python -m pip install -q $(PIP_ARGS) -r tests/others.txt
	$(OTHERS)/bin/python -m pip install -q $(PIP_ARGS) --no-deps kvpress
	touch $@

others: $(OTHERS)/.ready
	$(OTHERS)/bin/python -c "import bitsandbytes, kvpress, lm_eval, verifiers.v1"
	$(OTHERS)/bin/python -m pytest -m others

demo: install
	$(BIN)/sparse-rl demo

bench: install
	$(BIN)/python benchmarks/rollout_cpu.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# Needs the packages of the extra `docs` alone: the API reference is made from the sources, without importing them.
$(DOCS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) $$($(BIN)/python -c "import tomllib; \
	    print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $(DOCS)

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) $(OTHERS) build site *.egg-info
