// The steps of the pipelined loop: the query tiles that a CTA loops over, with the stages of their Q and dO.
#pragma once

#include <type_traits>

#include "kernels/ptx/uniform.h"
#include "scheduler.cuh"

namespace flash_ext::sm90 {

/// Slots for the metadata of found steps: one more than stages of Q. That of step m + 2 is written when dS of step m is
/// complete. By then dQ's warps have released dS of m - 2, and so have read its metadata, but they may not have begun
/// m - 1.
constexpr int kMetadataSlots = 4;

/// The query tiles that a CTA loops over, with the stage of their Q and dO. They are kept in uniform registers, from
/// which TMA takes its operands.
template <class Config>
struct BackwardPipelinedSteps {
  static constexpr bool kAlways = Config::kTurns == TurnTaking::kAlways;

  // past: the tile after the last one of which all queries are computed; last: the last tile of a head, without turns
  const int first, past, last, stride, first_head, end_head;
  int head, tile, left;
  uint32_t stage = 0, parity = 0;
  uint32_t count = 0;  // of steps before

  template <class Storage>
  __device__ __forceinline__ explicit BackwardPipelinedSteps(const Storage& storage)
      : BackwardPipelinedSteps(storage.work_tile) {}
  __device__ __forceinline__ explicit BackwardPipelinedSteps(const BackwardWorkTile<Config>& work_tile)
      : first(ptx::uniform(work_tile.order.first)),
        past(ptx::uniform(work_tile.order.past - has_tail(work_tile))),
        last(ptx::uniform(work_tile.order.past - 1)),
        stride(stride_of(work_tile)),
        first_head(ptx::uniform(work_tile.sequence.head)),
        end_head(ptx::uniform(work_tile.sequence.head + work_tile.heads)),
        head(first_head),
        tile(first),
        left(ptx::uniform(work_tile.heads * (work_tile.tiles.end - work_tile.tiles.begin - has_tail(work_tile)))) {}

  __device__ __forceinline__ static bool has_tail(const BackwardWorkTile<Config>& work_tile) {
    return work_tile.tail_queries > 0;
  }
  /// Begins the last tiles of all heads, of which few queries are computed. They come after all other steps.
  __device__ __forceinline__ void begin_tails(const BackwardWorkTile<Config>& work_tile) {
    left = ptx::uniform(work_tile.heads);
    tile = past, head = first_head;
  }
  __device__ __forceinline__ void advance_to_next_tail() {
    ++head;
    advance_stage();
  }

  __device__ __forceinline__ static int stride_of(const BackwardWorkTile<Config>& work_tile) {
    if (Config::kTurns == TurnTaking::kIfAsked) return ptx::uniform(work_tile.order.stride);
    return kAlways ? -1 : 1;
  }

  /// The stage of dO and D.
  __device__ __forceinline__ uint32_t grad_stage() const { return Config::kBiased ? count % 2 : stage; }
  __device__ __forceinline__ uint32_t grad_parity() const { return Config::kBiased ? count / 2 % 2 : parity; }
  __device__ __forceinline__ bool takes_turns() const {
    return kAlways || (Config::kTurns == TurnTaking::kIfAsked && stride < 0);
  }
  __device__ __forceinline__ bool is_past_end() const { return left <= 0; }
  __device__ __forceinline__ void advance() {
    if (takes_turns()) {
      if (++head == end_head) head = first_head, tile += stride;
    } else {
      tile += stride;
      if (tile == past) tile = first, ++head;
    }
    advance_stage();
  }

 private:
  __device__ __forceinline__ void advance_stage() {
    --left;
    ++count;
    if (++stage == Config::kStages) stage = 0, parity ^= 1;
  }
};

/// Steps of which only the number is known in advance: metadata says which tiles they are.
template <class Config>
struct BackwardCountedSteps {
  int left;
  uint32_t stage = 0, parity = 0;

  __device__ __forceinline__ uint32_t grad_stage() const { return stage; }
  __device__ __forceinline__ uint32_t grad_parity() const { return parity; }
  __device__ __forceinline__ bool is_past_end() const { return left <= 0; }
  __device__ __forceinline__ void advance() {
    --left;
    if (++stage == Config::kStages) stage = 0, parity ^= 1;
  }

 protected:
  __device__ __forceinline__ explicit BackwardCountedSteps(int left) : left(left) {}
};
/// The same, with metadata in slots of its own.
template <class Config>
struct BackwardSlottedSteps : BackwardCountedSteps<Config> {
  uint32_t slot = 0;

  __device__ __forceinline__ void advance() {
    BackwardCountedSteps<Config>::advance();
    slot = (slot + 1) % kMetadataSlots;
  }

 protected:
  using BackwardCountedSteps<Config>::BackwardCountedSteps;
};

/// Steps of which a list names the tiles. The metadata of a step comes with its Q.
template <class Config>
struct BackwardListedSteps : BackwardCountedSteps<Config> {
  template <class Storage>
  __device__ __forceinline__ explicit BackwardListedSteps(const Storage& storage)
      : BackwardCountedSteps<Config>(ptx::uniform(storage.work_tile.tiles.end)) {}
};

/// Steps that are made of pieces of the list (pieces.cuh).
template <class Config>
struct BackwardPieceSteps : BackwardSlottedSteps<Config> {
  __device__ __forceinline__ explicit BackwardPieceSteps(const BackwardWorkTile<Config>& work_tile)
      : BackwardSlottedSteps<Config>(ptx::uniform(work_tile.tiles.end) / Config::kPieces) {}

  /// Begins the last step, if it lacks pieces.
  __device__ __forceinline__ void begin_tails(const BackwardWorkTile<Config>&) { this->left = 1; }
  __device__ __forceinline__ void advance_to_next_tail() { this->advance(); }

  __device__ __forceinline__ static int steps_of(int pieces) {
    return (pieces + Config::kPieces - 1) / Config::kPieces;
  }
};

/// Steps that a warp finds as it goes.
template <class Config>
struct BackwardFoundSteps : BackwardSlottedSteps<Config> {
  template <class Storage>
  __device__ __forceinline__ explicit BackwardFoundSteps(const Storage& storage)
      : BackwardSlottedSteps<Config>(ptx::uniform(storage.steps)) {}
};

template <class Config>
using BackwardStepsOf = std::conditional_t<
    Config::kListsBlocks,
    std::conditional_t<Config::kPersistent, BackwardPieceSteps<Config>, BackwardListedSteps<Config>>,
    std::conditional_t<Config::kFindsSteps, BackwardFoundSteps<Config>, BackwardPipelinedSteps<Config>>>;

}  // namespace flash_ext::sm90
