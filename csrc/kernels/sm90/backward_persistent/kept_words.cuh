// Which weights dropout keeps, in a persistent CTA: drawn by the warps that compute dQ, which wait for dS meanwhile, a
// step ahead of the consumers. These read the words of a step beside its scores, before they make its dS.
#pragma once

#include "kernels/common/dropout/random_bits.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// The position of a warp among the steps whose words are drawn. There is one slot of words for each consumer
/// warpgroup, and words, of nothing, for a step behind the last one of each tile of keys too.
template <class Config>
class BackwardKeptWordsDraw {
 public:
  using Storage = BackwardPersistentStorageOf<Config>;
  using WorkTile = BackwardWorkTile<Config>;

  /// Those of a tile of queries of a head: this warp's share.
  __device__ __forceinline__ void draw(const BackwardParams& p, Storage& storage, const WorkTile& work_tile, int head,
                                       int tile, int warp, int lane) {
    wait_for_slots(storage);
    RandomKey key = storage.key;
    key.seeds.seed_lo = __reduce_or_sync(~0u, key.seeds.seed_lo);
    key.seeds.seed_hi = __reduce_or_sync(~0u, key.seeds.seed_hi);
    key.seeds.offset_lo = __reduce_or_sync(~0u, key.seeds.offset_lo);
    key.batch_head = __reduce_or_sync(~0u, work_tile.sequence.batch * static_cast<uint32_t>(p.heads_q) + head);
    const int first_query = tile * Config::kBlockM + work_tile.skipped;
#pragma unroll 1
    for (int piece = warp; piece < Config::kGroups * kPieces; piece += kWarpgroupWarps) {
      const int group = piece / kPieces, word = piece % kPieces * 32 + lane;
      const int i = first_query + Words::query(word);
      const int j = work_tile.first_key + group * kWarpgroupRows + Words::key(word);
      const auto query = QueryRandomBits::of(key, dropout_query_group(i));
      const auto keys = KeyRandomBits::of(key, dropout_key_group(j));
      storage.kept[group][word] = draw_kept_weights(p.dropout.rule, key, query, keys);
    }
    arrive(storage, lane);
  }
  /// Those of a step that does not exist.
  __device__ __forceinline__ void pass(Storage& storage, int lane) {
    wait_for_slots(storage);
    arrive(storage, lane);
  }

 private:
  using Words = KeptTile<Config::kBlockM>;
  static constexpr int kPieces = Words::kWordsOfGroup / 32;
  static_assert(Words::kWordsOfGroup % 32 == 0, "a warp draws whole pieces");

  /// Until the consumers have read the words of the step before.
  __device__ __forceinline__ void wait_for_slots(const Storage& storage) const {
#pragma unroll
    for (int group = 0; group < Config::kGroups; ++group) wait_for(storage.kept_empty[group], (count_ & 1) ^ 1);
  }
  __device__ __forceinline__ void arrive(const Storage& storage, int lane) {
    __syncwarp();
#pragma unroll
    for (int group = 0; group < Config::kGroups; ++group) arrive_as_warp(storage.kept_full[group], lane);
    ++count_;
  }

  uint32_t count_ = 0;
};

}  // namespace flash_ext::sm90
