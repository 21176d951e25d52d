// Each function mirrors one of the core; where they differ, one of the two is wrong.
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>

#include "../random.h"
#include "check.h"

namespace hoploom::test {
namespace {

using Offsets = std::vector<int64_t>;

Offsets range(int64_t from, int64_t to) {
  Offsets offsets;
  for (int64_t i = from; i < to; ++i) offsets.push_back(i);
  return offsets;
}

struct NodeDraws {
  uint64_t key;
  int64_t node;
  uint32_t stream;

  uint64_t word(uint64_t draw) const {
    uint32_t words[4];
    philox(key, uint32_t(uint64_t(node)), uint32_t(uint64_t(node) >> 32), stream, uint32_t(draw / 4), words);
    return words[draw % 4];
  }
  uint64_t wide(uint64_t draw) const { return word(2 * draw) << 32 | word(2 * draw + 1); }
  uint64_t below(uint64_t draw, uint64_t bound, int64_t population) const {
    if (population <= 65536) return word(draw) * bound >> 32;
    return uint64_t((unsigned __int128)wide(draw) * bound >> 64);
  }
  double unit(uint64_t draw) const { return std::ldexp(double(wide(draw) >> 12) + 0.5, -52); }
};

Offsets uniform(const NodeDraws& draws, int64_t population, int64_t fanout, bool replace) {
  if (fanout < 0 || (!replace && population <= fanout)) return range(0, population);
  if (population == 0) return {};
  Offsets offsets;
  std::set<int64_t> chosen;
  for (int64_t i = 0; i < fanout; ++i) {
    const int64_t last = replace ? population - 1 : population - fanout + i;
    int64_t offset = int64_t(draws.below(uint64_t(i), uint64_t(last) + 1, population));
    if (!replace && !chosen.insert(offset).second) chosen.insert(offset = last);
    offsets.push_back(offset);
  }
  return offsets;
}

template <typename Key>
Offsets smallest(std::vector<std::pair<Key, int64_t>> keyed, int64_t count) {
  std::sort(keyed.begin(), keyed.end());
  Offsets offsets;
  for (int64_t i = 0; i < count && i < int64_t(keyed.size()); ++i) offsets.push_back(keyed[size_t(i)].second);
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

Offsets by_sums(const NodeDraws& draws, const float* weight, int64_t population, int64_t fanout) {
  double total = 0;
  for (int64_t i = 0; i < population; ++i) total += weight[i] > 0 ? double(weight[i]) : 0.0;
  Offsets offsets;
  for (int64_t draw = 0; draw < fanout; ++draw) {
    const double target = draws.unit(uint64_t(draw)) * total;
    double sum = 0;
    for (int64_t i = 0;; ++i) {
      sum += weight[i] > 0 ? double(weight[i]) : 0.0;
      if (sum > target || sum == total) {
        offsets.push_back(i);
        break;
      }
    }
  }
  return offsets;
}

Offsets weighted(const NodeDraws& draws, const float* weight, int64_t population, const Rule& rule) {
  std::vector<std::pair<double, int64_t>> races;
  Offsets positive;
  for (int64_t i = 0; i < population; ++i) {
    if (!(weight[i] > 0)) continue;
    positive.push_back(i);
    races.emplace_back(-std::log(draws.unit(uint64_t(i))) / double(weight[i]), i);
  }
  if (positive.empty() || rule.fanout < 0) return positive;
  if (rule.replace) return by_sums(draws, weight, population, rule.fanout);
  return smallest(races, rule.fanout);
}

Offsets labor(const Adjacency& a, int64_t begin, const Offsets& left, const Rule& rule) {
  if (rule.fanout < 0) return left;
  std::vector<std::pair<uint64_t, int64_t>> ranks;
  for (int64_t i : left) ranks.emplace_back(NodeDraws{rule.key, source_at(a, begin + i), ~0u}.wide(0), i);
  return smallest(ranks, rule.fanout);
}

// Returns the part of a list that a node sees at `time`: lists are in time order, so it is a range.
Extent seen_by(const Adjacency& a, const EdgeColumns& c, Extent list, int64_t time, int64_t window) {
  if (!c.edge_time && !c.source_time) return list;
  Extent seen{list.begin, 0};
  for (int64_t p = list.begin; p < list.begin + list.degree; ++p) {
    const int64_t then = c.edge_time ? c.edge_time[p] : c.source_time[source_at(a, p)];
    if (then > time) continue;
    if (window >= 0 && __int128(then) < __int128(time) - window) ++seen.begin;
    else ++seen.degree;
  }
  return seen;
}

Extent naive_extent(const Adjacency& a, int64_t node) {
  if (node < a.first_node || node >= a.first_node + a.num_nodes) throw std::out_of_range("node");
  const int64_t begin = a.indptr[node - a.first_node], end = a.indptr[node - a.first_node + 1];
  if (begin < 0 || begin > end || end > a.num_edges) throw std::out_of_range("indptr");
  return {begin, end - begin};
}

}  // namespace

int64_t source_at(const Adjacency& a, int64_t position) {
  if (a.wide_ids) return static_cast<const int64_t*>(a.indices)[position];
  return static_cast<const int32_t*>(a.indices)[position];
}

PickLists lists_of(const Picks& picks) {
  return {values_of<int64_t>(picks.counts), values_of<int64_t>(picks.sources), values_of<int64_t>(picks.edges)};
}

std::ostream& operator<<(std::ostream& text, const PickLists& picks) {
  return text << "\n  counts " << shown(picks.counts) << "\n  sources " << shown(picks.sources) << "\n  edges "
              << shown(picks.edges) << "\n ";
}

PickLists naive_sample(const Adjacency& a, const EdgeColumns& c, const Frontier& f, const Rule& r) {
  PickLists out;
  const int64_t* excluded_end = r.excluded + r.num_excluded;
  for (int64_t i = 1; i < r.num_excluded; ++i)
    if (r.excluded[i] <= r.excluded[i - 1]) throw std::invalid_argument("excluded");
  for (int64_t i = 0; i < f.size; ++i) {
    Extent list = naive_extent(a, f.nodes[i]);
    if (f.times) list = seen_by(a, c, list, f.times[i], r.window);
    const NodeDraws draws{f.trees ? mix(r.key, uint64_t(f.trees[i])) : r.key, f.nodes[i], r.stream};
    Offsets left;  // what is not excluded
    std::vector<float> weights;
    for (int64_t offset = 0; offset < list.degree; ++offset) {
      const int64_t position = a.first_edge + list.begin + offset;
      const bool is_left = !std::binary_search(r.excluded, excluded_end, position);
      if (is_left) left.push_back(offset);
      if (c.weight) weights.push_back(is_left ? c.weight[list.begin + offset] : 0.0f);
    }
    const auto population = int64_t(left.size());
    Offsets offsets;
    if (r.last && f.times && r.fanout >= 0)
      offsets = Offsets(left.begin() + std::max<int64_t>(0, population - r.fanout), left.end());
    else if (c.weight) offsets = weighted(draws, weights.data(), list.degree, r);
    else if (r.labor) offsets = labor(a, list.begin, left, r);
    else
      for (int64_t rank : uniform(draws, population, r.fanout, r.replace)) offsets.push_back(left[size_t(rank)]);
    out.counts.push_back(int64_t(offsets.size()));
    for (int64_t offset : offsets) {
      out.sources.push_back(source_at(a, list.begin + offset));
      out.edges.push_back(a.first_edge + list.begin + offset);
    }
  }
  return out;
}

void NaiveMap::add_seeds(const std::vector<int64_t>& seeds, const std::vector<int64_t>& seed_trees) {
  for (size_t i = 0; i < seeds.size(); ++i) {
    const int64_t tree = seed_trees.empty() ? 0 : seed_trees[i];
    local.emplace(std::pair(tree, seeds[i]), int32_t(nodes.size()));
    nodes.push_back(seeds[i]);
    trees.push_back(tree);
  }
}

std::vector<int32_t> NaiveMap::add(const std::vector<int64_t>& sources, const std::vector<int64_t>& counts,
                                   const std::vector<int64_t>& frontier_trees) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < counts.size(); ++i) {
    const int64_t tree = frontier_trees.empty() ? 0 : frontier_trees[i];
    for (int64_t end = int64_t(ids.size()) + counts[i]; int64_t(ids.size()) < end;) {
      const int64_t node = sources[ids.size()];
      const auto [entry, is_new] = local.emplace(std::pair(tree, node), int32_t(nodes.size()));
      if (is_new) nodes.push_back(node), trees.push_back(tree);
      ids.push_back(entry->second);
    }
  }
  return ids;
}

std::vector<Edge> naive_csc(const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations,
                            const std::vector<int64_t>& edge_time) {
  std::vector<Edge> edges;
  for (size_t e = 0; e < sources.size(); ++e) edges.push_back({sources[e], destinations[e], int64_t(e)});
  std::stable_sort(edges.begin(), edges.end(), [&](const Edge& a, const Edge& b) {
    if (a.destination != b.destination) return a.destination < b.destination;
    return !edge_time.empty() && edge_time[size_t(a.position)] < edge_time[size_t(b.position)];
  });
  return edges;
}

}  // namespace hoploom::test
