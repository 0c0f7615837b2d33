#!/usr/bin/env bash
# Make .venv, or bring it up to date with requirements.txt: with uv where there is one, else with Python's own
# venv and pip. PYTHON=... chooses the interpreter. .venv/.ready is written last, so a failure leaves none.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/.ready
oldest="Gradients by Hand needs Python 3.12 or newer"

say() { printf '%s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

# A name in PATH may be a pyenv shim that cannot run here, so each candidate is asked, not looked up.
version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

find_python() {
  local candidate version found=""
  for candidate in ${PYTHON:-python3.12 python3.13 python3.14 python3 python}; do
    version=$(version_of "$candidate") || continue
    if new_enough "$candidate"; then
      say "$candidate"
      return
    fi
    found="${found:-Python $version ($candidate)}"
  done
  fail "$oldest; found ${found:-none that runs (tried ${PYTHON:-python3.12, python3.13, python3.14, python3, python})}." \
    "Install 3.12, or uv, and run make again."
}

make_with_uv() {
  # Left to itself uv also finds, or downloads, a Python that is not in PATH; offline, what PATH has must do.
  # --seed: pip as well, which installs what is not pinned (contributing, the browser's tests).
  if [ -z "${PYTHON:-}" ] && uv venv --quiet --seed --python 3.12 .venv 2>/dev/null; then
    return
  fi
  local python
  python=$(find_python)
  rm -rf .venv  # what the first try may have left
  uv venv --quiet --seed --python "$("$python" -c 'import sys; print(sys.executable)')" .venv
}

make_with_python() {
  local python
  python=$(find_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null || fail \
    "Python $(version_of "$python") ($python) comes without its venv module." \
    "Install it (Debian and Ubuntu: apt install python3-venv), or uv, and run make again."
  "$python" -m venv .venv
}

# --no-compile: most modules of 190 packages are never imported, and the others are compiled by who imports them
# first. --no-deps: requirements.txt names every package, so that nothing has to be resolved.
pip_install() { .venv/bin/python -m pip install --no-compile --no-deps --disable-pip-version-check "$@"; }

# Half of the packages: the odd lines of requirements.txt or the even ones.
install_half() { grep '==' requirements.txt | awk -v rest="$1" 'NR % 2 == rest' | pip_install --requirement /dev/stdin; }

install_with_pip() {
  # pip says a line or more for each of 190 packages: one in forty is enough, and what it warns of or fails at
  # goes into a log, of which the end is shown when it fails. Two halves at once take half the time.
  local log=.venv/install.log
  {
    install_half 0 &
    pip_install --editable . && install_half 1 && wait $! && .venv/bin/python -m pip check >&2
  } 2>"$log" | awk '
    /^ *Collecting /        { if (++seen % 40 == 0) { print "  found " seen " packages"; fflush() } }
    /^Installing collected/ { if (++halves > 1) { print "  installing them"; fflush() } }
  ' || { grep -v '^WARNING' "$log" | tail -n 20 >&2; fail "The installation failed; .venv/install.log has all that pip said."; }
}

rm -f "$stamp"
if ! new_enough .venv/bin/python; then
  rm -rf .venv
  if command -v uv >/dev/null; then make_with_uv; else make_with_python; fi
fi
say "Installing requirements.txt into .venv with Python $(version_of .venv/bin/python)."
if command -v uv >/dev/null; then
  uv pip install --python .venv/bin/python --requirement requirements.txt >/dev/null
else
  install_with_pip
fi
# The first import lists the fonts of the machine, and says so on stderr when that is slow: not in a notebook, then.
.venv/bin/python -c 'import matplotlib.font_manager' 2>/dev/null
touch "$stamp"
