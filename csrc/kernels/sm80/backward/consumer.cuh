// A CTA of the backward's main kernel: its half-steps, and the tasks of its warps in each. See kernel.cuh.
#pragma once

#include "epilogue.cuh"
#include "kernels/common/sanitise.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct BackwardConsumer : BackwardSums<Config> {
  using Base = BackwardSums<Config>;
  using Base::accumulate, Base::add_dq, Base::compute_ds, Base::compute_kept, Base::exponentiate,
      Base::exponentiate_with_options, Base::for_each_with_term, Base::gradient_tile, Base::has, Base::kBlockM,
      Base::kBlockN, Base::kHeadDim, Base::kM, Base::kN, Base::kRematerialisesKeys, Base::kRematerialisesValue,
      Base::kRoleThreads, Base::load_for_weights, Base::load_grad_out, Base::makes_p, Base::multiply_rows, Base::next,
      Base::p, Base::skip_turns_before, Base::prepare, Base::prepares, Base::previous, Base::put_step,
      Base::query_stage, Base::rematerialise, Base::role_thread, Base::s_grad_out, Base::s_key, Base::s_minus_delta,
      Base::s_value, Base::store_sums, Base::store_weights, Base::weight_tile, Base::work_tile;
  using Base::Base;
  using typename Base::Element;

  /// Computes S^T and P^T in the P warps, dP^T and dS^T in the dS warps.
  __device__ __forceinline__ void compute_p(const PreparedStep& now, int n) {
    float s[kM][kN][4] = {};
    if (!makes_p) for_each_with_term(s, s_minus_delta, [](float& x, float term) { x = term; });
    const uint32_t s_keys = kRematerialisesKeys    ? ptx::reread(s_key) + (makes_p ? 0 : Config::kKeyBytes)
                            : makes_p              ? s_key
                            : kRematerialisesValue ? rematerialise(s_value)
                                                   : s_value;
    multiply_rows(s, s_keys, makes_p ? query_stage(n) : s_grad_out);
    if (!makes_p) {
      compute_ds(s, now, n);
      store_weights(gradient_tile(n), s);
    } else if constexpr (Config::kHasOptions) {
      exponentiate_with_options(s, now, n);
    } else {
      exponentiate(s, now.step, n);
      store_weights(weight_tile(n), s);
    }
  }

  /// Computes the second products, of tile n in the P warps and of tile n - 1 in the dS warps, and dQ of tile n - 1.
  __device__ __forceinline__ void consume_p(const PreparedStep& now, const BackwardStep& before, int n) {
    const bool wanted = makes_p ? p.dv.data && !has(now, kStepPast) : p.dk.data && n > 0;
    if (wanted) {
      accumulate(makes_p ? weight_tile(n) : gradient_tile(n - 1), makes_p ? s_grad_out : query_stage(n - 1));
    }
    if (n > 0) {
      skip_turns_before(n - 1);
      add_dq(before, n - 1);
    }
    if (has(now, kStepPast)) skip_turns_before(n);
  }

  __device__ __forceinline__ void run() {
    if constexpr (Config::kHasOptions) {
      if (prepares()) {
        put_step(work_tile.first_step(), 0);
        put_step(next(work_tile.ring[0].step), 1);
      }
      __syncthreads();
      if (!makes_p) compute_kept(work_tile.ring[0], 0);
      if (makes_p && !has(work_tile.ring[0], kStepPast)) load_for_weights(work_tile.ring[0], 0);
    }
    ptx::cp_async_commit();
    PreparedStep walked = prepare(work_tile.first_step());
    int half = 0;
#pragma unroll 1
    for (;; ++half) {
      const int n = half / 2;
      const bool odd = half % 2 != 0;
      const PreparedStep& now = Config::kHasOptions ? work_tile.ring[n % 8] : walked;
      const bool past = has(now, kStepPast);
      // The warps that copied a tile are the first to use it, in the next half-step; the others have copied nothing.
      const bool makes_weights = makes_p != odd && !past;
      if (makes_p || half != 0) ptx::cp_async_wait<0>();
      if (makes_weights) {
        if (half == 0) sanitise_loaded_tile<Element, kHeadDim, kRoleThreads, kBlockN, true>(s_key, role_thread());
        // A hidden pair has weight 0, and 0 * NaN is NaN. A query that does see an Inf or NaN has it in its lse or D.
        if (has(now, kStepPartial | kStepNonFinite)) {
          sanitise_loaded_tile<Element, kHeadDim, kRoleThreads, kBlockM>(odd ? s_grad_out : query_stage(n),
                                                                         role_thread());
        }
      }
      __syncthreads();
      if (makes_weights) {
        compute_p(now, n);
      } else {
        if (makes_p) {
          const PreparedStep then = Config::kHasOptions ? work_tile.ring[(n + 1) % 8] : prepare(next(now.step));
          if (odd && !has(then, kStepPast)) load_for_weights(then, n + 1);
        } else {
          if (!past) load_grad_out(now.step);
        }
        ptx::cp_async_commit();
        if (Config::kHasOptions && !makes_p && !past) {
          if (prepares()) put_step(next(work_tile.ring[(n + 1) % 8].step), n + 2);
          compute_kept(work_tile.ring[(n + 1) % 8], n + 1);
        }
        consume_p(now, Config::kHasOptions ? work_tile.ring[(n + 7) % 8].step : previous(now.step), n);
      }
      if (past) break;
      if (!Config::kHasOptions && odd) walked = prepare(next(walked.step));
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // before store_sums() overwrites tiles: V may still have been under way, or K still read
    store_sums();
  }
};

}  // namespace flash_ext::sm80
