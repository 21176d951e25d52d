// Small graphs and frontiers that own their arrays.
#pragma once
#include <cstdint>
#include <vector>

#include "../random.h"
#include "../sample.h"

namespace hoploom::test {

struct Graph {
  std::vector<int64_t> indptr{0};
  std::vector<int64_t> sources;         // [num_edges]
  std::vector<int32_t> narrow_sources;  // the same ids in 32 bits
  int64_t first_node = 0, first_edge = 0;

  int64_t num_nodes() const { return int64_t(indptr.size()) - 1; }
  int64_t num_edges() const { return int64_t(sources.size()); }
  int64_t degree(int64_t node) const {
    return indptr[size_t(node - first_node) + 1] - indptr[size_t(node - first_node)];
  }
  void append(const std::vector<int64_t>& list) {
    for (int64_t source : list) sources.push_back(source), narrow_sources.push_back(int32_t(source));
    indptr.push_back(num_edges());
  }
  Adjacency adjacency(bool wide_ids = false) const {
    const void* indices = wide_ids ? static_cast<const void*>(sources.data()) : narrow_sources.data();
    return {indptr.data(), indices, wide_ids, num_nodes(), num_edges(), first_node, first_edge};
  }
};

// Node v links to v + 1 and v + 2.
inline Graph ring(int64_t num_nodes) {
  Graph graph;
  for (int64_t v = 0; v < num_nodes; ++v) graph.append({(v + 1) % num_nodes, (v + 2) % num_nodes});
  return graph;
}

// The lists have these lengths; sources are scattered over [0, num_sources).
inline Graph graph_of_degrees(const std::vector<int64_t>& degrees, int64_t num_sources) {
  Graph graph;
  for (int64_t degree : degrees) {
    std::vector<int64_t> list;
    for (int64_t i = 0; i < degree; ++i)
      list.push_back(int64_t(mix(uint64_t(graph.num_edges()), uint64_t(i)) % uint64_t(num_sources)));
    graph.append(list);
  }
  return graph;
}

inline Graph graph_of_equal_degrees(int64_t num_nodes, int64_t degree, int64_t num_sources) {
  return graph_of_degrees(std::vector<int64_t>(size_t(num_nodes), degree), num_sources);
}

// Zero (or `first`) to count - 1, in order.
inline std::vector<int64_t> counting(int64_t count, int64_t first = 0) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(first + i);
  return values;
}

// `count` pseudo-random values in [0, limit).
inline std::vector<int64_t> scattered(int64_t count, int64_t limit, uint64_t key = 7) {
  std::vector<int64_t> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = int64_t(mix(key, i) % uint64_t(limit));
  return values;
}

inline Frontier frontier_of(const std::vector<int64_t>& nodes, const std::vector<int64_t>* trees = nullptr,
                            const std::vector<int64_t>* times = nullptr) {
  return {nodes.data(), int64_t(nodes.size()), trees ? trees->data() : nullptr, times ? times->data() : nullptr};
}

inline Rule rule_of(int64_t fanout, bool replace = false) {
  return {0x0123456789ABCDEFull, 3u << 16 | 5u, fanout, replace, false, false};
}

}  // namespace hoploom::test
