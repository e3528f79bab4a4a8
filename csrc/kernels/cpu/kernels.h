// What one instruction set offers, as plain functions over work items. Items of a job are independent of each other:
// each owns what it writes, so that order and number of threads cannot change a bit of the result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"

namespace flash_ext::cpu {

/// Forward: an item is (batch, split, group of heads, tile of rows). Merge of splits: an item is up to 16 rows of out
/// of one head. Largest scores: (batch, head).
struct ForwardJob {
  ForwardParams params;
  int64_t group = 1;  // heads whose rows share a tile: 1, or all that share a key head
  int64_t tile_rows = 0;
  const int64_t* tiles_before = nullptr;  // (batch + 1): tiles of a head, in the sequences before each
  int64_t splits = 1;
  int64_t split_size = 0;       // 0: the keys of a sequence in `splits` equal parts
  void* partial_out = nullptr;  // (splits, heads_q, rows of q, head_dim_v), accumulate type; null without splits
  void* partial_lse = nullptr;  // (splits, heads_q, rows of q)
  void* row_maxima = nullptr;   // (splits, heads_q, rows of q): the largest score of each row; null if not wanted
  void* packed_keys = nullptr;  // for matrix units (packed_keys.h); null where each item packs what it visits
};

struct WeightsJob {
  WeightsParams params;
  int64_t tile_rows = 0;
  const int64_t* tiles_before = nullptr;
};

/// Row terms, sum of dq: an item is (batch, head, tile of rows). Gradients: (batch, key head, chunk of keys). Bias: see
/// bias_gradient.h.
struct BackwardJob {
  BackwardParams params;
  int64_t tile_rows = 0;
  const int64_t* tiles_before = nullptr;
  int64_t chunks = 1;
  void* row_term = nullptr;    // (heads_q, rows of q): rowsum(dO * O) - dlse
  void* partial_dq = nullptr;  // (chunks, heads_q, rows of q, head_dim); null with one chunk
};

/// An operation over the items of a job.
template <class Job>
struct JobFunctions {
  int64_t (*items)(const Job&);
  int64_t (*scratch_bytes)(const Job&);
  void (*run)(const Job&, int64_t item, void* scratch);
};

/// The operations for one accumulate type.
struct Kernels {
  int64_t accumulate_bytes;
  int64_t (*count_tiles)(const AttentionParams&, int64_t batch, int64_t tile_rows, int64_t group);  // of a sequence

  int64_t (*packed_key_bytes)(const ForwardJob&);  // 0 where nothing is to be packed beforehand

  JobFunctions<ForwardJob> clear_forward;
  JobFunctions<ForwardJob> pack_keys;
  JobFunctions<ForwardJob> forward;
  JobFunctions<ForwardJob> merge_splits;
  JobFunctions<ForwardJob> max_logit;
  JobFunctions<WeightsJob> weights;
  JobFunctions<BackwardJob> clear_backward;
  JobFunctions<BackwardJob> row_terms;
  JobFunctions<BackwardJob> gradients;
  JobFunctions<BackwardJob> reduce_dq;
  JobFunctions<BackwardJob> bias_gradient;
  JobFunctions<BackwardJob> sink_gradient;
};

/// The operations of one instruction set.
struct InstructionSet {
  Kernels for_float;
  Kernels for_double;
};

extern const InstructionSet kBaseline;
#if defined(__x86_64__)
extern const InstructionSet kAvx2;
extern const InstructionSet kAvx512;
extern const Kernels kAmxKernels;  // for bfloat16, beside kAvx512
#endif

}  // namespace flash_ext::cpu
