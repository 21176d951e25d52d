#include "partition.h"

#include <algorithm>
#include <atomic>

#include "clusters.h"
#include "labels.h"
#include "random.h"
#include "refine.h"

namespace hoploom {
namespace {

constexpr int64_t kBlocks = 256;         // more of them: decisions on newer labels; fewer: less waiting for threads
constexpr int64_t kLeastBlock = 16;      // nodes
constexpr int64_t kPiece = 256;          // nodes that a thread takes at a time
constexpr int64_t kClustersPerPart = 8;  // at least
constexpr int64_t kFewMoves = 1000;      // a pass that moves less than one in so many nodes is the last
constexpr uint32_t kNoCluster = UINT32_MAX;

std::vector<int64_t> total_load(const Graph& graph) {
  Faults faults;
  std::vector<int64_t> total(size_t(graph.num_kinds())), load(total.size());
  for (const Block& block : graph.blocks) {
    for (int64_t v = block.first; v < block.end; ++v) {
      graph.load_of(block, v, faults, load.data());
      for (size_t k = 0; k < total.size(); ++k) total[k] += load[k];
    }
    let_go(block, block.first, block.end);
  }
  faults.raise();
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

// Labels become numbers without gaps; the label of a node on its own becomes kNoCluster. Returns how many there are.
int64_t number_clusters(ZeroedArray<uint32_t>& labels) {
  ZeroedArray<uint32_t> numbers(labels.size());  // zeroed
  for (uint32_t label : labels) ++numbers[label];
  uint32_t count = 0;
  for (uint32_t& number : numbers) number = number > 1 ? count++ : kNoCluster;
  for (uint32_t& label : labels) label = numbers[label];
  return count;
}

// Of a list's edges a share `rate`, at equal distances.
template <typename Take>
void sample_span(Span span, double rate, uint64_t word, Take take) {
  const double chance = double(word >> 11) * 0x1p-53;
  const int64_t count = rate >= 1 ? span.size() : int64_t(double(span.size()) * rate + chance);
  const int64_t offset = span.size() ? int64_t(word % uint64_t(span.size())) : 0;
  for (int64_t i = 0; i < count; ++i) take(span.begin + (i * span.size() + offset) / count);
}

// The edges between clusters, of about as many edges as there are nodes.
std::vector<Link> sample_links(const Graph& graph, const ZeroedArray<uint32_t>& clusters, uint64_t key) {
  Faults faults;
  const double rate = double(graph.topology.num_nodes()) / double(std::max<int64_t>(1, graph.topology.num_edges()));
  std::vector<std::vector<Link>> found(graph.blocks.size());
  share_out(0, int64_t(graph.blocks.size()), 1, graph.threads, [&](int, int64_t number, int64_t) {
    const Block& block = graph.blocks[size_t(number)];
    for (int64_t v = block.first; v < block.end; ++v) {
      for (const InLists* lists : block.lists) {
        const uint32_t own = clusters[v];
        if (own == kNoCluster) break;
        const uint64_t word = mix(mix(key, uint64_t(v)), uint64_t(lists->relation));
        sample_span(span_of(*lists, v, faults), rate, word, [&](int64_t at) {
          read_sources(*lists, v, {at, at + 1}, faults, [&](int64_t source) {
            const uint32_t other = clusters[source];
            if (other != kNoCluster && other != own)
              found[size_t(number)].push_back({std::min(own, other), std::max(own, other), 1});
          });
        });
      }
      if ((v - block.first) % kPiece == kPiece - 1) let_go(block, v + 1 - kPiece, v + 1, kMany);
    }
    let_go(block, block.first, block.end);
  });
  faults.raise();
  std::vector<Link> links;
  for (auto& some : found) {
    links.insert(links.end(), some.begin(), some.end());
    some = {};
  }
  return links;
}

ClusterGraph graph_of_clusters(const Graph& graph, const ZeroedArray<uint32_t>& clusters, int64_t count,
                               const Sizes& sizes, uint64_t key) {
  Faults faults;
  const size_t kinds = size_t(graph.num_kinds());
  std::vector<int64_t> loads(size_t(count) * kinds), held(static_cast<size_t>(count)), load(kinds);
  for (const Block& block : graph.blocks) {
    for (int64_t v = block.first; v < block.end; ++v) {
      const uint32_t own = clusters[v];
      if (own == kNoCluster) continue;
      graph.load_of(block, v, faults, load.data());
      for (size_t k = 0; k < kinds; ++k) loads[own * kinds + k] += load[k];
      held[own] += sizes.of(load[kinds - 2], load[kinds - 1] != 0);
    }
    let_go(block, block.first, block.end);
  }
  auto links = sample_links(graph, clusters, key);
  return cluster_graph(std::move(loads), std::move(held), int64_t(kinds), links);
}

// The parts of the clusters' nodes; the others have none yet.
ZeroedArray<int16_t> first_parts(const Graph& graph, const OutSamples& out, const std::vector<int64_t>& total,
                                 const Loads& limits, uint64_t key) {
  const int64_t num_nodes = graph.topology.num_nodes(), num_edges = graph.topology.num_edges();
  const Sizes sizes{num_edges / num_nodes + 1, num_edges / std::max<int64_t>(1, total.back())};
  const int64_t whole = num_nodes * sizes.per_node + num_edges + total.back() * sizes.per_seed;
  const int64_t largest = whole / (limits.num_parts * kClustersPerPart);
  auto clusters = propagate_labels(graph.blocks, out, graph.is_seed, sizes, largest, key, graph.threads);
  const int64_t count = number_clusters(clusters);
  const auto placed = place_clusters(graph_of_clusters(graph, clusters, count, sizes, key), limits, key);
  ZeroedArray<int16_t> parts(num_nodes);
  for (int64_t v = 0; v < num_nodes; ++v)
    parts[v] = int16_t(clusters[v] == kNoCluster ? limits.num_parts : placed[clusters[v]]);
  return parts;
}

// Every part gets a node.
void fill_empty(ZeroedArray<int16_t>& parts, int64_t num_parts) {
  std::vector<int64_t> counts(static_cast<size_t>(num_parts));
  for (int16_t part : parts) ++counts[size_t(part)];
  int64_t empty = 0;
  for (int64_t v = 0; v < parts.size(); ++v) {
    while (empty < num_parts && counts[size_t(empty)] > 0) ++empty;
    if (empty == num_parts) return;
    if (counts[size_t(parts[v])] == 1) continue;
    --counts[size_t(parts[v])];
    ++counts[size_t(empty)];
    parts[v] = int16_t(empty);
  }
}

}  // namespace

void assign_parts(const Topology& topology, const uint8_t* is_seed, const PartitionRule& rule, int16_t* parts) {
  const int64_t num_nodes = topology.num_nodes();
  const int64_t num_blocks = std::clamp<int64_t>(num_nodes / kLeastBlock, 1, kBlocks);
  const Graph graph{topology, blocks_of(topology, num_blocks), is_seed, rule.threads};
  if (num_nodes == 0) return;
  const auto total = total_load(graph);
  const Loads limits = limits_of(graph, total, rule);
  const OutSamples out(topology, graph.blocks, rule.key, rule.threads);
  ZeroedArray<int16_t> found = first_parts(graph, out, total, limits, rule.key);
  Refinement refinement(graph, out, limits, found);
  for (int pass = 0; pass < rule.passes; ++pass)
    if (refinement.pass(mix(rule.key, uint64_t(pass))) <= num_nodes / kFewMoves && pass > 0) break;
  refinement.relieve();
  fill_empty(found, rule.num_parts);
  std::copy(found.begin(), found.end(), parts);
}

void count_cut(const Topology& topology, const int16_t* parts, int threads, int64_t* cut) {
  Faults faults;
  for (const Block& block : blocks_of(topology, kBlocks)) {
    share_out(block.first, block.end, kPiece, threads, [&](int, int64_t first, int64_t end) {
      for (const InLists* lists : block.lists) {
        int64_t found = 0;
        for (int64_t v = first; v < end; ++v)
          read_sources(*lists, v, span_of(*lists, v, faults), faults,
                       [&](int64_t source) { found += parts[source] != parts[v]; });
        std::atomic_ref(cut[lists->relation]).fetch_add(found, std::memory_order_relaxed);
      }
      let_go(block, first, end, kMany);
    });
    let_go(block, block.first, block.end);
  }
  faults.raise();
}

}  // namespace hoploom
