#include "block_lists.h"
#include "operators.h"

namespace flash_ext::api {
namespace {

/// Checks a mask and fills in its tensors, which the kernel reads. Copies of tensors that are not contiguous go to
/// `owned`.
void fill_mask(TransposedListsParams& params, const Tensor& offsets, const Tensor& indices, const Tensor& bitmap_ids,
               const Tensor& bitmaps, std::vector<Tensor>& owned) {
  const Argument offsets_arg("offsets", offsets), indices_arg("indices", indices);
  offsets_arg.dtype_is(ScalarType::Int).rank_is(3, "(batch, heads, rows + 1)").counts(0, "batch entries");
  offsets_arg.counts(1, "heads").counts(2, "rows of blocks");
  check(offsets.size(2) > 0, "offsets must be (batch, heads, rows + 1), got shape ", to_string(shape_of(offsets)));
  indices_arg.dtype_is(ScalarType::Int).rank_is(1, "(blocks)").counts(0, "blocks").same_device_as(offsets_arg);
  Argument("bitmap_ids", bitmap_ids)
      .dtype_is(ScalarType::Int)
      .same_device_as(offsets_arg)
      .shape_is(shape_of(indices), "indices.shape");
  Argument("bitmaps", bitmaps)
      .dtype_is(ScalarType::Int)
      .rank_is(3, "(bitmaps, block_m, block_n / 32)")
      .same_device_as(offsets_arg);
  check(bitmaps.size(1) > 0 && bitmaps.size(1) % 32 == 0 && bitmaps.size(2) > 0,
        "bitmaps must be (bitmaps, block_m, block_n / 32) with block_m a multiple of 32, got shape ",
        to_string(shape_of(bitmaps)));

  const auto own = [&](const Tensor& tensor) { return int32_values(owned.emplace_back(tensor)); };
  const Tensor rows = with_contiguous_rows(offsets);
  params.offsets = own(rows);
  params.offsets_batch_stride = rows.stride(0);
  params.offsets_head_stride = rows.stride(1);
  params.indices = own(made_contiguous(indices));
  params.bitmap_ids = own(made_contiguous(bitmap_ids));
  params.bitmaps = own(made_contiguous(bitmaps));
  params.batch = static_cast<int32_t>(offsets.size(0));
  params.heads = static_cast<int32_t>(offsets.size(1));
  params.rows = static_cast<int32_t>(offsets.size(2) - 1);
  params.num_blocks = indices.size(0);
  params.num_bitmaps = bitmaps.size(0);
  params.block_m = bitmaps.size(1);
  params.block_n = bitmaps.size(2) * 32;
}

Tensors4 block_lists_transposed(const Tensor& offsets, const Tensor& indices, const Tensor& bitmap_ids,
                                const Tensor& bitmaps, int64_t columns, int64_t max_blocks) {
  const DeviceScope scope(offsets);
  TransposedListsParams params;
  std::vector<Tensor> owned;
  fill_mask(params, offsets, indices, bitmap_ids, bitmaps, owned);
  check_range("columns", columns, 0);
  check_rows(offsets.size(0) * offsets.size(1), columns);
  params.columns = static_cast<int32_t>(columns);
  params.max_blocks = max_blocks;

  const Shape transposed = {params.num_bitmaps, params.block_n, params.block_m / 32};
  const BlockLists lists = new_lists(offsets, {offsets.size(0), offsets.size(1), columns + 1}, max_blocks, transposed);
  params.transposed_offsets = int32_values(lists.offsets);
  params.transposed_indices = int32_values(lists.indices);
  params.transposed_bitmap_ids = int32_values(lists.bitmap_ids);
  params.transposed_bitmaps = int32_values(lists.bitmaps);
  run_block_lists_transposed(offsets, params);
  return lists.tensors();
}

}  // namespace

FLASH_EXT_OPERATORS(m) { m.impl("block_lists_transposed", TORCH_BOX(&block_lists_transposed)); }

}  // namespace flash_ext::api
