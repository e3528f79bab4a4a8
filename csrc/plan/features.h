// Features: what a call may require of a kernel. A row of the kernel table lists the features that its kernel takes.
// Products of q, k and v with a positive scale, windows and sinks need none: every kernel serves them.
#pragma once

#include <string>

#include "problem.h"

namespace flash_ext::plan {

enum Feature : unsigned {
  kBias = 1 << 0,
  kWideBias = 1 << 1,  // of 32 bits or more
  kMask = 1 << 2,
  kBlockMask = 1 << 3,
  kDropout = 1 << 4,
  kWideBiasBesideMasks = 1 << 5,  // a wide bias together with masks or dropout
  kSoftcap = 1 << 6,
  kAlibi = 1 << 7,
  kNotPositiveScale = 1 << 8,
  kOwnValueDim = 1 << 9,  // v has another head dim than q and k
  kStrideOfZero = 1 << 10,
  kEmptyTensors = 1 << 11,
  kTf32 = 1 << 12,
  kDeterministic = 1 << 13,
  kFewQueries = 1 << 14,     // decode on CUDA: too few queries per sequence to fill the tiles of the forward
  kBiasOfOddRows = 1 << 15,  // bias that cannot be copied in 16-byte chunks
  kManyRows = 1 << 16,       // more queries or keys than the backward of short sequences keeps in shared memory
  kPacked = 1 << 17,         // packed sequences: only the device knows how many rows each has
  kGroupedHeads = 1 << 18,   // fewer heads of k and v than of q
  kDeterministicBesideOptions = 1 << 19,
  kFewTiles = 1 << 20,        // decode on CUDA, dense queries: fewer query tiles than SMs
  kPagesOfOddRows = 1 << 21,  // pages that TMA cannot copy into swizzled tiles
  kLeftPadOfPages = 1 << 22,  // sequences that begin anywhere within a page
  kFewPackedTiles = 1 << 23,  // decode on CUDA, packed queries: fewer query tiles than SMs
  kFixedSplits = 1 << 24,     // decode on CUDA: the caller says how the keys are split
  kDeterministicBesideMasks = 1 << 25,
  kAllFeatures = (1 << 26) - 1,
};

/// The features of a problem, as bits.
unsigned features_of(const Problem& problem);

/// Whether kernels can copy the bias in 16-byte chunks: its rows allow it, and it is no float64.
bool copies_bias_in_chunks(const Problem& problem);

/// A feature in words: "softmax_scale -1".
std::string words_of(Feature feature, const Problem& problem);

/// Several features in words, with a space before each.
std::string words_of_all(unsigned features, const Problem& problem);

}  // namespace flash_ext::plan
