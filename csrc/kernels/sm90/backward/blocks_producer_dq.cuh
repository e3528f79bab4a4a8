// The warpgroup that loads tiles and computes dQ, where a block mask's lists say which steps there are.
#pragma once

#include "pipelined_producer_dq.cuh"

namespace flash_ext::sm90 {

/// What one warp of it does.
template <class Config>
class BackwardBlocksDq : BackwardPipelinedDq<Config> {
  using Base = BackwardPipelinedDq<Config>;
  using Base::at_;
  using Base::lane_;
  using Base::maps_;
  using Base::storage_;
  using Base::warp_;
  using Base::work_tile_;
  using Base::workspace_;
  using typename Base::Steps;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    if (work_tile_.tiles.end > 0) load_and_add();
    if (lane_ == 0) ptx::tma_store_wait();
  }

 private:
  /// A tile of queries, with the head among all.
  struct Place {
    int head, tile;
  };
  struct LoadedStep : Place {
    uint32_t stage;
  };
  struct Loads {
    LoadedStep step;
    int64_t first_term;
  };

  /// Which step's Q and dO come next. The entry behind it is asked for a step ahead.
  struct Next {
    Steps step;
    const ListedQueries* g_entry;
    int4 coming;
  };

  __device__ __forceinline__ void load_and_add() {
    Steps step(storage_);
    Next next{step, work_tile_.steps, *reinterpret_cast<const int4*>(work_tile_.steps)};
    if (warp_ == 0) this->load_keys(maps_.k, storage_.k_full, 0);
    if (warp_ == 1) this->load_keys(maps_.v, storage_.v_full, Config::kValuesOffset);
#pragma unroll 1
    for (int stage = 0; stage + 1 < Config::kStages; ++stage) load(next);
#pragma unroll 1
    for (; !step.is_past_end(); step.advance()) {
      wait_for(storage_.ds_full[at_.stage()], at_.parity());
      // Read before the products: behind them warp 0 may write the metadata of another step here. No mbarrier orders
      // that write behind the reads of the other warps. The products do, which the warps of a warpgroup finish together
      // on compute capability 9.0; PTX's memory model does not promise it.
      const ListedQueries queries = storage_.step_metadata[step.stage];
      const Place place = {ptx::uniform(work_tile_.sequence.head + queries.head), ptx::uniform(queries.tile)};
      // That dS is complete says that all products of the step before are over.
      load(next);
      if (workspace_.dq) {
        this->add(place);
      } else {
        arrive_as_warp(storage_.ds_empty[at_.stage()], lane_);
      }
      at_.advance();
    }
    this->send();
  }

  __device__ __forceinline__ void load(Next& next) const {
    if (warp_ > 1 || next.step.is_past_end()) return;
    const int4 entry = next.coming;
    const LoadedStep step = {{ptx::uniform(work_tile_.sequence.head + entry.x), ptx::uniform(entry.y)},
                             next.step.stage};
    const Loads loads{step, this->first_term(step)};
    if (warp_ == 0) {
      if (lane_ == 0) storage_.step_metadata[next.step.stage] = {entry.x, entry.y, entry.z, 0};
      this->load_tile(maps_.q, storage_.q_full, Config::kQueriesOffset, workspace_.lse, storage_.lse, loads);
    } else {
      this->load_tile(maps_.grad_out, storage_.do_full, Config::kGradsOffset, workspace_.minus_delta,
                      storage_.minus_delta, loads);
    }
    next.step.advance();
    if (!next.step.is_past_end()) next.coming = *reinterpret_cast<const int4*>(++next.g_entry);
  }
};

}  // namespace flash_ext::sm90
