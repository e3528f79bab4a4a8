#include "dropout_mask.h"

#include <algorithm>

#include "kernels/common/dropout/philox.h"

namespace flash_ext::cpu {
namespace {

constexpr int64_t kGrainElements = 16384;  // per task, so that threads are worth their start

void draw_row(const DropoutParams& dropout, const PhiloxKey& key, int64_t batch_head, int64_t i, int64_t seqlen_k,
              bool* keep) {
  for (int64_t group = 0; group < seqlen_k; group += kDropoutKeys) {
    const int64_t end = std::min(group + kDropoutKeys, seqlen_k);
    for (int64_t first = group; first < std::min(group + 8, end); first += 2) {
      const uint32_t flags = draw_kept_weights(dropout.rule, key, batch_head, i, first);
      for (int64_t pair = first; pair < end; pair += 8)
        for (int64_t j = pair; j < std::min(pair + 2, end); ++j) keep[j] = flags >> dropout_bit(i, j) & 1u;
    }
  }
}

}  // namespace

void dropout_mask(const DropoutMaskParams& p, ParallelFor parallel_for) {
  const PhiloxKey key = philox_key(p.dropout.rng[0], p.dropout.rng[1]);
  const int64_t rows = p.batch * p.heads_q * p.seqlen_q;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, p.seqlen_k));
  parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      draw_row(p.dropout, key, n / p.seqlen_q, n % p.seqlen_q, p.seqlen_k, p.keep + n * p.seqlen_k);
    }
  });
}

}  // namespace flash_ext::cpu
