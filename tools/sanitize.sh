#!/usr/bin/env bash
# Runs compute-sanitizer over calls of every CUDA kernel: all options, dtypes and head dims, forward, backward, decoding.
# Needs a GPU and a build in the tree, best one with FLASH_EXT_LINE_INFO=1. Fails if a tool finds something.
#     tools/sanitize.sh                      # memcheck, synccheck, racecheck
#     tools/sanitize.sh memcheck             # one of them
#     SANITIZE_ONLY='bias|decode' tools/sanitize.sh   # calls whose name matches a regular expression
# synccheck calls threads divergent where the warps of a CTA reach a named barrier from different lines, as they may in
# the forward for all GPUs with a mask at head_dim 128 (kAllWarps, csrc/kernels/sm80/forward/storage.cuh): PTX allows it.
# racecheck does not see what mbarriers order for TMA and reports hazards between a bulk copy and its readers: look at
# both places that a report names before you believe it.
set -uo pipefail
cd "$(dirname "$0")/.."
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
[ -x "$sanitizer" ] || { echo "sanitize: no compute-sanitizer on PATH or in CUDA_HOME" >&2; exit 2; }
[ $# -gt 0 ] || set -- memcheck synccheck racecheck

failed=0
for tool in "$@"; do
  echo "--- $tool"
  # Torch's own kernels are left alone, and its allocator gives each tensor memory of its own: an access outside shows.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=. "$sanitizer" --tool "$tool" --error-exitcode 99 \
    --kernel-name kernel_substring=flash_ext --print-limit 20 \
    python tools/sanitized_calls.py "${SANITIZE_ONLY:-}" || failed=1
done
exit "$failed"
