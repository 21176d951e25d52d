// Clusters of nodes by label propagation over samples of the edges: a label per node, no cluster too large.
#pragma once
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "buffers.h"
#include "idarray.h"
#include "lists.h"

namespace hoploom {

// A graph, and what parts are balanced by.
struct Graph {
  const Topology& topology;
  std::vector<Block> blocks;
  const uint8_t* seed_bits;                  // a bit per node, or null
  uint64_t largest_id;                       // largest id that must be storable; tests set more than there are nodes
  mutable std::vector<PieceReader> readers;  // one per thread

  bool is_seed(int64_t node) const { return seed_bits && (seed_bits[node / 8] >> (node % 8) & 1); }
  int64_t num_kinds() const { return topology.num_types() + 2; }
  // Writes the load of a node: [num_kinds] nodes of each type, edges, seeds.
  void load_of(int64_t type, int64_t node, int64_t degree, int64_t* load) const;
  // Calls work(thread, reader, first, end) for the pieces of a block on all threads.
  template <typename Work>
  void share_out(const Block& block, Work work) const {
    hoploom::share_out(topology, block, readers, work);
  }
  // Calls work(node, degree, block) for every node, in order.
  template <typename Work>
  void each_degree(Work work) const {
    Faults faults;
    std::vector<int64_t> degrees;
    for (const Block& block : blocks) {
      degrees.resize(size_t(block.end - block.first));
      share_out(block, [&](int, PieceReader& reader, int64_t first, int64_t end) {
        for (int64_t v = first; v < end; ++v) degrees[size_t(v - block.first)] = reader.degree_of(v, faults);
      });
      for (int64_t v = block.first; v < block.end; ++v) work(v, degrees[size_t(v - block.first)], block);
    }
    faults.raise();
  }
};

// Some out-edges of nodes that have few in-edges, which would not tell their cluster.
class OutSamples {
 public:
  static constexpr int64_t kEnough = 8;  // in-edges
  static constexpr int64_t kMost = 8;    // out-edges of a node

  // Keeps as many edges of each node as fit `bytes`; at least one.
  OutSamples(const Graph& graph, uint64_t key, int64_t bytes);
  bool is_complete() const { return per_node_ == kMost; }
  // Calls take(destination) for the stored out-edges of a node.
  template <typename Take>
  void each(int64_t node, Take take) const {
    if (!has(node)) return;
    const int64_t first = row_of(node) * per_node_;
    for (int64_t i = first; i < first + per_node_; ++i)
      if (const uint64_t end = (*ends_)[i]) take(int64_t(end - 1));
  }

 private:
  bool has(int64_t node) const { return num_rows_ && (bits_[size_t(node / 64)] >> (node % 64) & 1); }
  int64_t row_of(int64_t node) const {
    const uint64_t before = bits_[size_t(node / 64)] & ((uint64_t(1) << (node % 64)) - 1);
    return int64_t(ranks_[size_t(node / 64)]) + __builtin_popcountll(before);
  }
  void keep(int64_t source, int64_t destination);

  std::vector<uint64_t> bits_;   // a bit per node: has few in-edges
  std::vector<uint64_t> ranks_;  // number of set bits before each word of bits
  int64_t num_rows_ = 0, per_node_ = kMost;
  std::optional<IdArray> ends_;  // [rows, per_node]: a destination plus one; 0: none
  std::vector<std::mutex> locks_;
  uint64_t key_;
};

// The weight of a node in its cluster: itself, its in-edges, and being a seed; each kind has the same total.
struct Sizes {
  int64_t per_node, per_seed;  // in units of edges
  int64_t of(int64_t degree, bool is_seed) const { return per_node + degree + (is_seed ? per_seed : 0); }
};

// Returns [num_nodes] labels, which are node ids: nodes with equal labels are a cluster. `whole` is the total weight.
IdArray propagate_labels(const Graph& graph, const OutSamples& out, const Sizes& sizes, int64_t whole, int64_t largest,
                         uint64_t key);

}  // namespace hoploom
