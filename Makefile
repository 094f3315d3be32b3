# make demo | test | test-all | test-mindspore-2.10 | check | lint | docs | bench | toolchains. All but the last set up .venv
# first, once.
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-mindspore-2.10 check lint format docs bench toolchains setup clean

demo: $(VENV)/.core
	$(BIN)/python examples/demo.py

# jemalloc, of Debian or of ray's package: compiling makes millions of small objects, and takes a seventh less time with it, and
# a twentieth less again in large pages.
JEMALLOC = $(firstword $(shell ls /usr/lib/*/libjemalloc.so.2 $(CURDIR)/$(VENV)/lib/python3*/site-packages/ray/core/libjemalloc.so 2>/dev/null))
PYTEST = LD_PRELOAD=$(JEMALLOC) MALLOC_CONF=thp:always $(BIN)/python -m pytest --durations=10 --numprocesses=2 --dist=loadfile --no-loadscope-reorder

test: $(VENV)/.dev
	$(PYTEST) -m "not long"

test-all: $(VENV)/.all
	$(PYTEST)

# The packages of $(VENV), and before them another MindSpore: a part of the tests, in 3 minutes.
LATER := .venv-mindspore-2.10

test-mindspore-2.10: $(LATER)/.done
	$(LATER)/bin/python -m pytest -m "not long" $$(cat tests/mindspore_2.10.txt)

$(LATER)/.done: $(VENV)/.all
	$(BIN)/python -m venv --without-pip $(LATER)
	$(BIN)/python -m pip --python $(LATER)/bin/python install --quiet --disable-pip-version-check --no-deps mindspore==2.10.0
	echo "import site; site.addsitedir('$$(echo $(CURDIR)/$(VENV)/lib/python3*/site-packages)')" \
		> $$(echo $(LATER)/lib/python3*/site-packages)/shared.pth
	@touch $@

lint: $(VENV)/.all
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest tests/test_architecture.py tests/unit -m "not slow"

format: $(VENV)/.all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Strictly: a broken link or a missing anchor fails (mkdocs.yml). The site is out/site/index.html.
docs: $(VENV)/.docs
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/humaneval_x.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/dry_run.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/modern.py
	$(BIN)/python benchmarks/moe.py
	$(BIN)/python benchmarks/align.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/cluster.py
	$(BIN)/python benchmarks/random_ltd.py
	$(BIN)/python benchmarks/half_types.py

toolchains:
	tools/install_toolchains.sh

setup: $(VENV)/.all

$(VENV)/bin/python:
	@python=$$(tools/find_python.sh) && echo "setting up $(VENV) with $$python" && $$python -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,serve]'
	@touch $@

$(VENV)/.all: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,serve,data,web,ray,mindformers,all-tests]'
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.bench: $(VENV)/.all
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[benchmark]'
	@touch $@

clean:
	rm -rf $(VENV) $(LATER) out .pytest_cache .ruff_cache .mypy_cache *.egg-info
