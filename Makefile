# make run    see it work: what runs here and why, then a language model trained on this machine (about two minutes on two cores)
# make test   everything that CI checks; TEST_WHOLE=1 make test for all of which CI takes a share
# make quick  check a change in at most three minutes on two cores: ruff, mypy, plans, and calls of each kind of op
# All make their own environment in .venv first; a second time that takes no time. Needs make and Python 3.10 or newer.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# Each worker begins with its own half of the files, so what a file prepares is prepared once; who is done first helps.
WORKERS = -n $(JOBS) --dist worksteal
RUN = $(VENV)/bin/python

# The tensors in the tests are small: threads that wait for each other cost more than they bring, twentyfold on a busy machine.
run test quick: export OMP_NUM_THREADS = 1

# Of make quick: plans, the order of the code, and an op of each kind, in plain torch and in the interpreter.
QUICK = tests/plan/test_plan.py tests/plan/test_policy.py tests/test_house.py tests/test_imports.py tests/test_promise.py tests/test_stubs.py \
	tests/test_readme.py tests/test_cli.py tests/test_launch.py tests/test_launch_cache.py tests/test_family.py \
	tests/ops/test_simple_gla.py tests/ops/test_families.py tests/ops/test_token_ops.py tests/ops/test_replay.py
QUICK_KERNELS = tests/interpret/test_by_chunk.py tests/interpret/test_modules.py

# Every step runs, whatever the others find. END says how each went; its exit status is 1 if one failed.
STEP = trap 'exit 130' INT; failed=0; lines=; \
	step() { \
		name=$$1; shift; echo "$$*"; \
		if "$$@"; then ended=passed; else ended="FAILED, exit status $$?"; failed=1; fi; \
		lines="$$lines$$(printf '  %-11s %s' "$$name" "$$ended")\n"; \
	}; \
	step ruff $(RUN) -m ruff check .; \
	step mypy $(RUN) -m mypy
END = printf '\nmake $@\n%b' "$$lines"; exit $$failed

.PHONY: help run test quick clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

run:
	@$(PYTHON) tools/setup_env.py $(VENV)
	$(RUN) -m flashlin doctor --run
	$(RUN) examples/train_lm.py

test:
	@$(PYTHON) tools/setup_env.py $(VENV) test,dev
	@$(STEP); \
	step tests $(RUN) -m pytest tests --ignore=tests/interpret $(WORKERS); \
	step interpreter env TRITON_INTERPRET=1 $(RUN) -m pytest tests/interpret $(WORKERS); \
	$(END)

quick:
	@$(PYTHON) tools/setup_env.py $(VENV) test,dev
	@$(STEP); \
	step tests $(RUN) -m pytest $(QUICK) $(WORKERS); \
	step interpreter env TRITON_INTERPRET=1 $(RUN) -m pytest $(QUICK_KERNELS) $(WORKERS); \
	$(END)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
