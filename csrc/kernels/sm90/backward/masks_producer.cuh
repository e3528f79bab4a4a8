// The warpgroup that loads tiles and computes dQ where a mask of pairs hides whole tiles.
#pragma once

#include "producer.cuh"
#include "scheduler.cuh"

namespace flash_ext::sm90 {

/// One warp of this warpgroup.
template <class Config>
class BackwardMasksDq : BackwardPipelinedDq<Config, BackwardPipelinedOptionsStorage<Config>> {
  using Base = BackwardPipelinedDq<Config, BackwardPipelinedOptionsStorage<Config>>;
  using Base::kGradWarp, Base::kQueryWarp, Base::lane_, Base::storage_, Base::warp_, Base::work_tile_, Base::workspace_;
  using typename Base::LoadedStep, typename Base::LoadedTile, typename Base::QueryTile, typename Base::Steps;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() { Base::run(*this); }

 private:
  friend Base;

  /// The step whose Q and dO are loaded next.
  struct Next {
    Steps step;
    BackwardStepFinder<Config> finder;
  };

  __device__ __forceinline__ void load_and_add() {
    Steps step(storage_);
    Next next{step, BackwardStepFinder<Config>(workspace_, work_tile_, lane_)};
    this->load_keys_and_values();
#pragma unroll 1
    for (int stage = 0; stage + 1 < Config::kStages; ++stage) load(next);
    this->add_all(*this, step, next);
  }

  __device__ __forceinline__ QueryTile query_tile(const Steps& step) const {
    const FoundQueries queries = storage_.step_metadata[step.slot];
    return {ptx::uniform(queries.head), ptx::uniform(queries.tile)};
  }

  __device__ __forceinline__ void load(Next& next) const {
    if (warp_ > kGradWarp || next.step.is_past_end()) return;
    const FoundQueries found = next.finder.next();
    const LoadedStep step = {{found.head, found.tile}, next.step.stage};
    const LoadedTile tile{step, this->first_term(step)};
    if (warp_ == kQueryWarp) {
      if (lane_ == 0) storage_.step_metadata[next.step.slot] = found;
      this->load_queries(tile);
    } else {
      this->load_grads(tile);
    }
    next.step.advance();
  }
};

}  // namespace flash_ext::sm90
