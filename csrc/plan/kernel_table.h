// The kernels and what each one serves. The first row that fits a problem is taken.
//
// A kernel for another architecture is one more row, an entry of KernelId, and an Architecture: nothing else in this
// folder chooses by a kernel or names a compute capability. supports() asks for the lowest one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "problem.h"

namespace flash_ext::plan {

struct BackwardTiles;
struct Draft;

enum class KernelId {
  kNone,
  kCpuForward,
  kCpuBackward,
  kCpuWeights,
  kSm80Forward,
  kSm80Backward,
  kSm80Decode,
  kSm80Weights,
  kSm80BiasGradient,
  kSm90Forward,
  kSm90ForwardShort,
  kSm90ForwardF32,
  kSm90Backward,
  kSm90BackwardPersistent,
  kSm90BackwardWide,
  kSm90BackwardOptions,
  kSm90BackwardShort,
  kSm90BackwardF32,
  kSm90BiasGradient,
};

/// What a kernel computes: an operation, or a part of one that has kernels of its own.
enum class Task { kForward, kBackward, kWeights, kWeightsBackward, kDecode, kBiasGradient };

constexpr Task task_of(Operation operation) { return static_cast<Task>(operation); }
static_assert(task_of(Operation::kForward) == Task::kForward && task_of(Operation::kDecode) == Task::kDecode &&
                  task_of(Operation::kWeightsBackward) == Task::kWeightsBackward,
              "operations come first, in their order");

struct Architecture {
  const char* family;  // of GPUs: "Hopper"
  Device device;
  int64_t compute_capability;
  bool later_ones_too;      // its kernels run on later ones, too; else on this one alone
  const char* target;       // as FLASH_EXT_ARCHS names it
  const char* environment;  // the variable that turns its kernels off
};

/// How decoding on CUDA splits keys over CTAs. kForSms: until all SMs are busy. A chunk of a prompt fills the query
/// tiles of the forward: with kNone its keys are not split, with kByTiles choose_tiles() decides.
enum class DecodeSplits { kForSms, kNone, kByTiles };

struct KernelRow {
  KernelId id;
  const char* name;  // path below csrc/kernels
  const Architecture* architecture;
  unsigned tasks;   // bits 1 << Task
  unsigned dtypes;  // bits 1 << DType
  int64_t most_head_dim;
  unsigned takes;      // Features
  const char* reason;  // why it comes before the rows that follow; null if it is the only one

  /// Fills in block_m, block_n and what depends on them; for a bias gradient, how it uses shared memory.
  void (*choose_tiles)(Draft&);
  /// Backward on CUDA: returns its tiles and their costs. Null for a kernel with a CTA for each head.
  BackwardTiles (*backward_tiles)(const Problem&);

  const char* float_products = nullptr;  // what a product of float32 consists of: "six in bfloat16"
  bool has_tf32_setting = false;         // torch's float32 matmul setting decides how products round
  bool reads_by_tma = false;             // TMA reads no absent tensors and no strides of 0

  DecodeSplits decode_splits = DecodeSplits::kForSms;

  /// Whether the kernel serves a problem whose features it takes; null: it serves all of them.
  bool (*serves)(const Problem&) = nullptr;
};

/// The first row that serves a task of a supported problem.
const KernelRow& choose_kernel(const Problem& problem, Task task);

/// Why no row of a more specific architecture was taken: "the kernel for Hopper does not serve a mask". Empty if there
/// is no such row.
std::string why_not_special(const Problem& problem, Task task, const KernelRow& chosen);

/// The first row of a kernel; throws std::logic_error for kNone.
const KernelRow& row_of(KernelId id);

/// Path below csrc/kernels; empty for kNone.
const char* kernel_name(KernelId id);

/// The names of all kernels, each once.
std::vector<const char*> kernel_names();

/// The architectures whose kernels run on one compute capability alone.
std::vector<Architecture> special_architectures();

/// The lowest compute capability that kernels run on.
int64_t first_compute_capability();

}  // namespace flash_ext::plan
