#!/usr/bin/env bash
# Formats csrc in place; arguments go to clang-format (CI passes --dry-run -Werror).
set -euo pipefail
cd "$(dirname "$0")/.."
find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | sort | xargs clang-format -i "$@"
