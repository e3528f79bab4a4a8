// The producer warpgroup of the float32 forward. It loads K and V into a ring, as subtiles of bfloat16 parts. Each
// consumer warpgroup loads its own Q, once per work tile (consumer.cuh).
#pragma once

#include "kernels/ptx/tma.h"
#include "kernels/sm90/common/float_rows.cuh"
#include "scheduler.cuh"

namespace flash_ext::sm90 {

/// Fills the ring: for each tile, from the last to the first, with the subtiles of K and then the subtiles of V.
template <class Config>
class ForwardF32ProducerBase {
 public:
  using Storage = ForwardF32Storage<Config>;
  using WorkTile = ForwardF32WorkTile<Config>;

  /// Calls load(work_tile) for each work tile. Thread 0 takes work tiles from the schedule.
  template <class Load>
  __device__ __forceinline__ void for_each_work_tile(const ForwardSchedule& schedule, Load load) {
    ForwardF32Queue<Config> queue(storage_);
#pragma unroll 1
    while (true) {
      if (threadIdx.x == 0) queue.push(p_, schedule);
      __syncwarp();
      WorkTile* const work_tile = queue.front();
      if (!work_tile) return;
      load(*work_tile);
      queue.pop(lane_);
    }
  }

 protected:
  __device__ __forceinline__ ForwardF32ProducerBase(const ForwardParams& p, Storage& storage, char* s_ring, int thread)
      : p_(p), storage_(storage), s_ring_(s_ring), lane_(thread % 32) {}

  __device__ __forceinline__ char* stage_address() const { return s_ring_ + ring_.stage() * Config::kStageBytes; }

  __device__ __forceinline__ void wait_for_slot() const {
    ptx::mbarrier_wait(ptx::shared_address(&storage_.empty[ring_.stage()]), ring_.parity() ^ 1);
  }

  __device__ __forceinline__ void publish() {
    ptx::fence_proxy_async_shared();
    __syncwarp();  // what all lanes wrote comes before the arrival
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&storage_.full[ring_.stage()]));
    ring_.advance();
  }

  const ForwardParams& p_;
  Storage& storage_;
  char* const s_ring_;
  const int lane_;
  RingPosition<Config::kStages> ring_;
};

/// The producer of subtiles of 64 rows. It loads the next subtile to registers while it splits one.
template <class Config>
class ForwardF32Producer : public ForwardF32ProducerBase<Config> {
  using Base = ForwardF32ProducerBase<Config>;

 public:
  using typename Base::Storage;
  static constexpr int kFloat8s = SubtileThread::kFloat8s;

  __device__ __forceinline__ ForwardF32Producer(const ForwardParams& p, Storage& storage, char* s_ring, int thread)
      : Base(p, storage, s_ring, thread), at_(thread) {}

  __device__ __forceinline__ void run(const ForwardSchedule& schedule) {
    Base::for_each_work_tile(schedule, [&](WorkTile& work_tile) { load_keys(work_tile); });
  }

 private:
  using Base::p_;
  using typename Base::WorkTile;

  __device__ __forceinline__ void load_keys(WorkTile& work_tile) {
    const TileSpan tiles = work_tile.tiles;
    const int seqlen_k = work_tile.sequence.seqlen_k;
    int tile = tiles.end - 1;
    if (tile < tiles.begin) return;
    const Source keys = source(key_rows<float, false>(p_, p_.k, work_tile.sequence), p_.head_dim);
    const Source values = source(key_rows<float, false>(p_, p_.v, work_tile.sequence), p_.head_dim_v);
    Float8 x[kFloat8s];
    load(x, keys, 0, tile, seqlen_k);
#pragma unroll 1
    for (; tile >= tiles.begin; --tile) {
      const bool partial = tile < tiles.full_begin || tile >= tiles.full_end;
#pragma unroll 1
      for (int subtile = 0; subtile < 2 * Config::kPanels; ++subtile) {
        constexpr int kLast = 2 * Config::kPanels - 1;
        const int next = subtile == kLast ? 0 : subtile + 1, next_tile = subtile == kLast ? tile - 1 : tile;
        const bool is_value = subtile >= Config::kPanels, next_is_value = next >= Config::kPanels;
        const int rows = next_tile < tiles.begin ? INT32_MIN : seqlen_k;  // no rows before 0
        const bool met = pass_on(x, choose(next_is_value, values, keys), next % Config::kPanels, next_tile, rows,
                                 is_value && partial);
        if (met) work_tile.met_non_finite = true;
        Base::publish();
      }
    }
  }

  /// Rows of K or V, from the thread's first eight floats on.
  struct Source {
    const float* first;
    int64_t row_stride;
    int columns;  // from the thread's first on
  };

  template <class Rows>
  __device__ __forceinline__ Source source(const Rows& rows, int64_t columns) const {
    return {rows.row(at_.row) + at_.column, rows.row_stride, static_cast<int>(columns) - at_.column};
  }

  /// Returns one of two sources, as a value: a reference would put both into local memory.
  __device__ __forceinline__ static Source choose(bool first, const Source& a, const Source& b) {
    return {first ? a.first : b.first, first ? a.row_stride : b.row_stride, first ? a.columns : b.columns};
  }

  __device__ __forceinline__ Float8 load(const Source& source, int panel, int tile, int num_rows,
                                         int float8_index) const {
    const int row = tile * Config::kBlockN + float8_index * SubtileThread::kRowStep;
    const bool valid = at_.row + row < num_rows && panel * kPanelColumns < source.columns;
    return Float8::load(source.first + row * source.row_stride + panel * kPanelColumns, valid);
  }

  __device__ __forceinline__ void load(Float8 (&x)[kFloat8s], const Source& source, int panel, int tile,
                                       int num_rows) const {
#pragma unroll
    for (int float8_index = 0; float8_index < kFloat8s; ++float8_index)
      x[float8_index] = load(source, panel, tile, num_rows, float8_index);
  }

  /// Splits the subtile in registers into the ring, and loads the next one to registers. Returns whether Inf or NaN was
  /// removed.
  __device__ __forceinline__ bool pass_on(Float8 (&x)[kFloat8s], const Source& next, int panel, int tile, int num_rows,
                                          bool may_be_hidden) const {
    char* const s_subtile = Base::stage_address();
    __nv_bfloat162 trace = __float2bfloat162_rn(0.0f);
    Base::wait_for_slot();
#pragma unroll
    for (int float8_index = 0; float8_index < kFloat8s; ++float8_index) {
      const Float8 current = x[float8_index];
      x[float8_index] = load(next, panel, tile, num_rows, float8_index);
      at_.store(s_subtile, float8_index, current, trace);
    }
    const bool met = may_be_hidden && is_nan(trace);
    if (met) at_.remove_non_finite(s_subtile);
    return met;
  }

  const SubtileThread at_;
};

/// The producer of subtiles of 32 rows. Consumers use them up so soon that loads of several must be in flight: half of
/// the subtiles of a tile of K, or of V. A thread has a part of one row of the tile.
template <class Config>
class ForwardF32RowProducer : public ForwardF32ProducerBase<Config> {
  using Base = ForwardF32ProducerBase<Config>;

 public:
  using typename Base::Storage;
  static constexpr int kAhead = Config::kKeySubtiles / 2;
  static_assert(Config::kKeySubtiles % 2 == 0);

  __device__ __forceinline__ ForwardF32RowProducer(const ForwardParams& p, Storage& storage, char* s_ring, int thread)
      : Base(p, storage, s_ring, thread), at_(thread) {}

  __device__ __forceinline__ void run(const ForwardSchedule& schedule) {
    Base::for_each_work_tile(schedule, [&](WorkTile& work_tile) { load_keys(work_tile); });
  }

 private:
  using Base::p_;
  using typename Base::WorkTile;

  /// A row of K or V, from the thread's first column on.
  struct Row {
    const float* first;
    int columns;  // 0: not a row of the sequence
  };

  __device__ __forceinline__ Row row_of(const WorkTile& work_tile, const TensorView& view, int64_t columns,
                                        int tile) const {
    const int row = tile * Config::kBlockN + at_.row;
    const bool exists = tile >= work_tile.tiles.begin && row < work_tile.sequence.seqlen_k;
    return {key_rows<float, false>(p_, view, work_tile.sequence).row(row) + at_.column,
            exists ? static_cast<int>(columns) - at_.column : 0};
  }
  __device__ __forceinline__ Row key_row(const WorkTile& work_tile, int tile) const {
    return row_of(work_tile, p_.k, p_.head_dim, tile);
  }
  __device__ __forceinline__ Row value_row(const WorkTile& work_tile, int tile) const {
    return row_of(work_tile, p_.v, p_.head_dim_v, tile);
  }

  __device__ __forceinline__ static Float8 load(const Row& row, int subtile) {
    const int column = subtile * Config::kBlockN;
    return Float8::load(row.first + column, column < row.columns);
  }

  __device__ __forceinline__ void load_keys(WorkTile& work_tile) {
    int tile = work_tile.tiles.end - 1;
    if (tile < work_tile.tiles.begin) return;
    Row row = key_row(work_tile, tile);
    Float8 x[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) x[k] = load(row, k);
#pragma unroll 1
    for (; tile >= work_tile.tiles.begin; --tile) {
      const bool partial = tile < work_tile.tiles.full_begin || tile >= work_tile.tiles.full_end;
#pragma unroll 1
      for (int is_value = 0; is_value < 2; ++is_value) {
        pass_on(x, row, kAhead, is_value && partial, work_tile);
        row = is_value ? key_row(work_tile, tile - 1) : value_row(work_tile, tile);
        pass_on(x, row, 0, is_value && partial, work_tile);
      }
    }
  }

  /// Splits the subtiles in registers into the ring, and loads subtiles of `next`, from first_subtile on, to registers.
  __device__ __forceinline__ void pass_on(Float8 (&x)[kAhead], const Row& next, int first_subtile, bool may_be_hidden,
                                          WorkTile& work_tile) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      __nv_bfloat162 trace = __float2bfloat162_rn(0.0f);
      char* const s_subtile = Base::stage_address();
      Base::wait_for_slot();
      at_.store(s_subtile, 0, x[k], trace);
      if (may_be_hidden && is_nan(trace)) {
        at_.remove_non_finite(s_subtile);
        work_tile.met_non_finite = true;
      }
      x[k] = load(next, first_subtile + k);  // only after the test of `trace`: registers are short
      Base::publish();
    }
  }

  const ThreadOfSubtile<Config::kBlockN> at_;
};

}  // namespace flash_ext::sm90
