// Parts of a CTA's storage, after the tiles in shared memory, that several kernels of the backward have: row terms and
// named barriers.
#pragma once

#include "kernels/common/barriers.h"
#include "kernels/common/ring.cuh"
#include "pieces.cuh"
#include "scheduler.cuh"

namespace flash_ext::sm90 {

/// Metadata of the steps of a list, which comes with Q.
template <class Config, bool kListsBlocks = Config::kListsBlocks, bool kPersistent = Config::kPersistent>
struct BackwardListedMetadata {};
template <class Config>
struct BackwardListedMetadata<Config, true, false> {
  ListedQueries step_metadata[Config::kStages];
};
template <class Config>
struct BackwardListedMetadata<Config, true, true> {
  BackwardPieces<Config> step_metadata[kMetadataSlots];
  int32_t step_flags[kMetadataSlots];  // BackwardPiecesFlags
};

/// Row terms of the stages of Q and dO.
template <class Config>
struct BackwardStagedTerms : BackwardListedMetadata<Config> {
  __align__(16) float lse[Config::kStages][Config::kBlockM];  // base 2
  __align__(16) float minus_delta[Config::kStages][Config::kBlockM];
};

/// Named barriers of the consumers. A name says what the last arrival means. 0 is __syncthreads().
template <class Config>
struct BackwardBarriers {
  static_assert(kKeyGroups<Config> <= 3, "there are barriers for three consumer warpgroups");
  enum Id : int {
    kRowsSanitised = 1,  // Q and dO of a stage are sanitised; at the end: V and Q have been read
    // K of a consumer warpgroup is sanitised.
    kKeysSanitised0 = 2,
    kKeysSanitised1 = 3,
    kKeysSanitised2 = 4,  // only with three warpgroups; else the number is that of kKeptWritten0
    // Words of kept weights are written, by a consumer warpgroup.
    kKeptWritten0 = kKeysSanitised0 + kKeyGroups<Config>,
    kKeptWritten1,
    kKeptWritten2,
    // Of wide heads: the words of the step before have been read; those of this step are written.
    kWordsRead,
    kWordsWritten,
  };

  __device__ __forceinline__ static int keys_sanitised(int warpgroup) { return kKeysSanitised0 + warpgroup; }
  __device__ __forceinline__ static int kept_written(int warpgroup) { return kKeptWritten0 + warpgroup; }
};

}  // namespace flash_ext::sm90
