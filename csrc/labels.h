// Clusters of nodes by label propagation over samples of the edges: a label per node, no cluster too large.
#pragma once
#include <cstdint>
#include <vector>

#include "buffers.h"
#include "lists.h"

namespace hoploom {

// Zeroes at first, in large pages: they are read in random order.
template <typename T>
class ZeroedArray {
 public:
  explicit ZeroedArray(int64_t size) : size_(size), pages_(size_t(size) * sizeof(T)) {}
  T& operator[](int64_t at) const { return pages_.as<T>()[at]; }
  T* begin() const { return pages_.as<T>(); }
  T* end() const { return begin() + size_; }
  int64_t size() const { return size_; }

 private:
  int64_t size_;
  ZeroedPages pages_;
};

// A few out-edges of those nodes that have few in-edges: without them nothing would tell where they belong.
class OutSamples {
 public:
  static constexpr int64_t kEnough = 8;  // in-edges
  static constexpr int kKept = 8;        // out-edges
  static constexpr uint32_t kNone = UINT32_MAX;

  OutSamples(const Topology& topology, const std::vector<Block>& blocks, uint64_t key, int threads);
  // take(destination)
  template <typename Take>
  void each(int64_t node, Take take) const {
    if (rows_.empty() || rows_[size_t(node)] == kNone) return;
    const uint32_t* ends = &ends_[size_t(rows_[size_t(node)]) * kKept];
    for (int i = 0; i < kKept; ++i)
      if (ends[i] != kNone) take(int64_t(ends[i]));
  }

 private:
  void keep(uint32_t source, uint32_t destination);
  std::vector<uint32_t> rows_;  // [num_nodes], or empty if no node needs it
  std::vector<uint32_t> ends_;  // [rows, kKept]
  uint64_t key_;
};

// What a node adds to the size of its cluster: itself, its in-edges and its being a seed, each kind with equal sums.
struct Sizes {
  int64_t per_node, per_seed;  // in edges
  int64_t of(int64_t degree, bool is_seed) const { return per_node + degree + (is_seed ? per_seed : 0); }
};

// [num_nodes] labels: node ids; a cluster is those of one label.
ZeroedArray<uint32_t> propagate_labels(const std::vector<Block>& blocks, const OutSamples& out, const uint8_t* is_seed,
                                       const Sizes& sizes, int64_t largest, uint64_t key, int threads);

}  // namespace hoploom
