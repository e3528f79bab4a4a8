// Which variant of the backward serves a call with options, for the plan too.
#pragma once

#include <cstdint>

namespace flash_ext::sm90 {

enum StepFlags : int {
  kStepPast = 1,       // there is no such step
  kStepSanitised = 2,  // some pair may be hidden, and Q or dO may hold Inf or NaN
  kStepMasked = 4,     // masks hide some pair
  kStepBiased = 8,     // a bias of pairs may hide some pair
  kStepSoftcapped = 16,
  kStepDrops = 32,
  kStepAlibi = 64,
  kStepKeyBiased = 128,   // a per-key bias or mask
  kStepOfElements = 256,  // beside kStepBiased, for wide heads: the bias is read element by element
};

constexpr int kAnyOptions = -1;

/// Options with a kernel of their own. Tests of step flags lie between two products and cost a fifth of a step in all.
/// So calls with one option, or with one of two pairs of options, have a kernel without tests, on the pipelined loop
/// where the head_dim has it.
constexpr int kOptionVariants[] = {kStepAlibi,
                                   kStepSoftcapped,
                                   kStepBiased,
                                   kStepKeyBiased,
                                   kStepMasked,
                                   kStepDrops,
                                   kStepBiased | kStepKeyBiased,
                                   kStepDrops | kStepKeyBiased};

/// Whether a variant of the table is for these options.
template <int kCount>
constexpr bool has_variant(const int (&variants)[kCount], int options) {
  for (const int own : variants)
    if (own == options) return true;
  return false;
}

/// Whether the pipelined loop serves `options`, as serving_options() gives them. Options together with a block mask
/// take the loop without overlap.
constexpr bool pipelines(int options, bool has_blocks) {
  return options == 0 || (!has_blocks && has_variant(kOptionVariants, options));
}

/// Options that the persistent kernel serves, at head_dim 64. Others take the loop without overlap there: a bias or a
/// mask of pairs, whose tiles have 64 queries, and dropout, which is as fast.
constexpr int kPersistentOptions[] = {kStepAlibi, kStepSoftcapped, kStepKeyBiased};

constexpr bool persists(int options) { return options == 0 || has_variant(kPersistentOptions, options); }

/// For a head_dim with the pipelined loop: whether the loop without overlap still serves some call with these options.
/// It serves any options together, and what a block mask alone asks for.
constexpr bool serves_beside_pipelined(int options) { return !pipelines(options, (options & kStepMasked) != 0); }

/// Whether the pipelined loop can add to dQ in turns. A mask of pairs leaves out steps, whose turns nobody would take.
constexpr bool can_take_turns(int options) { return (options & kStepMasked) == 0; }

/// Options with a kernel of their own for wide heads: one alone, some also beside a per-key bias or mask. Each of
/// these kernels can bound weights (LargeLse), so a large softcap needs no other.
constexpr int kWideOptions[] = {kStepAlibi,
                                kStepSoftcapped,
                                kStepBiased,
                                kStepBiased | kStepOfElements,
                                kStepKeyBiased,
                                kStepMasked,
                                kStepDrops,
                                kStepAlibi | kStepKeyBiased,
                                kStepSoftcapped | kStepKeyBiased,
                                kStepBiased | kStepKeyBiased,
                                kStepDrops | kStepKeyBiased};

/// Up to head_dim 128. With a larger softcap, weights may have to be bounded (LargeLse), for which the variant of
/// softcap alone has no registers.
constexpr double kLargestSoftcapAlone = 4e4;

/// What a call asks for.
struct BackwardAsked {
  bool softcap, alibi, drops;
  bool bias, bias_of_keys;   // the same for all queries
  bool mask_of_keys, masks;  // of keys alone; of pairs
  bool bias_by_panels;       // of 16 bits, in 16-byte chunks: TMA brings it
  bool bias_dtype_of_inputs;
  bool large_softcap;  // beyond kLargestSoftcapAlone
};

constexpr int options_of(const BackwardAsked& call) {
  int flags = 0;
  if (call.drops) flags |= kStepDrops;
  if (call.softcap) flags |= kStepSoftcapped;
  if (call.bias && !call.bias_of_keys) flags |= kStepBiased;
  if ((call.bias && call.bias_of_keys) || call.mask_of_keys) flags |= kStepKeyBiased;
  if (call.alibi) flags |= kStepAlibi;
  if (call.masks) flags |= kStepMasked;
  return flags;
}

/// The options of the variant that serves a call: the call's own, or any; 0: it has none.
constexpr int serving_options(const BackwardAsked& call) {
  const bool simple_bias = !call.bias || call.bias_of_keys || (call.bias_by_panels && call.bias_dtype_of_inputs);
  const int options = options_of(call);
  if (options == 0) return 0;
  if (call.large_softcap) return kAnyOptions;
  return simple_bias && has_variant(kOptionVariants, options) ? options : kAnyOptions;
}

/// The same for wide heads. has_even_keys: the number of keys is even.
constexpr int serving_wide_options(const BackwardAsked& call, bool has_even_keys) {
  const bool by_pairs = call.bias_by_panels && call.bias_dtype_of_inputs && has_even_keys;
  int options = options_of(call);
  if (options == 0) return 0;
  if ((options & kStepBiased) != 0 && !by_pairs) options |= kStepOfElements;
  return has_variant(kWideOptions, options) ? options : kAnyOptions;
}

}  // namespace flash_ext::sm90
