// The products of the backward: S^T and dP^T, dV and dK, dQ.
#pragma once

#include "kernels/common/backward/dq_store.cuh"
#include "producer.cuh"

namespace flash_ext::sm80 {

/// Converts an operand of products on tiles of one width to one for tiles of another width.
template <class To, class From>
__device__ __forceinline__ To as_operand(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <class Config>
struct BackwardProducts : BackwardLoads<Config> {
  using Base = BackwardLoads<Config>;
  using Base::Base;
  using Base::end_turn, Base::first_column, Base::first_pair, Base::first_row, Base::gradient_tile, Base::kBlockM,
      Base::kBlockN, Base::kD, Base::kDqTiles, Base::kHeadDim, Base::kM, Base::kN, Base::kUnroll, Base::kUnrollDq,
      Base::kWeightsInRegisters, Base::kWeightSteps, Base::lane, Base::lane_of_scores, Base::p, Base::r_weights,
      Base::rematerialise, Base::s_key, Base::sum, Base::tile_index, Base::wait_for_turn, Base::warp, Base::workspace;
  using typename Base::Dq, typename Base::Rows, typename Base::Scores;

  /// c += A B^T for the warp's rows of A and its queries of B, with the bits of the forward's Q K^T, from which lse was
  /// computed.
  __device__ __forceinline__ void multiply_rows(float (&c)[kM][kN][4], uint32_t s_a, uint32_t s_b) const {
    const int lane = rematerialise(this->lane);
    const uint32_t s_lane_a = s_a + Rows::lane_a(lane) + rematerialise(first_row) * Rows::kRowBytes;
    const uint32_t s_lane_b = s_b + Rows::lane_b(lane) + first_column * Rows::kRowBytes;
    flash_ext::multiply_rows<Rows, kHeadDim / Rows::kDepth, kUnroll, true>(c, s_lane_a, s_lane_b);
  }

  /// sum += W B for weights W of the warp's keys. W lies in registers or, where several warps share keys, in s_weights.
  /// In registers it is shifted: each step uses the first operand and moves the others up, because a loop cannot index
  /// registers.
  __device__ __forceinline__ void accumulate(uint32_t s_weights, uint32_t s_b) {
    const int first_d = warp % Config::kRoleWarps / Config::kWarpsAlongKeys * (Config::kWarpColumns / 16);
    const int lane = rematerialise(this->lane);
    const uint32_t s_lane_b = s_b + Rows::lane_b_transposed(lane);
    const uint32_t s_lane_a = s_weights + Scores::lane_a_of_c(lane) + rematerialise(first_row) * Scores::kRowBytes;
#pragma unroll kUnroll
    for (int step = 0; step < kBlockM / Rows::kDepth; ++step) {
      typename Rows::A a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if constexpr (kWeightsInRegisters) {
          a[m] = r_weights[0][m];
#pragma unroll
          for (int k = 0; k + 1 < kWeightSteps; ++k) r_weights[k][m] = r_weights[k + 1][m];
        } else {
          typename Scores::A weights;
          Scores::load_a_of_c(weights, s_lane_a, 16 * m, step);
          a[m] = as_operand<typename Rows::A>(weights);
        }
      }
#pragma unroll
      for (int d = 0; d < kD; d += 2) {
        typename Rows::B b;
        Rows::load_b_transposed(b, s_lane_b, first_d + d / 2, step);
#pragma unroll
        for (int m = 0; m < kM; ++m) Rows::multiply(sum[m][d], sum[m][d + 1], a[m], b);
      }
    }
  }

  /// Adds the warp's part of dQ of a step, from dS^T number n, slice by slice where registers do not hold all of it.
  __device__ __forceinline__ void add_dq(const BackwardStep& step, int n) const {
    if (!p.dq.data) return;
    float* const g_tile = workspace.dq + tile_index(step) * (kBlockM * kHeadDim);
#pragma unroll kUnrollDq
    for (int first = 0; first < Dq::kN; first += kDqTiles) {
      float c[Dq::kM][kDqTiles][4] = {};
      multiply_dq(c, gradient_tile(n), first);
      if (workspace.turns && first == 0) wait_for_turn(step);
      Dq::add(g_tile + Dq::fragment(0, 0, first), c, warp, lane);
    }
    if (workspace.turns) end_turn(step);
  }
  __device__ __forceinline__ void multiply_dq(float (&c)[Dq::kM][kDqTiles][4], uint32_t s_gradients, int first) const {
    const int lane = rematerialise(this->lane);
    const uint32_t s_lane_a = s_gradients + Scores::lane_a_transposed(lane);
    const uint32_t s_lane_b = s_key + Rows::lane_b_transposed(lane);
    const int first_m = Dq::first_row(warp) / 16, first_d = Dq::first_column(warp) / 16 + first / 2;
#pragma unroll kUnroll
    for (int k = 0; k < kBlockN / Rows::kDepth; ++k) {
      typename Scores::A a[Dq::kM];
#pragma unroll
      for (int m = 0; m < Dq::kM; ++m) Scores::load_a_transposed(a[m], s_lane_a, first_m + m, k);
#pragma unroll
      for (int d = 0; d < kDqTiles; d += 2) {
        typename Rows::B b;
        Rows::load_b_transposed(b, s_lane_b, first_d + d / 2, k);
#pragma unroll
        for (int m = 0; m < Dq::kM; ++m) Rows::multiply(c[m][d], c[m][d + 1], as_operand<typename Rows::A>(a[m]), b);
      }
    }
  }

  /// Stores the accumulators as elements to a tile, and keeps them in registers for accumulate() where it reads these.
  __device__ __forceinline__ void store_weights(uint32_t s_tile, const float (&s)[kM][kN][4]) {
    const uint32_t s_lane = s_tile + lane_of_scores();
#pragma unroll
    for (int n = 0; n < kN; n += 2)
#pragma unroll
      for (int m = 0; m < kM; ++m) Scores::store_c(s_lane, 16 * m, first_pair() + n / 2, s[m][n], s[m][n + 1]);
    keep_weights(s);
  }
  __device__ __forceinline__ void keep_weights(const float (&s)[kM][kN][4]) {
    if constexpr (kWeightsInRegisters) {
#pragma unroll
      for (int step = 0; step < kWeightSteps; ++step)
#pragma unroll
        for (int m = 0; m < kM; ++m) Rows::a_from_accumulators(r_weights[step][m], s[m], step);
    }
  }
};

}  // namespace flash_ext::sm80
