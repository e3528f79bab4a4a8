// From a call to jobs: chooses the instruction set, divides the work into items, allocates memory, and runs the steps
// in their order.
//
// A thread that is free takes the next item, so that causal and ragged problems balance themselves. The plan decides
// how a problem is divided; a result never depends on the number of threads.
#include "attention.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "matrix_units.h"
#include "scratch.h"
#include "tile_sizes.h"

namespace flash_ext::cpu {
namespace {

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

/// F16C is older than AVX2 and in every machine that has it.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

/// The instruction set that FLASH_EXT_CPU_ISA names; no better one is used.
std::string wanted_instruction_set() {
  const char* variable = std::getenv("FLASH_EXT_CPU_ISA");
  const std::string wish = variable == nullptr || *variable == '\0' ? "amx" : variable;
  if (wish != "amx" && wish != "avx512" && wish != "avx2" && wish != "baseline") {
    throw std::runtime_error("flash_ext: FLASH_EXT_CPU_ISA must be amx, avx512, avx2 or baseline, got " + wish);
  }
  return wish;
}

/// The best set that the machine has, up to the wanted one.
const InstructionSet& detect_instruction_set() {
  const std::string wish = wanted_instruction_set();
#if defined(__x86_64__)
  __builtin_cpu_init();
  if ((wish == "amx" || wish == "avx512") && has_avx512()) return kAvx512;
  if (wish != "baseline" && has_avx2()) return kAvx2;
#endif
  return kBaseline;
}

const InstructionSet& current_instruction_set() {
  static const InstructionSet& set = detect_instruction_set();
  return set;
}

bool detect_matrix_units() {
#if defined(FLASH_EXT_HAS_AMX)
  return wanted_instruction_set() == "amx" && &current_instruction_set() == &kAvx512 && may_use_matrix_units();
#else
  return false;
#endif
}

const Kernels& kernels_for(const AttentionParams& p) {
  const InstructionSet& set = current_instruction_set();
  if (p.dtype == DType::kFloat64) return set.for_double;
#if defined(FLASH_EXT_HAS_AMX)
  if (p.dtype == DType::kBFloat16 && uses_matrix_units()) return kAmxKernels;
#endif
  return set.for_float;
}

/// A thread is worth waking for this much work.
constexpr double kMinFlopsPerThread = 2e6;

/// Runs every item of the operation. `flops` is an estimate for all of them together.
template <class Job>
void run(const JobFunctions<Job>& operation, const Job& job, double flops, ParallelFor parallel_for) {
  const int64_t items = operation.items(job);
  if (items <= 0) return;
  const int64_t scratch_bytes = operation.scratch_bytes(job);
  const double threads = flops / kMinFlopsPerThread;
  const int64_t grain = threads <= 1 ? items : static_cast<int64_t>(static_cast<double>(items) / threads) + 1;
  std::atomic<int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
  parallel_for(0, items, grain, [&](int64_t, int64_t) {
    const Scratch scratch(scratch_bytes);
    if (scratch.data() == nullptr) {
      out_of_memory = true;
      return;
    }
    for (int64_t item = next++; item < items; item = next++) operation.run(job, item, scratch.data());
  });
  if (out_of_memory && next < items) throw std::bad_alloc();
}

/// Operations of one product over head_dim and one over head_dim_v of all queries and keys. Masks are not accounted
/// for.
double product_flops(const AttentionParams& p) {
  return 2.0 * static_cast<double>(p.batch * p.heads_q) * static_cast<double>(p.seqlen_q) *
         static_cast<double>(p.seqlen_k) * static_cast<double>(p.head_dim + p.head_dim_v);
}

double query_elements(const AttentionParams& p) {
  return static_cast<double>(p.batch * p.heads_q * p.seqlen_q) * static_cast<double>(p.head_dim + p.head_dim_v);
}

double key_elements(const AttentionParams& p) {
  return static_cast<double>(p.batch * p.heads_kv * p.seqlen_k) * static_cast<double>(p.head_dim + p.head_dim_v);
}

/// Rows per tile as planned, within what the kernels hold.
int64_t tile_rows_of(const AttentionParams& p) {
  return p.block_m > 0 && p.block_m < kMaxTileRows ? p.block_m : kMaxTileRows;
}

/// For each sequence, the number of tiles that a head has in all sequences before it. The last element is for all
/// sequences.
std::vector<int64_t> tiles_before(const Kernels& kernels, const AttentionParams& p, int64_t tile_rows, int64_t group) {
  std::vector<int64_t> before(p.batch + 1);
  for (int64_t b = 0; b < p.batch; ++b) before[b + 1] = before[b] + kernels.count_tiles(p, b, tile_rows, group);
  return before;
}

/// The number of rows of q in memory, for each head.
int64_t rows_in_memory(const AttentionParams& p) {
  return p.seq.cu_seqlens_q != nullptr ? p.total_q : p.batch * p.seqlen_q;
}

bool is_empty(const AttentionParams& p) { return p.batch == 0 || p.heads_q == 0 || p.seqlen_q == 0; }

}  // namespace

bool uses_matrix_units() {
  static const bool uses = detect_matrix_units();
  return uses;
}

void attention_forward(const ForwardParams& params, ParallelFor parallel_for) {
  const Kernels& kernels = kernels_for(params);
  ForwardJob job;
  job.params = params;
  run(kernels.clear_forward, job, query_elements(params), parallel_for);
  if (is_empty(params)) return;

  job.group = params.head_group;
  job.split_size = params.split_size;
  job.splits =
      params.split_size > 0 ? (params.seqlen_k + params.split_size - 1) / params.split_size : params.num_splits;
  if (job.splits < 1) job.splits = 1;
  job.tile_rows = tile_rows_of(params);
  const std::vector<int64_t> tiles = tiles_before(kernels, params, job.tile_rows, job.group);
  job.tiles_before = tiles.data();
  Buffer row_maxima, packed;
  if (params.max_logit != nullptr) {
    row_maxima = allocate({job.splits, params.heads_q, rows_in_memory(params), kernels.accumulate_bytes});
    job.row_maxima = row_maxima.get();
  }
  if (const int64_t bytes = kernels.packed_key_bytes(job); bytes > 0) {
    packed = allocate({bytes});
    job.packed_keys = packed.get();
    run(kernels.pack_keys, job, key_elements(params), parallel_for);
  }
  // Ranges of a fixed size are merged even if there is only one: the bits must not depend on how many there might be.
  const bool merges = job.splits > 1 || job.split_size > 0;
  Buffer partial_out, partial_lse;
  if (merges) {
    const int64_t rows = rows_in_memory(params), bytes = kernels.accumulate_bytes;
    partial_out = allocate({job.splits, params.heads_q, rows, params.head_dim_v, bytes});
    partial_lse = allocate({job.splits, params.heads_q, rows, bytes});
    job.partial_out = partial_out.get();
    job.partial_lse = partial_lse.get();
  }
  run(kernels.forward, job, product_flops(params), parallel_for);
  const double elements = query_elements(params) * static_cast<double>(job.splits);
  if (merges) run(kernels.merge_splits, job, elements, parallel_for);
  if (job.row_maxima != nullptr) {
    const double rows = elements / static_cast<double>(params.head_dim + params.head_dim_v);
    run(kernels.max_logit, job, rows, parallel_for);
  }
}

void attention_weights(const WeightsParams& params, ParallelFor parallel_for) {
  if (is_empty(params)) return;
  const Kernels& kernels = kernels_for(params);
  WeightsJob job;
  job.params = params;
  job.tile_rows = tile_rows_of(params);
  // The kernel writes the weights of all dense rows, used or not. Weights of packed rows are zero beforehand.
  AttentionParams written = params;
  if (params.seq.cu_seqlens_q == nullptr) written.seq.seqused_q = nullptr;
  const std::vector<int64_t> tiles = tiles_before(kernels, written, job.tile_rows, 1);
  job.tiles_before = tiles.data();
  run(kernels.weights, job, product_flops(params), parallel_for);
}

void attention_backward(const BackwardParams& params, ParallelFor parallel_for) {
  const Kernels& kernels = kernels_for(params);
  const bool of_weights = params.grad_weights.data != nullptr;
  BackwardJob job;
  job.params = params;
  run(kernels.clear_backward, job, query_elements(params), parallel_for);

  job.tile_rows = tile_rows_of(params);
  const std::vector<int64_t> tiles = tiles_before(kernels, params, job.tile_rows, 1);
  job.tiles_before = tiles.data();
  // dlse sums over all keys of a query, so a single item has to see them all.
  job.chunks = of_weights || params.num_chunks < 1 ? 1 : params.num_chunks;

  const int64_t rows = rows_in_memory(params);
  const int64_t bytes = kernels.accumulate_bytes;
  Buffer row_term;
  if (!of_weights) {
    row_term = allocate({params.heads_q, rows, bytes});
    job.row_term = row_term.get();
    run(kernels.row_terms, job, 2 * query_elements(params), parallel_for);
  }
  if (params.dq.data != nullptr || params.dk.data != nullptr || params.dv.data != nullptr ||
      params.dlse.data != nullptr) {
    Buffer partial_dq;
    if (job.chunks > 1 && params.dq.data != nullptr) {
      partial_dq = allocate({job.chunks, params.heads_q, rows, params.head_dim, bytes});
      job.partial_dq = partial_dq.get();
    }
    run(kernels.gradients, job, 2.5 * product_flops(params), parallel_for);
    if (job.partial_dq != nullptr) {
      run(kernels.reduce_dq, job, query_elements(params) * static_cast<double>(job.chunks), parallel_for);
    }
  }
  if (params.dbias.data != nullptr) run(kernels.bias_gradient, job, 1.5 * product_flops(params), parallel_for);
  if (params.dsink != nullptr)
    run(kernels.sink_gradient, job, 10.0 * static_cast<double>(params.heads_q * rows), parallel_for);
}

}  // namespace flash_ext::cpu
