// Copies to shared memory, which the warps of each role issue for themselves, and random bits for all.
#pragma once

#include "kernels/common/backward/options.cuh"
#include "kernels/common/backward/visibility.cuh"
#include "scheduler.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct BackwardLoads : BackwardWalk<Config> {
  using Base = BackwardWalk<Config>;
  using Base::Base;
  using Base::copies_bias, Base::kBlockM, Base::kBlockN, Base::kHeadDim, Base::kRoleThreads, Base::lse_stage,
      Base::makes_p, Base::p, Base::query_stage, Base::role_thread, Base::s_bias, Base::s_grad_out, Base::s_kept,
      Base::s_key, Base::s_minus_delta, Base::s_value, Base::s_words, Base::tile_index, Base::work_tile,
      Base::workspace;
  using typename Base::Element, typename Base::Kept, typename Base::WorkTile;

  __device__ __forceinline__ void load_keys(const Sequence& sequence, int first_key) const {
    load_tile<Element, kHeadDim, kRoleThreads, kBlockN>(
        makes_p ? s_key : s_value, key_rows<const Element, false>(p, makes_p ? p.k : p.v, sequence), first_key,
        sequence.seqlen_k, static_cast<int>(makes_p ? p.head_dim : p.head_dim_v), role_thread());
  }
  __device__ __forceinline__ void load_rows(uint32_t s_tile, RowSource<const Element, false> rows, int64_t head_offset,
                                            const BackwardStep& step, int num_rows, int64_t columns) const {
    rows.base += head_offset;
    load_tile<Element, kHeadDim, kRoleThreads, kBlockM>(s_tile, rows, step.tile * kBlockM, num_rows,
                                                        static_cast<int>(columns), role_thread());
  }
  /// Starts the copies of Q and lse of a step. `of`: the work tile, which need not lie in shared memory yet.
  __device__ __forceinline__ void load_queries(const WorkTile& of, const BackwardStep& step, int n) const {
    load_rows(query_stage(n), of.queries, step.head * p.q.head_stride, step, of.sequence.seqlen_q, p.head_dim);
    load_terms(lse_stage(n), workspace.lse + tile_index(of, step) * kBlockM);
  }
  /// Starts the copies of the first query tile early: without options it is known at once.
  __device__ __forceinline__ void load_first_queries(const WorkTile& of) const {
    const BackwardStep step = of.first_step();
    if (!Config::kHasOptions && makes_p && step.head < of.heads) load_queries(of, step, 0);
  }
  /// Starts the loads that the P warps need for a step. Bias and words are free again once the P warps have computed
  /// its P.
  __device__ __forceinline__ void load_for_weights(const PreparedStep& prepared, int n) const {
    load_queries(work_tile, prepared.step, n);
    if constexpr (Config::kHasOptions) {
      if (!work_tile.options.hides) return;
      Sequence sequence = work_tile.sequence;
      sequence.head += prepared.step.head;
      const int first_query = prepared.step.tile * kBlockM;
      if (work_tile.options.biased) {
        flash_ext::load_bias<kRoleThreads, kBlockM, kBlockN>(s_bias, p.bias, copies_bias, sequence, first_query,
                                                             work_tile.first_key);
      }
      if (prepared.flags & kStepMasked) {
        load_words<kRoleThreads, kBlockM, kBlockN>(s_words, p, workspace.visibility, sequence, prepared.step.tile,
                                                   work_tile.key_tile);
      }
    }
  }
  /// Computes the words of kept weights, in the dS warps for all warps, while the P warps compute P of the step before.
  __device__ __forceinline__ void compute_kept(const PreparedStep& prepared, int n) const {
    if constexpr (Config::kHasOptions) {
      const BackwardOptions& options = work_tile.options;
      if (!options.drops || prepared.flags & kStepPast) return;
#pragma unroll 1
      for (int word = role_thread(); word < Config::kKeptBytes / 4; word += kRoleThreads) {
        const int i = prepared.step.tile * kBlockM + Kept::query(word);
        const int j = work_tile.first_key / kDropoutKeys * kDropoutKeys + Kept::key(word);
        store_shared(s_kept + n % 2 * Config::kKeptBytes + 4 * word,
                     draw_kept_weights(p.dropout.rule, options.key, options.batch_head + prepared.step.head, i, j));
      }
    }
  }

  __device__ __forceinline__ void load_grad_out(const BackwardStep& step) const {
    load_rows(s_grad_out, work_tile.grad_out, step.head * p.grad_out.head_stride, step,
              p.grad_out.data ? work_tile.sequence.seqlen_q : 0, p.head_dim_v);
    load_terms(s_minus_delta, workspace.minus_delta + tile_index(step) * kBlockM);
  }
  __device__ __forceinline__ static void load_terms(uint32_t s_terms, const float* terms) {
    const int thread = role_thread();
    if (thread < kBlockM / 4) ptx::cp_async_16(s_terms + 16 * thread, terms + 4 * thread);
  }
};

}  // namespace flash_ext::sm80
