// One hop: for each node of a frontier, pick edges of its adjacency list.
// O(fanout) a node for uniform picks; O(degree) for weighted and LABOR ones.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "buffers.h"

namespace hoploom {

// In-edges of the nodes [first_node, first_node + num_nodes), grouped by destination.
struct Adjacency {
  const int64_t* indptr;  // [num_nodes + 1], positions within this part
  const void* indices;    // [num_edges] source ids, int32 or int64; null: all sources are 0
  bool wide_ids;
  int64_t num_nodes, num_edges;
  int64_t first_node, first_edge;
};

// Optional columns; null if the strategy does not use them.
struct EdgeColumns {
  const float* weight = nullptr;         // [num_edges]
  const int64_t* edge_time = nullptr;    // [num_edges], ascending within a list
  const int64_t* source_time = nullptr;  // [num_sources], lists ascending by it
  int64_t num_sources = 0;
};

struct Frontier {
  const int64_t* nodes;
  int64_t size;
  const int64_t* trees = nullptr;  // disjoint: the tree each node belongs to
  const int64_t* times = nullptr;  // temporal: later edges are skipped
};

struct Rule {
  uint64_t key;
  uint32_t stream;  // hop << 16 | relation
  int64_t fanout;   // -1: all
  bool replace, last, labor;
  int64_t window = -1;                // temporal: edges older than this before the node's time are skipped; -1: none
  const int64_t* excluded = nullptr;  // ascending positions in the store's CSC order, which are never picked
  int64_t num_excluded = 0;
};

struct Picks {
  Buffer counts;   // [frontier] int64
  Buffer sources;  // [picks] int64
  Buffer edges;    // [picks] int64 positions in the store's CSC order
};

Picks sample(const Adjacency& adjacency, const EdgeColumns& columns, const Frontier& frontier, const Rule& rule);

// --- used by both implementations ------------------------------------------------------------

// Returns the range of a list; checked, so that a damaged file cannot cause reads out of bounds.
struct Extent {
  int64_t begin, degree;
};
inline Extent extent(const Adjacency& a, int64_t node) {
  const uint64_t row = uint64_t(node) - uint64_t(a.first_node);  // may wrap: no id is too low
  if (row >= uint64_t(a.num_nodes)) throw std::out_of_range("node " + std::to_string(node) + " is not in this part");
  const int64_t begin = a.indptr[row], end = a.indptr[row + 1];
  if (begin < 0 || end < begin || end > a.num_edges)
    throw std::out_of_range("indptr is damaged at node " + std::to_string(node));
  return {begin, end - begin};
}

// The excluded positions of one list, or of a part of it that begins at `first`; all in the store's CSC order.
struct Gaps {
  const int64_t* positions;
  int64_t size, first;

  // Returns the offset from `first` of the edge that is number `rank` among those that are not excluded.
  int64_t offset_of(int64_t rank) const {
    int64_t low = 0, high = size;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (positions[middle] - first - middle <= rank) low = middle + 1;
      else high = middle;
    }
    return rank + low;
  }
};
inline Gaps gaps_of(const Rule& rule, int64_t first, int64_t population) {
  const int64_t* end = rule.excluded + rule.num_excluded;
  const int64_t* low = std::lower_bound(rule.excluded, end, first);
  return {low, std::lower_bound(low, end, first + population) - low, first};
}

struct Scratch {
  std::vector<int64_t> offsets;  // the picks of one node, positions within its list
  std::vector<float> weights;    // of a list with gaps
  std::vector<int64_t> table;    // Floyd's set for large fanouts
  std::vector<double> sums;
  std::vector<std::pair<double, int64_t>> races;
  std::vector<std::pair<uint64_t, int64_t>> ranks;
};

void pick_uniform(uint64_t key, int64_t node, uint32_t stream, int64_t population, int64_t fanout, bool replace,
                  Scratch& scratch);

// Returns the largest number of picks of a call, which is the capacity of the outputs.
int64_t most_picks(const Adjacency& adjacency, const Frontier& frontier, const Rule& rule);

constexpr int64_t kVectorFanout = 64;
Picks sample_vector(const Adjacency& adjacency, const Frontier& frontier, const Rule& rule);

}  // namespace hoploom
