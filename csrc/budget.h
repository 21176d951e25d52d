// HGT sampling: weights of the nodes next to a batch, and the draw of the nodes that join it.
// Costs a hash per edge and 32 bytes per reached node; memory does not depend on the size of the graph.
#pragma once
#include <cstdint>
#include <vector>

#include "alone.h"
#include "buffers.h"
#include "idmap.h"

namespace hoploom {

// Candidate nodes of one type for one batch. Not thread-safe, like the maps.
class NodeBudget {
 public:
  // Adds 1 / counts[i] to every source in list i, except to sources that are in the batch (`local` is not -1).
  // Adds in the order of the lists, so that equal lists give equal bits.
  void add(const int64_t* sources, const int32_t* local, const int64_t* counts, int64_t frontier_size);
  // Draws up to `count` nodes without replacement, in proportion to their squared sums; returns them in drawn order.
  Buffer draw(uint64_t key, uint32_t stream, int64_t count);

 private:
  Alone alone_;
  IdMap ids_;
  std::vector<double> sums_;  // by candidate; 0: already drawn
};

}  // namespace hoploom
