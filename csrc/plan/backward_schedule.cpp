#include "backward_schedule.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/common/backward/order.h"
#include "kernels/common/mask/tile_range.h"
#include "kernels/common/scheduler/work_order.h"
#include "lengths.h"
#include "text.h"

namespace flash_ext::plan {
namespace {

// ---- Costs, in cycles of an H200 at full load -----------------------------------------------------------------------

constexpr double kStoreBytesPerClock = 40;      // bytes per clock of an SM that stores dK and dV of a split
constexpr double kCombineBytesPerClock = 2400;  // bytes per clock of all SMs together when they add up splits
constexpr double kCombineLaunch = 2500;         // cycles

// ---- Key tiles and the query tiles that see them --------------------------------------------------------------------

/// The mean length of packed sequences.
int64_t mean_length(const Problem& p, int64_t longest, int64_t total) {
  return total > 0 ? std::clamp<int64_t>(ceil_div(total, p.batch), 1, longest) : longest;
}

/// The tiles of queries that see a tile of keys.
TileRange query_tiles(const Problem& p, const BackwardTiles& tiles, int64_t seqlen_q, int64_t seqlen_k,
                      int64_t key_tile) {
  const Window window = make_window(p.window_left, p.window_right, p.top_left, seqlen_q, seqlen_k);
  const int64_t first = key_tile * tiles.block_n, end = std::min(first + tiles.block_n, seqlen_k);
  return tile_range(first, end, seqlen_q, transposed(window), tiles.block_m);
}

struct KeyTileCounts {
  bool packed = false;  // then lengths are the mean: the bound on the longest decides nothing
  int64_t count = 0;    // key tiles of all heads and batch entries
  int64_t of_sequence = 0;
  int64_t most_queries = 0;  // the most query tiles of a head that see a key tile
  double mean_queries = 0;

  KeyTileCounts(const Problem& p, const BackwardTiles& tiles) {
    constexpr int64_t kMostSamples = 16;
    const int64_t seqlen_q = mean_length(p, p.seqlen_q, p.total_q), seqlen_k = mean_length(p, p.seqlen_k, p.total_k);
    packed = p.total_k > 0;
    of_sequence = ceil_div(seqlen_k, tiles.block_n);
    count = p.heads_kv * p.batch * of_sequence;
    const int64_t stride = ceil_div(of_sequence, kMostSamples);
    int64_t sum = 0, samples = 0;
    for (int64_t tile = 0; tile < of_sequence; tile += stride, ++samples) {
      const TileRange range = query_tiles(p, tiles, seqlen_q, seqlen_k, tile);
      most_queries = std::max(most_queries, range.end - range.begin);
      sum += range.end - range.begin;
    }
    mean_queries = static_cast<double>(sum) / static_cast<double>(samples);
  }
};

// ---- Time of a schedule ---------------------------------------------------------------------------------------------

/// The time at which the last of `count` CTAs ends. The first CTA takes `longest` cycles, the last one `shortest`, and
/// the cycles fall evenly in between. Each of `slots` SMs takes the next CTA when it is free. A wave evens out the one
/// before it: an SM that had a longer CTA then gets a shorter one.
double makespan(double count, double slots, double longest, double shortest) {
  const double waves = count / slots;
  const auto at = [&](double wave) { return longest - (longest - shortest) * wave / waves; };
  double cycles = 0, wave = 0;
  for (; wave + 2 <= waves; wave += 2) cycles += at(wave) + at(wave + 2);
  if (waves - wave > 1) return cycles + std::max(at(wave), 2 * at(wave + 1));
  return waves > wave ? cycles + at(wave) : cycles;
}

class SplitChoice {
 public:
  SplitChoice(const Problem& p, const BackwardTiles& tiles, const KeyTileCounts& keys)
      : tiles_(tiles),
        group_(p.heads_q / p.heads_kv),
        slots_(std::max<int64_t>(p.num_workers / tiles.cluster, 1)),
        keys_(keys),
        longest_(tiles.step * static_cast<double>(group_ * keys.most_queries)),
        mean_(tiles.step * static_cast<double>(group_) * keys.mean_queries) {}

  int64_t slots() const { return slots_; }

  /// Cycles of the whole backward without row terms and the conversion of dQ.
  double cycles(const KeyTileSchedule& schedule) const {
    const double slots = static_cast<double>(slots_), count = static_cast<double>(keys_.count);
    const double splits = static_cast<double>(schedule.head_splits * schedule.query_splits);
    const double shortest = std::max(2 * mean_ - longest_, 0.0);
    if (splits == 1) return makespan(count, slots, tiles_.cta + longest_, tiles_.cta + shortest);
    const double whole = static_cast<double>(schedule.unsplit_tiles), cta = tiles_.cta_of_split();
    const double ctas = (count - whole) * splits;
    const int64_t most_queries = ceil_div(keys_.most_queries, schedule.query_splits);
    const double longest = tiles_.step * static_cast<double>(group_ / schedule.head_splits * most_queries);
    return whole / slots * (tiles_.cta + longest_) +
           makespan(ctas, slots, cta + longest, cta + (is_even() ? longest : shortest / splits)) + kCombineLaunch +
           ctas * tiles_.slot_bytes() / kCombineBytesPerClock;
  }

  /// Returns the schedule with the fewest cycles. Tiles are split only if that saves a few percent.
  KeyTileSchedule best(const KeyTileSchedule& unsplit) const {
    constexpr double kWorthSplitting = 0.97;
    constexpr int64_t kMostSplits = 32;
    const double busy = static_cast<double>(keys_.count) / static_cast<double>(slots_) * (tiles_.cta + mean_);
    double least = kWorthSplitting * cycles(unsplit);
    if (least <= busy) return unsplit;
    // Full waves may stay whole if all tiles cost about the same. Tiles of packed sequences may not: which of them come
    // first depends on whether they are listed.
    const int64_t full_waves = is_even() && !keys_.packed ? keys_.count / slots_ : 0;
    KeyTileSchedule found = unsplit;
    for (int64_t splits = 2; splits <= kMostSplits; ++splits) {
      KeyTileSchedule tried = unsplit;
      tried.head_splits = std::gcd(splits, group_);
      tried.query_splits = splits / tried.head_splits;
      if (tried.query_splits > keys_.most_queries) continue;
      for (const int64_t waves : {int64_t{0}, full_waves - 1, full_waves}) {
        tried.unsplit_tiles = waves * slots_;
        if (waves < 0 || tried.unsplit_tiles == keys_.count) continue;
        if (const double taken = cycles(tried); taken < least) least = taken, found = tried;
      }
    }
    return found;
  }

 private:
  /// Whether all tiles cost about the same.
  bool is_even() const { return mean_ > 0.95 * longest_; }

  const BackwardTiles& tiles_;
  const int64_t group_, slots_;
  const KeyTileCounts& keys_;
  const double longest_, mean_;  // cycles of a tile's steps
};

std::string reason_of(const SplitChoice& choice, const BackwardTiles& tiles, const KeyTileCounts& keys,
                      const KeyTileSchedule& schedule) {
  constexpr double kCyclesOfMicrosecond = 1700;
  const KeyTileSchedule unsplit{schedule.section_heads};
  const auto microseconds = [&](const KeyTileSchedule& tried) {
    return std::llround(choice.cycles(tried) / kCyclesOfMicrosecond);
  };
  const std::string unsplit_time =
      text(keys.count, " tiles of keys on ", choice.slots(), tiles.cluster > 1 ? " pairs of SMs" : " SMs",
           " take some ", microseconds(unsplit), " us");
  if (schedule.head_splits * schedule.query_splits == 1) return unsplit_time + ": none is split";
  return text(unsplit_time, ", and ", microseconds(schedule), " if",
              schedule.unsplit_tiles > 0 ? " those after full waves" : " they", " are split: by ", schedule.head_splits,
              " along the heads of a group, by ", schedule.query_splits, " along its queries");
}

/// How many key heads, a power of two, may run together so that L2 holds Q, dO and dQ of one query head of each.
int64_t heads_in_l2(const Problem& p, int64_t seqlen_q) {
  constexpr int64_t kShareOfL2 = 40 << 20;  // bytes of an H200's 60 MB: the rest is for K, V and what leaves
  const int64_t element = p.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t row_bytes = (p.head_dim + p.head_dim_v) * element + p.head_dim * int64_t{sizeof(float)};
  int64_t heads = 1;
  while (2 * heads * row_bytes * seqlen_q <= kShareOfL2) heads *= 2;
  return heads;
}

/// The largest power of two up to `most`, at least 1. Numbers of batch entries and heads are mostly made of powers of
/// two, so sections of such a size mostly divide all heads, and no section is smaller than the others.
int64_t power_of_two_up_to(int64_t most) {
  int64_t power = 1;
  while (2 * power <= most) power *= 2;
  return power;
}

/// How many heads form a section, in which their key tiles stand side by side.
int64_t section_heads(const Problem& p, int64_t slots, int64_t tiles_of_head) {
  // Deterministic additions to dQ take turns: the fewer tiles of a head start together, the sooner each has had its
  // first turn. Under a causal mask, tiles that start later end earlier, so the next tiles start together again. In
  // grouped heads they do not: a CTA goes over the heads of a group before the next query tile, which keeps the tiles
  // apart.
  constexpr int64_t kMostHeads = 8, kTilesOfHead = 4;
  const bool causal = p.window_right >= 0;
  if (!causal) return p.deterministic ? kMostHeads : 1;
  if (p.deterministic) {
    const int64_t of_wave = std::max(kMostHeads, ceil_div(slots, tiles_of_head));
    return p.heads_q == p.heads_kv ? std::max(of_wave, power_of_two_up_to(slots / kTilesOfHead)) : of_wave;
  }
  // A section has about a wave of tiles at least. Its last tiles are short, so the SMs end at about the same time.
  const int64_t of_wave = power_of_two_up_to(slots / tiles_of_head + 1);
  return std::clamp(heads_in_l2(p, mean_length(p, p.seqlen_q, p.total_q)), of_wave, std::max(of_wave, kMostHeads));
}

}  // namespace

double BackwardTiles::cta_of_split() const {
  return cta + slot_bytes() / static_cast<double>(cluster) / kStoreBytesPerClock;
}

BackwardSchedulePlan plan_backward_schedule(const Problem& problem, const BackwardTiles& tiles, bool explain) {
  const KeyTileCounts keys(problem, tiles);
  const SplitChoice choice(problem, tiles, keys);
  KeyTileSchedule schedule;
  if (!tiles.last_keys_first(problem))
    schedule.section_heads = section_heads(problem, choice.slots(), keys.of_sequence);
  if (tiles.splits) schedule = choice.best(schedule);
  return {schedule, explain ? reason_of(choice, tiles, keys, schedule) : ""};
}

std::vector<BackwardCta> backward_ctas(const Problem& problem, const BackwardTiles& tiles,
                                       const KeyTileSchedule& schedule) {
  const BackwardOrder order = backward_order(problem.batch, problem.heads_q, problem.heads_kv, problem.seqlen_k,
                                             tiles.block_n, schedule, tiles.last_keys_first(problem));
  const int64_t count = order.positions(int64_t{order.key_tiles} * order.heads);
  std::vector<BackwardCta> ctas;
  for (int64_t position = 0; position < count; ++position) {
    const KeyWorkTile work = order.locate(static_cast<uint32_t>(position));
    const TileRange range = query_tiles(problem, tiles, problem.seqlen_q, problem.seqlen_k, work.tile);
    const QueryShare share = order.share(work, static_cast<int32_t>(range.begin), static_cast<int32_t>(range.end));
    if (share.heads == 0) continue;
    const double steps = static_cast<double>(share.heads) * (share.end - share.begin);
    ctas.push_back({work.batch, int64_t{work.head_kv} * order.group + share.first_head, share.heads, work.tile,
                    share.begin, share.end, tiles.step * steps + (share.unsplit ? tiles.cta : tiles.cta_of_split())});
  }
  return ctas;
}

}  // namespace flash_ext::plan
