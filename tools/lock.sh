#!/usr/bin/env bash
# Resolve the ranges of pyproject.toml into requirements.txt: the newest versions that work together on every
# system and on each Python from 3.12 on.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v uv >/dev/null || { echo "make lock needs uv, which resolves for every system at once. Install it and run make again." >&2; exit 1; }

new=$(mktemp)
trap 'rm -f "$new"' EXIT
uv pip compile pyproject.toml --extra book --extra onnx --extra test --universal --python-version 3.12 \
  --upgrade --no-header --no-annotate --quiet --output-file "$new"
{
  echo "-e ."
  echo "# What readers and CI install: made from pyproject.toml by \`make lock\`, not by hand."
  cat "$new"
} > requirements.txt
echo "requirements.txt pins $(grep -c == requirements.txt) packages."
echo "Once they are installed, python -m tools.binder makes .binder/requirements.txt of them."
