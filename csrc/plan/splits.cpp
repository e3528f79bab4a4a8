#include "splits.h"

#include <algorithm>

#include "cpu_tiles.h"
#include "lengths.h"
#include "operations.h"
#include "sm80_tiles.h"

namespace flash_ext::plan {
namespace {

/// Work items that keep the threads of a CPU busy. It is a constant: results must not depend on the number of threads.
constexpr int64_t kCpuWantedItems = 16;

constexpr int64_t kCudaMaxSplits = 512;
constexpr int64_t kCudaMinSplitSize = 64;      // a tile for each warp of a CTA
constexpr int64_t kMaxRaggedSplitSize = 4096;  // if lengths may differ: else all SMs wait for one long sequence

/// Splits the keys of each tile so that all SMs are busy to the end. Times are counted in bytes: the keys and values
/// that one CTA alone would read in that time (H200: 50 KB a microsecond).
int64_t choose_cuda_splits(int64_t tiles, int64_t num_sms, int64_t ctas_per_sm, int64_t keys, int64_t key_bytes) {
  constexpr double kMerge = 100e3;     // merging the splits
  constexpr double kMoreCtas = 20e3;   // a second CTA on each SM
  constexpr double kWave = 60e3;       // another wave of CTAs
  constexpr double kShare = 0.68;      // speed of each of num_sms CTAs, relative to a CTA that runs alone
  constexpr double kImbalance = 0.15;  // time lost to idle SMs of the tail wave, per share of idle slots
  constexpr int64_t kWaves = 4;
  const int64_t slots = num_sms * ctas_per_sm;
  tiles = std::max<int64_t>(tiles, 1);
  const int64_t most = std::clamp<int64_t>(keys / kCudaMinSplitSize, 1, kCudaMaxSplits);
  const auto cost = [&](int64_t splits) {
    const int64_t ctas = tiles * splits, waves = ceil_div(ctas, slots);
    const double idle = 1.0 - static_cast<double>(ctas) / static_cast<double>(waves * slots);
    const double all = static_cast<double>(tiles * keys * key_bytes) / (kShare * static_cast<double>(num_sms));
    const double one = static_cast<double>(ceil_div(keys, splits) * key_bytes);
    const double later_waves = static_cast<double>(std::max<int64_t>(waves - 2, 0));
    return std::max(all * (1.0 + kImbalance * idle), one) + (waves > 1 ? kMoreCtas : 0.0) + kWave * later_waves +
           (splits > 1 ? kMerge : 0.0);
  };
  int64_t best = 1;
  const int64_t fewest_waves = ceil_div(tiles, slots);
  for (int64_t waves = fewest_waves; waves < fewest_waves + kWaves; ++waves) {
    const int64_t splits = std::clamp<int64_t>(waves * slots / tiles, 1, most);
    if (cost(splits) < cost(best)) best = splits;
  }
  return best;
}

/// The most keys that a query tile sees.
int64_t keys_seen(const Problem& p) {
  if (p.window_left < 0 || p.window_right < 0) return p.seqlen_k;
  return std::min(p.seqlen_k, p.window_left + p.window_right + typical_queries(p));
}

void split_at_fixed_keys(Draft& draft) {
  draft.plan.split_size = kBatchInvariantSplitSize;
  draft.plan.num_splits = std::max<int64_t>(1, ceil_div(draft.p.seqlen_k, draft.plan.split_size));
  draft.because("split every ", draft.plan.split_size,
                " keys: batch_invariant, so nothing but the sequence itself decides");
}

void split_as_told(Draft& draft) {
  const Problem& p = draft.p;
  const int64_t cap = p.device == Device::kCuda ? kCudaMaxSplits : kCpuMaxSplits;
  const int64_t most = std::clamp<int64_t>(ceil_div(p.seqlen_k, kCpuBlockN), 1, cap);
  draft.plan.num_splits = std::min(p.num_splits, most);
  draft.because(counted(draft.plan.num_splits, "split"), ": num_splits = ", p.num_splits, ", at most ", most, " for ",
                p.seqlen_k, " keys in tiles of ", kCpuBlockN);
}

void split_for_sms(Draft& draft) {
  const Problem& p = draft.p;
  const int64_t rows = sm80_decode_rows(p, draft.plan.head_group), keys = keys_seen(p);
  const int64_t tiles = query_tiles(p, draft.plan.head_group, rows);
  const int64_t key_bytes = (p.head_dim + p.head_dim_v) * (p.dtype == DType::kFloat32 ? 4 : 2);
  int64_t splits = choose_cuda_splits(tiles, p.num_workers, sm80_decode_ctas_per_sm(p, rows), keys, key_bytes);
  const bool ragged = p.varlen && p.batch > 1;
  if (ragged) splits = std::max(splits, ceil_div(keys, kMaxRaggedSplitSize));
  draft.plan.num_splits = std::min(splits, kCudaMaxSplits);
  draft.because(counted(draft.plan.num_splits, "split"), ": ", counted(tiles, "tile"), " of (batch, head, query) and ",
                keys, " keys each on ", p.num_workers, " SMs", ragged ? ", lengths that may differ" : "");
}

void split_for_threads(Draft& draft) {
  const Problem& p = draft.p;
  const int64_t work_items = query_tiles(p, draft.plan.head_group, kCpuMaxBlockM);
  draft.plan.num_splits = choose_num_splits(work_items, kCpuWantedItems, p.seqlen_k);
  draft.because(counted(draft.plan.num_splits, "split"), ": ", counted(work_items, "tile"),
                " of (batch, head, query), ", kCpuWantedItems, " work items wanted, ", p.seqlen_k, " keys");
}

}  // namespace

int64_t choose_num_splits(int64_t work_items, int64_t num_workers, int64_t seqlen_k) {
  const int64_t to_fill = ceil_div(num_workers, std::max<int64_t>(1, work_items));
  const int64_t worthwhile = seqlen_k / kCpuMinSplitSize;
  return std::clamp<int64_t>(std::min(to_fill, worthwhile), 1, kCpuMaxSplits);
}

void keep_keys_together(Draft& draft) { draft.because("1 split: the result does not depend on the number of threads"); }

void choose_decode_splits(Draft& draft) {
  const Problem& p = draft.p;
  if (p.batch_invariant) return split_at_fixed_keys(draft);
  if (p.num_splits > 0) return split_as_told(draft);
  if (p.device == Device::kCpu) return split_for_threads(draft);
  switch (draft.kernel.decode_splits) {
    case DecodeSplits::kForSms:
      return split_for_sms(draft);
    case DecodeSplits::kNone:
      return draft.because("1 split: ", typical_queries(p),
                           " queries a sequence are enough work, and fill the tiles of the forward kernel");
    case DecodeSplits::kByTiles:
      return;
  }
}

}  // namespace flash_ext::plan
