# Every command makes the environment (.venv) first, when it is missing or older than requirements.txt.
# `make clean test PYTHON=python3.13` makes it anew with another Python.

ENV   := .venv/.ready
PY    := .venv/bin/python
PORT  := 8000

# Programs of the environment come first, and one BLAS thread makes printed digits the same everywhere.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export OPENBLAS_NUM_THREADS := 1
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export PYTHON
# The environment comes without bytecode; where Python may not write it, each of forty notebooks compiles it anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help book kernels test thorough unit narrow web pdf notebooks serve bench links lock clean

help:
	@echo "make book        build the book, strictly, into _build/html"
	@echo "make test        run the unit tests, the book's checks of itself and every notebook"
	@echo "make unit        the same without the notebooks, to have an answer in minutes"
	@echo "make thorough    run the tests that the two above leave out: more models and engines, installs"
	@echo "make narrow      run the Kalman chapters once more as on a processor without AVX-512"
	@echo "make kernels     compile the Kalman passes, as the four above do first"
	@echo "make web         test the built book in a browser (needs playwright and Chromium or Chrome)"
	@echo "make pdf         print the built book as one PDF (needs playwright, pypdf and Chromium or Chrome)"
	@echo "make notebooks   run the notebooks from their .md text, and write the pairs and the equation index"
	@echo "                 (ONLY=kalman/01 for some of them)"
	@echo "make serve       show the built book at http://localhost:$(PORT) (PORT=9000 for another port)"
	@echo "make bench       run every script of benchmarks/"
	@echo "make links       try every link of the book that leads elsewhere"
	@echo "make lock        resolve pyproject.toml into requirements.txt (needs uv)"
	@echo "make clean       remove what these commands made: _build, .venv and caches"

$(ENV): requirements.txt pyproject.toml
	@bash tools/environment.sh

# --all: a page that was not read again gives no warning, and a second run would pass where the first failed.
book: $(ENV)
	@.venv/bin/jupyter-book build . --all -W -n --keep-going
	@echo
	@echo "The book is built. Open _build/html/index.html, or run make serve."

kernels: $(ENV)
	@$(PY) -m tools.compile_kernels

# Two workers; loadscope keeps the cells of one notebook, and the tests of one module, on one worker.
# They take them in the order of conftest.py, longest first, and not in that of their numbers of tests.
test: kernels
	@$(PY) -m pytest --nbval -n 2 --dist loadscope --no-loadscope-reorder -m "not thorough"

unit: kernels
	@$(PY) -m pytest tests src -n 2 --dist loadscope --no-loadscope-reorder -m "not thorough"

# What repeats a property for more models or engines than a fault needs to be seen. Few modules, so
# that their tests are shared out one by one.
thorough: kernels
	@$(PY) -m pytest tests -n 2 -m thorough

# What a chapter prints is the same where vectors hold four numbers: with AVX-512 they hold eight, and
# NUMBA_CPU_NAME makes them four. Elsewhere `make test` has shown it.
narrow: kernels
	@if $(PY) -c "from helpers.kalman.compiled.tiles import LANES; raise SystemExit(LANES == 4)"; then \
	  export NUMBA_CPU_NAME=haswell; $(MAKE) kernels && \
	  $(PY) -m pytest --nbval notebooks/kalman -n 2 --dist loadscope --no-loadscope-reorder; \
	fi

# playwright is not pinned: it is needed for these tests alone, and they are skipped without it.
web: $(ENV)
	@$(PY) -m pytest tests/web -rs

pdf: $(ENV)
	@test -f _build/html/index.html || $(MAKE) book
	@$(PY) -m tools.pdf

links: $(ENV)
	@.venv/bin/jupyter-book build . --all --builder linkcheck

notebooks: $(ENV)
	@$(PY) -m tools.notebooks $(ONLY)

serve: $(ENV)
	@test -f _build/html/index.html || $(MAKE) book
	@echo "The book is at http://localhost:$(PORT) (Ctrl-C stops it)."
	@$(PY) -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

bench: $(ENV)
	@found=no; for script in benchmarks/*.py; do \
	  test -f "$$script" || continue; \
	  found=yes; echo "== $$script"; $(PY) "$$script" || exit 1; \
	done; test $$found = yes || echo "benchmarks/ holds no script: nothing was measured."

lock:
	@bash tools/lock.sh

clean:
	rm -rf _build .venv .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} + -o -name .ipynb_checkpoints -prune -exec rm -rf {} +
