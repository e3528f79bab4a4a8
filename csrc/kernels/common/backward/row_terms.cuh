// Row terms, computed before the main kernel of the backward: D = rowsum(dO * O) - dlse, and lse in the unit of scores.
// From these, dsink = -sum exp(sink - lse) D. The kernel also zeroes counters of the main kernel, and the sums of dQ
// that the main kernel neither zeroes itself (dq_zeroing.cuh) nor stores in a first turn (turns.cuh).
#pragma once

#include <algorithm>

#include "kernels/common/sanitise.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"
#include "workspace.h"

namespace flash_ext {

constexpr int kRowTermThreads = 256;
static_assert(kRowTermThreads / 32 == kLargeParts, "each warp has a flag of a tile");
constexpr int kRowTermCtas = 4;  // of an SM at least: ptxas' own choice of registers spills

/// Dot product of 16-byte chunks.
template <class Element>
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  constexpr int kElements = 16 / sizeof(Element);
  const Element* const x = reinterpret_cast<const Element*>(&a);
  const Element* const y = reinterpret_cast<const Element*>(&b);
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kElements; ++k) sum = fmaf(static_cast<float>(x[k]), static_cast<float>(y[k]), sum);
  return sum;
}

template <class Element>
__device__ __forceinline__ bool is_finite(const uint4& chunk) {
  return !NonFinite<Element>::in_chunk(chunk);
}

struct RowTerms {
  float lse;          // in units of scores; inf where the row has no weights
  float minus_delta;  // dlse - rowsum(dO * O)
  bool large;         // the row has a LargeLse
};

/// Computes the row terms of a query. delta: rowsum(dO * O) - dlse; `finite`: dO is finite; lse: in natural units, -inf
/// outside of the sequence.
template <class Element>
__device__ __forceinline__ RowTerms row_terms_of(float delta, bool finite, float lse, bool sink_takes_all) {
  const bool weightless = lse == -INFINITY || (lse == INFINITY && sink_takes_all);
  // Sanitising removes Inf and NaN of dO from partial tiles. An lse of NaN makes all visible P NaN, so Inf and NaN
  // still reach the pairs that the query sees.
  const float of_scores = finite && lse != INFINITY ? lse * ScoreUnit<Element>::kPerNatural : NAN;
  const bool large = !ScoreUnit<Element>::kNatural && LargeLse::is(of_scores);
  const float taken_off = large ? of_scores - LargeLse::slack(of_scores) : of_scores;
  return {weightless ? INFINITY : taken_off, lse == -INFINITY ? 0.0f : -delta, large};
}

/// The position of a row's term in its tile. kPermuted: the terms of a lane's four queries of sixteen, 2 t, 2 t + 1,
/// 2 t + 8 and 2 t + 9, lie side by side, as a lane needs them for accumulators of a transposed tile.
template <bool kPermuted>
__device__ __forceinline__ int term_position(int row) {
  if constexpr (!kPermuted) return row;
  return (row & ~15) | (row & 6) << 1 | (row & 8) >> 2 | (row & 1);
}

/// The query tile that a CTA works on, of one head or several. CTAs are numbered by tiles of a sequence, heads, batch
/// entries; or, where tiles are numbered by rows, by these numbers and groups of heads. Finding the sequence of a
/// number takes as long as the rows of some heads, so several heads share the search.
struct RowTileOfCta {
  int tile, batch;  // tile: it may be below 0, or past the end of the sequence
  int first_head, end_head;

  /// Warp 0 searches; the result lies in shared memory, because the loop over heads has no registers to keep it.
  __device__ __forceinline__ static const volatile RowTileOfCta& find(const AttentionParams& p,
                                                                      const TileNumbers& numbers) {
    __shared__ RowTileOfCta s_found;
    if (threadIdx.x < 32) {
      const RowTileOfCta found = of_this(p, numbers);
      if (threadIdx.x == 0) s_found = found;
    }
    __syncthreads();
    return s_found;
  }
  static int64_t ctas(const AttentionParams& p, int block_m) {
    const TileNumbers numbers(p, WorkListSide::kQueries, block_m, p.heads_q);
    return numbers.count * (numbers.by_rows ? (p.heads_q + kHeadsOfNumber - 1) / kHeadsOfNumber : p.heads_q);
  }

 private:
  static constexpr int kHeadsOfNumber = 8;

  /// Finds the tile of this CTA. Called by a whole warp.
  __device__ __forceinline__ static RowTileOfCta of_this(const AttentionParams& p, const TileNumbers& numbers) {
    const unsigned heads = static_cast<unsigned>(p.heads_q);
    if (!numbers.by_rows) {
      const unsigned tiles = static_cast<unsigned>(numbers.tiles_of_longest), flat_head = blockIdx.x / tiles;
      const int head = static_cast<int>(flat_head % heads);
      return {static_cast<int>(blockIdx.x % tiles), static_cast<int>(flat_head / heads), head, head + 1};
    }
    const unsigned count = static_cast<unsigned>(numbers.count);
    RowTileOfCta found;
    found.first_head = static_cast<int>(blockIdx.x / count) * kHeadsOfNumber;
    found.end_head = min(found.first_head + kHeadsOfNumber, static_cast<int>(heads));
    numbers.find(p, blockIdx.x % count, found.batch, found.tile);
    return found;
  }
};

/// What a lane reads of a row of dO and O: chunks of 16 bytes, every kLanes-th one. Columns past the last are zero.
template <class Element, int kLanes, int kChunks>
struct RowChunks {
  uint4 grad_out[kChunks], out[kChunks];

  __device__ __forceinline__ void load(const Element* g_grad_out, const Element* g_out, int columns, int lane) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (lane + c * kLanes) * static_cast<int>(16 / sizeof(Element));
      grad_out[c] = out[c] = uint4{0, 0, 0, 0};
      if (column >= columns) continue;
      grad_out[c] = *reinterpret_cast<const uint4*>(g_grad_out + column);
      out[c] = *reinterpret_cast<const uint4*>(g_out + column);
    }
  }
  /// rowsum(dO * O), in all lanes of the row.
  __device__ __forceinline__ float sum() const {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) sum += dot<Element>(grad_out[c], out[c]);
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
  }
  /// Whether dO of the row is finite, in all lanes of the row.
  __device__ __forceinline__ bool is_finite() const {
    bool finite = true;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) finite &= flash_ext::is_finite<Element>(grad_out[c]);
    constexpr uint32_t kRow = ~0u >> (32 - kLanes);
    const uint32_t first_lane = threadIdx.x % 32 / kLanes * kLanes;
    return ((~__ballot_sync(~0u, finite) >> first_lane) & kRow) == 0;
  }
};

/// Zeroes the sums of dQ of a row, by kLanes lanes. kInPlanes: they lie as BackwardWorkspace::dq_of_plane says.
template <int kHeadDim, int kBlockM, int kLanes, bool kInPlanes>
__device__ __forceinline__ void zero_dq_row(const BackwardWorkspace& workspace, int64_t tile, int head, int row,
                                            int lane) {
  constexpr int kPlanes = kInPlanes ? kHeadDim / kDqPlaneColumns : 1, kColumns = kHeadDim / kPlanes;
  const int64_t plane = workspace.tiles_per_head * kBlockM * kColumns;
  float* const g_row = workspace.dq + (tile * kBlockM + row) * kColumns + head * (kPlanes - 1) * plane;
#pragma unroll
  for (int column = 4 * lane; column < kHeadDim; column += 4 * kLanes) {
    const int64_t offset = kInPlanes ? column / kColumns * plane + column % kColumns : column;
    *reinterpret_cast<float4*>(g_row + offset) = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
}

/// How a CTA divides the rows of a tile among its lanes.
template <class Element, int kHeadDim>
struct RowLanes {
  static constexpr int kChunk = 16 / sizeof(Element);
  static constexpr int kLanes = kHeadDim / kChunk < 32 ? kHeadDim / kChunk : 32;  // that share a row
  static constexpr int kChunks = (kHeadDim / kChunk + kLanes - 1) / kLanes;       // of a lane
  static constexpr int kStride = kRowTermThreads / kLanes;                        // from a lane's row to its next one
  static_assert(kLanes * kChunks * kChunk >= kHeadDim);
};

/// Looks for Inf and NaN of q in the columns and rows of a tile that a lane has. `first`: the tile's first query.
template <class Element, int kHeadDim, int kBlockM>
__device__ __forceinline__ void check_queries(const BackwardParams& p, const Sequence& sequence, int first,
                                              bool& finite) {
  using Lanes = RowLanes<Element, kHeadDim>;
  const int lane = threadIdx.x % Lanes::kLanes;
  const auto queries = query_rows<const Element>(p.q, sequence);
#pragma unroll 1
  for (int i = first + threadIdx.x / Lanes::kLanes; i < min(first + kBlockM, sequence.seqlen_q); i += Lanes::kStride)
    for (int d = lane * Lanes::kChunk; d < p.head_dim; d += Lanes::kLanes * Lanes::kChunk)
      finite &= is_finite<Element>(*reinterpret_cast<const uint4*>(queries.row(i) + d));
}

/// Of at most so many rows a lane reads chunks at once. With kRowTermCtas CTAs on an SM, enough is under way to keep
/// memory busy.
constexpr int kRowsAtOnce = 4;

/// Writes the row terms of a tile of a head, and zeroes its sums of dQ unless the main kernel sets them, by a CTA of
/// kRowTermThreads. kDqInPlanes: see zero_dq_row().
template <class Element, int kHeadDim, int kBlockM, bool kPermuted = false, bool kDqInPlanes = false>
__device__ __forceinline__ void write_row_terms(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                const volatile RowTileOfCta& cta, int head) {
  using Lanes = RowLanes<Element, kHeadDim>;
  constexpr int kLanes = Lanes::kLanes, kChunks = Lanes::kChunks, kStride = Lanes::kStride;
  constexpr int kAtOnce = std::min(kRowsAtOnce / kChunks, kBlockM / kStride);
  static_assert(kBlockM % kStride == 0 && kBlockM / kStride % kAtOnce == 0 && kAtOnce <= kLanes, "no row is left over");
  const int tile_of_cta = cta.tile, batch = cta.batch;
  const Sequence sequence(p, batch, head);
  const int first = tile_of_cta * kBlockM;
  if (workspace.ticket && blockIdx.x == 0 && threadIdx.x == 0) *workspace.ticket = 0;
  const int64_t tile = workspace.tile_index(p, batch, head, sequence.q_begin, tile_of_cta, kBlockM);
  // Where tiles are numbered by rows, the counters of all slots are zeroed, also of tiles that do not exist: whatever
  // cu_seqlens holds, no CTA waits for a turn that never comes.
  const bool exists = tile_of_cta >= 0 && first < sequence.seqlen_q;
  if (workspace.turns && (exists || workspace.row_tiles.by_rows) && threadIdx.x < kDqWarps)
    workspace.turns[tile * kDqWarps + threadIdx.x] = 0;
  if (!exists) return;

  const auto out = query_rows<const Element>(p.out, sequence);
  const auto grad_out = query_rows<const Element>(p.grad_out, sequence);
  const float* const g_lse = static_cast<const float*>(p.lse.data) + sequence.lse_offset(p.lse);
  const float* const g_grad_lse =
      p.grad_lse.data ? static_cast<const float*>(p.grad_lse.data) + sequence.lse_offset(p.grad_lse) : nullptr;
  const bool sink_takes_all = p.sink && static_cast<const float*>(p.sink)[head] == INFINITY;
  const int lane = threadIdx.x % kLanes, columns = p.grad_out.data ? static_cast<int>(p.head_dim_v) : 0;
  const int key_head = key_head_of_all(p.heads_kv, batch, sequence.head_kv);
  const bool is_stored_first =
      workspace.first_turns_store &&
      sequence.keys_begin(first) < sequence.keys_end(min(first + kBlockM, sequence.seqlen_q) - 1);
  const bool zeroes = workspace.dq && !workspace.zeroing.covers(key_head) && !is_stored_first;
  if (workspace.dq && tile_of_cta == 0 && threadIdx.x == 0)
    workspace.zeroing.zeroed_parts[key_head] = workspace.completion.finished_warps[key_head] = 0;
  bool all_finite = true, large = false;
#pragma unroll 1
  for (int row = threadIdx.x / kLanes; row < kBlockM; row += kAtOnce * kStride) {
    RowChunks<Element, kLanes, kChunks> chunks[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int i = first + row + r * kStride;
      chunks[r].load(grad_out.row(i), out.row(i), i < sequence.seqlen_q ? columns : 0, lane);
    }
    // Of the lanes that share rows, lane r has the terms of the r-th of these rows.
    const int own_row = row + lane * kStride;
    const bool inside = lane < kAtOnce && first + own_row < sequence.seqlen_q;
    const float lse = inside ? g_lse[first + own_row] : -INFINITY;
    float delta = inside && g_grad_lse ? -g_grad_lse[first + own_row] : 0.0f;
    bool finite = true;
    if (zeroes) {
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r)
        zero_dq_row<kHeadDim, kBlockM, kLanes, kDqInPlanes>(workspace, tile, head, row + r * kStride, lane);
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const float sum = chunks[r].sum();
      const bool finite_row = chunks[r].is_finite();
      all_finite &= finite_row;
      if (lane == r) delta += sum, finite = finite_row;
    }
    if (lane >= kAtOnce) continue;
    const RowTerms terms = row_terms_of<Element>(delta, finite, lse, sink_takes_all);
    const int64_t position = tile * kBlockM + term_position<kPermuted>(own_row);
    workspace.minus_delta[position] = terms.minus_delta / workspace.keep_scale;
    workspace.lse[position] = terms.lse;
    large |= terms.large;
  }
  if (workspace.large) {
    large = __any_sync(~0u, large);
    if (threadIdx.x % 32 == 0) workspace.large[tile * kLargeParts + threadIdx.x / 32] = large;
  }
  if (!workspace.has_non_finite) return;
  check_queries<Element, kHeadDim, kBlockM>(p, sequence, first, all_finite);
  const bool some_non_finite = __syncthreads_or(!all_finite);
  if (threadIdx.x == 0) workspace.has_non_finite[tile] = some_non_finite;
}

/// Writes the row terms. This kernel and the next are static, because sm90/ instantiates both for 90a alone: before
/// CUDA 13 the host's stubs of templates are weak, and other GPUs might get that image.
template <class Element, int kHeadDim, int kBlockM, bool kPermuted = false>
static __global__ void __launch_bounds__(kRowTermThreads, kRowTermCtas)
    backward_row_terms_kernel(const __grid_constant__ BackwardParams p, BackwardWorkspace workspace) {
  ptx::launch_dependents();
  const volatile RowTileOfCta& cta = RowTileOfCta::find(p, workspace.row_tiles);
#pragma unroll 1
  for (int head = cta.first_head; head < cta.end_head; ++head)
    write_row_terms<Element, kHeadDim, kBlockM, kPermuted>(p, workspace, cta, head);
}

/// Computes dsink: one CTA per head, which adds in a fixed order.
template <int kBlockM, bool kPermuted = false>
static __global__ void __launch_bounds__(kRowTermThreads)
    sink_gradient_kernel(const __grid_constant__ BackwardParams p, BackwardWorkspace workspace) {
  __shared__ double s_sums[kRowTermThreads];
  const int head = blockIdx.x;
  const float sink = static_cast<const float*>(p.sink)[head];
  double total = 0.0;
  for (int batch = 0; batch < p.batch; ++batch) {
    const Sequence sequence(p, batch, head);
    const float* const g_lse = static_cast<const float*>(p.lse.data) + sequence.lse_offset(p.lse);
    const int64_t first = workspace.tile_index(p, batch, head, sequence.q_begin, 0, kBlockM) * kBlockM;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < sequence.seqlen_q; i += kRowTermThreads) {
      if (g_lse[i] != -INFINITY)
        sum += expf(sink - g_lse[i]) * workspace.minus_delta[first + term_position<kPermuted>(i)];
    }
    total += sum;
  }
  s_sums[threadIdx.x] = total;
  for (int step = kRowTermThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) s_sums[threadIdx.x] += s_sums[threadIdx.x + step];
  }
  if (threadIdx.x == 0) static_cast<float*>(p.dsink)[head] = static_cast<float>(s_sums[0] * workspace.keep_scale);
}

}  // namespace flash_ext
