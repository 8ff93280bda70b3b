# PYTHON, TORCH and VENV may be set on the command line. TORCH is pinned because an unpinned `torch` may bring gigabytes of CUDA libraries.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# One thread a process: ranks and test workers share the machine's cores, and sums are then added in the same order on every run.
export OMP_NUM_THREADS ?= 1

# Modules are compiled once, whatever the environment says: tests start hundreds of interpreters, and pytest rewrites every assertion.
unexport PYTHONDONTWRITEBYTECODE

# How many random cases `make fuzz` runs, and the seed of the first program.
CASES ?= 1000
SEED ?= 0

# How many faults `make mutate` plants.
MUTANTS ?= 5000

# How long `make attack` goes on.
SECONDS ?= 3600

# Seconds after which a test of `make test-broad` counts as hanging. Its longest take minutes of a core, more where the core is shared.
LONGEST ?= 1800

.PHONY: venv demo test test-moved test-broad test-gpu lint bench bench-gpu golden golden-accept plan-tables matrix zoo precision zoo-all libraries fuzz attack mutate conformance
.PHONY: placements pipelines test-frameworks ecosystem reference site wheel clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet "$(TORCH)"
	$(RUN) -m pip install --quiet -e ".[test,lint,docs]"
	touch $@

demo: $(STAMP)
	$(RUN) -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_llama.py

test: $(STAMP)
	$(RUN) -m pytest -n 3 --dist worksteal --durations 20 -m "not alone and not gpu and not broad and not frameworks"
	$(RUN) -m pytest -n 3 --dist worksteal --durations 20 -m "alone and not gpu and not broad"

# What `make test` leaves to `make test-broad` for its seconds alone: each change runs it before it lands.
test-moved: $(STAMP)
	$(RUN) -m pytest -n 3 --dist worksteal --timeout $(LONGEST) --durations 20 -m "broad(listed=True) and not gpu and not frameworks and not alone"

test-broad: $(STAMP)
	$(RUN) -m pytest --timeout $(LONGEST) --durations 20 -m "broad and not gpu"

# Accelerate, TRL, Lightning, litgpt, PEFT: tests that need them, and the page that says what works with them. litgpt asks for an older hub
# than transformers does.
test-frameworks: $(STAMP)
	$(RUN) -m pip install --quiet -e ".[test,frameworks]"
	$(RUN) -m pip install --quiet --no-deps litgpt
	$(RUN) -m pytest -m "frameworks"

ecosystem: $(STAMP)
	$(RUN) -m pip install --quiet -e ".[test,frameworks]"
	$(RUN) -m pip install --quiet --no-deps litgpt
	$(RUN) -m tests.frameworks

test-gpu: $(STAMP)
	$(RUN) -m pytest -m gpu

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

bench: $(STAMP)
	$(RUN) bench/run.py
	$(RUN) bench/pipeline.py

bench-gpu: $(STAMP)
	$(RUN) bench/gpu.py --write
	$(RUN) bench/gpu_decode.py --write
	$(RUN) bench/gpu_few_bits.py --write

fuzz: $(STAMP)
	$(RUN) -m tests.fuzz --cases $(CASES) --seed $(SEED)

# Faults planted into proved programs: none that changes what is computed may get through.
mutate: $(STAMP)
	$(RUN) -m tests.proof.mutants --mutants $(MUTANTS) --seed $(SEED)

attack: $(STAMP)
	$(RUN) -m tests.attack --seconds $(SECONDS) --seed $(SEED)

golden: $(STAMP)
	$(RUN) -m tests.golden

golden-accept: $(STAMP)
	$(RUN) -m tests.golden --accept

plan-tables: $(STAMP)
	$(RUN) bench/plan_tables.py --write

matrix: $(STAMP)
	$(RUN) -m tests.matrix

conformance: $(STAMP)
	$(RUN) -m tests.conformance

placements: $(STAMP)
	$(RUN) -m tests.conformance.placements

zoo: $(STAMP)
	$(RUN) -m tests.zoo

# Twelve families in each format of products on six meshes.
precision: $(STAMP)
	$(RUN) -m tests.zoo.precision

zoo-all: $(STAMP)
	$(RUN) -m tests.zoo.everything

# Models of ten libraries. torch is named again, so that none of them brings another; litgpt asks for an older hub than transformers does.
libraries: $(STAMP)
	$(RUN) -m pip install --quiet "$(TORCH)" -e ".[test,libraries]"
	$(RUN) -m pip install --quiet --no-deps litgpt
	$(RUN) -m tests.zoo.libraries

pipelines: $(STAMP)
	$(RUN) -m tests.pipelining
	$(RUN) -m tests.pipelining --torchrun

reference: $(STAMP)
	$(RUN) -m tests.reference
	$(RUN) -m tests.replacements_page

# The pages as a site, in out/site. A link that leads nowhere fails.
site: $(STAMP)
	$(RUN) -m mkdocs build --strict

# What is installed from a wheel, in an environment of its own and away from these sources, trains the demo.
wheel: $(STAMP)
	rm -rf dist out/wheel out/elsewhere
	$(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(PYTHON) -m venv out/wheel
	out/wheel/bin/python -m pip install --quiet "$(TORCH)" "transformers>=5" dist/meshc-*.whl
	mkdir -p out/elsewhere
	cp -r examples out/elsewhere
	cd out/elsewhere && env -u PYTHONPATH ../wheel/bin/python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_llama.py

clean:
	rm -rf $(VENV) build dist *.egg-info out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
