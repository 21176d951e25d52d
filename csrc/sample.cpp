// Every strategy, one node at a time. The common case, uniform picks with a small fanout, has a faster implementation
// in sample_vector.cpp that makes the same picks.
#include "sample.h"

#include <algorithm>
#include <functional>
#include <string>

#include "processor.h"
#include "random.h"

namespace hoploom {
namespace {

void keep_smallest(auto& keyed, int64_t count, std::vector<int64_t>& offsets) {
  if (int64_t(keyed.size()) > count) {
    std::nth_element(keyed.begin(), keyed.begin() + count, keyed.end());
    keyed.resize(size_t(count));
  }
  for (const auto& [_, offset] : keyed) offsets.push_back(offset);
  std::sort(offsets.begin(), offsets.end());
}

class Picker {
 public:
  Picker(const Adjacency& a, const EdgeColumns& c, const Rule& r) : a_(a), c_(c), r_(r), times_(a, c), exclusions_(r) {}

  // Fills scratch.offsets for one node: offsets within the returned range of its list.
  Extent pick(uint64_t key, int64_t node, Extent list, const int64_t* seed_time) {
    scratch.offsets.clear();
    if (seed_time && times_) times_.cut(r_.window, 1, seed_time, &list);
    const Gaps gaps = exclusions_.of(a_.first_edge + list.begin, list.degree);
    const int64_t population = list.degree - gaps.size;  // of edges that are not excluded
    if (r_.last && seed_time && r_.fanout >= 0) {
      take_range(std::max<int64_t>(0, population - r_.fanout), population);
    } else if (c_.weight) {
      pick_weighted(key, node, weights_of(list, gaps), list.degree);
      return list;
    } else if (r_.labor && r_.fanout >= 0 && population > r_.fanout) {
      pick_labor(list, gaps);
      return list;
    } else {
      pick_uniform(key, node, r_.stream, population, r_.labor ? -1 : r_.fanout, r_.replace, scratch);
    }
    if (gaps.size)
      for (int64_t& offset : scratch.offsets) offset = gaps.offset_of(offset);
    return list;
  }
  Scratch scratch;

 private:
  void take_range(int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) scratch.offsets.push_back(i);
  }
  // Returns the weights of a list, with those of excluded edges set to zero.
  const float* weights_of(Extent list, Gaps gaps) {
    const float* weight = c_.weight + list.begin;
    if (!gaps.size) return weight;
    scratch.weights.assign(weight, weight + list.degree);
    for (int64_t i = 0; i < gaps.size; ++i) scratch.weights[size_t(gaps.positions[i] - gaps.first)] = 0.0f;
    return scratch.weights.data();
  }
  void pick_weighted(uint64_t key, int64_t node, const float* weight, int64_t population) {
    const int64_t positive = std::count_if(weight, weight + population, [](float w) { return w > 0; });
    if (positive == 0) return;
    if (r_.fanout < 0 || (!r_.replace && positive <= r_.fanout)) {
      for (int64_t i = 0; i < population; ++i)
        if (weight[i] > 0) scratch.offsets.push_back(i);
      return;
    }
    Draws draws(key, node, r_.stream);
    r_.replace ? pick_by_sums(draws, weight, population) : pick_by_races(draws, weight, population);
  }
  // With replacement: inverts the running sum of weights.
  void pick_by_sums(Draws& draws, const float* weight, int64_t population) {
    auto& sums = scratch.sums;
    sums.resize(size_t(population));
    double total = 0.0;
    for (int64_t i = 0; i < population; ++i) sums[size_t(i)] = total += std::max(0.0, double(weight[i]));
    const auto last = std::lower_bound(sums.begin(), sums.end(), total);
    for (int64_t draw = 0; draw < r_.fanout; ++draw) {
      const auto found = std::upper_bound(sums.begin(), sums.end(), draws.unit(uint64_t(draw)) * total);
      scratch.offsets.push_back(std::min(found, last) - sums.begin());
    }
  }
  // Without replacement: exponential races, the `fanout` earliest win (Efraimidis and Spirakis).
  void pick_by_races(Draws& draws, const float* weight, int64_t population) {
    auto& races = scratch.races;
    races.clear();
    for (int64_t i = 0; i < population; ++i)
      if (weight[i] > 0) races.emplace_back(-exact_log(draws.unit(uint64_t(i))) / double(weight[i]), i);
    keep_smallest(races, r_.fanout, scratch.offsets);
  }
  // LABOR: one rank per source, shared by every destination; each keeps its lowest ranks.
  void pick_labor(Extent list, Gaps gaps) {
    auto& ranks = scratch.ranks;
    ranks.clear();
    for (int64_t rank = 0; rank < list.degree - gaps.size; ++rank) {
      const int64_t i = gaps.size ? gaps.offset_of(rank) : rank;
      ranks.emplace_back(Draws(r_.key, source_of(a_, list.begin + i), ~0u).wide(0), i);
    }
    keep_smallest(ranks, r_.fanout, scratch.offsets);
  }

  const Adjacency& a_;
  const EdgeColumns& c_;
  const Rule& r_;
  const EdgeTimes times_;
  const Exclusions exclusions_;
};

// Set membership for Floyd: a linear scan while the set is small, then an open-addressing table.
class FloydSet {
 public:
  FloydSet(Scratch& scratch, int64_t fanout) : scratch_(scratch), small_(fanout <= kVectorFanout) {
    if (small_) return;
    size_t slots = 64;
    while (slots < size_t(fanout) * 2) slots *= 2;
    scratch_.table.assign(slots, -1);
  }
  bool insert(int64_t offset) {  // false if it was already in the set
    if (small_) {
      for (int64_t seen : scratch_.offsets)
        if (seen == offset) return false;
      return true;
    }
    const size_t mask = scratch_.table.size() - 1;
    size_t slot = mix(0, uint64_t(offset)) & mask;
    for (; scratch_.table[slot] != -1; slot = (slot + 1) & mask)
      if (scratch_.table[slot] == offset) return false;
    scratch_.table[slot] = offset;
    return true;
  }

 private:
  Scratch& scratch_;
  bool small_;
};

constexpr int64_t kShortList = 32;

HOPLOOM_INLINE void count_short(const int64_t* times, int count, const int64_t* until, const Extent* lists,
                                const int64_t* left, int64_t* counts) {
  for (int l = 0; l < count; ++l) {
    const int64_t* time = times + lists[l].begin + counts[l];
    const int64_t limit = until[l];
    int64_t seen = 0;
    for (int64_t i = 0; i < left[l]; ++i) seen += time[i] <= limit;
    counts[l] += seen;
  }
}

}  // namespace

void EdgeTimes::cut(int64_t window, int count, const int64_t* now, Extent* lists) const {
  int64_t seen[kLanes], expired[kLanes], oldest[kLanes];
  count_until(count, now, lists, seen);
  for (int l = 0; l < count; ++l) lists[l].degree = seen[l];
  if (window < 0) return;
  for (int l = 0; l < count; ++l)
    if (__builtin_sub_overflow(now[l], window, &oldest[l])) oldest[l] = INT64_MIN;
  for (int l = 0; l < count; ++l) expired[l] = oldest[l] - (oldest[l] > INT64_MIN);
  count_until(count, expired, lists, seen);
  for (int l = 0; l < count; ++l)
    if (oldest[l] > INT64_MIN) lists[l] = {lists[l].begin + seen[l], lists[l].degree - seen[l]};
}

// Counts the edges of each list that are not later than `until`: by binary search, and one by one in a short list.
void EdgeTimes::count_until(int count, const int64_t* until, const Extent* lists, int64_t* counts) const {
  const int64_t most = c_.edge_time ? kShortList : 0;
  int64_t left[kLanes], longest = 0;  // how many edges are searched on: the same for every outcome
  for (int l = 0; l < count; ++l) {
    counts[l] = 0;
    left[l] = lists[l].degree;
    longest = std::max(longest, left[l]);
  }
  for (; longest > most; longest >>= 1) {
    for (int l = 0; l < count; ++l) {  // without branches: the outcomes are as good as random
      const int64_t half = left[l] > most ? (left[l] + 1) >> 1 : 0;
      const int64_t middle = (lists[l].begin + counts[l] + half - 1) & -int64_t(half > 0);
      counts[l] += half & -int64_t(at(middle) <= until[l]);
      left[l] = half ? left[l] >> 1 : left[l];
    }
  }
  if (most) run_fastest<count_short>(c_.edge_time, count, until, lists, left, counts);
}

void pick_uniform(uint64_t key, int64_t node, uint32_t stream, int64_t population, int64_t fanout, bool replace,
                  Scratch& scratch) {
  auto& offsets = scratch.offsets;
  offsets.clear();
  if (fanout < 0 || (!replace && population <= fanout)) {
    for (int64_t i = 0; i < population; ++i) offsets.push_back(i);
    return;
  }
  if (population == 0) return;
  Draws draws(key, node, stream);
  const bool wide = uint64_t(population) > kNarrowLimit;
  if (replace) {
    for (int64_t i = 0; i < fanout; ++i)
      offsets.push_back(int64_t(draws.bounded(uint64_t(i), uint64_t(population), wide)));
    return;
  }
  FloydSet chosen(scratch, fanout);
  for (int64_t i = 0; i < fanout; ++i) {
    const int64_t newest = population - fanout + i;
    int64_t offset = int64_t(draws.bounded(uint64_t(i), uint64_t(newest) + 1, wide));
    if (!chosen.insert(offset)) chosen.insert(offset = newest);
    offsets.push_back(offset);
  }
}

int64_t most_picks(const Adjacency& adjacency, const Frontier& frontier, const Rule& rule) {
  if (rule.fanout >= 0 && (rule.replace || rule.fanout <= kVectorFanout)) {
    int64_t picks;
    if (__builtin_mul_overflow(frontier.size, rule.fanout, &picks) || picks > PTRDIFF_MAX / 16) throw std::bad_alloc();
    return picks;
  }
  int64_t picks = 0;
  for (int64_t i = 0; i < frontier.size; ++i) {
    const int64_t degree = extent(adjacency, frontier.nodes[i]).degree;
    picks += rule.fanout < 0 ? degree : std::min(degree, rule.fanout);
  }
  return picks;
}

Picks sample(const Adjacency& adjacency, const EdgeColumns& columns, const Frontier& frontier, const Rule& rule) {
  const int64_t* end = rule.excluded + rule.num_excluded;
  if (std::adjacent_find(rule.excluded, end, std::greater_equal<>()) != end)
    throw std::invalid_argument("excluded positions do not ascend");
  const bool is_uniform = !columns.weight && !rule.labor && !(rule.last && frontier.times);
  if (is_uniform && adjacency.indices && rule.fanout <= kVectorFanout)
    return sample_vector(adjacency, columns, frontier, rule);

  const size_t capacity = size_t(most_picks(adjacency, frontier, rule));
  Picks out{Buffer(size_t(frontier.size) * 8), Buffer(capacity * 8), Buffer(capacity * 8)};
  int64_t* sources = out.sources.as<int64_t>();
  int64_t* edges = out.edges.as<int64_t>();
  Picker picker(adjacency, columns, rule);
  for (int64_t i = 0; i < frontier.size; ++i) {
    const int64_t node = frontier.nodes[i];
    const uint64_t key = frontier.trees ? mix(rule.key, uint64_t(frontier.trees[i])) : rule.key;
    const Extent list = picker.pick(key, node, extent(adjacency, node), frontier.times ? frontier.times + i : nullptr);
    const auto& offsets = picker.scratch.offsets;
    out.counts.as<int64_t>()[i] = int64_t(offsets.size());
    for (int64_t offset : offsets) {
      *sources++ = source_of(adjacency, list.begin + offset);
      *edges++ = adjacency.first_edge + list.begin + offset;
    }
  }
  const size_t picks = size_t(sources - out.sources.as<int64_t>());
  out.sources.trim(picks * 8);
  out.edges.trim(picks * 8);
  return out;
}

}  // namespace hoploom
