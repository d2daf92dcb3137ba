# Two commands do everything: `make report` and `make test`. `make help` lists the rest.

PYTHON ?= python3
MODEL ?= smollm2-135m
MODELS ?= smollm2-135m minilm-l6
OUT ?= report

VENV := .venv
BIN := $(VENV)/bin

# No model hub is asked for anything: the packaged models come from the package index.
export HF_HUB_OFFLINE := 1
# Threads that spin while they wait make small forwards many times slower on a shared core.
export OMP_WAIT_POLICY := passive
# Without bytecode every process would compile wvprobe anew, and tests start many.
unexport PYTHONDONTWRITEBYTECODE

# The stamp is written last, so an interrupted installation leaves none. Its name is a checksum
# of what was installed and where: the virtual environment does not survive being moved.
STAMP := $(VENV)/.installed-$(firstword $(shell { echo '$(CURDIR)'; cat pyproject.toml constraints.txt; } | cksum))
BROKEN := $(shell $(BIN)/python -c '' 2>/dev/null || echo broken)

.DEFAULT_GOAL := help
.PHONY: help setup report full-report notebooks gallery test slow lint docs wheel clean broken

help:
	@echo 'make report   measure $(MODEL) and write $(OUT)/ (MODEL=..., OUT=... for others)'
	@echo 'make full-report   measure $(MODELS) at length, in under 40 minutes (RESUME=1 goes on with a run)'
	@echo 'make notebooks   run the analyses on $(MODEL) into notebooks/$(MODEL)/ (NAMES=... for some, SMOKE=1 for a try)'
	@echo 'make gallery  write analyses/README.md and its pictures from notebooks/'
	@echo 'make test     run the tests, in under 5 minutes'
	@echo 'make slow     run the tests that take longer'
	@echo 'make lint     check style, formatting and types'
	@echo 'make docs     build the documentation into site/, which opens offline'
	@echo 'make wheel    build dist/*.whl'
	@echo 'make setup    create or repair $(VENV), which every target above does by itself'
	@echo 'make clean    remove $(VENV), dist/, site/ and caches'

report: setup
	$(BIN)/wvprobe report $(MODEL) --quick --out $(OUT)

full-report: setup
	$(BIN)/wvprobe report $(MODELS) --out $(OUT) $(if $(RESUME),--resume)

# Where there is no Chromium, notebooks have their figures as data alone, and no gallery is made.
notebooks: setup
	$(BIN)/python analyses/tools/running.py $(NAMES) --model $(MODEL) $(if $(SMOKE),--smoke) --options='$(OPTIONS)'

gallery: setup
	$(BIN)/python analyses/tools/gallery.py

test: setup
	$(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 4

slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# mkdocs' successor, which its theme advertises in every build, is not what is tested here.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: setup
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf $(VENV) dist site .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(STAMP)

# What failed is told in one line, the last one before make's own.
fail = { echo "wvprobe: $(1)" >&2; exit 1; }
comma := ,
LOG := $(VENV)/pip.log
UNREACHABLE := connection broken by|Max retries exceeded|Network is unreachable|Read timed out

$(STAMP): $(BROKEN)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    || $(call fail,Python 3.11 or later is needed: '$(PYTHON)' is older or does not run. Name another with make PYTHON=/path/to/python3.)
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	    || $(call fail,'$(PYTHON)' has no ensurepip$(comma) which virtual environments need: install it (on Debian the package python3-venv) or name another with make PYTHON=/path/to/python3.)
	@# Where no stamp of any kind is left, an installation was cut short: begin anew.
	@if [ -z "$(BROKEN)" ] && ls $(VENV)/.installed-* >/dev/null 2>&1; then \
	    echo 'wvprobe: bringing $(VENV) up to date' \
	    && rm -f $(VENV)/.installed-* $(LOG); \
	else \
	    echo 'wvprobe: creating $(VENV) with PyTorch and the rest (2 GB and more, once)' \
	    && $(PYTHON) -m venv --clear $(VENV); \
	fi
	@# Bytecode is written when a module is first imported: most modules never are.
	@$(BIN)/python -m pip install --no-input --no-compile --disable-pip-version-check --log $(LOG) \
	    -c constraints.txt -e '.[dev]' \
	|| if grep -qE '$(UNREACHABLE)' $(LOG); then \
	    $(call fail,the package index could not be reached. Check the network or set PIP_INDEX_URL to an index that answers$(comma) then run make again.) \
	else \
	    $(call fail,pip could not install the packages; it says why above and in $(LOG). Mend that$(comma) then run make again.) \
	fi
	@touch $@
