// How float32 rows come to shared memory, as pieces of bfloat16 parts: of Q once, by the warpgroup that has the rows;
// of K and V through a ring, by a warpgroup of its own.
#pragma once

#include "kernels/ptx/tma.h"
#include "kernels/sm90/common/float_rows.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// What fills the ring: of each tile, from the last to the first, the pieces of K, then those of V.
template <class Config>
class ForwardF32LoaderBase {
 public:
  using State = ForwardF32State<Config>;
  using Work = ForwardF32Work<Config>;

  /// Takes up works, as one thread of the block, and calls load(work) for each.
  template <class Load>
  __device__ __forceinline__ void for_each_work(const ForwardSchedule& schedule, Load load) {
    ForwardF32Queue<Config> queue(state_);
#pragma unroll 1
    while (true) {
      if (threadIdx.x == 0) queue.push(p_, schedule);
      __syncwarp();
      Work* const work = queue.front();
      if (!work) return;
      load(*work);
      queue.pop(lane_);
    }
  }

 protected:
  __device__ __forceinline__ ForwardF32LoaderBase(const ForwardParams& p, State& state, char* s_ring, int thread)
      : p_(p), state_(state), s_ring_(s_ring), lane_(thread % 32) {}

  __device__ __forceinline__ char* place() const { return s_ring_ + ring_.stage() * Config::kStageBytes; }

  __device__ __forceinline__ void wait_for_place() const {
    ptx::mbarrier_wait(ptx::shared_address(&state_.empty[ring_.stage()]), ring_.parity() ^ 1);
  }

  __device__ __forceinline__ void hand_over() {
    ptx::fence_proxy_async_shared();
    __syncwarp();  // what all lanes wrote comes before the arrival
    if (lane_ == 0) ptx::mbarrier_arrive(ptx::shared_address(&state_.full[ring_.stage()]));
    ring_.advance();
  }

  const ForwardParams& p_;
  State& state_;
  char* const s_ring_;
  const int lane_;
  RingPosition<Config::kStages> ring_;
};

/// Pieces of 64 rows: the next one is on its way to registers.
template <class Config>
class ForwardF32Loader : public ForwardF32LoaderBase<Config> {
  using Base = ForwardF32LoaderBase<Config>;

 public:
  using typename Base::State;
  static constexpr int kOctets = PieceThread::kOctets;

  __device__ __forceinline__ ForwardF32Loader(const ForwardParams& p, State& state, char* s_ring, int thread)
      : Base(p, state, s_ring, thread), at_(thread) {}

  __device__ __forceinline__ void run(const ForwardSchedule& schedule) {
    Base::for_each_work(schedule, [&](Work& work) { load_keys(work); });
  }

 private:
  using Base::p_;
  using typename Base::Work;

  __device__ __forceinline__ void load_keys(Work& work) {
    const TileSpan tiles = work.tiles;
    const int seqlen_k = work.sequence.seqlen_k;
    int tile = tiles.end - 1;
    if (tile < tiles.begin) return;
    const Source keys = source(key_rows<float, false>(p_, p_.k, work.sequence), p_.head_dim);
    const Source values = source(key_rows<float, false>(p_, p_.v, work.sequence), p_.head_dim_v);
    FloatOctet x[kOctets];
    load(x, keys, 0, tile, seqlen_k);
#pragma unroll 1
    for (; tile >= tiles.begin; --tile) {
      const bool partial = tile < tiles.full_begin || tile >= tiles.full_end;
#pragma unroll 1
      for (int piece = 0; piece < 2 * Config::kPanels; ++piece) {
        constexpr int kLast = 2 * Config::kPanels - 1;
        const int next = piece == kLast ? 0 : piece + 1, next_tile = piece == kLast ? tile - 1 : tile;
        const bool is_value = piece >= Config::kPanels, next_is_value = next >= Config::kPanels;
        const int rows = next_tile < tiles.begin ? INT32_MIN : seqlen_k;  // rows before 0 are none either
        const bool met = pass_on(x, choose(next_is_value, values, keys), next % Config::kPanels, next_tile, rows,
                                 is_value && partial);
        if (met) work.met_non_finite = true;
        Base::hand_over();
      }
    }
  }

  /// Rows of K or V, from the thread's first octet on.
  struct Source {
    const float* first;
    int64_t row_stride;
    int columns;  // behind the thread's first
  };

  template <class Rows>
  __device__ __forceinline__ Source source(const Rows& rows, int64_t columns) const {
    return {rows.row(at_.row) + at_.column, rows.row_stride, static_cast<int>(columns) - at_.column};
  }

  /// By value, as a reference would put both into local memory.
  __device__ __forceinline__ static Source choose(bool first, const Source& a, const Source& b) {
    return {first ? a.first : b.first, first ? a.row_stride : b.row_stride, first ? a.columns : b.columns};
  }

  __device__ __forceinline__ FloatOctet load(const Source& source, int panel, int tile, int num_rows, int octet) const {
    const int row = tile * Config::kBlockN + octet * PieceThread::kRowStep;
    const bool valid = at_.row + row < num_rows && panel * kPanelColumns < source.columns;
    return FloatOctet::load(source.first + row * source.row_stride + panel * kPanelColumns, valid);
  }

  __device__ __forceinline__ void load(FloatOctet (&x)[kOctets], const Source& source, int panel, int tile,
                                       int num_rows) const {
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) x[octet] = load(source, panel, tile, num_rows, octet);
  }

  /// A piece that is in registers to the ring; the next one then comes to registers. Whether Inf or NaN was taken out.
  __device__ __forceinline__ bool pass_on(FloatOctet (&x)[kOctets], const Source& next, int panel, int tile,
                                          int num_rows, bool may_be_hidden) const {
    char* const s_piece = Base::place();
    __nv_bfloat162 trace = __float2bfloat162_rn(0.0f);
    Base::wait_for_place();
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      const FloatOctet current = x[octet];
      x[octet] = load(next, panel, tile, num_rows, octet);
      at_.store(s_piece, octet, current, trace);
    }
    const bool met = may_be_hidden && is_nan(trace);
    if (met) at_.take_out_non_finite(s_piece);
    return met;
  }

  const PieceThread at_;
};

/// Pieces of 32 rows, which are done with so soon that several must be under way: half of those of a tile of K, or of
/// V. A thread has one row of the tile.
template <class Config>
class ForwardF32RowLoader : public ForwardF32LoaderBase<Config> {
  using Base = ForwardF32LoaderBase<Config>;

 public:
  using typename Base::State;
  static constexpr int kAhead = Config::kPieces / 2;
  static_assert(Config::kPieces % 2 == 0);

  __device__ __forceinline__ ForwardF32RowLoader(const ForwardParams& p, State& state, char* s_ring, int thread)
      : Base(p, state, s_ring, thread), at_(thread) {}

  __device__ __forceinline__ void run(const ForwardSchedule& schedule) {
    Base::for_each_work(schedule, [&](Work& work) { load_keys(work); });
  }

 private:
  using Base::p_;
  using typename Base::Work;

  /// From the thread's first column on.
  struct Row {
    const float* first;
    int columns;  // 0: not a row of the sequence
  };

  __device__ __forceinline__ Row row_of(const Work& work, const TensorView& view, int64_t columns, int tile) const {
    const int row = tile * Config::kBlockN + at_.row;
    const bool exists = tile >= work.tiles.begin && row < work.sequence.seqlen_k;
    return {key_rows<float, false>(p_, view, work.sequence).row(row) + at_.column,
            exists ? static_cast<int>(columns) - at_.column : 0};
  }
  __device__ __forceinline__ Row key_row(const Work& work, int tile) const {
    return row_of(work, p_.k, p_.head_dim, tile);
  }
  __device__ __forceinline__ Row value_row(const Work& work, int tile) const {
    return row_of(work, p_.v, p_.head_dim_v, tile);
  }

  __device__ __forceinline__ static FloatOctet load(const Row& row, int piece) {
    const int column = piece * Config::kBlockN;
    return FloatOctet::load(row.first + column, column < row.columns);
  }

  __device__ __forceinline__ void load_keys(Work& work) {
    int tile = work.tiles.end - 1;
    if (tile < work.tiles.begin) return;
    Row row = key_row(work, tile);
    FloatOctet x[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) x[k] = load(row, k);
#pragma unroll 1
    for (; tile >= work.tiles.begin; --tile) {
      const bool partial = tile < work.tiles.full_begin || tile >= work.tiles.full_end;
#pragma unroll 1
      for (int is_value = 0; is_value < 2; ++is_value) {
        pass_on(x, row, kAhead, is_value && partial, work);
        row = is_value ? key_row(work, tile - 1) : value_row(work, tile);
        pass_on(x, row, 0, is_value && partial, work);
      }
    }
  }

  /// The pieces that are in registers to the ring; those of `next` from first_piece on then come to registers.
  __device__ __forceinline__ void pass_on(FloatOctet (&x)[kAhead], const Row& next, int first_piece, bool may_be_hidden,
                                          Work& work) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      __nv_bfloat162 trace = __float2bfloat162_rn(0.0f);
      char* const s_piece = Base::place();
      Base::wait_for_place();
      at_.store(s_piece, 0, x[k], trace);
      if (may_be_hidden && is_nan(trace)) {
        at_.take_out_non_finite(s_piece);
        work.met_non_finite = true;
      }
      x[k] = load(next, first_piece + k);  // not before the look at `trace`: registers are short
      Base::hand_over();
    }
  }

  const ThreadOfPiece<Config::kBlockN> at_;
};

}  // namespace flash_ext::sm90
