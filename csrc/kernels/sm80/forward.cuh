// Attention forward on mma.sync:   out_i = sum_j p_ij v_j / l_i,   p_ij = 2^(s_ij - r_i),   l_i = sum_j p_ij
//
// A block owns kBlockM queries of one head; each of its warps owns kWarpRows of them and walks all keys that they see,
// so that warps share nothing but the loads. K and V tiles come through cp.async, one tile ahead.
//
// The reference r_i need not be the running maximum (FlashAttention-2, algorithm 1) as long as nothing overflows. It is
// the maximum of the first tile in which the row sees a key, and stays, so that the loop has neither a maximum nor a
// rescaling of the output. The row sums keep watch: a tile whose sum passes kSumLimit raises the reference by the
// exponent of the sum, while P is still in float. Should even the float overflow, the block starts again with the
// running maximum.
//
// A step, for tile n of the keys, from the last to the first, with one stage of shared memory for K and one for V:
//   wait for K(n), barrier: everybody is done with V(n + 1); issue V(n)
//   S = Q K(n)^T
//   wait for V(n), barrier: everybody is done with K(n); issue K(n - 1)
//   P = 2^(S - r), O += P V(n)
// and with two stages, where one barrier is enough:
//   wait for K(n) and V(n), barrier: everybody is done with K(n + 1) and V(n + 1); issue K(n - 1) and V(n - 1)
//   S = Q K(n)^T, P = 2^(S - r), O += P V(n)
#pragma once

#include <new>

#include "../common/scores.cuh"
#include "../common/sequence.cuh"
#include "../common/tile_range.h"
#include "../common/visibility.cuh"
#include "../launch.h"
#include "bias_tile.cuh"
#include "config.h"
#include "forward_work.cuh"
#include "non_finite.cuh"
#include "products.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct ForwardBlock {
  using Element = typename Config::Element;
  using Products = sm80::Products<Element, Config::kHeadDim>;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockM = Config::kBlockM;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kM = Config::kWarpRows / 16;
  static constexpr int kN = kBlockN / 8;
  static constexpr int kD = kHeadDim / 8;
  static constexpr int kSteps = kHeadDim / Products::kDepth;
  static constexpr int kUnroll = Config::kUnroll;
  using Scores = float[kM][kN][4];

  const ForwardParams& p;
  ForwardWork<Config>& work;
  const int warp_row, lane;
  const uint32_t s_q, s_k, s_v;
  uint32_t* const s_words;  // visibility of two tiles
  int phase = 0;            // which stage the K of this step is in

  float out[kM][kD][4];
  float reference[kM][2];  // base 2; -inf while the row has seen no key
  float row_sum[kM][2];
  typename Products::A r_q[Config::kQueryInRegisters ? kSteps : 1][kM];

  __device__ __forceinline__ ForwardBlock(const ForwardParams& p, ForwardWork<Config>& work, char* shared)
      : p(p),
        work(work),
        warp_row(threadIdx.x / 32 * Config::kWarpRows),
        lane(threadIdx.x % 32),
        s_q(ptx::shared_address(shared)),
        s_k(s_q + Config::kQueryBytes),
        s_v(s_k + Config::kStages * Config::kTileBytes),
        s_words(reinterpret_cast<uint32_t*>(shared + Config::kTilesBytes + Config::kWorkBytes)) {}

  __device__ __forceinline__ TileCoordinates<false> coordinates(int tile) const {
    return TileCoordinates<false>::of_lane(work.first_query + warp_row, tile * kBlockN, lane);
  }
  /// K or V of the current step, or of the one after it.
  __device__ __forceinline__ uint32_t stage(uint32_t s_ring, int steps_ahead) const {
    return s_ring + (Config::kStages == 1 ? 0u : static_cast<uint32_t>((phase + steps_ahead) & 1)) * Config::kTileBytes;
  }

  __device__ __forceinline__ void load_query(const ForwardWork<Config>& work) const {
    load_tile<Element, kHeadDim, kThreads, kBlockM>(s_q, query_rows<Element>(p.q, work.sequence), work.first_query,
                                                    work.sequence.seqlen_q, static_cast<int>(p.head_dim));
  }
  __device__ __forceinline__ void load_key(const ForwardWork<Config>& work, int tile, int steps_ahead) const {
    load_tile<Element, kHeadDim, kThreads, kBlockN>(stage(s_k, steps_ahead), work.keys, tile * kBlockN,
                                                    work.sequence.seqlen_k, static_cast<int>(p.head_dim));
  }
  __device__ __forceinline__ void load_value(const ForwardWork<Config>& work, int tile, int steps_ahead) const {
    load_tile<Element, kHeadDim, kThreads, kBlockN>(stage(s_v, steps_ahead), work.values, tile * kBlockN,
                                                    work.sequence.seqlen_k, static_cast<int>(p.head_dim_v));
  }

  /// V of a tile, and its part of the bias.
  __device__ __forceinline__ void load_value_and_bias(const ForwardWork<Config>& work, int tile) const {
    load_value(work, tile, 0);
    if constexpr (Config::kGeneral) {
      static_assert(Config::kStages == 1, "the bias is waited for between the two products");
      if (work.options.stages_bias) bias_tile().load(work.sequence, work.first_query, tile * kBlockN);
    }
  }

  __device__ __forceinline__ void query_fragments(int step, typename Products::A (&a)[kM]) const {
    const uint32_t s_lane = s_q + Products::lane_a(lane);
#pragma unroll
    for (int m = 0; m < kM; ++m) Products::load_a(a[m], s_lane, warp_row + 16 * m, step);
  }

  /// S = Q K^T
  __device__ __forceinline__ void multiply_qk(Scores& s) const {
    const uint32_t s_lane = stage(s_k, 0) + Products::lane_b(lane);
    for_each_score(s, [](float& x, int, int, int) { x = 0.0f; });
#pragma unroll kUnroll
    for (int step = 0; step < kSteps; ++step) {
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

  /// Makes the maximum so far the reference of each row.
  __device__ __forceinline__ void raise_reference(const Scores& s, bool first) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = -INFINITY;
#pragma unroll
        for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float raised = fmaxf(reference[m][r], largest * work.scale);
        const float factor = raised == -INFINITY ? 1.0f : ptx::exp2_approx(reference[m][r] - raised);
        reference[m][r] = raised;
        if (first) continue;
        row_sum[m][r] *= factor;
#pragma unroll
        for (int d = 0; d < kD; ++d) {
          out[m][d][2 * r] *= factor;
          out[m][d][2 * r + 1] *= factor;
        }
      }
  }

  /// P in place of S, and its share of the row sums.
  __device__ __forceinline__ void exponentiate(Scores& s) {
    const float scale = work.scale;
    float sum[kM][2], largest = 0.0f;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float shift = reference[m][r] == -INFINITY ? 0.0f : reference[m][r];
        sum[m][r] = 0.0f;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float x = ptx::exp2_approx(fmaf(s[m][n][2 * r + c], scale, -shift));
            s[m][n][2 * r + c] = x;
            sum[m][r] += x;
          }
        row_sum[m][r] += sum[m][r];
        largest = fmaxf(largest, sum[m][r]);
      }
    if (!Config::kRunningMaximum && __any_sync(~0u, largest > Config::kSumLimit)) lower(s, sum);
  }

  /// Takes the exponent of sums beyond the limit into the reference, as long as a power of 2 can undo it. Else the
  /// row sum becomes Inf, which shows in the end.
  __device__ __forceinline__ void lower(Scores& s, const float (&sum)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = fmaxf(sum[m][r], __shfl_xor_sync(~0u, sum[m][r], 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const bool beyond = largest > Config::kSumLimit && largest < 0x1p120f;
        const float exponent = beyond ? floorf(log2f(largest)) : 0.0f;
        const float factor = ptx::exp2_approx(-exponent);
        reference[m][r] += exponent;
        row_sum[m][r] = largest >= 0x1p120f ? INFINITY : row_sum[m][r] * factor;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          s[m][n][2 * r] *= factor;
          s[m][n][2 * r + 1] *= factor;
        }
#pragma unroll
        for (int d = 0; d < kD; ++d) {
          out[m][d][2 * r] *= factor;
          out[m][d][2 * r + 1] *= factor;
        }
      }
  }

  __device__ __forceinline__ uint32_t* visibility(int steps_ahead) const {
    return s_words + ((phase + steps_ahead) & 1) * (Config::kVisibilityBytes / 4);
  }

  __device__ __forceinline__ void hide_by_words(Scores& s) const {
    const uint32_t* words = visibility(0) + (warp_row + lane / 4) * (kBlockN / 32);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int g = 0; g < kBlockN / 32; ++g) {
          const uint32_t word = words[(16 * m + 8 * r) * (kBlockN / 32) + g] >> (2 * (lane % 4));
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
              if (!(word >> (8 * n + c) & 1u)) s[m][4 * g + n][2 * r + c] = -INFINITY;
        }
  }

  /// Products to base-2 scores; hiding comes after.
  __device__ __forceinline__ void apply_options(Scores& s, int tile) const {
    if constexpr (Config::kGeneral) {
      const auto& rules = work.options.rules;
      rules.scale_and_cap(s);
      rules.add_alibi(s, coordinates(tile));
      if (work.options.stages_bias) {
        bias_tile().add(s, warp_row + lane / 4, 2 * (lane % 4));
      } else if (rules.bias.present()) {
        rules.add_bias(s, coordinates(tile));
      }
    }
  }

  __device__ __forceinline__ BiasTile<kThreads, kBlockM, kBlockN> bias_tile() const {
    return {s_q + Config::kSharedBytes, p.bias};
  }

  __device__ __forceinline__ bool some_row_without_reference() const {
    bool missing = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) missing |= reference[m][0] == -INFINITY || reference[m][1] == -INFINITY;
    return __any_sync(~0u, missing);
  }

  /// Loads do not move up past it: ptxas would load more fragments ahead than it has registers for.
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
        for (int m = 0; m < kM; ++m) Products::multiply(out[m][d], out[m][d + 1], a[m], b);
        if constexpr (Config::kFenced) fence_loads(d);
      }
    }
  }

  __device__ __forceinline__ void begin_step(int tile, int next) const {
    ptx::cp_async_wait<0>();
    __syncthreads();
    if constexpr (Config::kStages == 1) {
      load_value_and_bias(work, tile);
    } else {
      prefetch(work, next);
    }
    ptx::cp_async_commit();
  }

  /// The first step finds its tiles under way: see begin().
  __device__ __forceinline__ void begin_first_step(int next) const {
    ptx::cp_async_wait<1>();
    __syncthreads();
    if constexpr (Config::kStages > 1) prefetch(work, next);
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void prefetch(const ForwardWork<Config>& work, int next) const {
    if (next < work.tiles.begin) return;
    load_key(work, next, 1);
    if constexpr (Config::kStages > 1) load_value(work, next, 1);
  }

  /// Q K(n)^T is done.
  __device__ __forceinline__ void release_key(int next) const {
    if constexpr (Config::kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      prefetch(work, next);
      ptx::cp_async_commit();
    }
  }

  __device__ __forceinline__ void finish_step(Scores& s, int tile) {
    if constexpr (Config::kGeneral) {
      if (work.options.dropout.active) work.options.dropout.drop(s, coordinates(tile));
    }
    multiply_pv(s);
    phase ^= 1;
  }

  /// The next tile to visit, from `tile` down: that is, in which the masks leave something.
  __device__ __forceinline__ MaskedTile find(int tile, int steps_ahead) const {
    if constexpr (Config::kGeneral) {
      if (p.mask.data || p.blocks.offsets) {
        const Sequence& sequence = work.sequence;
        for (; tile >= work.tiles.begin; --tile) {
          const TileVisibility visible = build_visibility<kThreads, kBlockM, kBlockN>(
              visibility(steps_ahead), MaskRows(p.mask, sequence), BlockMaskRows(p.blocks, sequence), work.first_query,
              tile * kBlockN, sequence.seqlen_q, sequence.seqlen_k);
          if (visible.any) return {tile, !visible.all};
        }
      }
    }
    return {tile, false};
  }

  /// A tile that every row sees, and whose scores the references are good for.
  __device__ __forceinline__ void full_step(int tile, int next) {
    begin_step(tile, next);
    Scores s;
    multiply_qk(s);
    release_key(next);
    exponentiate(s);
    finish_step(s, tile);
  }

  /// Any tile. True if the next step has to raise references too, as some row has none.
  __device__ __forceinline__ bool partial_step(int tile, int next, bool partly_masked, bool first) {
    first ? begin_first_step(next) : begin_step(tile, next);
    Scores s;
    multiply_qk(s);
    release_key(next);
    apply_options(s, tile);
    const bool outside_window = tile < work.tiles.full_begin || tile >= work.tiles.full_end;
    if (outside_window) hide_outside_window(s, coordinates(tile), work.sequence);
    if constexpr (Config::kGeneral) {
      if (partly_masked) hide_by_words(s);
    }
    raise_reference(s, first);
    const bool exact = some_row_without_reference();
    exponentiate(s);
    if (Config::kStages > 1 && first) ptx::cp_async_wait<1>();
    const bool hidden = outside_window || partly_masked;
    if (hidden && take_out_non_finite<Element, kHeadDim, kThreads, kBlockN>(stage(s_v, 0))) work.met_non_finite = true;
    if (hidden || (Config::kStages > 1 && first)) __syncthreads();
    finish_step(s, tile);
    return exact;
  }

  /// Q, and the first tiles of K and V, which do not have to wait for anybody.
  __device__ __forceinline__ void begin(const ForwardWork<Config>& work, int tile) {
    if (tile < work.tiles.begin) return;
    load_query(work);
    load_key(work, tile, 0);
    ptx::cp_async_commit();
    load_value_and_bias(work, tile);
    ptx::cp_async_commit();
    if constexpr (Config::kQueryInRegisters) {
      ptx::cp_async_wait<1>();
      __syncthreads();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) query_fragments(step, r_q[step]);
    }
  }

  /// All tiles. `always_exact`: with the running maximum; `begun`: the first loads are under way. Warps may differ in
  /// what step they take: either has the same barriers.
  __device__ __forceinline__ void visit(bool always_exact, bool begun) {
    MaskedTile at = find(work.tiles.end - 1, 0), next = find(at.tile - 1, 1);
    if (!begun) begin(work, at.tile);
    bool exact = true, first = true;
#pragma unroll 1
    while (at.tile >= work.tiles.begin) {
      if (!Config::kRunningMaximum && !exact && at.tile >= work.tiles.full_begin && at.tile < work.tiles.full_end) {
        full_step(at.tile, next.tile);
      } else {
        exact = partial_step(at.tile, next.tile, at.partly, first) || always_exact;
        first = false;
      }
      at = next;
      next = find(at.tile - 1, 1);
    }
  }

  __device__ __forceinline__ bool overflowed() const {
    bool overflow = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) overflow |= !(row_sum[m][0] < INFINITY && row_sum[m][1] < INFINITY);
    return __syncthreads_or(overflow);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        reference[m][r] = -INFINITY;
        row_sum[m][r] = 0.0f;
      }
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][d][e] = 0.0f;
    }
  }

  __device__ __forceinline__ void run(bool begun) {
    bool always_exact = false;
#pragma unroll 1
    do {
      clear();
      visit(always_exact, begun);
      always_exact = !Config::kRunningMaximum && overflowed() && !always_exact;
      begun = false;
      phase = 0;
    } while (always_exact);
    store();
  }

  /// Normalises the rows; out goes through the warp's own rows of Q in shared memory, so that it leaves in 16-byte
  /// pieces.
  __device__ __forceinline__ void store() {
    const Sequence& sequence = work.sequence;
    const int first_query = work.first_query;
    __syncwarp();
    const float sink = p.sink ? static_cast<const float*>(p.sink)[sequence.head] : -INFINITY;
    float keep_scale = 1.0f;
    if constexpr (Config::kGeneral) keep_scale = work.options.dropout.keep_scale;
    float* g_lse = static_cast<float*>(p.lse.data) + sequence.lse_offset(p.lse);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = row_sum[m][r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const RowEnd end = finish_row(reference[m][r], sum, sink);
        const int row = warp_row + 16 * m + 8 * r + lane / 4;
        if (lane % 4 == 0 && first_query + row < sequence.seqlen_q) g_lse[first_query + row] = end.lse;
        const float factor = end.scale * keep_scale;
#pragma unroll
        for (int d = 0; d < kD; ++d)
          Products::store_pair(s_q + Products::pair_at(row, d, lane), out[m][d][2 * r] * factor,
                               out[m][d][2 * r + 1] * factor);
      }
    __syncwarp();
    const auto rows = query_rows<Element>(p.out, sequence);
    store_rows<Element, kHeadDim>(s_q, rows, warp_row, Config::kWarpRows, first_query, sequence.seqlen_q,
                                  static_cast<int>(p.head_dim_v), lane);
    __syncthreads();  // out is written
    if (work.met_non_finite) {
      add_non_finite<Element, kThreads>(p, sequence, rows, work.values, first_query,
                                        min(first_query + kBlockM, sequence.seqlen_q), work.tiles.begin * kBlockN,
                                        min(work.tiles.end * kBlockN, sequence.seqlen_k));
    }
  }
};

/// Heads of q whose blocks run side by side, and how many such groups make up the heads; whether shared memory has room
/// for a tile of the bias.
struct ForwardSchedule {
  int heads, groups;
  bool stages_bias;
};

/// A grid of (heads of a group, blocks of queries, batch entries x groups), scheduled in this order: the blocks with
/// the most keys first, which balances a causal mask, and of no more heads than whose keys stay in L2.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    forward_kernel(const __grid_constant__ ForwardParams p, ForwardSchedule schedule) {
  extern __shared__ __align__(128) char shared[];
  const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Config::kBlockM;
  int batch = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.x);
  if (schedule.groups > 1) {
    head += batch % schedule.groups * schedule.heads;
    batch /= schedule.groups;
    if (head >= static_cast<int>(p.heads_q)) return;
  }
  const ForwardWork<Config> work(p, batch, head, first_query, schedule.stages_bias);
  if (first_query >= work.sequence.seqlen_q) return;
  auto* const s_work = reinterpret_cast<ForwardWork<Config>*>(shared + Config::kTilesBytes);
  if (threadIdx.x == 0) new (s_work) ForwardWork<Config>(work);
  ForwardBlock<Config> block(p, *s_work, shared);
  constexpr bool kBegin = !Config::kGeneral;  // there a mask may leave nothing of the first tiles
  if (kBegin) block.begin(work, work.tiles.end - 1);
  __syncthreads();
  block.run(kBegin);
}

inline ForwardSchedule schedule_heads(const ForwardParams& p, int64_t element_bytes) {
  constexpr int64_t kKeyBytesInL2 = 24 << 20, kMaxGridZ = 65535;
  const int64_t key_bytes = std::max<int64_t>(1, p.seqlen_k * (p.head_dim + p.head_dim_v) * element_bytes);
  const int64_t group = p.heads_q / p.heads_kv;
  const int64_t fitting = std::clamp<int64_t>(kKeyBytesInL2 / key_bytes * group, group, p.heads_q);
  const bool few_groups = p.batch * ((p.heads_q + fitting - 1) / fitting) <= kMaxGridZ;
  const int64_t heads = few_groups ? fitting : p.heads_q;
  return {static_cast<int>(heads), static_cast<int>((p.heads_q + heads - 1) / heads), false};
}

template <class Config>
void launch_forward(const ForwardParams& p, cudaStream_t stream) {
  using Bias = BiasTile<Config::kThreads, Config::kBlockM, Config::kBlockN>;
  ForwardSchedule schedule = schedule_heads(p, sizeof(typename Config::Element));
  size_t shared_bytes = Config::kSharedBytes;
  if (Config::kGeneral && can_stage_bias(p.bias)) {
    const int64_t wanted = Config::kSharedBytes + Bias::bytes(p.bias);
    schedule.stages_bias = wanted <= shared_bytes_per_block();
    if (schedule.stages_bias) shared_bytes = wanted;
  }
  const auto size = [](int64_t n) { return static_cast<unsigned>(n); };
  const dim3 grid(size(schedule.heads), size((p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM),
                  size(p.batch * schedule.groups));
  launch("sm80/forward", forward_kernel<Config>, {grid, dim3(Config::kThreads), shared_bytes}, stream, p, schedule);
}

/// Whether scores are scaled products within a window, of keys in one piece.
inline bool is_plain(const AttentionParams& p) {
  const SequenceParams& s = p.seq;
  const bool plain_scores =
      static_cast<float>(p.softmax_scale) > 0.0f && p.softcap == 0 && !p.alibi_slopes && !p.bias.data;
  const bool plain_visibility = !p.mask.data && !p.blocks.offsets && p.dropout.p == 0;
  return plain_scores && plain_visibility && !s.block_table;
}

template <class Element, int kHeadDim, bool kSmall>
void run_forward_as(const ForwardParams& p, cudaStream_t stream) {
  is_plain(p) ? launch_forward<ForwardConfig<Element, kHeadDim, false, kSmall>>(p, stream)
              : launch_forward<ForwardConfig<Element, kHeadDim, true, kSmall>>(p, stream);
}

/// At head dim 256 two blocks of 64 queries on an SM beat one of 128, where an SM has the shared memory for them.
template <class Element, int kHeadDim>
void run_forward(const ForwardParams& p, cudaStream_t stream) {
  using Large = ForwardConfig<Element, kHeadDim, true, false>;
  using Small = ForwardConfig<Element, kHeadDim, true, true>;
  if constexpr (Large::kSharedBytes <= kSmallestSharedBytes) {
    run_forward_as<Element, kHeadDim, false>(p, stream);
  } else {
    const bool large_fits = shared_bytes_per_block() >= Large::kSharedBytes;
    const bool two_small_fit = shared_bytes_per_sm() >= 2 * (Small::kSharedBytes + kReservedSharedBytes);
    large_fits && !two_small_fit ? run_forward_as<Element, kHeadDim, false>(p, stream)
                                 : run_forward_as<Element, kHeadDim, true>(p, stream);
  }
}

}  // namespace flash_ext::sm80
