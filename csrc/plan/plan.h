// Problem -> Plan: which kernel runs, on which tiles, in how many splits, and why.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernel_table.h"
#include "kernels/common/scheduler/key_splits.h"
#include "problem.h"

namespace flash_ext::plan {

/// What the visibility rule requires of the inner loop; for readers of a plan.
enum class MaskClass {
  kFull,     // every query sees every key of its sequence
  kCausal,   // right = 0 and nothing else
  kGeneral,  // windows, masks, block masks
};

constexpr std::pair<const char*, MaskClass> kMaskClassNames[] = {
    {"full", MaskClass::kFull}, {"causal", MaskClass::kCausal}, {"general", MaskClass::kGeneral}};

struct Plan {
  KernelId kernel = KernelId::kNone;
  KernelId bias_kernel = KernelId::kNone;  // backward on CUDA: computes the gradient of a bias, if it is wanted
  bool reads_by_tma = false;               // `kernel` reads by TMA: it needs a grad_out without strides of 0
  bool bias_reads_by_tma = false;          // the same for `bias_kernel`
  int bias_stages = 0;                     // sm80/bias_gradient: stages of slabs; 0: shared memory is not known
  bool bias_kernel_stages_bias = false;    // sm80/bias_gradient: bias is staged in shared memory, else read by elements
  const char* variant = "";                // of a kernel with several variants: the options that this one has code for
  MaskClass mask_class = MaskClass::kFull;
  int64_t block_m = 0;               // rows of a query tile, of all heads of a head group; 0: the kernel decides
  int64_t block_n = 0;               // keys of a tile; 0: the kernel decides
  int64_t head_group = 1;            // heads with the same key head whose rows share a tile
  int64_t num_splits = 1;            // ranges of keys whose results are combined afterwards
  int64_t split_size = 0;            // > 0: keys of every range; num_splits is then the largest number of ranges
  int64_t min_split_size = 0;        // decode on CUDA, ranges of equal sizes: the fewest keys of a range
  int64_t split_ctas = 0;            // decode on CUDA, split_size > 0: CTAs that share the ranges of a tile
  int64_t section_heads = 0;         // forward on CUDA: heads side by side in the order of tiles; 0: a list orders them
  int64_t section_batches = 1;       // sm80/forward: batch entries side by side, which share a bias
  bool stages_bias = false;          // sm80/forward: bias is staged in shared memory, else read by elements
  bool fuses_max_logit = false;      // forward on CUDA: the kernel computes max_logit itself, else another one does
  int64_t num_chunks = 1;            // backward on a CPU: ranges of keys of a head that are computed independently
  KeyTileSchedule schedule;          // backward on CUDA
  KeySplits key_splits;              // forward on Hopper
  std::vector<std::string> reasons;  // one sentence per decision, if asked for
};

constexpr int64_t kMaxCudaBatch = 65535;         // the limit of a grid's dimension
constexpr int64_t kMaxCudaSeqlenQ = 65535 * 32;  // the same limit in query tiles of 32 rows; packed ones may be longer
constexpr int64_t kMaxCudaSeqlenK = int64_t{1} << 29;  // sums of positions, offsets and windows then fit 32 bits

struct Support {
  bool ok = true;
  std::string reason;  // empty when ok
};

/// Whether the problem can run. Operators raise with the same reason.
Support supports(const Problem& problem);

/// The plan of a supported problem; throws std::invalid_argument with the reason otherwise. `explain`: also fills in
/// Plan::reasons, which takes longer than all decisions.
Plan make_plan(const Problem& problem, bool explain);

}  // namespace flash_ext::plan
