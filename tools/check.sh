#!/usr/bin/env bash
# What CI asks of the sources: style, types, rules of the tree. Runs all checks and fails if one failed.
set -uo pipefail
cd "$(dirname "$0")/.."
failed=0

check() {
  echo "--- $*"
  "$@" || failed=1
}

check ruff check .
check ruff format --check .
check bash tools/format_cpp.sh --dry-run -Werror
check mypy
check python tools/check_sources.py
check python tools/check_pages.py
check python tools/mutants.py --list
check python tools/mutants.py --list --cuda
exit "$failed"
