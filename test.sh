#!/usr/bin/env bash
# Lint, types and tests. --slow adds the long tests; other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/environment.sh
environment dev
marks=(-m "not slow and not device")
arguments=()
for argument in "$@"; do
  if [ "$argument" = --slow ]; then
    marks=(-m "not device")
  else
    arguments+=("$argument")
  fi
done
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
.venv/bin/pyright
# Two processes for two cores; a file stays in one, since it shares compiled programs.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${marks[@]}" \
  ${arguments[@]+"${arguments[@]}"}
