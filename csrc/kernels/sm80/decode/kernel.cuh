// Attention over a key-value cache on mma.sync:   out_r = sum_j p_rj v_j / l_r,   p_rj = e^(s_rj - m_r),   l_r = sum_j
// p_rj
//
// Decoding reads each key and value once and does little with it, so all is arranged to keep reads under way. The heads
// that share a key head are rows of one tile (scheduler.cuh), and the keys of a tile are cut into splits, one CTA
// each.
//
// Few rows (kRowWarps = 1): every warp (of float heads of 256: every two) walks over key tiles of its own, with a ring
// of stages of its own, its own m, l and out; warps meet at the end only, when their results are added up in shared
// memory. Many rows (kRowWarps = 4): the warps share the key tiles and own 16 rows each.
//
// A step, for tile n:
//   wait for K(n) and V(n), barrier of those who share it     everybody is done with tile n - 1
//   issue K and V of tile n + kStages - 1 into the stage of tile n - 1
//   S = Q K^T, m grows where it must, P = e^(S - m), O += P V
#pragma once

#include <new>

#include "epilogue.cuh"
#include "kernels/common/mask/tile_range.h"
#include "kernels/common/sanitise_tile.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/common/warp_products.cuh"
#include "kernels/common/warp_products_tf32.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"
#include "kernels/ptx/lane.h"
#include "kernels/sm80/common/config.h"
#include "producer.cuh"
#include "scheduler.cuh"

namespace flash_ext::sm80 {

template <class Element_, int kHeadDim_, int kRowWarps_>
struct DecodeConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kBlockM = 16 * kRowWarps;
  static constexpr bool kWide = kHeadDim == 256;
  // Out takes half of the registers where heads are wide. With float, whose operands are twofold, two warps share it:
  // both compute S.
  static constexpr int kColumnWarps = kWide && sizeof(Element) == 4 ? 2 : 1;
  static constexpr bool kQueryInRegisters = sizeof(Element) == 2 && !kWide;
  static constexpr int kTeam = kRowWarps * kColumnWarps;  // warps that share key tiles

  using Layout = TileLayout<Element, kHeadDim>;
  // 16 keys are the depth of a product; short rows allow 32, which share the work on maxima.
  static constexpr int kBlockN = (kRowWarps > 1 && !kWide) || Layout::kRowBytes <= 128 ? 32 : 16;
  static constexpr int kStageBytes = 2 * Layout::bytes(kBlockN);
  // The ring's size: 64 KB have to be under way on an SM, several CTAs share it, and RTX cards have 99 KB.
  static constexpr int kStages = kQueryInRegisters ? 3 : 2;
  static constexpr int kKeyWarps = kTeam > 1 ? 1 : (32 * 1024 / kStageBytes < 4 ? 32 * 1024 / kStageBytes : 4);
  static constexpr int kThreads = 32 * kTeam * kKeyWarps;

  // Shared memory: the tile, the rules of its rows, then Q and the ring or, at the end, out and the warps' states.
  static constexpr int kTileBytes = 256;
  static constexpr int kRulesOffset = kTileBytes;
  static constexpr int kRulesBytes = kBlockM * 16;
  static constexpr int kLoopOffset = kRulesOffset + kRulesBytes;
  static constexpr int kQueryBytes = Layout::bytes(kBlockM);
  static constexpr int kRingOffset = kLoopOffset + (kQueryInRegisters ? 0 : kQueryBytes);
  static constexpr int kRingBytes = kKeyWarps * kStages * kStageBytes;
  static constexpr int kQueryOffset = kQueryInRegisters ? kRingOffset + (kStages - 1) * kStageBytes : kLoopOffset;
  static constexpr int kLoopEnd = kRingOffset + kRingBytes;
  static constexpr int kOutStride = kHeadDim + 8;  // floats: rows shift by 8 banks
  static constexpr int kStorageOffset = kLoopOffset + kKeyWarps * kBlockM * kOutStride * 4;
  static constexpr int kStorageEnd = kStorageOffset + kKeyWarps * kBlockM * 8;
  static constexpr int kSharedBytes = kLoopEnd > kStorageEnd ? kLoopEnd : kStorageEnd;
  static_assert(!kQueryInRegisters || kQueryBytes <= kStageBytes, "Q passes through the stage that is filled last");
  static_assert(sizeof(DecodeTile) <= kTileBytes, "the shared-memory plan has room for it");
  static_assert(kSharedBytes <= 99 * 1024, "every GPU must be able to launch it");
};

/// What distinguishes the scores of a row. In shared memory, since few tiles ask.
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
  // Out is rescaled when a maximum has grown by this much, 8 to base 2: until then P stays small enough for 16 bits.
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

  /// One tile of keys, as far as they lie below end_key; `mixed`: some row sees what another does not.
  __device__ __forceinline__ void visit(uint32_t s_stage, int first_key, int end_key, bool mixed) {
    const uint32_t s_v = s_stage + Config::kStageBytes / 2;
    if (mixed) remove_non_finite(s_v);
    float s[kN][4] = {};
    score(s, s_stage);
    finish_scores(s, first_key, end_key, mixed);
    exponentiate(s);
    accumulate(s, s_v);
  }

  /// By all that share the tile, which the barrier is for.
  __device__ __forceinline__ static void meet() {
    if constexpr (Config::kTeam == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

 private:
  __device__ __forceinline__ void remove_non_finite(uint32_t s_v) {
    if constexpr (Config::kTeam == 1) {
      remove_non_finite_of(s_v, lane, 32);
    } else {
      remove_non_finite_of(s_v, threadIdx.x, Config::kThreads);
    }
    meet();
  }

  __device__ __forceinline__ void remove_non_finite_of(uint32_t s_v, int first, int step) {
    using Test = NonFinite<Element>;
#pragma unroll 1
    for (int flat = first; flat < Config::kStageBytes / 2 / 16; flat += step) {
      const uint4 piece = shared_piece(s_v + flat * 16);
      if (!Test::in_piece(piece)) continue;
      met_non_finite = true;
      shared_piece(s_v + flat * 16) = Test::without(piece);
    }
  }

  __device__ __forceinline__ void score(float (&s)[kN][4], uint32_t s_k) {
    // Chains of products that each wait for the one before; where there are only two, they are cut in halves.
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

  /// Products to scores, -inf where the row does not see the key.
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

  /// S to P, with what that changes of maxima, sums and out.
  __device__ __forceinline__ void exponentiate(float (&s)[kN][4]) {
    float factor[2] = {1.0f, 1.0f};
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = s[0][2 * r];
#pragma unroll
      for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
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
  /// Maximum, sum and out to shared memory, where the CTA adds them up.
  __device__ __forceinline__ void publish(float* s_out, float2* s_softmax_state, int rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = row_sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
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

/// The queries of a tile, zeros in rows that it does not have. By the whole CTA.
template <class Config>
__device__ __forceinline__ void load_query(uint32_t s_q, const ForwardParams& p, const DecodeGrid& grid,
                                           const DecodeTile& tile) {
  using Element = typename Config::Element;
  using Layout = typename Config::Layout;
  const Sequence& sequence = tile.sequence;
  const auto rows = query_rows<Element>(p.q, sequence);
#pragma unroll 1
  for (int flat = threadIdx.x; flat < Config::kBlockM * Layout::kPieces; flat += Config::kThreads) {
    const int row = flat / Layout::kPieces, piece = flat % Layout::kPieces;
    const bool valid = row < tile.rows && Layout::kPieceElements * piece < p.head_dim;
    const int at = valid ? tile.first_row + row : 0, query = static_cast<int>(grid.group.quotient(at));
    const int head = at - query * static_cast<int>(grid.group.value);
    const Element* source = rows.row(query) + head * p.q.head_stride;
    ptx::cp_async_16(s_q + Layout::at(row, piece), source + (valid ? Layout::kPieceElements * piece : 0), valid);
  }
}

/// The loop over the keys of a split. `load_rows` brings what belongs to the rows, once the first keys are on their
/// way.
template <class Config, class LoadRows>
__device__ __forceinline__ void visit_keys(DecodeWarp<Config>& warp, const ForwardParams& p, const DecodeGrid& grid,
                                           const DecodeTile& tile, int split, uint32_t s_rings, LoadRows load_rows) {
  constexpr int kStep = Config::kKeyWarps * Config::kBlockN, kAhead = Config::kStages - 1;
  const uint32_t s_ring = s_rings + warp.key_warp * Config::kStages * Config::kStageBytes;
  int first_key = tile.split_begin(split) + warp.key_warp * Config::kBlockN;
  const int end_key = tile.split_end(split);
  KeyProducer<Config> producer(p, tile.sequence, first_key, end_key, warp.warp % Config::kTeam, warp.lane);
#pragma unroll 1
  for (int stage = 0; stage < kAhead; ++stage) {
    if (first_key + stage * kStep < end_key) producer.load_next(s_ring + stage * Config::kStageBytes, kStep);
    if (stage == 0) load_rows();
    ptx::cp_async_commit();
  }
  const bool any_mixed = tile.is_mixed(grid);
  const int common_begin = any_mixed ? tile.common_begin(grid) : 0;
  const int common_end = any_mixed ? tile.common_end(grid) : end_key;
  ptx::cp_async_wait<kAhead - 1>();
  __syncthreads();
  warp.keep_query();
  if constexpr (Config::kQueryInRegisters) __syncthreads();

  int stage = 0;
#pragma unroll 1
  for (; first_key < end_key; first_key += kStep) {
    ptx::cp_async_wait<kAhead - 1>();
    DecodeWarp<Config>::meet();
    const int free_stage = stage == 0 ? kAhead : stage - 1;
    if (first_key + kAhead * kStep < end_key) producer.load_next(s_ring + free_stage * Config::kStageBytes, kStep);
    ptx::cp_async_commit();
    const bool mixed = first_key < common_begin || min(first_key + Config::kBlockN, end_key) > common_end;
    warp.visit(s_ring + stage * Config::kStageBytes, first_key, end_key, mixed);
    stage = stage == kAhead ? 0 : stage + 1;
  }
}

/// One split of a tile, from its keys to its result. `shared` lies behind the tile.
template <class Config>
__device__ __forceinline__ void run_split(unsigned char* shared, const ForwardParams& p, const DecodeGrid& grid,
                                          const DecodePartials& partials, const DecodeTile& tile, int split) {
  DecodeRowRules* s_rules = reinterpret_cast<DecodeRowRules*>(shared + Config::kRulesOffset);
  const uint32_t s_q = ptx::shared_address(shared) + Config::kQueryOffset;
  DecodeWarp<Config> warp(p, grid, s_rules, s_q);
  visit_keys(warp, p, grid, tile, split, ptx::shared_address(shared) + Config::kRingOffset, [&] {
    load_query<Config>(s_q, p, grid, tile);
    if (p.alibi_slopes || tile.is_mixed(grid)) write_rules<Config>(s_rules, p, grid, tile);
  });

  ptx::cp_async_wait<0>();
  const bool patch = __syncthreads_or(warp.met_non_finite) != 0;
  float* s_out = reinterpret_cast<float*>(shared + Config::kLoopOffset);
  float2* s_softmax_state = reinterpret_cast<float2*>(shared + Config::kStorageOffset);
  warp.publish(s_out, s_softmax_state, tile.rows);
  __syncthreads();
  if (patch) {
    add_non_finite<Config>(s_out, p, grid, tile, split);
    __syncthreads();
  }
  finish<Config>(s_out, s_softmax_state, p, grid, partials, tile, split);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 2)
    decode_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ DecodeGrid grid,
                  const __grid_constant__ DecodePartials partials) {
  extern __shared__ __align__(128) unsigned char shared[];
  // In this order: the combination may then read what the append wrote before it waits for this kernel.
  ptx::wait_for_previous_grid();
  ptx::launch_dependents();
  // Neighbouring CTAs read neighbouring heads of the same keys, then tiles of queries that see the same keys.
  const uint32_t range = grid.groups.quotient(blockIdx.x), part = grid.row_tiles.quotient(range);
  const int group = static_cast<int>(blockIdx.x - range * grid.groups.value);
  int row_tile = static_cast<int>(range - part * grid.row_tiles.value), batch, first;
  if (grid.tiles.by_rows) {
    first = static_cast<int>(part);
    if (threadIdx.x < 32) grid.tiles.find(p, row_tile, batch, row_tile);
  } else {
    batch = static_cast<int>(grid.blocks.quotient(part));
    first = static_cast<int>(part) - batch * static_cast<int>(grid.blocks.value);
  }
  DecodeTile& tile = *reinterpret_cast<DecodeTile*>(shared);
  if (threadIdx.x == 0) {
    new (&tile) DecodeTile(p, grid, batch, group, row_tile);
    if (row_tile < 0) tile.rows = 0;
  }
  __syncthreads();
  if (tile.rows <= 0) return;
  if (tile.begin == tile.end && first == 0) write_nothing<Config>(p, grid, tile);
#pragma unroll 1
  for (int split = tile.first_split + first; tile.split_begin(split) < tile.split_end(split);
       split += static_cast<int>(grid.blocks.value)) {
    run_split<Config>(shared, p, grid, partials, tile, split);
    __syncthreads();  // out has been read
  }
}

template <class Config>
void launch_decode(const ForwardParams& params, const DecodeGrid& grid, const DecodePartials& partials,
                   bool behind_append, cudaStream_t stream) {
  const int64_t blocks = grid.all_tiles() * grid.blocks.value;
  LaunchShape shape{grid_of(blocks), dim3(Config::kThreads), Config::kSharedBytes};
  shape.overlaps_previous = behind_append;
  launch("decode", decode_kernel<Config>, shape, stream, params, grid, partials);
}

/// All but the combination of the splits.
template <class Element, int kHeadDim>
void run_decode(const ForwardParams& params, const DecodeGrid& grid, const DecodePartials& partials, bool behind_append,
                cudaStream_t stream) {
  if constexpr (sizeof(Element) == 2) {
    if (grid.block_m > 16)
      return launch_decode<DecodeConfig<Element, kHeadDim, 4>>(params, grid, partials, behind_append, stream);
  }
  launch_decode<DecodeConfig<Element, kHeadDim, 1>>(params, grid, partials, behind_append, stream);
}

}  // namespace flash_ext::sm80
