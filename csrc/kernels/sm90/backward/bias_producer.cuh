// The warpgroup that loads tiles and computes dQ where there is a bias of query-key pairs: one tile of it takes the
// room of a stage of dO.
#pragma once

#include "kernels/ptx/tma_prefetch.h"
#include "options_storage.cuh"
#include "producer.cuh"

namespace flash_ext::sm90 {

/// One warp of this warpgroup. When dS of step m is complete, all products of m - 1 are over, so Q of m + 2 and dO of
/// m + 1 are loaded. The bias of m + 1 is loaded earlier, when all warps have computed P of m: the warpgroups may be
/// half a step apart, and the first one must not wait for dS of the second.
template <class Config>
class BackwardBiasDq : BackwardPipelinedDq<Config, BackwardPipelinedOptionsStorage<Config>> {
  using Base = BackwardPipelinedDq<Config, BackwardPipelinedOptionsStorage<Config>>;
  using Base::kGradWarp, Base::kQueryWarp, Base::lane_, Base::p_, Base::s_tiles_, Base::storage_, Base::warp_,
      Base::work_tile_;
  using typename Base::LoadedTile, typename Base::Loads, typename Base::Steps;
  static constexpr int kBiasWarp = 2;

 public:
  __device__ __forceinline__ BackwardBiasDq(const BackwardParams& p, const BackwardStoringBiasMaps& maps,
                                            const BackwardWorkspace& workspace,
                                            BackwardPipelinedOptionsStorage<Config>& storage, uint32_t s_tiles,
                                            int warp, int lane)
      : Base(p, maps, workspace, storage, s_tiles, warp, lane), bias_map_(maps.bias) {}

  __device__ __forceinline__ void run() { Base::run(*this); }

 private:
  friend Base;

  /// What this warp loads next. `waits`: the first load() is skipped, as dO of the first step is in use until a step
  /// later.
  struct Next {
    Loads& loads;
    bool waits;
  };

  __device__ __forceinline__ void load_and_add() {
    Steps step(storage_);
    Loads loads{step, this->first_term(step)};  // of this warp, next
    this->load_keys_and_values();
    load_next(loads);
    if (warp_ != kBiasWarp) load_next(loads);
    Next next{loads, warp_ == kGradWarp};
    this->add_all(*this, step, next);
  }

  /// Loads the bias of the next step, when all consumer warps have read that of this step.
  __device__ __forceinline__ void load_early(const Steps& step, Next& next) const {
    if (warp_ != kBiasWarp) return;
    wait_for(storage_.bias_empty, step.count % 2);
    load_next(next.loads);
  }
  __device__ __forceinline__ void load(Next& next) const {
    if (warp_ == kBiasWarp) return;
    if (!next.waits) load_next(next.loads);
    next.waits = false;
  }
  __device__ __forceinline__ const Steps& query_tile(const Steps& step) const { return step; }
  __device__ __forceinline__ void load_next(Loads& loads) const {
    if (warp_ > kBiasWarp || loads.step.is_past_end()) return;
    const Steps& step = loads.step;
    if (warp_ == kQueryWarp) {
      this->load_queries(LoadedTile{{{step.head, step.tile}, step.stage}, loads.first_term});
    } else if (warp_ == kGradWarp) {
      this->load_grads(LoadedTile{{{step.head, step.tile}, step.grad_stage()}, loads.first_term});
    } else {
      load_bias(step);
    }
    this->advance(loads);
  }

  /// Loads the bias of a step, one panel for each consumer warpgroup, and prefetches that of the step after it to L2:
  /// from memory it would come late.
  __device__ __forceinline__ void load_bias(const Steps& step) const {
    Steps after = step;
    after.advance();
    if (lane_ == 0) {
      const uint32_t s_full = address(storage_.bias_full);
      ptx::mbarrier_arrive_expect(s_full, Config::kWarpgroups * Config::kBiasPanelBytes);
#pragma unroll
      for (int group = 0; group < Config::kWarpgroups; ++group) {
        const int key = work_tile_.first_key + group * kWarpgroupRows;
        ptx::tma_load(s_tiles_ + Config::kBiasOffset + group * Config::kBiasPanelBytes, &bias_map_, s_full, key,
                      step.tile * kBlockM, head_of_bias(step), batch_of_bias());
        if (!after.is_past_end())
          ptx::tma_prefetch(&bias_map_, key, after.tile * kBlockM, head_of_bias(after), batch_of_bias());
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ int head_of_bias(const Steps& step) const { return p_.bias.head_stride ? step.head : 0; }
  __device__ __forceinline__ int batch_of_bias() const { return p_.bias.batch_stride ? work_tile_.sequence.batch : 0; }
  static constexpr int kBlockM = Config::kBlockM;

  const CUtensorMap& bias_map_;
};

}  // namespace flash_ext::sm90
