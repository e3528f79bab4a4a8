// What the warps of a CTA of the short forward share: the barriers of its rings, and their loads.
#pragma once

#include <cstdint>

#include "config.cuh"
#include "kernels/common/barriers.h"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/ptx/count.h"
#include "kernels/ptx/tma.h"
#include "kernels/sm90/common/forward_maps.h"

namespace flash_ext::sm90 {

/// What the kernel needs to know of a call. At the start of a call its parameters lie in no cache, so they are few.
struct ForwardShortCall {
  EqualSequences sequences;
  float scale;  // from products to base-2 scores
  const float* sink;
  LseView lse;

  explicit ForwardShortCall(const ForwardParams& p)
      : sequences(p), scale(score_scale(p, kLog2E)), sink(static_cast<const float*>(p.sink)), lse(p.lse) {}
};

template <class Config>
struct ForwardShortStorage {
  uint64_t q_full;                   // arrives: thread 0 (1 + bytes); orders: Q before its use
  uint64_t k_full[Config::kStages];  // arrives: thread 0, later the last user (1 + bytes); orders: K before its use
  uint64_t v_full[Config::kStages];  // the same for V
  uint32_t k_uses[Config::kStages];  // warps done with a stage that will be refilled, over all its tiles
  uint32_t v_uses[Config::kStages];

  /// Called by one thread.
  __device__ __forceinline__ void init() {
    init_barrier(q_full, 1);
    init_barriers(k_full, 1);
    init_barriers(v_full, 1);
    for (int stage = 0; stage < Config::kStages; ++stage) k_uses[stage] = v_uses[stage] = 0;
    ptx::mbarrier_init_fence();
  }
};

/// Counts a warp that has used a stage. Returns whether it was the last: then the stage may be filled again.
__device__ __forceinline__ bool count_use(uint32_t& uses, uint32_t warps) {
  return ptx::count_acquire_release(ptx::shared_address(&uses)) % warps == warps - 1;
}

/// The loads of a CTA. Rows past the tensors become 0.
template <class Config>
class ForwardShortLoads {
 public:
  __device__ __forceinline__ ForwardShortLoads(const ForwardMaps& maps, ForwardShortStorage<Config>& storage,
                                               uint32_t s_tiles, int batch, int head, int head_kv)
      : maps_(maps), storage_(storage), s_tiles_(s_tiles), batch_(batch), head_(head), head_kv_(head_kv) {}

  /// Panel `panel` of the Q of a warpgroup.
  __device__ __forceinline__ void load_query(int group, int panel, int first_query) const {
    ptx::tma_load(s_tiles_ + group * Config::kQueryBytes + panel * panel_bytes(kWarpgroupRows), &maps_.q,
                  address(storage_.q_full), panel * kPanelColumns, first_query + group * kWarpgroupRows, head_, batch_);
  }
  __device__ __forceinline__ void load_keys(int stage, int panel, int tile) const {
    load(maps_.k, storage_.k_full[stage], Config::kKeysOffset + stage * Config::kKeyBytes, panel, tile);
  }
  __device__ __forceinline__ void load_values(int stage, int panel, int tile) const {
    load(maps_.v, storage_.v_full[stage], Config::kValuesOffset + stage * Config::kKeyBytes, panel, tile);
  }
  /// Announces and loads a tile into a stage that all warps have used.
  __device__ __forceinline__ void refill_keys(int stage, int tile) const {
    ptx::mbarrier_arrive_expect(address(storage_.k_full[stage]), Config::kKeyBytes);
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel) load_keys(stage, panel, tile);
  }
  __device__ __forceinline__ void refill_values(int stage, int tile) const {
    ptx::mbarrier_arrive_expect(address(storage_.v_full[stage]), Config::kKeyBytes);
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel) load_values(stage, panel, tile);
  }

 private:
  __device__ __forceinline__ void load(const CUtensorMap& map, const uint64_t& barrier, int offset, int panel,
                                       int tile) const {
    ptx::tma_load(s_tiles_ + offset + panel * panel_bytes(Config::kBlockN), &map, address(barrier),
                  panel * kPanelColumns, tile * Config::kBlockN, head_kv_, batch_);
  }

  const ForwardMaps& maps_;
  ForwardShortStorage<Config>& storage_;
  const uint32_t s_tiles_;
  const int batch_, head_, head_kv_;
};

}  // namespace flash_ext::sm90
