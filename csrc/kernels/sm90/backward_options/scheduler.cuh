// The steps of a CTA that masks leave, found 32 query tiles at a time, one per lane.
#pragma once

#include "kernels/sm90/common/backward/step_chunk.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// Finds the steps in their order, for one warp.
template <class Config>
class BackwardOptionsSteps : BackwardStepChunk<Config> {
 public:
  __device__ __forceinline__ BackwardOptionsSteps(const BackwardWorkspace& workspace,
                                                  const BackwardOptionsLayout& layout,
                                                  const BackwardOptionsStorage<Config>& storage, int lane)
      : Base(workspace, storage.work_tile, lane), layout_(layout), options_(storage.options) {
    load(chunk_);
    take();
  }

  /// Returns the next step, at first the first one. Past the last one it returns kStepPast.
  __device__ __forceinline__ StepMetadata next() {
    while (left_ == 0) {
      if (this->is_past(chunk_)) return {0, chunk_.head, kStepPast, 0.0f};
      chunk_ = this->after(chunk_);
      take();
    }
    const uint32_t bit = this->take_bit();
    StepMetadata metadata{this->tile_of(bit), chunk_.head, layout_.flags, slope() * kLog2E};
    const bool has_words = !Config::kAny || layout_.words_bytes > 0;
    if (Config::may_have(kStepMasked) && has_words && (masked_ & bit)) metadata.flags |= kStepMasked;
    const bool hides = Config::template has<kStepMasked>(metadata.flags) ||
                       Config::template has<kStepBiased>(metadata.flags) ||
                       Config::template has<kStepKeyBiased>(metadata.flags);
    if (work_tile_.is_sanitised(metadata.tile) || (hides && (has_non_finite_ & bit))) metadata.flags |= kStepSanitised;
    return metadata;
  }

 private:
  using Base = BackwardStepChunk<Config>;
  using Base::has_non_finite_, Base::lane_, Base::left_, Base::masked_, Base::next_state_, Base::chunk_,
      Base::work_tile_, Base::workspace_;

  /// The ALiBi slope of the chunk's head. The kernel of all options reads it for each step: it has no register to keep
  /// it.
  __device__ __forceinline__ float slope() const { return Config::kAny ? slope_of_head() : slope_; }
  __device__ __forceinline__ float slope_of_head() const {
    return Config::template has<kStepAlibi>(layout_.flags) ? options_.slopes[chunk_.head] : 0.0f;
  }

  /// Issues the loads of the states of a chunk's tiles. It does so while the chunk before is in use: after the
  /// additions to dQ the states would arrive late.
  __device__ __forceinline__ void load(const BackwardStep& chunk) {
    if (!this->begin_load(chunk)) return;
    next_state_ = kTileVisible;
    if (Config::may_have(kStepMasked | kStepKeyBiased) && options_.masks)
      next_state_ = workspace_.visibility.state_of(work_tile_.sequence.batch, work_tile_.sequence.head + chunk.head,
                                                   work_tile_.first_key / Config::kBlockN, chunk.tile + lane_);
    if (Config::may_have(kStepMasked | kStepBiased | kStepKeyBiased) && options_.hides) this->load_non_finite(chunk);
  }
  /// Takes the states of the current chunk, and loads those of the chunk after it.
  __device__ __forceinline__ void take() {
    this->take_loaded();
    if (this->is_past(chunk_)) return;
    if (!Config::kAny) slope_ = slope_of_head();
    load(this->after(chunk_));
  }

  const BackwardOptionsLayout& layout_;
  const BackwardOptions& options_;
  float slope_ = 0.0f;  // see slope()
};

}  // namespace flash_ext::sm90
