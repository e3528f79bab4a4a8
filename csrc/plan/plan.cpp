#include "plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "backward_schedule.h"
#include "kernels/common/dropout/philox.h"
#include "kernels/common/head_dim.h"
#include "kernels/common/mask/tile_range.h"
#include "kernels/common/scheduler/work_order.h"
#include "kernels/cpu/tile_sizes.h"
#include "kernels/sm90/backward/shape.h"
#include "kernels/sm90/backward_f32/shape.h"
#include "kernels/sm90/bias_gradient/shape.h"
#include "kernels/sm90/forward/shape.h"
#include "kernels/sm90/forward_f32/shape.h"
#include "key_splits.h"
#include "text.h"

namespace flash_ext::plan {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kHeadDimStep = 8;
constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();  // what cu_seqlens can count to
constexpr int64_t kFirstCapability = 80;
constexpr int64_t kMaxCudaBatch = 65535;               // what a grid can count to
constexpr int64_t kMaxCudaSeqlenQ = 65535 * 32;        // the same, in blocks of the fewest queries; not of packed ones
constexpr int64_t kMaxCudaSeqlenK = int64_t{1} << 29;  // positions, offsets and windows then add up within 32 bits

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class... Parts>
Support refuse(const Parts&... parts) {
  return {false, text(parts...)};
}

// ---- What is supported ----------------------------------------------------------------------------------------------

Support check_sizes(const Problem& p) {
  const struct {
    const char* name;
    int64_t value;
  } sizes[] = {{"batch", p.batch}, {"seqlen_q", p.seqlen_q}, {"seqlen_k", p.seqlen_k}};
  for (const auto& size : sizes) {
    if (size.value < 0) return refuse(size.name, " must be >= 0, got ", size.value);
    if (size.value > kMaxSize) return refuse(size.name, " must be at most ", kMaxSize, ", got ", size.value);
  }
  if (p.heads_q < 1 || p.heads_kv < 1) {
    return refuse("heads must be >= 1, got ", p.heads_q, " heads in q and ", p.heads_kv, " in k and v");
  }
  if (p.heads_q > kMaxSize) return refuse("the heads of q must be at most ", kMaxSize, ", got ", p.heads_q);
  if (p.heads_q % p.heads_kv != 0) {
    return refuse("the heads of k and v must divide those of q: got ", p.heads_q, " heads in q and ", p.heads_kv,
                  " in k and v");
  }
  const struct {
    const char* name;
    int64_t value;
  } dims[] = {{"head_dim of q and k", p.head_dim}, {"head_dim of v", p.head_dim_v}};
  for (const auto& dim : dims) {
    if (dim.value < kHeadDimStep || dim.value > kMaxHeadDim || dim.value % kHeadDimStep != 0) {
      return refuse(dim.name, " must be a multiple of ", kHeadDimStep, " from ", kHeadDimStep, " to ", kMaxHeadDim,
                    ", got ", dim.value);
    }
  }
  return {};
}

/// Scores are computed as  softcap * tanh(q k * (softmax_scale / softcap)): each factor must be a number of T.
template <class T>
Support check_score_factors(const Problem& p) {
  const double largest = std::numeric_limits<T>::max(), smallest = std::numeric_limits<T>::min();
  if (std::abs(p.softmax_scale) > largest)
    return refuse("softmax_scale must be at most ", largest, ", got ", p.softmax_scale);
  if (p.softcap == 0) return {};
  if (p.softcap < smallest || p.softcap > largest) {
    return refuse("softcap must be 0 (off) or from ", smallest, " to ", largest, ", got ", p.softcap);
  }
  if (std::abs(p.softmax_scale / p.softcap) > largest) {
    return refuse("softmax_scale / softcap must be at most ", largest, ", got ", p.softmax_scale, " / ", p.softcap);
  }
  return {};
}

Support check_scale(const Problem& p) {
  return p.dtype == DType::kFloat64 ? check_score_factors<double>(p) : check_score_factors<float>(p);
}

Support check_options(const Problem& p) {
  if (!std::isfinite(p.softmax_scale)) return refuse("softmax_scale must be finite, got ", p.softmax_scale);
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    return refuse("softcap must be finite and >= 0 (0 = off), got ", p.softcap);
  }
  if (!(p.dropout_p >= 0 && p.dropout_p <= 1)) return refuse("dropout_p must be in [0, 1], got ", p.dropout_p);
  if (p.window_left < -1)
    return refuse("window_left (window_size[0]) must be >= -1 (-1 = unlimited), got ", p.window_left);
  if (p.window_right < -1)
    return refuse("window_right (window_size[1]) must be >= -1 (-1 = unlimited), got ", p.window_right);
  if (p.num_splits < 0) return refuse("num_splits must be >= 0 (0 = the library decides), got ", p.num_splits);
  if (p.batch_invariant && p.num_splits > 1) {
    return refuse("batch_invariant=True fixes how keys are split: num_splits must be 0 or 1, got ", p.num_splits);
  }
  return {};
}

Support check_device(const Problem& p) {
  if (p.num_workers < 1) return refuse("num_workers must be >= 1, got ", p.num_workers);
  if (p.device == Device::kCpu) return {};
  if (p.dtype == DType::kFloat64) return refuse("float64 is supported on CPU only");
  if (p.compute_capability < kFirstCapability) {
    return refuse("CUDA kernels run on GPUs of compute capability 8.0 (Ampere) and later, this one has ",
                  p.compute_capability / 10, ".", p.compute_capability % 10);
  }
  const struct {
    const char* name;
    int64_t value, most;
  } sizes[] = {{"batch", p.batch, kMaxCudaBatch},
               {"seqlen_q", p.seqlen_q, p.total_q > 0 ? kMaxCudaSeqlenK : kMaxCudaSeqlenQ},
               {"seqlen_k", p.seqlen_k, kMaxCudaSeqlenK}};
  for (const auto& size : sizes) {
    if (size.value > size.most) return refuse(size.name, " on CUDA must be at most ", size.most, ", got ", size.value);
  }
  const int64_t rows_of_key_head = p.seqlen_q * (p.heads_q / p.heads_kv);
  if (p.operation == Operation::kDecode && rows_of_key_head > kMaxSize) {
    return refuse("decoding on CUDA takes at most ", kMaxSize, " queries and heads with the same key head, got ",
                  p.seqlen_q, " queries of ", p.heads_q / p.heads_kv, " heads");
  }
  return {};
}

// ---- How it runs ----------------------------------------------------------------------------------------------------

/// Tiles of the CPU kernels. Rows: as many as they hold, so that a tile of keys is loaded for many of them, or fewer
/// where that makes too few tiles.
constexpr int64_t kCpuBlockN = cpu::kBlockN;
constexpr int64_t kCpuMaxBlockM = cpu::kMaxTileRows;
constexpr int64_t kCpuMinBlockM = 32;

/// Work items that keep the threads of a CPU busy. A constant: were it their number, results would depend on it.
constexpr int64_t kCpuWantedItems = 16;

/// "1 split", "2 splits".
std::string counted(int64_t n, const char* what) { return text(n, " ", what, n == 1 ? "" : "s"); }

/// Queries from which decoding on CUDA goes through the forward kernel.
constexpr int64_t kCudaPrefillRows = 128;

constexpr int64_t kHopperCapability = 90;

constexpr int64_t kCudaDecodeFewRows = 16;
constexpr int64_t kCudaDecodeManyRows = 64;
constexpr int64_t kCudaMaxSplits = 512;
constexpr int64_t kMinCudaSplitSize = 64;      // a tile for each warp of a block
constexpr int64_t kMaxRaggedSplitSize = 4096;  // or else one long sequence keeps all others waiting

/// Cuts the keys of each tile so that all SMs are busy to the end. By times, which are in bytes of keys and values that
/// one block reads meanwhile when nobody competes (H200: 50 KB a microsecond).
int64_t choose_cuda_splits(int64_t tiles, int64_t num_sms, int64_t blocks_per_sm, int64_t keys, int64_t key_bytes) {
  constexpr double kMerge = 100e3;      // of the splits
  constexpr double kMoreBlocks = 20e3;  // a second block on each SM
  constexpr double kWave = 60e3;        // another wave of blocks
  constexpr double kShare = 0.68;       // of its speed alone that each of num_sms blocks has
  constexpr double kImbalance = 0.15;   // what is lost where the last wave leaves SMs without work
  constexpr int64_t kWaves = 4;
  const int64_t slots = num_sms * blocks_per_sm;
  tiles = std::max<int64_t>(tiles, 1);
  const int64_t most = std::clamp<int64_t>(keys / kMinCudaSplitSize, 1, kCudaMaxSplits);
  const auto cost = [&](int64_t splits) {
    const int64_t blocks = tiles * splits, waves = ceil_div(blocks, slots);
    const double idle = 1.0 - static_cast<double>(blocks) / static_cast<double>(waves * slots);
    const double all = static_cast<double>(tiles * keys * key_bytes) / (kShare * static_cast<double>(num_sms));
    const double block = static_cast<double>(ceil_div(keys, splits) * key_bytes);
    const double later_waves = static_cast<double>(std::max<int64_t>(waves - 2, 0));
    return std::max(all * (1.0 + kImbalance * idle), block) + (waves > 1 ? kMoreBlocks : 0.0) + kWave * later_waves +
           (splits > 1 ? kMerge : 0.0);
  };
  int64_t best = 1;
  const int64_t fewest_waves = ceil_div(tiles, slots);
  for (int64_t waves = fewest_waves; waves < fewest_waves + kWaves; ++waves) {
    const int64_t splits = std::clamp<int64_t>(waves * slots / tiles, 1, most);
    if (cost(splits) < cost(best)) best = splits;
  }
  return best;
}

const char* kernel_of(Operation operation, Device device) {
  const bool cuda = device == Device::kCuda;
  switch (operation) {
    case Operation::kForward:
      return cuda ? "sm80/forward" : "cpu/forward";
    case Operation::kDecode:
      return cuda ? "sm80/decode" : "cpu/forward";
    case Operation::kWeights:
      return cuda ? "sm80/weights" : "cpu/weights";
    case Operation::kBackward:
      return cuda ? "sm80/backward" : "cpu/backward";
    case Operation::kWeightsBackward:
      return cuda ? "sm80/weights" : "cpu/backward";
  }
  return "";
}

/// With lengths known to the host, a limit that cuts off nothing is no limit: one query over a cache is not causal.
bool limits_left(const Problem& p) {
  if (p.window_left < 0) return false;
  const int64_t last_row = p.top_left ? p.seqlen_q - 1 : p.seqlen_k - 1;
  return p.varlen || p.window_left < last_row;
}

bool limits_right(const Problem& p) {
  if (p.window_right < 0) return false;
  const int64_t first_row = p.top_left ? 0 : p.seqlen_k - p.seqlen_q;
  return p.varlen || p.window_right < p.seqlen_k - 1 - first_row;
}

/// The length that decisions on CUDA are taken by: that of all sequences or, packed, their mean. The host knows no more
/// than that, and a bound on the longest must not change what runs.
int64_t typical_length(const Problem& p, int64_t length, int64_t total) {
  return total > 0 && p.device == Device::kCuda ? ceil_div(total, std::max<int64_t>(1, p.batch)) : length;
}
int64_t typical_queries(const Problem& p) { return typical_length(p, p.seqlen_q, p.total_q); }
int64_t typical_keys(const Problem& p) { return typical_length(p, p.seqlen_k, p.total_k); }

/// Takes the decisions one after the other; later ones build on earlier ones. Reasons are put into words only where
/// somebody will read them.
class Planner {
 public:
  Planner(const Problem& problem, bool explain) : p_(problem), explain_(explain) {}

  Plan run() {
    choose_kernel();
    choose_mask_class();
    explain_products();
    choose_head_group();
    choose_splits();
    choose_tiles();
    choose_chunks();
    explain_work_list();
    choose_backward_schedule();
    return std::move(plan_);
  }

 private:
  template <class... Parts>
  void because(const Parts&... parts) {
    if (explain_) plan_.reasons.push_back(text(parts...));
  }

  void choose_kernel() {
    plan_.kernel = is_cuda_prefill() ? "sm80/forward" : kernel_of(p_.operation, p_.device);
    choose_bias_kernel();
    const bool backward = p_.operation == Operation::kBackward;
    if (!(backward || p_.operation == Operation::kForward) || p_.device != Device::kCuda) return;
    if (p_.compute_capability != kHopperCapability) return;
    if (!p_.hopper_kernels) {
      because(plan_.kernel, ": kernels for Hopper are not in this build (architecture 90a), or FLASH_EXT_HOPPER=0");
      return;
    }
    const std::string obstacle = backward ? hopper_backward_obstacle() : hopper_forward_obstacle();
    if (obstacle.empty() && p_.dtype == DType::kFloat32) {
      plan_.kernel = backward ? "sm90/backward_f32" : "sm90/forward_f32";
      because("wgmma, for compute capability 9.0");
    } else if (obstacle.empty()) {
      plan_.kernel = backward ? "sm90/backward" : "sm90/forward";
      because("wgmma and the copy engine, for compute capability 9.0");
      const std::string options = backward ? "" : general_options();
      if (!options.empty()) because("general class of the kernel: measured faster with", options, " than sm80/forward");
    } else {
      because(plan_.kernel, ": the kernel for Hopper does not serve ", obstacle);
    }
  }

  void choose_bias_kernel() {
    if (p_.operation != Operation::kBackward || p_.device != Device::kCuda || !p_.has_bias) return;
    plan_.bias_kernel = "sm80/bias_gradient";
    if (p_.compute_capability != kHopperCapability || !p_.hopper_kernels) return;
    std::string obstacle = obstacle_without_masks();
    if (obstacle.empty() && kernel_head_dim(p_.head_dim, p_.head_dim_v) > sm90::kMaxBiasHeadDim) {
      obstacle = text("head_dim beyond ", sm90::kMaxBiasHeadDim);
    }
    if (obstacle.empty()) {
      plan_.bias_kernel = "sm90/bias_gradient";
      because("gradient of bias: sm90/bias_gradient, if the rows of bias are made of pieces of 16 bytes");
    } else {
      because("gradient of bias: sm80/bias_gradient, as the kernel for Hopper does not serve ", obstacle);
    }
  }

  /// What asks for the forward's variant with options for Hopper.
  std::string general_options() const {
    const bool drops = dropout_threshold(p_.dropout_p) > 0;
    return text(p_.has_bias ? " bias" : "", p_.has_mask ? " mask" : "", p_.has_block_mask ? " block mask" : "",
                drops ? " dropout" : "");
  }

  sm90::ForwardVariant hopper_general_class() const {
    return sm90::forward_variant({dropout_threshold(p_.dropout_p) > 0, p_.has_bias, p_.bias_dtype == p_.dtype,
                                  p_.has_mask || p_.has_block_mask,
                                  sm90::scales_first(p_.softcap, p_.has_alibi, p_.softmax_scale)});
  }

  bool has_wide_bias() const {
    return p_.has_bias && p_.bias_dtype != DType::kFloat16 && p_.bias_dtype != DType::kBFloat16;
  }

  /// What the forward for Hopper cannot do.
  std::string hopper_forward_obstacle() const {
    if (p_.dtype != DType::kFloat32) {
      const std::string obstacle = hopper_obstacle();
      return obstacle.empty() && has_wide_bias() ? "bias of 32 bits or more" : obstacle;
    }
    return float32_obstacle();
  }

  /// What the kernels of float32 for Hopper cannot do.
  std::string float32_obstacle() const {
    if (p_.allow_tf32) return "TF32";
    const std::string options = general_options();
    if (!options.empty()) return text("float32 with", options);
    return empty_tensors() ? "empty tensors" : "";
  }

  bool empty_tensors() const { return p_.batch == 0 || p_.seqlen_q == 0 || p_.seqlen_k == 0; }

  /// What the backward for Hopper cannot do.
  std::string hopper_backward_obstacle() const {
    if (p_.deterministic) return "deterministic";
    if (p_.dtype == DType::kFloat32) return float32_obstacle();
    if (p_.softmax_scale <= 0) return text("softmax_scale ", p_.softmax_scale);
    if (p_.head_dim != p_.head_dim_v) return text("head_dim ", p_.head_dim_v, " of v beside ", p_.head_dim);
    // Shared memory has no room for all of them; a bias of keys takes none, but strides are not looked at here.
    const bool fills = has_wide_bias() && (p_.has_mask || p_.has_block_mask || p_.dropout_p > 0);
    if (fills && p_.head_dim > 64 && p_.head_dim <= sm90::kMaxNarrowHeadDim)
      return "bias of 32 bits or more beside masks or dropout beyond head_dim 64";
    if (p_.head_dim <= sm90::kMaxNarrowHeadDim) return hopper_obstacle();
    if (p_.has_bias) return text("bias beyond head_dim ", sm90::kMaxNarrowHeadDim);
    if (p_.softcap > 0) return text("softcap beyond head_dim ", sm90::kMaxNarrowHeadDim);
    if (p_.has_alibi) return text("ALiBi beyond head_dim ", sm90::kMaxNarrowHeadDim);
    return obstacle_without_masks();
  }

  /// What the gradient of bias for Hopper cannot do, nor the backward of wide heads.
  std::string obstacle_without_masks() const {
    if (p_.has_mask) return "mask";
    if (p_.has_block_mask) return "block mask";
    if (p_.dropout_p > 0) return "dropout";
    return hopper_obstacle();
  }

  /// What no kernel for Hopper can do but those of float32.
  std::string hopper_obstacle() const {
    if (p_.dtype == DType::kFloat32) return "float32";
    if (p_.broadcast) return "a stride of 0";
    return empty_tensors() ? "empty tensors" : "";
  }

  void choose_mask_class() {
    const bool left = limits_left(p_), right = limits_right(p_);
    const bool window = left || (right && p_.window_right > 0);
    if (window || p_.has_mask || p_.has_block_mask) {
      plan_.mask_class = MaskClass::kGeneral;
      because("mask class general:", window ? text(" window (", p_.window_left, ", ", p_.window_right, ")") : "",
              p_.has_mask ? " mask" : "", p_.has_block_mask ? " block mask" : "");
    } else if (right) {
      plan_.mask_class = MaskClass::kCausal;
      because("mask class causal: no key to the right of the diagonal, no other limit");
    } else if (p_.window_left >= 0 || p_.window_right >= 0) {
      because("mask class full: at these lengths the window hides no key");
    } else {
      because("mask class full: no window and no mask");
    }
  }

  /// Which products stand for those of float32, for the reader: the kernel looks at allow_tf32 itself.
  void explain_products() {
    if (p_.device == Device::kCpu || p_.dtype != DType::kFloat32) return;
    const bool attention = p_.operation == Operation::kForward || p_.operation == Operation::kBackward;
    const bool has_choice = attention || is_cuda_prefill();
    if (p_.allow_tf32 && has_choice) {
      because("products in TF32, rounded to 11 bits: torch's float32 matmul setting allows it");
    } else if (plan_.kernel == "sm90/forward_f32" || plan_.kernel == "sm90/backward_f32") {
      because(
          "products of six in bfloat16 each, as accurate as float32: torch's float32 matmul setting allows no less");
    } else {
      because("products of three in TF32 each, as accurate as float32",
              has_choice ? ": torch's float32 matmul setting allows no less" : "");
    }
  }

  /// Heads that are worked on together, where that saves reading keys.
  void choose_head_group() {
    constexpr int64_t kFewQueries = 64;
    const bool decode = p_.operation == Operation::kDecode;
    const bool forward = decode || (p_.operation == Operation::kForward && p_.device == Device::kCpu);
    const bool free_order = !p_.has_block_mask && p_.dropout_p == 0;
    if (!forward || !free_order || p_.heads_q == p_.heads_kv || is_cuda_prefill()) return;
    if (p_.batch_invariant) {
      plan_.head_group = p_.heads_q / p_.heads_kv;
      because(plan_.head_group, " heads share a tile: batch_invariant, so the other sequences' queries do not count");
      return;
    }
    if (p_.seqlen_q > kFewQueries && p_.device == Device::kCpu) return;
    plan_.head_group = p_.heads_q / p_.heads_kv;
    because(plan_.head_group, " heads share a tile: with ", p_.seqlen_q, " queries, reading the keys is what costs");
  }

  int64_t query_tiles(int64_t block_m) const {
    return p_.batch * (p_.heads_q / plan_.head_group) * ceil_div(typical_queries(p_) * plan_.head_group, block_m);
  }

  void choose_splits() {
    if (p_.operation != Operation::kDecode) {
      because("1 split: the result does not depend on the number of threads");
    } else if (p_.batch_invariant) {
      plan_.split_size = kBatchInvariantSplitSize;
      plan_.num_splits = std::max<int64_t>(1, ceil_div(p_.seqlen_k, plan_.split_size));
      because("split every ", plan_.split_size, " keys: batch_invariant, so nothing but the sequence itself decides");
    } else if (p_.num_splits > 0) {
      const int64_t cap = p_.device == Device::kCuda ? kCudaMaxSplits : kMaxSplits;
      const int64_t most = std::clamp<int64_t>(ceil_div(p_.seqlen_k, kCpuBlockN), 1, cap);
      plan_.num_splits = std::min(p_.num_splits, most);
      because(counted(plan_.num_splits, "split"), ": num_splits = ", p_.num_splits, ", at most ", most, " for ",
              p_.seqlen_k, " keys in tiles of ", kCpuBlockN);
    } else if (is_cuda_prefill()) {
      because("1 split: ", typical_queries(p_),
              " queries a sequence are enough work, and fill the tiles of the forward kernel");
    } else if (p_.device == Device::kCuda) {
      const int64_t tiles = query_tiles(cuda_decode_block_m()), keys = keys_seen();
      const int64_t key_bytes = (p_.head_dim + p_.head_dim_v) * (p_.dtype == DType::kFloat32 ? 4 : 2);
      plan_.num_splits = choose_cuda_splits(tiles, p_.num_workers, cuda_decode_blocks_per_sm(), keys, key_bytes);
      const bool ragged = p_.varlen && p_.batch > 1;
      if (ragged) plan_.num_splits = std::max(plan_.num_splits, ceil_div(keys, kMaxRaggedSplitSize));
      plan_.num_splits = std::min(plan_.num_splits, kCudaMaxSplits);
      because(counted(plan_.num_splits, "split"), ": ", counted(tiles, "tile"), " of (batch, head, query) and ", keys,
              " keys each on ", p_.num_workers, " SMs", ragged ? ", lengths that may differ" : "");
    } else {
      const int64_t work_items = query_tiles(kCpuMaxBlockM);
      plan_.num_splits = choose_num_splits(work_items, kCpuWantedItems, p_.seqlen_k);
      because(counted(plan_.num_splits, "split"), ": ", counted(work_items, "tile"), " of (batch, head, query), ",
              kCpuWantedItems, " work items wanted, ", p_.seqlen_k, " keys");
    }
  }

  /// Decoding so many queries, parts of prompts, that products are what costs, not reading the keys.
  bool is_cuda_prefill() const {
    if (p_.operation != Operation::kDecode || p_.device != Device::kCuda || p_.batch_invariant) return false;
    const int64_t queries = typical_queries(p_);
    const int64_t tiles = p_.batch * p_.heads_q * ceil_div(queries, kCudaPrefillRows);
    return p_.num_splits <= 1 && queries >= kCudaPrefillRows && tiles >= p_.num_workers;
  }

  /// Rows of a tile of CUDA decoding: more rows read the keys less often.
  int64_t cuda_decode_block_m() const {
    if (is_cuda_prefill()) return kCudaPrefillRows;
    const bool few_rows = typical_queries(p_) * plan_.head_group <= kCudaDecodeFewRows;
    return few_rows || p_.batch_invariant || p_.dtype == DType::kFloat32 ? kCudaDecodeFewRows : kCudaDecodeManyRows;
  }

  /// That keep the memory of an SM busy: blocks have fewer warps, and less under way, where rows are long or many.
  int64_t cuda_decode_blocks_per_sm() const {
    const bool wide = std::max(p_.head_dim, p_.head_dim_v) > 128, exact = p_.dtype == DType::kFloat32;
    if (wide || exact) return wide && exact ? 2 : 3;
    return cuda_decode_block_m() == kCudaDecodeManyRows ? 2 : 1;
  }

  /// By a tile of queries, at most.
  int64_t keys_seen() const {
    if (p_.window_left < 0 || p_.window_right < 0) return p_.seqlen_k;
    return std::min(p_.seqlen_k, p_.window_left + p_.window_right + typical_queries(p_));
  }

  void choose_tiles() {
    constexpr int64_t kWantedItems = 32;
    if (p_.device == Device::kCuda && p_.operation == Operation::kDecode) {
      plan_.block_m = cuda_decode_block_m();
      if (is_cuda_prefill()) return;
      because("tile ", plan_.block_m, " rows: ", p_.batch_invariant ? "batch_invariant" : "by the number of queries");
      return;
    }
    if (plan_.kernel == "sm90/forward") {
      const bool general = !general_options().empty();
      const sm90::HeadDims dims = sm90::forward_head_dims(p_.head_dim, p_.head_dim_v, general);
      const sm90::ForwardShape shape =
          general ? sm90::forward_options_shape(dims, hopper_general_class()) : choose_hopper_shape(dims);
      plan_.block_m = sm90::kWarpgroupRows * shape.groups;
      plan_.block_n = shape.block_n;
      because("tile ", plan_.block_m, " x ", plan_.block_n, ": ", counted(shape.groups, "warpgroup"), " of ",
              sm90::kWarpgroupRows, " queries, for head dims up to ", dims.qk,
              dims.v < dims.qk ? text(", of v up to ", dims.v) : "");
      if (!general) choose_key_splits(dims, shape);
      return;
    }
    if (plan_.kernel == "sm90/forward_f32") {
      const int head_dim = sm90::forward_f32_head_dim(p_.head_dim, p_.head_dim_v);
      const sm90::ForwardF32Shape shape = sm90::forward_f32_shape(head_dim);
      plan_.block_m = sm90::kWarpgroupRows * shape.groups;
      plan_.block_n = shape.keys;
      because("tile ", plan_.block_m, " x ", plan_.block_n, ": ", shape.groups, " warpgroups of ", sm90::kWarpgroupRows,
              " queries, for head dims up to ", head_dim);
      return;
    }
    if (plan_.kernel == "sm90/backward_f32") {
      const int head_dim = sm90::backward_f32_head_dim(p_.head_dim, p_.head_dim_v);
      plan_.block_m = sm90::kBackwardF32BlockM;
      plan_.block_n = sm90::kBackwardF32BlockN;
      because("tile ", plan_.block_m, " x ", plan_.block_n, ": three warpgroups share its products, ",
              sm90::backward_f32_blocks(head_dim) > 1 ? "two blocks of a cluster its columns, " : "",
              "for head dims up to ", head_dim);
      return;
    }
    if (plan_.kernel == "sm90/backward") {
      const int head_dim = sm90::backward_head_dim(p_.head_dim);
      const sm90::BackwardShape shape = sm90::backward_shape(head_dim);
      plan_.block_m = sm90::kBackwardBlockM;
      plan_.block_n = sm90::kWarpgroupRows * shape.groups;
      because("tile ", plan_.block_m, " x ", plan_.block_n, ": ", shape.groups,
              head_dim > sm90::kMaxNarrowHeadDim ? " blocks of a cluster, " : " warpgroups of ", sm90::kWarpgroupRows,
              " keys", head_dim > sm90::kMaxNarrowHeadDim ? " each" : "", ", for head dims up to ", head_dim);
      return;
    }
    if (p_.device == Device::kCuda) return;  // the kernel's own configuration decides, which knows the shared memory
    plan_.block_n = kCpuBlockN;
    plan_.block_m = kCpuMaxBlockM;
    if (p_.operation == Operation::kBackward || p_.operation == Operation::kWeightsBackward) {
      because("tile ", plan_.block_m, " x ", plan_.block_n, ": work is cut along the keys");
    } else if (p_.batch_invariant) {
      plan_.block_m = kCpuMinBlockM;
      because("tile ", plan_.block_m, " x ", plan_.block_n, ": the same for every batch");
    } else {
      const auto work_items = [&] { return plan_.num_splits * query_tiles(plan_.block_m); };
      while (plan_.block_m > kCpuMinBlockM && work_items() < kWantedItems) plan_.block_m /= 2;
      because("tile ", plan_.block_m, " x ", plan_.block_n, ": ", work_items(), " work items, at least ", kWantedItems,
              " wanted");
    }
  }

  /// Where the host knows all lengths, and for the plain variant: others have no registers left for parts.
  void choose_key_splits(const sm90::HeadDims& dims, const sm90::ForwardShape& shape) {
    if (p_.varlen || sm90::has_score_options(p_.softcap, p_.has_alibi, p_.softmax_scale)) return;
    const KeySplitsPlan chosen = plan_key_splits(p_, dims, shape, explain_);
    plan_.key_splits = chosen.splits;
    if (!chosen.reason.empty()) because(chosen.reason);
  }

  /// By what a warpgroup's tile costs, in keys: those that it visits, and the latency of the first step and the last.
  /// Both factors are H200's at 512 to 16384 keys.
  sm90::ForwardShape choose_hopper_shape(const sm90::HeadDims& dims) {
    constexpr double kEnds = 1.25;  // in tiles
    const sm90::ForwardShape many = sm90::forward_shape(dims, sm90::ForwardTiles::kManyKeys);
    const sm90::ForwardShape few = sm90::forward_shape(dims, sm90::ForwardTiles::kFewKeys);
    if (sm90::has_score_options(p_.softcap, p_.has_alibi, p_.softmax_scale)) return many;
    if (has_few_queries(dims, many)) return few_queries_shape(dims);
    if (!sm90::has_tiles(dims, sm90::ForwardTiles::kFewKeys)) return many;
    const double many_keys = hopper_keys(many.block_n), few_keys = hopper_keys(few.block_n);
    const bool fewer = sm90::few_keys_cost(dims) * few_keys + kEnds * few.block_n < many_keys + kEnds * many.block_n;
    const sm90::ForwardShape chosen = fewer ? few : many;
    because("tiles of ", chosen.block_n, " keys: a warpgroup visits ", few_keys, " in tiles of ", few.block_n, " and ",
            many_keys, " in tiles of ", many.block_n, "; few cost more each, but less at both ends of a sequence");
    return chosen;
  }

  /// Whether tiles of many queries would leave too many warpgroups without rows. Measured on H200.
  bool has_few_queries(const sm90::HeadDims& dims, const sm90::ForwardShape& many) const {
    if (!sm90::has_tiles(dims, sm90::ForwardTiles::kFewQueries)) return false;
    const sm90::ForwardShape few = sm90::forward_shape(dims, sm90::ForwardTiles::kFewQueries);
    const int64_t queries = typical_queries(p_), keys = typical_keys(p_);
    const auto rows_of = [&](const sm90::ForwardShape& shape) {
      const int64_t block_m = shape.groups * sm90::kWarpgroupRows;
      return static_cast<double>(ceil_div(queries, block_m) * block_m);
    };
    constexpr double kFewerRows = 0.8;
    return rows_of(few) <= kFewerRows * rows_of(many) && std::max(queries, keys) <= sm90::most_of_few_queries(dims);
  }

  sm90::ForwardShape few_queries_shape(const sm90::HeadDims& dims) {
    const sm90::ForwardShape few = sm90::forward_shape(dims, sm90::ForwardTiles::kFewQueries);
    because("tiles for few queries, in ", counted(few.ctas_per_sm, "CTA"),
            " an SM: with more or fewer rows, sequences of ", typical_queries(p_),
            " queries would leave more warpgroups without any");
    return few;
  }

  /// Keys of the tiles that a warpgroup visits, on average over some of them; sequences of the typical length.
  double hopper_keys(int64_t block_n) const {
    constexpr int64_t kRows = sm90::kWarpgroupRows, kMostGroups = 8;
    const int64_t queries = typical_queries(p_), keys = typical_keys(p_);
    const Window window = make_window(p_.window_left, p_.window_right, p_.top_left, queries, keys);
    const int64_t groups = ceil_div(queries, kRows), step = ceil_div(groups, kMostGroups);
    int64_t tiles = 0, looked_at = 0;
    for (int64_t group = 0; group < groups; group += step, ++looked_at) {
      const int64_t first = group * kRows, end = std::min(first + kRows, queries);
      const TileRange range = tile_range(first, end, keys, window, block_n);
      tiles += range.end - range.begin;
    }
    return static_cast<double>(tiles * block_n) / static_cast<double>(looked_at);
  }

  void choose_chunks() {
    constexpr int64_t kChunkKeys = 512;  // enough work to pay for one more partial dq
    constexpr int64_t kWorkItems = 16;   // wanted in all, to keep a few threads busy at the end as well
    if (p_.device == Device::kCuda) return;
    if (p_.operation == Operation::kWeightsBackward) {
      because("1 key chunk per head: dlse of a query sums over all its keys");
    } else if (p_.operation == Operation::kBackward) {
      const int64_t heads = std::max<int64_t>(1, p_.batch * p_.heads_kv);
      const int64_t most = ceil_div(p_.seqlen_k, kChunkKeys);
      plan_.num_chunks = std::max<int64_t>(1, std::min(most, ceil_div(kWorkItems, heads)));
      because(counted(plan_.num_chunks, "key chunk"), " per head: ", heads, " pairs of batch and head, ", p_.seqlen_k,
              " keys; shapes alone decide, so the result does not depend on the number of threads");
    }
  }

  /// For the reader: launches ask lists_tiles() themselves, with the tiles of the kernel that runs.
  void explain_work_list() {
    constexpr int64_t kUsualBlock = 128;
    const bool backward = p_.operation == Operation::kBackward;
    const bool forward = p_.operation == Operation::kForward || is_cuda_prefill();
    const int64_t rows = backward ? p_.total_k : p_.total_q, longest = backward ? p_.seqlen_k : p_.seqlen_q;
    if (p_.device == Device::kCpu || rows == 0 || !(backward || forward)) return;
    const int64_t planned = backward ? plan_.block_n : plan_.block_m, block = planned > 0 ? planned : kUsualBlock;
    const int64_t heads = backward ? p_.heads_kv : p_.heads_q, grid = p_.batch * ceil_div(longest, block);
    const int64_t most = most_tiles(p_.batch, longest, rows, block);
    const char* const what = backward ? " keys" : " queries";
    if (lists_tiles(p_.batch, longest, rows, block, heads)) {
      because("packed: tiles of ", block, what, " are listed on the device, longest first; ", most,
              " a head at most, where the bound on the lengths allows ", grid);
    } else {
      because("packed: a grid of ", counted(grid, "tile"), " of ", block, what, " a head, ", most,
              " of which exist at most: a list is not worth its time");
    }
  }

  void choose_backward_schedule() {
    if (p_.device != Device::kCuda || p_.operation != Operation::kBackward || empty_tensors()) return;
    const BackwardSchedulePlan chosen = plan_backward_schedule(p_, plan_.kernel, explain_);
    plan_.schedule = chosen.schedule;
    because(chosen.reason);
  }

  const Problem& p_;
  const bool explain_;
  Plan plan_;
};

}  // namespace

Support supports(const Problem& problem) {
  for (const auto rule : {check_sizes, check_options, check_scale, check_device}) {
    const Support support = rule(problem);
    if (!support.ok) return support;
  }
  return {};
}

int64_t choose_num_splits(int64_t work_items, int64_t num_workers, int64_t seqlen_k) {
  const int64_t to_fill = ceil_div(num_workers, std::max<int64_t>(1, work_items));
  const int64_t worthwhile = seqlen_k / kMinSplitSize;
  return std::clamp<int64_t>(std::min(to_fill, worthwhile), 1, kMaxSplits);
}

Plan make_plan(const Problem& problem, bool explain) {
  const Support support = supports(problem);
  if (!support.ok) throw std::invalid_argument(support.reason);
  return Planner(problem, explain).run();
}

}  // namespace flash_ext::plan
