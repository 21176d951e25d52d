// HGT sampling: how much the nodes next to a batch weigh, and which of them join it.
// Gives up a hash per edge, and 32 bytes per node, for memory by what a batch reaches, not by what there is.
#pragma once
#include <cstdint>
#include <vector>

#include "alone.h"
#include "buffers.h"
#include "idmap.h"

namespace hoploom {

// The nodes of one type that one batch may still draw. For one thread at a time, as maps are.
class NodeBudget {
 public:
  // Adds 1 / counts[i] to every source in the list of node i; not to those of the batch, whose `local` ids are not -1.
  // Sums are taken in the order of the lists: the same lists give the same bits.
  void add(const int64_t* sources, const int32_t* local, const int64_t* counts, int64_t frontier_size);
  // Takes out up to `count` nodes without replacement, in proportion to their squared sums, in the order drawn.
  Buffer draw(uint64_t key, uint32_t stream, int64_t count);

 private:
  Alone alone_;
  IdMap ids_;
  std::vector<double> sums_;  // by number; 0: drawn
};

}  // namespace hoploom
