// Host: chooses the variant of the kernel that serves a call, and launches it.
#pragma once

#include "forward_call.h"
#include "kernel.cuh"
#include "kernels/launch.h"
#include "kernels/sm90/common/score_options.h"
#include "variant_of_call.h"

namespace flash_ext::sm90 {

/// Launches the kernel that writes the list of work tiles, or clears the counter from which CTAs take them.
template <class Schedule>
void start_schedule(const Schedule& schedule, const WorkListPlan& list, const ForwardCall& call) {
  if (list.listed) {
    fill_work_list(call.p, list, schedule.list, call.stream);
  } else if (schedule.taken) {
    zero_forward_workspace(call.workspace, call.stream);
  }
}

/// Launches a variant that visits a range of key tiles: plain, with score options, of caches, or with max_logit.
template <class Config>
void launch_range(const ForwardCall& call) {
  const ForwardParams& p = call.p;
  const WorkListPlan list = forward_work_list(p, Config::kBlockM);
  const auto schedule = [&] {
    if constexpr (Config::kSplitsKv) {
      return schedule_split_forward<Config>(p, call.splits, list, call.workspace);
    } else {
      ForwardSchedule schedule = schedule_forward<Config>(p, call.workspace);
      use_list(schedule, list, call.workspace);
      return schedule;
    }
  }();
  start_schedule(schedule, list, call);
  // Whether the kernel may start while the previous one runs. With a counter or a list, the previous kernel is the one
  // that writes it. That one starts when all before it have ended, so every tensor is there, and the scheduler waits
  // for the counter or list. Without them, the previous kernel may be writing tensors. A kernel with kSplitsKv then
  // waits for it before it reads any (forward_kernel()), except for the first work tile: making it reads lengths and
  // indices of cache entries, where these lie on the device. Calls that have such do not overlap.
  const bool overlaps_previous =
      schedule.taken || (Config::kSplitsKv && has_equal_lengths(p) && !p.seq.cache_batch_idx);
  const auto arguments = [&]() -> typename ForwardParameters<Config>::Call {
    if constexpr (Config::kReadsCache) {
      return {p, Config::kBlockN / rows_of_key_copy<Config>(p), rows_of_key_copy<Config>(p)};
    } else {
      return {p};
    }
  }();
  launch_forward<Config>(arguments, encode_maps<Config>(p), schedule, ScoreTerms(p), overlaps_previous, call.stream);
  if constexpr (Config::kSplitsKv) combine_splits<Config>(p, schedule, call.stream);
}

template <class Config>
void launch_options(const ForwardCall& call) {
  const ForwardParams& p = call.p;
  const WorkListPlan list = forward_work_list(p, Config::kBlockM);
  ForwardOptionsSchedule schedule = {schedule_forward<Config>(p, call.workspace), p};
  use_list(schedule, list, call.workspace);
  start_schedule(schedule, list, call);
  ForwardOptionsTerms options = forward_options_terms(p);
  options.visible = call.visible;
  const CUtensorMap bias_map =
      options.adds_bias ? encode_bias_map(p, p.bias.row_stride == 0 ? 1 : kWarpgroupRows) : CUtensorMap{};
  launch_forward<Config>({p, options}, {encode_maps<Config>(p), bias_map}, schedule, {}, /*overlaps_previous=*/false,
                         call.stream);
}

template <class Config>
void launch_blocks(const ForwardCall& call) {
  const ForwardParams& p = call.p;
  const LongestFirst order = forward_blocks_order(p, Config::kBlockM);
  const WorkList list = order.view(call.workspace);
  list_longest_first(order, list, call.stream);
  ForwardBlocksSchedule schedule = {schedule_forward<Config>(p, call.workspace),
                                    p.blocks.offsets,
                                    p.blocks.offsets_batch_stride,
                                    p.blocks.offsets_head_stride,
                                    static_cast<int>(p.blocks.block_m),
                                    static_cast<int>(p.blocks.block_n) / Config::kBlockN,
                                    static_cast<int>(p.blocks.num_blocks)};
  schedule.list = list;
  schedule.taken = &list.head->taken;
  schedule.work_tiles = order.positions();
  launch_forward<Config>({p}, encode_maps<Config>(p), schedule, ScoreTerms(p), /*overlaps_previous=*/true, call.stream);
}

/// Launches a variant of a range if the plan chose these tiles; otherwise returns false.
template <class Element, int kHeadDim, int kHeadDimV, ForwardTiles kTiling,
          ForwardVariant kVariant = ForwardVariant::kPlain>
bool launch_tiles(const ForwardCall& call) {
  if constexpr (has_tiles({kHeadDim, kHeadDimV}, kTiling)) {
    using Config = ForwardConfig<Element, kHeadDim, kHeadDimV, kVariant, kTiling>;
    if (call.p.block_m != Config::kBlockM || call.block_n != Config::kBlockN) return false;
    launch_range<Config>(call);
    return true;
  }
  return false;
}

/// Launches a variant that has tiles for many keys, for few, and for few query tiles, with those that the plan chose.
template <class Element, int kHeadDim, int kHeadDimV, ForwardVariant kVariant>
void run_planned_tiles(const ForwardCall& call) {
  if constexpr (kVariant != ForwardVariant::kMaxLogit) {
    if (launch_tiles<Element, kHeadDim, kHeadDimV, ForwardTiles::kFewTiles, kVariant>(call)) return;
  }
  if (launch_tiles<Element, kHeadDim, kHeadDimV, ForwardTiles::kFewKeys, kVariant>(call)) return;
  if (!launch_tiles<Element, kHeadDim, kHeadDimV, ForwardTiles::kManyKeys, kVariant>(call))
    fail("sm90/forward has no tiles of the shape that was planned");
}

/// Launches the plain variant, with the tiles that the plan chose, or the variant with score options, which has one
/// shape.
template <class Element, int kHeadDim, int kHeadDimV>
void run_range(const ForwardCall& call) {
  if (has_score_options(call.p.softcap, call.p.alibi_slopes != nullptr, call.p.softmax_scale))
    return launch_range<ForwardConfig<Element, kHeadDim, kHeadDimV, ForwardVariant::kScoreOptions>>(call);
  if (launch_tiles<Element, kHeadDim, kHeadDimV, ForwardTiles::kFewQueries>(call)) return;
  run_planned_tiles<Element, kHeadDim, kHeadDimV, ForwardVariant::kPlain>(call);
}

template <class Element, int kHeadDim>
void run_options(const ForwardCall& call) {
  const auto launch = [&](auto variant) {
    launch_options<ForwardConfig<Element, kHeadDim, kHeadDim, variant.value>>(call);
  };
  using std::integral_constant;
  switch (forward_variant(variant_options(call.p))) {
    case ForwardVariant::kBias:
      return launch(integral_constant<ForwardVariant, ForwardVariant::kBias>());
    case ForwardVariant::kMask:
      return launch(integral_constant<ForwardVariant, ForwardVariant::kMask>());
    case ForwardVariant::kDropout:
      return launch(integral_constant<ForwardVariant, ForwardVariant::kDropout>());
    default:
      return launch(integral_constant<ForwardVariant, ForwardVariant::kAllButDropout>());
  }
}

template <ForwardFamily kFamily, class Element, int kHeadDim, int kHeadDimV>
void run_forward(const ForwardCall& call) {
  if constexpr (kFamily == ForwardFamily::kBlocks) {
    launch_blocks<ForwardConfig<Element, kHeadDim, kHeadDimV, ForwardVariant::kBlocks>>(call);
  } else if constexpr (kFamily == ForwardFamily::kVisible) {
    run_options<Element, kHeadDim>(call);
  } else if constexpr (kFamily == ForwardFamily::kCache) {
    run_planned_tiles<Element, kHeadDim, kHeadDimV, ForwardVariant::kCache>(call);
  } else if constexpr (kFamily == ForwardFamily::kMaxLogit) {
    run_planned_tiles<Element, kHeadDim, kHeadDimV, ForwardVariant::kMaxLogit>(call);
  } else {
    run_range<Element, kHeadDim, kHeadDimV>(call);
  }
}

}  // namespace flash_ext::sm90
