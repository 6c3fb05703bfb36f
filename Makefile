# The verbs of the project. Every one installs what it needs; continuous integration uses them word for word.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extra arguments for pip, e.g. the index of torch's CPU builds on a machine without a GPU.
PIP_ARGS ?=
SEEDS ?= 200
SEED ?=
MODEL ?=
# For the demo; three prompts of its own if empty.
PROMPT ?=
# Where spelling is checked; tests misspell on purpose.
SPELLED := $(wildcard *.md) docs examples benchmarks slipstream

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-fast test-slow test-clients test-gpu memcheck sim mutants check format docs readme site bench \
	bench-report release-check clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

demo: $(VENV)/.installed ## fetch the default model; answer with and without drafts, both speeds. PROMPT="..." for yours
	@$(BIN)/slipstream demo $(if $(PROMPT),"$(PROMPT)")

test: $(VENV)/.installed-dev ## the whole CPU suite
	$(BIN)/python -m pytest -n auto --dist worksteal

test-fast: $(VENV)/.installed-dev ## for the inner loop: the first case of each test, without those that take seconds
	$(BIN)/python -m pytest --fast -n auto --dist worksteal

test-slow: $(VENV)/.installed-dev ## the long matrices too, and other cases in every run
	$(BIN)/python -m pytest -m "not gpu and not clients" --timeout 3600 --hypothesis-profile default --durations 20

test-clients: $(VENV)/.installed-dev ## LangChain's and Cohere's clients against the server; installs them
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) $$($(BIN)/python -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['clients'])")
	$(BIN)/python -m pytest -m clients -W ignore tests/clients

test-gpu: ## what needs an NVIDIA GPU, with any python3 that has torch; installs nothing. MODEL=folder for a model of yours
	$(PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir . --confcutdir . tests/gpu $(if $(MODEL),--model $(MODEL))

memcheck: ## the kernels' tests under compute-sanitizer, every tensor in an allocation of its own
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
		$(PYTHON) -m pytest -q -c tests/gpu/pytest.ini --rootdir . --confcutdir . tests/gpu/test_kernels.py

sim: $(VENV)/.installed-dev ## the whole engine on a simulated GPU: SEEDS=200 worlds, or SEED=123 with a trace
	$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

mutants: $(VENV)/.installed-dev ## plant every fault of the list, one at a time: the simulator must find each
	$(BIN)/python -m tests.sim.mutations --seeds $(SEEDS)

check: $(VENV)/.installed-dev ## format, lint, spelling, types, tidiness, prose and links
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell $(SPELLED)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_tidy.py tests/test_import_direction.py tests/test_prose.py

format: $(VENV)/.installed-dev ## apply format and safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed ## bring generated tables and fields up to date
	$(BIN)/python -m slipstream.commands.sampling_fields
	$(BIN)/python -m slipstream.commands.reference

site: $(VENV)/.installed-docs ## the documentation as a site, in site/; fails on a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

readme: $(VENV)/.installed-dev ## bring the figures of README and docs/benchmarks.md up to date with benchmarks/results/
	$(BIN)/python benchmarks/readme.py

serve: $(VENV)/.installed ## the default model behind an OpenAI-compatible API
	$(BIN)/slipstream serve $(MODEL)

bench: $(VENV)/.installed ## decode throughput of the default model
	$(BIN)/slipstream bench --batch 1,8

bench-report: $(VENV)/.installed-dev ## measure what fits this machine, then write the figures of README and docs/benchmarks.md
	$(BIN)/python benchmarks/report.py

release-check: $(VENV)/.installed-dev ## build sdist and wheel into dist/, check them, install and run the wheel elsewhere
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m tests.release_check

clean: ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "error: $(PYTHON) is missing or older than 3.11; set PYTHON=/path/to/python3.11 or newer" >&2; exit 2; }
	@# Debian and Ubuntu split venv into a package of its own.
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy python3-venv; } \
		|| { echo "error: python's venv module is missing; install it (Debian: python3-venv)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip $(PIP_ARGS)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing slipstream and what it needs (torch is large; a few minutes the first time)"
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -e '.[server,structured]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing slipstream with its development tools"
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) $$($(BIN)/python -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@
