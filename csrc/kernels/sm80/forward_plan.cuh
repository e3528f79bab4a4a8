// What the host decides about a call of the forward before it launches a kernel.
#pragma once

#include <algorithm>

#include "../common/scores.cuh"
#include "../launch.h"
#include "bias_tile.cuh"
#include "forward_work.cuh"

namespace flash_ext::sm80 {

inline ForwardSchedule schedule_heads(const ForwardParams& p, int64_t element_bytes) {
  constexpr int64_t kKeyBytesInL2 = 24 << 20, kMaxGridZ = 65535;
  const int64_t key_bytes = std::max<int64_t>(1, p.seqlen_k * (p.head_dim + p.head_dim_v) * element_bytes);
  const int64_t group = p.heads_q / p.heads_kv;
  const int64_t fitting = std::clamp<int64_t>(kKeyBytesInL2 / key_bytes * group, group, p.heads_q);
  const bool few_groups = p.batch * ((p.heads_q + fitting - 1) / fitting) <= kMaxGridZ;
  const int64_t heads = few_groups ? fitting : p.heads_q;
  ForwardSchedule schedule{};
  schedule.heads = static_cast<int>(heads);
  schedule.groups = static_cast<int>((p.heads_q + heads - 1) / heads);
  return schedule;
}

/// The options, and the shared memory that the kernel needs in all.
template <class Config>
int64_t plan_options(ForwardSchedule& schedule, const ForwardParams& p) {
  int64_t shared_bytes = Config::kSharedBytes;
  schedule.scale = schedule.first_scale = static_cast<float>(p.softmax_scale) * kLog2E;
  if constexpr (Config::kReads) {
    const int64_t most = shared_bytes_per_block();
    schedule.masked = p.mask.data || p.blocks.offsets;
    if (schedule.masked) {
      schedule.mask_offset = static_cast<int>(shared_bytes);
      const int64_t with_mask = shared_bytes + Config::kMaskBytes;
      schedule.stages_mask = !p.blocks.offsets && has_rows_of_pieces(p.mask, 1) && with_mask <= most;
      shared_bytes = schedule.stages_mask ? with_mask : shared_bytes + 2 * Config::kVisibilityBytes;
    }
    if (can_stage_bias(p.bias)) {
      using Bias = BiasTile<Config::kWarpRows, Config::kBlockN>;
      const int64_t with_bias = shared_bytes + Config::kWarps * Bias::bytes(p.bias);
      schedule.stages_bias = with_bias <= most;
      schedule.bias_offset = static_cast<int>(shared_bytes);
      if (schedule.stages_bias) shared_bytes = with_bias;
    }
    schedule.reads_bias = p.bias.data && !schedule.stages_bias;
  }
  if constexpr (Config::kOptions) {
    schedule.adds_alibi = p.alibi_slopes != nullptr;
    schedule.drops = dropout_threshold(p.dropout.p) > 0;
    schedule.caps = p.softcap > 0.0;
    schedule.cap = static_cast<float>(p.softcap) * kLog2E;
    if (schedule.caps) schedule.first_scale = static_cast<float>(p.softmax_scale / p.softcap);
    const float last = schedule.caps ? schedule.cap : schedule.first_scale;
    schedule.scales_first = schedule.reads_bias || !(last > 0x1p-60f && last < 0x1p60f);
    schedule.scale = schedule.scales_first ? 1.0f : last;
    schedule.per_unit = 1.0f / schedule.scale;
  }
  return shared_bytes;
}

/// The least class that serves a call.
inline ForwardClass class_of(const AttentionParams& p) {
  if (p.bias.data || p.mask.data || p.blocks.offsets || p.seq.block_table) return ForwardClass::kReads;
  const bool plain =
      static_cast<float>(p.softmax_scale) > 0.0f && p.softcap == 0 && !p.alibi_slopes && p.dropout.p == 0;
  return plain ? ForwardClass::kPlain : ForwardClass::kComputes;
}

}  // namespace flash_ext::sm80
