// Shared memory of the gradient of a bias, in one place that the plan reads too.
#pragma once

#include <algorithm>

#include "kernels/common/bias_gradient/shape.h"
#include "kernels/common/score/bias_view.h"
#include "kernels/common/shared_memory.h"

namespace flash_ext::sm80 {

constexpr int kBiasSlab = 64;  // columns that are loaded at a time
constexpr int kMinBiasStages = 2, kMaxBiasStages = 4;
constexpr int kScoreTilesBytes = 48;     // of ScoreTiles, a multiple of 16
constexpr int kBiasScoreTileBytes = 80;  // of BiasScoreTile

/// A CTA's shared memory: stages of slabs; the bias; for each score tile under way its metadata, and words of masks.
struct BiasShared {
  int stages;
  bool stages_bias;
  int bias_at, search_at, score_tiles_at, words_at, bytes;
};

/// What the division of shared memory depends on.
struct BiasSharedOf {
  bool is_float;        // q
  bool bias_in_chunks;  // of 16 bytes
  DType bias_dtype;
  bool masked;        // by a mask or a block mask
  int of_cta, of_sm;  // bytes of shared memory that a CTA and an SM can have
};

/// Bytes of a stage: a slab of Q or dO, and one of K or V.
constexpr int bias_stage_bytes(bool is_float) {
  const BiasTileShape shape = bias_tile_shape(is_float);
  return (shape.rows + shape.keys) * kBiasSlab * (is_float ? 4 : 2);
}

constexpr BiasShared bias_shared_with(const BiasSharedOf& call, int stages, bool stages_bias) {
  const BiasTileShape shape = bias_tile_shape(call.is_float);
  BiasShared plan = {};
  plan.stages = stages;
  plan.stages_bias = stages_bias;
  plan.bias_at = stages * bias_stage_bytes(call.is_float);
  plan.search_at = plan.bias_at;
  if (stages_bias)
    plan.search_at +=
        static_cast<int>(bias_tile_bytes(call.bias_dtype, shape.warp_rows, shape.warp_keys)) * shape.warps();
  plan.score_tiles_at = plan.search_at + kScoreTilesBytes;
  const int slots = stages + 1;
  plan.words_at = plan.score_tiles_at + (slots * kBiasScoreTileBytes + 127) / 128 * 128;
  plan.bytes = plan.words_at + (call.masked ? slots * shape.rows * shape.keys / 8 : 0);
  return plan;
}

/// Takes as many stages as fit beside the bias, preferably with a second CTA on the SM. If nothing fits, the bias stays
/// in global memory.
constexpr BiasShared bias_shared(const BiasSharedOf& call) {
  const int of_several = call.of_sm / kBiasCtasPerSm - kReservedSharedBytes;
  for (const bool stages_bias : {call.bias_in_chunks, false})
    for (const int available : {std::min(call.of_cta, of_several), call.of_cta})
      for (int stages = kMaxBiasStages; stages >= kMinBiasStages; --stages) {
        const BiasShared plan = bias_shared_with(call, stages, stages_bias);
        if (plan.bytes <= available) return plan;
      }
  return bias_shared_with(call, kMinBiasStages, false);
}

}  // namespace flash_ext::sm80
