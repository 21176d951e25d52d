// Nodes to parts: few edges between parts, none too full. Reads the edges from where they lie, several times, and
// remembers some numbers per node. Gives up the best cut for that; the parts do not depend on the number of threads.
#pragma once
#include <cstdint>

#include "lists.h"

namespace hoploom {

constexpr int64_t kMostParts = INT16_MAX;
constexpr int64_t kMostNodes = UINT32_MAX - 1;

struct PartitionRule {
  int64_t num_parts;
  int passes;        // of refinement, each reads every edge; at least one, which places the nodes in no cluster
  double imbalance;  // how much more than the mean a part may hold of anything
  int threads;
  uint64_t key;
};

// parts: [num_nodes]. is_seed: [num_nodes], not zero where a part's share of seeds counts it; or null.
void assign_parts(const Topology& topology, const uint8_t* is_seed, const PartitionRule& rule, int16_t* parts);

// cut: [number of relations], edges between different parts are added to.
void count_cut(const Topology& topology, const int16_t* parts, int threads, int64_t* cut);

}  // namespace hoploom
