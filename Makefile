# make run    show what runs on this machine and why, then train a language model (about two minutes on two cores)
# make test   run all checks of CI, which include a sample of the tests; TEST_WHOLE=1 make test runs all tests
# make quick  check a change in at most three minutes on two cores: ruff, mypy, plans, and calls of each kind of op
# make docs   build the documentation site into build/site (Python 3.11 or newer)
# Each command first makes an environment in .venv, unless it is up to date. Needs make and Python 3.10 or newer.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# Each worker begins with its own share of the files, so that the setup of a file runs once. A worker that finishes early
# takes tests from another one.
WORKERS = -n $(JOBS) --dist worksteal
RUN = $(VENV)/bin/python

# The tensors in the tests are small, so threads cost more than they save: on a busy machine, tests take up to 20 times as long.
run test quick: export OMP_NUM_THREADS = 1
# Run half of the slow tests; the hash of the commit decides which half.
test: export TEST_ALTERNATE = 1

# Files of make quick: plans, the organisation of the code, and an op of each kind, in plain torch and in the interpreter.
QUICK = tests/plan/test_plan.py tests/plan/test_policy.py tests/test_house.py tests/test_imports.py tests/test_promise.py tests/test_stubs.py \
	tests/test_readme.py tests/test_cli.py tests/test_launch.py tests/test_launch_cache.py tests/test_family.py \
	tests/ops/test_simple_gla.py tests/ops/test_families.py tests/ops/test_token_ops.py tests/ops/test_replay.py
QUICK_KERNELS = tests/interpret/test_by_chunk.py tests/interpret/test_modules.py

# Every step runs, even if an earlier one fails. END prints the result of each; its exit status is 1 if any step failed.
STEP = trap 'exit 130' INT; failed=0; lines=; \
	step() { \
		name=$$1; shift; echo "$$*"; \
		if "$$@"; then ended=passed; else ended="FAILED, exit status $$?"; failed=1; fi; \
		lines="$$lines$$(printf '  %-11s %s' "$$name" "$$ended")\n"; \
	}; \
	step ruff $(RUN) -m ruff check .; \
	step mypy $(RUN) -m mypy
END = printf '\nmake $@\n%b' "$$lines"; exit $$failed

.PHONY: help run test quick docs clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

run:
	@$(PYTHON) tools/setup_env.py $(VENV)
	$(RUN) -m flashlin doctor --run
	$(RUN) examples/train_lm.py

test:
	@$(PYTHON) tools/setup_env.py $(VENV) test,dev
	@$(PYTHON) tools/setup_env.py $(VENV) docs
	@$(STEP); \
	step site $(RUN) -m tools.build_site; \
	step reports $(RUN) -m tests.report_scores corpus held_out; \
	step tests $(RUN) -m pytest tests --ignore=tests/interpret $(WORKERS); \
	step interpreter env TRITON_INTERPRET=1 $(RUN) -m pytest tests/interpret $(WORKERS); \
	$(END)

quick:
	@$(PYTHON) tools/setup_env.py $(VENV) test,dev
	@$(STEP); \
	step tests $(RUN) -m pytest $(QUICK) $(WORKERS); \
	step interpreter env TRITON_INTERPRET=1 $(RUN) -m pytest $(QUICK_KERNELS) $(WORKERS); \
	$(END)

docs:
	@$(PYTHON) tools/setup_env.py $(VENV) docs
	@$(RUN) -m tools.build_site

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
