#include "clusters.h"

#include <algorithm>
#include <numeric>

#include "random.h"

namespace hoploom {
namespace {

constexpr int kRounds = 4, kPasses = 8, kTries = 8;
constexpr int64_t kCoarse = 32;  // clusters per part at which coarsening ends
constexpr int64_t kCuts = 8;     // a cluster is at most one part divided by this

// Sums by a small index; clearing costs as much as was added.
class Sums {
 public:
  explicit Sums(int64_t size) : sums_(size_t(size)) {}
  void add(uint32_t at, int64_t weight) {
    if (sums_[at] == 0) touched_.push_back(at);
    sums_[at] += weight;
  }
  int64_t of(uint32_t at) const { return sums_[at]; }
  const std::vector<uint32_t>& touched() const { return touched_; }
  void clear() {
    for (uint32_t at : touched_) sums_[at] = 0;
    touched_.clear();
  }

 private:
  std::vector<int64_t> sums_;
  std::vector<uint32_t> touched_;
};

template <typename Take>
void each_link(const ClusterGraph& graph, int64_t cluster, Take take) {
  for (int64_t i = graph.indptr[size_t(cluster)]; i < graph.indptr[size_t(cluster) + 1]; ++i)
    take(graph.ends[size_t(i)], graph.weights[size_t(i)]);
}

// Joins every cluster to the neighbour with most links to it, unless the result would be too large.
std::vector<uint32_t> merge(const ClusterGraph& graph, int64_t largest) {
  std::vector<uint32_t> labels(size_t(graph.num_clusters));
  std::iota(labels.begin(), labels.end(), 0u);
  std::vector<int64_t> sizes = graph.sizes;
  Sums sums(graph.num_clusters);
  for (int round = 0; round < kRounds; ++round)
    for (int64_t c = 0; c < graph.num_clusters; ++c) {
      const uint32_t own = labels[size_t(c)];
      const int64_t size = graph.sizes[size_t(c)];
      each_link(graph, c, [&](uint32_t end, int32_t weight) { sums.add(labels[end], weight); });
      uint32_t best = own;
      for (uint32_t label : sums.touched())
        if (label != own && sizes[label] + size <= largest &&
            (sums.of(label) > sums.of(best) || (sums.of(label) == sums.of(best) && label < best && best != own)))
          best = label;
      sums.clear();
      sizes[own] -= size;
      sizes[best] += size;
      labels[size_t(c)] = best;
    }
  return labels;
}

// Renumbers the labels without gaps; returns the number of labels.
int64_t number(std::vector<uint32_t>& labels) {
  std::vector<uint32_t> numbers(labels.size(), UINT32_MAX);
  uint32_t count = 0;
  for (uint32_t& label : labels) {
    if (numbers[label] == UINT32_MAX) numbers[label] = count++;
    label = numbers[label];
  }
  return count;
}

ClusterGraph contract(const ClusterGraph& graph, const std::vector<uint32_t>& labels, int64_t count) {
  const int64_t kinds = graph.num_kinds;
  std::vector<int64_t> loads(size_t(count * kinds)), sizes(static_cast<size_t>(count));
  std::vector<Link> links;
  for (int64_t c = 0; c < graph.num_clusters; ++c) {
    const uint32_t own = labels[size_t(c)];
    sizes[own] += graph.sizes[size_t(c)];
    for (int64_t k = 0; k < kinds; ++k) loads[size_t(own * kinds + k)] += graph.loads[size_t(c * kinds + k)];
    each_link(graph, c, [&](uint32_t end, int32_t weight) {
      if (own < labels[end]) links.push_back({own, labels[end], weight});
    });
  }
  return cluster_graph(std::move(loads), std::move(sizes), kinds, links);
}

struct Placement {
  std::vector<uint16_t> parts;
  Loads loads;
};

// Returns the part that is least full with this load.
int64_t emptiest(const Loads& loads, const int64_t* load) {
  int64_t best = 0;
  for (int64_t p = 1; p < loads.num_parts; ++p)
    if (loads.fullness(p, load) < loads.fullness(best, load)) best = p;
  return best;
}

// Places clusters from the largest to the smallest: in the part with most links beyond chance, among parts with room.
Placement place(const ClusterGraph& graph, const Loads& limits, uint64_t key) {
  constexpr uint16_t kNowhere = UINT16_MAX;
  Placement placed{std::vector<uint16_t>(size_t(graph.num_clusters), kNowhere), limits};
  std::vector<int64_t> order(static_cast<size_t>(graph.num_clusters)), ranks = graph.sizes;
  std::iota(order.begin(), order.end(), 0);
  for (int64_t c = 0; c < graph.num_clusters; ++c)
    if (key)
      ranks[size_t(c)] = int64_t(double(ranks[size_t(c)]) * (0.5 + double(mix(key, uint64_t(c)) >> 40) * 0x1p-24));
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return ranks[size_t(a)] > ranks[size_t(b)]; });
  std::vector<double> volumes(static_cast<size_t>(limits.num_parts));
  const double total = double(std::accumulate(graph.weights.begin(), graph.weights.end(), int64_t(0))) + 1;
  Sums sums(limits.num_parts);
  for (int64_t c : order) {
    const int64_t* load = &graph.loads[size_t(c * graph.num_kinds)];
    int64_t volume = 0;
    each_link(graph, c, [&](uint32_t end, int32_t weight) {
      volume += weight;
      if (placed.parts[end] != kNowhere) sums.add(placed.parts[end], weight);
    });
    int64_t best = -1;
    double best_gain = 0, best_fullness = 0;
    for (int64_t p = 0; p < limits.num_parts; ++p) {
      if (!placed.loads.has_room(p, load)) continue;
      const double gain = double(sums.of(uint32_t(p))) - double(volume) * volumes[size_t(p)] / total;
      const double fullness = placed.loads.fullness(p, load);
      if (best < 0 || gain > best_gain || (gain == best_gain && fullness < best_fullness))
        best = p, best_gain = gain, best_fullness = fullness;
    }
    if (best < 0) best = emptiest(placed.loads, load);
    sums.clear();
    volumes[size_t(best)] += double(volume);
    placed.loads.add(best, load);
    placed.parts[size_t(c)] = uint16_t(best);
  }
  return placed;
}

// Moves clusters to the part they have most links to, or out of a part that is too full.
void refine(const ClusterGraph& graph, Placement& placed) {
  Sums sums(placed.loads.num_parts);
  for (int pass = 0; pass < kPasses; ++pass) {
    int64_t moves = 0;
    for (int64_t c = 0; c < graph.num_clusters; ++c) {
      const int64_t* load = &graph.loads[size_t(c * graph.num_kinds)];
      const uint16_t own = placed.parts[size_t(c)];
      each_link(graph, c, [&](uint32_t end, int32_t weight) { sums.add(placed.parts[end], weight); });
      const bool over = placed.loads.is_over(own, load);
      int64_t best = own;
      for (int64_t p = 0; p < placed.loads.num_parts && over; ++p)  // any part with room is better
        if (p != own && placed.loads.has_room(p, load) &&
            (best == own || sums.of(uint32_t(p)) > sums.of(uint32_t(best))))
          best = p;
      for (uint32_t p : sums.touched())
        if (!over && sums.of(p) > sums.of(uint32_t(best)) && placed.loads.has_room(p, load)) best = p;
      sums.clear();
      if (best == own) continue;
      placed.loads.add(own, load, -1);
      placed.loads.add(best, load);
      placed.parts[size_t(c)] = uint16_t(best);
      ++moves;
    }
    if (moves == 0) return;
  }
}

// The objective: links cut, plus excess loads priced by the total of links.
double cost(const ClusterGraph& graph, const Placement& placed) {
  double cut = 0, total = 0, excess = 0;
  for (int64_t c = 0; c < graph.num_clusters; ++c)
    each_link(graph, c, [&](uint32_t end, int32_t weight) {
      total += weight;
      if (placed.parts[end] != placed.parts[size_t(c)]) cut += weight;
    });
  const std::vector<int64_t> nothing(size_t(graph.num_kinds), 0);
  for (int64_t p = 0; p < placed.loads.num_parts; ++p)
    excess += std::max(0.0, placed.loads.fullness(p, nothing.data()) - 1);
  return cut + excess * total;
}

Placement best_of_several(const ClusterGraph& graph, const Loads& limits, uint64_t key) {
  const int tries = graph.num_clusters * limits.num_parts < 4'000'000 ? kTries : 1;
  Placement best = place(graph, limits, 0);
  refine(graph, best);
  double lowest = cost(graph, best);
  for (int attempt = 1; attempt < tries; ++attempt) {
    Placement other = place(graph, limits, mix(key, uint64_t(attempt)) | 1);
    refine(graph, other);
    const double found = cost(graph, other);
    if (found < lowest) best = std::move(other), lowest = found;
  }
  return best;
}

}  // namespace

double Loads::fullness(int64_t part, const int64_t* load) const {
  double fullest = 0;
  for (int64_t k = 0; k < num_kinds; ++k) {
    const int64_t sum = held[size_t(part * num_kinds + k)] + load[k];
    if (sum > 0) fullest = std::max(fullest, double(sum) / double(std::max<int64_t>(1, most[size_t(k)])));
  }
  return fullest;
}

void merge_links(std::vector<Link>& links) {
  const auto ends = [](const Link& link) { return uint64_t(link.a) << 32 | link.b; };
  std::sort(links.begin(), links.end(), [&](const Link& x, const Link& y) { return ends(x) < ends(y); });
  size_t kept = 0;
  for (const Link& link : links)
    if (kept && ends(links[kept - 1]) == ends(link)) links[kept - 1].weight += link.weight;
    else links[kept++] = link;
  links.resize(kept);
}

ClusterGraph cluster_graph(std::vector<int64_t> loads, std::vector<int64_t> sizes, int64_t num_kinds,
                           std::vector<Link>& links) {
  merge_links(links);
  ClusterGraph graph{int64_t(sizes.size()), num_kinds, std::move(loads), std::move(sizes), {}, {}, {}};
  graph.indptr.assign(size_t(graph.num_clusters) + 1, 0);
  for (const Link& link : links) ++graph.indptr[link.a + 1], ++graph.indptr[link.b + 1];
  std::partial_sum(graph.indptr.begin(), graph.indptr.end(), graph.indptr.begin());
  graph.ends.resize(2 * links.size());
  graph.weights.resize(2 * links.size());
  std::vector<int64_t> cursor(graph.indptr.begin(), graph.indptr.end() - 1);
  for (const Link& link : links)
    for (const auto& [from, to] : {std::pair(link.a, link.b), std::pair(link.b, link.a)}) {
      const size_t at = size_t(cursor[from]++);
      graph.ends[at] = to;
      graph.weights[at] = link.weight;
    }
  links = {};
  return graph;
}

std::vector<uint16_t> place_clusters(ClusterGraph graph, const Loads& limits, uint64_t key) {
  const int64_t total = std::accumulate(graph.sizes.begin(), graph.sizes.end(), int64_t(0));
  const int64_t largest = total / (limits.num_parts * kCuts);
  std::vector<ClusterGraph> levels;
  std::vector<std::vector<uint32_t>> maps;
  levels.push_back(std::move(graph));
  while (levels.back().num_clusters > kCoarse * limits.num_parts) {
    auto labels = merge(levels.back(), largest);
    const int64_t count = number(labels);
    if (count > levels.back().num_clusters * 9 / 10) break;
    levels.push_back(contract(levels.back(), labels, count));
    maps.push_back(std::move(labels));
  }
  Placement placed = best_of_several(levels.back(), limits, key);
  while (!maps.empty()) {
    std::vector<uint16_t> finer;
    finer.reserve(maps.back().size());
    for (uint32_t label : maps.back()) finer.push_back(placed.parts[label]);
    placed.parts = std::move(finer);
    maps.pop_back();
    levels.pop_back();
    refine(levels.back(), placed);
  }
  return std::move(placed.parts);
}

}  // namespace hoploom
