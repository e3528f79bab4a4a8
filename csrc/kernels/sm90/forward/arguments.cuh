// Kernel arguments: what the host computes from a call. Kernels read them from constant memory.
#pragma once

#include "kernels/common/tensor_map.h"
#include "kernels/sm90/common/forward_maps.h"
#include "kernels/sm90/common/softmax.cuh"
#include "key_tiles.cuh"
#include "split_kv.cuh"
#include "visibility.h"

namespace flash_ext::sm90 {

/// Rows of K and V that TMA copies at a time.
template <class Config>
int rows_of_key_copy(const ForwardParams& p) {
  return Config::kReadsCache && p.seq.block_table ? rows_of_copy(Config::kBlockN, p.seq.page_size) : Config::kBlockN;
}

template <class Config>
ForwardMaps encode_maps(const ForwardParams& p) {
  return encode_forward_maps(p, rows_of_key_copy<Config>(p));
}

/// Terms of the variants with bias, masks or dropout.
struct ForwardOptionsTerms {
  ScoreTerms terms;
  // `scale` turns a product into a base-2 score. With softcap or ALiBi, or with a scale that a bias cannot be divided
  // by, scores are scaled first, and `scale` is 1.
  float scale;
  float bias_factor;  // multiplies a bias, which is added before `scale` is applied
  float most_bias;    // argument of saturate_bias()
  float keep_scale;   // multiplies the weights that dropout keeps
  bool scales_first, adds_alibi, adds_bias;
  ForwardVisibility visible;
};

inline ForwardOptionsTerms forward_options_terms(const ForwardParams& p) {
  ForwardOptionsTerms options{ScoreTerms(p)};
  const float scale = score_scale(p, kLog2E);
  options.adds_alibi = p.alibi_slopes != nullptr;
  options.adds_bias = p.bias.data != nullptr;
  options.scales_first = scales_first(p.softcap, options.adds_alibi, p.softmax_scale);
  options.scale = options.scales_first ? 1.0f : scale;
  options.bias_factor = kLog2E / options.scale;
  options.most_bias = most_bias(options.bias_factor);
  options.keep_scale = static_cast<float>(p.dropout.rule.keep_scale);
  return options;
}

template <class Config>
using ForwardScheduleOf =
    std::conditional_t<Config::kVisible, ForwardOptionsSchedule,
                       std::conditional_t<Config::kListsBlocks, ForwardBlocksSchedule,
                                          std::conditional_t<Config::kSplitsKv, SplitKvSchedule, ForwardSchedule>>>;

/// The parameters of the kernel, except the schedule.
template <class Config, bool kVisible = Config::kVisible>
struct ForwardParameters {
  struct PlainCall {
    ForwardParams p;
  };
  using Call = std::conditional_t<Config::kReadsCache, ForwardCacheCall, PlainCall>;
  using Maps = ForwardMaps;
  using ScoreArgument = ScoreTerms;
};

/// The parameters of the variants with bias, masks or dropout.
template <class Config>
struct ForwardParameters<Config, true> {
  struct Call {
    ForwardParams p;
    ForwardOptionsTerms options;
  };
  struct Maps : ForwardMaps {
    CUtensorMap bias;
  };
  struct ScoreArgument {};
};

/// The parameters as the roles of a CTA see them.
template <class Config>
struct ForwardArguments {
  using Parameters = ForwardParameters<Config>;

  const typename Parameters::Call& call;
  const typename Parameters::Maps& maps;
  const typename Parameters::ScoreArgument& terms;

  __device__ __forceinline__ const ScoreTerms& score_terms() const {
    if constexpr (Config::kVisible) {
      return call.options.terms;
    } else {
      return terms;
    }
  }
  /// Returns the factor from products to base-2 scores: 1 where score options have applied the scale already.
  __device__ __forceinline__ float scale() const {
    if constexpr (Config::kVisible) {
      return call.options.scale;
    } else {
      return Config::kScoreOptions ? 1.0f : score_scale(call.p, kLog2E);
    }
  }
};

}  // namespace flash_ext::sm90
