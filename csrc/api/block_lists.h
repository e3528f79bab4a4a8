// interval_block_lists and block_lists_transposed up to the launch: checks, allocation and parameters, the same on
// every device.
#pragma once

#include <limits>
#include <tuple>

#include "checks.h"
#include "kernels/common/block_lists/interval_lists.h"
#include "kernels/common/block_lists/transposed_lists.h"
#include "tensors.h"

namespace flash_ext::api {

/// The tensors of a block mask.
struct BlockLists {
  Tensor offsets;     // (batch, heads, rows + 1)
  Tensor indices;     // (max_blocks)
  Tensor bitmap_ids;  // (max_blocks)
  Tensor bitmaps;     // (num_bitmaps, block_m, block_n / 32)

  std::tuple<Tensor, Tensor, Tensor, Tensor> tensors() const { return {offsets, indices, bitmap_ids, bitmaps}; }
};

constexpr int64_t kMostInt32 = std::numeric_limits<int32_t>::max();

inline int32_t* int32_values(const Tensor& tensor) { return static_cast<int32_t*>(address(tensor)); }

void check_range(const char* name, int64_t value, int64_t least, int64_t most = kMostInt32);

/// Kernels count in 32 bits: the rows of all lists, and one offset more for each list.
void check_rows(int64_t lists, int64_t rows);

/// Allocates lists of so many `blocks`, with `offsets` and `bitmaps` of these shapes, on the device of `like`.
BlockLists new_lists(const Tensor& like, const Shape& offsets, int64_t blocks, const Shape& bitmaps);

}  // namespace flash_ext::api
