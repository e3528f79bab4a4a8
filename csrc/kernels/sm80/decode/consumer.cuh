// A warp of decoding: scores, softmax and out over key tiles. See kernel.cuh.
#pragma once

#include "config.h"
#include "kernels/common/mask/tile_range.h"
#include "kernels/common/sanitise.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/common/warp_products.cuh"
#include "kernels/common/warp_products_tf32.cuh"
#include "kernels/ptx/lane.h"

namespace flash_ext::sm80 {

/// What differs between the scores of rows. It lies in shared memory, since few tiles read it.
struct alignas(16) DecodeRowRules {
  int begin, end;  // keys that it sees
  int position;    // the key that it is aligned with
  float slope;     // of ALiBi
};

template <class Config>
__device__ __forceinline__ void write_rules(DecodeRowRules* s_rules, const ForwardParams& p, const DecodeGrid& grid,
                                            const DecodeTile& tile) {
  const Sequence& sequence = tile.sequence;
  for (int row = threadIdx.x; row < tile.rows; row += Config::kThreads) {
    const int query = static_cast<int>(grid.group.quotient(tile.first_row + row));
    const int head = sequence.head + tile.first_row + row - query * static_cast<int>(grid.group.value);
    s_rules[row] = {sequence.keys_begin(query), sequence.keys_end(query), query + sequence.offset, 0.0f};
    if (p.alibi_slopes)
      s_rules[row].slope = p.alibi_slopes[sequence.batch * p.alibi_batch_stride + head] *
                           ScoreUnit<typename Config::Element>::kPerNatural;
  }
}

template <class Config>
struct DecodeWarp {
  using Element = typename Config::Element;
  using Unit = ScoreUnit<Element>;
  using Products = flash_ext::Products<Element, Config::kHeadDim>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kN = Config::kBlockN / 8;
  static constexpr int kColumns = kHeadDim / Config::kColumnWarps;
  static constexpr int kD = kColumns / 8;
  static constexpr int kSteps = kHeadDim / Products::kDepth;
  // Out is rescaled when a maximum has grown by this much, 8 in base 2: until then P stays small enough for 16 bits.
  static constexpr float kMaxGrowth = 8.0f * (Unit::kNatural ? kLn2 : 1.0f);

  const ForwardParams& p;
  const int lane, warp, row_warp, column_warp, key_warp;
  const uint32_t k_lane, v_lane;        // what the lane adds to the addresses of tiles
  const DecodeRowRules* const s_rules;  // of the lane's first row
  const uint32_t s_q;
  const float scale, cap;

  float out[kD][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.0f, 0.0f};
  bool met_non_finite = false;
  typename Products::A r_q[Config::kQueryInRegisters ? kSteps : 1];

  __device__ __forceinline__ DecodeWarp(const ForwardParams& p, const DecodeGrid& grid,
                                        const DecodeRowRules* s_tile_rules, uint32_t s_q)
      : p(p),
        lane(ptx::lane_id()),
        warp(__shfl_sync(~0u, threadIdx.x / 32, 0)),
        row_warp(warp % Config::kRowWarps),
        column_warp(warp / Config::kRowWarps % Config::kColumnWarps),
        key_warp(warp / Config::kTeam),
        k_lane(Products::lane_b(lane)),
        v_lane(Products::lane_b_transposed(lane) + column_warp * kColumns * sizeof(Element)),
        s_rules(s_tile_rules + row_warp * 16 + lane / 4),
        s_q(s_q),
        scale(grid.factors.scale),
        cap(grid.factors.cap) {}

  __device__ __forceinline__ void keep_query() {
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        Products::load_a(r_q[step], s_q + Products::lane_a(lane), row_warp * 16, step);
    }
  }

  /// Computes one key tile, up to end_key. `mixed`: some row sees a key that another does not.
  __device__ __forceinline__ void visit(uint32_t s_stage, int first_key, int end_key, bool mixed) {
    const uint32_t s_v = s_stage + Config::kStageBytes / 2;
    if (mixed) remove_non_finite(s_v);
    float s[kN][4] = {};
    score(s, s_stage);
    finish_scores(s, first_key, end_key, mixed);
    exponentiate(s);
    accumulate(s, s_v);
  }

  /// A barrier of all warps that share key tiles.
  __device__ __forceinline__ static void meet() {
    if constexpr (Config::kTeam == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

 private:
  __device__ __forceinline__ void remove_non_finite(uint32_t s_v) {
    constexpr int kSharing = Config::kTeam == 1 ? 32 : Config::kThreads;  // threads that share the tile
    met_non_finite |= sanitise_chunks<Element, false, Config::kStageBytes / 2 / 16, kSharing, 1>(
        static_cast<int>(threadIdx.x) % kSharing, [&](int flat) -> uint4& { return shared_chunk(s_v + flat * 16); });
    meet();
  }

  __device__ __forceinline__ void score(float (&s)[kN][4], uint32_t s_k) {
    // Two chains of dependent products would leave the tensor cores waiting, so they are halved.
    constexpr bool kHalves = kN == 2 && Config::kQueryInRegisters;
    float odd[kHalves ? kN : 1][4] = {};
    const uint32_t s_k_lane = s_k + k_lane;
    constexpr int kUnroll = Config::kQueryInRegisters ? kSteps : 4;
#pragma unroll kUnroll
    for (int step = 0; step < kSteps; ++step) {
      typename Products::A r_step;
      if constexpr (!Config::kQueryInRegisters)
        Products::load_a(r_step, s_q + Products::lane_a(lane), row_warp * 16, step);
#pragma unroll
      for (int pair = 0; pair < kN / 2; ++pair) {
        typename Products::B b;
        Products::load_b(b, s_k_lane, 16 * pair, step);
        if constexpr (kHalves) {
          auto& sum = step % 2 == 0 ? s : odd;
          Products::multiply(sum[0], sum[1], r_q[step], b);
        } else {
          Products::multiply(s[2 * pair], s[2 * pair + 1], Config::kQueryInRegisters ? r_q[step] : r_step, b);
        }
      }
    }
    if constexpr (kHalves) for_each(s, [&](float& x, int r, int column) { x += odd[column / 8][2 * r + column % 2]; });
  }

  /// Turns products into scores, -inf where the row does not see the key.
  __device__ __forceinline__ void finish_scores(float (&s)[kN][4], int first_key, int end_key, bool mixed) const {
    const int first_column = first_key + lane % 4 * 2;
    if (cap > 0.0f) {
      for_each(s, [&](float& x, int, int) { x = Unit::multiply(cap, softcap_tanh_of_lse<Element>(x * scale)); });
    } else {
      for_each(s, [&](float& x, int, int) { x = Unit::multiply(scale, x); });
    }
    if (p.alibi_slopes) {
      for_each(s, [&](float& x, int r, int column) {
        x -= s_rules[8 * r].slope * fabsf(static_cast<float>(s_rules[8 * r].position - first_column - column));
      });
    }
    if (mixed) {
      for_each(s, [&](float& x, int r, int column) {
        const int key = first_column + column;
        if (key < s_rules[8 * r].begin || key >= s_rules[8 * r].end) x = -INFINITY;
      });
    }
    if (first_key + Config::kBlockN > end_key) {
      for_each(s, [&](float& x, int, int column) {
        if (first_column + column >= end_key) x = -INFINITY;
      });
    }
  }

  /// Calls f(score, which of the lane's rows, column from the lane's first one).
  template <class F>
  __device__ __forceinline__ static void for_each(float (&s)[kN][4], F f) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(s[n][e], e / 2, 8 * n + e % 2);
  }

  /// Turns S into P, and updates maxima, sums and out.
  __device__ __forceinline__ void exponentiate(float (&s)[kN][4]) {
    float factor[2] = {1.0f, 1.0f};
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = s[0][2 * r];
#pragma unroll
      for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      largest = max_of_row(largest);
      if (largest > maximum[r] + kMaxGrowth) {
        factor[r] = Unit::exp(maximum[r] - largest);
        maximum[r] = largest;
        grown = true;
      }
    }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_sum[r] *= factor[r];
#pragma unroll
        for (int d = 0; d < kD; ++d) {
          out[d][2 * r] *= factor[r];
          out[d][2 * r + 1] *= factor[r];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float stabiliser = maximum[r] == -INFINITY ? 0.0f : maximum[r];
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          s[n][2 * r + c] = Unit::exp(s[n][2 * r + c] - stabiliser);
          row_sum[r] += s[n][2 * r + c];
        }
    }
  }

  __device__ __forceinline__ void accumulate(const float (&s)[kN][4], uint32_t s_v) {
    const uint32_t s_v_lane = s_v + v_lane;
#pragma unroll
    for (int step = 0; step < Config::kBlockN / Products::kDepth; ++step) {
      typename Products::A weights;
      Products::a_from_accumulators(weights, s, step);
#pragma unroll
      for (int pair = 0; pair < kD / 2; ++pair) {
        typename Products::B b;
        Products::load_b_transposed(b, s_v_lane, pair, step);
        Products::multiply(out[2 * pair], out[2 * pair + 1], weights, b);
      }
    }
  }

 public:
  /// Stores maximum, sum and out to shared memory, where the CTA combines them.
  __device__ __forceinline__ void publish(float* s_out, float2* s_softmax_state, int rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_row(row_sum[r]);
      const int row = row_warp * 16 + lane / 4 + 8 * r;
      if (row >= rows) continue;
      const int slot = key_warp * Config::kBlockM + row;
      if (lane % 4 == 0 && column_warp == 0) s_softmax_state[slot] = make_float2(maximum[r], sum);
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        const int column = column_warp * kColumns + 8 * d + lane % 4 * 2;
        *reinterpret_cast<float2*>(s_out + slot * Config::kOutStride + column) =
            make_float2(out[d][2 * r], out[d][2 * r + 1]);
      }
    }
  }
};

}  // namespace flash_ext::sm80
