#!/usr/bin/env bash
# Builds the documentation into docs/_build/html, runs its examples, and checks it.
# Arguments go to sphinx-build. All pages are read anew, since one that is not read again
# cannot warn; notebooks run again only if they or the library changed.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/environment.sh
environment docs
for builder in html doctest; do
  .venv/bin/python -m sphinx --builder "$builder" --fail-on-warning --keep-going --quiet --fresh-env \
    --doctree-dir docs/_build/doctrees "$@" docs "docs/_build/$builder"
done
.venv/bin/python docs/check_site.py docs/_build/html
echo "docs/_build/html/index.html"
