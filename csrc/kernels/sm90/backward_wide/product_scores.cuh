// Scores of wide heads without options: scaled products.
#pragma once

#include "keys_consumer.cuh"

namespace flash_ext::sm90 {

/// Adds the scores to BackwardWideKeysConsumer.
template <class Config>
class BackwardWideProductScores : protected BackwardWideKeysConsumer<Config> {
 public:
  using Base = BackwardWideKeysConsumer<Config>;
  using typename Base::Element, typename Base::Products, typename Base::Scores, typename Base::Storage,
      typename Base::Weights;

  __device__ __forceinline__ BackwardWideProductScores(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                       Storage& storage, uint32_t s_tiles, float scale, int rank,
                                                       int lane)
      : Base(p, workspace, storage, s_tiles, 0, scale, rank, lane) {}

 protected:
  /// Computes P of a step. All of it is published.
  __device__ __forceinline__ void compute_p(Weights& p, Weights&, int tile) const {
    Scores s;
    Products::multiply(s, Base::keys_, this->query_tile());
    this->softmax_step(s);
    if (this->hides(tile)) this->hide_weights(s, tile);
    pack_operand<Element>(p, s);
  }
};

}  // namespace flash_ext::sm90
