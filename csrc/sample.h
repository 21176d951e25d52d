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
inline int64_t source_of(const Adjacency& a, int64_t position) {
  if (!a.indices) return 0;
  return a.wide_ids ? static_cast<const int64_t*>(a.indices)[position]
                    : static_cast<const int32_t*>(a.indices)[position];
}
inline Extent extent(const Adjacency& a, int64_t node) {
  const uint64_t row = uint64_t(node) - uint64_t(a.first_node);  // may wrap: no id is too low
  if (row >= uint64_t(a.num_nodes)) throw std::out_of_range("node " + std::to_string(node) + " is not in this part");
  const int64_t begin = a.indptr[row], end = a.indptr[row + 1];
  if (begin < 0 || end < begin || end > a.num_edges)
    throw std::out_of_range("indptr is damaged at node " + std::to_string(node));
  return {begin, end - begin};
}

// The times of edges by position, if there are any: of the edge itself, or of its source.
class EdgeTimes {
 public:
  EdgeTimes(const Adjacency& a, const EdgeColumns& c) : a_(a), c_(c) {}
  explicit operator bool() const { return c_.edge_time || c_.source_time; }
  int64_t at(int64_t position) const {
    if (c_.edge_time) return c_.edge_time[position];
    const int64_t id = source_of(a_, position);
    if (uint64_t(id) >= uint64_t(c_.num_sources))
      throw std::out_of_range("source id " + std::to_string(id) + " is out of range");
    return c_.source_time[id];
  }
  // Fetches what the first two or three steps of a search read.
  void prefetch(Extent list) const {
    for (int64_t eighths : {1, 3, 5, 7}) {
      const int64_t position = list.begin + list.degree * eighths / 8;
      if (c_.edge_time) __builtin_prefetch(c_.edge_time + position);
      else __builtin_prefetch(static_cast<const char*>(a_.indices) + position * (a_.wide_ids ? 8 : 4));
    }
  }
  // Cuts `count` lists, each sorted by time, to the edges that are not later than their node's time `now`, and not
  // older than `window` allows. Searches all lists side by side, so that their cache misses overlap.
  void cut(int64_t window, int count, const int64_t* now, Extent* lists) const;

 private:
  void count_until(int count, const int64_t* until, const Extent* lists, int64_t* counts) const;

  const Adjacency& a_;
  const EdgeColumns& c_;
};

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
// The excluded positions of a rule, in buckets of equal width: most lists have none, which takes two looks to see.
class Exclusions {
 public:
  explicit Exclusions(const Rule& rule) : positions_(rule.excluded), size_(rule.num_excluded) {
    if (!size_) return;
    const uint64_t buckets = std::max(4 * uint64_t(size_), std::min<uint64_t>(16 * uint64_t(size_), 1 << 14));
    const uint64_t width = offset(positions_[size_ - 1]);
    while (width >> shift_ >= buckets) ++shift_;
    first_.resize((width >> shift_) + 2);
    size_t bucket = 0;
    for (int64_t i = 0; i < size_; ++i)
      for (const size_t own = offset(positions_[i]) >> shift_; bucket <= own; ++bucket) first_[bucket] = i;
    for (; bucket < first_.size(); ++bucket) first_[bucket] = size_;
  }
  // Returns those of the `population` positions from `first` on.
  Gaps of(int64_t first, int64_t population) const {
    const int64_t last = first + population - 1;
    if (!size_ || last < positions_[0] || first > positions_[size_ - 1] || last < first) return {positions_, 0, first};
    const size_t low = first <= positions_[0] ? 0 : offset(first) >> shift_;
    const size_t high = std::min<size_t>(offset(last) >> shift_, first_.size() - 2) + 1;
    if (first_[low] == first_[high]) return {positions_, 0, first};
    const int64_t* end = positions_ + first_[high];
    const int64_t* begin = std::lower_bound(positions_ + first_[low], end, first);
    return {begin, std::upper_bound(begin, end, last) - begin, first};
  }

 private:
  uint64_t offset(int64_t position) const { return uint64_t(position) - uint64_t(positions_[0]); }

  const int64_t* positions_;
  int64_t size_;
  int shift_ = 0;
  std::vector<int64_t> first_;  // by bucket: the index of the first position that is in it or behind it
};

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

constexpr int kLanes = 16;  // nodes, or lists, side by side
constexpr int64_t kVectorFanout = 64;
Picks sample_vector(const Adjacency& adjacency, const EdgeColumns& columns, const Frontier& frontier, const Rule& rule);

}  // namespace hoploom
