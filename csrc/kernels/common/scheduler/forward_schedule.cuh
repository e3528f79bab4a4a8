// The order in which persistent CTAs take the work tiles of a forward.
#pragma once

#include "kernels/common/divisor.h"
#include "kernels/common/host_device.h"
#include "kernels/common/scheduler/work_list.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/grid.h"
#include "kernels/ptx/grid_dependency.h"

namespace flash_ext {

/// The order in which CTAs take their work tiles: sections of heads whose keys stay in L2, and in a section the query
/// tiles with the most keys first; or as a list says (common/scheduler/work_list.cuh). Each CTA takes its next tile
/// when it has loaded most of its last one, which balances a causal mask, sequences of different lengths, and SMs of
/// different speed.
struct ForwardSchedule {
  int blocks_m;       // of the longest sequence
  int heads;          // of all batch entries
  int section_heads;  // so many heads run side by side
  int last_section;   // from this head on, all run side by side; a multiple of section_heads
  // Counts the positions taken, besides the first of each CTA. Null where each CTA has one position at most, or
  // in_turn.
  unsigned long long* taken;
  // section_tiles divides positions; section_width, or last_width in the last section, a position within its section.
  LongDivisor section_tiles = LongDivisor(int64_t{section_heads} * blocks_m);
  LongDivisor section_width = LongDivisor(section_heads), last_width = LongDivisor(heads - last_section);
  int64_t work_tiles = int64_t{heads} * blocks_m;  // with a list: at most
  LongDivisor heads_of_entry = LongDivisor(1);     // of a batch entry
  WorkList list = {};    // of packed sequences; then nothing above but `taken` and `work_tiles` counts
  bool in_turn = false;  // each CTA follows turn_after(), and no counter is needed

  __device__ __forceinline__ int64_t take() const {
    if (!taken) return size();
    ptx::wait_for_previous_grid();  // it zeroes the counter
    return static_cast<int64_t>(ptx::grid_ctas() + atomicAdd(taken, 1ull));
  }

  /// The position of a CTA that comes after `position`.
  __device__ __forceinline__ int64_t next(int64_t position) const { return in_turn ? turn_after(position) : take(); }

  FLASH_EXT_HOST_DEVICE int64_t size() const { return work_tiles; }

  template <class WorkTile>
  __device__ __forceinline__ void trim(int64_t, WorkTile&) const {}

  /// Finds the work tile at a position of the order.
  __device__ __forceinline__ TileIndex locate(int64_t position) const {
    if (list) return list.locate(static_cast<int>(position));
    int head, block;
    locate_in_sections(position, head, block);
    return of_entry(head, block);
  }

 protected:
  /// The next position of a CTA. The order goes to and fro over the CTAs, so that a CTA with a long tile gets a short
  /// one next.
  __device__ __forceinline__ static int64_t turn_after(int64_t position) {
    const uint32_t ctas = ptx::grid_ctas();
    return position + 2 * (ctas - 1 - static_cast<uint32_t>(position) % ctas) + 1;
  }

  /// Turns a head among those of all batch entries into one of its entry.
  __device__ __forceinline__ TileIndex of_entry(int head, int block) const {
    const int batch = static_cast<int>(heads_of_entry.quotient(head));
    return {batch, head - batch * static_cast<int>(heads_of_entry.value), block};
  }

  /// Finds the head, among those of all batch entries, and the query tile of a position.
  __device__ __forceinline__ void locate_in_sections(int64_t position, int& head, int& block) const {
    const int section = static_cast<int>(section_tiles.quotient(position));
    const int first_head = min(section * section_heads, last_section);
    const LongDivisor& width = first_head < last_section ? section_width : last_width;
    const uint64_t rest = position - uint64_t{static_cast<uint32_t>(first_head)} * static_cast<uint32_t>(blocks_m);
    const uint32_t row = static_cast<uint32_t>(width.quotient(rest));
    block = blocks_m - 1 - static_cast<int>(row);
    head = first_head + static_cast<int>(rest - row * width.value);
  }
};

/// Makes a schedule follow the list in its workspace, where tiles are listed.
inline void use_list(ForwardSchedule& schedule, const WorkListPlan& plan, void* workspace) {
  if (!plan.listed) return;
  schedule.list = plan.view(workspace);
  schedule.taken = &schedule.list.head->taken;
  schedule.work_tiles = grid_size(plan.max_work_tiles());
}

/// Zeroes the counter of work tiles. The kernel after it may start while this one runs.
void zero_forward_workspace(void* workspace, cudaStream_t stream);

}  // namespace flash_ext
