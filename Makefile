# make demo | test | lint | format | test-slow | faults | bench. PYTHON picks the interpreter of a new .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=

.PHONY: demo test test-slow faults bench lint format install clean

demo: $(VENV)/.installed
	$(BIN)/pools demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# everything, those of more than a few seconds too
test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "slow or not slow" $(PYTEST_ARGS)

# crashes, lost messages, full disks: seeded, so that a failure's seed reproduces it
faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "faults" $(PYTEST_ARGS)

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHON=$(BIN)/python .ci/typecheck
	$(BIN)/python .ci/check_layout.py

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed

# Stamps: an installation is done again only when pyproject.toml is newer. Editable, so sources need none.
$(VENV)/.created:
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@ $(VENV)/.installed

$(VENV)/.installed-lint: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[lint]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
