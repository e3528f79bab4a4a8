// The products of the forward: S = Q K^T and O += P V.
#pragma once

#include "producer.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct ForwardProducts : ForwardLoads<Config> {
  using Base = ForwardLoads<Config>;
  using Base::Base;
  using Base::kBlockN, Base::kD, Base::kHeadDim, Base::kM, Base::kN, Base::kSteps, Base::kUnroll, Base::lane,
      Base::options, Base::p, Base::query_fragments, Base::r_q, Base::rows, Base::s_k, Base::s_v, Base::seeds,
      Base::stage;
  using typename Base::KeptWeights, typename Base::Products, typename Base::RandomBits, typename Base::Scores;

  /// S = Q K^T. With dropout as the only option, random bits are computed between the products.
  __device__ __forceinline__ void multiply_qk(Scores& s, KeptWeights& kept, int tile) const {
    const uint32_t s_lane = stage(s_k, 0) + Products::lane_b(lane);
    options().start(s);
#pragma unroll kUnroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (Config::kOneDropout) {
        constexpr int kEvery = kSteps / RandomBits::kCalls;
        if (step % kEvery == 0) options().random_bits(seeds, tile).compute_kept(kept, p.dropout.rule, step / kEvery);
      }
      typename Products::A loaded[kM];
      if constexpr (!Config::kQueryInRegisters) query_fragments(step, loaded);
      const auto& a = Config::kQueryInRegisters ? r_q[Config::kQueryInRegisters ? step : 0] : loaded;
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        typename Products::B b;
        Products::load_b(b, s_lane, 8 * n, step);
#pragma unroll
        for (int m = 0; m < kM; ++m) Products::multiply(s[m][n], s[m][n + 1], a[m], b);
      }
    }
  }

  /// Keeps loads from moving up past it: ptxas would load more fragments ahead than it has registers for.
  __device__ __forceinline__ static void fence_loads(int d) {
#if __CUDA_ARCH__ >= 900
    constexpr int kEvery = 8;
#else
    constexpr int kEvery = 16;
#endif
    if (d % kEvery == kEvery - 2) __syncwarp();
  }

  /// O += P V. A step takes the first two tiles of P and moves up the others: registers cannot be indexed in a loop.
  __device__ __forceinline__ void multiply_pv(Scores& s) {
    const uint32_t s_lane = stage(s_v, 0) + Products::lane_b_transposed(lane);
#pragma unroll kUnroll
    for (int step = 0; step < kBlockN / Products::kDepth; ++step) {
      typename Products::A a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) Products::a_from_accumulators(a[m], s[m], 0);
      for_each_score(s, [&](float& x, int m, int n, int e) { x = n + 2 < kN ? s[m][(n + 2) % kN][e] : x; });
#pragma unroll
      for (int d = 0; d < kD; d += 2) {
        typename Products::B b;
        Products::load_b_transposed(b, s_lane, d / 2, step);
#pragma unroll
        for (int m = 0; m < kM; ++m) Products::multiply(rows.out[m][d], rows.out[m][d + 1], a[m], b);
        if constexpr (Config::kFenced) fence_loads(d);
      }
    }
  }

  /// The same with dropout, on packed P.
  __device__ __forceinline__ void multiply_pv(const Scores& s, const KeptWeights& kept) {
    constexpr int kPairSteps = kBlockN / Products::kDepth;
    const uint32_t s_lane = stage(s_v, 0) + Products::lane_b_transposed(lane);
    typename Products::A a[kPairSteps][kM];
#pragma unroll
    for (int step = 0; step < kPairSteps; ++step)
#pragma unroll
      for (int m = 0; m < kM; ++m) Products::a_from_accumulators(a[step][m], s[m], step);
    RandomBits::drop(a, kept);
#pragma unroll
    for (int step = 0; step < kPairSteps; ++step)
#pragma unroll
      for (int d = 0; d < kD; d += 2) {
        typename Products::B b;
        Products::load_b_transposed(b, s_lane, d / 2, step);
#pragma unroll
        for (int m = 0; m < kM; ++m) Products::multiply(rows.out[m][d], rows.out[m][d + 1], a[step][m], b);
        // As in fence_loads().
        if (kHeadDim == 128 && d % 4 == 2) __syncwarp();
      }
  }
};

}  // namespace flash_ext::sm80
