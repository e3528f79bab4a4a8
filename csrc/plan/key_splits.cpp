#include "key_splits.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/common/mask/tile_range.h"
#include "kernels/sm90/forward/tile_order.h"
#include "lengths.h"
#include "text.h"

namespace flash_ext::plan {
namespace {

// Cycles of an H200. A call that leaves few SMs idle runs at the power limit: SMs that wait save watts for the others.
// So splits must save more cycles in such a call: the fewer SMs are idle, the more.
constexpr double kEndCycles = 4500;          // cycles of a query tile or a split in addition to its key tiles
constexpr double kCombinedBytes = 1000;      // bytes of partial results per clock that are written and read
constexpr double kLoadedFrom = 0.75;         // busy share of the cycles of all SMs from which splits must save more
constexpr double kSavedByIdle = 32000;       // cycles that splits must save in addition where no SM is idle
constexpr double kWorthSplitting = 20000;    // fewest cycles of the longest query tile
constexpr double kShareOfAnyRows = 0.2;      // share of a tile's cycles that warpgroups without rows do not save
constexpr int64_t kMostSplits = 16;          // of a query tile
constexpr int64_t kMostShortSplits = 2;      // of a query tile
constexpr int64_t kMostSplitsOfCta = 16;     // short splits that one CTA takes
constexpr int64_t kFewestKeyTiles = 4;       // of a split
constexpr double kWorthLeavingWhole = 0.85;  // a tile with less than this share of the cycles of others may stay whole
constexpr double kAboutTheSame = 1.1;        // ratio of cycles up to which tiles count as equal
constexpr size_t kMostRows = 16;             // rows of equal tiles; a causal mask has more, and its order balances it

/// Query tiles that cost the same.
struct EqualTiles {
  int64_t count;
  double cycles;  // of all key tiles of one query tile
};

/// Simulates CTAs. Each takes the next tile or split when it is free.
class Makespan {
 public:
  explicit Makespan(int64_t ctas) : free_{{0.0, ctas}} {}

  void take(int64_t count, double cycles) {
    while (count > 0) {
      const int64_t ctas = std::min(count, free_.front().ctas);
      const double end = free_.front().time + cycles + kEndCycles;
      free_.front().ctas -= ctas;
      if (free_.front().ctas == 0) free_.erase(free_.begin());
      const auto later = [](double time, const Free& free) { return time < free.time; };
      free_.insert(std::upper_bound(free_.begin(), free_.end(), end, later), {end, ctas});
      end_ = std::max(end_, end);
      count -= ctas;
    }
  }
  double end() const { return end_; }

 private:
  struct Free {
    double time;
    int64_t ctas;
  };
  std::vector<Free> free_;  // earliest first
  double end_ = 0;
};

class KeySplitsPlanner {
 public:
  KeySplitsPlanner(const Problem& p, const sm90::HeadDims& dims, const sm90::ForwardShape& shape)
      : p_(p),
        shape_(shape),
        cycles_(sm90::tile_cycles(shape, dims)),
        partial_cycles_(static_cast<double>(shape.warpgroups * sm90::kWarpgroupRows * dims.v * 4) / kCombinedBytes),
        ctas_(p.num_workers * shape.ctas_per_sm),
        block_m_(sm90::kWarpgroupRows * shape.warpgroups),
        tiles_of_head_(ceil_div(p.seqlen_q, block_m_)),
        all_tiles_(tiles_of_head_ * p.batch * p.heads_q) {
    list_tail();
  }

  /// Cycles of the tail, the last two waves or all tiles, with these splits.
  double end(const KeySplits& splits) const {
    Makespan makespan(ctas_);
    take_tail(makespan, 0, tail_ - rest(), 1.0);
    const int64_t split_end = tail_ - splits.unsplit_after;
    const double one = KeySplits::kWholeShare, short_share = splits.short_share / one;
    const double long_share =
        splits.long_splits > 0 ? (1.0 - splits.short_splits * short_share) / splits.long_splits : 1.0;
    for (int split = 0; split < std::max(splits.long_splits, 1); ++split)
      take_tail(makespan, tail_ - rest(), split_end, long_share);
    take_tail(makespan, split_end, tail_, 1.0);
    for (int split = 0; split < splits.short_splits; ++split)
      take_tail(makespan, tail_ - rest(), split_end, short_share);
    return makespan.end();
  }

  /// The splits that save the most; none if nothing saves what combining costs.
  KeySplits choose() const {
    KeySplits best;
    if (rest() == 0 || rows_.size() > kMostRows || longest() < kWorthSplitting) return best;
    double best_end = end(best) - loaded_cycles();
    if (best_end <= least_end()) return best;
    const auto consider = [&](const KeySplits& splits) {
      const double split_end = end(splits) + static_cast<double>(splits.tiles * splits.per_tile()) * partial_cycles_;
      if (split_end < best_end) best = splits, best_end = split_end;
    };
    for_each_split(0, consider);
    if (const int64_t unsplit = cheap_tiles(); unsplit > 0) for_each_split(unsplit, consider);
    return best;
  }

  /// Cycles of the call with these splits.
  double cycles(const KeySplits& splits) const {
    return whole_waves() + end(splits) + static_cast<double>(splits.tiles * splits.per_tile()) * partial_cycles_;
  }

  int64_t all_tiles() const { return all_tiles_; }
  int64_t ctas() const { return ctas_; }

 private:
  /// The number of tiles after the full waves.
  int64_t rest() const { return all_tiles_ % ctas_; }

  /// Cycles of the longest tile.
  double longest() const {
    double cycles = 0;
    for (const EqualTiles& tiles : rows_) cycles = std::max(cycles, tiles.cycles);
    return cycles;
  }

  /// Cycles of the tail if no CTA waited for work.
  double least_end() const {
    double cycles = 0;
    for (const EqualTiles& tiles : rows_) cycles += static_cast<double>(tiles.count) * (tiles.cycles + kEndCycles);
    return cycles / static_cast<double>(ctas_);
  }

  /// Cycles of all waves before the tail.
  double whole_waves() const {
    return static_cast<double>(all_tiles_ - tail_) / static_cast<double>(ctas_) * (rows_.front().cycles + kEndCycles);
  }

  /// Cycles that idle SMs are worth, since they save watts: none if many SMs are idle.
  double loaded_cycles() const {
    const double loaded = (whole_waves() + least_end()) / (whole_waves() + end({}));
    return kSavedByIdle * std::max(loaded - kLoadedFrom, 0.0) / (1.0 - kLoadedFrom);
  }

  double cycles_of_tile(int64_t tile) const {
    const auto first_query_of = [&](int64_t t) {
      return sm90::first_query_of_tile(static_cast<int>(t), static_cast<int>(tiles_of_head_),
                                       static_cast<int>(p_.seqlen_q), static_cast<int>(block_m_));
    };
    const int64_t first = first_query_of(tile), end = first_query_of(tile + 1);
    const Window window = make_window(p_.window_left, p_.window_right, p_.top_left, p_.seqlen_q, p_.seqlen_k);
    const TileRange keys = tile_range(first, end, p_.seqlen_k, window, shape_.block_n);
    const double groups = static_cast<double>(ceil_div(end - first, sm90::kWarpgroupRows)) / shape_.warpgroups;
    return static_cast<double>(keys.end - keys.begin) * cycles_ * (kShareOfAnyRows + (1 - kShareOfAnyRows) * groups);
  }

  /// Lists the last full wave and the tiles that follow it, in the order in which CTAs take them: tiles of all heads
  /// stand side by side, the last tile of each sequence first.
  void list_tail() {
    tail_ = std::min(all_tiles_, rest() + ctas_);
    const int64_t heads = p_.batch * p_.heads_q, group = p_.heads_q / p_.heads_kv;
    const bool all_see_all = p_.window_left < 0 && p_.window_right < 0;
    const bool all_equal = all_see_all && p_.seqlen_q % block_m_ == 0;
    const int64_t width =
        all_equal ? tail_ : heads - sm90::last_section(heads, group, tiles_of_head_, ctas_, all_see_all);
    int64_t left = tail_;
    for (int64_t tile = 0; left > 0; ++tile) {
      const bool last = tile + 1 == tiles_of_head_;
      const int64_t count = last ? left : std::min(left, width);
      add_row({count, cycles_of_tile(tile)});
      left -= count;
    }
    std::reverse(rows_.begin(), rows_.end());
  }

  /// Adds a row of equal tiles to the list. Rows of about the same cost are merged and get the mean cost, because there
  /// may be hundreds.
  void add_row(const EqualTiles& row) {
    if (rows_.empty() || row.cycles > kAboutTheSame * rows_.back().cycles) return rows_.push_back(row);
    EqualTiles& before = rows_.back();
    const double all = static_cast<double>(before.count) * before.cycles + static_cast<double>(row.count) * row.cycles;
    before.count += row.count;
    before.cycles = all / static_cast<double>(before.count);
  }

  /// Gives the CTAs the tiles [begin, end) of the tail, or a share of the keys of each.
  void take_tail(Makespan& makespan, int64_t begin, int64_t end, double share) const {
    int64_t first = 0;
    for (const EqualTiles& tiles : rows_) {
      const int64_t from = std::max(first, begin), to = std::min(first + tiles.count, end);
      if (from < to) makespan.take(to - from, tiles.cycles * share);
      first += tiles.count;
    }
  }

  /// The number of tiles at the end of the order that are cheap, since they have fewer rows or keys. They may stay
  /// whole while others are split.
  int64_t cheap_tiles() const {
    if (rows_.size() < 2) return 0;
    const EqualTiles& last = rows_.back();
    const bool cheap = last.cycles < kWorthLeavingWhole * rows_[rows_.size() - 2].cycles;
    return cheap && last.count < rest() ? last.count : 0;
  }

  /// Calls use(splits) for the splits to choose from; the last `unsplit` tiles stay whole. Long splits of a tile: the
  /// most that give no CTA two of them, or one fewer. Short splits: a CTA without a long split takes several, and they
  /// are so short that it ends with the other CTAs.
  template <class F>
  void for_each_split(int64_t unsplit, F use) const {
    const int64_t tiles = rest() - unsplit, key_tiles = ceil_div(p_.seqlen_k, shape_.block_n);
    const int64_t most_long = std::clamp<int64_t>((ctas_ - unsplit) / tiles, 1, kMostSplits);
    const auto use_splits = [&](int64_t long_splits, int64_t short_splits, int64_t shorts_of_cta) {
      // A long split has as many keys as shorts_of_cta short ones.
      const int64_t shares = long_splits * shorts_of_cta + short_splits;
      if (long_splits + short_splits < 2 || key_tiles < shares * kFewestKeyTiles) return;
      KeySplits splits;
      splits.first_tile = all_tiles_ - rest();
      splits.tiles = static_cast<int32_t>(tiles);
      splits.unsplit_after = static_cast<int32_t>(unsplit);
      splits.long_splits = static_cast<int32_t>(long_splits);
      splits.short_splits = static_cast<int32_t>(short_splits);
      splits.short_share = short_splits == 0 ? 0 : static_cast<int32_t>(KeySplits::kWholeShare / shares);
      use(splits);
    };
    for (int64_t long_splits = std::max<int64_t>(most_long - 1, 1); long_splits <= most_long; ++long_splits) {
      use_splits(long_splits, 0, 1);
      const int64_t idle = ctas_ - long_splits * tiles;
      for (int64_t short_splits = 1; idle > 0 && short_splits <= kMostShortSplits; ++short_splits)
        if (const int64_t shorts_of_cta = ceil_div(short_splits * tiles, idle); shorts_of_cta <= kMostSplitsOfCta)
          for (int64_t t = std::max<int64_t>(shorts_of_cta - 1, 1); t <= shorts_of_cta + 1; ++t)
            use_splits(long_splits, short_splits, t);
    }
  }

  const Problem& p_;
  const sm90::ForwardShape& shape_;
  const double cycles_;          // of a query tile with one key tile
  const double partial_cycles_;  // to write and read the partial result of a split
  const int64_t ctas_, block_m_, tiles_of_head_, all_tiles_;
  int64_t tail_ = 0;
  std::vector<EqualTiles> rows_;
};

/// What the splits depend on.
struct KeySplitsKey {
  std::array<int64_t, 14> values;

  KeySplitsKey(const Problem& p, const sm90::HeadDims& dims, const sm90::ForwardShape& shape)
      : values{p.batch,    p.heads_q,     p.heads_kv, p.seqlen_q, p.seqlen_k,       p.window_left, p.window_right,
               p.top_left, p.num_workers, dims.qk,    dims.v,     shape.warpgroups, shape.block_n, shape.ctas_per_sm} {}
  bool operator==(const KeySplitsKey& other) const { return values == other.values; }
};

struct KeySplitsChoice {
  KeySplits splits;
  double cycles = 0;  // of the call
};

/// Chooses the splits and keeps the last choices: one takes up to 25 microseconds, and a model asks for the same ones
/// in every layer.
KeySplitsChoice choose_once(const Problem& p, const sm90::HeadDims& dims, const sm90::ForwardShape& shape) {
  using Choice = std::optional<std::pair<KeySplitsKey, KeySplitsChoice>>;
  thread_local std::array<Choice, 4> last;  // of two calls in turn, each with two shapes
  thread_local size_t oldest = 0;
  const KeySplitsKey key(p, dims, shape);
  for (const Choice& choice : last)
    if (choice && choice->first == key) return choice->second;
  const KeySplitsPlanner planner(p, dims, shape);
  const KeySplits splits = planner.choose();
  Choice& choice = last[oldest];
  oldest = (oldest + 1) % last.size();
  choice.emplace(key, KeySplitsChoice{splits, planner.cycles(splits)});
  return choice->second;
}

}  // namespace

KeySplitsPlan plan_key_splits(const Problem& problem, const sm90::HeadDims& dims, const sm90::ForwardShape& shape,
                              bool explain) {
  const KeySplits splits = choose_once(problem, dims, shape).splits;
  if (!explain || splits.tiles == 0) return {splits, ""};
  const KeySplitsPlanner planner(problem, dims, shape);
  const int64_t share = splits.short_splits > 0 ? KeySplits::kWholeShare / std::max(splits.short_share, 1) : 0;
  return {splits,
          text("split-KV: ", planner.all_tiles(), " query tiles on ", planner.ctas(), " CTAs; the keys of ",
               splits.tiles, " are split into ", splits.long_splits, " long split", splits.long_splits == 1 ? "" : "s",
               splits.short_splits == 0 ? text("") : text(" and ", splits.short_splits, " of 1/", share, " of them"))};
}

double forward_cycles(const Problem& problem, const sm90::HeadDims& dims, const sm90::ForwardShape& shape) {
  return choose_once(problem, dims, shape).cycles;
}

}  // namespace flash_ext::plan
