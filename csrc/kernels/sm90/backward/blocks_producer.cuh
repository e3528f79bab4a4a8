// The warpgroup that loads tiles and computes dQ, where a block mask's lists say which steps there are.
#pragma once

#include "producer.cuh"

namespace flash_ext::sm90 {

/// One warp of this warpgroup.
template <class Config>
class BackwardBlocksDq : BackwardPipelinedDq<Config> {
  using Base = BackwardPipelinedDq<Config>;
  using Base::kGradWarp, Base::kQueryWarp, Base::lane_, Base::storage_, Base::warp_, Base::work_tile_;
  using typename Base::LoadedStep, typename Base::LoadedTile, typename Base::QueryTile, typename Base::Steps;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    if (work_tile_.tiles.end > 0) load_and_add();
    if (lane_ == 0) ptx::bulk_wait_read<0>();
  }

 private:
  friend Base;

  /// The step whose Q and dO are loaded next, and its entry of the list, which is read one step ahead.
  struct Next {
    Steps step;
    const ListedQueries* g_entry;
    int4 coming;
  };

  __device__ __forceinline__ void load_and_add() {
    Steps step(storage_);
    Next next{step, work_tile_.steps, *reinterpret_cast<const int4*>(work_tile_.steps)};
    this->load_keys_and_values();
#pragma unroll 1
    for (int stage = 0; stage + 1 < Config::kStages; ++stage) load(next);
    this->add_all(*this, step, next);
  }

  /// Called before the products: after them warp 0 may overwrite this metadata with that of another step. No mbarrier
  /// orders that write after the other warps' reads. The products do, because the warps of a warpgroup finish them
  /// together on compute capability 9.0; PTX's memory model does not promise it.
  __device__ __forceinline__ QueryTile query_tile(const Steps& step) const {
    const ListedQueries queries = storage_.step_metadata[step.stage];
    return {ptx::uniform(work_tile_.sequence.head + queries.head), ptx::uniform(queries.tile)};
  }

  __device__ __forceinline__ void load(Next& next) const {
    if (warp_ > kGradWarp || next.step.is_past_end()) return;
    const int4 entry = next.coming;
    const LoadedStep step = {{ptx::uniform(work_tile_.sequence.head + entry.x), ptx::uniform(entry.y)},
                             next.step.stage};
    const LoadedTile tile{step, this->first_term(step)};
    if (warp_ == kQueryWarp) {
      if (lane_ == 0) storage_.step_metadata[next.step.stage] = {entry.x, entry.y, {entry.z, entry.w}};
      this->load_queries(tile);
    } else {
      this->load_grads(tile);
    }
    next.step.advance();
    if (!next.step.is_past_end()) next.coming = *reinterpret_cast<const int4*>(++next.g_entry);
  }
};

}  // namespace flash_ext::sm90
