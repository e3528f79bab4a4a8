#include "kernel_table.h"

#include <algorithm>
#include <stdexcept>

#include "cpu_tiles.h"
#include "features.h"
#include "kernels/sm90/backward_short/shape.h"
#include "kernels/sm90/common/backward/shape.h"
#include "kernels/sm90/forward_short/shape.h"
#include "names.h"
#include "sm80_tiles.h"
#include "sm90_tiles.h"
#include "text.h"

namespace flash_ext::plan {
namespace {

// ---- The table ------------------------------------------------------------------------------------------------------

constexpr Architecture kHopper = {"Hopper", Device::kCuda, 90, false, "90a", "FLASH_EXT_HOPPER"};
constexpr Architecture kAnyGpu = {"Ampere", Device::kCuda, 80, true, nullptr, nullptr};
constexpr Architecture kAnyCpu = {"CPU", Device::kCpu, 0, true, nullptr, nullptr};

template <class... Enum>
constexpr unsigned bits(Enum... values) {
  return ((1u << static_cast<unsigned>(values)) | ...);
}

constexpr unsigned kHalf = bits(DType::kFloat16, DType::kBFloat16), kFloat = bits(DType::kFloat32);
constexpr unsigned kUpToFloat = kHalf | kFloat, kUpToDouble = kUpToFloat | bits(DType::kFloat64);

constexpr unsigned kForward = bits(Task::kForward), kBackward = bits(Task::kBackward), kDecode = bits(Task::kDecode);
constexpr unsigned kWeights = bits(Task::kWeights), kWeightsBackward = bits(Task::kWeightsBackward);
constexpr unsigned kBiasGradient = bits(Task::kBiasGradient);

// Features that come only together with another one. A wide bias is a bias, too: a kernel that takes no bias lists the
// special kinds of bias as taken, so that a plan names the bias once. kOnlyInTurns does the same for `deterministic`
// with options or masks.
constexpr unsigned kOnlyWithBias = kWideBias | kWideBiasBesideMasks | kBiasOfOddRows;
constexpr unsigned kNotByTma = kStrideOfZero | kEmptyTensors;
constexpr unsigned kAnyShape = kManyRows | kPacked | kGroupedHeads;
constexpr unsigned kOnlyInTurns = kDeterministicBesideOptions | kDeterministicBesideMasks;
constexpr unsigned kSm90F32 =
    kAnyShape | kOnlyWithBias | kOnlyInTurns | kSoftcap | kAlibi | kNotPositiveScale | kOwnValueDim | kStrideOfZero;
constexpr unsigned kSm90Forward = kAllFeatures & ~(kWideBias | kNotByTma);
constexpr unsigned kSm90Cache = kAnyShape | kOwnValueDim | kFewTiles;
constexpr unsigned kSm90Backward =
    kAllFeatures & ~(kDeterministicBesideMasks | kWideBiasBesideMasks | kNotPositiveScale | kNotByTma);
constexpr unsigned kSm90BackwardAnyOptions =
    kAllFeatures & ~(kDeterministicBesideOptions | kNotPositiveScale | kNotByTma);
constexpr unsigned kSm90PersistentBackward = kAnyShape | kOwnValueDim | kBias | kOnlyWithBias | kMask | kBlockMask |
                                             kSoftcap | kAlibi | kDeterministic | kDeterministicBesideMasks;
constexpr unsigned kSm90BiasGradient = kAllFeatures & ~(kMask | kBlockMask | kDropout | kBiasOfOddRows | kNotByTma);

constexpr char kWgmma[] = "wgmma, for compute capability 9.0";
constexpr char kWgmmaAndTma[] = "wgmma and TMA, for compute capability 9.0";
constexpr char kSixInBf16[] = "six in bfloat16", kThreeInTf32[] = "three in TF32";

// For each task, the first row that fits is taken. A kernel has several rows where wider heads leave room for fewer
// features, or where another task has other needs.
constexpr KernelRow kTable[] = {
    {KernelId::kSm90ForwardShort, "sm90/forward_short", &kHopper, kForward, kHalf, sm90::kForwardShortHeadDim,
     kAnyShape | kOwnValueDim | kDeterministic,
     "wgmma and TMA, for compute capability 9.0; sequences are short, and the kernel's code is small",
     choose_sm90_forward_short_tiles, nullptr, nullptr, false, true, DecodeSplits::kForSms, is_short_sm90_forward},
    {KernelId::kSm90Forward, "sm90/forward", &kHopper, kForward, kHalf, 256, kSm90Forward, kWgmmaAndTma,
     choose_sm90_forward_tiles, nullptr, nullptr, false, true},
    {KernelId::kSm90ForwardF32, "sm90/forward_f32", &kHopper, kForward, kFloat, 256, kSm90F32 | kDeterministic, kWgmma,
     choose_sm90_forward_f32_tiles, nullptr, kSixInBf16, true},
    // A CTA has all keys of a head, so its dQ is complete, and nothing is added up in memory.
    {KernelId::kSm90BackwardShort, "sm90/backward_short", &kHopper, kBackward, kHalf, sm90::kBackwardShortHeadDim,
     kDeterministic | kOnlyInTurns | kOnlyWithBias,
     "wgmma and TMA, for compute capability 9.0; a head's rows fit into shared memory",
     choose_sm90_backward_short_tiles, nullptr, nullptr, false, true},
    {KernelId::kSm90BackwardPersistent, "sm90/backward_persistent", &kHopper, kBackward, kHalf,
     sm90::kMostPersistentHeadDim, kSm90PersistentBackward, kWgmmaAndTma, choose_sm90_backward_persistent_tiles,
     sm90_backward_persistent_tiles, nullptr, false, true, DecodeSplits::kForSms, persists_sm90_backward},
    {KernelId::kSm90Backward, "sm90/backward", &kHopper, kBackward, kHalf, sm90::kMaxNarrowHeadDim, kSm90Backward,
     kWgmmaAndTma, choose_sm90_backward_tiles, sm90_backward_tiles, nullptr, false, true, DecodeSplits::kForSms,
     overlaps_sm90_backward},
    // These kernels do not serve `deterministic` with options: the rows above have taken those of these calls that
    // kernels for compute capability 9.0 serve.
    {KernelId::kSm90BackwardOptions, "sm90/backward_options", &kHopper, kBackward, kHalf, 64, kSm90BackwardAnyOptions,
     kWgmmaAndTma, choose_sm90_backward_options_tiles, sm90_backward_options_tiles, nullptr, false, true},
    // For head dims from 65 to 128, shared memory has no room for a wide bias together with masks or dropout. A per-key
    // bias would need none, but features do not tell it apart.
    {KernelId::kSm90BackwardOptions, "sm90/backward_options", &kHopper, kBackward, kHalf, sm90::kMaxNarrowHeadDim,
     kSm90BackwardAnyOptions & ~kWideBiasBesideMasks, kWgmmaAndTma, choose_sm90_backward_options_tiles,
     sm90_backward_options_tiles, nullptr, false, true},
    // For wide heads alone: narrower ones would be filled up by zeros.
    {KernelId::kSm90BackwardWide, "sm90/backward_wide", &kHopper, kBackward, kHalf, 256, kSm90BackwardAnyOptions,
     kWgmmaAndTma, choose_sm90_backward_wide_tiles, sm90_backward_wide_tiles, nullptr, false, true,
     DecodeSplits::kForSms, has_wide_heads},
    {KernelId::kSm90BackwardF32, "sm90/backward_f32", &kHopper, kBackward, kFloat, 256, kSm90F32, kWgmma,
     choose_sm90_backward_f32_tiles, sm90_backward_f32_tiles, kSixInBf16, true},
    {KernelId::kSm90BiasGradient, "sm90/bias_gradient", &kHopper, kBiasGradient, kHalf, 128, kSm90BiasGradient, kWgmma,
     nullptr, nullptr, nullptr, false, true},

    // Chunks of prompts fill the tiles of the forward, which reads caches too.
    {KernelId::kSm90Forward, "sm90/forward", &kHopper, kDecode, kHalf, 256, kSm90Cache, kWgmmaAndTma,
     choose_sm90_cache_tiles, nullptr, nullptr, false, true, DecodeSplits::kByTiles},
    {KernelId::kSm80Forward, "sm80/forward", &kAnyGpu, kForward | kDecode, kUpToFloat, 256,
     kAllFeatures & ~(kFewQueries | kFewTiles | kFewPackedTiles | kFixedSplits), nullptr, choose_sm80_forward_tiles,
     nullptr, kThreeInTf32, true, false, DecodeSplits::kNone},
    {KernelId::kSm80Decode, "sm80/decode", &kAnyGpu, kDecode, kUpToFloat, 256, kAllFeatures, nullptr,
     choose_sm80_decode_tiles, nullptr, kThreeInTf32},
    {KernelId::kSm80Backward, "sm80/backward", &kAnyGpu, kBackward, kUpToFloat, 256, kAllFeatures, nullptr,
     choose_sm80_backward_tiles, sm80_backward_tiles, kThreeInTf32, true},
    {KernelId::kSm80Weights, "sm80/weights", &kAnyGpu, kWeights | kWeightsBackward, kUpToFloat, 256, kAllFeatures,
     nullptr, leave_tiles_to_the_kernel, nullptr, kThreeInTf32},
    {KernelId::kSm80BiasGradient, "sm80/bias_gradient", &kAnyGpu, kBiasGradient, kUpToFloat, 256, kAllFeatures, nullptr,
     choose_sm80_bias_memory, nullptr},

    {KernelId::kCpuForward, "cpu/forward", &kAnyCpu, kForward | kDecode, kUpToDouble, 256, kAllFeatures, nullptr,
     choose_cpu_forward_tiles, nullptr},
    {KernelId::kCpuBackward, "cpu/backward", &kAnyCpu, kBackward | kWeightsBackward, kUpToDouble, 256, kAllFeatures,
     nullptr, choose_cpu_backward_tiles, nullptr},
    {KernelId::kCpuWeights, "cpu/weights", &kAnyCpu, kWeights, kUpToDouble, 256, kAllFeatures, nullptr,
     choose_cpu_forward_tiles, nullptr},
};

// ---- Which row fits -------------------------------------------------------------------------------------------------

bool is_for(const Architecture& architecture, const Problem& p) {
  if (architecture.device != p.device) return false;
  return architecture.later_ones_too ? p.compute_capability >= architecture.compute_capability
                                     : p.compute_capability == architecture.compute_capability;
}

bool is_there(const Architecture& architecture, const Problem& p) {
  return architecture.later_ones_too || p.own_kernels;
}

bool has_task(const KernelRow& row, Task task) { return (row.tasks & bits(task)) != 0; }
bool has_dtype(const KernelRow& row, const Problem& p) { return (row.dtypes & bits(p.dtype)) != 0; }
bool has_head_dims(const KernelRow& row, const Problem& p) {
  return std::max(p.head_dim, p.head_dim_v) <= row.most_head_dim;
}

bool fits(const KernelRow& row, const Problem& p, unsigned features) {
  return is_there(*row.architecture, p) && has_dtype(row, p) && has_head_dims(row, p) && (features & ~row.takes) == 0 &&
         (row.serves == nullptr || row.serves(p));
}

// ---- Why a row does not fit -----------------------------------------------------------------------------------------

/// The widest heads with which a kernel of the row's architecture, tasks and dtypes does take a feature; 0 if none
/// does.
int64_t most_head_dim_with(const KernelRow& row, unsigned feature) {
  int64_t most = 0;
  for (const KernelRow& other : kTable) {
    const bool is_alike =
        other.architecture == row.architecture && (other.tasks & row.tasks) != 0 && (other.dtypes & row.dtypes) != 0;
    if (is_alike && (other.takes & feature) != 0) most = std::max(most, other.most_head_dim);
  }
  return most;
}

/// "a mask, dropout beyond head_dim 128"
std::string features_not_taken(const KernelRow& row, const Problem& p) {
  std::string listed;
  for (unsigned missing = features_of(p) & ~row.takes; missing != 0; missing &= missing - 1) {
    const auto feature = static_cast<Feature>(missing & ~(missing - 1));
    const int64_t most = most_head_dim_with(row, feature);
    const bool is_too_wide = most > 0 && std::max(p.head_dim, p.head_dim_v) > most;
    listed +=
        text(listed.empty() ? "" : ", ", words_of(feature, p), is_too_wide ? text(" beyond head_dim ", most) : "");
  }
  return listed;
}

/// How far a row is from serving a problem: its dtype counts most, then head dims, then the number of features. A row
/// whose serves() says no is farther than a row that lacks some features.
int distance(const KernelRow& row, const Problem& p) {
  if (!has_dtype(row, p)) return 1000;
  if (!has_head_dims(row, p)) return 100;
  if (row.serves != nullptr && !row.serves(p)) return 50;
  int missing = 0;
  for (unsigned features = features_of(p) & ~row.takes; features != 0; features &= features - 1) ++missing;
  return missing;
}

/// The row of an architecture that comes closest to serving a problem.
const KernelRow* closest_row(const Architecture& architecture, const Problem& p, Task task) {
  const KernelRow* closest = nullptr;
  for (const KernelRow& row : kTable) {
    if (row.architecture != &architecture || !has_task(row, task)) continue;
    if (closest == nullptr || distance(row, p) < distance(*closest, p)) closest = &row;
  }
  return closest;
}

std::string obstacle(const KernelRow& row, const Problem& p) {
  if (!has_dtype(row, p)) return name_of(p.dtype);
  return has_head_dims(row, p) ? features_not_taken(row, p) : text("head_dim beyond ", row.most_head_dim);
}

}  // namespace

const KernelRow& choose_kernel(const Problem& problem, Task task) {
  const unsigned features = features_of(problem);
  for (const KernelRow& row : kTable)
    if (has_task(row, task) && is_for(*row.architecture, problem) && fits(row, problem, features)) return row;
  throw std::logic_error("a supported problem that no kernel serves");
}

std::string why_not_special(const Problem& problem, Task task, const KernelRow& chosen) {
  for (const KernelRow& row : kTable) {
    const Architecture& special = *row.architecture;
    if (&special == chosen.architecture) break;
    if (!has_task(row, task) || !is_for(special, problem)) continue;
    if (!is_there(special, problem)) {
      return text("kernels for ", special.family, " are not in this build (architecture ", special.target, "), or ",
                  special.environment, "=0");
    }
    return text("the kernel for ", special.family, " does not serve ",
                obstacle(*closest_row(special, problem, task), problem));
  }
  return "";
}

const KernelRow& row_of(KernelId id) {
  for (const KernelRow& row : kTable)
    if (row.id == id) return row;
  throw std::logic_error("no kernel has this id");
}

const char* kernel_name(KernelId id) { return id == KernelId::kNone ? "" : row_of(id).name; }

std::vector<const char*> kernel_names() {
  std::vector<const char*> names;
  for (const KernelRow& row : kTable)
    if (&row_of(row.id) == &row) names.push_back(row.name);
  return names;
}

std::vector<Architecture> special_architectures() {
  std::vector<Architecture> found;
  for (const KernelRow& row : kTable) {
    const Architecture& architecture = *row.architecture;
    const bool is_known = std::any_of(found.begin(), found.end(), [&](const Architecture& known) {
      return known.compute_capability == architecture.compute_capability;
    });
    if (!architecture.later_ones_too && !is_known) found.push_back(architecture);
  }
  return found;
}

int64_t first_compute_capability() {
  int64_t first = kTable[0].architecture->compute_capability;
  for (const KernelRow& row : kTable)
    if (row.architecture->device == Device::kCuda) first = std::min(first, row.architecture->compute_capability);
  return first;
}

}  // namespace flash_ext::plan
