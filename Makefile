# Everything that a fresh clone needs: Python 3.10 to 3.13, gcc and make.
#
#   make demo                train a small CNN on two worker processes, next to one process
#   make test                lint, then a test of every promise, with the newest supported TensorFlow
#                            (20 minutes on 2 cores)
#   make test-all            every test, with all cases, with both Keras generations (2 hours)
#   make test TF=2.15.1      the same tests with another TensorFlow, in its own virtual environment;
#                            TF=intel is intel-tensorflow 2.14
#   make test-corners        a few tests with each of the oldest TensorFlows, in small environments
#   make test-libraries      programs on top of some twenty libraries, in an environment of its own
#   make lint                ruff, mypy, import-linter, check_prose, check_docstrings,
#                            check_tensorflow_names, shellcheck, clang-format, hadolint, docs
#   make docs                build the documentation, strictly, into build/site
#   make format              let ruff and clang-format rewrite the files
#   make test-fast           unit tests alone
#   make soak                load and faults many times over: 200 warm jobs, 100 random kills, 20 SIGTERMs; servers
#   make bench               compare with plain Keras and others; results in benchmarks/results
#   make scaling             compare with plain Keras for 2, 4, 8, ... workers
#   make dist                build a release in dist: a manylinux wheel, the source distribution
#   make release             check all that a release needs, build it, install it in an empty environment,
#                            run the README's programs there; stops before the upload. ARGS=--rehearse
#                            does so before the tag, the changelog and the addresses are ready
#   make notebooks           run the tutorials, and keep their outputs in the files
#   make clean               remove the files that these commands made
#
# PYTHON=python3.11 chooses the interpreter, ARGS="-k parity -x" goes to pytest.

SHELL := /bin/bash
# The tests' many processes share the bytecode of nanotf, too.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
NEWEST_TF := 2.21.*
TF ?=
ARGS ?=

VENV := .venv$(if $(TF),-$(TF))
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Touched when the installation is complete, so that a second call installs nothing.
STAMP := $(VENV)/.installed
NATIVE := $(wildcard nanotf/collectives/native/*.cc nanotf/collectives/native/*.h)

SHELL_SCRIPTS = $(shell git ls-files -co --exclude-standard -- .ci/run 'tools/*' ':!tools/*.py' ':!tools/*.txt' 'scripts/*' '*.sh')
CPP_SOURCES = $(shell git ls-files -co --exclude-standard -- '*.cc' '*.cpp' '*.h' '*.hpp' '*.c')
DOCKERFILES = $(shell git ls-files -co --exclude-standard -- '*Dockerfile')

.PHONY: demo test test-all test-fast lint docs format dist clean venv
.DELETE_ON_ERROR:

# In an environment of its own, which has TensorFlow and what the example imports.
demo: .venv-demo/.installed
	PYTHONPATH='$(CURDIR)' .venv-demo/bin/python examples/digits.py
.venv-demo/.installed: pyproject.toml tools/make-venv $(NATIVE)
	tools/make-venv $(@D) '$(NEWEST_TF)' $(PYTHON) examples
	PYTHONPATH='$(CURDIR)' $(@D)/bin/python -m nanotf.collectives.build
	touch $@

# TensorFlow 2.14 and 2.15 have one Keras generation; later versions have Keras 3 and, as tf_keras, Keras 2.
# Importing TensorFlow fixes the generation, hence a run for each. No run keeps two cores busy, so
# three run in parallel, begun in this order; each prints at its end. Six parts, so that none is alone
# after the others, and last the run that by itself uses all cores. Exit code 5:
# ARGS selects no test. `loadfile`: the tests of a file share fixtures that are slow to make.
# (pytest 9.2 ignores the groups of xdist 3.8.)
PARTS := $(addprefix newest-,1 2 3 4 5 6)

# Code is checked once, with the newest: the types of NumPy differ between its versions.
test test-all: $(if $(TF),$(STAMP),lint)
	@$(MAKE) --no-print-directory -j 3 --keep-going --output-sync=target $(PARTS) \
		$(if $(filter intel 2.15%,$(TF)),,legacy) $(ALSO) units SAMPLE="$(SAMPLE)" LEGACY="$(LEGACY)"

.PHONY: units $(PARTS) legacy
$(PARTS): newest-%:
	$(PYTEST) tests/e2e tests/programs --part $*/$(words $(PARTS)) $(SAMPLE) $(ARGS) || test $$? = 5
units:
	$(PYTEST) -n auto --dist loadfile --ignore tests/e2e --ignore tests/programs --ignore tests/libraries tests $(SAMPLE) $(ARGS) || test $$? = 5
legacy:
	TF_USE_LEGACY_KERAS=1 $(PYTEST) tests/e2e tests/programs $(SAMPLE) $(LEGACY) $(ARGS) || test $$? = 5

# `make test` selects one case of each test, and no variation of a promise that another test covers;
# with legacy Keras, a test of each file.
test: SAMPLE := --cases 1 -m 'not slow and not thorough'
test: LEGACY := -m 'both_generations and not slow and not thorough' --of-each-file 1

# A few tests with the oldest TensorFlows that are supported, and with the oldest Keras 3, so that none
# breaks unseen: all private names, a `fit`, a loop, nanotf-init, doctor. Their environments are small,
# and use the native library that was compiled for $(VENV). CI runs `make test ALSO=test-corners`.
ALSO :=
CORNERS := intel 2.15.1 2.16.2
OLDEST_KERAS_3 := 3.10.*
CORNER_TESTS := $(wildcard tests/e2e/test_compat*.py) $(addprefix tests/, \
	e2e/test_parity.py::test_arrays_float64 e2e/test_custom_loop.py::test_follows_one_process \
	e2e/test_doctor_here.py::test_two_workers_pass_the_test \
	scripts/test_init_scripts.py::test_init_exports_the_configuration_and_prints_it)
.PHONY: test-corners $(CORNERS:%=corner-%)
test-corners: $(CORNERS:%=corner-%)
$(CORNERS:%=corner-%): corner-%: .venv-corner-%/.installed
	.venv-corner-$*/bin/python -m pytest $(CORNER_TESTS) --cases 1 $(ARGS) || test $$? = 5
$(CORNERS:%=.venv-corner-%/.installed): .venv-corner-%/.installed: pyproject.toml tools/make-venv | $(STAMP)
	tools/make-venv $(@D) $* $(PYTHON) corner
	$(if $(filter 2.16%,$*),$(@D)/bin/python -m uv pip install --quiet --compile-bytecode \
		--python $(@D)/bin/python 'keras==$(OLDEST_KERAS_3)')
	touch $@

# Programs on top of Keras libraries, alone and with two workers, in environments of their own. Each
# skips the programs whose library it lacks.
.PHONY: test-libraries
LIBRARIES := .venv-libraries-2.21 .venv-libraries-2.15.1
test-libraries: $(LIBRARIES:%=%/.installed)
	set -e; for venv in $(LIBRARIES); do $$venv/bin/python -m pytest -s tests/libraries $(ARGS); done
.venv-libraries-%/.installed: tests/libraries/requirements-%.txt tests/libraries/overrides-%.txt tools/make-venv | $(STAMP)
	tools/make-venv $(@D) '$(if $(filter 2.21,$*),$(NEWEST_TF),$*)' $(PYTHON) corner
	$(@D)/bin/python -m uv pip install --quiet --compile-bytecode --python $(@D)/bin/python \
		--requirement $< --override $(word 2,$^)
	touch $@

test-fast: $(STAMP)
	$(BIN)/python -m pytest tests/unit $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_prose.py
	$(BIN)/python tools/check_docstrings.py
	$(BIN)/python tools/check_tensorflow_names.py
	$(if $(SHELL_SCRIPTS),$(BIN)/shellcheck $(SHELL_SCRIPTS))
	$(if $(CPP_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES))
	$(if $(DOCKERFILES),$(BIN)/hadolint $(DOCKERFILES))
	@$(MAKE) --no-print-directory docs

# Warnings are errors (`strict` in mkdocs.yml): dead links, pages that the navigation lacks, names
# that do not exist. NO_MKDOCS_2_WARNING silences a note of mkdocs-material.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --quiet

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP_SOURCES),$(BIN)/clang-format -i $(CPP_SOURCES))

# Installs its tools in .venv-dist. zig needs 2 minutes the first time, to compile its libraries.
dist:
	PYTHON='$(PYTHON)' tools/build-dist

# 10 minutes on 2 cores, most of them downloads.
.PHONY: release
release:
	PYTHON='$(PYTHON)' $(PYTHON) tools/make_release.py $(ARGS)

# ARGS=docs/notebooks/keras_fit.ipynb runs one.
.PHONY: notebooks
notebooks: $(STAMP)
	PYTHONPATH='$(CURDIR)' PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/run_notebooks.py $(ARGS)

venv: $(STAMP)

$(STAMP): pyproject.toml tools/make-venv $(wildcard setup.py) $(NATIVE)
	tools/make-venv $(VENV) '$(or $(TF),$(NEWEST_TF))' $(PYTHON)
	touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Some 60 minutes; prints a table. NANOTF_SOAK_SEED=n repeats the moments of a run;
# NANOTF_SOAK_KILLS=n and NANOTF_SOAK_ROUNDS=n make it shorter or longer. nanotf must notice faults
# in the promised time; on a busy machine, NANOTF_SOAK_SLACK=5 allows five times that. Servers:
# NANOTF_SOAK_RELOADS=n new versions, NANOTF_SOAK_SECONDS=n of full load while memory must stay flat.
.PHONY: soak
soak: $(STAMP)
	$(BIN)/python -m pytest tests/soak -m 'slow or not slow' -s $(ARGS)

# Trains models with plain Keras, nanotf and others, interleaved; some 25 minutes on 2 cores, for a
# quiet machine. ARGS="--models mlp,cnn --quick" takes under 3; see `python -m benchmarks --help`.
.PHONY: bench
bench: $(STAMP)
	$(BIN)/python -c 'import matplotlib, fastapi, starlette, uvicorn' 2>/dev/null \
		|| $(BIN)/pip install --quiet 'matplotlib>=3.8' fastapi starlette uvicorn
	$(BIN)/python -m benchmarks $(ARGS)

# Trains with 2, 4, 8, ... workers, up to one for each core; under 20 minutes. ARGS="--quick" takes 5.
.PHONY: scaling
scaling: $(STAMP)
	$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(BIN)/pip install --quiet 'matplotlib>=3.8'
	$(BIN)/python -m benchmarks.scaling $(ARGS)
