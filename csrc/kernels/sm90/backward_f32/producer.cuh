// The warpgroup of the float32 backward that loads the first tiles, and computes dQ and adds it to memory.
#pragma once

#include "kernels/common/tile.cuh"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/reduction.h"
#include "kernels/ptx/reread.h"
#include "kernels/sm90/common/float_products.cuh"
#include "warp.cuh"

namespace flash_ext::sm90 {

/// A warp of the warpgroup that computes dQ and adds it to memory.
template <class Config>
class BackwardF32Dq : BackwardF32Warp<Config> {
 public:
  using Base = BackwardF32Warp<Config>;
  using Base::Base;
  using typename Base::Step;
  using Products = FloatProducts;
  static constexpr int kPanels = Config::kPanels;

  __device__ __forceinline__ void run() {
    if (warp_ == 0 && lane_ == 0) load_first();
    __syncwarp();
    this->for_each_step([&](const Step& step) { add(step); });
  }

 private:
  using Base::at_, Base::lane_, Base::storage_, Base::warp_, Base::work_tile_;

  __device__ __forceinline__ void load_first() {
    Step step = work_tile_.first_step();
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      if (step.head >= work_tile_.heads) break;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        this->load_query(step, panel);
        this->load_grad(step, panel);
      }
      work_tile_.advance(step);
      at_.advance();
    }
    at_.count = 0;
  }

  /// dQ += dS K. dS goes to registers, so that its slot is soon free.
  __device__ __forceinline__ void add(const Step& step) const {
    Products::Operand ds;
    wait_for(storage_.ds_full[at_.tile()], at_.parity());
    read(ds);
    this->release(storage_.ds_empty[at_.tile()]);
    if constexpr (Config::kCluster > 1) {
      if (lane_ == 0) ptx::cluster_arrive(this->in_other(address(storage_.other_empty)));
    }
    if (!this->workspace_.rows.dq) return;
#pragma unroll
    for (int panel = 0; panel < Config::kFullPanels; ++panel) add_panel<kPanelColumns / 8>(step, panel, ds);
    if constexpr (Config::kHasHalf) add_panel<kPanelColumns / 16>(step, Config::kFullPanels, ds);
  }

  template <int kN>
  __device__ __forceinline__ void add_panel(const Step& step, int panel, const Products::Operand& ds) const {
    float sum[kN][4];
    Products::start(sum, ds, this->key_subtile(panel));
    ptx::wgmma_wait<0>();
    ptx::fence_operand(sum);
    send(step, panel, sum);
  }

  /// Reads dS of this warp's 16 queries.
  __device__ __forceinline__ void read(Products::Operand& ds) const {
    const int lane = ptx::reread(lane_), row = 16 * warp_ + lane % 16;
    const uint32_t s_row = this->s_ds() + row * kPanelRowBytes;
#pragma unroll
    for (int part = 0; part < kFloatParts; ++part) {
#pragma unroll
      for (int k = 0; k < Products::kSteps; ++k)
        ptx::ldmatrix_x4(ds[part][k], s_row + part * kPartBytes + ((2 * k + lane / 16) ^ (lane % 8)) * 16);
      ptx::wait_for_fragments(ds[part]);
    }
  }

  template <int kN>
  __device__ __forceinline__ void send(const Step& step, int panel, const float (&sum)[kN][4]) const {
    const int64_t row = this->workspace_tile(step) * Config::kBlockM + warp_ * 16;
    float* const g_lane =
        this->workspace_.rows.dq + row * Config::kHeadDim + 16 * this->first_column(panel) + lane_ * 4;
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int n = 0; n < kN; ++n) ptx::reduce_add_4(g_lane + n * 128, sum[n]);
#endif
  }
};

}  // namespace flash_ext::sm90
