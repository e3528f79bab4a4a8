#include "block_lists.h"

namespace flash_ext::api {

void check_range(const char* name, int64_t value, int64_t least, int64_t most) {
  check(value >= least && value <= most, name, " must be in [", least, ", ", most, "], got ", value);
}

BlockLists new_lists(const Tensor& like, const Shape& offsets, int64_t blocks, const Shape& bitmaps) {
  check_range("max_blocks", blocks, 0);
  check(bitmaps[0] <= kMostInt32, "too many bitmaps: ", bitmaps[0], ", at most ", kMostInt32, " are possible");
  return {new_empty(like, offsets, ScalarType::Int), new_empty(like, {blocks}, ScalarType::Int),
          new_empty(like, {blocks}, ScalarType::Int), new_empty(like, bitmaps, ScalarType::Int)};
}

void check_rows(int64_t lists, int64_t rows) {
  check(lists == 0 || rows < kMostInt32 / lists, "too many rows of blocks: ", lists, " lists of ", rows, ", at most ",
        kMostInt32, " are possible");
}

}  // namespace flash_ext::api
