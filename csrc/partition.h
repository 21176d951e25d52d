// Assigns nodes to parts: few edges between parts, balanced loads. Reads the edges several times, and takes at most 24
// bytes per node beside 200 MB for graphs of any size; for that, the cut is not the best possible. The parts do not
// depend on the number of threads.
#pragma once
#include <cstdint>

#include "lists.h"

namespace hoploom {

constexpr int64_t kMostParts = INT16_MAX;
constexpr int64_t kMostNodes = (int64_t(1) << 40) - 2;

struct PartitionRule {
  int64_t num_parts;
  int passes;        // refinement passes, each over every edge; at least one, which places nodes outside all clusters
  double imbalance;  // allowed excess over the mean load of a part
  int threads;
  uint64_t key;
  bool wide_ids = false;  // for tests: store ids as if the graph had more than 2^32 nodes
};

// parts: [num_nodes]. seed_bits: [num_nodes / 8 + 1], a bit for each node that counts as a seed; or null.
void assign_parts(const Topology& topology, const uint8_t* seed_bits, const PartitionRule& rule, int16_t* parts);

// cut: [number of relations]; the number of edges between different parts is added.
void count_cut(const Topology& topology, const int16_t* parts, int threads, int64_t* cut);

// Propagates the visits of one hop from nodes to the sources of their in-edges. new_visits: [num_nodes] first visits by
// a batch in the previous hop. fanouts: [number of relations], -1: all. visits: [num_nodes], the new ones are added.
void spread_visits(const Topology& topology, const float* new_visits, const int64_t* fanouts, int threads,
                   int64_t* visits);

}  // namespace hoploom
