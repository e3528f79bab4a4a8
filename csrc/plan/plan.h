// Problem -> Plan: which kernel runs, on which tiles, in how many pieces, and why. Everything that decides lives here.
#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"
#include "kernels/sm90/forward/key_splits.h"
#include "problem.h"

namespace flash_ext::plan {

/// What the visibility rule asks of the inner loop, for the reader of a plan.
enum class MaskClass {
  kFull,     // every query sees every key of its sequence
  kCausal,   // right = 0 and nothing else
  kGeneral,  // windows, masks, block masks
};

struct Plan {
  KernelId kernel = KernelId::kNone;
  KernelId bias_kernel = KernelId::kNone;  // backward on CUDA: for the gradient of bias, if it is wanted
  bool reads_by_tma = false;               // kernel: grad_out must be there, and has no stride of 0
  bool bias_reads_by_tma = false;          // bias_kernel: the same
  const char* variant = "";                // of the kernel, where it has several: which options it has code for
  MaskClass mask_class = MaskClass::kFull;
  int64_t block_m = 0;         // query rows per tile, those of a head group together
  int64_t block_n = 0;         // keys per tile; 0, and 0 rows: as the kernel's own configuration has it
  int64_t head_group = 1;      // heads with the same key head whose rows share a tile
  int64_t num_splits = 1;      // key ranges with results of their own, merged afterwards
  int64_t split_size = 0;      // > 0: keys per range, whatever the length; then num_splits is how many fit at most
  int64_t num_chunks = 1;      // backward: key ranges per head worked on independently
  KeyTileSchedule schedule;    // backward on CUDA
  sm90::KeySplits key_splits;  // forward on Hopper
  std::vector<std::string> reasons;  // where asked for
};

constexpr int64_t kMaxCudaBatch = 65535;               // what a grid can count to
constexpr int64_t kMaxCudaSeqlenQ = 65535 * 32;        // the same, in tiles of the fewest queries; not of packed ones
constexpr int64_t kMaxCudaSeqlenK = int64_t{1} << 29;  // positions, offsets and windows then add up within 32 bits

struct Support {
  bool ok = true;
  std::string reason;  // empty when ok
};

/// Whether the problem can run. The operators raise with this very reason.
Support supports(const Problem& problem);

/// The plan of a supported problem; throws std::invalid_argument with the reason otherwise. `explain` fills in
/// Plan::reasons, which costs more than all decisions.
Plan make_plan(const Problem& problem, bool explain);

/// How many ranges to cut `seqlen_k` keys into so that `work_items` independent items keep `num_workers` busy.
/// Grows with seqlen_k and num_workers, shrinks with work_items; ranges of at least `kMinSplitSize` keys.
int64_t choose_num_splits(int64_t work_items, int64_t num_workers, int64_t seqlen_k);

constexpr int64_t kMinSplitSize = 256;             // shorter ranges cost more in merging than they gain
constexpr int64_t kMaxSplits = 128;                // bounds the scratch for partial results
constexpr int64_t kBatchInvariantSplitSize = 512;  // a constant: that is what makes decoding batch-invariant

}  // namespace flash_ext::plan
