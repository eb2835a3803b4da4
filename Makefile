# Two commands set everything up on a fresh machine: `make demo` and `make test`. Neither root nor Debian is needed for
# `make install`, `make check` and `make docs`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start a thousand processes: where bytecode may not be kept, each of them compiles all of our modules anew.
export PYTHONDONTWRITEBYTECODE :=
# On all cores, unlike pip; some packages have files that no Python compiles.
COMPILE := $(BIN)/python -m compileall -q -j 0

.PHONY: install check-host demo demo-root check test nightly oldest gpu lint style docs cluster-up cluster-down clean

install: $(VENV)/.installed

# The stamp depends on what is declared, so a changed requirement reinstalls.
$(VENV)/.installed: setup.cfg db/setup.cfg wrapper/setup.cfg pyproject.toml requirements-dev.txt
	@echo "Installing slurm-ones and everything it is developed with into $(VENV): some minutes …"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --progress-bar off --upgrade pip
	# Until 0.1 one distribution held all three packages: to replace it would remove files of the new ones.
	$(BIN)/pip uninstall --quiet --yes slurm-ones
	$(BIN)/pip install --no-compile --progress-bar off --quiet --requirement requirements-dev.txt \
		--editable ./wrapper --editable './db[migrate]' --editable .
	@$(COMPILE) $(VENV)/lib > /dev/null || true
	@touch $@

# Said before anything is installed: a real Slurm needs root on a Debian-like host.
check-host:
	@$(PYTHON) -c 'import sys; from tests.cluster import unavailable; why = unavailable(); why and sys.exit(why)'

# The packages and the Debian are got side by side.
demo: check-host
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/.demo demo-root
	@$(BIN)/python -m tests.demo $(if $(PORT),--port=$(PORT))

demo-root:
	@$(PYTHON) -m tests.demo.first

# What the demo needs, without what only development does: less than half of the time of `make install`. Its jobs, of
# other users, could keep no bytecode, and each would compile PyTorch anew: it is compiled here.
$(VENV)/.demo: setup.cfg db/setup.cfg wrapper/setup.cfg pyproject.toml requirements-demo.txt
	@echo "Installing what the demo needs into $(VENV): about a minute, and the download of PyTorch …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --no-compile --progress-bar off --quiet --requirement requirements-demo.txt \
		--editable ./wrapper --editable './db[migrate]' --editable .
	@$(COMPILE) $(VENV)/lib slurm_ones wrapper db tests/demo tests/cluster > /dev/null || true
	@echo "All packages of the demo are installed"
	@touch $@

# $(call with_types,COMMAND): mypy runs next to it, for it takes a minute of one core. Its errors stand at the end, and
# fail the whole. What runs in the background hears no Ctrl-C, so it is ended by the shell.
with_types = log=$$(mktemp); $(BIN)/mypy > $$log 2>&1 & mypy=$$!; \
	trap 'rm -f $$log' EXIT; trap 'kill $$mypy; exit 130' INT TERM; $(1); tests=$$?; \
	wait $$mypy; types=$$?; echo "mypy:"; cat $$log; [ $$tests -eq 0 ] && [ $$types -eq 0 ]

# What to run before each commit: lint, and every test that needs no Slurm and is not slow. A third worker computes
# while others wait.
CHECK_WORKERS ?= 3
check: style
	@$(call with_types,$(BIN)/python -m pytest --quiet --numprocesses $(CHECK_WORKERS) --dist loadfile \
		-m 'not cluster and not slow and not nightly')

# All tests but those marked nightly. More workers than a small machine has cores: two of them begin with what waits for
# a Slurm, each on clusters of its own (tests/workers.py).
WORKERS ?= 4
CHOSEN := -m 'not nightly'
test: style
	@$(call with_types,$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(CHOSEN))

# Everything: what takes minutes, 200 examples of each property instead of 20 or fewer, and fresh seeds. What is found
# becomes an explicit example of its test. The contract of strategies runs on the oldest processor's instructions, too.
OLD_PROCESSOR := MKL_ENABLE_INSTRUCTIONS=SSE4_2 ATEN_CPU_CAPABILITY=default
nightly: export ONES_NIGHTLY := 1
nightly: CHOSEN :=
nightly: test oldest
	$(OLD_PROCESSOR) $(BIN)/python -m pytest --numprocesses $(WORKERS) tests/wrapper/strategies

# The wrapper's tests with the oldest torch that it declares, in an environment that has everything else from $(VENV).
OLDEST := .venv-oldest-torch
oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile -m 'not cluster and not nightly' \
		$(addprefix tests/wrapper/,checkpoint data devices gradients membership network run test_elastic.py)

$(OLDEST)/.installed: $(VENV)/.installed wrapper/setup.cfg
	$(PYTHON) -m venv $(OLDEST)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
		> "$$($(OLDEST)/bin/python -c 'import site; print(site.getsitepackages()[0])')/others.pth"
	$(OLDEST)/bin/python -m pip install --quiet --progress-bar off \
		torch==$$(sed -n 's/^ *torch>=//p' wrapper/setup.cfg)
	@touch $@

# What no CPU can show, on this machine's GPUs, by an environment with a CUDA torch: `make gpu PYTHON=…`.
gpu:
	@PYTHONPATH=wrapper $(PYTHON) -m benchmarks.gpu --json gpu.json

lint: style
	$(BIN)/mypy

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/shellcheck sbatch_templates/*.sbatch .ci/run

docs: install
	$(BIN)/mkdocs build --strict

cluster-up: check-host install
	$(BIN)/python -m tests.cluster up gres

cluster-down: install
	$(BIN)/python -m tests.cluster down gres

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
