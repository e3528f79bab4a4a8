// The kernels of one call of the backward, in their order:
//
//   row terms, first sums of dQ zeroed -> main kernel, sums of its splits -> dQ in the inputs' dtype -> dsink
#pragma once

#include "dq_store.cuh"
#include "kernels/launch.h"
#include "row_terms.cuh"

namespace flash_ext {

/// Names of the kernels in error messages.
struct BackwardKernelNames {
  const char *row_terms, *main, *dq, *dsink;
};

/// What the kernels before and after the main one are instantiated for. kPermuted: see row_terms.cuh.
template <class Element_, class DqLayout_, int kBlockM_, int kHeadDim_, bool kPermuted_ = false>
struct BackwardRowKernels {
  using Element = Element_;
  using DqLayout = DqLayout_;
  static constexpr int kBlockM = kBlockM_, kHeadDim = kHeadDim_;
  static constexpr bool kPermuted = kPermuted_;
};

/// Launches the kernel of row_terms.cuh. DqLayout may be void.
template <class Kernels>
void launch_row_terms(const BackwardParams& p, const BackwardWorkspace& workspace, const BackwardKernelNames& names,
                      cudaStream_t stream) {
  using Element = typename Kernels::Element;
  const LaunchShape rows{grid_of(RowTileOfCta::ctas(p, Kernels::kBlockM)), dim3(kRowTermThreads)};
  launch(names.row_terms, backward_row_terms_kernel<Element, Kernels::kHeadDim, Kernels::kBlockM, Kernels::kPermuted>,
         rows, stream, p, workspace);
}

/// Launches the kernel that computes the gradient of a sink from row terms, if that gradient is wanted.
template <class Kernels>
void launch_sink_gradient(const BackwardParams& p, const BackwardWorkspace& workspace, const BackwardKernelNames& names,
                          cudaStream_t stream) {
  if (!p.dsink) return;
  const LaunchShape heads{grid_of(p.heads_q), dim3(kRowTermThreads)};
  launch(names.dsink, sink_gradient_kernel<Kernels::kBlockM, Kernels::kPermuted>, heads, stream, p, workspace);
}

/// Launches the kernels of a backward. launch_first() launches the kernel that writes row terms. launch_main() launches
/// the main kernel; it is called only where the gradient of q, k or v is wanted. overlaps_previous: dQ's kernel may
/// start before the kernel before it has ended.
template <class Kernels, class LaunchFirst, class LaunchMain>
void launch_backward_sequence(const BackwardParams& p, const BackwardWorkspace& workspace,
                              const BackwardKernelNames& names, bool overlaps_previous, cudaStream_t stream,
                              LaunchFirst launch_first, LaunchMain launch_main) {
  constexpr int kBlockM = Kernels::kBlockM;
  const LaunchShape rows{grid_of(RowTileOfCta::ctas(p, kBlockM)), dim3(kRowTermThreads)};
  launch_first(rows);
  if (p.dq.data || p.dk.data || p.dv.data) launch_main();
  if (p.dq.data) {
    LaunchShape after_main = rows;
    after_main.overlaps_previous = overlaps_previous;
    using Element = typename Kernels::Element;
    launch(names.dq, store_dq_kernel<Element, typename Kernels::DqLayout, kBlockM, Kernels::kHeadDim>, after_main,
           stream, p, workspace);
  }
  launch_sink_gradient<Kernels>(p, workspace, names, stream);
}

/// The same with the row terms of row_terms.cuh.
template <class Kernels, class LaunchMain>
void launch_backward_sequence(const BackwardParams& p, const BackwardWorkspace& workspace,
                              const BackwardKernelNames& names, bool overlaps_previous, cudaStream_t stream,
                              LaunchMain launch_main) {
  const auto launch_first = [&](const LaunchShape&) { launch_row_terms<Kernels>(p, workspace, names, stream); };
  launch_backward_sequence<Kernels>(p, workspace, names, overlaps_previous, stream, launch_first, launch_main);
}

}  // namespace flash_ext
