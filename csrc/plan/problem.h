// Problem: everything about a call that the plan decides by: shapes, options and device. No pointers, no values.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/params.h"

namespace flash_ext::plan {

enum class Operation { kForward, kBackward, kWeights, kWeightsBackward, kDecode };

constexpr std::pair<const char*, Operation> kOperationNames[] = {{"forward", Operation::kForward},
                                                                 {"backward", Operation::kBackward},
                                                                 {"weights", Operation::kWeights},
                                                                 {"weights_backward", Operation::kWeightsBackward},
                                                                 {"decode", Operation::kDecode}};

enum class Device { kCpu, kCuda };

constexpr std::pair<const char*, Device> kDeviceNames[] = {{"cpu", Device::kCpu}, {"cuda", Device::kCuda}};

struct Problem {
  Operation operation = Operation::kForward;

  Device device = Device::kCpu;
  int64_t compute_capability = 0;    // CUDA: 90 for sm_90
  bool own_kernels = true;           // CUDA: kernels for exactly this compute capability are built and switched on
  bool matrix_units = false;         // CPU: products of bfloat16 run on matrix units (AMX)
  int64_t num_workers = 1;           // threads of a CPU, SMs of a GPU
  int64_t shared_bytes_per_cta = 0;  // CUDA: the most shared memory of a CTA; 0 = not known: a plan names no tiles
  int64_t shared_bytes_per_sm = 0;   // CUDA: shared memory of an SM for all its CTAs

  DType dtype = DType::kFloat32;
  int64_t batch = 1;
  int64_t heads_q = 1;
  int64_t heads_kv = 1;
  int64_t seqlen_q = 1;  // packed: a bound on the longest sequence; on a CPU its exact length
  int64_t seqlen_k = 1;  // the same for k; decode: the rows that a sequence of the cache can hold
  int64_t total_q = 0;   // packed: rows of all sequences; else 0
  int64_t total_k = 0;
  int64_t head_dim = 64;
  int64_t head_dim_v = 64;

  double softmax_scale = 1.0;
  double softcap = 0.0;
  int64_t window_left = -1;  // -1 = unlimited
  int64_t window_right = -1;
  bool top_left = false;
  double dropout_p = 0.0;
  bool allow_tf32 = false;  // CUDA, float32

  bool broadcast = false;    // q, k or v has a stride of 0
  bool varlen = false;       // cu_seqlens or seqused: the host does not know the lengths
  bool paged = false;        // block_table
  int64_t page_size = 0;     // with paged: rows of a page
  bool has_leftpad = false;  // cache_leftpad
  bool has_bias = false;
  DType bias_dtype = DType::kFloat16;  // with has_bias
  bool bias_in_chunks = true;          // its rows can be copied in 16-byte chunks
  bool bias_per_key = false;           // it is the same for all queries
  bool bias_of_all_batches = false;    // it is the same for all batch entries, but not for all heads
  bool has_mask = false;
  bool mask_per_key = false;  // the same for all queries
  bool has_block_mask = false;
  int64_t block_m = 0;  // with has_block_mask: queries and keys of a block
  int64_t block_n = 0;
  bool has_alibi = false;
  bool has_sink = false;

  bool wants_max_logit = false;  // forward: the largest score of each head of each batch entry, too
  bool deterministic = false;    // backward
  int64_t num_splits = 1;        // decode: 0 = the plan decides
  bool batch_invariant = false;  // decode: the same bits whatever else is in the batch
};

}  // namespace flash_ext::plan
