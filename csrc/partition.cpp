#include "partition.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>

#include "clusters.h"
#include "labels.h"
#include "random.h"
#include "refine.h"

namespace hoploom {
namespace {

constexpr int64_t kBlocks = 256;         // more blocks: decisions see newer labels; fewer: threads wait less
constexpr int64_t kLeastBlock = 16;      // nodes
constexpr int64_t kClustersPerPart = 8;  // at least
constexpr int64_t kFewMoves = 1000;      // stop after a pass that moves fewer than one node in this many
constexpr int64_t kMostVisits = int64_t(1) << 61;
// Bytes per node beside labels and parts; small graphs may take more.
constexpr int64_t kSmallGraph = 4 << 20;                    // nodes
constexpr int64_t kLabelSamples = 14, kRefineSamples = 18;  // of out-edges
constexpr int64_t kSmallSamples = 32;                       // of out-edges, in a small graph
constexpr int64_t kLinkShare = 2;                           // nodes per link between clusters
constexpr int64_t kClusterBytes = 4;

std::vector<int64_t> total_load(const Graph& graph) {
  std::vector<int64_t> total(size_t(graph.num_kinds())), load(total.size());
  graph.each_degree([&](int64_t v, int64_t degree, const Block& block) {
    graph.load_of(block.type, v, degree, load.data());
    for (size_t k = 0; k < total.size(); ++k) total[k] += load[k];
  });
  return total;
}

Loads limits_of(const Graph& graph, const std::vector<int64_t>& total, const PartitionRule& rule) {
  Loads limits{rule.num_parts, graph.num_kinds(), {}, std::vector<int64_t>(size_t(rule.num_parts * graph.num_kinds()))};
  for (int64_t sum : total) {
    const int64_t mean = (sum + rule.num_parts - 1) / rule.num_parts;
    const double most = double(sum) / double(rule.num_parts) * (1 + rule.imbalance);
    limits.most.push_back(std::max(mean + 1, int64_t(std::min(most, double(sum)))));
  }
  return limits;
}

// Returns the bytes of out-edges that are kept for a graph of this size.
int64_t sample_bytes(int64_t num_nodes, int64_t per_node) {
  return std::max(num_nodes * per_node, std::min(num_nodes, kSmallGraph) * kSmallSamples);
}

// Numbers the clusters from 1 without gaps; 0: no cluster. Single nodes are in no cluster; if there are too many
// clusters, the smallest are dropped. Returns the number of clusters plus one.
int64_t number_clusters(IdArray& labels, int64_t most, uint64_t largest_id) {
  IdArray numbers(labels.size(), largest_id);
  for (int64_t v = 0; v < labels.size(); ++v) numbers.set(int64_t(labels[v]), numbers[int64_t(labels[v])] + 1);
  std::vector<int64_t> by_size(1024);
  for (int64_t label = 0; label < numbers.size(); ++label) ++by_size[std::min<uint64_t>(numbers[label], 1023)];
  uint64_t least = 1024;
  for (int64_t count = 0; least > 2 && count + by_size[least - 1] <= most; --least) count += by_size[least - 1];
  int64_t count = 1;
  for (int64_t label = 0; label < numbers.size(); ++label)
    numbers.set(label, numbers[label] >= least && count < int64_t(UINT32_MAX) ? uint64_t(count++) : 0);
  for (int64_t v = 0; v < labels.size(); ++v) labels.set(v, numbers[int64_t(labels[v])]);
  return count;
}

// Visits a share `rate` of a list's edges, at equal distances.
template <typename Take>
void sample_span(Span span, double rate, uint64_t word, Take take) {
  const double chance = double(word >> 11) * 0x1p-53;
  const int64_t count = rate >= 1 ? span.size() : int64_t(double(span.size()) * rate + chance);
  const int64_t offset = span.size() ? int64_t(word % uint64_t(span.size())) : 0;
  for (int64_t i = 0; i < count; ++i) take(span.begin + (i * span.size() + offset) / count);
}

// The sums of links of a limited number of pairs. Beyond the limit, the pairs with the greatest hashes are dropped, so
// that the result does not depend on the order.
class LinkSums {
 public:
  explicit LinkSums(int64_t most) : most_(size_t(most)) { links_.reserve(2 * most_); }
  void add(const std::vector<Link>& some) {
    if (links_.size() + some.size() > 2 * most_) shrink();
    for (const Link& link : some)
      if (hash(link) <= limit_) links_.push_back(link);
  }
  std::vector<Link> take() {
    shrink();
    links_.shrink_to_fit();
    return std::move(links_);
  }

 private:
  static uint64_t hash(const Link& link) { return mix(link.a, link.b); }
  void shrink() {
    merge_links(links_);
    while (links_.size() > most_) {
      limit_ /= 2;
      std::erase_if(links_, [&](const Link& link) { return hash(link) > limit_; });
    }
  }
  size_t most_;
  uint64_t limit_ = UINT64_MAX;
  std::vector<Link> links_;
};

// Returns the links between clusters, from about as many edges as there are nodes.
std::vector<Link> sample_links(const Graph& graph, const IdArray& clusters, uint64_t key) {
  Faults faults;
  const int64_t num_nodes = graph.topology.num_nodes();
  const double rate = double(num_nodes) / double(std::max<int64_t>(1, graph.topology.num_edges()));
  LinkSums sums(std::max(std::min(num_nodes, kSmallGraph), num_nodes / kLinkShare));
  std::vector<std::vector<Link>> found(graph.readers.size());
  for (const Block& block : graph.blocks) {
    graph.share_out(block, [&](int thread, PieceReader& reader, int64_t first, int64_t end) {
      for (int64_t v = first; v < end; ++v) {
        const auto own = uint32_t(clusters[v]);
        for (ListReader& lists : reader.lists) {
          if (own == 0) break;
          const uint64_t word = mix(mix(key, uint64_t(v)), uint64_t(lists.lists().relation));
          sample_span(lists.span_of(v, faults), rate, word, [&](int64_t at) {
            lists.each_source(v, {at, at + 1}, faults, [&](int64_t source) {
              const auto other = uint32_t(clusters[source]);
              if (other != 0 && other != own)
                found[size_t(thread)].push_back({std::min(own, other) - 1, std::max(own, other) - 1, 1});
            });
          });
        }
      }
    });
    for (auto& some : found) {
      sums.add(some);
      some.clear();
    }
  }
  faults.raise();
  return sums.take();
}

ClusterGraph graph_of_clusters(const Graph& graph, const IdArray& clusters, int64_t count, const Sizes& sizes,
                               uint64_t key) {
  const size_t kinds = size_t(graph.num_kinds());
  std::vector<int64_t> loads(size_t(count) * kinds), held(static_cast<size_t>(count)), load(kinds);
  graph.each_degree([&](int64_t v, int64_t degree, const Block& block) {
    const uint64_t number = clusters[v];
    if (number == 0) return;
    graph.load_of(block.type, v, degree, load.data());
    for (size_t k = 0; k < kinds; ++k) loads[(number - 1) * kinds + k] += load[k];
    held[number - 1] += sizes.of(load[kinds - 2], load[kinds - 1] != 0);
  });
  auto links = sample_links(graph, clusters, key);
  return cluster_graph(std::move(loads), std::move(held), int64_t(kinds), links);
}

// Places the nodes of clusters; other nodes get part `num_parts`, which means none. Leaves out samples that are small.
void first_parts(const Graph& graph, std::optional<OutSamples>& out, const std::vector<int64_t>& total,
                 const Loads& limits, uint64_t key, int16_t* parts) {
  const int64_t num_nodes = graph.topology.num_nodes(), num_edges = graph.topology.num_edges();
  const Sizes sizes{num_edges / num_nodes + 1, num_edges / std::max<int64_t>(1, total.back())};
  const int64_t whole = num_nodes * sizes.per_node + num_edges + total.back() * sizes.per_seed;
  const int64_t largest = whole / (limits.num_parts * kClustersPerPart);
  out.emplace(graph, key, sample_bytes(num_nodes, kLabelSamples));
  IdArray clusters = propagate_labels(graph, *out, sizes, whole, largest, key);
  if (num_nodes > kSmallGraph) out.reset();
  const int64_t most = num_nodes * kClusterBytes / (8 * (graph.num_kinds() + 2));
  const int64_t count = number_clusters(clusters, std::max(kSmallGraph / 2, most), graph.largest_id) - 1;
  const auto placed = place_clusters(graph_of_clusters(graph, clusters, count, sizes, key), limits, key);
  for (int64_t v = 0; v < num_nodes; ++v)
    parts[v] = int16_t(clusters[v] == 0 ? limits.num_parts : placed[clusters[v] - 1]);
}

// Gives every part at least one node.
void fill_empty(int16_t* parts, int64_t num_nodes, int64_t num_parts) {
  std::vector<int64_t> counts(static_cast<size_t>(num_parts));
  for (int64_t v = 0; v < num_nodes; ++v) ++counts[size_t(parts[v])];
  int64_t empty = 0;
  for (int64_t v = 0; v < num_nodes; ++v) {
    while (empty < num_parts && counts[size_t(empty)] > 0) ++empty;
    if (empty == num_parts) return;
    if (counts[size_t(parts[v])] == 1) continue;
    --counts[size_t(parts[v])];
    ++counts[size_t(empty)];
    parts[v] = int16_t(empty);
  }
}

}  // namespace

void assign_parts(const Topology& topology, const uint8_t* seed_bits, const PartitionRule& rule, int16_t* parts) {
  const int64_t num_nodes = topology.num_nodes();
  const int64_t num_blocks = std::clamp<int64_t>(num_nodes / kLeastBlock, 1, kBlocks);
  const Graph graph{topology, blocks_of(topology, num_blocks), seed_bits,
                    rule.wide_ids ? uint64_t(UINT32_MAX) + 1 : uint64_t(num_nodes),
                    std::vector<PieceReader>(size_t(rule.threads))};
  if (num_nodes == 0) return;
  const auto total = total_load(graph);
  const Loads limits = limits_of(graph, total, rule);
  std::optional<OutSamples> out;
  first_parts(graph, out, total, limits, rule.key, parts);
  if (!out) out.emplace(graph, rule.key, sample_bytes(num_nodes, kRefineSamples));
  Refinement refinement(graph, *out, limits, parts);
  for (int pass = 0; pass < rule.passes; ++pass)
    if (refinement.pass(mix(rule.key, uint64_t(pass))) <= num_nodes / kFewMoves && pass > 0) break;
  refinement.relieve();
  fill_empty(parts, num_nodes, rule.num_parts);
}

void count_cut(const Topology& topology, const int16_t* parts, int threads, int64_t* cut) {
  Faults faults;
  std::vector<PieceReader> readers(static_cast<size_t>(threads));
  for (const Block& block : blocks_of(topology, kBlocks))
    share_out(topology, block, readers, [&](int, PieceReader& reader, int64_t first, int64_t end) {
      for (ListReader& lists : reader.lists) {
        int64_t found = 0;
        for (int64_t v = first; v < end; ++v)
          lists.each_source(v, lists.span_of(v, faults), faults,
                            [&](int64_t source) { found += parts[source] != parts[v]; });
        std::atomic_ref(cut[lists.lists().relation]).fetch_add(found, std::memory_order_relaxed);
      }
    });
  faults.raise();
}

void spread_visits(const Topology& topology, const float* new_visits, const int64_t* fanouts, int threads,
                   int64_t* visits) {
  Faults faults;
  std::vector<PieceReader> readers(static_cast<size_t>(threads));
  for (const Block& block : blocks_of(topology, kBlocks))
    share_out(topology, block, readers, [&](int, PieceReader& reader, int64_t first, int64_t end) {
      for (ListReader& lists : reader.lists) {
        const int64_t fanout = fanouts[lists.lists().relation];
        for (int64_t v = first; v < end; ++v) {
          const Span span = lists.span_of(v, faults);
          const double share =
              fanout < 0 ? 1.0 : std::min(1.0, double(fanout) / double(std::max<int64_t>(1, span.size())));
          const auto amount = int64_t(std::nearbyint(double(new_visits[v]) * share));
          if (amount == 0) continue;
          lists.each_source(v, span, faults, [&](int64_t source) {
            std::atomic_ref sum(visits[source]);
            if (sum.fetch_add(amount, std::memory_order_relaxed) > kMostVisits - amount)
              sum.store(kMostVisits, std::memory_order_relaxed);
          });
        }
      }
    });
  faults.raise();
}

}  // namespace hoploom
