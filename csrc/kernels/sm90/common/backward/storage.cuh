// What kernels of the backward have in common of the storage of a CTA, behind the tiles in shared memory: row terms and
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
};

/// Row terms of the stages of Q and dO.
template <class Config>
struct BackwardStagedTerms : BackwardListedMetadata<Config> {
  __align__(16) float lse[Config::kStages][Config::kBlockM];  // base 2
  __align__(16) float minus_delta[Config::kStages][Config::kBlockM];
};

/// Named barriers of the consumers, after what the last arrival means. 0 is __syncthreads().
template <class Config>
struct BackwardBarriers {
  enum Id : int {
    kRowsSanitised = 1,  // Q and dO of a stage; in the end also: V and Q are read no more
    kKeysSanitised = 2,  // K: one for each warpgroup
    kKeptWritten = kKeysSanitised + kKeyGroups<Config>  // words of kept weights: one for each warpgroup
  };
};

}  // namespace flash_ext::sm90
