// The steps of a CTA that a mask of pairs leaves, found 32 query tiles at a time, one per lane.
#pragma once

#include "kernels/sm90/common/backward/step_chunk.cuh"
#include "options_storage.cuh"

namespace flash_ext::sm90 {

/// Finds the steps in their order, for one warp.
template <class Config>
class BackwardStepFinder : BackwardStepChunk<Config> {
 public:
  __device__ __forceinline__ BackwardStepFinder(const BackwardWorkspace& workspace,
                                                const BackwardWorkTile<Config>& work_tile, int lane)
      : Base(workspace, work_tile, lane) {
    load(chunk_);
    take();
  }

  /// Returns the next step. There must be one.
  __device__ __forceinline__ FoundQueries next() {
    while (left_ == 0) {
      chunk_ = this->after(chunk_);
      take();
    }
    const uint32_t bit = this->take_bit();
    const int tile = this->tile_of(bit), head = work_tile_.sequence.head + chunk_.head;
    return {head, tile, masked_ & bit ? words_of(head, tile) : -1, (has_non_finite_ & bit) != 0};
  }

 private:
  using Base = BackwardStepChunk<Config>;
  using Base::has_non_finite_, Base::lane_, Base::left_, Base::masked_, Base::next_state_, Base::chunk_,
      Base::work_tile_, Base::workspace_;

  __device__ __forceinline__ int words_of(int head, int tile) const {
    const VisibilityTiles& tiles = workspace_.visibility;
    const int row =
        (tiles.word_batches > 1 ? work_tile_.sequence.batch : 0) * tiles.word_heads + (tiles.word_heads > 1 ? head : 0);
    return (row * tiles.word_query_tiles + (tiles.word_query_tiles > 1 ? tile : 0)) * tiles.key_tiles +
           work_tile_.first_key / Config::kBlockN;
  }
  /// Issues the loads of the states of a chunk's tiles, while those of the chunk before are in use.
  __device__ __forceinline__ void load(const BackwardStep& chunk) {
    if (!this->begin_load(chunk)) return;
    next_state_ = state_of(workspace_.visibility, work_tile_, chunk.head, chunk.tile + lane_);
    this->load_non_finite(chunk);
  }
  __device__ __forceinline__ void take() {
    this->take_loaded();
    load(this->after(chunk_));
  }
};

}  // namespace flash_ext::sm90
