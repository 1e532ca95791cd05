# make mnist    set up, build, train a CNN on MNIST and time it against stock PyTorch
# make test     the same set-up, then the test suite, on a CPU in a process per core (up to 4)
#               (ARGS="tests/test_relu.py -k layouts")
# make bench    the same set-up, then the op benchmarks       (ARGS="relu")
# make wheel    wheels for every Python from 3.10 to 3.13 that is here, into dist/
#               (ARGS="--python 3.12")
# make test-wheel   the newest of those wheels in a fresh venv outside the tree
#               (ARGS="--torch torch==2.10.0 dist/some.whl")
# make docs     the documentation as a site, into build/site
# make test-integrations   docs/integrations.md with the real packages, in a venv of their own
#               (gigabytes: a CUDA build of torch)
# make format   format C++, CUDA and Python; `make lint` only checks
# make clean    remove .venv and everything built
#
# PYTHON=python3.12 chooses the Python; its torch is used when it is 2.10 or newer. setup.py lists
# the variables of the build (BRAZE_CUDA, TORCH_CUDA_ARCH_LIST, BRAZE_CPU_ISA, MAX_JOBS, ...).
# Each step that succeeded leaves a stamp in .venv and is not repeated until its inputs change.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: mnist test bench wheel test-wheel test-integrations docs format lint build clean FORCE

PYTHON ?= python3
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
# pip asks no index about what is installed already, so all of this works offline then.
PIP_INSTALL := $(PY) -m pip --disable-pip-version-check install -q
NATIVE := setup.py $(shell find csrc -type f)
# What braze and tests/conftest.py import, for a venv that has braze by its path alone.
TEST_PACKAGES := numpy platformdirs rich matplotlib pytest pytest-xdist hypothesis expecttest
FORMATTED = $(shell git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

mnist: build
	@$(PY) -m braze mnist $(ARGS)

test: build $(VENV)/stamp.test
	@$(PY) -m pytest -n auto --dist worksteal $(ARGS)

bench: build
	@$(PY) -m braze bench $(ARGS)

wheel: $(VENV)/stamp.wheel
	@. $(VENV)/build.env; $(PY) tools/make_wheels.py $(ARGS)

test-wheel: $(VENV)/build.env
	@$(PY) tools/test_wheel.py $(ARGS)

docs: $(VENV)/stamp.docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -q

test-integrations: build
	@$(PY) -m venv build/integrations
	@build/integrations/bin/python -m pip --disable-pip-version-check install -q \
	  -r requirements-integrations.txt $(TEST_PACKAGES)
	@PYTHONPATH=python build/integrations/bin/python -m pytest -q tests/test_integrations.py $(ARGS)

build: $(VENV)/stamp.native $(VENV)/stamp.install

format: $(VENV)/stamp.lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	@$(VENV)/bin/clang-format -i $(FORMATTED)

lint: $(VENV)/stamp.lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)

clean:
	rm -rf $(VENV) build dist python/braze.egg-info python/braze/lib python/braze/_C*.so

$(VENV)/build.env: tools/make_venv.py
	@$(PYTHON) tools/make_venv.py $(VENV) torch==2.13.0

$(VENV)/stamp.deps: requirements-build.txt $(VENV)/build.env
	@echo "braze: installing what is missing of $<"
	@$(PIP_INSTALL) -r $<
	@touch $@

# Rewritten only when a variable of the build changes, which then builds again.
$(VENV)/variables: FORCE | $(VENV)/build.env
	@echo "$${BRAZE_CUDA-} $${TORCH_CUDA_ARCH_LIST-} $${BRAZE_CPU_ISA-} $${CUDA_HOME-} $${CXX-}" > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(VENV)/stamp.native: $(NATIVE) $(VENV)/stamp.deps $(VENV)/variables
	@echo "braze: building the native libraries (some minutes the first time)"
	@. $(VENV)/build.env; $(PY) setup.py -q build_ext --inplace
	@touch $@

$(VENV)/stamp.install: pyproject.toml | $(VENV)/stamp.native
	@echo "braze: installing braze into $(VENV), and what is missing of its dependencies"
	@. $(VENV)/build.env; $(PIP_INSTALL) --no-build-isolation -e '.[digits]'
	@touch $@

$(VENV)/stamp.test: pyproject.toml | $(VENV)/stamp.native
	@echo "braze: installing what is missing of the tests' dependencies"
	@. $(VENV)/build.env; $(PIP_INSTALL) --no-build-isolation -e '.[test]'
	@touch $@

$(VENV)/stamp.docs: pyproject.toml | $(VENV)/stamp.native
	@. $(VENV)/build.env; $(PIP_INSTALL) --no-build-isolation -e '.[docs]'
	@touch $@

$(VENV)/stamp.wheel: pyproject.toml | $(VENV)/stamp.native
	@. $(VENV)/build.env; $(PIP_INSTALL) --no-build-isolation -e '.[wheel]'
	@touch $@

$(VENV)/stamp.lint: pyproject.toml | $(VENV)/stamp.native
	@. $(VENV)/build.env; $(PIP_INSTALL) --no-build-isolation -e '.[lint]'
	@touch $@
