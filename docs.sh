#!/usr/bin/env bash
# Builds the documentation into docs/_build/html, runs its examples, and checks it.
# Arguments go to sphinx-build, as in ./docs.sh --fresh-env.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/environment.sh
environment docs
for builder in html doctest; do
  .venv/bin/python -m sphinx --builder "$builder" --fail-on-warning --keep-going --quiet \
    --doctree-dir docs/_build/doctrees "$@" docs "docs/_build/$builder"
done
.venv/bin/python docs/check_site.py docs/_build/html
echo "docs/_build/html/index.html"
