// What the warps of a CTA share, after the tiles in shared memory: row terms, barriers, and the work tile; and where a
// call has options, metadata of the next steps and what is copied or computed for them. A barrier's name says what the
// end of its phase means.
#pragma once

#include <algorithm>
#include <utility>

#include "config.cuh"
#include "kernels/common/backward/options.cuh"
#include "kernels/common/backward/visibility.cuh"
#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/common/score/bias_tile.cuh"
#include "kernels/sm90/common/backward/options.cuh"
#include "kernels/sm90/common/backward/storage.cuh"

namespace flash_ext::sm90 {

/// A step, as consumer warps find it: all that they must know to begin, in one read.
struct alignas(16) StepMetadata {
  int tile, head, flags;
  float slope;  // ALiBi's, to base 2
};

/// What lies after the storage in shared memory: offsets in bytes from the storage on. Words of dropout and of masks
/// have kStages slots.
struct BackwardOptionsLayout {
  int kept = 0, words = 0, bias = 0;
  int kept_bytes = 0, words_bytes = 0, bias_bytes = 0;  // of a slot
  int bias_slots = 0;
  bool copies_bias = false;     // by 16-byte chunks
  bool bias_by_panels = false;  // by TMA
  bool bias_by_pairs = false;   // in 16 bits
  bool makes_words = false;     // of bitmaps of blocks
  bool bias_of_keys = false, mask_of_keys = false;
  bool by_threads = false;  // whether threads make words or copy a bias; else TMA loads all
  int flags = 0;            // of all steps
  int bytes = 0;

  /// Lays out at most `available` bytes; where they do not suffice, a bias has fewer slots.
  template <class Config>
  static BackwardOptionsLayout of(const BackwardParams& p, int storage_bytes, int available) {
    BackwardOptionsLayout layout;
    layout.bytes = (storage_bytes + 127) / 128 * 128;
    const auto take = [&](int bytes) { return std::exchange(layout.bytes, layout.bytes + bytes); };
    layout.bias_of_keys = same_for_all_queries(p.bias);
    layout.mask_of_keys = masks_keys(p);
    const bool of_pairs = p.bias.data && !layout.bias_of_keys;
    if (p.dropout.rule.threshold > 0) {
      layout.kept_bytes = KeptTile<Config::kBlockM>::bytes(Config::kBlockN);
      layout.flags |= kStepDrops;
    }
    layout.makes_words = p.blocks.offsets;
    if (p.softcap > 0) layout.flags |= kStepSoftcapped;
    if (of_pairs) layout.flags |= kStepBiased;
    if (layout.bias_of_keys || layout.mask_of_keys) layout.flags |= kStepKeyBiased;
    if (p.alibi_slopes) layout.flags |= kStepAlibi;
    if (masks_pairs(p)) layout.words_bytes = Config::kBlockM * (Config::kBlockN / 32) * 4;
    if (of_pairs)
      layout.bias_bytes =
          Config::kWarpgroups * static_cast<int>(bias_tile_bytes(p.bias.dtype, Config::kBlockM, kWarpgroupRows));
    layout.kept = take(Config::kStages * layout.kept_bytes);
    layout.words = take(Config::kStages * layout.words_bytes);
    if (of_pairs) {
      layout.bytes = (layout.bytes + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
      layout.bias_slots = std::min((available - layout.bytes) / layout.bias_bytes, Config::kStages);
    }
    layout.bias = take(layout.bias_slots * layout.bias_bytes);
    layout.copies_bias = of_pairs && can_stage_bias(p.bias);
    layout.bias_by_panels = layout.copies_bias && p.bias.dtype != DType::kFloat32;
    layout.bias_by_pairs = of_pairs && (p.bias.dtype == DType::kFloat16 || p.bias.dtype == DType::kBFloat16);
    layout.by_threads = layout.makes_words || (of_pairs && !layout.bias_by_panels);
    return layout;
  }
};

template <class Config>
struct BackwardOptionsStorage : BackwardStagedTerms<Config> {
  static constexpr int kStages = Config::kStages;

  uint64_t k_full, v_full;
  uint64_t q_full[kStages], q_empty[kStages];    // with lse
  uint64_t do_full[kStages], do_empty[kStages];  // with minus_delta
  uint64_t ds_full[Config::kDsStages], ds_empty[Config::kDsStages];
  BackwardWorkTile<Config> work_tile;
  uint64_t metadata_full[kStages], bias_full[kStages];  // metadata_full: with mask words
  StepMetadata step_metadata[kStages];
  BackwardOptions options;

  /// The same as in BackwardPipelinedStorage.
  __device__ __forceinline__ void read_masks(const BackwardParams&, const BackwardWorkspace&) {}
  /// Called by one thread.
  __device__ __forceinline__ void init(const BackwardOptionsLayout& layout) {
    constexpr int kConsumers = Config::kWarpgroups * kWarpgroupWarps;
    init_barriers(metadata_full, layout.makes_words ? kWarpgroupWarps : 1);
    init_barriers(bias_full, layout.bias_by_panels ? 1 : kWarpgroupThreads + kWarpgroupWarps);
    init_barrier(k_full, 1);
    init_barrier(v_full, 1);
    init_barriers(q_full, 1);
    init_barriers(q_empty, kConsumers);
    init_barriers(do_full, 1);
    init_barriers(do_empty, kConsumers);
    init_barriers(ds_full, kConsumers);
    init_barriers(ds_empty, kWarpgroupWarps);
    ptx::mbarrier_init_fence();
  }
};

}  // namespace flash_ext::sm90
