// Loads of keys, values and queries into shared memory: contiguous caches and paged ones alike, a row at a time.
#pragma once

#include "kernels/common/sequence.cuh"
#include "kernels/common/tile.cuh"
#include "kernels/ptx/cp_async.h"
#include "scheduler.cuh"

namespace flash_ext::sm80 {

/// The address of the row of a key. A lane looks up one row for its warp, a tile ahead of the copies, so that nothing
/// waits for the page table.
struct KeyLocation {
  int page = 0;
  int slot = -1;  // -1 = no such key
};

/// Copies tile after tile. Each warp of a team copies its share of the rows.
template <class Config>
class KeyProducer {
  using Element = typename Config::Element;
  using Layout = typename Config::Layout;
  static constexpr int kRows = Config::kBlockN / Config::kTeam;  // of a tile, by one warp
  static constexpr int kChunks = Layout::kChunks;
  static constexpr int kStepRows = kChunks < 32 ? 32 / kChunks : 1;  // that a warp copies at a time
  static constexpr int kStepChunks = kChunks < 32 ? kChunks : 32;

 public:
  __device__ __forceinline__ KeyProducer(const ForwardParams& p, const Sequence& sequence, int begin, int end,
                                         int team_warp, int lane)
      : p_(p),
        table_(p.seq.block_table ? p.seq.block_table + sequence.batch * p.seq.block_table_stride : nullptr),
        leftpad_(sequence.leftpad),
        end_(end),
        first_row_(team_warp * kRows),
        lane_(lane),
        copies_full_rows_(table_ == nullptr && p.head_dim == Config::kHeadDim && p.head_dim_v == Config::kHeadDim),
        tile_(begin + first_row_),
        next_(tile_ + lane % kRows) {
    k_ = head_of(p.k, sequence);
    v_ = head_of(p.v, sequence);
    look_up();
  }

  /// Loads K and V of the next tile, and moves on by `step` keys.
  __device__ __forceinline__ void load_next(uint32_t s_stage, int step) {
    if (copies_full_rows_ && tile_ + kRows <= end_) {
      copy_full_rows(s_stage, k_, p_.k.row_stride);
      copy_full_rows(s_stage + Config::kStageBytes / 2, v_, p_.v.row_stride);
      move_on(step);
      return;
    }
    const KeyLocation location = location_;
    const char* k_row = k_ + (location.page * p_.k.batch_stride + location.slot * p_.k.row_stride) * sizeof(Element);
    const char* v_row = v_ + (location.page * p_.v.batch_stride + location.slot * p_.v.row_stride) * sizeof(Element);
    const uint32_t existing = __ballot_sync(~0u, location.slot >= 0) >> lane_ / kStepChunks;
    move_on(step);
    copy_rows(s_stage, k_row, existing, static_cast<int>(p_.head_dim));
    copy_rows(s_stage + Config::kStageBytes / 2, v_row, existing, static_cast<int>(p_.head_dim_v));
  }

 private:
  __device__ __forceinline__ const char* head_of(const TensorView& view, const Sequence& sequence) const {
    int64_t offset = sequence.head_kv * view.head_stride;
    if (table_ == nullptr)
      offset += sequence.cache_row * view.batch_stride + (sequence.k_begin + sequence.leftpad) * view.row_stride;
    return static_cast<const char*>(view.data) + offset * static_cast<int64_t>(sizeof(Element));
  }

  __device__ __forceinline__ void move_on(int step) {
    tile_ += step;
    next_ += step;
    look_up();
  }

  __device__ __forceinline__ void look_up() {
    location_.slot = next_ < end_ ? next_ : -1;
    if (table_ && next_ < end_) {
      const uint32_t position = leftpad_ + next_, page_size = static_cast<uint32_t>(p_.seq.page_size);
      const uint32_t page = position / page_size;
      location_.slot = static_cast<int>(position - page * page_size);
      location_.page = min(max(table_[page], 0), static_cast<int>(p_.seq.num_pages) - 1);
    }
  }

  /// Copies rows in few instructions, in the common case: they all exist, lie at equal distances, and fill the tile's
  /// columns.
  __device__ __forceinline__ void copy_full_rows(uint32_t s_tile, const char* base, int64_t row_stride) {
    const int lane_row = lane_ / kStepChunks, lane_chunk = lane_ % kStepChunks;
    const int64_t row_bytes = row_stride * static_cast<int64_t>(sizeof(Element));
    const uint32_t s_lane = s_tile + Layout::at(first_row_ + lane_row, lane_chunk);
    const char* source = base + (tile_ + lane_row) * row_bytes + 16 * lane_chunk;
#pragma unroll
    for (int row = 0; row < kRows; row += kStepRows) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += kStepChunks)
        ptx::cp_async_16(at_row(s_lane, row) + chunk * 16, source + chunk * 16, true);
      source += kStepRows * row_bytes;
    }
  }

  /// The address `row` rows further down. Steps start at rows that are multiples of kStepRows, so adding them to the
  /// lane's row is an XOR within the swizzle.
  __device__ __forceinline__ static uint32_t at_row(uint32_t s_lane, int row) {
    return (s_lane ^ static_cast<uint32_t>((row & 7) << 4)) + row * Layout::kRowBytes;
  }

  /// Copies rows in all other cases. Each lane looks up one row and copies chunks of all rows. Rows that do not exist
  /// and columns beyond the tensor's become 0; their sources are not read.
  __device__ __forceinline__ void copy_rows(uint32_t s_tile, const char* my_row, uint32_t existing, int columns) {
    const int lane_row = lane_ / kStepChunks, lane_chunk = lane_ % kStepChunks;
    const uint32_t s_lane = s_tile + Layout::at(first_row_ + lane_row, lane_chunk);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += kStepChunks) {
      const uint32_t mine = Layout::kChunkElements * (chunk + lane_chunk) < columns ? existing : 0u;
#pragma unroll
      for (int row = 0; row < kRows; row += kStepRows) {
        const char* source =
            reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(my_row), row + lane_row));
        ptx::cp_async_16(at_row(s_lane, row) + chunk * 16, source + 16 * (chunk + lane_chunk), mine >> row & 1u);
      }
    }
  }

  const ForwardParams& p_;
  const int32_t* table_;
  const char* k_;
  const char* v_;
  int leftpad_, end_;
  int first_row_, lane_;
  bool copies_full_rows_;
  int tile_;  // the key of this warp's first row in the next tile
  int next_;  // the key of the row that this lane looks up, in the next tile
  KeyLocation location_;
};

/// Starts the copies of a tile's queries, with zeros in rows that it does not have. The whole CTA calls it.
template <class Config>
__device__ __forceinline__ void load_query(uint32_t s_q, const ForwardParams& p, const DecodeGrid& grid,
                                           const DecodeTile& tile) {
  using Element = typename Config::Element;
  using Layout = typename Config::Layout;
  const Sequence& sequence = tile.sequence;
  const auto rows = query_rows<Element>(p.q, sequence);
#pragma unroll 1
  for (int flat = threadIdx.x; flat < Config::kBlockM * Layout::kChunks; flat += Config::kThreads) {
    const int row = flat / Layout::kChunks, chunk = flat % Layout::kChunks;
    const bool valid = row < tile.rows && Layout::kChunkElements * chunk < p.head_dim;
    const int at = valid ? tile.first_row + row : 0, query = static_cast<int>(grid.group.quotient(at));
    const int head = at - query * static_cast<int>(grid.group.value);
    const Element* source = rows.row(query) + head * p.q.head_stride;
    ptx::cp_async_16(s_q + Layout::at(row, chunk), source + (valid ? Layout::kChunkElements * chunk : 0), valid);
  }
}

}  // namespace flash_ext::sm80
