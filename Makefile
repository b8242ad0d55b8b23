# make lab        JupyterLab on the first lesson        make lab PORT=8899 ARGS=--no-browser
# make test       style, sync, tests and every lesson
# make test-browser    lessons and the stop button in a real JupyterLab (SCREENSHOTS=folder keeps pictures)
# make check      the quick part of it: style and sync
# make notebooks  build every notebook from its text source
# make notebook N=06   build the notebooks whose name starts with 06
# make clean      remove .venv
# PYTHON=python3.12 names the interpreter that .venv is made with.

PYTHON ?= python3
# In .venv, as if it were activated: cells that say !torchrun must find it.
RUN = PATH="$(CURDIR)/.venv/bin:$$PATH" VIRTUAL_ENV="$(CURDIR)/.venv" .venv/bin/python

.PHONY: help lab test test-browser check notebooks notebook clean setup
help:
	@sed -n '/^# make/s/^# //p' Makefile

setup:
	@command -v "$(PYTHON)" >/dev/null || { echo "Set-up stopped: there is no $(PYTHON) here." \
	  "Debian, Ubuntu: sudo apt install python3 python3-venv" >&2; exit 1; }
	@"$(PYTHON)" tools/setup_env.py

lab: setup
	@exec env $(RUN) -m ddp_course lab $(if $(PORT),--port=$(PORT)) $(ARGS)

test: setup
	@$(RUN) tools/run_tests.py $(ARGS)

test-browser: setup
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; } \
	  >.venv-setup.log 2>&1 || { echo "Needs Chromium: sudo apt install chromium" >&2; exit 1; }
	@$(RUN) -m pip install -q -c constraints.txt -e ".[test,browser]"
	@$(RUN) -m pytest tests/browser $(ARGS)

check: setup
	@$(RUN) tools/run_tests.py style sync

notebooks: setup
	@$(RUN) tools/notebooks.py build

notebook: setup
	@test -n "$(N)" || { echo "Which one? For example: make notebook N=06" >&2; exit 2; }
	@$(RUN) tools/notebooks.py build $(N)

clean:
	rm -rf .venv .venv-setup.log .pytest_cache .ruff_cache
