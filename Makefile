# Both main targets set up their own environment: `make demo` what a user needs, `make test` all.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test check gpu-test benchmarks clean

demo: .venv/.demo
	$(BIN)/python examples/demo

test: .venv/.test
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not check"

check: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal -m check

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

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
