// Attention on a CPU: the functions that csrc/api calls.
//
// Every function is exact, bitwise repeatable and gives the same bits for any number of threads. Memory beyond inputs
// and outputs grows with seqlen, never with its square. The api checks arguments. Lengths and pages that still lie
// outside a tensor are clamped to it. The functions throw std::bad_alloc, and std::runtime_error where the environment
// variable FLASH_EXT_CPU_ISA names no instruction set.
#pragma once

#include <cstdint>
#include <functional>

#include "kernels/params.h"

namespace flash_ext::cpu {

/// Runs part of a range, [begin, end). Must not throw.
using RangeBody = std::function<void(int64_t, int64_t)>;

/// Calls body on disjoint parts of [begin, end), each of at least `grain`, on as many threads as it likes.
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, const RangeBody& body);

/// out = softmax(scores) v and lse, and max_logit if wanted; k and v may be a paged or left-padded cache. Writes every
/// element of out and lse; max_logit, where it is wanted, is -inf beforehand.
void attention_forward(const ForwardParams& params, ParallelFor parallel_for);

/// Writes every element of the requested gradients; with grad_weights set, the gradients of attention_weights.
void attention_backward(const BackwardParams& params, ParallelFor parallel_for);

/// Writes every element of weights.
void attention_weights(const WeightsParams& params, ParallelFor parallel_for);

/// Whether products of bfloat16 run on matrix units (AMX). The first call requests them from Linux for the whole
/// process, so only bfloat16 calls should ask. Throws like the functions above.
bool uses_matrix_units();

}  // namespace flash_ext::cpu
