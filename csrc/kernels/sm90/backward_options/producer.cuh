// The warpgroup that finds the steps, loads tiles and what options need of them, and computes dQ and adds it to memory.
#pragma once

#include "kernels/ptx/cp_async_barrier.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/sm90/common/backward/producer.cuh"
#include "scheduler.cuh"

namespace flash_ext::sm90 {

/// One warp of this warpgroup.
template <class Config>
class BackwardOptionsDq : BackwardProducer<Config, BackwardOptionsStorage<Config>> {
 public:
  using Storage = BackwardOptionsStorage<Config>;
  using Base = BackwardProducer<Config, Storage>;
  using Element = typename Config::Element;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kWarpgroups = Config::kWarpgroups;
  using KeyTile = TileDescriptor<kBlockN>;
  using DsTile = TileDescriptor<kBlockM>;
  static constexpr int kMetadataWarp = 1;                  // writes metadata of steps; warp 0 loads Q and dO
  static constexpr bool kFindsOverlapped = !Config::kAny;  // by a product; with all options ptxas lacks registers

  __device__ __forceinline__ BackwardOptionsDq(const BackwardParams& p, const BackwardMaps& maps,
                                               const CUtensorMap& bias_map, const BackwardWorkspace& workspace,
                                               const BackwardOptionsLayout& layout, Storage& storage, uint32_t s_tiles,
                                               int warp, int lane)
      : Base(p, maps, workspace, storage, s_tiles, warp, lane),
        keys_(KeyTile::lower_half(s_tiles)),
        ds_(DsTile::lower_half(s_tiles + Config::kDsOffset)),
        bias_map_(bias_map),
        layout_(layout) {}

  __device__ __forceinline__ void run() {
    BackwardOptionsSteps<Config> steps(workspace_, layout_, storage_, lane_);
    StepMetadata now = steps.next();
    if (is_past(now)) return by_threads() ? publish_metadata<true>(now, 0) : publish_metadata<false>(now, 0);
    StepMetadata next = steps.next();
    if (warp_ == 0) load_first(step_of(now), step_of(next));
    by_threads() ? prepare_first<true>(now, next) : prepare_first<false>(now, next);
#pragma unroll 1
    while (true) {
      StepMetadata after;
      if (!kFindsOverlapped || by_threads()) after = steps.next();
      if (by_threads()) {
        wait_for(storage_.ds_full[at_.stage()], at_.parity());
        prepare<true>(next, after);
      }
      add(step_of(now), [&] {
        if (by_threads()) return;
        if (kFindsOverlapped) after = steps.next();
        prepare<false>(next, after);
      });
      if (is_past(next)) break;
      if (warp_ == 0) this->load_in_place(step_of(after));
      at_.advance();
      now = next;
      next = after;
    }
    if (lane_ == 0) ptx::bulk_wait();
  }

 private:
  using Base::at_, Base::kPanels, Base::lane_, Base::maps_, Base::p_, Base::storage_, Base::warp_, Base::work_tile_,
      Base::workspace_;
  using typename Base::Sum;

  __device__ __forceinline__ static bool is_past(const StepMetadata& metadata) { return metadata.flags & kStepPast; }
  __device__ __forceinline__ static BackwardStep step_of(const StepMetadata& metadata) {
    return {metadata.head, metadata.tile};
  }
  __device__ __forceinline__ uint32_t after_storage(int offset) const {
    return ptx::shared_address(&storage_) + offset;
  }

  __device__ __forceinline__ Sequence sequence_of(const StepMetadata& metadata) const {
    Sequence sequence = work_tile_.sequence;
    sequence.head += metadata.head;
    return sequence;
  }

  /// Whether all threads load what comes with steps. They do so with registers for which a product that runs meanwhile
  /// leaves no room. Otherwise TMA loads it.
  __device__ __forceinline__ bool by_threads() const {
    return Config::kAny ? layout_.by_threads : Config::may_have(kStepMasked) && layout_.makes_words;
  }

  /// Loads the first two steps, in the order in which the consumers need them.
  __device__ __forceinline__ void load_first(const BackwardStep& first, const BackwardStep& second) {
    this->load_keys(maps_.k, storage_.k_full, 0);
    this->load_queries(first);
    this->load_keys(maps_.v, storage_.v_full, Config::kValuesOffset);
    this->load_grads(first);
    this->load_second(second);
  }

  template <bool kByThreads>
  __device__ __forceinline__ void prepare_first(const StepMetadata& now, const StepMetadata& next) const {
    copy_bias<kByThreads>(now, 0);
    if (layout_.bias_slots > 1) copy_bias<kByThreads>(next, 1);
    publish_metadata<kByThreads>(now, 0);
    publish_metadata<kByThreads>(next, 1);
  }
  /// Prepares the steps after this one. A warp that has published dS of this step has read its metadata, bias and
  /// words.
  template <bool kByThreads>
  __device__ __forceinline__ void prepare(const StepMetadata& next, const StepMetadata& after) const {
    if (layout_.bias_slots > 1) copy_bias<kByThreads>(after, at_.stage());
    if (layout_.bias_slots == 1) copy_bias<kByThreads>(next, 0);
    if (!is_past(next)) publish_metadata<kByThreads>(after, at_.stage());
  }

  /// Copies the bias of a step, a part for each consumer warpgroup.
  template <bool kByThreads>
  __device__ __forceinline__ void copy_bias(const StepMetadata& metadata, int slot) const {
    if (!Config::may_have(kStepBiased) || layout_.bias_slots == 0 || is_past(metadata)) return;
    const uint32_t s_slot = after_storage(layout_.bias + slot * layout_.bias_bytes);
    const uint64_t& full = storage_.bias_full[slot];
    if (!kByThreads || layout_.bias_by_panels) return load_bias_panels(metadata, s_slot, address(full));
    const Sequence sequence = sequence_of(metadata);
#pragma unroll 1
    for (int group = 0; group < kWarpgroups; ++group)
      load_bias<kWarpgroupThreads, kBlockM, kWarpgroupRows>(
          s_slot + group * (layout_.bias_bytes / kWarpgroups), p_.bias, layout_.copies_bias, sequence,
          metadata.tile * kBlockM, work_tile_.first_key + group * kWarpgroupRows);
    ptx::cp_async_arrive(address(full));
    this->release(full);
  }
  __device__ __forceinline__ void load_bias_panels(const StepMetadata& metadata, uint32_t s_slot,
                                                   uint32_t s_full) const {
    if (warp_ != kMetadataWarp) return;
    if (lane_ == 0) {
      const int head = p_.bias.head_stride ? work_tile_.sequence.head + metadata.head : 0;
      const int batch = p_.bias.batch_stride ? work_tile_.sequence.batch : 0;
      ptx::mbarrier_arrive_expect(s_full, layout_.bias_bytes);
#pragma unroll
      for (int group = 0; group < kWarpgroups; ++group)
        ptx::tma_load(s_slot + group * panel_bytes(kBlockM), &bias_map_, s_full,
                      work_tile_.first_key + group * kWarpgroupRows, metadata.tile * kBlockM, head, batch);
    }
    __syncwarp();
  }

  /// Publishes what consumer warps must know of a step.
  template <bool kByThreads>
  __device__ __forceinline__ void publish_metadata(const StepMetadata& metadata, int stage) const {
    const bool is_masked = Config::template has<kStepMasked>(metadata.flags);
    const uint32_t s_words = after_storage(layout_.words + stage * layout_.words_bytes);
    const uint32_t s_full = address(storage_.metadata_full[stage]);
    if (kByThreads && layout_.makes_words && is_masked)
      load_words<kWarpgroupThreads, kBlockM, kBlockN>(s_words, p_, workspace_.visibility, sequence_of(metadata),
                                                      metadata.tile, work_tile_.first_key / kBlockN);
    if (warp_ == kMetadataWarp && lane_ == 0) storage_.step_metadata[stage] = metadata;
    if (kByThreads && layout_.makes_words) return this->release(storage_.metadata_full[stage]);
    if (warp_ != kMetadataWarp) return;
    if (lane_ == 0) {
      if (is_masked) {
        ptx::mbarrier_arrive_expect(s_full, layout_.words_bytes);
        ptx::bulk_load(
            s_words,
            workspace_.visibility.words_of(work_tile_.sequence.batch, work_tile_.sequence.head + metadata.head,
                                           metadata.tile, work_tile_.first_key / kBlockN),
            layout_.words_bytes, s_full);
      } else {
        ptx::mbarrier_arrive(s_full);
      }
    }
    __syncwarp();
  }

  /// Adds dS K to dQ of the next query tile. meanwhile() runs once dS is complete, while the first product does.
  template <class Meanwhile>
  __device__ __forceinline__ void add(const BackwardStep& step, Meanwhile meanwhile) const {
    const uint32_t stage = at_.stage();
    wait_for(storage_.ds_full[stage], at_.parity());
    if (!workspace_.dq) {
      meanwhile();
      return this->release(storage_.ds_empty[stage]);
    }

    const uint32_t ds = ds_ + stage * (Config::kDsBytes / 16);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      Sum sum;
      start(sum, ds, keys_ + panel * (panel_bytes(kBlockN) / 16));
      if (panel == 0) meanwhile();
      this->finish(sum);
      if (panel + 1 == kPanels) this->release(storage_.ds_empty[stage]);
      send(step, panel, sum);
    }
  }

  /// Starts the product for 64 columns of dQ.
  __device__ __forceinline__ static void start(Sum& sum, uint32_t ds, uint32_t keys) {
    using Product = ptx::Wgmma<Element, kPanelColumns>;
    ptx::wgmma_fence();
    Product::template multiply<false, ptx::Major::kK, ptx::Major::kMN>(sum, DsTile::at(ds, 0), KeyTile::at(keys, 0));
#pragma unroll
    for (int k = 1; k < kBlockN / 16; ++k)
      Product::template multiply<true, ptx::Major::kK, ptx::Major::kMN>(sum, DsTile::at(ds, DsTile::along_row(k)),
                                                                        KeyTile::at(keys, KeyTile::down_rows(k)));
    ptx::wgmma_commit();
  }

  /// Adds a panel to memory, through this warp's shared memory for it.
  __device__ __forceinline__ void send(const BackwardStep& step, int panel, const Sum& sum) const {
    this->stage(sum, panel);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_ == 0) {
      ptx::bulk_reduce_add(this->dq_slice(step, panel), this->s_slice(panel), Config::kDqSliceBytes);
      ptx::bulk_commit();
    }
  }

  const uint32_t keys_, ds_;  // lower halves of descriptors
  const CUtensorMap& bias_map_;
  const BackwardOptionsLayout& layout_;
};

}  // namespace flash_ext::sm90
