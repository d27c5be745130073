# ECC: every task a developer needs, with nothing but Python (>= 3.10) and make.
# Override on the command line: make test PYTHON=python3.12 JOBS=4

PYTHON ?= python3
JOBS   ?= 3

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP   := $(PY) -m pip --disable-pip-version-check --quiet
TESTS := $(PY) -m pytest -n $(JOBS) --dist worksteal
PINS  :=

# Where it is set, every worker and every program that a test starts would compile all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: gpu evidence vendor thorough help install demo docs test check quick optional lint types pytest oldest audit format clean distclean

help:  ## list these targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)$$/  make \1|\2/p' $(MAKEFILE_LIST) | \
	while IFS='|' read -r target text; do printf '%-16s %s\n' "$$target" "$$text"; done

install: $(STAMP)  ## make .venv and install ECC with its tools (done by itself when needed)

demo: $(STAMP)  ## the whole job on a bundled task: profile, fit, prune to half of the energy, finetune, report
	rm -rf build/demo && mkdir -p build
	$(VENV)/bin/ecc compress digits --budget 50% --meter platform:jetson-tx2 -o build/demo \
	  --pretrain-steps 120 --pretrain-lr 3e-3 --lr 1e-3 --prune-steps 160 --finetune-steps 80

docs: $(STAMP)  ## the documentation, strictly checked, into build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

# The three at once: mypy has one thread.
test: $(STAMP)  ## lint, types and the tests that need no GPU; more in thorough
	@$(MAKE) --no-print-directory -j3 lint types pytest

check: lint types quick  ## as test, without the slow tests: for the minute before a commit

quick: $(STAMP)
	$(TESTS) -m "not gpu and not slow and not thorough" $(WARNINGS)

lint: $(STAMP)  ## formatting and lint, changing nothing
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: $(STAMP)  ## mypy --strict over src, benchmarks and the helpers of tests
	$(PY) -m mypy

pytest: $(STAMP)  ## the tests alone
	$(TESTS)

thorough: $(STAMP)  ## more cases of what test shows on few: minutes
	$(TESTS) -m thorough

# Nothing is installed for it: a machine with a GPU may have no way to. Packages that its Python lacks come from wheels.
GPU_PYTHON ?= $(shell if $(PY) -c 'import torch; assert torch.cuda.is_available()' >/dev/null 2>&1; \
  then echo $(PY); else echo $(PYTHON); fi)
gpu:  ## everything that must hold on a CUDA machine, about six minutes on an H200; writes results/gpu_acceptance.json
	@PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu_acceptance.py --out results/gpu_acceptance.json

evidence: $(if $(SECONDS),,$(STAMP))  ## cells of the GPU experiments: done, missing, failed; checks their fields; SECONDS=585 runs them
	@PYTHONPATH=src $(if $(SECONDS),$(GPU_PYTHON),$(PY)) benchmarks/gpu_session.py \
	  $(if $(SECONDS),--seconds $(SECONDS) --folder build/evidence,--check) $(EVIDENCE)

vendor: $(STAMP)  ## wheels for `make gpu` on a machine without them, for Python 3.12 on Linux, into vendor/wheels
	rm -rf vendor/wheels
	$(PIP) download --dest vendor/wheels --only-binary=:all: --python-version 3.12 --implementation cp \
	  --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
	  'click>=8.2' 'rich>=13.7' 'msgspec>=0.19' 'pytest>=8.2' 'pytest-xdist>=3.6.1' 'hypothesis>=6.100'
	$(PIP) download --dest vendor/wheels --no-deps 'torch-pruning>=1.6'  # without its own torch

optional: $(STAMP)
	$(TESTS) -m "slow and not gpu and not thorough" $(WARNINGS) tests/integrations tests/training tests/export \
	  tests/methods/test_cluster.py tests/report/test_browser.py tests/test_docs.py tests/test_packaging.py

# Old packages call what newer ones deprecate; their warnings say nothing of us. A fresh .venv has the newest of all.
OLD := ignore::DeprecationWarning ignore::PendingDeprecationWarning ignore::FutureWarning
oldest:  ## the quick tests, and those of the extras, with the oldest version of every dependency, in .venv-oldest
	$(MAKE) VENV=.venv-oldest PINS=constraints-oldest.txt WARNINGS='$(OLD:%=-W %)' quick optional

# Strict: without it, pip-audit finds nothing wrong with packages that it could not ask about.
audit: $(STAMP)  ## known vulnerabilities of what is installed; asks the package index, so it needs the network
	@test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && \
	.venv-audit/bin/python -m pip --disable-pip-version-check --quiet install pip-audit; }
	@$(PY) -m pip list --format=freeze --exclude-editable | sed 's/+.*//' > .venv-audit/installed.txt
	@grep -q == .venv-audit/installed.txt  # an empty list would pass
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r .venv-audit/installed.txt

format: $(STAMP)  ## format, and fix what lint can fix by itself
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:  ## remove caches and builds, keep .venv
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv, .venv-oldest and .venv-audit as well
	rm -rf $(VENV) .venv-oldest .venv-audit

# A torch that the base Python can import is used as it is: the environment is opened to it. One that another environment
# has, from which make was called, is out of reach.
# A half-made environment would be taken for a whole one next time, so it is removed.
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "ECC needs Python 3.10 or newer; $(PYTHON) is not. Try: make PYTHON=python3.12"; exit 1; }
	@if $(PYTHON) -c 'import sys, torch; sys.exit(sys.prefix != sys.base_prefix)' >/dev/null 2>&1; \
	then open=--system-site-packages; else open=; fi; \
	echo "making $(VENV) $$open"; \
	$(PYTHON) -m venv $$open $(VENV) || { rm -rf $(VENV); exit 1; }

# torch first and by itself, so that the pin binds only where there is none. Then the version that is there,
# ours or not, becomes the constraint for everything else: pip either keeps it or stops and says why. Nothing is compiled
# ahead: that takes longer than all the rest, and most of it is never imported.
$(STAMP): pyproject.toml constraints.txt $(PINS) | $(PY)
	@$(PY) -c 'import torch' >/dev/null 2>&1 || \
	{ echo "installing torch (once, some minutes)"; $(PIP) install --no-compile -c constraints.txt torch; }
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/torch.txt
	@echo "installing ECC beside $$(cat $(VENV)/torch.txt)"
	@$(PIP) install --no-compile -c $(VENV)/torch.txt $(PINS:%=-c %) -e '.[dev,nvml]'
	@touch $@
