// Nodes to parts: few edges between parts, none too full. Reads the edges several times, and holds at most 24 bytes per
// node, beside 200 MB for graphs of any size. Gives up the best cut for that; the parts do not depend on the number of
// threads.
#pragma once
#include <cstdint>

#include "lists.h"

namespace hoploom {

constexpr int64_t kMostParts = INT16_MAX;
constexpr int64_t kMostNodes = (int64_t(1) << 40) - 2;

struct PartitionRule {
  int64_t num_parts;
  int passes;        // of refinement, each reads every edge; at least one, which places the nodes in no cluster
  double imbalance;  // how much more than the mean a part may hold of anything
  int threads;
  uint64_t key;
  bool wide_ids = false;  // for tests: store ids as if there were more than 2^32 nodes
};

// parts: [num_nodes]. seed_bits: [num_nodes / 8 + 1], a bit per node that a part's share of seeds counts; or null.
void assign_parts(const Topology& topology, const uint8_t* seed_bits, const PartitionRule& rule, int16_t* parts);

// cut: [number of relations], edges between different parts are added to.
void count_cut(const Topology& topology, const int16_t* parts, int threads, int64_t* cut);

// Carries the visits of one hop from nodes to the sources of their in-edges. new_visits: [num_nodes], those of the
// nodes that a batch reaches for the first time. fanouts: [number of relations], -1: all. visits: [num_nodes], added
// to.
void spread_visits(const Topology& topology, const float* new_visits, const int64_t* fanouts, int threads,
                   int64_t* visits);

}  // namespace hoploom
