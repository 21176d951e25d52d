// The core again, written to be read: sets, maps and full sorts, one draw at a time. Slow.
#pragma once
#include <cstdint>
#include <map>
#include <ostream>
#include <utility>
#include <vector>

#include "../buffers.h"
#include "../sample.h"

namespace hoploom::test {

template <typename T>
std::vector<T> values_of(const Buffer& buffer) {
  const T* begin = buffer.as<T>();
  return buffer.size() ? std::vector<T>(begin, begin + buffer.size() / sizeof(T)) : std::vector<T>();
}

struct PickLists {
  std::vector<int64_t> counts, sources, edges;
  bool operator==(const PickLists&) const = default;
};
PickLists lists_of(const Picks& picks);
std::ostream& operator<<(std::ostream& text, const PickLists& picks);

// Lists are taken to be in time order.
PickLists naive_sample(const Adjacency& adjacency, const EdgeColumns& columns, const Frontier& frontier,
                       const Rule& rule);

int64_t source_at(const Adjacency& adjacency, int64_t position);

// (tree, node) to local id, in order of first sight.
struct NaiveMap {
  std::vector<int64_t> nodes, trees;
  std::map<std::pair<int64_t, int64_t>, int32_t> local;

  void add_seeds(const std::vector<int64_t>& seeds, const std::vector<int64_t>& seed_trees = {});
  std::vector<int32_t> add(const std::vector<int64_t>& sources, const std::vector<int64_t>& counts,
                           const std::vector<int64_t>& frontier_trees = {});
};

struct Edge {
  int64_t source, destination, position;
};
// Edges by destination, then by time if times are given, then as they came.
std::vector<Edge> naive_csc(const std::vector<int64_t>& sources, const std::vector<int64_t>& destinations,
                            const std::vector<int64_t>& edge_time = {});

}  // namespace hoploom::test
