# On a machine with Python (3.11 or later) alone: `make demo`, `make serve`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
TORCH := 2.13.0
TORCHVISION := 0.28.0

# The tests start many processes; without bytecode each of them compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test test-real campaign durations check audit unused docs gpu bench lock clean

demo: $(READY)  ## plan models, then train one by its plan; pictures in demo-output/
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

serve: $(READY)  ## the planning service: http://127.0.0.1:8754
	$(BIN)/stagewright serve

test: $(READY)  ## every subject, in smaller instances
	$(BIN)/pytest -n 2 -m "not slow and not real"

test-real: $(READY)  ## real processes: ranks, servers, workers, browsers
	$(BIN)/pytest -n 2 -m "real and not slow"

campaign: $(READY)  ## before a release, for hours: slow instances, all examples of every property
	$(BIN)/pytest -n 2 -m "slow or hypothesis" --hypothesis-profile nightly

durations: $(READY)  ## on a quiet machine: measured CPU seconds of every file of tests
	rm -rf build/durations
	PYTHONPATH=tests/shared $(BIN)/pytest -p durations -n 2 -m "not slow"
	$(BIN)/python .ci/budget.py write

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/budget.py
	$(MAKE) --no-print-directory unused audit

audit: $(READY)  ## what is installed is pinned; advisories, where PyPI answers
	$(BIN)/python .ci/audit.py

unused: $(READY)  ## modules and definitions that no command, public name or request leads to
	$(BIN)/python .ci/unused.py

docs: $(READY)  ## the documentation as a site that needs no network: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

gpu: $(READY)  ## on a machine with a GPU, in 8 minutes: tests and measurements, into build/gpu
	$(BIN)/python -m benchmarks.on_gpu build/gpu

bench: $(READY)
	$(BIN)/python -m benchmarks

# The pinned versions are installed once, and again when they or the package's metadata change.
# The build runs in the environment itself, so that its tools are the pinned ones too. Python starts
# with what lets the registry's torchvision, and so transformers, be imported beside torch for CPUs.
$(READY): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,executor,cluster,service,vision]'
	cp benchmarks/torchvision_operators.py \
		"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sitecustomize.py"
	touch $@

# Newest versions of everything, resolved in an environment of their own. Torch is large and built
# per accelerator: its version and torchvision's alone are pinned, by hand.
lock:
	rm -rf build
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet '.[dev,cluster,service]'
	{ build/lock/bin/python -m pip freeze --all --exclude pip --exclude stagewright; \
		echo torch==$(TORCH); echo torchvision==$(TORCHVISION); } | LC_ALL=C sort -f > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build

clean:
	rm -rf $(VENV) build dist demo-output
