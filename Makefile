# Two targets do everything for a newcomer: `make demo` and `make test`. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Programs that the tests use for real, by their Debian names.
PACKAGES := chromium munge slurm-wlm
# Tests wait for processes they start; those of one file share what is costly to set up.
# Their order is that of tests/conftest.py.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder
# What fails beside others, on a machine that is too busy for a time limit, is tried once more with nothing beside it.
ALONE := --last-failed --last-failed-no-failures none
# Thousands of processes import the same sources, which would otherwise be compiled each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo dist packages parsers test proof gpu lint docs screenshots recipes bench peers clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,report,explore,docs,dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/trimaran tune recipes/laptop.toml

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks recipes docs/*.py
	$(BIN)/ruff format --check src tests benchmarks recipes docs/*.py
	$(BIN)/mypy
	$(BIN)/lint-imports

# Where apt is not at hand the tests say what they miss.
packages:
	@missing=$$(for name in $(PACKAGES); do dpkg -s $$name >/dev/null 2>&1 || echo $$name; done); \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing \
		|| echo "apt-get cannot install $$missing here: the tests that need them will say so"; fi

# The configurations' own classes of the trainers that tests/plan reads exports with, each version in a folder of its own.
parsers: $(patsubst tests/plan/parsers/%.txt,.parsers/%/.installed,$(wildcard tests/plan/parsers/*.txt))

.parsers/%/.installed: tests/plan/parsers/%.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --upgrade \
		--target $(@D) -r $< && touch $@ || echo "$* cannot be installed here: the tests that need it will say so"

# What comes before the tests waits for the network by turns, and is done two at a time.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 packages lint parsers
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not proof" || $(BIN)/python -m pytest $(ALONE) -m "not proof"

# How many steps of most layouts `make proof` lays beside one process's; those that cover the axes train 20.
STEPS ?= 3
proof: export TRIMARAN_PROOF_STEPS = $(STEPS)
proof: packages $(STAMP)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "proof" || $(BIN)/python -m pytest $(ALONE) -m "proof"

# Tests and training speed on a CUDA device; where none is at hand it says so.
gpu: $(STAMP)
	$(BIN)/python -m pytest -m "gpu"
	$(BIN)/python benchmarks/gpu.py

# A wheel in dist/, installed and tried in a fresh environment that finds its dependencies in this one's.
dist: $(STAMP)
	rm -rf dist build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	TRIMARAN_WHEEL=$$(echo dist/*.whl) $(BIN)/python -m pytest tests/install/test_wheel.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

screenshots: packages $(STAMP)
	TRIMARAN_SCREENSHOTS=docs/images $(BIN)/python -m pytest -q tests/report -k "screenshot or follows"
	$(BIN)/trimaran timeline recipes/laptop.toml --layout pp2,mbs1 --measure -o docs/images/timeline.png

recipes: $(STAMP)
	$(BIN)/python recipes/run_all.py

bench: packages $(STAMP)
	@$(BIN)/python benchmarks/_peers.py
	for file in benchmarks/[a-z]*.py $(addprefix benchmarks/traced/,run.py collectives.py units.py); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# The software of others that benchmarks run, trace and time beside this one, kept apart from what the project needs.
peers: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .peers \
		-r benchmarks/peers/requirements.txt

clean:
	rm -rf $(VENV) .parsers .peers runs
