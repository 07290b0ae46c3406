# make run    see it work: what runs here and why, then a language model trained on this machine (about two minutes on two cores)
# make test   everything that CI checks; TEST_WHOLE=1 make test for all of which CI takes a share
# Both make their own environment in .venv first; a second time that takes no time. Needs make and Python 3.10 or newer.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# Each worker begins with its own half of the files, so what a file prepares is prepared once; who is done first helps.
WORKERS = -n $(JOBS) --dist worksteal
RUN = $(VENV)/bin/python

# The tensors in the tests are small: threads that wait for each other cost more than they bring, twentyfold on a busy machine.
run test: export OMP_NUM_THREADS = 1

.PHONY: help run test clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

run:
	@$(PYTHON) tools/setup_env.py $(VENV)
	$(RUN) -m flashlin doctor --run
	$(RUN) examples/train_lm.py

# Every step runs, whatever the others find. The last lines say how each went; the exit status is 1 if one failed.
test:
	@$(PYTHON) tools/setup_env.py $(VENV) test,dev
	@trap 'exit 130' INT; failed=0; lines=; \
	step() { \
		name=$$1; shift; echo "$$*"; \
		if "$$@"; then ended=passed; else ended="FAILED, exit status $$?"; failed=1; fi; \
		lines="$$lines$$(printf '  %-11s %s' "$$name" "$$ended")\n"; \
	}; \
	step ruff $(RUN) -m ruff check .; \
	step mypy $(RUN) -m mypy; \
	step tests $(RUN) -m pytest tests --ignore=tests/interpret $(WORKERS); \
	step interpreter env TRITON_INTERPRET=1 $(RUN) -m pytest tests/interpret $(WORKERS); \
	printf '\nmake test\n%b' "$$lines"; exit $$failed

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
